"""Samples text from a trained model: `python -m experiments.lstm.sample workdir=PATH`."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments import command, common
from experiments.common import CommandError
from experiments.lstm import configs, model, train, trainer

_USAGE = """usage: python -m experiments.lstm.sample [workdir=PATH] [key=value ...]
  model        which model of the run; its last, as a rule the sparse one, if not given
  prompt       what the model reads first
  bytes        how many bytes to sample
  temperature  1 samples as the model predicts, less is more likely text; 0 takes the likeliest byte each time
  seed         of the sampling"""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to sample; `python -m experiments.lstm.sample --help` describes each."""

    workdir: str = "runs/lstm-smoke"
    model: str = ""
    prompt: str = "def "
    bytes: int = 500
    temperature: float = 0.8
    seed: int = 0

    def __post_init__(self):
        for name, holds in (
            ("workdir", self.workdir),
            ("prompt", self.prompt),
            ("bytes", self.bytes > 0),
            ("temperature", self.temperature >= 0),
        ):
            if not holds:
                raise CommandError(f"`{name}` must be positive or, if text, not empty; got {getattr(self, name)!r}.")


@functools.partial(jax.jit, static_argnums=(0, 5))
def _sample(config, layouts, params, prompt, key, num_bytes, temperature):
    """Reads `prompt`, `[length]` int32, and draws `num_bytes` more, each from what is predicted after the last."""

    def draw(carry, key):
        state, logits = carry
        likeliest = jnp.argmax(logits, axis=-1)
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6), axis=-1)
        byte = jnp.where(temperature == 0, likeliest, drawn)
        state, logits = model.apply(params, layouts, state, byte[None], config)
        return (state, logits[-1]), byte[0]

    state, logits = model.apply(params, layouts, model.initial_state(config, 1), prompt[:, None], config)
    return jax.lax.scan(draw, (state, logits[-1]), jax.random.split(key, num_bytes))[1]


def sample(options):
    """Samples as the options say, and returns the bytes, without the prompt."""
    workdir = pathlib.Path(options.workdir).expanduser()
    models = command.read_config(workdir, configs.Config, train.MODULE)["models"]
    name = options.model or list(models)[-1]
    if name not in models:
        raise CommandError(f"`model` must be one of {', '.join(models)}; got {name}.")
    checkpoints = common.Checkpoints(workdir / name)
    if checkpoints.latest_step() is None:
        raise CommandError(f"`model` must have a checkpoint; {name} has none in {workdir} yet.")
    config, layouts = models[name], model.make_layouts(models[name])
    _, state = checkpoints.restore(trainer.init(config, layouts, *trainer.columns(train.members(config))))
    params = jax.tree.map(lambda x: x[0], state["ema"])
    prompt = np.frombuffer(options.prompt.encode(), np.uint8).astype(np.int32)
    key = jax.random.key(options.seed)
    drawn = _sample(config, layouts, params, prompt, key, options.bytes, options.temperature)
    return bytes(np.asarray(drawn, np.uint8))


def main(arguments):
    if {"-h", "--help"} & set(arguments):
        common.say(_USAGE)
        return
    options = command.override({"sample": Options()}, arguments)["sample"]
    common.say(options.prompt + sample(options).decode(errors="replace"))


if __name__ == "__main__":
    command.run(main)
