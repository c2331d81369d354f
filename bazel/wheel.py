"""Writes a wheel: the action of wheel.bzl, and the metadata that backend.py hands to pip.

Whatever pyproject.toml says is said nowhere else; the version is that of bsjax/__init__.py.
"""

import argparse
import base64
import hashlib
import pathlib
import platform
import re
import subprocess
import sys
import tomllib
import zipfile

# What every Linux of a manylinux profile has (PEP 600): these libraries and no others.
SYSTEM_LIBRARIES = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+|ld-linux[\w-]*\.so\.\d+")

# The oldest glibc whose distributions all bring a C++ runtime with these symbols:
# GLIBCXX_, CXXABI_ and GCC_ up to.
CXX_RUNTIMES = {
    (2, 17): ((3, 4, 19), (1, 3, 7), (4, 8, 0)),
    (2, 27): ((3, 4, 24), (1, 3, 11), (7, 0, 0)),
    (2, 31): ((3, 4, 28), (1, 3, 12), (7, 0, 0)),
    (2, 34): ((3, 4, 29), (1, 3, 13), (7, 0, 0)),
    (2, 35): ((3, 4, 30), (1, 3, 13), (12, 0, 0)),
    (2, 39): ((3, 4, 33), (1, 3, 15), (14, 0, 0)),
}


def plain_platform_tag():
    return f"{sys.platform}_{platform.machine()}"


def platform_tag(extension):
    """The tag of the oldest Linux that can load `extension`, read off the symbols that it needs."""
    elf = subprocess.run(
        ["readelf", "-dV", str(extension)],
        capture_output=True,
        text=True,
        check=True,
        env={"LC_ALL": "C"},
    ).stdout
    if not all(map(SYSTEM_LIBRARIES.fullmatch, re.findall(r"\(NEEDED\).*\[(.*)\]", elf))):
        return plain_platform_tag()

    def newest(prefix):
        versions = re.findall(rf"Name: {prefix}_([\d.]+)", elf)
        return max((tuple(map(int, version.split("."))) for version in versions), default=(0,))

    needs = [newest(prefix) for prefix in ("GLIBCXX", "CXXABI", "GCC")]
    fits = [
        glibc for glibc, has in CXX_RUNTIMES.items() if all(need <= have for need, have in zip(needs, has, strict=True))
    ]
    if not fits:
        return plain_platform_tag()
    major, minor = max(newest("GLIBC")[:2], min(fits))
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def version(root):
    return re.search(r'^__version__ = "(.+)"$', (root / "bsjax/__init__.py").read_text(), re.M)[1]


def requirements(project):
    """Yields the requirements of `[project]`, those of extras with their marker."""
    yield from project["dependencies"]
    for extra, names in project["optional-dependencies"].items():
        for name in names:
            requirement, _, marker = (part.strip() for part in name.partition(";"))
            condition = f'({marker}) and extra == "{extra}"' if marker else f'extra == "{extra}"'
            yield f"{requirement} ; {condition}"


def metadata(pyproject, readme):
    """The METADATA file (core metadata 2.4) of the project that `pyproject` describes."""
    project = tomllib.loads(pyproject.read_text())["project"]
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {version(pyproject.parent)}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE",
        f"Requires-Python: {project['requires-python']}",
        *(f"Keywords: {','.join(project['keywords'])}",),
        *(f"Classifier: {classifier}" for classifier in project["classifiers"]),
        *(f"Provides-Extra: {extra}" for extra in project["optional-dependencies"]),
        *(f"Requires-Dist: {requirement}" for requirement in requirements(project)),
        "Description-Content-Type: text/markdown",
    ]
    return "\n".join(lines) + "\n\n" + readme.read_text()


class Wheel:
    """An archive that keeps its own record. Same content, same bytes: entries carry no time."""

    def __init__(self, path, info):
        self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED)
        self._info = info
        self._record = []

    def add(self, name, content, mode=0o644):
        entry = zipfile.ZipInfo(name)
        entry.compress_type = zipfile.ZIP_DEFLATED
        entry.external_attr = (0o100000 | mode) << 16
        self._zip.writestr(entry, content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        self._record.append(f"{name},sha256={digest},{len(content)}")

    def close(self):
        name = f"{self._info}/RECORD"
        record = "\n".join([*self._record, f"{name},,"]) + "\n"
        self.add(name, record.encode())
        self._zip.close()


def write(folder, tag, pyproject, readme, license_file, files):
    """Writes the wheel with `files`, {name in the archive: path}, and returns its path."""
    name = f"bsjax-{version(pyproject.parent)}"
    info = f"{name}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{tag}.whl"
    wheel = Wheel(path, info)
    for inside, source in sorted(files.items()):
        wheel.add(inside, source.read_bytes(), 0o755 if inside.endswith(".so") else 0o644)
    wheel.add(f"{info}/METADATA", metadata(pyproject, readme).encode())
    wheel.add(
        f"{info}/WHEEL",
        f"Wheel-Version: 1.0\nGenerator: bsjax\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
    )
    wheel.add(f"{info}/licenses/LICENSE", license_file.read_bytes())
    wheel.close()
    return path


def main():
    parser = argparse.ArgumentParser()
    for name in ("pyproject", "readme", "license", "extension", "out"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("--python-tag", required=True)
    parser.add_argument("--extension-name", required=True)
    parser.add_argument("files", nargs="*")
    args = parser.parse_args()
    files = {name: pathlib.Path(name) for name in args.files} | {args.extension_name: args.extension}
    tag = f"{args.python_tag}-{args.python_tag}-{platform_tag(args.extension)}"
    write(args.out, tag, args.pyproject, args.readme, args.license, files)


if __name__ == "__main__":
    main()
