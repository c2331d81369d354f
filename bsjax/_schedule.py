"""Schedules: the order in which the fastest CUDA kernels walk a pattern, made once for each layout.

Native code makes them; where the pattern is traced, plain JAX does. Each is an int32 array whose form cuda/seal.h,
cuda/spmm/schedule.h and cuda/sddmm/schedule.h describe. Its length follows from the shape, the block size and the
number of blocks alone, whoever makes it, so that layouts alike in these can be stacked and need no new compilation. A
header alone means that there is none; other kernels then serve the product.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from bsjax import _ffi

SEAL = -0x05EA1ED1  # `_native.seal`, for builds without it; cuda/seal.h says what it is for


def none() -> Any:
    """The header that says that there is no schedule."""
    return np.array([SEAL, 0, 0, 0], np.int32)


def fprop(indptr_t, indices_t, perm_t, shape, block_size):
    """The schedule of `x @ w`."""
    k, n = shape
    return _spmm(indptr_t, indices_t, perm_t, k, n, block_size)


def dgrad(indptr, indices, perm, shape, block_size):
    """The schedule of `dy @ w.T`."""
    k, n = shape
    return _spmm(indptr, indices, perm, n, k, block_size)


def wgrad(rows, cols, shape, block_size):
    """The schedule of `x.T @ dy` at the blocks."""
    if not _ffi.native or not len(rows):
        return none()
    return np.frombuffer(_ffi.native.sddmm_schedule(rows, cols, *shape, block_size), np.int32)


def _spmm(indptr, indices, block_ids, k, n, block_size):
    if not _ffi.native or not len(indices):
        return none()
    return np.frombuffer(_ffi.native.spmm_schedule(indptr, indices, block_ids, k, n, block_size), np.int32)


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

    rank = _rank(_begins(group, tile), _first(_begins(group)))
    four = rank // stage_tiles
    part = (position - _first(_begins(group, four))) // form["max_blocks"]
    stage = _count(_begins(group, four, part)) - 1
    stage = jnp.where(group < form["num_groups"], stage, max_stages)  # padding is in none
    slot = rank % stage_tiles
    offset = slot * form["tile_bytes"] + rows % tile_rows * (2 * b)

    # Their lists: entries by place and column, rows still rising.
    key = (stage * units + cols // unit_cols % units) * unit_cols + cols % unit_cols
    counts = jnp.zeros(max_stages * units * unit_cols, jnp.int32).at[key].add(1, mode="drop")
    counts = counts.reshape(max_stages, units, unit_cols)
    of_place = counts.sum(-1, dtype=jnp.int32)
    packed = (counts << jnp.broadcast_to(8 * jnp.arange(unit_cols, dtype=jnp.int32), counts.shape)).sum(
        -1, dtype=jnp.int32
    )
    order = jnp.argsort(key, stable=True)
    groups_of_stages = jnp.full(max_stages, form["num_groups"], jnp.int32).at[stage].set(group, mode="drop")
    unit = jnp.arange(form["num_units"], dtype=jnp.int32)
    sections = {
        "units": jnp.where(unit * form["unit_cols"] < n, unit, -1),
        "stage_begin": jnp.searchsorted(groups_of_stages, jnp.arange(form["num_groups"] + 1, dtype=jnp.int32)),
        "tiles": jnp.full((max_stages, stage_tiles), -1, jnp.int32).at[stage, slot].set(tile, mode="drop"),
        "entry_begin": jnp.cumulative_sum(of_place.sum(-1, dtype=jnp.int32), include_initial=True, dtype=jnp.int32),
        "places": jnp.stack([jnp.cumsum(of_place, -1, dtype=jnp.int32) - of_place, packed], -1),
        "block_ids": block_ids[order],
        "offsets": offset[order],
    }
    schedule = jnp.zeros(form["size"], jnp.int32)
    for name, section in sections.items():
        schedule = lax.dynamic_update_slice(schedule, section.reshape(-1).astype(jnp.int32), (form["sections"][name],))
    return schedule.at[0].set(SEAL)


def traced_wgrad(rows, cols, shape, block_size):
    """The schedule of `x.T @ dy` at the blocks for traced places: int32, of the size that native code gives it.

    Blocks are cut as `SddmmCut` (cuda/sddmm/schedule.h) says, where native code clusters them by what a bin costs:
    right, at times slower.

    Args:
      rows, cols: `[num_blocks]` int32, in any order: block row and block column of each block; one with a number
        outside the matrix is padding.
      shape: `(k, n)`, in elements.
      block_size: b.
    """
    (k, n), b, num_blocks = shape, block_size, len(rows)
    form = _ffi.native.sddmm_schedule_form(k, n, b, num_blocks) if _ffi.native and num_blocks else None
    if not form:
        return none()
    max_bins, unit_tiles = form["max_bins"], form["unit_tiles"]
    unit = max(
        form["tile_cols"] // b, 1
    )  # blocks along a unit's side: a unit is a tile, or the tiles of a block of 128

    # The bins: blocks by segment, tile of dy and tile of x, cut evenly.
    valid = (rows >= 0) & (rows < k // b) & (cols >= 0) & (cols < n // b)
    x_segment = jnp.where(valid, rows // unit * unit_tiles // form["cut_x_tiles"], jnp.iinfo(jnp.int32).max)
    y_segment = jnp.where(valid, cols // unit * unit_tiles // form["cut_y_tiles"], 0)
    ids = jnp.lexsort((rows // unit, cols // unit, y_segment, x_segment)).astype(jnp.int32)
    segment = _begins(x_segment[ids], y_segment[ids])
    first, position = _first(segment), jnp.arange(num_blocks, dtype=jnp.int32)
    length = jnp.zeros(num_blocks, jnp.int32).at[first].add(1)[first]
    even = -(-length // -(-length // form["cut_blocks"]))  # blocks a bin
    bins = _count(segment | ((position - first) % even == 0)) - 1

    # Their blocks in the order of slots: block column by block column where two of one fill a slot, else row by row.
    rows, cols = rows[ids], cols[ids]
    order = jnp.lexsort((rows, cols, bins) if b == 8 else (cols, rows, bins))
    rows, cols, ids = rows[order], cols[order], ids[order]
    valid = valid[ids]
    start = _first(_begins(bins))
    at, size = position - start, jnp.zeros(max_bins, jnp.int32).at[bins].add(1)[bins]

    # Their tiles: the units of x, then those of dy, each in rising order.
    def places(units):
        order = jnp.lexsort((units, bins))
        return jnp.zeros(num_blocks, jnp.int32).at[order].set(_rank(_begins(bins, units[order]), start))

    x, y = rows // unit, cols // unit
    x_place, y_place = places(x), places(y)
    y_place += jnp.zeros(max_bins, jnp.int32).at[bins].max(x_place + 1)[bins]
    computed = jnp.where(valid, bins, max_bins)  # a bin of padding has no tiles
    head = jnp.zeros((max_bins, form["descriptors_at"]), jnp.int32)
    head = head.at[computed, 0].max((y_place + 1) * unit_tiles, mode="drop")
    for t in range(unit_tiles):
        tiles_at = form["tiles_at"] + t
        head = head.at[computed, tiles_at + x_place * unit_tiles].set(x * unit_tiles + t, mode="drop")
        head = head.at[computed, tiles_at + y_place * unit_tiles].set(y * unit_tiles + t | form["dy_tile"], mode="drop")

    # Their slots.
    x_place, y_place = x_place * unit + rows % unit, y_place * unit + cols % unit  # in blocks, or units
    num_slots = form["workers"] * form["slots"]
    descriptors = jnp.zeros((max_bins, num_slots), jnp.int32)
    block_ids = jnp.full((max_bins, num_slots * form["slot_blocks"]), -1, jnp.int32)
    if b <= 32:
        pieces = b // 8
        pair, of_pair = at, 0
        if b == 8:  # two of one block column fill a slot
            second = (position - _first(_begins(bins, cols))) % 2
            pair, of_pair = _rank(second == 0, start), second
        num_used = jnp.zeros(max_bins, jnp.int32).at[bins].max(pair + 1)[bins]
        worker = ((pair + 1) * form["workers"] - 1) // num_used  # a run of slots each, as even as can be
        slot = worker * form["slots"] + pair - num_used * worker // form["workers"]
        block_ids = block_ids.at[bins, slot * form["slot_blocks"] + of_pair].set(ids)
        descriptor = x_place * pieces | y_place * pieces << 16 | form["compute"]
        if b == 8:
            last = jnp.concatenate([second[1:] == 0, jnp.ones(1, bool)])  # of its slot
            descriptor |= jnp.where(last, x_place, jnp.roll(x_place, -1)) << 8
            descriptors = descriptors.at[jnp.where(second == 0, computed, max_bins), slot].set(descriptor, mode="drop")
        else:
            descriptors = descriptors.at[computed, slot].set(descriptor, mode="drop")
        descriptors = _mark_loads(descriptors.reshape(max_bins, form["workers"], form["slots"]), form)
    elif b == 64:
        # Two of one row follow each other as a pair, pairs before singles; each warpgroup takes half of either.
        row = _first(_begins(bins, rows))
        in_row, of_row = position - row, jnp.zeros(num_blocks, jnp.int32).at[row].add(1)[row]
        paired = in_row < of_row - of_row % 2
        pairs_before, singles_before = (_count(flags) - flags.astype(jnp.int32) for flags in (paired, ~paired))
        rank = jnp.where(paired, pairs_before - pairs_before[start], singles_before - singles_before[start])
        pairs = jnp.zeros(max_bins, jnp.int32).at[bins].add(paired.astype(jnp.int32))[bins] // 2
        own_pairs = (pairs + 1) // 2  # of the first warpgroup
        own_singles = jnp.maximum((size + 1) // 2 - 2 * own_pairs, 0)
        worker = jnp.where(paired, rank >= 2 * own_pairs, rank >= own_singles).astype(jnp.int32)
        slot = rank - worker * jnp.where(paired, 2 * own_pairs, own_singles)
        slot += jnp.where(paired, 0, 2 * jnp.where(worker == 0, own_pairs, pairs - own_pairs))
        slot += worker * form["slots"]
        kinds = 16 * own_pairs + own_singles
        kinds |= (16 * (pairs - own_pairs) + size - 2 * pairs - own_singles) << 8
        head = head.at[computed, 1].set(kinds, mode="drop")
        block_ids = block_ids.at[bins, slot].set(ids)
        descriptors = descriptors.at[computed, slot].set(x_place | y_place << 16, mode="drop")
    else:
        # A block a warpgroup: its quarters, as two pairs.
        head = head.at[computed, 1].add(0x20 << 8 * at, mode="drop")
        for q in range(4):
            slot = at * form["slots"] + q
            block_ids = block_ids.at[bins, slot].set(ids)
            tiles = jnp.where(valid, 2 * x_place + q // 2 | (2 * y_place + q % 2) << 16, 0)
            descriptors = descriptors.at[bins, slot].set(tiles | q << 8)
    table = jnp.concatenate([head, descriptors.reshape(max_bins, num_slots), block_ids], 1)
    header = jnp.zeros(len(none()), jnp.int32).at[0].set(SEAL).at[1].set(bins[-1] + 1)
    return jnp.concatenate([header, table.reshape(-1)])


def _mark_loads(descriptors, form):
    """Marks what a slot does not find in registers from the slot before it, of the same worker: `[..., slots]`."""
    before = jnp.concatenate([jnp.full_like(descriptors[..., :1], -1), descriptors[..., :-1]], -1)
    differs = descriptors ^ before
    loads = jnp.where(differs & 0xFFFF, form["load_x"], 0) | jnp.where(differs & 0xFF0000, form["load_dy"], 0)
    return jnp.where(descriptors & form["compute"], descriptors | loads, 0)


# Runs: of entries side by side with the same keys.


def _begins(*keys):
    """Which entries begin a run."""
    changes = [jnp.concatenate([jnp.ones(1, bool), key[1:] != key[:-1]]) for key in keys]
    return jnp.any(jnp.stack(changes), 0)


def _first(begins):
    """The first entry of each entry's run."""
    return lax.cummax(jnp.where(begins, jnp.arange(len(begins), dtype=jnp.int32), 0))


def _count(flags):
    """How many flags are set up to each entry, its own included."""
    return jnp.cumsum(flags, dtype=jnp.int32)


def _rank(begins, start):
    """How many runs begin between `start`, the first entry of a larger run, and each entry's own."""
    count = _count(begins)
    return count - count[start]
