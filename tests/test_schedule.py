"""Schedules, and layouts of traced patterns: whoever makes them, every block is walked once, where its x is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bsjax
from bsjax import Layout, _ffi
from bsjax.testing import integers, oracle

native: Any = _ffi.native  # a build without it fails here, as it should

# (block size, block rows and columns, density)
PATTERNS = [
    (8, (37, 70), 0.3),
    (8, (3, 3), 1),
    (16, (131, 60), 0.1),
    (16, (300, 20), 0.01),
    (32, (64, 64), 1),
    (32, (40, 17), 0.02),
]


def places(b, blocks, density):
    rng = np.random.default_rng(b)
    mask = rng.random(blocks) < density
    mask[0, 0] = True
    rows, cols = np.nonzero(mask)
    order = rng.permutation(len(rows))
    # Three of them are outside the matrix: padding.
    return mask, np.append(rows[order], [-1, 5, blocks[0]]), np.append(cols[order], [2, -7, 0])


def walk(layout, transpose):
    """What a kernel multiplies as it follows the schedule: (block row of x, block column of y, stored block)."""
    *_, words = (np.asarray(part) for part in layout.lists(transpose))
    k, n = layout.shape[::-1] if transpose else layout.shape
    form, b = native.spmm_schedule_form(k, n, layout.block_size, layout.num_blocks), layout.block_size
    assert words.shape == (form["size"],)
    part = {name: words[begin:] for name, begin in form["sections"].items()}
    unit_cols, products = form["unit_cols"] // b, []
    for group in range(form["num_groups"]):
        for stage in range(part["stage_begin"][group], part["stage_begin"][group + 1]):
            first, last = part["entry_begin"][stage : stage + 2]
            assert stage < form["max_stages"]
            assert 0 < last - first <= form["max_blocks"]
            at = first
            for place in range(form["group_units"]):
                begin, counts = part["places"][2 * (stage * form["group_units"] + place) :][:2]
                unit = part["units"][group * form["group_units"] + place]
                assert begin == at - first
                for c in range(unit_cols):
                    for _ in range((counts >> 8 * c) & 255):
                        tile, byte = divmod(part["offsets"][at], form["tile_bytes"])
                        column = part["tiles"][stage * form["stage_tiles"] + tile] * form["tile_cols"] + byte // 2
                        products.append((int(column) // b, int(unit) * unit_cols + c, int(part["block_ids"][at])))
                        at += 1
            assert at == last
    return sorted(products)


@pytest.mark.parametrize(("b", "blocks", "density"), PATTERNS)
def test_every_block_is_walked_once(b, blocks, density):
    mask, rows, cols = places(b, blocks, density)
    shape = blocks[0] * b, blocks[1] * b
    traced = jax.jit(lambda rows, cols: Layout.from_indices(rows, cols, shape, b))(rows, cols)
    stored = [(int(row), int(col), i) for i, (row, col) in enumerate(np.argwhere(mask))]
    for layout in (Layout.from_mask(mask, b), Layout.from_indices(rows, cols, shape, b), traced):
        assert walk(layout, False) == sorted(stored)
        assert walk(layout, True) == sorted((col, row, i) for row, col, i in stored)


@pytest.mark.parametrize("b", [8, 16, 32, 64, 128])
def test_wgrad_bins_hold_each_block_once(b):
    mask = np.random.default_rng(0).random((20, 30)) < 0.3
    layout = Layout.from_mask(mask, b)
    words = np.asarray(layout.wgrad_schedule)
    one = len(native.sddmm_schedule(np.zeros(1, np.int32), np.zeros(1, np.int32), b, b, b)) // 4
    bins = words.reshape(-1, one)
    ids = bins[:, one - {8: 512, 16: 128, 32: 32, 64: 8, 128: 8}[b] :]  # a record ends with its blocks
    found = np.bincount(ids[ids >= 0], minlength=layout.num_blocks)
    np.testing.assert_array_equal(found, 4 if b == 128 else 1)  # of 128: by quarters


@pytest.mark.parametrize(("b", "blocks", "density"), PATTERNS)
def test_from_indices_is_from_mask(b, blocks, density):
    mask, rows, cols = places(b, blocks, density)
    shape = blocks[0] * b, blocks[1] * b
    assert Layout.from_indices(rows[:-3], cols[:-3], shape, b) == Layout.from_mask(mask, b)
    padded = Layout.from_indices(rows, cols, shape, b)
    assert padded.num_blocks == mask.sum() + 3
    np.testing.assert_array_equal(padded.to_mask(), mask)
    assert jax.jit(lambda r, c: Layout.from_indices(r, c, shape, b))(rows, cols) == padded


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("b", [8, 16, 32, 64])
def test_a_traced_pattern_multiplies_and_differentiates(b, dtype):
    """The pattern is an argument of the program: one compilation serves all with as many places, padding included."""
    traces = []

    @jax.jit
    def run(x, blocks, rows, cols):
        traces.append(1)
        layout = Layout.from_indices(rows, cols, (9 * b, 11 * b), b)
        y, gradients = jax.vjp(lambda x, blocks: bsjax.spmm(x, blocks, layout), x, blocks)
        return y, *gradients(y)

    rng = np.random.default_rng(1)
    for num_blocks in (30, 7):
        flat = np.sort(rng.choice(99, num_blocks, replace=False))
        layout = Layout.from_indices(flat // 11, flat % 11, (9 * b, 11 * b), b)
        x = integers(0, (70, 9 * b), dtype)
        blocks = integers(1, (30, b, b), dtype).at[num_blocks:].set(jnp.nan)  # of padding: never used
        rows, cols = (np.append(part, np.full(30 - num_blocks, -1)) for part in (flat // 11, flat % 11))
        y, dx, dblocks = run(x, blocks, rows, cols)
        same = np.testing.assert_array_equal
        rounded = oracle.spmm(x, blocks[:num_blocks], layout).astype(np.float32).astype(dtype)
        same(np.asarray(y), rounded)
        same(
            np.asarray(dx), oracle.spmm(y, blocks[:num_blocks], layout, transpose=True).astype(np.float32).astype(dtype)
        )
        same(np.asarray(dblocks)[:num_blocks], oracle.sddmm(x, y, layout).astype(np.float32).astype(dtype))
        same(np.asarray(dblocks)[num_blocks:], 0)
    assert len(traces) == 1


def test_from_indices_of_nothing():
    layout = Layout.from_indices([], [], (16, 8), 8)
    assert layout == Layout.from_mask(np.zeros((2, 1), bool), 8)
    same = np.testing.assert_array_equal
    same(bsjax.spmm(jnp.ones((3, 16)), jnp.zeros((0, 8, 8)), layout), 0)


@pytest.mark.parametrize(
    ("rows", "cols", "shape", "b", "error", "match"),
    [
        ([0], [0], (16, 16), 7, ValueError, "`block_size` must be one of"),
        ([0], [0], (16, 12), 8, ValueError, r"`shape` must be two multiples of `block_size`, 8; got \(16, 12\)"),
        ([0], [0], (16,), 8, ValueError, "`shape` must be two multiples"),
        ([0], [0, 1], (16, 16), 8, ValueError, "`rows` and `cols` must have one length; got 1 and 2"),
        ([[0]], [[0]], (16, 16), 8, ValueError, r"`rows` must have 1 dimension.*\(1, 1\)"),
        ([0], [0.5], (16, 16), 8, TypeError, "`cols` must be integers; got float64"),
    ],
)
def test_from_indices_says_what_is_wrong(rows, cols, shape, b, error, match):
    with pytest.raises(error, match=match):
        Layout.from_indices(rows, cols, shape, b)


def test_native_preparation_refuses_rather_than_crashes():
    one = np.zeros(1, np.int32)
    calls = [
        lambda: native.spmm_schedule(one, one, None, 8, 8, 8),  # indptr is too short
        lambda: native.spmm_schedule(np.zeros(2, np.int32), one, np.zeros(3, np.int32), 8, 8, 8),
        lambda: native.spmm_schedule(np.zeros(2, np.int64), one, None, 8, 8, 8),
        lambda: native.spmm_schedule(np.zeros(2, np.int32), one, None, 8, 8, 7),
        lambda: native.sddmm_schedule(one, np.zeros(2, np.int32), 8, 8, 8),
        lambda: native.sddmm_schedule(one, one, 8, 12, 8),
        lambda: native.sddmm_schedule(np.zeros(2, np.int32)[::2], np.zeros((1, 1), np.int32), 8, 8, 8),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="must|lists"):
            call()
