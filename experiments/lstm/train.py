"""Trains the models of a preset in turn, on the same text, and compares them: `python -m experiments.lstm.train`."""

from experiments import command, common
from experiments.lstm import comparison, configs, report, trainer

MODULE = "experiments.lstm.train"
_USAGE = f"""usage: python -m {MODULE} [PRESET] [key=value ...] [workdir=PATH] [--resume]
  PRESET       one of {", ".join(configs.PRESETS)}; the first is the default
  key=value    sets an option of every model of the preset, dense.key=value or sparse.key=value of one; the options are
               described in experiments/lstm/configs.py
  workdir      where metrics, checkpoints and plot go; runs/lstm-PRESET by default
  --resume     goes on with the run in workdir from its newest checkpoints"""


def members(config):
    """A run of this command trains one member of each model."""
    return [trainer.Member(config.rate, config.seed)]


def main(arguments):
    run = command.parse(arguments, MODULE, configs.PRESETS, _USAGE)
    texts = trainer.read_texts(run.models)
    sizes, about = report.table(run.models), [about for _, about in texts.values()]
    with run.open(about):
        common.say(report.head(run.models, about))
        common.say(sizes)
        trainer.train_all(run, members, texts)
        lines = common.Metrics(run.workdir / "metrics.jsonl").read()
        report.plot(run.models, lines, run.workdir / "curves.png")
    common.say(report.table(run.models, lines))
    common.say(comparison.judge_run(run.models, report.heldout(run.models, lines)))
    common.say(f"Metrics, plot and checkpoints: {run.workdir}")
    common.say(f"A sample: python -m experiments.lstm.sample workdir={run.workdir}")


if __name__ == "__main__":
    command.run(main)
