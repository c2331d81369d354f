"""Schedules: the order in which the fastest CUDA kernels walk a pattern, made once for each layout.

Native code makes them. Where the pattern is traced, plain JAX makes those of spmm, and wgrad has none.

Each is an int32 array whose form cuda/spmm_schedule.h and cuda/sddmm_schedule.h describe. Its length follows from the
shape and the number of blocks (of wgrad's, in steps), so that layouts alike in these can be stacked and need no new
compilation. An array of length 1 means that there is none; other kernels then serve the product.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from bsjax import _ffi


def none() -> Any:
    """The array that says that there is no schedule."""
    return np.zeros(1, np.int32)


def fprop(indptr_t, indices_t, perm_t, shape, block_size):
    """The schedule of `x @ w`."""
    k, n = shape
    return _spmm(indptr_t, indices_t, perm_t, k, n, block_size)


def dgrad(indptr, indices, perm, shape, block_size):
    """The schedule of `dy @ w.T`."""
    k, n = shape
    return _spmm(indptr, indices, perm, n, k, block_size)


def wgrad(rows, indices, shape, block_size):
    """The schedule of `x.T @ dy` at the blocks."""
    if not _ffi.native or not len(rows):
        return none()
    return np.frombuffer(_ffi.native.sddmm_schedule(rows, indices, *shape, block_size), np.int32)


def _spmm(indptr, indices, block_ids, k, n, block_size):
    if not _ffi.native or not len(indices):
        return none()
    schedule = _ffi.native.spmm_schedule(indptr, indices, block_ids, k, n, block_size)
    return np.frombuffer(schedule, np.int32) if schedule else none()


def traced_spmm(rows, cols, block_ids, k, n, block_size):
    """The schedule of `x[m, k] @ w = y[m, n]` for traced lists: int32, of the size that native code gives it.

    Units and tiles stay as they lie in the matrix, where native code orders them by work: right, at times slower.

    Args:
      rows, cols, block_ids: `[num_blocks]` int32, in any order: block row and block column of `w`, and which stored
        block; a negative row is padding.
    """
    num_blocks, b = len(rows), block_size
    form = _ffi.native.spmm_schedule_form(k, n, b, num_blocks) if _ffi.native and num_blocks else None
    if not form:
        return none()
    unit_cols, tile_rows = form["unit_cols"] // b, form["tile_cols"] // b
    units, stage_tiles, max_stages = form["group_units"], form["stage_tiles"], form["max_stages"]

    # The stages: entries by group of columns and row, cut where a fifth tile or a block too many would begin.
    group = jnp.where(rows >= 0, cols // (units * unit_cols), form["num_groups"])
    order = jnp.lexsort((rows, group))
    group, rows, cols, block_ids = group[order], rows[order], cols[order], block_ids[order]
    tile, position = rows // tile_rows, jnp.arange(num_blocks, dtype=jnp.int32)

    def begins(*keys):
        changes = [jnp.concatenate([jnp.ones(1, bool), key[1:] != key[:-1]]) for key in keys]
        return jnp.any(jnp.stack(changes), 0)

    def first(flags):  # of the run that each entry is in
        return lax.cummax(jnp.where(flags, position, 0))

    tiles_before = jnp.cumsum(begins(group, tile))
    rank = tiles_before - tiles_before[first(begins(group))]
    four = rank // stage_tiles
    part = (position - first(begins(group, four))) // form["max_blocks"]
    stage = jnp.cumsum(begins(group, four, part)) - 1
    stage = jnp.where(group < form["num_groups"], stage, max_stages)  # padding is in none
    slot = rank % stage_tiles
    offset = slot * form["tile_bytes"] + rows % tile_rows * (2 * b)

    # Their lists: entries by place and column, rows still rising.
    key = (stage * units + cols // unit_cols % units) * unit_cols + cols % unit_cols
    counts = jnp.zeros(max_stages * units * unit_cols, jnp.int32).at[key].add(1, mode="drop")
    counts = counts.reshape(max_stages, units, unit_cols)
    of_place = counts.sum(-1)
    packed = (counts << jnp.broadcast_to(8 * jnp.arange(unit_cols, dtype=jnp.int32), counts.shape)).sum(-1)
    order = jnp.argsort(key, stable=True)
    groups_of_stages = jnp.full(max_stages, form["num_groups"]).at[stage].set(group, mode="drop")
    unit = jnp.arange(form["num_units"])
    sections = {
        "units": jnp.where(unit * form["unit_cols"] < n, unit, -1),
        "stage_begin": jnp.searchsorted(groups_of_stages, jnp.arange(form["num_groups"] + 1)),
        "tiles": jnp.full((max_stages, stage_tiles), -1).at[stage, slot].set(tile, mode="drop"),
        "entry_begin": jnp.cumulative_sum(of_place.sum(-1), include_initial=True),
        "places": jnp.stack([jnp.cumsum(of_place, -1) - of_place, packed], -1),
        "block_ids": block_ids[order],
        "offsets": offset[order],
    }
    schedule = jnp.zeros(form["size"], jnp.int32)
    for name, section in sections.items():
        schedule = lax.dynamic_update_slice(schedule, section.reshape(-1).astype(jnp.int32), (form["sections"][name],))
    return schedule


def traced_wgrad(rows, cols, shape, block_size):
    del rows, cols, shape, block_size
    return none()
