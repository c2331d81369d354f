"""Modules for Flax nnx, and initialisers for block-sparse weights."""

from bsjax.nn import initializers as initializers
from bsjax.nn._dense import BlockSparseLinear as BlockSparseLinear
from bsjax.nn._dense import Pattern as Pattern
