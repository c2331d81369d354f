"""Every compiled CUDA kernel, by number: exact on small integers, whichever the table would choose."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bsjax
from bsjax import _ffi, _schedule
from bsjax.ops import _matmul
from bsjax.testing import integers, oracle

pytestmark = pytest.mark.gpu

MASK = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1], [1, 0, 0, 0], [1, 0, 1, 0]], bool)
ROWS = [1, 33, 64, 127, 300]
CASES = list(itertools.product([8, 16, 32, 64, 128], [jnp.float32, jnp.float16, jnp.bfloat16], ROWS, [False, True]))

SEAL_CASES = [case for case in CASES if case[2] in (33, 300)]
CHANGES = [lambda words: words * 2, jnp.zeros_like, lambda words: words.astype(jnp.float32).astype(jnp.int32) - 1]


def counts(op):
    return range(_ffi.native.num_cuda_configs[op]) if _ffi.native and "CUDA" in _ffi.registrations else []


def run_or_refused(call):
    try:
        return jax.block_until_ready(call())
    except Exception as error:
        if "`config` must be" not in str(error):  # this kernel does not serve the case; anything else is a fault
            raise
        return None


def same(actual, exact, dtype):
    np.testing.assert_array_equal(
        np.asarray(actual).astype(np.float32), exact.astype(np.float32).astype(dtype).astype(np.float32)
    )


@pytest.mark.parametrize("config", counts("bsjax_spmm"))
@pytest.mark.parametrize("transpose", [False, True])
def test_spmm_configs(config, transpose):
    served = 0
    for b, dtype, m, tf32 in CASES:
        layout = bsjax.Layout.from_mask(MASK, b)
        blocks = integers(1, (1, layout.num_blocks, b, b), dtype)
        x = integers(0, (2, m, layout.shape[1 if transpose else 0]), dtype)
        lists = layout.lists(transpose)
        attrs = {"transpose": transpose, "tf32": tf32, "config": config}
        y = run_or_refused(lambda: _matmul._spmm_call(x, blocks, *lists, **attrs))  # noqa: B023
        if y is not None:
            served += 1
            same(y, oracle.spmm(x, blocks[0], layout, transpose=transpose), dtype)
    assert served > 0


@pytest.mark.parametrize("config", counts("bsjax_sddmm"))
def test_sddmm_configs(config):
    served = 0
    for b, dtype, m, tf32 in CASES:
        layout = bsjax.Layout.from_mask(MASK, b)
        x = integers(0, (1, m, layout.shape[0]), dtype)
        dy = integers(1, (1, m, layout.shape[1]), dtype)
        attrs = {"block_size": b, "tf32": tf32, "config": config}
        operands = x, dy, layout.rows, layout.cols, layout.wgrad_schedule
        dw = run_or_refused(lambda: _matmul._sddmm_call(*operands, **attrs))  # noqa: B023
        if dw is not None:
            served += 1
            same(dw[0], oracle.sddmm(x, dy, layout), dtype)
    assert served > 0


@pytest.mark.parametrize("config", counts("bsjax_spmm"))
@pytest.mark.parametrize("transpose", [False, True])
def test_a_broken_seal_makes_spmm_nan(config, transpose):
    """Also where the schedule's indices point anywhere, and in columns without a block."""
    served = 0
    for b, dtype, m, tf32 in SEAL_CASES:
        layout = bsjax.Layout.from_mask(MASK, b)
        blocks = integers(1, (1, layout.num_blocks, b, b), dtype)
        x = integers(0, (2, m, layout.shape[1 if transpose else 0]), dtype)
        *lists, schedule = layout.lists(transpose)
        attrs = {"transpose": transpose, "tf32": tf32, "config": config}
        for change in CHANGES:
            y = run_or_refused(lambda: _matmul._spmm_call(x, blocks, *lists, change(schedule), **attrs))  # noqa: B023
            if y is not None:
                served += 1
                assert np.isnan(np.asarray(y).astype(np.float32)).all()
    assert served > 0


@pytest.mark.parametrize("config", counts("bsjax_sddmm"))
def test_a_broken_seal_makes_sddmm_nan(config):
    served = 0
    for b, dtype, m, tf32 in SEAL_CASES:
        layout = bsjax.Layout.from_mask(MASK, b)
        x = integers(0, (2, m, layout.shape[0]), dtype)
        dy = integers(1, (2, m, layout.shape[1]), dtype)
        attrs = {"block_size": b, "tf32": tf32, "config": config}
        operands = x, dy, layout.rows, layout.indices
        for change in CHANGES:
            dw = run_or_refused(lambda: _matmul._sddmm_call(*operands, change(layout.wgrad_schedule), **attrs))  # noqa: B023
            if dw is not None:
                served += 1
                assert np.isnan(np.asarray(dw).astype(np.float32)).all()
    assert served > 0


# Patterns of all kinds, of which the device alone knows the number of bins: (block rows, block columns, density).
PATTERNS = [(5, 4, 0.5), (70, 50, 0.05), (40, 40, 1), (200, 3, 0.3), (128, 128, 0.02)]


@pytest.mark.parametrize("config", counts("bsjax_sddmm"))
@pytest.mark.parametrize("b", [8, 16, 32, 64, 128])
def test_sddmm_of_tables_made_anywhere(config, b):
    """On the host or in a traced program, with padding, whose blocks are zeros whatever lay there before."""
    for num_rows, num_cols, density in PATTERNS:
        if max(num_rows, num_cols) * b > 8192:
            continue
        rng = np.random.default_rng(b)
        places = np.argwhere(rng.random((num_rows, num_cols)) < density)
        rows, cols = np.concatenate([places, np.full((101, 2), -1)]).T.astype(np.int32)
        order = rng.permutation(len(rows))
        rows, cols, shape = rows[order], cols[order], (num_rows * b, num_cols * b)
        x = integers(0, (1, 300, shape[0]), jnp.bfloat16)
        dy = integers(1, (1, 300, shape[1]), jnp.bfloat16)
        dense = np.asarray(x[0], np.float32).T @ np.asarray(dy[0], np.float32)
        tiles = dense.reshape(num_rows, b, num_cols, b).swapaxes(1, 2)
        exact = np.where((rows >= 0)[:, None, None], tiles[rows, cols], 0)
        traced = jax.jit(_schedule.traced_wgrad, static_argnums=(2, 3))(rows, cols, shape, b)
        for schedule in (_schedule.wgrad(rows, cols, shape, b), traced):
            attrs = {"block_size": b, "tf32": False, "config": config}
            jnp.full((len(rows), b, b), jnp.nan, jnp.bfloat16).block_until_ready()  # memory that is handed out again
            dw = run_or_refused(lambda: _matmul._sddmm_call(x, dy, rows, cols, schedule, **attrs))  # noqa: B023
            assert dw is not None
            same(dw[0], exact, jnp.bfloat16)


def test_inside_a_command_buffer():
    """Many small products in one program, replayed with new inputs: the launches may be recorded once and repeated."""
    layout = bsjax.Layout.from_mask(np.ones((4, 4), bool), 32)
    blocks = integers(1, (16, 32, 32)) * 0.25

    @jax.jit
    def chain(x, w):
        for _ in range(6):
            x = jnp.clip(bsjax.spmm(x, w, layout), -3, 3)
        return x

    def expected(x):
        for _ in range(6):
            x = np.clip(oracle.spmm(x, blocks, layout), -3, 3)
        return x

    for seed in range(100):
        x = integers(seed, (33, 128))
        np.testing.assert_array_equal(np.asarray(chain(x, blocks)), expected(x))


def test_every_device_of_the_process():
    """Attributes of a kernel are a device's own: the second card must work as the first does."""
    layout = bsjax.Layout.from_mask(np.ones((2, 2), bool), 128)
    x, blocks = integers(0, (130, 256), jnp.bfloat16), integers(1, (4, 128, 128), jnp.bfloat16)
    exact = oracle.spmm(x, blocks, layout)
    for device in jax.devices():
        y = bsjax.spmm(*jax.device_put((x, blocks, layout), device))
        assert y.devices() == {device}
        same(y, exact, jnp.bfloat16)
