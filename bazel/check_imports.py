"""Fails if a file of a room imports what the room may not: what py_room (room.bzl) runs."""

import argparse
import ast
import pathlib
import sys


def module_of(path):
    parts = pathlib.PurePath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path):
    """Yields (line, candidates): an import is allowed if one of its candidates is."""
    for node in ast.walk(ast.parse(pathlib.Path(path).read_text(), path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, [alias.name]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, [f"{base}.{alias.name}", base]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--room", required=True)
    parser.add_argument("--stamp", required=True)
    for name in ("imports", "deps", "srcs"):
        parser.add_argument(f"--{name}", nargs="*", default=[])
    args = parser.parse_args()
    rooms = {module_of(path) for path in args.deps + args.srcs}
    ours = {module.partition(".")[0] for module in rooms}
    packages = sys.stdlib_module_names.union(args.imports) - ours
    faults = [
        f"{path}:{line}: {args.room} must not import `{candidates[0]}`: it is in neither its `imports` nor its `deps`."
        for path in args.srcs
        for line, candidates in imports_of(path)
        if not rooms.intersection(candidates) and candidates[0].partition(".")[0] not in packages
    ]
    if faults:
        sys.exit("\n".join(faults))
    pathlib.Path(args.stamp).touch()


main()
