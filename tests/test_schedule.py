"""Schedules, and layouts of traced patterns: whoever makes them, every block is walked once, where its x is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bsjax
from bsjax import Layout, _ffi, _schedule
from bsjax.ops import _matmul
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
    *_, words = layout.lists(transpose)
    k, n = layout.shape[::-1] if transpose else layout.shape
    return walk_words(words, k, n, layout.block_size, layout.num_blocks)


def walk_words(words, k, n, b, num_blocks):
    """What a kernel multiplies as it follows the schedule: (block row of x, block column of y, stored block)."""
    words, form = np.asarray(words), native.spmm_schedule_form(k, n, b, num_blocks)
    assert words.dtype == np.int32
    assert words.shape == (form["size"],)
    np.testing.assert_array_equal(words[:4], _schedule.none())
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
    for layout in (Layout.from_mask(mask, b), Layout.from_indices(rows, cols, shape, b), traced):
        blocks = zip(layout.rows.tolist(), layout.cols.tolist(), range(layout.num_blocks), strict=True)
        stored = [(row, col, i) for row, col, i in blocks if row >= 0]
        assert len(stored) == mask.sum()
        assert walk(layout, False) == sorted(stored)
        assert walk(layout, True) == sorted((col, row, i) for row, col, i in stored)


def random_places(b, rows, cols, density, padding=0):
    """Places in no order, so that ids are a permutation; `padding` of them outside the matrix."""
    rng = np.random.default_rng(b)
    places = np.argwhere(rng.random((rows, cols)) < density)
    outside = np.array([[-1, -1], [rows, 0], [0, cols], [-7, cols + 9]])[np.arange(padding) % 4]
    return rng.permutation(np.concatenate([places, outside.reshape(-1, 2)])).T, (rows * b, cols * b)


def tile_places(b, num_rows, num_cols, step):
    """A block in each of so many tiles, or patches of `step` tiles: a bin has room for few of them."""
    unit = max(64 // b, 1) * step
    rows, cols = np.divmod(np.arange(num_rows * num_cols), num_cols)
    return (rows * unit, cols * unit), (num_rows * unit * b, num_cols * unit * b)


WGRAD = {
    "random": lambda b: random_places(b, 37, 70, 0.1),
    "padding": lambda b: random_places(b, 20, 30, 0.3, padding=501),
    "padding alone": lambda b: random_places(b, 5, 5, 0, padding=300),
    "no matrix": lambda b: random_places(b, 0, 5, 0, padding=3),
    "full": lambda b: random_places(b, 50, 50, 1),
    "one": lambda b: (([2], [3]), (5 * b, 5 * b)),
    "one row": lambda b: random_places(b, 1, 300, 0.6),
    "one column": lambda b: random_places(b, 300, 1, 0.6),
    "diagonal": lambda b: ((np.arange(500), np.arange(500)), (500 * b, 500 * b)),
    "skewed": lambda b: (
        np.where(np.arange(400) < 200, [[3] * 400, range(400)], [range(400), [5] * 400]),
        (400 * b, 400 * b),
    ),
    "one a pair of tiles": lambda b: tile_places(b, 40, 40, 1),
    "one a patch": lambda b: tile_places(b, 40, 40, 8),
}


class Bins:
    """A schedule of wgrad as the kernel follows it, by the rules of cuda/sddmm/schedule.h."""

    def __init__(self, words, shape, b, num_blocks):
        self.form, self.b = native.sddmm_schedule_form(*shape, b, num_blocks), b
        words = np.asarray(words)
        assert words.dtype == np.int32
        assert words.shape == (self.form["size"],)
        assert words[0] == _schedule.SEAL
        assert 0 < words[1] <= self.form["max_bins"]
        self.computed, self.zeros = [], []  # (block, quarter, block row, block column), (block, quarter)
        for i, record in enumerate(words[self.form["begin"] :].reshape(-1, self.form["words"]).tolist()):
            tiles, ids = record[self.form["tiles_at"] :][: record[0]], record[self.form["ids_at"] :]
            if i >= words[1]:
                assert not tiles
                assert set(ids) == {-1}
                continue
            assert len(tiles) == len(set(tiles)) <= self.form["max_tiles"]
            for worker in range(self.form["workers"]):
                first, count = worker * self.form["slots"], self.form["slots"]
                slots = record[self.form["descriptors_at"] :][first : first + count]
                own = np.reshape(ids, (-1, self.form["slot_blocks"]))[first : first + count].tolist()
                if b <= 32:
                    self.follow(tiles, slots, own)
                else:
                    self.follow_wide(tiles, record[1] >> 8 * worker & 255, slots, own)

    def column(self, tiles, place, offset, dy):
        """Where an operand begins: column `offset` of what is at `place`, which must be of x, or of dy."""
        assert bool(tiles[place] & self.form["dy_tile"]) == dy
        return (tiles[place] & ~self.form["dy_tile"]) * self.form["tile_cols"] + offset

    def follow(self, tiles, slots, ids):
        loaded, computes = {}, True
        for slot, own in zip(slots, ids, strict=True):
            compute, transposed = bool(slot & self.form["compute"]), bool(slot & self.form["transposed"])
            assert computes or not compute  # computed slots come first
            computes = compute
            if not compute:
                self.zeros += [(i, 0) for i in own if i >= 0]
                continue
            x, second, y = slot & 255, slot >> 8 & 255, slot >> 16 & 255
            if slot & self.form["load_x"]:
                loaded["x"] = (x, second)
            if slot & self.form["load_dy"]:
                loaded["dy"] = y
            assert loaded["x"][: len(own)] == (x, second)[: len(own)]
            assert loaded["dy"] == y
            for i, position in zip(own, (x, second), strict=False):
                if i >= 0:
                    at = [
                        self.column(tiles, position // 8, position % 8 * 8, transposed),
                        self.column(tiles, y // 8, y % 8 * 8, not transposed),
                    ]
                    self.add(i, 0, *(at[::-1] if transposed else at))

    def follow_wide(self, tiles, kind, slots, ids):
        assert kind in (0x40, 0x20, 0x12, 0x11, 0x10, 4, 3, 2, 1, 0)  # those that the kernel has code for
        pairs, singles = (0, 4) if kind == 0x40 else divmod(kind, 16)
        for s, (slot, (i,)) in enumerate(zip(slots, ids, strict=True)):
            x, quarter, y = slot & 255, slot >> 8 & 255, slot >> 16 & 255
            if s >= 2 * pairs + singles:
                self.zeros += [(i, quarter)] * (i >= 0)
                continue
            step = y - (slots[s - 1] >> 16 & 255)
            if (kind == 0x40 and s > 0) or (s < 2 * pairs and s % 2):
                assert x == slots[s - 1] & 255
                assert step == 1 if kind == 0x40 else step >= 0
            at = self.column(tiles, x, 0, False), self.column(tiles, y, 0, True)
            if self.b == 128:
                assert [side % 128 // 64 for side in at] == list(divmod(quarter, 2))
            self.add(i, quarter, *at)

    def add(self, i, quarter, x, y):
        assert self.b > 32 or x % self.b == y % self.b == 0
        self.computed.append((i, quarter, x // self.b, y // self.b))


@pytest.mark.parametrize("b", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("name", WGRAD)
def test_wgrad_bins_hold_each_block_once(name, b):
    (rows, cols), shape = WGRAD[name](b)
    rows, cols = np.asarray(rows, np.int32), np.asarray(cols, np.int32)
    quarters = range(4 if b == 128 else 1)
    inside = (rows >= 0) & (rows < shape[0] // b) & (cols >= 0) & (cols < shape[1] // b)
    places = enumerate(zip(rows.tolist(), cols.tolist(), inside, strict=True))
    stored = sorted((i, q, row, col) for i, (row, col, valid) in places if valid for q in quarters)
    zeros = sorted((i, q) for i in np.flatnonzero(~inside).tolist() for q in quarters)
    for make in (_schedule.wgrad, jax.jit(_schedule.traced_wgrad, static_argnums=(2, 3))):
        bins = Bins(make(rows, cols, shape, b), shape, b, len(rows))
        assert sorted(bins.computed) == stored
        assert sorted(bins.zeros) == zeros


@pytest.mark.parametrize("b", [8, 64, 128])
def test_traced_schedules_do_not_mind_64_bits(b):
    (rows, cols), shape = random_places(b, 20, 30, 0.3, padding=5)

    def make(rows, cols):
        ids = jnp.arange(len(rows), dtype=jnp.int32)
        return _schedule.traced_wgrad(rows, cols, shape, b), _schedule.traced_spmm(rows, cols, ids, *shape, b)

    narrow = jax.jit(make)(rows.astype(np.int32), cols.astype(np.int32))
    with jax.enable_x64(True):
        wide = jax.jit(make)(rows.astype(np.int32), cols.astype(np.int32))
    for one, other in zip(narrow, wide, strict=True):
        assert one.dtype == other.dtype == jnp.int32
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("b", [8, 16, 32])
def test_spmm_schedules_take_ids_in_any_order(b):
    """The caller's order of blocks: ids are a permutation, in both passes."""
    (rows, cols), (k, n) = random_places(b, 37, 70, 0.2, padding=7)
    inside = (rows >= 0) & (rows < k // b) & (cols >= 0) & (cols < n // b)
    stored = sorted(zip(*(part[inside].tolist() for part in (rows, cols, np.arange(len(rows)))), strict=True))
    for make, x, y, sides in ((_schedule.fprop, rows, cols, (k, n)), (_schedule.dgrad, cols, rows, (n, k))):
        order = np.lexsort((x, np.where(inside, y, k + n))).astype(np.int32)
        indptr = np.searchsorted(y[order][: inside.sum()], np.arange(sides[1] // b + 1)).astype(np.int32)
        indices = np.where(inside, x, -1)[order].astype(np.int32)
        host = make(indptr, indices, order, (k, n), b)
        ids = jnp.arange(len(rows), dtype=jnp.int32)
        lists = np.where(inside, x, -1).astype(np.int32), np.where(inside, y, -1).astype(np.int32)
        traced = jax.jit(_schedule.traced_spmm, static_argnums=(3, 4, 5))(*lists, ids, *sides, b)
        products = [(row, col, i) if x is rows else (col, row, i) for row, col, i in stored]
        for words in (host, traced):
            assert walk_words(words, sides[0], sides[1], b, len(rows)) == sorted(products)


def test_none_is_a_header():
    assert _schedule.SEAL == native.seal
    np.testing.assert_array_equal(_schedule.none(), [native.seal, 0, 0, 0])
    nothing = np.zeros(0, np.int32)
    np.testing.assert_array_equal(_schedule.wgrad(nothing, nothing, (16, 16), 8), _schedule.none())
    np.testing.assert_array_equal(_schedule.traced_wgrad(nothing, nothing, (16, 16), 8), _schedule.none())
    one = np.zeros(1, np.int32)
    for b in (64, 128):
        indptr = np.array([0, 1], np.int32)
        np.testing.assert_array_equal(_schedule.fprop(indptr, one, one, (b, b), b), _schedule.none())


MAPS = {
    "zeros": jnp.zeros_like,
    "ones": jnp.ones_like,
    "negated": lambda x: -x,
    "plus one": lambda x: x + 1,
    "minus one": lambda x: x - 1,
    "doubled": lambda x: x * 2,
    "halved": lambda x: x // 2,
    "inverted": lambda x: ~x,
    "absolute and less": lambda x: jnp.abs(x) - 3,
    "rolled": lambda x: jnp.roll(x, 1),
    "reversed": lambda x: x[::-1],
    "float32": lambda x: x.astype(jnp.float32).astype(jnp.int32),
    "bfloat16": lambda x: x.astype(jnp.bfloat16).astype(jnp.int32),
    "float16": lambda x: x.astype(jnp.float16).astype(jnp.int32),
    "averaged": lambda x: (0.9 * x.astype(jnp.float32) + 0.1 * x.astype(jnp.float32)).astype(jnp.int32),
    "clipped": lambda x: jnp.clip(x, -1, 1),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("b", [8, 64])
def test_changed_arrays_are_refused(name, b):
    """A map over a whole training state reaches the layout in it too."""
    layout = Layout.from_mask(np.ones((3, 2), bool), b)
    x, dy = jnp.ones((1, 5, layout.shape[0])), jnp.ones((1, 5, layout.shape[1]))
    blocks = jnp.ones((1, layout.num_blocks, b, b))
    with jax.default_device(jax.devices("cpu")[0]):
        for transpose, rows in ((False, x), (True, dy)):
            *lists, schedule = layout.lists(transpose)
            with pytest.raises(Exception, match=r"bsjax_spmm: the layout's arrays were changed \(its seal is broken\)"):
                jax.block_until_ready(
                    _matmul._spmm_call(rows, blocks, *lists, MAPS[name](schedule), transpose=transpose, **CHOOSE)
                )
        with pytest.raises(
            Exception, match=r"bsjax_sddmm: the layout's arrays were changed .*: map over nnx.Param only"
        ):
            jax.block_until_ready(
                _matmul._sddmm_call(
                    x, dy, layout.rows, layout.indices, MAPS[name](layout.wgrad_schedule), block_size=b, **CHOOSE
                )
            )


CHOOSE = {"tf32": False, "config": -1}


@pytest.mark.parametrize("words", [0, 1, 5, 4096])
def test_schedules_of_another_size_are_refused(words):
    layout = Layout.from_mask(np.ones((3, 2), bool), 8)
    x, dy = jnp.ones((1, 5, layout.shape[0])), jnp.ones((1, 5, layout.shape[1]))
    blocks = jnp.ones((1, layout.num_blocks, 8, 8))
    schedule = jnp.full(words, native.seal, jnp.int32)
    with pytest.raises(Exception, match=f"bsjax_spmm: schedule must have 4 words .* got {words}"):
        jax.block_until_ready(_matmul._spmm_call(x, blocks, *layout.lists()[:3], schedule, transpose=False, **CHOOSE))
    with pytest.raises(Exception, match=f"bsjax_sddmm: schedule must have 4 words .* got {words}"):
        jax.block_until_ready(_matmul._sddmm_call(x, dy, layout.rows, layout.indices, schedule, block_size=8, **CHOOSE))


@pytest.mark.parametrize(("b", "blocks", "density"), PATTERNS)
def test_from_indices_is_from_mask(b, blocks, density):
    mask, rows, cols = places(b, blocks, density)
    shape = blocks[0] * b, blocks[1] * b
    unpadded = Layout.from_indices(rows[:-3], cols[:-3], shape, b)
    np.testing.assert_array_equal(unpadded.to_mask(), mask)
    order = np.lexsort((cols[:-3], rows[:-3]))
    assert Layout.from_indices(rows[:-3][order], cols[:-3][order], shape, b) == Layout.from_mask(mask, b)
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
        ([0], [0], (16, 12), 8, ValueError, r"`shape` must be .* two multiples of `block_size`, 8; got \(16, 12\)"),
        ([0], [0], (16,), 8, ValueError, "`shape` must be .* two multiples"),
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
        lambda: native.spmm_schedule(one, one, one, 8, 8, 8),  # indptr is too short
        lambda: native.spmm_schedule(np.zeros(2, np.int32), one, np.zeros(3, np.int32), 8, 8, 8),
        lambda: native.spmm_schedule(np.zeros(2, np.int64), one, one, 8, 8, 8),
        lambda: native.spmm_schedule(np.zeros(2, np.int32), one, one, 8, 8, 7),
        lambda: native.sddmm_schedule(one, np.zeros(2, np.int32), 8, 8, 8),
        lambda: native.sddmm_schedule(one, one, 8, 12, 8),
        lambda: native.sddmm_schedule(np.zeros(2, np.int32)[::2], np.zeros((1, 1), np.int32), 8, 8, 8),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="must|lists"):
            call()
