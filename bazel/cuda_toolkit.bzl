"""Where CUDA is.

The toolkit is the first of: CUDA_HOME, /usr/local/cuda, the folder above the nvcc on PATH, pip's nvidia-cuda-nvcc where
PYTHON_BIN_PATH has it. With none of them, or with CUDA_HOME=none, targets that need it are empty and the extension
serves the CPU only.
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "runtime",
    srcs = glob(["lib/libcudart_static.a"]),
    hdrs = glob(["include/*.h", "include/crt/**"]),
    includes = ["include"],
    linkopts = ["-ldl", "-lpthread", "-lrt"] if {has_cuda} else [],
)
"""

_DEFS = """
NVCC = "{nvcc}"  # empty where there is none
CUDA_VERSION = "{version}"

def if_cuda(present, absent = []):
    return present if NVCC else absent
"""

def _find_toolkit(ctx):
    home = ctx.os.environ.get("CUDA_HOME", "")
    if home == "none":
        return None
    if home and not ctx.path(home + "/bin/nvcc").exists:
        fail("CUDA_HOME is %s, but there is no bin/nvcc in it. Use CUDA_HOME=none to build for the CPU only." % home)
    nvcc = ctx.which("nvcc")
    python = ctx.os.environ.get("PYTHON_BIN_PATH") or "python3"
    packages = ctx.execute([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'), end='')"]).stdout
    for folder in [
        home,
        "/usr/local/cuda",
        str(nvcc.realpath.dirname.dirname) if nvcc else "",
        packages + "/nvidia/cu13",
    ]:
        # An nvcc on PATH may be a wrapper far from its toolkit: the headers tell.
        if folder and ctx.path(folder + "/bin/nvcc").exists and ctx.path(folder + "/include/cuda_runtime.h").exists:
            return ctx.path(folder).realpath
    return None

def _cuda_toolkit_impl(ctx):
    home = _find_toolkit(ctx)
    nvcc, version = "", ""
    if home:
        nvcc = str(home) + "/bin/nvcc"
        result = ctx.execute([nvcc, "--version"])
        if result.return_code:
            fail("%s failed: %s" % (nvcc, result.stderr))
        version = result.stdout.partition("release ")[2].partition(",")[0]
        ctx.symlink(home.get_child("include"), "include")
        for lib in ["lib64", "lib"]:  # pip's toolkit has lib only
            if home.get_child(lib).get_child("libcudart_static.a").exists:
                ctx.symlink(home.get_child(lib).get_child("libcudart_static.a"), "lib/libcudart_static.a")
                break
    ctx.file("BUILD", _BUILD.format(has_cuda = bool(home)))
    ctx.file("defs.bzl", _DEFS.format(nvcc = nvcc, version = version))

cuda_toolkit = repository_rule(
    _cuda_toolkit_impl,
    environ = ["CUDA_HOME", "PATH", "PYTHON_BIN_PATH"],
    local = True,
)
