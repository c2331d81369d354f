"""spmm and sddmm: a dense matrix by a block-sparse one, and the product of two dense ones at its blocks only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from bsjax import _ffi
from bsjax._layout import Layout
from bsjax.ops import _reference

_DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)
_CHOOSE = -1  # the handler picks its kernel
_PRODUCT = "bsjax.product"  # what policies of jax.checkpoint know results by
_save_named = jax.checkpoint_policies.save_only_these_names(_PRODUCT)

_spmm_call = _ffi.GroupedOp(
    "bsjax_spmm",
    ("rows", "blocks", "rows"),
    lambda x, blocks, indptr, *rest, **attrs: ((indptr[0] - 1) * blocks[3],),
    _reference.spmm,
)
_sddmm_call = _ffi.GroupedOp(
    "bsjax_sddmm",
    ("rows", "rows", "blocks"),
    lambda x, dy, rows, *rest, block_size, **attrs: (rows[0], block_size, block_size),
    _reference.sddmm,
)


def spmm(x, blocks, layout: Layout, *, transpose: bool = False, precision=None) -> jax.Array:
    """Multiplies a dense matrix by a block-sparse one: `x @ w`, or `x @ w.T` if `transpose`.

    Args:
      x: `[..., k]` (`[..., n]` if `transpose`); float32, float16 or bfloat16.
      blocks: `[num_blocks, b, b]`, the stored blocks of `w` in the order of `layout`; dtype of `x`.
      layout: where the blocks of `w`, `[k, n]`, are: a `bsjax.Layout`.
      transpose: whether to multiply by the transpose of `w`. The same `blocks` are read, not copied.
      precision: for float32 only. None, "float32", "highest" and every other precision of JAX give real float32
        products, also on cards whose default is TF32; "tensorfloat32" (here or in `jax.default_matmul_precision`)
        allows TF32.

    Returns:
      `[..., n]` (`[..., k]` if `transpose`), in the dtype of `x`, accumulated in float32 in the order of `layout` and
      rounded once, the same bits on every run. A block column (row) of `w` with no block gives zeros, and a column of
      `x` that meets no block is never used: a NaN there stays there.

    Raises:
      TypeError: if a dtype is none of the three, the two differ, or `layout` is no `Layout`.
      ValueError: if the shapes do not fit `layout`, or `precision` is unknown.

    Differentiable in `x` and `blocks` by reverse mode, to any order; the gradients are `spmm` and `sddmm` again.

    References:
      Gray, Radford and Kingma, "GPU Kernels for Block-Sparse Weights", 2017.

    Example:
      >>> import bsjax, jax.numpy as jnp
      >>> layout = bsjax.Layout.from_mask([[1, 0, 1], [0, 0, 1]], block_size=8)
      >>> blocks = jnp.ones((layout.num_blocks, 8, 8))
      >>> y = bsjax.spmm(jnp.ones((4, 16)), blocks, layout)
      >>> y.shape, [float(v) for v in y[0, ::8]]
      ((4, 24), [8.0, 0.0, 16.0])
    """
    layout = _check_layout(layout)
    x, blocks = _check_array("x", x), _check_array("blocks", blocks)
    _check_dtypes("x", x, "blocks", blocks)
    _check_features("x", x, layout, 1 if transpose else 0)
    expected = (layout.num_blocks, layout.block_size, layout.block_size)
    if blocks.shape != expected:
        raise ValueError(f"`blocks` must have shape {expected}, (num_blocks, b, b) of `layout`; got {blocks.shape}.")
    tf32 = _allows_tf32(precision)
    if layout.num_blocks == 0:  # XLA does not survive an empty constant inside shard_map, so none is used
        return _ffi.align(jnp.zeros((*x.shape[:-1], layout.shape[0 if transpose else 1]), x.dtype), x)[0]
    x, blocks, *index = _ffi.align(x, blocks, *jax.tree.leaves(layout))
    layout = jax.tree.unflatten(jax.tree.structure(layout), index)
    return checkpoint_name(_spmm(x, blocks, layout, bool(transpose), tf32), _PRODUCT)


def sddmm(x, dy, layout: Layout, *, precision=None) -> jax.Array:
    """Multiplies `x.T @ dy` at the blocks of `layout` only, summed over all rows: the gradient of `spmm` in its blocks.

    Args:
      x: `[..., k]`; float32, float16 or bfloat16.
      dy: `[..., n]`, with the leading shape and the dtype of `x`.
      layout: which b x b blocks of the `[k, n]` product to compute: a `bsjax.Layout`.
      precision: as in `spmm`.

    Returns:
      `[num_blocks, b, b]` in the order of `layout`, in the dtype of `x`, accumulated in float32 over the rows in a
      fixed order and rounded once (once more in a sum over devices, where a mesh splits the rows). No rows give zeros.

    Raises:
      TypeError: if a dtype is none of the three, the two differ, or `layout` is no `Layout`.
      ValueError: if the shapes do not fit `layout` or each other, or `precision` is unknown.

    Differentiable in `x` and `dy` by reverse mode, to any order.

    References:
      Gray, Radford and Kingma, "GPU Kernels for Block-Sparse Weights", 2017, there `updat`.

    Example:
      >>> import bsjax, jax.numpy as jnp
      >>> layout = bsjax.Layout.from_mask([[1, 0, 1], [0, 0, 1]], block_size=8)
      >>> dblocks = bsjax.sddmm(jnp.ones((4, 16)), jnp.ones((4, 24)), layout)
      >>> dblocks.shape, float(dblocks[0, 0, 0])
      ((3, 8, 8), 4.0)
    """
    layout = _check_layout(layout)
    x, dy = _check_array("x", x), _check_array("dy", dy)
    _check_dtypes("x", x, "dy", dy)
    _check_features("x", x, layout, 0)
    _check_features("dy", dy, layout, 1)
    if x.shape[:-1] != dy.shape[:-1]:
        raise ValueError(
            f"`x` and `dy` must have the same shape but for the last dimension; got {x.shape} and {dy.shape}."
        )
    tf32 = _allows_tf32(precision)
    if layout.num_blocks == 0:
        return _ffi.align(jnp.zeros((0, layout.block_size, layout.block_size), x.dtype), x, dy)[0]
    x, dy, *index = _ffi.align(x, dy, *jax.tree.leaves(layout))
    layout = jax.tree.unflatten(jax.tree.structure(layout), index)
    return checkpoint_name(_sddmm(x, dy, layout, tf32), _PRODUCT)


def save_products(prim, *args, **params):
    """A policy for `jax.checkpoint` that keeps the results of `spmm` and `sddmm`, and computes all else again.

    JAX's own policies do not know these products: `dots_saveable` and its like compute them again, where they keep
    dense ones; `everything_saveable` keeps them. Both kinds are kept by
    `jax.checkpoint_policies.save_from_both_policies(jax.checkpoint_policies.dots_saveable, bsjax.save_products)`.

    Example:
      >>> import bsjax, jax, jax.numpy as jnp
      >>> layout = bsjax.Layout.from_mask([[1, 0, 1], [0, 0, 1]], block_size=8)
      >>> f = jax.checkpoint(lambda x, w: jnp.sin(bsjax.spmm(x, w, layout)).sum(), policy=bsjax.save_products)
      >>> jax.grad(f)(jnp.ones((4, 16)), jnp.ones((3, 8, 8))).shape
      (4, 16)
    """
    return _save_named(prim, *args, **params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _spmm(x, blocks, layout, transpose, tf32) -> jax.Array:
    lists = layout.lists(transpose)
    return _spmm_call(x[None], blocks[None], *lists, transpose=transpose, tf32=tf32, config=_CHOOSE)[0]


def _spmm_fwd(x, blocks, layout, transpose, tf32):
    return _spmm(x, blocks, layout, transpose, tf32), (x, blocks, layout)


def _spmm_bwd(transpose, tf32, residuals, dy):
    x, blocks, layout = residuals
    dx = _spmm(dy, blocks, layout, not transpose, tf32)
    dblocks = _sddmm(dy, x, layout, tf32) if transpose else _sddmm(x, dy, layout, tf32)
    return _ffi.place_like(dx, x), _ffi.place_like(dblocks, blocks), None


_spmm.defvjp(_spmm_fwd, _spmm_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sddmm(x, dy, layout, tf32) -> jax.Array:
    lists = layout.rows, layout.cols, layout.wgrad_schedule
    attrs = {"block_size": layout.block_size, "tf32": tf32, "config": _CHOOSE}
    return _sddmm_call(x[None], dy[None], *lists, **attrs)[0]


def _sddmm_fwd(x, dy, layout, tf32):
    return _sddmm(x, dy, layout, tf32), (x, dy, layout)


def _sddmm_bwd(tf32, residuals, g):
    x, dy, layout = residuals
    dx, ddy = _spmm(dy, g, layout, True, tf32), _spmm(x, g, layout, False, tf32)
    return _ffi.place_like(dx, x), _ffi.place_like(ddy, dy), None


_sddmm.defvjp(_sddmm_fwd, _sddmm_bwd)


def _check_layout(layout):
    if not isinstance(layout, Layout):
        raise TypeError(
            "`layout` must be a bsjax.Layout, as Layout.from_mask(mask, block_size) makes it; "
            f"got {type(layout).__name__}."
        )
    layout.check()
    return layout


def _check_array(name, value):
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"`{name}` must be an array; got {type(value).__name__}. Wrap it in jnp.asarray.")
    if value.dtype not in _DTYPES:
        raise TypeError(f"`{name}` must be float32, float16 or bfloat16; got {value.dtype}. Cast it with astype.")
    return jnp.asarray(value)


def _check_dtypes(first, a, second, b):
    if a.dtype != b.dtype:
        raise TypeError(
            f"`{first}` and `{second}` must have the same dtype; got {a.dtype} and {b.dtype}. Cast one with astype."
        )


def _check_features(name, value, layout, axis):
    features, side = layout.shape[axis], ("rows", "columns")[axis]
    if value.ndim == 0 or value.shape[-1] != features:
        raise ValueError(
            f"The last dimension of `{name}` must be {features}, the {side} of a {layout.shape} layout; "
            f"got `{name}` of shape {value.shape}."
        )


def _allows_tf32(precision):
    """Whether float32 products may round their operands to TF32: only where that is asked for by name."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if precision is None or isinstance(precision, jax.lax.Precision):
        return False
    if isinstance(precision, str):
        known = {"default", "fastest", "high", "highest", "float32", "bfloat16", "bfloat16_3x", "tensorfloat32"}
        known |= {preset.name for preset in jax.lax.DotAlgorithmPreset}
        if precision in known:
            return precision in ("tensorfloat32", "TF32_TF32_F32")
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        return precision is jax.lax.DotAlgorithmPreset.TF32_TF32_F32
    raise ValueError(
        f'`precision` must be None, a jax.lax.Precision, "float32", "highest" or "tensorfloat32"; got {precision!r}.'
    )
