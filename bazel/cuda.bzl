"""cuda_library: .cu files, compiled by the toolkit's nvcc; an empty target where there is none."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load("@cuda//:defs.bzl", "CUDA_VERSION", "NVCC")

def _cuda_library_impl(ctx):
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    deps = [dep[CcInfo] for dep in ctx.attr.deps]
    context = cc_common.create_compilation_context(headers = depset(ctx.files.hdrs))
    headers = depset(ctx.files.hdrs, transitive = [dep.compilation_context.headers for dep in deps])
    objects = []
    for src in ctx.files.srcs:
        object = ctx.actions.declare_file("{}/{}.pic.o".format(ctx.label.name, src.basename[:-len(src.extension) - 1]))
        args = ctx.actions.args()
        args.add_all(["-ccbin", toolchain.compiler_executable, "-std=c++17", "-O3", "-DNDEBUG", "-Xcompiler=-fPIC"])
        args.add_all(["-Xcompiler=-fvisibility=hidden", "-I."])
        args.add_all(ctx.attr.gencodes, format_each = "-gencode=%s")
        args.add_all(ctx.attr.copts)
        args.add_all(["-c", src, "-o", object])
        ctx.actions.run(
            executable = NVCC,
            arguments = [args],
            inputs = depset([src], transitive = [headers]),
            tools = toolchain.all_files,
            outputs = [object],
            # The version is here so that another nvcc at the same path compiles anew.
            env = {"PATH": "/usr/bin:/bin", "BSJAX_NVCC_VERSION": CUDA_VERSION},
            mnemonic = "CudaCompile",
            progress_message = "Compiling %s with nvcc" % src.short_path,
        )
        objects.append(object)
    linking, _ = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        name = ctx.label.name,
        feature_configuration = features,
        cc_toolchain = toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(pic_objects = depset(objects)),
        # A kernel registers itself in a constructor that no symbol refers to.
        alwayslink = True,
        disallow_dynamic_library = True,
    )

    # Own objects first: the linker resolves a static runtime's symbols from left to right.
    own = CcInfo(compilation_context = context, linking_context = linking)
    return [DefaultInfo(files = depset(objects)), cc_common.merge_cc_infos(cc_infos = [own] + deps)]

_cuda_library = rule(
    implementation = _cuda_library_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cu"]),
        "hdrs": attr.label_list(allow_files = [".h", ".cuh"]),
        "deps": attr.label_list(providers = [CcInfo]),
        "gencodes": attr.string_list(mandatory = True),
        "copts": attr.string_list(),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def cuda_library(name, srcs, hdrs = [], deps = [], gencodes = [], **kwargs):
    """A cc_library of .cu files for the architectures that `gencodes` lists in nvcc's notation."""
    if NVCC and srcs:
        _cuda_library(name = name, srcs = srcs, hdrs = hdrs, deps = deps, gencodes = gencodes, **kwargs)
    else:
        native.cc_library(name = name, hdrs = hdrs, deps = deps, visibility = kwargs.get("visibility"))
