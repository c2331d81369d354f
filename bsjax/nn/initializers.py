"""Initialisers for the blocks of a block-sparse `w`: each takes a layout and gives `init(key, shape, dtype)`.

Such an `init` fits wherever one of `jax.nn.initializers` does. Those themselves do not know which blocks meet in a
column, so the variance of their normal ones is off; `zeros` and the like are fine.
"""

import functools

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
        cols = jnp.where(layout.rows >= 0, layout.cols, num_cols)  # padding counts for a column of its own
        fan_in = layout.block_size * jnp.zeros(num_cols + 1, jnp.int32).at[cols].add(1)
        std = jnp.sqrt(scale / fan_in[cols].astype(jnp.float32)).astype(dtype)
        return jax.random.normal(key, shape, dtype) * std[:, None, None]

    return init


def orthogonal(layout, scale=1.0):
    """Random columns that are orthonormal within each group of block columns with the same block rows, times `scale`.

    In a group, of at most as many columns as rows (a wider one is split), `w` is a small dense matrix, drawn uniformly
    from those with orthonormal columns. So the columns of one block column are always orthonormal. All of `w` is
    orthogonal if it is square and stores every block, or is block-diagonal with square groups, shuffled or not. Columns
    of two groups are orthogonal if these have no block row in common, and else on average only. A block column without
    a block stays zero. Computed in float32 or wider, then rounded to `dtype`.

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
      >>> layout = bsjax.Layout.from_mask([[1, 1, 0], [1, 1, 0], [0, 0, 1]], block_size=8)
      >>> blocks = bsjax.nn.initializers.orthogonal(layout)(jax.random.key(0), (5, 8, 8))
      >>> x = jax.random.normal(jax.random.key(1), (4, 24))
      >>> norms = [jax.numpy.linalg.norm(a, axis=1) for a in (x, bsjax.spmm(x, blocks, layout))]
      >>> bool(abs(norms[0] - norms[1]).max() < 1e-4)
      True
    """
    _check(layout, scale)
    groups = _groups(layout)

    # One program: else every operation is compiled for every size of group (5 sizes: 6.5 s of CPU against 1.0 s).
    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(key, shape, dtype):
        b = layout.block_size
        blocks = jax.random.normal(key, shape, dtype if jnp.finfo(dtype).bits > 32 else jnp.float32)
        for ids in groups:
            num, rows, cols = ids.shape
            w = blocks.at[ids].get(mode="fill", fill_value=0)
            w = w.transpose(0, 1, 3, 2, 4).reshape(num, rows * b, cols * b)
            w = scale * _orthonormal(w)
            blocks = blocks.at[ids].set(w.reshape(num, rows, b, cols, b).transpose(0, 1, 3, 2, 4), mode="drop")
        return blocks.astype(dtype)

    def init(key, shape, dtype=jnp.float32):
        _check_shape(shape, layout)
        return draw(key, tuple(shape), jnp.dtype(dtype))

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
        diagonal = (layout.rows == layout.cols) & (layout.rows >= 0)
        return diagonal.astype(dtype)[:, None, None] * jnp.eye(layout.block_size, dtype=dtype)[None]

    return init


def _groups(layout):
    """Lists the stored blocks of each group of block columns with the same block rows, as the group's matrix.

    A list of int `[groups, rows, columns]`, one for each size; wide groups are split, so that rows >= columns. Rows are
    padded to a power of two with ids past the last block, so that a pattern with many column lengths has few sizes to
    compile: rows of zeros change nothing in a QR decomposition.
    """
    mask = layout.to_mask()  # TypeError for a traced layout
    rows, cols = np.asarray(layout.rows), np.asarray(layout.cols)
    stored = np.flatnonzero(rows >= 0)
    ids = np.full(mask.shape, layout.num_blocks)
    ids[rows[stored], cols[stored]] = stored
    groups, sizes = {}, {}
    for column in np.flatnonzero(mask.any(0)):
        groups.setdefault(mask[:, column].tobytes(), []).append(column)
    for columns in groups.values():
        inputs = np.flatnonzero(mask[:, columns[0]])
        rest = 2 ** (len(inputs) - 1).bit_length() - len(inputs)
        for first in range(0, len(columns), len(inputs)):
            members = ids[np.ix_(inputs, columns[first : first + len(inputs)])]
            members = np.pad(members, ((0, rest), (0, 0)), constant_values=layout.num_blocks)
            sizes.setdefault(members.shape, []).append(members)
    return [np.stack(members) for members in sizes.values()]


def _orthonormal(w):
    """Takes normal matrices `[..., rows, cols]`, rows >= cols, to ones with orthonormal columns, uniform among all."""
    q, r = jnp.linalg.qr(w)
    # QR leaves the sign of each column to the algorithm; r's diagonal says which it took. Undone, q is uniform.
    return q * jnp.where(jnp.diagonal(r, axis1=-2, axis2=-1) < 0, -1, 1).astype(q.dtype)[..., None, :]


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
