"""The PEP 517 backend: `pip install .` and `pip wheel .` build //:wheel by Bazel.

They build for the interpreter that runs pip. BAZEL names the Bazel to use (default: the first of
bazel-4, bazelisk, bazel on PATH); CUDA_HOME the CUDA toolkit, or `none` for a CPU-only wheel.
"""

import io
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

import wheel

ROOT = pathlib.Path(__file__).resolve().parent.parent


def bazel():
    """The start of a Bazel command line."""
    # Debian's `bazel` is a wrapper that refuses what .bazelversion asks for; its `bazel-4` is not.
    names = [os.environ["BAZEL"]] if os.environ.get("BAZEL") else ["bazel-4", "bazelisk", "bazel"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise FileNotFoundError(
            f"Bazel builds bsjax, but none of {names} is on PATH. On Debian `./setup.sh` brings "
            "one and all else that the build needs; or name one in the environment variable BAZEL."
        )
    said = subprocess.run([found, "--version"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    modern = any(f"bazel {major}." in said for major in range(7, 10))
    return [found, "--bazelrc=bazel/workspace.bazelrc"] if modern else [found]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    command = [*bazel(), "build", "//:wheel"]
    environ = os.environ | {"PYTHON_BIN_PATH": sys.executable}
    # pip keeps the standard output for itself.
    subprocess.run(command, cwd=ROOT, env=environ, stdout=sys.stderr, check=True)
    (built,) = (ROOT / ".bazel/bin/wheel").glob("*.whl")
    target = pathlib.Path(wheel_directory) / built.name
    target.unlink(missing_ok=True)
    shutil.copyfile(built, target)
    return built.name


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    info = pathlib.Path(metadata_directory) / f"bsjax-{wheel.version(ROOT)}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(wheel.metadata(ROOT / "pyproject.toml", ROOT / "README.md"))
    return info.name


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """The extension is put beside the sources, and a .pth file points there."""
    environ = os.environ | {"PYTHON_BIN_PATH": sys.executable}
    command = [*bazel(), "run", "//bsjax:_native"]
    subprocess.run(command, cwd=ROOT, env=environ, stdout=sys.stderr, check=True)
    pointer = pathlib.Path(wheel_directory) / "bsjax.pth"
    pointer.write_text(f"{ROOT}\n")
    tag = "cp{0}{1}-cp{0}{1}-".format(*sys.version_info) + wheel.plain_platform_tag()
    try:
        return wheel.write(
            pathlib.Path(wheel_directory),
            tag,
            ROOT / "pyproject.toml",
            ROOT / "README.md",
            ROOT / "LICENSE",
            {"bsjax.pth": pointer},
        ).name
    finally:
        pointer.unlink()


def build_sdist(sdist_directory, config_settings=None):
    """All that git tracks, or would: what a clone holds is what the build needs."""
    name = f"bsjax-{wheel.version(ROOT)}"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    path = pathlib.Path(sdist_directory) / f"{name}.tar.gz"
    info = wheel.metadata(ROOT / "pyproject.toml", ROOT / "README.md").encode()
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for file in filter(None, listed.split("\0")):
            if (ROOT / file).is_file():
                archive.add(ROOT / file, f"{name}/{file}")
        entry = tarfile.TarInfo(f"{name}/PKG-INFO")
        entry.size = len(info)
        archive.addfile(entry, io.BytesIO(info))
    return path.name


if __name__ == "__main__":
    print(*bazel())
