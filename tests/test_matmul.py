"""spmm and sddmm: values against dense float64, exactness, edges, and what a user can get wrong.

Every test runs on the default backend: the CPU handlers here, the CUDA ones where a card is.
"""

import gc
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bsjax
from bsjax import _ffi, _layout, _schedule
from bsjax.ops import _matmul, _reference
from bsjax.testing import CASES, assert_as_accurate, integers, oracle

DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16]
BLOCK_SIZES = [8, 16, 32, 64, 128]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
by_transpose = pytest.mark.parametrize("transpose", [False, True], ids=["w", "w.T"])
by_block_size = pytest.mark.parametrize("b", BLOCK_SIZES)
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(dtype))


def features(layout, transpose):
    """The last dimensions of x and y."""
    return layout.shape[::-1] if transpose else layout.shape


def block_shape(layout):
    return (layout.num_blocks, layout.block_size, layout.block_size)


def dense(blocks, layout, dtype):
    return jnp.asarray(oracle.to_dense(blocks, layout).astype(dtype))


def same(actual, expected):
    np.testing.assert_array_equal(np.asarray(actual).astype(np.float32), np.asarray(expected).astype(np.float32))


def rounded(exact, dtype):
    """A float64 answer as the op must return it: rounded once to float32, then to dtype; exact for small integers."""
    return exact.astype(np.float32).astype(dtype)


@by_case
@by_dtype
@by_transpose
def test_spmm_is_as_accurate_as_dense(case, dtype, transpose):
    layout = case.layout()
    x = normal(0, case.m, features(layout, transpose)[0], dtype=dtype)
    blocks = normal(1, *block_shape(layout), dtype=dtype)
    w = dense(blocks, layout, dtype)
    plain = jnp.matmul(x, w.T if transpose else w, precision="highest", preferred_element_type=jnp.float32)
    assert_as_accurate(
        bsjax.spmm(x, blocks, layout, transpose=transpose),
        plain.astype(dtype),
        oracle.spmm(x, blocks, layout, transpose=transpose),
    )


@by_case
@by_dtype
def test_sddmm_is_as_accurate_as_dense(case, dtype):
    layout = case.layout()
    k, n = layout.shape
    x, dy = normal(0, case.m, k, dtype=dtype), normal(1, case.m, n, dtype=dtype)
    plain = jnp.matmul(x.T, dy, precision="highest", preferred_element_type=jnp.float32).astype(dtype)
    b = layout.block_size
    plain = plain.reshape(k // b, b, n // b, b).transpose(0, 2, 1, 3)[layout.rows, layout.cols]
    assert_as_accurate(bsjax.sddmm(x, dy, layout), plain, oracle.sddmm(x, dy, layout))


@by_case
@pytest.mark.parametrize(
    ("dtype", "tf32"),
    [(jnp.float32, False), (jnp.float32, True), (jnp.bfloat16, False)],
    ids=["float32", "tf32", "bfloat16"],
)
def test_reference_is_exact(case, dtype, tf32):
    """Plain JAX against NumPy float64, on integers whose float32 sums are exact (also under TF32)."""
    layout = case.layout()
    x = integers(0, (1, case.m, layout.shape[0]), dtype)
    dy = integers(1, (1, case.m, layout.shape[1]), dtype)
    blocks = integers(2, (1, *block_shape(layout)), dtype)
    lists = layout.lists()
    y = _reference.spmm(x, blocks, *lists, transpose=False, tf32=tf32)
    same(y, rounded(oracle.spmm(x, blocks[0], layout), dtype))
    lists = layout.lists(transpose=True)
    dx = _reference.spmm(dy, blocks, *lists, transpose=True, tf32=tf32)
    same(dx, rounded(oracle.spmm(dy, blocks[0], layout, transpose=True), dtype))
    lists = layout.rows, layout.cols, layout.wgrad_schedule
    dw = _reference.sddmm(x, dy, *lists, block_size=case.block_size, tf32=tf32)
    same(dw[0], rounded(oracle.sddmm(x, dy, layout), dtype))


masks = st.tuples(st.integers(0, 5), st.integers(0, 5)).flatmap(
    lambda shape: st.lists(
        st.lists(st.booleans(), min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
    ).map(lambda rows: np.array(rows, bool).reshape(shape))
)


@given(
    masks,
    st.sampled_from([8, 16, 32]),
    st.sampled_from([0, 1, 3, 7, 17, 33, 127]),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
)
def test_any_mask_is_exact(mask, b, m, dtype, seed):
    """Any pattern, any number of rows: integers come out exactly, in all three passes, and the adjoints agree."""
    layout = bsjax.Layout.from_mask(mask, b)
    x = integers(seed, (m, layout.shape[0]), dtype)
    dy = integers(seed + 1, (m, layout.shape[1]), dtype)
    blocks = integers(seed + 2, block_shape(layout), dtype)
    y = bsjax.spmm(x, blocks, layout)
    same(y, rounded(oracle.spmm(x, blocks, layout), dtype))
    dx = bsjax.spmm(dy, blocks, layout, transpose=True)
    same(dx, rounded(oracle.spmm(dy, blocks, layout, transpose=True), dtype))
    dw = bsjax.sddmm(x, dy, layout)
    same(dw, rounded(oracle.sddmm(x, dy, layout), dtype))
    if dtype == jnp.float32:

        def dot(a, c):
            return float(np.vdot(np.asarray(a, np.float64), np.asarray(c, np.float64)))

        assert dot(y, dy) == dot(x, dx) == dot(blocks, dw)


@by_block_size
@by_dtype
@pytest.mark.parametrize("m", [1, 3, 7, 17, 33, 127, 300])
def test_odd_numbers_of_rows(b, dtype, m):
    layout = bsjax.Layout.from_mask([[1, 0, 1], [1, 0, 0], [0, 0, 1]], b)
    x, dy = integers(0, (m, 3 * b), dtype), integers(1, (m, 3 * b), dtype)
    blocks = integers(2, block_shape(layout), dtype)
    same(bsjax.spmm(x, blocks, layout), rounded(oracle.spmm(x, blocks, layout), dtype))
    same(
        bsjax.spmm(dy, blocks, layout, transpose=True),
        rounded(oracle.spmm(dy, blocks, layout, transpose=True), dtype),
    )
    same(bsjax.sddmm(x, dy, layout), rounded(oracle.sddmm(x, dy, layout), dtype))


@by_block_size
def test_all_blocks_equal_dense_in_all_passes(b):
    layout = bsjax.Layout.from_mask(np.ones((3, 5), bool), b)
    x, dy = integers(0, (33, 3 * b)), integers(1, (33, 5 * b))
    blocks = integers(2, block_shape(layout))
    w = dense(blocks, layout, jnp.float32)
    y, pull = jax.vjp(lambda x, w: bsjax.spmm(x, w, layout), x, blocks)
    dx, dw = pull(dy)
    same(y, jnp.matmul(x, w, precision="highest"))
    same(dx, jnp.matmul(dy, w.T, precision="highest"))
    same(dense(dw, layout, jnp.float32), jnp.matmul(x.T, dy, precision="highest"))


def test_leading_shapes():
    layout = bsjax.Layout.from_mask([[1, 1], [0, 1]], 8)
    blocks = integers(2, block_shape(layout))
    for lead in [(), (1,), (2, 3), (2, 0, 3), (1, 2, 1, 2)]:
        x, dy = integers(0, (*lead, 16)), integers(1, (*lead, 16))
        y = bsjax.spmm(x, blocks, layout)
        assert y.shape == (*lead, 16)
        same(y, oracle.spmm(x, blocks, layout))
        same(bsjax.sddmm(x, dy, layout), oracle.sddmm(x, dy, layout))


@by_dtype
def test_unselected_inputs_never_matter(dtype):
    """NaN and Inf where no block looks, in every pass; 0 * NaN would be NaN."""
    mask = np.array([[1, 0, 1], [0, 0, 0], [0, 0, 1]], bool)
    layout = bsjax.Layout.from_mask(mask, 16)
    x, dy = integers(0, (19, 48), dtype), integers(1, (19, 48), dtype)
    blocks = integers(2, block_shape(layout), dtype)
    bad_x, bad_dy = x.at[:, 16:32].set(jnp.nan), dy.at[:, 16:32].set(jnp.inf)
    same(bsjax.spmm(bad_x, blocks, layout), rounded(oracle.spmm(x, blocks, layout), dtype))
    same(
        bsjax.spmm(bad_dy, blocks, layout, transpose=True),
        rounded(oracle.spmm(dy, blocks, layout, transpose=True), dtype),
    )
    same(bsjax.sddmm(bad_x, bad_dy, layout), rounded(oracle.sddmm(x, dy, layout), dtype))


@by_dtype
def test_nan_reaches_what_it_should(dtype):
    """A NaN in a selected input is the user's answer: it may not be swallowed, nor spread to other rows."""
    layout = bsjax.Layout.from_mask([[1, 0], [0, 1]], 8)
    x = jnp.ones((5, 16), dtype).at[2, 3].set(jnp.nan)
    y = bsjax.spmm(x, jnp.ones(block_shape(layout), dtype), layout)
    expected = np.zeros((5, 16), bool)
    expected[2, :8] = True
    np.testing.assert_array_equal(np.isnan(np.asarray(y.astype(jnp.float32))), expected)


@by_dtype
@by_transpose
def test_every_output_is_written(dtype, transpose):
    """The result takes over memory full of NaN; an empty list must still give exact zeros."""
    layout = bsjax.Layout.from_mask([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 1]], 16)
    k, n = features(layout, transpose)
    x, blocks = integers(0, (37, k), dtype), integers(1, block_shape(layout), dtype)
    into = jax.jit(
        lambda poison, x, w: bsjax.spmm(x, w, layout, transpose=transpose), donate_argnums=0, keep_unused=True
    )
    y = into(jnp.full((37, n), jnp.nan, dtype), x, blocks)
    same(y, rounded(oracle.spmm(x, blocks, layout, transpose=transpose), dtype))
    into = jax.jit(lambda poison, x, dy: bsjax.sddmm(x, dy, layout), donate_argnums=0, keep_unused=True)
    x, dy = integers(0, (0, 48), dtype), integers(1, (0, 64), dtype)
    dw = into(jnp.full(block_shape(layout), jnp.nan, dtype), x, dy)
    same(dw, np.zeros(block_shape(layout)))


def test_strided_and_transposed_inputs():
    layout = bsjax.Layout.from_mask([[1, 0, 1], [0, 1, 1]], 8)
    blocks = integers(2, block_shape(layout))
    wide = integers(0, (60, 34))

    @jax.jit
    def f(wide, blocks):
        x = wide[::2, 1::2].T[:16]  # [16, 30] -> strided, transposed, sliced
        x = jnp.concatenate([x, x], axis=1)[:, 3:19]
        return bsjax.spmm(x, blocks.swapaxes(1, 2), layout), bsjax.sddmm(x, x[:, :1] + jnp.ones((1, 24)), layout), x

    y, dw, x = f(wide, blocks)
    same(y, oracle.spmm(x, blocks.swapaxes(1, 2), layout))
    same(dw, oracle.sddmm(x, x[:, :1] + jnp.ones((1, 24)), layout))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda d: np.dtype(d).name)
def test_long_sums_in_half_precision(dtype):
    """k = 16,000: the error stays that of one rounding of the result, as float32 sums promise."""
    layout = bsjax.Layout.from_mask(np.ones((1000, 2), bool), 16)
    scale = jnp.asarray(1 / 128, dtype)  # keeps the sums well inside float16
    x = normal(0, 9, 16000, dtype=dtype)
    blocks = normal(1, *block_shape(layout), dtype=dtype) * scale
    exact = oracle.spmm(x, blocks, layout)
    y = np.asarray(bsjax.spmm(x, blocks, layout).astype(jnp.float32), np.float64)
    one_ulp = float(jnp.finfo(dtype).eps)
    assert np.max(np.abs(y - exact) / (np.abs(exact) + 1e-2)) < one_ulp
    tall = normal(2, 16000, 32, dtype=dtype) * scale
    small = bsjax.Layout.from_mask(np.ones((2, 2), bool), 16)
    exact = oracle.sddmm(tall, tall, small)
    dw = np.asarray(bsjax.sddmm(tall, tall, small).astype(jnp.float32), np.float64)
    assert np.max(np.abs(dw - exact) / (np.abs(exact) + 1e-2)) < one_ulp


def test_float32_is_float32_unless_tf32_is_asked_for():
    """TF32 keeps 10 bits: its error is near 3e-4, that of float32 under 1e-5."""
    layout = bsjax.Layout.from_mask(np.ones((8, 8), bool), 32)
    x, blocks = normal(0, 64, 256), normal(1, *block_shape(layout))
    exact = oracle.spmm(x, blocks, layout)

    def error(y):
        return np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact)

    assert error(bsjax.spmm(x, blocks, layout)) < 1e-6
    assert error(bsjax.spmm(x, blocks, layout, precision=jax.lax.Precision.DEFAULT)) < 1e-6
    with jax.default_matmul_precision("tensorfloat32"):
        tf32 = error(bsjax.spmm(x, blocks, layout))
    assert tf32 < 1e-3
    if jax.default_backend() == "gpu":
        assert tf32 > 1e-5  # it was asked for, and is used


def test_precision_reaches_the_handler():
    layout = bsjax.Layout.from_mask([[1]], 8)
    x, blocks = jnp.ones((4, 8)), jnp.ones((1, 8, 8))

    def asks_tf32(**kwargs):
        f = jax.grad(lambda x, w: jnp.sum(bsjax.spmm(x, w, layout, **kwargs) ** 2), (0, 1))
        jaxpr = str(jax.make_jaxpr(f)(x, blocks))
        assert ("tf32=True" in jaxpr) != ("tf32=False" in jaxpr)  # all three passes agree
        return "tf32=True" in jaxpr

    assert not asks_tf32()
    assert not asks_tf32(precision="highest")
    assert asks_tf32(precision="tensorfloat32")
    assert asks_tf32(precision=jax.lax.DotAlgorithmPreset.TF32_TF32_F32)
    with jax.default_matmul_precision("tensorfloat32"):
        assert asks_tf32()
        assert not asks_tf32(precision="float32")


@by_dtype
def test_same_bits_on_every_run(dtype):
    layout = bsjax.Layout.from_mask(np.random.default_rng(0).random((12, 12)) < 0.3, 16)
    x, dy = normal(0, 130, 192, dtype=dtype), normal(1, 130, 192, dtype=dtype)
    blocks = normal(2, *block_shape(layout), dtype=dtype)

    @jax.jit
    def passes(x, dy, blocks):
        y, pull = jax.vjp(lambda x, w: bsjax.spmm(x, w, layout), x, blocks)
        return y, *pull(dy)

    first = jax.device_get(passes(x, dy, blocks))
    for _ in range(50):
        for a, b in zip(first, jax.device_get(passes(x, dy, blocks)), strict=True):
            assert a.tobytes() == b.tobytes()


def test_order_of_blocks_is_the_layouts():
    """Moving blocks and their pattern together moves the result and nothing else."""
    mask = np.array([[1, 1, 0], [0, 1, 1]], bool)
    layout = bsjax.Layout.from_mask(mask, 8)
    flipped = bsjax.Layout.from_mask(mask[:, ::-1], 8)
    x, w = integers(0, (5, 16)), integers(1, block_shape(layout))
    order = np.lexsort((-np.asarray(layout.cols), np.asarray(layout.rows)))
    y = bsjax.spmm(x, w, layout).reshape(5, 3, 8)[:, ::-1].reshape(5, 24)
    same(bsjax.spmm(x, w[order], flipped), y)


@pytest.mark.large
@pytest.mark.parametrize("side", ["x", "y"])
def test_more_than_two_to_the_31_elements(side):
    """Offsets are 64 bits wide: the last row of an array of over 2^31 elements is read, or written, at its place."""
    wide = 64 * 128
    layout = bsjax.Layout.from_mask(np.eye(64, 1, dtype=bool) if side == "x" else np.eye(1, 64, dtype=bool), 128)
    m = 2**31 // wide + 3
    k, n = layout.shape
    blocks = integers(1, block_shape(layout), jnp.bfloat16)
    last = integers(0, (5, k), jnp.bfloat16)

    @jax.jit
    def tail(last, blocks):
        x = jnp.zeros((m, k), jnp.bfloat16).at[-5:].set(last)
        y = bsjax.spmm(x, blocks, layout)
        return y[-5:], bsjax.sddmm(x, y, layout)

    y, dw = tail(last, blocks)
    expected = oracle.spmm(last, blocks, layout)
    same(y, rounded(expected, jnp.bfloat16))
    same(dw, rounded(oracle.sddmm(last, y, layout), jnp.bfloat16))
    gc.collect()


def test_no_pass_copies_its_operands_or_goes_dense():
    """Each product needs its operands and its result, no copy or transpose of x or w; a step needs y beside them."""
    layout = bsjax.Layout.from_mask(np.random.default_rng(0).random((64, 64)) < 0.1, 32)
    x = jax.ShapeDtypeStruct((16, 2048), jnp.float32)
    blocks = jax.ShapeDtypeStruct(block_shape(layout), jnp.float32)
    y = x.size * 4

    def scratch(f, *args):
        memory = jax.jit(f).lower(*args).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    few = 4096  # what a compiler may want for itself
    assert scratch(lambda x, blocks: bsjax.spmm(x, blocks, layout), x, blocks) <= few
    assert scratch(lambda x, blocks: bsjax.spmm(x, blocks, layout, transpose=True), x, blocks) <= few
    assert scratch(lambda x, dy: bsjax.sddmm(x, dy, layout), x, x) <= few
    loss = jax.grad(lambda x, blocks: jnp.sum(bsjax.spmm(x, blocks, layout) ** 2), (0, 1))
    assert scratch(loss, x, blocks) <= 2 * y + few  # y and dy; a dense dw would be 16 MiB


def test_padding_and_foreign_indices_contribute_nothing():
    """An index out of range, in a layout that no from_mask made, is skipped: never read, never NaN."""
    layout = bsjax.Layout.from_mask([[1, 1], [1, 1]], 8)
    x, dy = integers(0, (5, 16)), integers(1, (5, 16))
    blocks = integers(2, block_shape(layout)).at[1].set(jnp.nan)
    for foreign in (-1, 2, 2**30, -(2**31)):
        # The stored block 1, at row 0 and column 1, is marked as padding in every list.
        position = int(np.flatnonzero(np.asarray(layout.perm_t) == 1)[0])
        none = jnp.asarray(_schedule.none())  # the kernels that need no schedule read these lists
        changed = {"fprop_schedule": none, "dgrad_schedule": none, "wgrad_schedule": none}
        changed |= {"cols": layout.cols.at[1].set(foreign), "indices": layout.indices.at[1].set(foreign)}
        changed["indices_t"] = layout.indices_t.at[position].set(foreign)
        padded = _layout.of_leaves(_layout.to_leaves(layout) | changed, layout.shape, 8)
        clean = bsjax.Layout.from_mask([[1, 0], [1, 1]], 8)
        kept = blocks[jnp.array([0, 2, 3])]
        same(bsjax.spmm(x, blocks, padded), oracle.spmm(x, kept, clean))
        same(bsjax.spmm(dy, blocks, padded, transpose=True), oracle.spmm(dy, kept, clean, transpose=True))
        dw = bsjax.sddmm(x, dy, padded)
        same(dw[1], np.zeros((8, 8)))
        same(dw[jnp.array([0, 2, 3])], oracle.sddmm(x, dy, clean))


LAYOUT = bsjax.Layout.from_mask([[1, 0, 1], [0, 1, 1]], 8)  # w is (16, 24), 4 blocks
X, W, DY = jnp.ones((5, 16)), jnp.ones((4, 8, 8)), jnp.ones((5, 24))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda: bsjax.spmm(X[:, :8], W, LAYOUT),
            ValueError,
            r"`x` must be 16, the rows of a \(16, 24\) layout; .*\(5, 8\)",
        ),
        (lambda: bsjax.spmm(X, W, LAYOUT, transpose=True), ValueError, r"`x` must be 24, the columns"),
        (lambda: bsjax.spmm(jnp.float32(1), W, LAYOUT), ValueError, r"got `x` of shape \(\)"),
        (lambda: bsjax.spmm(X, W[:3], LAYOUT), ValueError, r"`blocks` must have shape \(4, 8, 8\).*\(3, 8, 8\)"),
        (lambda: bsjax.spmm(X, W.reshape(32, 8), LAYOUT), ValueError, "`blocks` must have shape"),
        (lambda: bsjax.spmm(X, W.astype(jnp.bfloat16), LAYOUT), TypeError, "same dtype; got float32 and bfloat16"),
        (lambda: bsjax.spmm(X.astype(jnp.int32), W, LAYOUT), TypeError, "`x` must be float32.*got int32"),
        (lambda: bsjax.spmm(X, W.astype(complex), LAYOUT), TypeError, "`blocks` must be float32"),
        (lambda: bsjax.spmm([[1.0] * 16], W, LAYOUT), TypeError, "`x` must be an array; got list"),
        (
            lambda: bsjax.spmm(X, W, cast("bsjax.Layout", np.ones((2, 3)))),
            TypeError,
            "`layout` must be a bsjax.Layout.*got ndarray",
        ),
        (lambda: bsjax.spmm(X, W, LAYOUT, precision="float8"), ValueError, "`precision` must be .*'float8'"),
        (lambda: bsjax.sddmm(X, DY[:, :16], LAYOUT), ValueError, "`dy` must be 24, the columns"),
        (lambda: bsjax.sddmm(X, DY[:3], LAYOUT), ValueError, r"same shape but for the last.*\(5, 16\) and \(3, 24\)"),
        (lambda: bsjax.sddmm(X, DY.astype(jnp.float16), LAYOUT), TypeError, "`x` and `dy` must have the same dtype"),
        (lambda: bsjax.sddmm(DY, DY, LAYOUT), ValueError, "`x` must be 16, the rows"),
    ],
)
def test_mistakes_are_named(call, error, match):
    with pytest.raises(error, match=match):
        call()


def native_call(target, result, *operands, **attrs):
    """The handler without its door: what a caller meets who goes round it."""
    return jax.jit(lambda *xs: jax.ffi.ffi_call(target, result)(*xs, **attrs))(*operands)


I32 = jnp.int32
SPMM = {"transpose": False, "tf32": False, "config": np.int32(-1)}
SDDMM = {"tf32": False, "config": np.int32(-1)}
LISTS = LAYOUT.lists()
Y = jax.ShapeDtypeStruct((1, 5, 24), jnp.float32)


@pytest.mark.parametrize(
    ("operands", "attrs"),
    [
        ((X[None].astype(I32), W[None].astype(I32), *LISTS), SPMM),
        ((X[None].astype(jnp.float16), W[None], *LISTS), SPMM),
        ((X, W[None], *LISTS), SPMM),
        ((X[None], W[None, :, :7], *LISTS), SPMM),
        ((X[None], W[None, :3], *LISTS), SPMM),
        ((X[None, :4], W[None], *LISTS), SPMM),
        ((X[None, :, :12], W[None], *LISTS), SPMM),
        ((X[None], W[None], LISTS[0].astype(jnp.float32), *LISTS[1:]), SPMM),
        ((X[None], W[None], LISTS[0][:2], *LISTS[1:]), SPMM),
        ((X[None], W[None], LISTS[0][:0], *LISTS[1:]), SPMM),
        ((X[None], W[None], *LISTS[:3], LISTS[3].astype(jnp.float32)), SPMM),
        ((X[None], W[None], *LISTS[:3]), SPMM),
        ((jnp.stack([X] * 3), jnp.stack([W] * 2), *LISTS), SPMM),
        ((X[None], W[None], *LISTS), SPMM | {"config": np.int32(1000)}),
        ((X[None], W[None], *LISTS), SPMM | {"config": np.int32(-2)}),
        ((X[None], W[None]), SPMM),
    ],
)
def test_handler_refuses_rather_than_crashes(operands, attrs):
    if not _ffi.native:
        pytest.fail("The native extension is missing: build the wheel, as README.md says.")
    with pytest.raises(Exception, match="bsjax_spmm|INVALID_ARGUMENT|Wrong number"):
        jax.block_until_ready(native_call("bsjax_spmm", Y, *operands, **attrs))


def test_sddmm_handler_refuses_rather_than_crashes():
    shape = jax.ShapeDtypeStruct((1, 4, 8, 8), jnp.float32)
    good = (X[None], DY[None], LAYOUT.rows, LAYOUT.cols, LAYOUT.wgrad_schedule)
    assert native_call("bsjax_sddmm", shape, *good, **SDDMM).shape == (1, 4, 8, 8)
    for operands in [
        (X[None], DY[None, :4], *good[2:]),
        (X[None].astype(jnp.bfloat16), *good[1:]),
        (X[None], DY[None, :, :20], *good[2:]),
        (*good[:3], LAYOUT.cols[:2], good[4]),
        (*good[:2], LAYOUT.rows.astype(jnp.uint32), *good[3:]),
        (*good[:4], good[4].astype(jnp.float32)),
        good[:4],
    ]:
        with pytest.raises(Exception, match="bsjax_sddmm|Wrong number"):
            jax.block_until_ready(native_call("bsjax_sddmm", shape, *operands, **SDDMM))


def test_groups_share_what_has_one():
    """The group axis of the door: x or blocks of one group serve all groups."""
    x, blocks = integers(0, (3, 5, 16)), integers(1, (3, 4, 8, 8))
    attrs = {"transpose": False, "tf32": False, "config": -1}
    for gx, gw in [(3, 3), (1, 3), (3, 1)]:
        y = _matmul._spmm_call(x[:gx], blocks[:gw], *LISTS, **attrs)
        for g in range(3):
            same(y[g], oracle.spmm(x[g % gx], blocks[g % gw], LAYOUT))
