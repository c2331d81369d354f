"""What a run shows: its head, a table that compares its models, and a plot of their losses."""

import jax
import numpy as np
from matplotlib.figure import Figure

from bsjax import info
from experiments import common
from experiments.lstm import comparison, model

SIZES = ("model", "hidden", "read", "pattern", "density", "recurrent", "parameters", "state", "MB", "TFLOP")
_ALL = (*SIZES, "before", "after", "clipped", "seconds", "kB/s")


def head(models, about):
    """What the models read, what they run on, and whether they can be compared."""
    kernels, platform = info.kernels(), jax.default_backend()
    kernels = kernels.get("cuda" if platform == "gpu" else platform, info.REFERENCE)
    device = jax.devices()[0].device_kind
    return "\n".join(
        [
            *about,
            f"jax {jax.__version__} on {device}; block-sparse products: {kernels}",
            comparison.equality(models)[0],
        ]
    )


def table(models, lines=(), columns=_ALL):
    """The models side by side, one a line: sizes, bits per byte of the held-out text before and after, and speed.

    MB are read in training, with TFLOP in the recurrent products; state is the floats that a stream carries along.

    Args:
      models: {name: config}.
      lines: the run's metrics, (step, name, value) triples; what they do not hold is shown as a dash.
      columns: which to show.
    """
    metrics = {(step, name): value for step, name, value in lines}
    rows = [_row(name, config, metrics) for name, config in models.items()]
    return lay_out([columns, *([row[column] for column in columns] for row in rows)])


def lay_out(rows):
    """Rows of text as columns, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def heldout(models, lines):
    """{name: bits per byte of the held-out text after training, None where the metrics do not hold it}."""
    metrics = {(step, name): value for step, name, value in lines}
    return {name: metrics.get((config.steps, f"{name}/heldout")) for name, config in models.items()}


def _row(name, config, metrics):
    layouts = model.make_layouts(config)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), config, layouts))
    recurrent, size = model.count_recurrent(config), config.steps * config.batch * config.length
    pattern = config.pattern
    if pattern != "dense":
        pattern += f" {config.degree}, b={config.block_size}"
    seconds = metrics.get((config.steps, f"{name}/seconds"))
    results = {
        "before": (metrics.get((0, f"{name}/heldout")), ".4f"),
        "after": (metrics.get((config.steps, f"{name}/heldout")), ".4f"),
        "clipped": (metrics.get((config.steps, f"{name}/clipped")), ".1%"),
        "seconds": (seconds, ".1f"),
        "kB/s": (size / seconds / 1e3 if seconds else None, ".1f"),
    }
    return {
        "model": name,
        "hidden": str(config.hidden),
        "read": str(config.hidden // config.stride),
        "pattern": pattern,
        "density": f"{recurrent / ((config.depth + 4) * config.hidden**2):.1%}",
        "recurrent": f"{recurrent:,}",
        "parameters": f"{model.count_parameters(params):,}",
        "state": f"{2 * config.hidden:,}",
        "MB": f"{size / 1e6:.2f}",
        # Two for each weight and byte in each of the three passes: forward, and the gradients of input and weight.
        "TFLOP": f"{6 * recurrent * size / 1e12:.2f}",
        **{key: "-" if value is None else format(value, form) for key, (value, form) in results.items()},
    }


def plot(models, lines, path):
    """Draws the training loss of every model, smoothed, and its held-out loss before and after, as PNG."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, config in models.items():
        loss = np.array([(step, value) for step, key, value in lines if key == f"{name}/loss"])
        evaluated = [(step, value) for step, key, value in lines if key == f"{name}/heldout"]
        if not len(loss):
            continue  # somebody took the metrics away
        width = max(1, len(loss) // 50)  # a fiftieth of the run: a window's own loss says little
        smooth = np.convolve(loss[:, 1], np.ones(width) / width, "valid")
        scale = config.batch * config.length / 1e6
        (line,) = axes.plot(loss[width - 1 :, 0] * scale, smooth, label=f"{name}, training")
        axes.plot(
            [step * scale for step, _ in evaluated],
            [value for _, value in evaluated],
            "o",
            color=line.get_color(),
            label=f"{name}, held out",
        )
    axes.set(
        xlabel="MB of text trained on",
        ylabel="bits per byte",
        title="Multiplicative LSTM, dense and block-sparse",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    common.save_figure(figure, path)
