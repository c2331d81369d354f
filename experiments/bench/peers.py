"""Who is measured beside us: each peer and the three passes that it can do, on one case's data.

A peer is an object with a `name`, words `about` it, and a method for each pass that takes `Data` and gives a list of
ways to do the pass. Of those that are right the fastest is timed: a peer gets its operands in the order, and prepared
as, it likes best, and none of that preparation is timed. One that cannot be made here raises `Missing`; one that does
not do a case raises `Refused`, or whatever a foreign library raises.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bsjax
from bsjax.testing import reference

PASSES = ("fprop", "dgrad", "wgrad")


class Missing(Exception):
    """Why a peer cannot be measured on this machine."""


class Refused(Exception):
    """Why a peer does not do a pass of a case."""


class Data(NamedTuple):
    """The operands of the three passes; `w` is `blocks` and zeros, `tf32` allows float32 products to round to TF32."""

    layout: bsjax.Layout
    x: jax.Array  # [m, k]
    dy: jax.Array  # [m, n]
    blocks: jax.Array  # [num_blocks, b, b]
    w: jax.Array  # [k, n]
    tf32: bool


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to do a pass.

    Attributes:
      run: starts the work; what it returns `jax.block_until_ready` can wait for.
      read: from what `run` returned to the result in our form: y `[m, n]`, dx `[m, k]` or dblocks `[num_blocks, b, b]`.
      words: what tells it from the peer's other ways.
    """

    run: Callable[[], Any]
    read: Callable[[Any], jax.Array] = lambda result: result
    words: str = ""


@dataclasses.dataclass
class Launched:
    """Work outside of JAX that may still run."""

    value: Any
    wait: Callable[[], None]

    def block_until_ready(self):
        self.wait()
        return self


def transposed(data):
    """The blocks of `w.T` in the order of its rows. By NumPy: a program for each number of blocks takes longer."""
    blocks = np.asarray(data.blocks)[np.asarray(data.layout.perm_t)]
    return jnp.asarray(np.ascontiguousarray(blocks.swapaxes(1, 2)))


def first_line(error):
    """An exception in one line."""
    return str(error).strip().partition("\n")[0][:160] or type(error).__name__


# --------------------------------------------------------------------------------------------------------------- JAX


@functools.partial(jax.jit, static_argnames=("transpose", "precision"))
def spmm(x, blocks, layout, transpose, precision):
    return bsjax.spmm(x, blocks, layout, transpose=transpose, precision=precision)


@functools.partial(jax.jit, static_argnames="precision")
def sddmm(x, dy, layout, precision):
    return bsjax.sddmm(x, dy, layout, precision=precision)


class Ours:
    name = "ours"
    about = "bsjax.spmm and bsjax.sddmm"

    def fprop(self, data):
        return [Way(functools.partial(spmm, data.x, data.blocks, data.layout, False, _ours(data)))]

    def dgrad(self, data):
        return [Way(functools.partial(spmm, data.dy, data.blocks, data.layout, True, _ours(data)))]

    def wgrad(self, data):
        return [Way(functools.partial(sddmm, data.x, data.dy, data.layout, _ours(data)))]


def _ours(data):
    return "tensorfloat32" if data.tf32 else None


@functools.partial(jax.jit, static_argnames=("dims", "tf32", "out"))
def _dot(a, b, dims, tf32, out):
    # float32 means real float32 here as in ours; half types have one kind of product only.
    precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32 if tf32 else "highest" if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (dims, ((), ())), precision=precision, preferred_element_type=out)


@jax.jit
def _at_blocks(dw, layout):
    """The `[num_blocks, b, b]` of a dense `[k, n]`."""
    b = layout.block_size
    dw = dw.reshape(layout.block_shape[0], b, layout.block_shape[1], b)
    return dw[layout.rows, :, layout.cols, :]


class Dense:
    """The same by dense products, wgrad as all of `x.T @ dy`; `out`: dtype of the result, by default the operands'."""

    name = "dense"
    about = "jnp.dot on w with its zeros"

    def __init__(self, out=None):
        self._out = out

    def fprop(self, data):
        return [self._way(data, data.x, data.w, ((1,), (0,)))]

    def dgrad(self, data):
        return [self._way(data, data.dy, data.w, ((1,), (1,)))]

    def wgrad(self, data):
        way = self._way(data, data.x, data.dy, ((0,), (0,)))
        return [dataclasses.replace(way, read=lambda dw: _at_blocks(dw, data.layout))]

    def _way(self, data, a, b, dims):
        return Way(functools.partial(_dot, a, b, dims, data.tf32, self._out or a.dtype))


_plain_spmm = jax.jit(reference.spmm, static_argnames=("transpose", "tf32"))
_plain_sddmm = jax.jit(reference.sddmm, static_argnames=("block_size", "tf32"))


class Reference:
    name = "reference"
    about = "bsjax in plain JAX"

    def fprop(self, data):
        return [self._spmm(data, data.x, data.layout.lists(), False)]

    def dgrad(self, data):
        return [self._spmm(data, data.dy, data.layout.lists(transpose=True), True)]

    def wgrad(self, data):
        layout = data.layout
        operands = data.x[None], data.dy[None], layout.rows, layout.cols, layout.wgrad_schedule
        options = {"block_size": layout.block_size, "tf32": data.tf32}
        return [Way(functools.partial(_plain_sddmm, *operands, **options), lambda dblocks: dblocks[0])]

    def _spmm(self, data, x, lists, transpose):
        operands = x[None], data.blocks[None], *lists
        return Way(functools.partial(_plain_spmm, *operands, transpose=transpose, tf32=data.tf32), lambda y: y[0])
