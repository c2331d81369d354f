"""What a run shows: a table that compares its models, and a plot of their losses."""

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments import common
from experiments.lstm import model

_COLUMNS = (
    "model",
    "hidden",
    "pattern",
    "density",
    "recurrent",
    "parameters",
    "before",
    "after",
    "seconds",
    "kB/s",
)


def table(models, lines=()):
    """The models side by side, one a line: sizes, bits per byte of the held-out text before and after, and speed.

    Args:
      models: {name: config}.
      lines: the run's metrics, (step, name, value) triples; what they do not hold is shown as a dash.
    """
    metrics = {(step, name): value for step, name, value in lines}
    rows = [_COLUMNS, *(_row(name, config, metrics) for name, config in models.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def _row(name, config, metrics):
    layouts = model.make_layouts(config)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), config, layouts))
    recurrent = sum(w.size for w in params["weights"])
    density = recurrent / ((config.depth + 4) * config.hidden**2)
    pattern = (
        config.pattern if config.pattern == "dense" else f"{config.pattern} {config.degree}, b={config.block_size}"
    )
    seconds = metrics.get((config.steps, f"{name}/seconds"))
    rate = config.steps * config.batch * config.length / seconds / 1e3 if seconds else None
    before, after = (metrics.get((step, f"{name}/heldout")) for step in (0, config.steps))
    sizes = [
        name,
        str(config.hidden),
        pattern,
        f"{density:.1%}",
        f"{recurrent:,}",
        f"{model.count_parameters(params):,}",
    ]
    results = [(before, ".4f"), (after, ".4f"), (seconds, ".1f"), (rate, ".1f")]
    return [*sizes, *("-" if value is None else format(value, form) for value, form in results)]


def plot(models, lines, path):
    """Draws the training loss of every model, smoothed, and its held-out loss before and after, as PNG."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, config in models.items():
        loss = np.array([(step, value) for step, key, value in lines if key == f"{name}/loss"])
        heldout = [(step, value) for step, key, value in lines if key == f"{name}/heldout"]
        if not len(loss):
            continue  # somebody took the metrics away
        width = max(1, len(loss) // 50)  # a fiftieth of the run: a window's own loss says little
        smooth = np.convolve(loss[:, 1], np.ones(width) / width, "valid")
        scale = config.batch * config.length / 1e6
        (line,) = axes.plot(loss[width - 1 :, 0] * scale, smooth, label=f"{name}, training")
        axes.plot(
            [step * scale for step, _ in heldout],
            [v for _, v in heldout],
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
