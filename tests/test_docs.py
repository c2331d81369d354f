"""Every example in a docstring runs, and so does every Python example of the README."""

import doctest
import importlib
import pathlib
import pkgutil

import pytest

import bsjax

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(bsjax.__path__, "bsjax.")
    if not module.name.endswith("_native") and not module.name.endswith("__main__")
)
README = pathlib.Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("name", ["bsjax", *MODULES])
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_public_names_have_an_example():
    """Each function and class that users import shows how it is called."""
    from bsjax import linen, nn, patterns

    rooms = [bsjax, nn, linen, patterns]
    public = {
        f"{room.__name__}.{name}": value
        for room in rooms
        for name, value in vars(room).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "").startswith("bsjax")
    }
    assert {"bsjax.spmm", "bsjax.Layout", "bsjax.nn.BlockSparseLinear"} <= set(public)
    without = [name for name, value in public.items() if ">>>" not in (value.__doc__ or "")]
    assert without == []


def test_readme():
    parsed = doctest.DocTestParser().get_doctest(README.read_text(), {}, "README", str(README), 0)
    assert parsed.examples
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(parsed)
    assert result.failed == 0
