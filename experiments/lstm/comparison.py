"""Who is ahead, by rule: a sweep over rates and seeds gives the spread, and less than twice the spread is level."""

import dataclasses
import json
import pathlib

import numpy as np

from experiments.lstm import model

# Tables of sweeps, committed: `python -m experiments.lstm.sweep` writes one, a run is judged by the one that fits it.
RESULTS = pathlib.Path(__file__).with_name("results")
# What a run may have of its own: rates and seeds are the table's rows, and how often a run is saved changes nothing.
_FREE = ("rate", "seed", "checkpoint_every")


@dataclasses.dataclass(frozen=True)
class Table:
    """The held-out losses of a sweep.

    Attributes:
      models: {name: the config as a dict}.
      rates, seeds: lists of the values swept.
      bits: {name: `[rates, seeds]` nested lists of bits per byte, None where a member diverged}.
      about: {word: text or number}: the text, the machine and the seconds, for the reader.
    """

    models: dict
    rates: list
    seeds: list
    bits: dict
    about: dict

    def best(self, name):
        """The rate whose mean over the seeds is least, of those at which no member diverged; None without any."""
        whole = {rate: np.mean(row) for rate, row in self._rows(name).items() if None not in row}
        return min(whole, key=whole.get, default=None)

    def differences(self, first, second, first_rate, second_rate):
        """`second` less `first`, seed by seed, in bits per byte: `[seeds]`; None if a member diverged."""
        rows = self._rows(first).get(first_rate), self._rows(second).get(second_rate)
        if any(row is None or None in row for row in rows):
            return None
        return np.subtract(rows[1], rows[0])

    def fits(self, models):
        """Whether its models are these, rates and seeds apart."""
        return _key({name: dataclasses.asdict(config) for name, config in models.items()}) == _key(self.models)

    def _rows(self, name):
        return dict(zip(self.rates, self.bits[name], strict=True))


def _key(models):
    return {name: {key: value for key, value in config.items() if key not in _FREE} for name, config in models.items()}


def read(path):
    """Reads a table that `Table` fields were written to as JSON."""
    return Table(**json.loads(path.read_text()))


def spread(values):
    """The standard deviation over seeds; None for a single one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def verdict(first, second, difference, deviation):
    """Who is ahead, of two models: `difference` is bits per byte of the second less those of the first."""
    if abs(difference) < 2 * deviation:
        return "level"
    return f"{first if difference > 0 else second} ahead"


def equality(models):
    """Says whether the models have as many recurrent weights, and gives what they must share: a sentence and a bool."""
    counts = {name: model.count_recurrent(config) for name, config in models.items()}
    if len(set(counts.values())) == 1:
        each = "" if len(counts) == 1 else " in each model, exactly"
        return f"Recurrent weights: {next(iter(counts.values())):,}{each}", True
    told = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return f"Recurrent weights differ ({told}), so the models are not compared on equal terms", False


def judge_table(table, models):
    """The verdicts of a sweep, a line for each model against the first, each at its own best rate."""
    first, *others = table.models
    told, equal = equality(models)
    if not equal:
        return [f"no verdict: {told}."]
    lines = []
    for second in others:
        rates = table.best(first), table.best(second)
        if None in rates:
            who = " and ".join(name for name, rate in zip((first, second), rates, strict=True) if rate is None)
            lines.append(f"{second} - {first}: no verdict: at every rate a member of {who} diverged.")
            continue
        differences = table.differences(first, second, *rates)
        mean, deviation = float(np.mean(differences)), spread(differences)
        told = f"{second} - {first}, at their best c ({rates[1]:g}, {rates[0]:g}): {mean:+.4f} bits per byte"
        if deviation is None:
            lines.append(f"{told}; no verdict: one seed has no spread.")
        else:
            judged = verdict(first, second, mean, deviation)
            lines.append(f"{told}, spread {deviation:.4f} over {len(differences)} seeds: {judged}")
    return lines


def judge_run(models, bits):
    """The verdict of a run of one seed, by the spread that a committed table has of its models: some sentences.

    Args:
      models: {name: config}.
      bits: {name: bits per byte of the held-out text, None if unknown}.
    """
    names = list(models)
    told, equal = equality(models)
    if not equal:
        return f"No verdict: {told}."
    if len(names) < 2 or None in bits.values():
        return "No verdict: two models must be trained to the end."
    path, table = _find(models)
    lines = []
    for name in names[1:]:
        difference = bits[name] - bits[names[0]]
        told = f"{name} - {names[0]}: {difference:+.4f} bits per byte"
        rates = models[names[0]].rate, models[name].rate
        differences = table and table.differences(names[0], name, *rates)
        if differences is None or len(differences) < 2:
            lines.append(f"{told}; no verdict: no spread is known for this configuration (experiments/lstm/README.md).")
            continue
        deviation = spread(differences)
        lines.append(
            f"{told}: {verdict(names[0], name, difference, deviation)}, by the spread of {deviation:.4f} over "
            f"{len(differences)} seeds in {path.name} ({'; '.join(table.about['text'])})"
        )
    return "\n".join(lines)


def _find(models):
    for path in sorted(RESULTS.glob("*.json")):
        table = read(path)
        if table.fits(models):
            return path, table
    return None, None
