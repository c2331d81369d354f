"""The guarantees of the initialisers, column by column."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import bsjax
from bsjax import patterns
from bsjax.nn import initializers
from bsjax.testing import oracle

MASK = np.array([[1, 0, 1, 0], [1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 1, 0]], bool)  # columns of 2, 0, 4 and 1 blocks
B = 32
DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16]
ALL = [initializers.scaled_normal, initializers.orthogonal, initializers.identity]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)


@pytest.fixture
def layout():
    return bsjax.Layout.from_mask(MASK, B)


def make(init, layout, dtype=jnp.float32, seed=0):
    shape = (layout.num_blocks, layout.block_size, layout.block_size)
    blocks = init(jax.random.key(seed), shape, dtype)
    assert blocks.shape == shape
    assert blocks.dtype == dtype
    return blocks


def padded(layout):
    """The layout with one more entry, of no block."""
    rows, cols = (np.append(np.asarray(places), -1) for places in (layout.rows, layout.cols))
    return bsjax.Layout.from_indices(rows, cols, layout.shape, layout.block_size)


@by_dtype
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_scaled_normal_has_the_variance_of_each_column(layout, dtype, scale):
    blocks = np.asarray(make(initializers.scaled_normal(layout, scale), layout, dtype), np.float64)
    for col, length in enumerate(MASK.sum(0)):
        column = blocks[np.asarray(layout.cols) == col]
        if (
            length
        ):  # the variance of s samples is off by sqrt(2 / s) of itself, the mean by 1 / sqrt(s): four times that
            expected, s = scale / (length * B), column.size
            assert abs(column.var() / expected - 1) < 4 * np.sqrt(2 / s)
            assert abs(column.mean()) < 4 * np.sqrt(expected / s)


def test_scaled_normal_keeps_the_variance_of_its_input():
    """Over an uneven pattern, where a fan-in of k times the density would be off by far."""
    mask = patterns.barabasi_albert(32, 3, seed=0)
    assert mask.sum(0).max() > 3 * mask.sum(0).mean() / 2
    layout = bsjax.Layout.from_mask(mask, 8)
    x = jax.random.normal(jax.random.key(1), (512, 256))
    y: Any = bsjax.spmm(x, make(initializers.scaled_normal(layout), layout), layout)
    variances = y.reshape(512, 32, 8).var(axis=(0, 2))
    assert 0.5 < variances.min()
    assert variances.max() < 2


@by_dtype
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_orthogonal_has_orthonormal_columns_within_a_block_column(layout, dtype, scale):
    blocks = make(initializers.orthogonal(layout, scale), layout, dtype)
    w = oracle.to_dense(blocks, layout)
    for col in np.flatnonzero(MASK.any(0)):
        column = w[:, col * B : (col + 1) * B]
        np.testing.assert_allclose(column.T @ column, scale**2 * np.eye(B), atol=8 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize(
    "mask",
    [np.eye(5)[[3, 0, 4, 1, 2]], np.ones((3, 3)), patterns.block_diagonal(7, 7, 2, seed=0)],
    ids=["permutation", "dense", "groups"],
)
def test_orthogonal_is_orthogonal_where_groups_are_square(mask):
    layout = bsjax.Layout.from_mask(mask, 8)
    w = oracle.to_dense(make(initializers.orthogonal(layout), layout), layout)
    np.testing.assert_allclose(w @ w.T, np.eye(len(w)), atol=1e-5)


@pytest.mark.parametrize("num_cols", [2, 3, 7])
def test_orthogonal_splits_what_is_wider_than_tall(num_cols):
    layout = bsjax.Layout.from_mask(np.ones((3, num_cols)), 8)
    w = oracle.to_dense(make(initializers.orthogonal(layout), layout), layout)
    for first in range(0, num_cols * 8, 24):
        part = w[:, first : first + 24]
        np.testing.assert_allclose(part.T @ part, np.eye(part.shape[1]), atol=1e-5)


def test_orthogonal_is_uniform():
    """No entry of q has a preferred sign: QR alone leaves r's diagonal, and so q's, to one side."""
    layout = bsjax.Layout.from_mask(np.eye(64), 8)
    blocks = make(initializers.orthogonal(layout), layout)
    means = np.abs(np.asarray(blocks).mean(0))
    assert means.max() < 5 / np.sqrt(64 * 8)  # an entry has variance 1/8; the mean of 64


@by_dtype
def test_identity_gives_its_input(dtype):
    layout = bsjax.Layout.from_mask([[1, 0, 1], [1, 1, 0], [0, 0, 1]], 8)
    layer = bsjax.nn.BlockSparseLinear(
        layout, kernel_init=initializers.identity(layout), param_dtype=dtype, rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(0), (3, 24), dtype)
    np.testing.assert_array_equal(layer(x), x)


@pytest.mark.parametrize("initializer", ALL)
def test_jit_makes_the_same(initializer):
    """With a layout that is known, whole modules are made under jit."""
    layout = bsjax.Layout.from_mask(np.tri(3), 8)
    init = initializer(layout)
    traced = jax.jit(lambda key: init(key, (6, 8, 8), jnp.float32))(jax.random.key(0))
    np.testing.assert_allclose(traced, make(init, layout), atol=1e-6)


@pytest.mark.parametrize("initializer", ALL)
def test_padding_counts_for_nothing(initializer):
    layout = bsjax.Layout.from_mask(np.tri(3), 8)
    blocks = make(initializer(padded(layout)), padded(layout))
    assert np.isfinite(blocks).all()
    w = oracle.to_dense(blocks[:-1], layout)
    if initializer is not initializers.scaled_normal:
        np.testing.assert_allclose(w[:, :8].T @ w[:, :8], np.eye(8), atol=1e-5)


@pytest.mark.parametrize("initializer", ALL)
@pytest.mark.parametrize("mask", [np.zeros((0, 0)), np.eye(1)], ids=["empty", "one"])
def test_small_layouts(initializer, mask):
    layout = bsjax.Layout.from_mask(mask, 8)
    make(initializer(layout), layout)


@pytest.mark.parametrize("initializer", [initializers.scaled_normal, initializers.orthogonal])
def test_no_blocks(initializer):
    layout = bsjax.Layout.from_mask(np.zeros((2, 3)), 8)
    make(initializer(layout), layout)


@pytest.mark.parametrize("initializer", ALL)
def test_errors(initializer):
    with pytest.raises(TypeError, match="`layout` must be a bsjax.Layout.*got int"):
        initializer(8)
    layout = bsjax.Layout.from_mask(np.eye(2), 8)
    with pytest.raises(ValueError, match=r"`shape` must be \(2, 8, 8\).*got \(16, 16\)"):
        initializer(layout)(jax.random.key(0), (16, 16))
    if initializer is not initializers.identity:
        with pytest.raises(ValueError, match=r"`scale` must not be negative; got -1"):
            initializer(layout, -1)
    if initializer is not initializers.scaled_normal:
        with pytest.raises(TypeError, match="traced layout"):
            jax.jit(lambda layout: initializer(layout)(jax.random.key(0), (2, 8, 8)))(layout)


def test_errors_of_identity(layout):
    with pytest.raises(ValueError, match=r"all blocks of the diagonal.*none at \[1, 1\]"):
        initializers.identity(layout)
    with pytest.raises(ValueError, match=r"`layout` must be square.*got shape \(8, 16\)"):
        initializers.identity(bsjax.Layout.from_mask([[1, 1]], 8))
