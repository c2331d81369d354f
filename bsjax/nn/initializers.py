"""Initialisers for the blocks of a block-sparse `w`: each takes a layout and gives `init(key, shape, dtype)`.

Such an `init` fits wherever one of `jax.nn.initializers` does. Those themselves do not know which blocks meet in a
column, so the variance of their normal ones is off; `zeros` and the like are fine.
"""

import jax
import jax.numpy as jnp
import numpy as np

from bsjax._layout import Layout


def scaled_normal(layout, scale=1.0):
    """Normal entries of variance `scale / fan_in`, with the true fan-in of each column of `w`.

    The fan-in of a column is the number of rows that its blocks cover: the number of blocks in its block column, times
    b. So every column with a block keeps the variance of its input at `scale=1`, however uneven the pattern is.

    Args:
      layout: where the blocks of `w` are: a `bsjax.Layout`, which may be traced.
      scale: variance of an output over that of an input; 2 for inputs that went through a ReLU.

    Returns:
      `init(key, shape, dtype=float32)`, which makes `[num_blocks, b, b]`.

    Raises:
      TypeError: if `layout` is no `Layout`.
      ValueError: if `scale` is negative, or in `init` if `shape` is not that of the blocks.

    Example:
      >>> import bsjax, jax
      >>> layout = bsjax.Layout.from_mask([[1, 0], [1, 1], [1, 0], [1, 0]], block_size=32)
      >>> blocks = bsjax.nn.initializers.scaled_normal(layout)(jax.random.key(0), (5, 32, 32))
      >>> [round(1 / float(blocks[e].var()), -1) for e in (0, 2)]  # fan-in 4 * 32 and 32
      [130.0, 30.0]
    """
    _check(layout, scale)

    def init(key, shape, dtype=jnp.float32):
        _check_shape(shape, layout)
        num_cols = layout.block_shape[1]
        stored = (layout.rows >= 0) & (layout.indices >= 0)
        cols = jnp.where(stored, layout.indices, num_cols)  # padding counts for a column of its own
        fan_in = layout.block_size * jnp.zeros(num_cols + 1, jnp.int32).at[cols].add(1)
        std = jnp.sqrt(scale / fan_in[cols].astype(jnp.float32)).astype(dtype)
        return jax.random.normal(key, shape, dtype) * std[:, None, None]

    return init


def orthogonal(layout, scale=1.0):
    """Random columns that are orthonormal within each block column of `w`, times `scale`.

    The blocks of a block column, stacked, are `scale * q`, where `q` has orthonormal columns and is uniform among all
    such matrices. Columns of two block columns are orthogonal too if these have no block row in common, and in general
    only then: a block-diagonal `w` is orthogonal, also a permuted one. A block column without a block stays zero.
    Computed in float32 or wider, then rounded to `dtype`.

    Args:
      layout: where the blocks of `w` are: a `bsjax.Layout`, not traced; the `init` it gives can be called under `jit`.
      scale: length of each column of `w`.

    Returns:
      `init(key, shape, dtype=float32)`, which makes `[num_blocks, b, b]`.

    Raises:
      TypeError: if `layout` is no `Layout`, or is traced.
      ValueError: if `scale` is negative, or in `init` if `shape` is not that of the blocks.

    References:
      Saxe, McClelland and Ganguli, "Exact solutions to the nonlinear dynamics of learning in deep linear neural
      networks", 2014.

    Example:
      >>> import bsjax, jax
      >>> layout = bsjax.Layout.from_mask([[1, 0], [1, 1]], block_size=8)
      >>> above, below, alone = bsjax.nn.initializers.orthogonal(layout)(jax.random.key(0), (3, 8, 8))
      >>> column = jax.numpy.concatenate([above, below])  # the first block column, [16, 8]
      >>> bool(abs(column.T @ column - jax.numpy.eye(8)).max() < 1e-5)
      True
    """
    _check(layout, scale)
    columns = _columns(layout)

    def init(key, shape, dtype=jnp.float32):
        _check_shape(shape, layout)
        b = layout.block_size
        wide = dtype if jnp.finfo(dtype).bits > 32 else jnp.float32
        blocks = jnp.zeros(shape, wide)
        for ids in columns:  # [columns of this length, length]: one batched QR for each length
            key, subkey = jax.random.split(key)
            q, r = jnp.linalg.qr(jax.random.normal(subkey, (len(ids), ids.shape[1] * b, b), wide))
            # QR leaves the sign of each column to the algorithm; r's diagonal says which it took. Undone, q is uniform.
            q *= jnp.where(jnp.diagonal(r, axis1=1, axis2=2) < 0, -scale, scale).astype(wide)[:, None, :]
            blocks = blocks.at[ids].set(q.reshape(*ids.shape, b, b))
        return blocks.astype(dtype)

    return init


def identity(layout):
    """The identity: `x @ w` is `x`. So a deep or recurrent network begins by passing its input on.

    Args:
      layout: where the blocks of `w` are: a square `bsjax.Layout` with all blocks of the diagonal, not traced.

    Returns:
      `init(key, shape, dtype=float32)`, which makes `[num_blocks, b, b]`; `key` is not used.

    Raises:
      TypeError: if `layout` is no `Layout`, or is traced.
      ValueError: if `w` is not square or the diagonal lacks a block, or in `init` if `shape` is not that of the blocks.

    Example:
      >>> import bsjax, jax
      >>> layout = bsjax.Layout.from_mask([[1, 0], [1, 1]], block_size=8)
      >>> blocks = bsjax.nn.initializers.identity(layout)(jax.random.key(0), (3, 8, 8))
      >>> [float(block.sum()) for block in blocks]
      [8.0, 0.0, 8.0]
    """
    _check(layout)
    if layout.shape[0] != layout.shape[1]:
        raise ValueError(f"`layout` must be square for an identity; got shape {layout.shape}.")
    missing = np.flatnonzero(~np.diagonal(layout.to_mask()))
    if len(missing):
        raise ValueError(
            f"`layout` must have all blocks of the diagonal for an identity; got none at [{missing[0]}, {missing[0]}]. "
            "Set the diagonal of the mask."
        )

    def init(key, shape, dtype=jnp.float32):
        del key
        _check_shape(shape, layout)
        diagonal = (layout.rows == layout.indices) & (layout.rows >= 0)
        return diagonal.astype(dtype)[:, None, None] * jnp.eye(layout.block_size, dtype=dtype)[None]

    return init


def _columns(layout):
    """The stored blocks of each block column, columns of equal length together: a list of int `[columns, length]`."""
    lengths = layout.to_mask().sum(0)  # TypeError for a traced layout
    rows, cols = np.asarray(layout.rows), np.asarray(layout.indices)
    stored = np.flatnonzero((rows >= 0) & (cols >= 0))
    stored = stored[np.argsort(cols[stored], kind="stable")]
    columns = np.split(stored, np.cumsum(lengths)[:-1])
    return [
        np.stack([columns[c] for c in np.flatnonzero(lengths == length)]) for length in np.unique(lengths) if length
    ]


def _check(layout, scale=1.0):
    if not isinstance(layout, Layout):
        raise TypeError(
            "`layout` must be a bsjax.Layout, as Layout.from_mask(mask, block_size) makes it; "
            f"got {type(layout).__name__}."
        )
    if not scale >= 0:
        raise ValueError(f"`scale` must not be negative; got {scale}.")


def _check_shape(shape, layout):
    expected = (layout.num_blocks, layout.block_size, layout.block_size)
    if tuple(shape) != expected:
        raise ValueError(f"`shape` must be {expected}, (num_blocks, b, b) of `layout`; got {tuple(shape)}.")
