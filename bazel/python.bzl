"""The interpreter that the extension is built for, and the headers that come with its packages.

PYTHON_BIN_PATH names the interpreter (default: python3). It must be able to import pybind11 and jaxlib; only headers of
either are used. Headers are copied, so that a build environment that pip made and removed leaves a whole repository.
"""

_PROBE = """
import importlib.util, json, os, sys, sysconfig

def folder(name):
    spec = importlib.util.find_spec(name)  # without importing it: the headers are all that is asked for
    return os.path.join(os.path.dirname(spec.origin), "include") if spec and spec.origin else None

print(json.dumps({
    "executable": sys.executable,
    "tag": "cp%d%d" % sys.version_info[:2],
    "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
    "python": sysconfig.get_path("include"),
    "pybind11": folder("pybind11"),
    "jaxlib": folder("jaxlib"),
}))
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "xla_ffi",
    hdrs = glob(["xla_ffi/**"]),
    includes = ["xla_ffi"],
)

cc_library(
    name = "pybind11",
    hdrs = glob(["pybind11/**", "python/**"]),
    includes = ["pybind11", "python"],
)
"""

_DEFS = """
PYTHON = "{executable}"
PYTHON_TAG = "{tag}"
EXTENSION_SUFFIX = "{suffix}"
"""

def _python_headers_impl(ctx):
    name = ctx.os.environ.get("PYTHON_BIN_PATH") or "python3"
    python = ctx.path(name) if name.startswith("/") else ctx.which(name)
    if not python:
        fail("No interpreter %s. Set PYTHON_BIN_PATH to one." % name)
    result = ctx.execute([python, "-c", _PROBE])
    if result.return_code:
        fail("%s failed: %s" % (python, result.stderr))
    found = json.decode(result.stdout)
    install = "Install the build requirements of pyproject.toml for %s." % found["executable"]
    for folder, source, marker, way_out in [
        ("python", found["python"], "/Python.h", "Install the Python headers (Debian: python3-dev)."),
        ("pybind11", found["pybind11"], "/pybind11/pybind11.h", install),
        ("xla_ffi", found["jaxlib"], "/xla/ffi/api/c_api.h", install),
    ]:
        if not source or not ctx.path(source + marker).exists:
            fail("No %s for %s. %s" % (marker[1:], found["executable"], way_out))
        result = ctx.execute(["cp", "-rL", source, folder])
        if result.return_code:
            fail("Could not copy %s: %s" % (source, result.stderr))
    ctx.file("BUILD", _BUILD)
    ctx.file("defs.bzl", _DEFS.format(**found))

python_headers = repository_rule(
    _python_headers_impl,
    environ = ["PATH", "PYTHON_BIN_PATH", "PYTHONPATH"],
    local = True,
)
