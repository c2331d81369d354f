"""The table of a benchmark: its head, its lines, and the means and ratios below it."""

import collections
import datetime
import importlib.metadata
import math
import pathlib
import subprocess

import jax

import bsjax
from bsjax import info
from experiments.bench.cases import PAIRS
from experiments.bench.peers import PASSES

# FLOP/s of a large dense product on random data, bytes/s of a copy (read + written), both measured.
CEILINGS = {
    ("NVIDIA H200", "bfloat16"): (790e12, 4.2e12),
    ("NVIDIA H200", "float16"): (785e12, 4.2e12),
    ("NVIDIA H200", "tf32"): (417e12, 4.2e12),
    ("NVIDIA H200", "float32"): (52e12, 4.2e12),  # no tensor cores
}

# On a CPU: what time over density x dense time should not exceed, and from which block size, up to which density.
CPU_GOAL, CPU_GOAL_SIZE, CPU_GOAL_DENSITY = 1.3, 16, 0.25

# Column, key, format.
BASE = (
    ("case", "case", "s"),
    ("pass", "pass", "s"),
    ("m x k x n", "size", "s"),
    ("dtype", "dtype", "s"),
    ("b", "b", "d"),
    ("density", "density", ".3f"),
    ("us", "us", ".1f"),
    ("TFLOP/s", "tflops", ".3g"),
    ("GB/s", "gbps", ".3g"),
    ("% floor", "floor_percent", ".0f"),
)


def columns(peers):
    """The columns of a run with peers of those names."""
    ratios = tuple((f"x {name}", f"x_{name}", ".2f") for name in peers)
    return BASE + ratios + ((("/ (density x dense)", "over_density", ".2f"),) if "reference" in peers else ())


def sizes(m, layout, dtype):
    """Columns that say which product it was."""
    k, n = layout.shape
    return {
        "size": f"{m} x {k} x {n}",
        "dtype": dtype,
        "b": layout.block_size,
        "num_blocks": layout.num_blocks,
        "density": layout.density,
    }


def figures(seconds, peers, m, layout, dtype):
    """Columns that follow from times, {"ours" or peer: seconds}; None where there is none."""
    size = layout.num_blocks * layout.block_size**2
    flops = 2 * m * size
    width = 4 if dtype in ("float32", "tf32") else 2
    least_bytes = (m * sum(layout.shape) + size) * width  # x, y and the blocks, each once
    ceilings = CEILINGS.get((jax.devices()[0].device_kind, dtype))
    floor = max(flops / ceilings[0], least_bytes / ceilings[1]) if ceilings else None
    own = seconds.get("ours")
    timed = [name for name in peers if own and name in seconds]
    best = min(timed, key=lambda name: seconds[name], default=None)
    return {
        "us": own and own * 1e6,
        "tflops": own and flops / own / 1e12,
        "gbps": own and least_bytes / own / 1e9,
        "floor_percent": own and floor and 100 * floor / own,
        "best": best,
        "x_best": seconds[best] / own if best else None,
        "over_density": own / layout.density / seconds["dense"] if "dense" in timed else None,
        **{f"{name}_us": seconds[name] * 1e6 if name in timed else None for name in peers},
        **{f"x_{name}": seconds[name] / own if name in timed else None for name in peers},
    }


# -------------------------------------------------------------------------------------------------------------- lines


def head_lines(columns):
    return _line(title for title, _, _ in columns) + "\n" + _line("---" for _ in columns)


def line(row, columns):
    cells = ["-" if row[key] is None else format(row[key], form) for _, key, form in columns]
    if row["wrong"]:
        cells[[key for _, key, _ in columns].index("us")] = f"FAILED: {row['wrong']} wrong elements"
    return _line(cells)


def _line(cells):
    return "| " + " | ".join(cells) + " |"


def summary(rows, peers):
    """All that stands below the table: means, ratios between cases, crossovers, the goal of a CPU, refusals."""
    parts = [mean_lines(rows, name) for name in [*peers, *(["best"] if len(peers) > 2 else [])]]
    parts += [ratio_lines(rows), crossover_lines(rows), goal_line(rows) if "reference" in peers else ""]
    return "\n\n".join(part for part in [*parts, refusal_lines(rows)] if part)


def mean_lines(rows, peer):
    names = (*PASSES, "all")
    words = "the fastest peer of each row" if peer == "best" else peer
    lines = [f"Geometric means of x {words}:", "", _line(["b", *names]), _line(["---"] * 5)]
    for group, ratios in means(rows, f"x_{peer}").items():
        lines.append(_line([group, *(f"{ratios[name]:.2f}" if name in ratios else "-" for name in names)]))
    return "\n".join(lines) if len(lines) > 4 else ""


def means(rows, key):
    """`{group of cases: {pass: mean of row[key]}}`, "all" for all three; cases without a zero are a group apart."""
    ratios = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in sorted(rows, key=lambda row: row["b"]):
        if row[key]:
            group = f"{row['b']}, all ones" if row["density"] == 1 else f"{row['b']}"
            for name in (row["pass"], "all"):
                ratios[group][name].append(row[key])
    return {
        group: {name: geometric_mean(values) for name, values in passes.items()} for group, passes in ratios.items()
    }


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def ratio_lines(rows):
    timed = [row for row in rows if row["us"]]
    times = {(row["case"], row["pass"]): row["us"] for row in timed}
    dtypes = {row["case"]: row["dtype"] for row in timed}
    lines = ["Time of one case over another:", "", _line(["case", "over", "what", *PASSES]), _line(["---"] * 6)]
    for first, second, words in PAIRS:
        ratios = [_ratio(times.get((first, name)), times.get((second, name))) for name in PASSES]
        if any(ratios):
            words = words or f"{dtypes[first]} over {dtypes[second]}"
            lines.append(_line([first, second, words, *(f"{ratio:.2f}" if ratio else "-" for ratio in ratios)]))
    return "\n".join(lines) if len(lines) > 4 else ""


def _ratio(first, second):
    return first / second if first and second else None


def crossovers(rows):
    """`{(size, dtype, b, pass): (densities measured, density from which dense wins)}` over the uniform random cases.

    That density is None where dense wins nowhere up to the largest; where it wins at the smallest already, it is that.
    """
    points = collections.defaultdict(list)
    for row in rows:
        if row["random"] and row["x_dense"]:
            points[row["size"], row["dtype"], row["b"], row["pass"]].append((row["density"], row["x_dense"]))
    return {
        series: ([density for density, _ in sorted(found)], _crossing(sorted(found)))
        for series, found in points.items()
        if len(found) > 2  # two say little of a curve
    }


def _crossing(points):
    """Where x dense falls through 1 for the last time, between two measured densities by a line in logarithms."""
    if points[-1][1] >= 1:
        return None
    for (low, above), (high, below) in reversed(list(zip(points, points[1:], strict=False))):
        if above >= 1:
            share = math.log(above) / (math.log(above) - math.log(below))
            return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return points[0][0]


def crossover_lines(rows):
    lines = []
    for (size, dtype, b, name), (densities, density) in sorted(crossovers(rows).items(), key=lambda item: item[0][:3]):
        if density is None:
            words = f"ours is faster up to density {densities[-1]:.2f}, the largest measured"
        elif density == densities[0]:
            words = f"dense is faster from density {densities[0]:.2f}, the smallest measured"
        else:
            words = f"dense wins from density ~{density:.2f}"
        lines.append(f"* {size}, {dtype}, b = {b}, {name}: {words}")
    return "\n".join(lines)


def goal_line(rows):
    reached = {
        f"{row['case']} {row['pass']}": row["over_density"]
        for row in rows
        if row["over_density"] and row["dtype"] == "float32"
        if row["b"] >= CPU_GOAL_SIZE and row["density"] <= CPU_GOAL_DENSITY
    }
    if not reached:
        return ""
    worst = max(reached, key=lambda name: reached[name])
    return (
        f"Time over density x dense time in float32 at b >= {CPU_GOAL_SIZE}, density <= {CPU_GOAL_DENSITY}: geometric "
        f"mean {geometric_mean(reached.values()):.2f}, largest {reached[worst]:.2f} ({worst}); goal {CPU_GOAL}."
    )


def refusal_lines(rows):
    reasons = collections.defaultdict(list)
    for row in rows:
        for peer, reason in row["refused"].items():
            reasons[peer, reason].append(f"{row['case']} {row['pass']}")
    lines = ["Not timed, since the peer refuses or errs:", ""]
    for (peer, reason), refused in reasons.items():
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        lines.append(f"* {peer}: {reason} ({', '.join(refused[:3])}{more})")
    return "\n".join(lines) if reasons else ""


# --------------------------------------------------------------------------------------------------------------- head


def head(clock, commit, peers, missing):
    """What was measured, on what and how: {name: words}."""
    device = jax.devices()[0]
    kernels = info.kernels()["cuda" if device.platform == "gpu" else "cpu"]
    return {
        "device": device.device_kind,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "none",
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "bsjax": bsjax.__version__,
        "kernels": kernels,
        "commit": commit or _output("git", "describe", "--always", "--dirty") or "unknown",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "time": clock.name,
        "caches": "warm (each call reads the same operands)",
        "floor": _floor_words(device.device_kind),
        "peers": "; ".join(f"{peer.name}: {peer.about}" for peer in peers) or "none",
        "missing": "; ".join(f"{name}: {reason}" for name, reason in missing.items()) or "none",
    }


def _floor_words(device_kind):
    known = [(dtype, *rates) for (kind, dtype), rates in CEILINGS.items() if kind == device_kind]
    if not known:
        return "no ceilings measured on this device"
    words = ", ".join(f"{flops / 1e12:.0f} TFLOP/s in {dtype}" for dtype, flops, _ in known)
    return f"{words}, {known[0][2] / 1e12:.1f} TB/s, measured on this card in another run"


def _output(*words):
    """The first line that a program prints, or "" where it is missing or fails."""
    try:
        done = subprocess.run(words, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.partition("\n")[0].strip()
