"""How fast are spmm and sddmm? `python -m experiments.bench.matmul` checks each case, then prints one table."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp

import bsjax
from bsjax import patterns
from bsjax.testing import Case, integers, reference, timing
from experiments import command
from experiments.bench import table
from experiments.common import CommandError, write_text

USAGE = """python -m experiments.bench.matmul [key=value ...]
  case=NAME      one case; all of them by default
  dtype=NAME     float32, float16 or bfloat16; by default bfloat16 on a GPU, float32 elsewhere
  rows=COUNT     rows of x, in place of the case's own
  commit=NAME    what is measured, where git cannot tell
  workdir=PATH   where matmul.json is written; runs/bench by default"""


@dataclasses.dataclass(frozen=True)
class Options:
    case: str = ""
    dtype: str = ""
    rows: int = 0
    commit: str = ""
    workdir: str = "runs/bench"


# ------------------------------------------------------------------------------------------------------------- cases


def cases(on_gpu):
    """The cases by name: sizes of an H200's work on a GPU, of seconds on a few cores elsewhere."""
    if on_gpu:
        rows, few, side, wide, hubs = 8192, 128, 4096, 16384, 6
        densities = {8: 0.10, 16: 0.10, 32: 0.10, 64: 0.10, 128: 0.12}
    else:
        rows, few, side, wide, hubs = 512, 16, 1024, 4096, 2
        densities = {8: 0.10, 16: 0.10, 32: 0.10, 64: 0.25, 128: 0.25}
    found = [Case(f"random_b{b}", _random(side, side, b, d), b, rows) for b, d in densities.items()]
    found += [Case(f"few_rows_b{b}", _random(side, wide, b, 0.10), b, few) for b in (8, 16, 32, 64)]
    found += [Case(f"ones_b{b}_m{m}", _ones(side, b), b, m) for b in (64, 128) for m in (rows // 4, rows // 2, rows)]
    found += [Case("barabasi_albert_b32", lambda: patterns.barabasi_albert(side // 32, hubs, seed=0), 32, rows)]
    return {case.name: case for case in found}


def _random(k, n, b, density):
    return lambda: patterns.random(k // b, n // b, density, seed=0, diagonal=False)


def _ones(side, b):
    return lambda: patterns.dense(side // b, side // b)


# ---------------------------------------------------------------------------------------------------------- products
# Each function takes all operands (x [m, k], dy [m, n], blocks, the dense w [k, n], layout), so that one call fits all.


def ours():
    return {
        "fprop": jax.jit(lambda x, dy, blocks, w, layout: bsjax.spmm(x, blocks, layout)),
        "dgrad": jax.jit(lambda x, dy, blocks, w, layout: bsjax.spmm(dy, blocks, layout, transpose=True)),
        "wgrad": jax.jit(lambda x, dy, blocks, w, layout: bsjax.sddmm(x, dy, layout)),
    }


def dense(out=None):
    """The same by dense products; `out`: dtype of the result, that of the operands by default."""

    def dot(a, b):
        # float32 means real float32 here as in ours; other types have one kind of product only.
        precision = "highest" if a.dtype == jnp.float32 else None
        return jnp.dot(a, b, precision=precision, preferred_element_type=out or a.dtype)

    return {
        "fprop": jax.jit(lambda x, dy, blocks, w, layout: dot(x, w)),
        "dgrad": jax.jit(lambda x, dy, blocks, w, layout: dot(dy, w.T)),
        "wgrad": jax.jit(lambda x, dy, blocks, w, layout: dot(x.T, dy)),
    }


def plain():
    """The library's own reference in plain JAX."""

    def fprop(x, dy, blocks, w, layout):
        lists = layout.indptr_t, layout.indices_t, layout.perm_t
        return reference.spmm(x[None], blocks[None], *lists, transpose=False, tf32=False)[0]

    def dgrad(x, dy, blocks, w, layout):
        lists = layout.indptr, layout.indices, jnp.zeros(0, jnp.int32)
        return reference.spmm(dy[None], blocks[None], *lists, transpose=True, tf32=False)[0]

    def wgrad(x, dy, blocks, w, layout):
        index = layout.rows, layout.indices
        return reference.sddmm(x[None], dy[None], *index, block_size=layout.block_size, tf32=False)[0]

    return {"fprop": jax.jit(fprop), "dgrad": jax.jit(dgrad), "wgrad": jax.jit(wgrad)}


def operands(layout, m, dtype, draw):
    """x, dy, blocks, w and layout, drawn by `draw(seed, shape, dtype)`."""
    (k, n), b = layout.shape, layout.block_size

    @jax.jit
    def make(layout):
        x, dy = draw(0, (m, k), dtype), draw(1, (m, n), dtype)
        blocks = draw(2, (layout.num_blocks, b, b), dtype)
        w = jnp.zeros((*layout.block_shape, b, b), dtype).at[layout.rows, layout.indices].set(blocks)
        return x, dy, blocks, w.transpose(0, 2, 1, 3).reshape(k, n), layout

    return make(layout)


def normal(seed, shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def wrong_elements(args, functions):
    """{pass: elements that differ from the dense product}, on small whole numbers, where any order of sums is exact."""
    exact = dense(out=jnp.float32)
    layout = args[-1]

    @jax.jit
    def count(got, want, layout):
        if got.ndim == 3:
            b = layout.block_size
            want = want.reshape(layout.block_shape[0], b, layout.block_shape[1], b).transpose(0, 2, 1, 3)
            want = want[layout.rows, layout.indices]
        return jnp.sum(~(got == want.astype(got.dtype)))  # a NaN counts

    return {name: int(count(functions[name](*args), exact[name](*args), layout)) for name in table.PASSES}


# -------------------------------------------------------------------------------------------------------------- rows


def measure(case, dtype, clock):
    """Checks one case, then times it: a list of rows, one a pass. A pass that is wrong has no times."""
    layout = case.layout()
    functions = ours()
    wrong = wrong_elements(operands(layout, case.m, dtype, integers), functions)
    args = operands(layout, case.m, dtype, normal)
    peers = {"dense": dense()}
    if jax.default_backend() != "gpu":  # there it is thousands of kernels, and time by kernels leaves out the gaps
        peers["reference"] = plain()
    (k, n), rows = layout.shape, []
    for name in table.PASSES:
        row = {"case": case.name, "pass": name, "dtype": dtype.name, "size": f"{case.m} x {k} x {n}"}
        row |= {"b": layout.block_size, "num_blocks": layout.num_blocks, "density": layout.density}
        row |= {"wrong": wrong[name]}
        seconds = {}
        if not wrong[name]:
            turns = {"ours": functions[name], **{peer: made[name] for peer, made in peers.items()}}
            seconds = timing.medians(turns, args, clock)
        rows.append(row | _figures(seconds, case.m, layout, dtype))
    return rows


def _figures(seconds, m, layout, dtype):
    """Columns that follow from times; None where there is none."""
    size = layout.num_blocks * layout.block_size**2
    flops = 2 * m * size
    least_bytes = (m * sum(layout.shape) + size) * dtype.itemsize  # x, y and the blocks, each once
    ceilings = table.CEILINGS.get((jax.devices()[0].device_kind, dtype.name))
    floor = max(flops / ceilings[0], least_bytes / ceilings[1]) if ceilings else None
    own = seconds.get("ours")
    figures = {f"{name}_us": seconds[name] * 1e6 if name in seconds else None for name in ("dense", "reference")}
    return {
        "us": own and own * 1e6,
        "tflops": own and flops / own / 1e12,
        "gbps": own and least_bytes / own / 1e9,
        "floor_percent": own and floor and 100 * floor / own,
        "x_dense": own and seconds["dense"] / own,
        "x_reference": own and seconds["reference"] / own if "reference" in seconds else None,
        **figures,
    }


# -------------------------------------------------------------------------------------------------------------- main


def main(arguments):
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return
    options = command.override({"matmul": Options()}, arguments)["matmul"]
    on_gpu = jax.default_backend() == "gpu"
    chosen = _chosen(options, cases(on_gpu))
    dtype = _dtype(options.dtype or ("bfloat16" if on_gpu else "float32"))
    clock = timing.device_clock()
    record = {"head": table.head(clock, options.commit), "rows": []}
    workdir = pathlib.Path(options.workdir).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    for name, words in record["head"].items():
        print(f"* {name}: {words}")
    print(f"\n{table.head_lines()}")
    for case in chosen:
        for row in measure(case, dtype, clock):
            record["rows"].append(row)
            print(table.line(row), flush=True)
        write_text(workdir / "matmul.json", json.dumps(record, indent=1) + "\n")  # kept if a later case fails
    print(f"\n{table.mean_lines(record['rows'])}")
    failed = [f"{row['case']} {row['pass']}" for row in record["rows"] if row["wrong"]]
    if failed:
        raise CommandError(f"FAILED: {', '.join(failed)} differ from the dense product, so they have no speed.", code=1)


def _chosen(options, known):
    if options.case and options.case not in known:
        raise CommandError(f"`case` must be one of {', '.join(known)}; got {options.case!r}.")
    if options.rows < 0:
        raise CommandError(f"`rows` must be at least 1, or 0 for the case's own; got {options.rows}.")
    chosen = [known[options.case]] if options.case else list(known.values())
    return [dataclasses.replace(case, m=options.rows or case.m) for case in chosen]


def _dtype(name):
    names = ("float32", "float16", "bfloat16")
    if name not in names:
        raise CommandError(f"`dtype` must be one of {', '.join(names)}; got {name!r}.")
    return jnp.dtype(name)


if __name__ == "__main__":
    command.run(main)
