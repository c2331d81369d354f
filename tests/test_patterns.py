"""Patterns: their counts and shapes, the paper's reach, and the measures against networkx."""

import sys

import hypothesis.extra.numpy
import matplotlib.pyplot as pyplot
import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsjax import Layout, patterns

pyplot.switch_backend("Agg")  # no screen needed
square_masks = st.integers(0, 9).flatmap(lambda n: hypothesis.extra.numpy.arrays(bool, (n, n)))
sides = st.integers(0, 12)
seeds = st.integers(0, 2**32)

SEEDED = {
    "barabasi_albert": lambda seed: patterns.barabasi_albert(24, 3, seed=seed),
    "watts_strogatz": lambda seed: patterns.watts_strogatz(24, 6, seed=seed),
    "watts_strogatz_2d": lambda seed: patterns.watts_strogatz_2d((4, 6), 6, seed=seed),
    "random": lambda seed: patterns.random(24, 24, 0.25, seed=seed),
    "balanced_random": lambda seed: patterns.balanced_random(24, 24, 0.25, seed=seed),
    "block_diagonal": lambda seed: patterns.block_diagonal(24, 24, 4, seed=seed),
}
by_seeded = pytest.mark.parametrize("make", SEEDED.values(), ids=SEEDED.keys())


def off_diagonal(mask):
    return mask & ~np.eye(*mask.shape, dtype=bool)


def spread(lengths):
    return int(lengths.max() - lengths.min()) if len(lengths) else 0


# ------------------------------------------------------------------------------------------------------- all of them


@by_seeded
def test_a_seed_fixes_the_mask(make):
    first = make(1)
    assert first.dtype == bool
    assert first.shape == (24, 24)
    np.testing.assert_array_equal(make(1), first)
    np.testing.assert_array_equal(make(np.int64(1)), first)
    masks = {make(seed).tobytes() for seed in range(8)}
    assert len(masks) == 8


@by_seeded
def test_global_generators_are_left_alone(make):
    np.random.seed(0)
    before = np.random.get_state(legacy=False)
    make(1)
    np.testing.assert_equal(np.random.get_state(legacy=False), before)


@by_seeded
@pytest.mark.parametrize("seed", [1.5, "1", True])
def test_no_seed(make, seed):
    with pytest.raises(ValueError, match="`seed` must be an integer; got"):
        make(seed)


@by_seeded
def test_masks_make_layouts(make):
    mask = make(0)
    layout = Layout.from_mask(mask, 8)
    np.testing.assert_array_equal(layout.to_mask(), mask)
    assert patterns.density(layout) == layout.density == patterns.density(mask)


# ------------------------------------------------------------------------------------------------------- small worlds


@given(st.integers(2, 40), st.data(), seeds)
def test_barabasi_albert(n, data, seed):
    m = data.draw(st.integers(1, n - 1))
    mask = patterns.barabasi_albert(n, m, seed=seed)
    assert mask.diagonal().all()
    assert mask[:m, :m].all()
    assert (mask == mask.T).all()
    assert mask.sum() == 2 * m * (n - m) + (m - 1) * (m - 2) + n
    later = [np.count_nonzero(mask[node, :node]) for node in range(m + 1, n)]
    assert later == [m] * len(later)  # each new node brings m links
    bare = patterns.barabasi_albert(n, m, seed=seed, diagonal=False)
    np.testing.assert_array_equal(bare, off_diagonal(mask))


def test_barabasi_albert_has_hubs():
    """Column lengths differ by about 12 times at 3 % density."""
    lengths = patterns.column_lengths(patterns.barabasi_albert(576, 8, seed=0))
    assert 9 <= lengths.max() / lengths.min() <= 15


@given(st.integers(1, 40), st.data(), st.floats(0, 1), seeds)
def test_watts_strogatz(n, data, p, seed):
    k = 2 * data.draw(st.integers(0, (n - 1) // 2))
    mask = patterns.watts_strogatz(n, k, p, seed=seed)
    assert mask.diagonal().all()
    assert (mask == mask.T).all()
    assert mask.sum() == n * (k + 1)
    np.testing.assert_array_equal(patterns.watts_strogatz(n, k, p, seed=seed, diagonal=False), off_diagonal(mask))


def test_watts_strogatz_without_rewiring_is_a_ring():
    mask = patterns.watts_strogatz(10, 4, 0, seed=0)
    distance = np.abs(np.subtract.outer(np.arange(10), np.arange(10)))
    np.testing.assert_array_equal(mask, np.minimum(distance, 10 - distance) <= 2)


@given(st.integers(1, 7), st.integers(1, 7), st.data(), st.floats(0, 1), seeds)
def test_watts_strogatz_2d(rows, cols, data, p, seed):
    n = rows * cols
    own_opposites = (2 - rows % 2) * (2 - cols % 2)  # the node itself, and those half way round
    k = 2 * data.draw(st.integers(0, (n - own_opposites) // 2))
    mask = patterns.watts_strogatz_2d((rows, cols), k, p, seed=seed)
    assert mask.shape == (n, n)
    assert mask.diagonal().all()
    assert (mask == mask.T).all()
    assert mask.sum() == n * (k + 1)
    bare = patterns.watts_strogatz_2d((rows, cols), k, p, seed=seed, diagonal=False)
    np.testing.assert_array_equal(bare, off_diagonal(mask))


@pytest.mark.parametrize(("k", "radius"), [(4, 1), (8, 2), (12, 4), (20, 5)])
def test_watts_strogatz_2d_without_rewiring_links_the_nearest(k, radius):
    mask = patterns.watts_strogatz_2d((8, 9), k, 0, seed=0)
    y, x = np.divmod(np.arange(72), 9)
    dy, dx = (np.abs(np.subtract.outer(line, line)) for line in (y, x))
    squared = np.minimum(dy, 8 - dy) ** 2 + np.minimum(dx, 9 - dx) ** 2
    np.testing.assert_array_equal(mask, squared <= radius)


@pytest.mark.parametrize("p", [0.0, 0.2, 1.0])
def test_a_share_p_is_rewired(p):
    for make, grid in ((patterns.watts_strogatz, 900), (patterns.watts_strogatz_2d, (30, 30))):
        ring, mask = make(grid, 8, 0, seed=0), make(grid, 8, p, seed=0)
        moved = np.count_nonzero(ring & ~mask) / np.count_nonzero(off_diagonal(ring))
        assert moved == pytest.approx(p, abs=0.03)  # of 3600 links; one in a hundred moves back


def test_small_worlds_are_clustered_and_close():
    """Few steps as in a random graph, neighbours of neighbours as in a ring."""
    random = patterns.balanced_random(576, 576, 17 / 576, seed=0)
    for make, grid in ((patterns.watts_strogatz, 576), (patterns.watts_strogatz_2d, (24, 24))):
        ring, mask = make(grid, 16, 0, seed=0), make(grid, 16, seed=0)
        assert patterns.clustering(mask) > 0.4 * patterns.clustering(ring)
        assert patterns.clustering(mask) > 4 * patterns.clustering(random)
        assert patterns.average_path_length(mask) < 1.2 * patterns.average_path_length(random)
        assert patterns.average_path_length(mask) < 0.6 * patterns.average_path_length(ring)


# --------------------------------------------------------------------------------------------------------- rectangles


@given(sides, sides, st.floats(0, 1), seeds, st.booleans())
def test_random_masks(num_rows, num_cols, density, seed, diagonal):
    held = num_rows if diagonal and num_rows == num_cols else 0
    count = round(density * num_rows * num_cols)
    for make in (patterns.random, patterns.balanced_random):
        if count < held:
            with pytest.raises(ValueError, match="`density` must be at least .*diagonal.*Pass diagonal=False"):
                make(num_rows, num_cols, density, seed=seed, diagonal=diagonal)
            continue
        mask = make(num_rows, num_cols, density, seed=seed, diagonal=diagonal)
        assert mask.shape == (num_rows, num_cols)
        assert mask.dtype == bool
        assert mask.sum() == count
        assert not held or mask.diagonal().all()
        if make is patterns.balanced_random:
            assert spread(patterns.row_lengths(mask)) <= 1
            assert spread(patterns.column_lengths(mask)) <= 1


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("make", [patterns.random, patterns.balanced_random])
@pytest.mark.parametrize("count", [12, 24])
def test_every_place_is_as_likely_as_any_other(make, diagonal, count):
    """Over 400 seeds, each place off the diagonal is taken as often as the mean, within five standard deviations."""
    times = np.sum([make(6, 6, count / 36, seed=seed, diagonal=diagonal) for seed in range(400)], axis=0)
    places = times[~np.eye(6, dtype=bool)] if diagonal else times.ravel()
    share = places.mean() / 400
    assert share == pytest.approx((count - 6) / 30 if diagonal else count / 36, abs=0.03)
    assert np.abs(places / 400 - share).max() < 5 * np.sqrt(share * (1 - share) / 400)


@pytest.mark.parametrize("density", [0.05, 0.25, 0.75])
def test_balanced_masks_are_random(density):
    """As few neighbours of neighbours are linked as in a random mask: nothing is left of the bands it began as.

    Theirs are at 0.7; even lines alone cost a twelfth of a random mask's.
    """
    balanced, random = (make(300, 300, density, seed=0) for make in (patterns.balanced_random, patterns.random))
    if density > 0.5:
        balanced, random = ~balanced, ~random
    assert patterns.clustering(balanced) == pytest.approx(patterns.clustering(random), rel=0.1)


@given(sides, sides, st.integers(0, 12))
def test_banded(num_rows, num_cols, width):
    mask = patterns.banded(num_rows, num_cols, width)
    assert mask.shape == (num_rows, num_cols)
    np.testing.assert_array_equal(mask.T, patterns.banded(num_cols, num_rows, width))
    np.testing.assert_array_equal(mask[::-1, ::-1], mask)
    if num_rows == num_cols:
        row, col = np.indices(mask.shape)
        np.testing.assert_array_equal(mask, np.abs(row - col) <= width)
    if mask.size:
        assert mask.any(0).all()
        assert mask.any(1).all()


@given(st.integers(1, 12), st.integers(1, 12), st.data(), seeds)
def test_block_diagonal(num_rows, num_cols, data, seed):
    groups = data.draw(st.integers(1, min(num_rows, num_cols)))
    mask = patterns.block_diagonal(num_rows, num_cols, groups)
    members = np.unique(mask, axis=0, return_counts=True)  # one kind of row a group
    assert len(members[0]) == groups
    assert spread(members[1]) <= 1
    assert (members[0].sum(0) == 1).all()  # no output in two groups
    assert spread(members[0].sum(1)) <= 1
    assert (np.diff(mask.argmax(1)) >= 0).all()  # from corner to corner
    shuffled = patterns.block_diagonal(num_rows, num_cols, groups, seed=seed)
    np.testing.assert_array_equal(np.sort(shuffled, axis=0), np.sort(mask, axis=0))
    assert sorted(shuffled.tolist()) == sorted(mask.tolist())


def test_shuffled_groups_mix_from_layer_to_layer():
    plain = [patterns.block_diagonal(64, 64, 8)] * 4
    shuffled = [patterns.block_diagonal(64, 64, 8, seed=seed) for seed in range(4)]
    assert patterns.reach(plain) == [1 / 8] * 4
    assert patterns.reach(shuffled)[0] == 1 / 8
    assert patterns.reach(shuffled)[2] == 1


def test_dense():
    assert patterns.dense(3, 5).tolist() == [[True] * 5] * 3
    assert patterns.dense(0, 5).shape == (0, 5)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: patterns.barabasi_albert(8, 0, seed=0), "`m` must be from 1 to 7; got 0"),
        (lambda: patterns.barabasi_albert(8, 8, seed=0), "`m` must be from 1 to 7; got 8"),
        (lambda: patterns.barabasi_albert(1, 1, seed=0), "`n` must be at least 2; got 1"),
        (lambda: patterns.barabasi_albert(8.0, 1, seed=0), "`n` must be an integer; got 8.0"),
        (lambda: patterns.watts_strogatz(8, 3, seed=0), "`k` must be even.*got 3"),
        (lambda: patterns.watts_strogatz(8, 8, seed=0), "`k` must be from 0 to 7; got 8"),
        (lambda: patterns.watts_strogatz(8, 2, 1.5, seed=0), "`p` must be from 0 to 1; got 1.5"),
        (lambda: patterns.watts_strogatz(8, 2, float("nan"), seed=0), "`p` must be from 0 to 1; got nan"),
        (lambda: patterns.watts_strogatz_2d(8, 2, seed=0), r"`shape` must be a pair, \(rows, cols\); got 8"),
        (lambda: patterns.watts_strogatz_2d((8, 0), 2, seed=0), "`shape` must be at least 1; got 0"),
        (lambda: patterns.watts_strogatz_2d((2, 3), 6, seed=0), "`k` must be from 0 to 4; got 6"),
        (lambda: patterns.watts_strogatz_2d((3, 3), 3, seed=0), "`k` must be even.*got 3"),
        (lambda: patterns.random(4, 4, 1.1, seed=0), "`density` must be from 0 to 1; got 1.1"),
        (lambda: patterns.random(-1, 4, 0.5, seed=0), "`num_rows` must be at least 0; got -1"),
        (lambda: patterns.balanced_random(4, 2.5, 0.5, seed=0), "`num_cols` must be an integer; got 2.5"),
        (lambda: patterns.balanced_random(4, 4, 0.5, seed=-1), "`seed` must be at least 0; got -1"),
        (lambda: patterns.banded(4, 4, -1), "`width` must be at least 0; got -1"),
        (lambda: patterns.block_diagonal(4, 8, 5), "`num_groups` must be from 1 to 4; got 5"),
        (lambda: patterns.reach(np.eye(3)), "`steps` must be given"),
        (lambda: patterns.reach([np.eye(3)], 2), "`steps` must be left out where `masks` is a list.*got 2"),
        (lambda: patterns.reach(np.eye(3), -1), "`steps` must be at least 0; got -1"),
        (lambda: patterns.reach(np.ones((2, 3)), 2), r"`mask` must be square.*got \(2, 3\)"),
        (lambda: patterns.reach([np.ones((2, 3)), np.ones((2, 3))]), "`masks` needs a row for each column.*3; got 2"),
        (lambda: patterns.clustering(np.ones((2, 3))), r"`mask` must be square.*got \(2, 3\)"),
        (lambda: patterns.average_path_length(np.ones((2, 3))), r"`mask` must be square.*got \(2, 3\)"),
        (lambda: patterns.density(np.ones(3)), r"`mask` must be a Layout or have 2 dimensions; got shape \(3,\)"),
    ],
)
def test_wrong_arguments(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


# ----------------------------------------------------------------------------------------------------------- measures


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda seed: patterns.barabasi_albert(576, 8, seed=seed), [0.029, 0.45, 0.998, 1.0]),
        (lambda seed: patterns.watts_strogatz(576, 16, seed=seed), [0.03, 0.20, 0.85, 1.0]),
    ],
    ids=["barabasi_albert", "watts_strogatz"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_reach_is_that_of_the_paper(make, expected, seed):
    np.testing.assert_allclose(patterns.reach(make(seed), 4), expected, atol=0.03)


@given(square_masks, st.integers(0, 4))
def test_reach_is_where_powers_are_not_zero(mask, steps):
    powers = [np.linalg.matrix_power(mask.astype(int), step) for step in range(1, steps + 1)]
    expected = [float((power > 0).mean()) if mask.size else 0.0 for power in powers]
    assert patterns.reach(mask, steps) == expected
    assert patterns.reach([mask] * steps) == expected
    assert patterns.reach(Layout.from_mask(mask, 8), steps) == expected


def test_reach_through_layers():
    first, second = np.array([[1, 0, 0], [0, 1, 0]]), np.array([[0, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]])
    assert patterns.reach([first, Layout.from_mask(second, 8)]) == [2 / 6, 3 / 8]
    assert patterns.reach([]) == []


@given(square_masks)
def test_path_lengths_agree_with_networkx(mask):
    graph = networkx.from_numpy_array(mask, create_using=networkx.DiGraph)
    if len(mask) < 2:
        expected = 0
    elif networkx.is_strongly_connected(graph):
        expected = networkx.average_shortest_path_length(graph)
    else:
        expected = np.inf
    assert patterns.average_path_length(mask) == pytest.approx(expected)


@given(square_masks)
def test_clustering_agrees_with_networkx(mask):
    graph = networkx.from_numpy_array(off_diagonal(mask | mask.T))
    expected = networkx.average_clustering(graph) if len(mask) else 0
    assert patterns.clustering(mask) == pytest.approx(expected)


@given(hypothesis.extra.numpy.arrays(bool, st.tuples(sides, sides)))
def test_summary(mask):
    measures = patterns.summary(mask)
    assert measures == patterns.summary(Layout.from_mask(mask, 8)) == patterns.summary(mask.astype(int))
    assert measures["num_blocks"] == mask.sum()
    for name, axis in (("row_lengths", 1), ("column_lengths", 0)):
        lengths = mask.sum(axis).tolist() or [0]
        assert measures[name] == (min(lengths), max(lengths))
    assert ("reach" in measures) == (mask.shape[0] == mask.shape[1])


# --------------------------------------------------------------------------------------------------------------- plot


def test_plot_draws_the_mask():
    mask = patterns.barabasi_albert(24, 3, seed=0)[:20]
    layout = Layout.from_mask(mask, 8)
    ax = patterns.plot(layout)
    np.testing.assert_array_equal(ax.images[0].get_array(), mask)
    assert ax.get_title() == f"20 x 24 blocks, density {layout.density:.4g}"
    np.testing.assert_array_equal(ax.images[0].to_rgba(mask)[..., 0], ~mask)  # red: none where there is a block
    ax.figure.canvas.draw()
    assert patterns.plot(mask, ax=ax) is ax
    pyplot.close("all")


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_plot_of_nothing(shape):
    ax = patterns.plot(np.zeros(shape))
    ax.figure.canvas.draw()
    assert not ax.images
    pyplot.close("all")


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install bsjax\[plot\]"):
        patterns.plot(patterns.dense(2, 2))
