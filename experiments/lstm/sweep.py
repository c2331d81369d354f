"""Sweeps rates and seeds, all members of a model in one program, and judges: `python -m experiments.lstm.sweep`."""

import dataclasses
import json
import math

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments import command, common
from experiments.common import CommandError
from experiments.lstm import comparison, configs, report, trainer

MODULE = "experiments.lstm.sweep"
_USAGE = f"""usage: python -m {MODULE} [PRESET] [key=value ...] [rates=C,C,...] [seeds=N] [workdir=PATH] [--resume]
  PRESET, key=value   as of experiments.lstm.train; `rate` and the members' seeds are what is swept, `seed` makes the
                      patterns, which all members share
  rates               values of `rate`, of the recurrent weights
  seeds               how many: 0, 1, ... of the parameters; each at every rate
  workdir             where metrics, checkpoints, table and plot go; runs/lstm-sweep-PRESET by default
  --resume            goes on with the sweep in workdir from its newest checkpoints"""


@dataclasses.dataclass(frozen=True)
class Options:
    """What is swept; `python -m experiments.lstm.sweep --help` describes each."""

    rates: str = "0.5,1,2"
    seeds: int = 3

    def __post_init__(self):
        try:
            rates = self.values()
        except ValueError:
            rates = []
        if not rates or len(set(rates)) < len(rates) or not all(0 < rate < math.inf for rate in rates):
            raise CommandError(f"`rates` must be different numbers above 0 with commas between; got {self.rates!r}.")
        if self.seeds < 1:
            raise CommandError(f"`seeds` must be at least 1; got {self.seeds}.")

    def values(self):
        return [float(word) for word in self.rates.split(",")]

    def members(self):
        """Rate after rate, seed after seed."""
        return [
            trainer.Member(rate, seed, f"rate={rate:g},seed={seed}")
            for rate in self.values()
            for seed in range(self.seeds)
        ]


def main(arguments):
    run = command.parse(arguments, MODULE, configs.PRESETS, _USAGE, Options())
    texts = trainer.read_texts(run.models)
    sizes, about = report.table(run.models, columns=report.SIZES), [about for _, about in texts.values()]
    members = run.options.members()
    with run.open(about):
        common.say(report.head(run.models, about))
        common.say(sizes)
        common.say(f"{len(members)} members of each model in one program: {run.options.seeds} seeds at each c")
        trainer.train_all(run, lambda config: members, texts)
        lines = common.Metrics(run.workdir / "metrics.jsonl").read()
        table = make_table(run, about, lines)
        common.write_text(run.workdir / "table.json", json.dumps(dataclasses.asdict(table), indent=1) + "\n")
        plot(table, run.workdir / "sweep.png")
    common.say(show(table, run.models, run.options, lines))
    common.say("\n".join(comparison.judge_table(table, run.models)))
    common.say(f"Metrics, table.json, sweep.png and checkpoints: {run.workdir}")


def make_table(run, about, lines):
    """What the metrics say of the held-out text, as a `comparison.Table`."""
    metrics, rates, seeds = _metrics(lines), run.options.values(), range(run.options.seeds)
    bits, seconds = {}, {}
    for name, config in run.models.items():
        seconds[name] = metrics.get((config.steps, f"{name}/seconds"))
        known = [
            metrics.get((config.steps, trainer.metric_name(name, member, "heldout")))
            for member in run.options.members()
        ]
        bits[name] = [known[row * len(seeds) :][: len(seeds)] for row in range(len(rates))]
    return comparison.Table(
        models={name: dataclasses.asdict(config) for name, config in run.models.items()},
        rates=rates,
        seeds=list(seeds),
        bits=bits,
        about={"text": about, "jax": jax.__version__, "device": jax.devices()[0].device_kind, "seconds": seconds},
    )


def _metrics(lines):
    return {(step, name): value for step, name, value in lines}


def show(table, models, options, lines):
    """The sweep, a rate of a model a line: mean and spread over the seeds, the best rate of each model marked."""
    metrics, rows, notes = _metrics(lines), [("model", "c", "", "bits", "spread", "clipped", "seconds")], []
    for name, config in models.items():
        best = table.best(name)
        for rate, bits in zip(table.rates, table.bits[name], strict=True):
            whole = [value for value in bits if value is not None]
            clipped = [
                metrics.get((config.steps, trainer.metric_name(name, member, "clipped")), 0.0)
                for member in options.members()
                if member.rate == rate
            ]
            told = (
                (f"{np.mean(bits):.4f}", _decimals(comparison.spread(bits)))
                if len(whole) == len(bits)
                else (
                    "diverged",
                    f"{len(bits) - len(whole)} of {len(bits)}",
                )
            )
            seconds = _decimals(table.about["seconds"][name], 0) if rate == table.rates[0] else ""
            rows.append((name, f"{rate:g}", "best" * (rate == best), *told, f"{np.mean(clipped):.1%}", seconds))
        if best in (table.rates[0], table.rates[-1]) and len(table.rates) > 1:
            notes.append(f"The best c of {name}, {best:g}, is the last on its side; sweep further.")
    return "\n".join([report.lay_out(rows), *notes])


def _decimals(value, digits=4):
    return "-" if value is None else f"{value:.{digits}f}"


def plot(table, path):
    """Draws bits per byte over c for each model: the mean over the seeds, and every seed, as PNG."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name, rows in table.bits.items():
        whole = [(rate, row) for rate, row in zip(table.rates, rows, strict=True) if None not in row]
        (line,) = axes.plot([rate for rate, _ in whole], [np.mean(row) for _, row in whole], label=name)
        for rate, row in whole:
            axes.plot([rate] * len(row), row, ".", color=line.get_color())
    axes.set(xscale="log", xlabel="c, learning rate x fan-in", ylabel="bits per byte, held out")
    axes.set_xticks(table.rates, [f"{rate:g}" for rate in table.rates])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    common.save_figure(figure, path)


if __name__ == "__main__":
    command.run(main)
