"""Block-sparse neural networks for JAX."""

import importlib as _importlib

from bsjax import patterns as patterns
from bsjax._layout import Layout as Layout
from bsjax.ops import save_products as save_products
from bsjax.ops import sddmm as sddmm
from bsjax.ops import spmm as spmm

__version__ = "0.1.0"


def __getattr__(name):
    """Loads `nn` and `linen` when they are first named: they import Flax, which the ops do not need."""
    if name in ("nn", "linen"):
        return _importlib.import_module(f"bsjax.{name}")
    raise AttributeError(f"module 'bsjax' has no attribute {name!r}")
