"""The plot of a benchmark: time against density, a line a block size, and where the dense product takes over."""

import collections

from experiments import common
from experiments.bench import table
from experiments.bench.peers import PASSES


def save(record, path):
    """Draws the uniform random cases of the size and dtype that have most of them, as PNG; says where, or why not."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "No plot: matplotlib is missing; `pip install bsjax[plot]` brings it."
    series = collections.defaultdict(list)
    for row in record["rows"]:
        if row["random"] and row["us"] and row.get("dense_us"):
            series[row["size"], row["dtype"]].append(row)
    if not series:
        return "No plot: no uniform random case was timed beside the dense product."
    (size, dtype), rows = max(series.items(), key=lambda item: len(item[1]))
    found = table.crossovers(rows)
    figure = Figure(figsize=(15, 5), layout="constrained")
    all_axes = figure.subplots(1, 3, sharey=True)
    for axes, name in zip(all_axes, PASSES, strict=True):
        own = [row for row in rows if row["pass"] == name]
        axes.set(xlabel="density", title=name, xscale="log", yscale="log")
        _draw(axes, own, {b: density for (_, _, b, key), (_, density) in found.items() if key == name})
        axes.grid(alpha=0.3, which="both")
    all_axes[0].set(ylabel="microseconds")
    next(axes for axes in all_axes if axes.lines).legend()
    head = record["head"]
    figure.suptitle(f"Block-sparse products, {size}, {dtype}, {head['device']}, {head['commit']}")
    common.save_figure(figure, path)
    return f"Plot: {path}"


def _draw(axes, rows, crossings):
    """One pass: `crossings` is {b: density from which dense wins, or None}."""
    if not rows:
        return
    times = sorted(row["dense_us"] for row in rows)
    dense = times[len(times) // 2]
    axes.axhline(dense, color="black", linestyle="--", label="dense")
    for b in sorted({row["b"] for row in rows}):
        points = sorted((row["density"], row["us"]) for row in rows if row["b"] == b)
        (line,) = axes.plot(*zip(*points, strict=True), "o-", markersize=4, label=f"b = {b}")
        if density := crossings.get(b):
            axes.plot([density], [dense], "x", color="black", markersize=9)
            where = {"xytext": (-4, -6), "textcoords": "offset points", "rotation": 90, "va": "top"}
            axes.annotate(f"{density:.2f}", (density, dense), color=line.get_color(), **where)
    densities = sorted({round(row["density"], 2) for row in rows})
    axes.set_xticks(densities, labels=[f"{density:.2f}" for density in densities], rotation=90)
    axes.set_xticks([], minor=True)
