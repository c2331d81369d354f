"""What pyproject.toml makes of warnings: errors where they are laid at our modules, news where at a dependency's."""

pytest_plugins = ["pytester"]

# The rule goes by the names of modules alone, so stand-ins of those names will do.
DEPENDENCY = """
import threading, warnings

warnings.warn("old at import", DeprecationWarning, stacklevel=1)

def old():
    warnings.warn("old", DeprecationWarning, stacklevel=2)

def uses_old():
    old()

def loses_exceptions():
    class Closes:
        def __del__(self):
            raise ValueError("lost in __del__")
    Closes()

def loses_thread():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
"""
OURS = """
import warnings
import dependency

def uses_old():
    dependency.old()

def warns():
    warnings.warn("a user's doing", UserWarning, stacklevel=1)
"""
TESTS = """
def test_import_of_dependency():
    import dependency

def test_inside_dependency():
    import dependency
    dependency.uses_old()

def test_inside_namesake():
    import bsjaxed
    bsjaxed.uses_old()
"""
ERRORS = """
import pytest
import bsjax, dependency, experiments.own

@pytest.mark.parametrize("call", [
    dependency.old, bsjax.uses_old, bsjax.warns, experiments.own.uses_old, experiments.own.warns,
    dependency.loses_exceptions, dependency.loses_thread,
])
def test_error(call):
    call()
"""


def run(pytester, pytestconfig, test):
    pytester.makepyfile(
        **{
            "dependency": DEPENDENCY,
            "bsjaxed": OURS,
            "bsjax/__init__": OURS,
            "experiments/own": OURS,
            "test_stand_in": test,
        }
    )
    (pytester.path / "pyproject.toml").write_text(pytestconfig.inipath.read_text())
    return pytester.runpytest_subprocess("test_stand_in.py", "-p", "no:cacheprovider")


def test_warnings_of_dependencies_pass(pytester, pytestconfig):
    run(pytester, pytestconfig, TESTS).assert_outcomes(passed=3, warnings=3)


def test_warnings_of_ours_are_errors(pytester, pytestconfig):
    result = run(pytester, pytestconfig, ERRORS)
    result.assert_outcomes(failed=7, warnings=1)
