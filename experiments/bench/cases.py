"""What the benchmark measures: named cases, gathered in suites."""

import dataclasses

from bsjax import patterns
from bsjax.testing import Case

# Of the density sweep: both sides of where a dense product takes over, at every block size that has such a place.
SWEEP_SIZES = (8, 16, 32)
SWEEP_DENSITIES = (0.02, 0.05, 0.10, 0.15, 0.20, 0.25, 0.30, 0.40, 0.50)
DTYPES = ("float32", "tf32", "float16", "bfloat16")
SUITES = ("standard", "sweep", "sizes", "dtypes", "all")

# The time of the first over that of the second: (first, second, what the ratio says; their dtypes by default).
PAIRS = (
    ("barabasi_albert_b32", "balanced_b32", "columns that differ over even ones, as many blocks"),
    ("watts_strogatz_b32", "uniform_b32", "neighbours, 20 % rewired, over uniform random, as many blocks"),
    ("random_b32_d02", "random_b32", "density .02 over .10"),
    *((f"random_b{b}_{dtype}", f"random_b{b}", "") for dtype in DTYPES for b in (8, 16, 32, 64)),
)


@dataclasses.dataclass(frozen=True)
class BenchCase(Case):
    """A case and two words for its row.

    Attributes:
      dtype: of DTYPES, or "" for the run's own; tf32 is float32 data whose products may round to TF32.
      random: whether its pattern is uniform random, so that it is a point of the plot over densities.
    """

    dtype: str = ""
    random: bool = False


def dtypes(on_gpu):
    return [dtype for dtype in DTYPES if on_gpu or dtype != "tf32"]


def default_dtype(on_gpu):
    return "bfloat16" if on_gpu else "float32"


def suites(on_gpu):
    """{suite: {name: case}}: sizes of an H200's work on a GPU, of seconds on a few cores elsewhere."""
    if on_gpu:
        rows, few, side, wide, hubs, many_rows = 8192, 128, 4096, 16384, 6, (64, 256, 1024, 4096, 16384, 65536)
        densities = {8: 0.10, 16: 0.10, 32: 0.10, 64: 0.10, 128: 0.12}
    else:
        rows, few, side, wide, hubs, many_rows = 512, 16, 1024, 4096, 2, (16, 64, 256, 1024)
        densities = {8: 0.10, 16: 0.10, 32: 0.10, 64: 0.25, 128: 0.25}

    others = [dtype for dtype in dtypes(on_gpu) if dtype != default_dtype(on_gpu)]

    def random(b, density, dtype=""):
        own = "" if density == densities[b] else f"_d{round(100 * density):02d}"
        name = f"random_b{b}{own}" + (f"_{dtype}" if dtype else "")
        return BenchCase(name, _random(side, side, b, density), b, rows, dtype, random=True)

    base = [random(b, density) for b, density in densities.items()]
    standard = [*base, random(32, 0.02)]
    standard += [BenchCase(f"few_rows_b{b}", _random(side, wide, b, 0.10), b, few) for b in (8, 16, 32, 64)]
    standard += [
        BenchCase(f"ones_b{b}_m{m}", lambda b=b: patterns.dense(side // b, side // b), b, m)
        for b in (64, 128)
        for m in (rows // 4, rows // 2, rows)
    ]
    standard += _graphs(side // 32, hubs, rows)
    standard += [BenchCase(f"balanced_b{b}", _even(side, b, densities[b]), b, rows) for b in (8, 16, 64)]
    sizes = [BenchCase(f"rows_b32_m{m}", _random(side, side, 32, 0.10), 32, m) for m in many_rows]
    sizes += [BenchCase(f"side{wide}_b32_m{m}", _random(wide, wide, 32, 0.02), 32, m) for m in (few, rows)]
    if on_gpu:
        # Few rows: the dense products beside it are 500 times the work, and XLA tries many kernels for each.
        sizes += [BenchCase("side65536_b32_m1024", _random(65536, 65536, 32, 0.002), 32, 1024)]
    found = {
        "standard": standard,
        "sweep": [random(b, density) for b in SWEEP_SIZES for density in SWEEP_DENSITIES],
        "sizes": sizes,
        "dtypes": base[:4] + [random(b, densities[b], dtype) for b in (8, 16, 32, 64) for dtype in others],
    }
    found = {suite: {case.name: case for case in chosen} for suite, chosen in found.items()}
    return found | {"all": {name: case for chosen in found.values() for name, case in chosen.items()}}


def _graphs(nodes, hubs, rows):
    """Two graphs, and beside each a random pattern with as many blocks: an even one, and a uniform one."""
    hubbed = lambda: patterns.barabasi_albert(nodes, hubs, seed=0)  # noqa: E731
    small_world = lambda: patterns.watts_strogatz(nodes, 2 * hubs, 0.2, seed=0)  # noqa: E731

    def like(make, graph):
        return lambda: make(nodes, nodes, graph().mean(), seed=0)

    return [
        BenchCase("barabasi_albert_b32", hubbed, 32, rows),
        BenchCase("balanced_b32", like(patterns.balanced_random, hubbed), 32, rows),
        BenchCase("watts_strogatz_b32", small_world, 32, rows),
        BenchCase("uniform_b32", like(patterns.random, small_world), 32, rows),
    ]


def _even(side, b, density):
    return lambda: patterns.balanced_random(side // b, side // b, density, seed=0, diagonal=False)


def _random(k, n, b, density):
    return lambda: patterns.random(k // b, n // b, density, seed=0, diagonal=False)
