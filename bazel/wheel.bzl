"""wheel: the rooms and the extension as one wheel, tagged for this interpreter and for the machines that can load it."""

load("@python//:defs.bzl", "PYTHON", "PYTHON_TAG")
load("//bazel:room.bzl", "RoomInfo")

def _wheel_impl(ctx):
    # Its name carries the tag, which is known only once the extension is linked: hence a folder.
    out = ctx.actions.declare_directory(ctx.label.name)
    files = depset(transitive = [room[RoomInfo].files for room in ctx.attr.rooms])
    args = ctx.actions.args()
    args.add(ctx.file._build)
    args.add("--pyproject", ctx.file.pyproject)
    args.add("--readme", ctx.file.readme)
    args.add("--license", ctx.file.license)
    args.add("--python-tag", PYTHON_TAG)
    args.add("--extension", ctx.file.extension)
    args.add("--extension-name", ctx.file.extension.short_path)
    args.add("--out", out.path)
    args.add_all(files)
    ctx.actions.run(
        executable = PYTHON,
        arguments = [args],
        inputs = depset(
            [ctx.file._build, ctx.file.pyproject, ctx.file.readme, ctx.file.license, ctx.file.extension],
            transitive = [files] + [room[RoomInfo].checks for room in ctx.attr.rooms],
        ),
        outputs = [out],
        env = {"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
        mnemonic = "Wheel",
    )
    return [DefaultInfo(files = depset([out]))]

wheel = rule(
    implementation = _wheel_impl,
    attrs = {
        "rooms": attr.label_list(providers = [RoomInfo]),
        "extension": attr.label(allow_single_file = True),
        "pyproject": attr.label(allow_single_file = True),
        "readme": attr.label(allow_single_file = True),
        "license": attr.label(allow_single_file = True),
        "_build": attr.label(default = "//bazel:wheel.py", allow_single_file = True),
    },
)
