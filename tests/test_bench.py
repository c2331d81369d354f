"""The benchmark of the products: it checks before it times, takes turns, and writes what it prints."""

import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import bsjax
from bsjax.testing import timing
from experiments.bench import matmul, table
from experiments.common import CommandError

TOY = ["case=random_b32", "rows=16", "dtype=float32"]


@pytest.fixture
def small(monkeypatch):
    """The sizes of a CPU, also where a GPU serves."""
    known = matmul.cases(on_gpu=False)
    monkeypatch.setattr(matmul, "cases", lambda on_gpu: known)


@pytest.mark.usefixtures("small")
def test_toy_run(tmp_path, capsys):
    matmul.main([*TOY, f"workdir={tmp_path}", "commit=abc"])
    record = json.loads((tmp_path / "matmul.json").read_text())
    assert record["head"]["jax"] == jax.__version__
    assert record["head"]["commit"] == "abc"
    assert [row["pass"] for row in record["rows"]] == list(table.PASSES)
    for row in record["rows"]:
        assert {key for _, key, _ in table.COLUMNS} <= set(row)
        assert (row["case"], row["size"], row["dtype"]) == ("random_b32", "16 x 1024 x 1024", "float32")
        assert (row["b"], row["num_blocks"], row["wrong"]) == (32, 102, 0)
        assert row["tflops"] * row["us"] * 1e6 == pytest.approx(2 * 16 * 102 * 32**2)
        assert row["gbps"] * row["us"] * 1e3 == pytest.approx(4 * (16 * 2048 + 102 * 32**2))
        assert row["x_dense"] == pytest.approx(row["dense_us"] / row["us"])
        if jax.default_backend() == "cpu":
            assert row["x_reference"] == pytest.approx(row["reference_us"] / row["us"])
    printed = capsys.readouterr().out
    assert all(table.line(row) in printed for row in record["rows"])
    assert "cuSPARSE" in printed


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_checked_and_timed(tmp_path, dtype):
    matmul.main([*TOY, f"dtype={dtype}", f"workdir={tmp_path}"])
    rows = json.loads((tmp_path / "matmul.json").read_text())["rows"]
    assert [(row["dtype"], row["us"] > 0) for row in rows] == [(dtype, True)] * 3


@pytest.mark.usefixtures("small")
def test_a_wrong_kernel_has_no_speed(tmp_path, monkeypatch, capsys):
    right = bsjax.spmm

    def wrong(x, blocks, layout, *, transpose=False):
        y = jnp.asarray(right(x, blocks, layout, transpose=transpose))
        return y if transpose else y.at[-1, -1].add(jnp.ones((), y.dtype))

    monkeypatch.setattr(bsjax, "spmm", wrong)
    with pytest.raises(CommandError, match="FAILED: random_b32 fprop differ") as caught:
        matmul.main([*TOY, f"workdir={tmp_path}"])
    assert caught.value.code == 1
    assert "FAILED: 1 wrong elements" in capsys.readouterr().out
    fprop, *others = json.loads((tmp_path / "matmul.json").read_text())["rows"]
    assert fprop["wrong"] == 1
    assert fprop["us"] is None
    assert fprop["x_dense"] is None
    assert all(row["us"] > 0 for row in others)


def test_nan_is_wrong(monkeypatch):
    case = matmul.cases(on_gpu=False)["random_b32"]
    args = matmul.operands(case.layout(), 4, jnp.dtype("float32"), matmul.integers)
    functions = matmul.ours() | {"wgrad": jax.jit(lambda x, dy, blocks, w, layout: blocks * jnp.nan)}
    assert matmul.wrong_elements(args, functions) == {"fprop": 0, "dgrad": 0, "wgrad": args[2].size}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_cases(on_gpu):
    known = matmul.cases(on_gpu)
    assert {case.block_size for case in known.values()} == {8, 16, 32, 64, 128}
    for case in known.values():
        k, n = case.layout().shape
        assert case.m > 0
        assert (k, n) in {(4096, 4096), (4096, 16384)} if on_gpu else {(1024, 1024), (1024, 4096)}
        assert case.layout().density == 1 if case.name.startswith("ones") else 0.01 < case.layout().density < 0.3


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("case=nope", "`case` must be one of random_b8, .*barabasi_albert_b32; got 'nope'"),
        ("dtype=int8", "`dtype` must be one of float32, float16, bfloat16; got 'int8'"),
        ("rows=-1", "`rows` must be at least 1, .*; got -1"),
        ("rows=many", "`rows` must be of type int; got 'many'"),
        ("speed=high", "`speed` is no option; the options are .*case"),
    ],
)
def test_bad_options(word, message):
    with pytest.raises(CommandError, match=message):
        matmul.main([word])


def test_geometric_means():
    rows = [
        {"b": 16, "density": 0.5, "pass": "wgrad", "x_dense": 3.0},
        {"b": 8, "density": 0.5, "pass": "fprop", "x_dense": 2.0},
        {"b": 8, "density": 0.5, "pass": "dgrad", "x_dense": 8.0},
        {"b": 8, "density": 0.5, "pass": "wgrad", "x_dense": None},
        {"b": 8, "density": 1.0, "pass": "fprop", "x_dense": 0.5},
    ]
    assert table.means(rows) == {
        "8": pytest.approx({"fprop": 2.0, "dgrad": 8.0, "all": 4.0}),
        "8, all ones": pytest.approx({"fprop": 0.5, "all": 0.5}),
        "16": pytest.approx({"wgrad": 3.0, "all": 3.0}),
    }


def test_functions_take_turns():
    """Each is called once to warm up, then A B A B; the median leaves out a stray sample."""
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = {"a": iter([1.0, 9.0, 2.0]), "b": iter([5.0, 5.0, 5.0])}

    def samples(f, args):
        f(*args)
        return [next(seconds[calls[-1]])]

    assert timing.medians(functions, (), timing.Clock("fake", samples), rounds=3) == {"a": 2.0, "b": 5.0}
    assert "".join(calls) == "ab" + "ab" * 3


def test_wall_time_waits_for_the_result():
    clock = timing.device_clock()
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda _, y: jnp.sin(y), x))
    times = timing.medians({"slow": slow, "fast": jax.jit(jnp.sin)}, (jnp.ones(1000),), clock)
    assert times["slow"] > 20 * times["fast"]


def test_without_cupti_the_name_says_so(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "jax.experimental.mosaic.gpu", None)  # its import fails
    clock = timing.device_clock()
    assert re.match("wall time over 20 calls, launches included, since CUPTI does not serve .*mosaic", clock.name)
    (seconds,) = clock.samples(jax.jit(jnp.sin), (jnp.ones(8),))
    assert 0 < seconds < 1


def test_cupti_times_are_in_seconds(monkeypatch):
    """A stand-in for the profiler, which answers in milliseconds, one number a call."""
    gpu = types.ModuleType("jax.experimental.mosaic.gpu")

    def measure(f, *, iterations):
        return lambda *args: (f(*args), [float(args[0][0])] * iterations)

    monkeypatch.setattr(gpu, "profiler", types.SimpleNamespace(measure=measure), raising=False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, gpu.__name__, gpu)
    clock = timing.device_clock()
    assert clock.name.startswith("sum of kernel times by CUPTI")
    assert timing.medians({"sine": jax.jit(jnp.sin)}, (jnp.array([3.0]),), clock) == {"sine": 0.003}
