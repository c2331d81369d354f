"""Trains the models of a preset in turn, on the same text, and compares them: `python -m experiments.lstm.train`."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bsjax import info
from experiments import command, common
from experiments.common import CommandError
from experiments.lstm import configs, data, model, report

_MODULE = "experiments.lstm.train"
_USAGE = f"""usage: python -m {_MODULE} [PRESET] [key=value ...] [workdir=PATH] [--resume]
  PRESET       one of {", ".join(configs.PRESETS)}; the first is the default
  key=value    sets an option of every model of the preset, dense.key=value or sparse.key=value of one; the options are
               described in experiments/lstm/configs.py
  workdir      where metrics, checkpoints and plot go; runs/lstm-PRESET by default
  --resume     goes on with the run in workdir from its newest checkpoints"""
_FLUSH = 20  # steps between two looks at the loss: each waits for the device


# --------------------------------------------------------------------------------------------------------- one step


def optimizer(config):
    """Adam with b2 .999 as in the paper's example, the gradient clipped by its norm."""
    warmup = round(config.warmup * config.steps)
    rate = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, config.steps)
    return optax.chain(optax.clip_by_global_norm(config.clip), optax.adam(rate))


@functools.partial(jax.jit, static_argnums=0)
def init(config, layouts):
    """Makes the training state: a pytree of all that the next step depends on, but for the text."""
    key, own = jax.random.split(jax.random.key(config.seed))
    params = model.init(own, config, layouts)
    return {
        "params": params,
        "ema": params,
        "optimizer": optimizer(config).init(params),
        "state": model.initial_state(config, config.batch),
        "key": key,
    }


def loss_fn(params, config, layouts, state, inputs, targets, key=None):
    """Mean bits per byte of a window, and the model's state after it. Without a `key` nothing is dropped."""
    state, logits = model.apply(params, layouts, state, inputs, config, key)
    nats = optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, model.VOCABULARY))
    return jnp.mean(nats) / np.log(2), state


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def train_step(config, layouts, train_state, inputs, targets, restart):
    """Trains on one window `[length, batch]`; `restart` says that it is the first of the streams.

    Returns:
      The new training state, and the loss in bits per byte and the norm of the gradient.
    """
    key, own = jax.random.split(train_state["key"])
    params, state = train_state["params"], train_state["state"]
    state = jax.tree.map(lambda x: jnp.where(restart, 0, x), state)
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, state), grads = gradient(params, config, layouts, state, inputs, targets, own)
    updates, optimizer_state = optimizer(config).update(grads, train_state["optimizer"], params)
    params = optax.apply_updates(params, updates)
    ema = optax.incremental_update(params, train_state["ema"], 1 - config.ema)
    new = {"params": params, "ema": ema, "optimizer": optimizer_state, "state": state, "key": key}
    return new, (loss, optax.tree.norm(grads))


evaluate_window = jax.jit(loss_fn, static_argnums=1)


def evaluate(config, layouts, params, streams):
    """Mean bits per byte over all whole windows of the streams, the state carried from each to the next."""
    state = model.initial_state(config, streams.shape[0])
    losses = []
    for position in range(data.num_windows(streams, config.length)):
        window = data.window(streams, position, config.length)
        loss, state = evaluate_window(params, config, layouts, state, *window)
        losses.append(loss)
    return float(np.mean(np.asarray(jax.device_get(losses), np.float64)))


# -------------------------------------------------------------------------------------------------------- one model


class Trainer:
    """Trains one model of a run from its newest checkpoint to its last step, and evaluates it before and after.

    Its folder in `workdir` holds the checkpoints; `workdir/metrics.jsonl` gets `name/loss` and `name/heldout` in bits
    per byte and `name/seconds`, the training time so far.
    """

    def __init__(self, name, config, text, workdir):
        self._name, self._config = name, config
        self._streams, self._heldout = data.split(text, config.heldout, config.batch, config.length)
        self._layouts = model.make_layouts(config)
        self._metrics = common.Metrics(workdir / "metrics.jsonl")
        self._checkpoints = common.Checkpoints(workdir / name)
        self._state, self._step = init(config, self._layouts), self._checkpoints.latest_step() or 0
        if self._step:
            self._state = self._checkpoints.restore(self._state)
        self._metrics.rewind(f"{name}/", self._step if self._step else -1)

    def run(self, signals):
        """Does what is left to do, or, if a signal comes, ends early with its state saved.

        Returns:
          The number of steps trained.

        Raises:
          CommandError: if the loss or the gradient is no longer finite.
        """
        first = self._step
        if first == 0:
            self._evaluate()
        if first < self._config.steps:
            window_bytes = self._config.batch * self._config.length
            with common.Progress(self._name, window_bytes, self._config.steps, self._step) as progress:
                self._train(signals, progress)
        if self._step == self._config.steps and self._known("heldout") is None:
            self._evaluate()
        return self._step - first

    def _train(self, signals, progress):
        config, pending = self._config, []
        started = time.monotonic() - (self._known("seconds") or 0.0)
        while self._step < config.steps:
            pending.append(self._train_step())
            save = signals.received or self._step % config.checkpoint_every == 0 or self._step == config.steps
            if save or len(pending) == _FLUSH:
                losses = self._look(pending)
                progress.update(len(losses), losses[-1])
                pending = []
            if save:
                self._write([(self._step, "seconds", time.monotonic() - started)])
                self._checkpoints.save(self._step, self._state)
            if signals.received:
                return

    def _train_step(self):
        position = self._step % data.num_windows(self._streams, self._config.length)
        window = data.window(self._streams, position, self._config.length)
        self._state, told = train_step(self._config, self._layouts, self._state, *window, np.bool_(position == 0))
        self._step += 1
        return told

    def _look(self, pending):
        """Waits for the pending steps and writes down their losses, which it returns."""
        first = self._step - len(pending) + 1
        told = jax.device_get(pending)
        for step, (loss, norm) in enumerate(told, first):
            if not np.isfinite(loss + norm):
                saved = self._checkpoints.latest_step()
                raise CommandError(
                    f"The loss or its gradient is not finite at step {step} of {self._name}. The last good checkpoint "
                    f"is {f'of step {saved}' if saved else 'none'}; a lower `learning_rate` or `clip` may help.",
                    code=1,
                )
        losses = [float(loss) for loss, _ in told]
        self._write([(step, "loss", loss) for step, loss in enumerate(losses, first)])
        return losses

    def _evaluate(self):
        loss = evaluate(self._config, self._layouts, self._state["ema"], self._heldout)
        self._write([(self._step, "heldout", loss)])

    def _write(self, lines):
        self._metrics.write([(step, f"{self._name}/{name}", value) for step, name, value in lines])

    def _known(self, name):
        """What the metrics say of this step, or None."""
        lines = self._metrics.read()
        return next((v for at, key, v in lines if at == self._step and key == f"{self._name}/{name}"), None)


# ---------------------------------------------------------------------------------------------------------- command


def main(arguments):
    run = command.parse(arguments, _MODULE, configs.PRESETS, _USAGE)
    texts = {config.data: data.load(config.data) for config in run.models.values()}
    for config in run.models.values():  # before anything is written: is the text long enough?
        data.split(texts[config.data][0], config.heldout, config.batch, config.length)
    sizes, about = report.table(run.models), [text_about for _, text_about in texts.values()]
    run.open(about)
    print("\n".join(about))
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; block-sparse products: {_kernels()}")
    print(sizes, flush=True)
    with common.Signals() as signals:
        trained = 0
        for name, config in run.models.items():
            trained += Trainer(name, config, texts[config.data][0], run.workdir).run(signals)
            signals.end_if_received(f"The run is saved. Go on with: {run.resume_command}")
    print("The run is finished." if trained else "The run was finished already; nothing was trained.")
    lines = common.Metrics(run.workdir / "metrics.jsonl").read()
    report.plot(run.models, lines, run.workdir / "curves.png")
    print(report.table(run.models, lines))
    print(f"Metrics, plot and checkpoints: {run.workdir}")
    print(f"A sample: python -m experiments.lstm.sample workdir={run.workdir}")


def _kernels():
    kernels = info.kernels()
    platform = jax.default_backend()
    return kernels.get("cuda" if platform == "gpu" else platform, info.REFERENCE)


if __name__ == "__main__":
    command.run(main)
