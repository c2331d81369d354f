"""py_room: a room of the Python house. Its files may import the standard library, the packages that `imports` names,
and the rooms in `deps`; who may name a room in `deps` is its visibility. So an import that the house does not allow
fails the build."""

load("@python//:defs.bzl", "PYTHON")

RoomInfo = provider("What a room hands to those above it.", fields = {
    "own": "list of the room's own files",
    "files": "depset of the room's files and those of all rooms below it",
    "checks": "depset of the stamps that say their imports were allowed",
})

def _py_room_impl(ctx):
    stamp = ctx.actions.declare_file(ctx.label.name + ".imports")
    rooms = [dep[RoomInfo] for dep in ctx.attr.deps]
    own = [src for src in ctx.files.srcs if src.extension == "py"]
    args = ctx.actions.args()
    args.add(ctx.file._check)
    args.add("--room", str(ctx.label))
    args.add("--stamp", stamp)
    args.add_all("--imports", ctx.attr.imports)
    args.add_all("--deps", [src for room in rooms for src in room.own])
    args.add_all("--srcs", own)
    ctx.actions.run(
        executable = PYTHON,
        arguments = [args],
        inputs = own + [ctx.file._check],
        outputs = [stamp],
        mnemonic = "CheckImports",
    )
    return [
        DefaultInfo(files = depset([stamp])),
        RoomInfo(
            own = ctx.files.srcs,
            files = depset(ctx.files.srcs, transitive = [room.files for room in rooms]),
            checks = depset([stamp], transitive = [room.checks for room in rooms]),
        ),
    ]

py_room = rule(
    implementation = _py_room_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = True),
        "deps": attr.label_list(providers = [RoomInfo]),
        "imports": attr.string_list(),
        "_check": attr.label(default = "//bazel:check_imports.py", allow_single_file = True),
    },
)
