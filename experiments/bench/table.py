"""The table of a benchmark: its head, its lines, and the geometric means below it."""

import collections
import datetime
import importlib.metadata
import math
import pathlib
import subprocess

import jax

import bsjax
from bsjax import info

PASSES = ("fprop", "dgrad", "wgrad")
MISSING = "cuSPARSE, torch, STK: not timed by this command yet"

# FLOP/s of a large dense bfloat16 product on random data, bytes/s of a copy (read + written), both measured.
CEILINGS = {("NVIDIA H200", "bfloat16"): (790e12, 4.2e12)}

# Column, key, format.
COLUMNS = (
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
    ("x dense", "x_dense", ".2f"),
    ("x reference", "x_reference", ".2f"),
)


def head_lines():
    return _line(title for title, _, _ in COLUMNS) + "\n" + _line("---" for _ in COLUMNS)


def line(row):
    cells = ["-" if row[key] is None else format(row[key], form) for _, key, form in COLUMNS]
    if row["wrong"]:
        cells[[key for _, key, _ in COLUMNS].index("us")] = f"FAILED: {row['wrong']} wrong elements"
    return _line(cells)


def mean_lines(rows):
    names = (*PASSES, "all")
    lines = ["Geometric means of x dense:", "", _line(["b", *names]), _line(["---"] * 5)]
    for group, ratios in means(rows).items():
        lines.append(_line([group, *(f"{ratios[name]:.2f}" if name in ratios else "-" for name in names)]))
    return "\n".join(lines)


def _line(cells):
    return "| " + " | ".join(cells) + " |"


def head(clock, commit):
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
        "peers": f"dense: jnp.dot; reference: bsjax in plain JAX, not timed on a GPU; {MISSING}",
    }


def _floor_words(device_kind):
    known = [(dtype, *rates) for (kind, dtype), rates in CEILINGS.items() if kind == device_kind]
    words = (
        f"{f / 1e12:.0f} TFLOP/s in {d}, {r / 1e12:.1f} TB/s, measured on this card in another run" for d, f, r in known
    )
    return "; ".join(words) or "no ceilings measured on this device"


def _output(*words):
    """The first line that a program prints, or "" where it is missing or fails."""
    try:
        done = subprocess.run(words, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.partition("\n")[0].strip()


def means(rows):
    """`{group of cases: {pass: mean of x_dense}}`, pass "all" for all three; cases without a zero are a group apart."""
    ratios = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in sorted(rows, key=lambda row: row["b"]):
        if row["x_dense"]:
            group = f"{row['b']}, all ones" if row["density"] == 1 else f"{row['b']}"
            for name in (row["pass"], "all"):
                ratios[group][name].append(row["x_dense"])
    return {
        group: {name: math.exp(sum(map(math.log, values)) / len(values)) for name, values in passes.items()}
        for group, passes in ratios.items()
    }
