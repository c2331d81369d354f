"""extension: a linked library under the file name that the interpreter imports."""

load("@python//:defs.bzl", "EXTENSION_SUFFIX")

def _extension_impl(ctx):
    library = ctx.actions.declare_file(ctx.label.name + EXTENSION_SUFFIX)
    ctx.actions.symlink(output = library, target_file = ctx.file.library)
    install = ctx.actions.declare_file(ctx.label.name + ".install")
    ctx.actions.write(
        output = install,
        content = '#!/bin/sh\nexec install -v -m 755 "%s" "$BUILD_WORKSPACE_DIRECTORY/%s"\n' % (
            library.short_path,
            library.short_path,
        ),
        is_executable = True,
    )
    return [DefaultInfo(
        files = depset([library]),
        executable = install,
        runfiles = ctx.runfiles([library]),
    )]

extension = rule(
    implementation = _extension_impl,
    attrs = {"library": attr.label(allow_single_file = [".so"], mandatory = True)},
    doc = "`bazel build` makes it; `bazel run` puts it beside the sources too, for work on the tree without a wheel.",
    executable = True,
)
