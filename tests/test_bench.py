"""The benchmark of the products: it checks before it times, takes turns, and writes what it prints."""

import dataclasses
import itertools
import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bsjax
from bsjax.testing import integers as whole_numbers
from bsjax.testing import timing
from experiments.bench import cases, check, cusparse, kernels, matmul, peers, plot, table, torch_peers
from experiments.common import CommandError

KNOWN = cases.suites(on_gpu=False)["all"]
TOY = ["case=random_b32", "rows=16", "dtype=float32", *(["peers=dense"] if jax.default_backend() == "gpu" else [])]


@pytest.fixture
def small(monkeypatch):
    """The sizes of a CPU, also where a GPU serves."""
    suites = cases.suites(on_gpu=False)
    monkeypatch.setattr(cases, "suites", lambda on_gpu: suites)


@pytest.mark.usefixtures("small")
def test_toy_run(tmp_path, capsys):
    matmul.main([*TOY, f"workdir={tmp_path}", "commit=abc"])
    record = json.loads((tmp_path / "matmul.json").read_text())
    assert record["head"]["jax"] == jax.__version__
    assert record["head"]["commit"] == "abc"
    assert [row["pass"] for row in record["rows"]] == list(peers.PASSES)
    here = [word.partition(":")[0] for word in record["head"]["peers"].split("; ")]
    columns = table.columns(here)
    for row in record["rows"]:
        assert {key for _, key, _ in columns} <= set(row)
        assert (row["case"], row["size"], row["dtype"]) == ("random_b32", "16 x 1024 x 1024", "float32")
        assert (row["b"], row["num_blocks"], row["wrong"]) == (32, 102, 0)
        assert row["tflops"] * row["us"] * 1e6 == pytest.approx(2 * 16 * 102 * 32**2)
        assert row["gbps"] * row["us"] * 1e3 == pytest.approx(4 * (16 * 2048 + 102 * 32**2))
        assert row["x_dense"] == pytest.approx(row["dense_us"] / row["us"])
        if jax.default_backend() == "cpu":
            assert row["x_reference"] == pytest.approx(row["reference_us"] / row["us"])
            assert row["over_density"] == pytest.approx(row["us"] / row["density"] / row["dense_us"])
    printed = capsys.readouterr().out
    assert all(table.line(row, columns) in printed for row in record["rows"])
    assert f"Plot: {tmp_path / 'matmul.png'}" in printed
    assert (tmp_path / "matmul.png").exists()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_checked_and_timed(tmp_path, dtype):
    matmul.main([*TOY, f"dtype={dtype}", f"workdir={tmp_path}"])
    rows = json.loads((tmp_path / "matmul.json").read_text())["rows"]
    assert [(row["dtype"], row["us"] > 0) for row in rows] == [(dtype, True)] * 3


@pytest.mark.usefixtures("small")
def test_a_wrong_kernel_has_no_speed(tmp_path, monkeypatch, capsys):
    right = bsjax.spmm

    def wrong(x, blocks, layout, transpose, precision):
        y = right(x, blocks, layout, transpose=transpose)
        return y if transpose else y.at[-1, -1].add(jnp.ones((), y.dtype))

    monkeypatch.setattr(peers, "spmm", wrong)
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
    monkeypatch.setattr(peers, "sddmm", lambda x, dy, layout, precision: jnp.full_like(data.blocks, jnp.nan))
    data = check.operands(KNOWN["random_b32"].layout(), 4, "float32", check.integers)
    found = check.passes([], data)
    assert {name: wrong for name, (wrong, _, _) in found.items()} == {
        "fprop": 0,
        "dgrad": 0,
        "wgrad": data.blocks.size,
    }


@pytest.mark.parametrize("on_gpu", [False, True])
def test_cases(on_gpu):
    suites = cases.suites(on_gpu)
    assert tuple(suites) == cases.SUITES
    assert {case.block_size for case in suites["standard"].values()} == {8, 16, 32, 64, 128}
    for name, case in suites["all"].items():
        assert case.name == name
        assert case.m > 0
        assert case.dtype in ("", *cases.dtypes(on_gpu))
        if "side65536" in name:  # two seconds
            continue
        k, n = case.layout().shape
        assert k >= (4096 if on_gpu else 1024)
        assert n >= k
        assert case.layout().density == 1 if name.startswith("ones") else 0.01 < case.layout().density <= 0.5
    for first, second, _ in cases.PAIRS:
        assert {first, second} <= set(suites["all"]) or "_tf32" in first or "float" in first
    assert {(case.block_size, round(case.layout().density, 2)) for case in suites["sweep"].values()} == set(
        itertools.product(cases.SWEEP_SIZES, cases.SWEEP_DENSITIES)
    )


def test_graphs_have_as_many_blocks_as_their_twins():
    found = {name: KNOWN[name].layout() for first, second, _ in cases.PAIRS[:2] for name in (first, second)}
    assert found["barabasi_albert_b32"].num_blocks == found["balanced_b32"].num_blocks
    assert found["watts_strogatz_b32"].num_blocks == found["uniform_b32"].num_blocks


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("case=nope", "`case` must be one of random_b8, .*barabasi_albert_b32.*; got 'nope'"),
        ("suite=nope", "`suite` must be one of standard, sweep, sizes, dtypes, all; got 'nope'"),
        ("dtype=int8", "`dtype` must be one of float32, .*float16, bfloat16; got 'int8'"),
        ("rows=-1", "`rows` must be at least 1, .*; got -1"),
        ("rows=many", "`rows` must be of type int; got 'many'"),
        ("speed=high", "`speed` is no option; the options are .*case"),
        ("peers=dense,nope", "`peers` must be among dense, .* here; got 'dense,nope'"),
        ("config=-2", "`config` "),
    ],
)
def test_bad_options(word, message):
    with pytest.raises(CommandError, match=message):
        matmul.main([word])


# -------------------------------------------------------------------------------------------------------------- peers


def test_missing_peers_are_named(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(cusparse, "_load", lambda: (_ for _ in ()).throw(peers.Missing("no libcusparse was found")))
    monkeypatch.setattr(torch_peers.importlib, "import_module", missing)
    here, absent = matmul.find_peers(on_gpu=True)
    assert [peer.name for peer in here] == ["dense"]
    assert absent == {
        "cusparse_ell": "no libcusparse was found",
        "cusparse_bsr": "no libcusparse was found",
        "torch_bsr": "No module named 'torch'",
        "stk": "No module named 'torch'",
    }
    head = table.head(timing.device_clock(), "abc", here, absent)
    assert "stk: No module named 'torch'" in head["missing"]


class Shy:
    """A peer that refuses fprop, errs in dgrad, and does wgrad in three ways: one raises, one is right."""

    name = "shy"
    about = "a stand-in"

    def fprop(self, data):
        raise peers.Refused("not on a Tuesday")

    def dgrad(self, data):
        return [peers.Way(lambda: data.x), peers.Way(lambda: data.dy * jnp.nan)]

    def wgrad(self, data):
        def fail():
            raise RuntimeError("first line\nsecond line")

        dblocks = peers.Dense().wgrad(data)[0]
        return [peers.Way(fail), dataclasses.replace(dblocks, words="good"), peers.Way(lambda: data.blocks * jnp.nan)]


@pytest.mark.usefixtures("small")
def test_a_peer_that_refuses_or_errs_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(matmul, "find_peers", lambda on_gpu, names: ([peers.Dense(), Shy()], {"other": "not here"}))
    matmul.main([*TOY, f"workdir={tmp_path}"])
    record = json.loads((tmp_path / "matmul.json").read_text())
    assert record["head"]["missing"] == "other: not here"
    fprop, dgrad, wgrad = record["rows"]
    assert fprop["refused"] == {"shy": "not on a Tuesday"}
    assert re.match(r"\d+ wrong elements", dgrad["refused"]["shy"])
    assert wgrad["refused"] == {}
    assert wgrad["ways"] == {"shy": "good"}
    assert wgrad["x_shy"] == pytest.approx(wgrad["shy_us"] / wgrad["us"])
    assert (fprop["x_shy"], fprop["best"], fprop["x_best"]) == (None, "dense", fprop["x_dense"])
    printed = capsys.readouterr().out
    assert "* shy: not on a Tuesday (random_b32 fprop)" in printed
    assert "* missing: other: not here" in printed


@pytest.mark.gpu
@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("ignore")  # of foreign packages
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peers_of_a_card(tmp_path, dtype):
    """Each peer that is here does fprop and dgrad right, but for what two of them are known to refuse in float32."""
    matmul.main(["case=random_b128", "rows=128", f"dtype={dtype}", f"workdir={tmp_path}"])
    record = json.loads((tmp_path / "matmul.json").read_text())
    here = {word.partition(":")[0] for word in record["head"]["peers"].split("; ")}
    allowed = {"stk", "cusparse_ell"} if dtype == "float32" else set()
    for row in record["rows"][:2]:
        assert {peer for peer in here if not row[f"{peer}_us"]} <= allowed, row["refused"]


@pytest.mark.parametrize("transpose", [False, True])
def test_ell_pads_to_the_longest_line(transpose):
    mask = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], bool)
    layout = bsjax.Layout.from_mask(mask, 8)
    blocks = whole_numbers(0, (layout.num_blocks, 8, 8))
    columns, values = (np.asarray(a) for a in cusparse.ell(layout, blocks, transpose=transpose))
    if transpose:
        assert columns.tolist() == [[0], [2], [0], [0]]
    else:
        assert columns.tolist() == [[0, 2, 3], [-1, -1, -1], [1, -1, -1]]
    w = np.zeros(layout.shape[::-1] if transpose else layout.shape, np.float32)
    for (row, slot), column in np.ndenumerate(columns):
        block = values[8 * row : 8 * row + 8, 8 * slot : 8 * slot + 8]
        if column < 0:
            assert not block.any()
        else:
            w[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = block
    dense = np.asarray(check._scatter(blocks, layout))
    np.testing.assert_array_equal(w, dense.T if transpose else dense)


# -------------------------------------------------------------------------------------------- what is printed and drawn


def random_row(density, x_dense, name="fprop", b=32):
    row = {"case": f"d{density}", "pass": name, "size": "8 x 64 x 64", "dtype": "float32", "b": b, "density": density}
    return row | {"random": True, "us": 10 / x_dense, "dense_us": 10.0, "x_dense": x_dense, "refused": {}, "wrong": 0}


def test_geometric_means():
    rows = [
        {"b": 16, "density": 0.5, "pass": "wgrad", "x_dense": 3.0},
        {"b": 8, "density": 0.5, "pass": "fprop", "x_dense": 2.0},
        {"b": 8, "density": 0.5, "pass": "dgrad", "x_dense": 8.0},
        {"b": 8, "density": 0.5, "pass": "wgrad", "x_dense": None},
        {"b": 8, "density": 1.0, "pass": "fprop", "x_dense": 0.5},
    ]
    assert table.means(rows, "x_dense") == {
        "8": pytest.approx({"fprop": 2.0, "dgrad": 8.0, "all": 4.0}),
        "8, all ones": pytest.approx({"fprop": 0.5, "all": 0.5}),
        "16": pytest.approx({"wgrad": 3.0, "all": 3.0}),
    }


@pytest.mark.parametrize(
    ("ratios", "density", "words"),
    [
        ([8.0, 4.0, 2.0], None, "ours is faster up to density 0.40, the largest measured"),
        ([4.0, 2.0, 0.5], 0.2 * 2**0.5, "dense wins from density ~0.28"),
        ([0.9, 0.5, 0.2], 0.1, "dense is faster from density 0.10, the smallest measured"),
    ],
)
def test_crossover(ratios, density, words):
    rows = [random_row(d, x) for d, x in zip([0.1, 0.2, 0.4], ratios, strict=True)]
    ((series, (_, found)),) = table.crossovers(rows).items()
    assert series == ("8 x 64 x 64", "float32", 32, "fprop")
    assert found == (None if density is None else pytest.approx(density))
    assert table.crossover_lines(rows) == f"* 8 x 64 x 64, float32, b = 32, fprop: {words}"


def test_ratios_between_cases():
    rows = [random_row(0.1, x) | {"case": name} for name, x in (("random_b8_float16", 2.0), ("random_b8", 4.0))]
    rows[1]["dtype"] = "bfloat16"
    assert "| random_b8_float16 | random_b8 | float32 over bfloat16 | 2.00 | - | - |" in table.ratio_lines(rows)
    assert table.ratio_lines(rows[:1]) == ""


def test_goal_of_a_cpu():
    rows = [random_row(0.1, 5.0) | {"over_density": 2.0}, random_row(0.2, 5.0) | {"over_density": 0.5}]
    rows += [random_row(0.5, 1.0) | {"over_density": 9.0}, random_row(0.1, 1.0, b=8) | {"over_density": 9.0}]
    assert table.goal_line(rows).endswith("geometric mean 1.00, largest 2.00 (d0.1 fprop); goal 1.3.")


def test_plot(tmp_path, monkeypatch):
    head = {"device": "cpu", "commit": "abc"}
    rows = [random_row(d, x, name) for name in peers.PASSES for d, x in ((0.1, 2.0), (0.5, 0.5))]
    path = tmp_path / "matmul.png"
    assert plot.save({"head": head, "rows": rows}, path) == f"Plot: {path}"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "no uniform random case" in plot.save({"head": head, "rows": []}, path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # its import fails
    assert plot.save({"head": head, "rows": rows}, path).endswith("`pip install bsjax[plot]` brings it.")


# ------------------------------------------------------------------------------------------------- kernels by number


@pytest.mark.gpu
@pytest.mark.usefixtures("small")
def test_kernels_by_number(tmp_path):
    matmul.main([*TOY, "config=all", f"workdir={tmp_path}"])
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    for name in peers.PASSES:
        own = [row for row in rows if row["pass"] == name]
        assert own[0]["kernel"] == "chosen"
        assert len(own) > 1
        assert all(row["us"] > 0 for row in own)


def test_kernels_by_number_need_a_gpu():
    if timing.num_kernels("spmm"):
        assert kernels.numbers("0")["spmm"] == [0]
    else:
        with pytest.raises(CommandError, match="`config` needs a GPU"):
            matmul.main(["config=0"])


# --------------------------------------------------------------------------------------------------------------- time


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


def test_a_slow_function_sits_out():
    turns = []

    def samples(f, args):
        turns.append(f())
        return [1.0 if turns[-1] == "slow" else 1e-3]

    functions = {"slow": lambda: "slow", "fast": lambda: "fast"}
    assert timing.medians(functions, (), timing.Clock("fake", samples), rounds=5) == {"slow": 1.0, "fast": 1e-3}
    assert (turns.count("slow"), turns.count("fast")) == (3, 5)


def test_work_outside_jax_is_waited_for():
    waited = []
    launched = peers.Launched("y", lambda: waited.append(True))
    jax.block_until_ready([launched, launched])
    assert len(waited) == 2


@pytest.mark.parametrize(("kernels_seen", "seconds"), [([1.0, 2.0] * 5, 0.003), ([1.0, 2.0, 3.0, 4.0], 0.002)])
def test_cupti_times_are_in_seconds(monkeypatch, kernels_seen, seconds):
    """A stand-in for the profiler, which answers (name, milliseconds) a kernel: two kernels a call, or not the same."""
    cupti = types.SimpleNamespace(
        _cupti_init=lambda: None, _cupti_get_timings=lambda finalize: [("kernel", ms) for ms in kernels_seen]
    )
    gpu = types.ModuleType("jax.experimental.mosaic.gpu")
    profiler = types.SimpleNamespace(mosaic_gpu_lib=types.SimpleNamespace(_mosaic_gpu_ext=cupti))
    monkeypatch.setattr(gpu, "profiler", profiler, raising=False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, gpu.__name__, gpu)
    clock = timing.device_clock()
    assert clock.name.startswith("sum of kernel times by CUPTI")
    assert timing.medians({"sine": jax.jit(jnp.sin)}, (jnp.array([3.0]),), clock) == {"sine": pytest.approx(seconds)}
