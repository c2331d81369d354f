"""Both products in plain JAX: the reference of the native handlers, and what runs where there are none.

Shapes, lists and padding are those of the handlers (cuda/spmm/args.h, cuda/sddmm/args.h): operands carry a leading
group axis, of size 1 where all groups share the operand, and an entry whose index is out of range contributes nothing.
"""

import jax.numpy as jnp
from jax import lax

# Blocks that one step of sddmm gathers: enough to batch small products, small enough to bound memory by 32 slices of x.
_SDDMM_BATCH = 32


def spmm(x, blocks, indptr, indices, block_ids, schedule, *, transpose, tf32):
    """Multiplies `x [g or 1, m, k]` by the block columns that the lists describe: `[g, m, n]`.

    Step l adds the l-th entry of every list at once, so memory stays at two arrays of the size of the result, whatever
    the number of blocks, and each sum runs in the order of its list.
    """
    del schedule  # an order for other hardware
    num_blocks, b = blocks.shape[1], blocks.shape[3]
    num_inputs, num_outputs = x.shape[2] // b, indptr.shape[0] - 1
    m, (groups,) = x.shape[1], jnp.broadcast_shapes(x.shape[:1], blocks.shape[:1])
    if num_blocks == 0 or num_outputs == 0 or num_inputs == 0:
        return jnp.zeros((groups, m, num_outputs * b), x.dtype)
    x_blocks = x.reshape(x.shape[0], m, num_inputs, b).transpose(0, 2, 1, 3)
    w = blocks.swapaxes(2, 3) if transpose else blocks
    starts, ends = indptr[:-1], indptr[1:]

    def entry_product(step):
        entry = starts + step
        at = jnp.clip(entry, 0, num_blocks - 1)
        index = indices[at]
        block = block_ids[at]
        valid = (entry < ends) & (index >= 0) & (index < num_inputs)
        valid = (valid & (block >= 0) & (block < num_blocks))[None, :, None, None]
        # Both sides are cleared: a NaN of an unselected input would survive a product with zero.
        x_entry = jnp.where(valid, x_blocks[:, jnp.clip(index, 0, num_inputs - 1)], 0)
        w_entry = jnp.where(valid, w[:, jnp.clip(block, 0, num_blocks - 1)], 0)
        return _matmul(x_entry, w_entry, tf32)

    longest = jnp.max(ends - starts)
    first = 0 * longest  # taken from an operand: inside shard_map it varies as the sums do
    _, y = lax.while_loop(
        lambda carry: carry[0] < longest,
        lambda carry: (carry[0] + 1, carry[1] + entry_product(carry[0])),
        (first + 1, entry_product(first)),
    )
    return y.transpose(0, 2, 1, 3).reshape(groups, m, num_outputs * b).astype(x.dtype)


def sddmm(x, dy, rows, cols, schedule, *, block_size, tf32):
    """Multiplies `x.T @ dy` at the stored blocks only: `[g, num_blocks, b, b]`."""
    del schedule
    b = block_size
    (groups,) = jnp.broadcast_shapes(x.shape[:1], dy.shape[:1])
    num_rows, num_cols = x.shape[2] // b, dy.shape[2] // b
    if rows.shape[0] == 0 or num_rows == 0 or num_cols == 0:
        return jnp.zeros((groups, rows.shape[0], b, b), x.dtype)

    def one_block(position):
        row, col = position
        x_slice = lax.dynamic_slice_in_dim(x, row * b, b, axis=2)
        dy_slice = lax.dynamic_slice_in_dim(dy, col * b, b, axis=2)
        product = _matmul(x_slice.swapaxes(1, 2), dy_slice, tf32)
        valid = (row >= 0) & (row < num_rows) & (col >= 0) & (col < num_cols)
        return jnp.where(valid, product, 0).astype(x.dtype)

    dblocks = lax.map(one_block, (rows, cols), batch_size=_SDDMM_BATCH)
    return dblocks.swapaxes(0, 1)


def _matmul(a, b, tf32):
    precision = lax.Precision.DEFAULT if tf32 else lax.Precision.HIGHEST
    return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=precision)
