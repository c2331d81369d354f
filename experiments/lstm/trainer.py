"""The step and the loop: trains members of one model, which differ in rate and seed, side by side in one program."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import common
from experiments.common import CommandError
from experiments.lstm import data, model

_FLUSH = 20  # steps between two looks at the loss: each waits for the device


@dataclasses.dataclass(frozen=True)
class Member:
    """One of the models that are trained side by side; all share the config's patterns, and read the same text.

    Attributes:
      rate: its `Config.rate`.
      seed: of its parameters and its dropout.
      label: what its metrics are called by, between the model's name and the metric's; empty for an only member.
    """

    rate: float
    seed: int
    label: str = ""


def columns(members):
    """The members' rates and seeds as `init` takes them."""
    rates, seeds = ([getattr(member, name) for member in members] for name in ("rate", "seed"))
    return np.array(rates, np.float32), np.array(seeds, np.int32)


# --------------------------------------------------------------------------------------------------------- one step


def optimizer(config):
    """Adam, the gradient clipped by its norm; the step it gives is yet to be multiplied by the learning rates."""
    warmup = round(config.warmup * config.steps)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup, config.steps)
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        # b2 as in the paper's example. Its epsilon of 1e-8 is as large as some gradients of a recurrent weight.
        optax.scale_by_adam(b2=0.999, eps=1e-10),
        optax.scale_by_learning_rate(schedule),
    )


@functools.partial(jax.jit, static_argnums=0)
def init(config, layouts, rates, seeds):
    """Makes the training states of members, stacked: a pytree of all that the next step depends on, but for the text.

    Args:
      config: what the members share.
      layouts: as `model.make_layouts` makes them.
      rates, seeds: `[members]` float32 and int32.
    """

    def one(rate, seed):
        key, own = jax.random.split(jax.random.key(seed))
        params = model.init(own, config, layouts)
        return {
            "params": params,
            "ema": params,
            "optimizer": optimizer(config).init(params),
            "state": model.initial_state(config, config.batch),
            "key": key,
            "rate": rate,
            "clipped": jnp.int32(0),  # steps whose gradient was clipped
            "diverged": jnp.bool_(False),  # whether the loss or the gradient ever was not finite
        }

    return _for_each(one, rates, seeds)


def _for_each(one, *stacked):
    """`one` of each member, stacked again. A single member is spared the batching, a fifth of its step on a CPU."""
    if len(jax.tree.leaves(stacked)[0]) > 1:
        return jax.vmap(one)(*stacked)
    return jax.tree.map(lambda x: x[None], one(*jax.tree.map(lambda x: x[0], stacked)))


def loss_fn(params, config, layouts, state, inputs, targets, key=None):
    """Mean bits per byte of a window, and the model's state after it. Without a `key` nothing is dropped."""
    state, logits = model.apply(params, layouts, state, inputs, config, key)
    nats = optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, model.VOCABULARY))
    return jnp.mean(nats) / np.log(2), state


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def train_step(config, layouts, train_state, inputs, targets, restart):
    """Trains all members on one window `[length, batch]`; `restart` says that it is the first of the streams.

    Returns:
      The new training state, and `[members]` losses in bits per byte and whether each member has diverged.
    """

    def one(old):
        key, own = jax.random.split(old["key"])
        params, state = old["params"], jax.tree.map(lambda x: jnp.where(restart, 0, x), old["state"])
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, state), grads = gradient(params, config, layouts, state, inputs, targets, own)
        updates, optimizer_state = optimizer(config).update(grads, old["optimizer"], params)
        rates = jax.tree.map(lambda _: config.learning_rate, params)
        rates["weights"] = [old["rate"] / fan_in for fan_in in model.fan_ins(params["weights"], config)]
        params = optax.apply_updates(params, jax.tree.map(jnp.multiply, updates, rates))
        norm = optax.tree.norm(grads)
        diverged = old["diverged"] | ~jnp.isfinite(loss + norm)
        new = {
            "params": params,
            "ema": optax.incremental_update(params, old["ema"], 1 - config.ema),
            "optimizer": optimizer_state,
            "state": state,
            "key": key,
            "rate": old["rate"],
            "clipped": old["clipped"] + (norm > config.clip),
            "diverged": diverged,
        }
        return new, (loss, diverged)

    return _for_each(one, train_state)


@functools.partial(jax.jit, static_argnums=1)
def evaluate_window(params, config, layouts, state, inputs, targets):
    """`[members]` losses of a window in bits per byte, and the states after it."""
    return _for_each(lambda params, state: loss_fn(params, config, layouts, state, inputs, targets), params, state)


def evaluate(config, layouts, params, streams):
    """Mean bits per byte of each member over the windows to evaluate on, the state carried from each to the next."""
    members, batch = len(params["output"]), streams.shape[0]
    state = jax.tree.map(lambda x: jnp.zeros((members, *x.shape)), model.initial_state(config, batch))
    losses = []
    for position in range(min(config.evaluated, data.num_windows(streams, config.length))):
        window = data.window(streams, position, config.length)
        loss, state = evaluate_window(params, config, layouts, state, *window)
        losses.append(loss)
    return np.mean(np.asarray(jax.device_get(losses), np.float64), axis=0)


# --------------------------------------------------------------------------------------------------- all steps


class Trainer:
    """Trains the members of one model from their newest checkpoint to the last step, and evaluates before and after.

    Their folder in `workdir` holds the checkpoints; `workdir/metrics.jsonl` gets, for each member, `loss` and `heldout`
    in bits per byte, `clipped`, the share of the steps whose gradient was clipped, and `diverged` where that happened;
    and for all together `seconds`, the training time so far.
    """

    def __init__(self, name, config, members, text, workdir):
        self._name, self._config, self._members = name, config, members
        self._text, self._workdir = text, workdir
        self._metrics = common.Metrics(workdir / "metrics.jsonl")

    def run(self, signals):
        """Does what is left to do, or, if a signal comes, ends early with its state saved.

        Returns:
          The number of steps trained.

        Raises:
          CommandError: if no member's loss and gradient are finite any longer, or no checkpoint there is whole.
        """
        config = self._config
        with common.Progress(self._name, config.batch * config.length, config.steps) as progress:
            progress.note("compiling")  # and that begins below: the bar is there before it
            self._restore()
            first = self._step
            progress.begin(first)
            if first == 0:
                self._evaluate()
            if first < config.steps:
                self._train(signals, progress)
        if self._step == config.steps and not self._evaluated():
            self._evaluate()
        return self._step - first

    def _restore(self):
        config = self._config
        self._streams, self._heldout = data.split(self._text, config.heldout, config.batch, config.length)
        self._layouts = model.make_layouts(config)
        self._checkpoints = common.Checkpoints(self._workdir / self._name)
        start = init(config, self._layouts, *columns(self._members))
        self._step, self._state = self._checkpoints.restore(start, mend=True)
        self._metrics.rewind(f"{self._name}/", self._step if self._step else -1)

    def _train(self, signals, progress):
        config, pending = self._config, []
        started = time.monotonic() - self._seconds()
        while self._step < config.steps:
            pending.append(self._train_step())
            save = signals.received or self._step % config.checkpoint_every == 0 or self._step == config.steps
            if save or len(pending) == _FLUSH:
                progress.update(len(pending), *self._look(pending))
                pending = []
            if save:
                self._metrics.write([(self._step, f"{self._name}/seconds", time.monotonic() - started)])
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
        """Waits for the pending steps and writes down their losses.

        Returns:
          The last loss, the mean of the members that have not diverged, and a note on those that have.
        """
        first = self._step - len(pending) + 1
        told = jax.device_get(pending)
        for step, (losses, diverged) in enumerate(told, first):
            if diverged.all():
                saved = self._checkpoints.latest_step()
                who = "" if len(self._members) == 1 else "of any member "
                raise CommandError(
                    f"The loss or its gradient {who}is not finite at step {step} of {self._name}. The last good "
                    f"checkpoint is {f'of step {saved}' if saved else 'none'}; a lower rate, `learning_rate` or `clip` "
                    "may help.",
                    code=1,
                )
            self._write("loss", losses, step, ~diverged)
        note = f"{diverged.sum()} of {len(diverged)} diverged" if diverged.any() else ""
        return losses[~diverged].mean(), note

    def _evaluate(self):
        losses, diverged = evaluate(self._config, self._layouts, self._state["ema"], self._heldout), self._diverged()
        self._write("heldout", losses, among=~diverged)
        self._write("diverged", np.ones_like(losses), among=diverged)
        if self._step:
            self._write("clipped", jax.device_get(self._state["clipped"]) / self._step)

    def _evaluated(self):
        """Whether the metrics know of this step what `_evaluate` says of it."""
        known = {name for step, name, _ in self._metrics.read() if step == self._step}
        told = np.where(self._diverged(), "diverged", "heldout")
        return all(self._key(member, name) in known for member, name in zip(self._members, told, strict=True))

    def _diverged(self):
        return jax.device_get(self._state["diverged"])

    def _seconds(self):
        """How long it took so far, as the metrics say."""
        known = {(step, name): value for step, name, value in self._metrics.read()}
        return known.get((self._step, f"{self._name}/seconds"), 0.0)

    def _write(self, name, values, step=None, among=None):
        """Writes one value for each member, or for those that `among` marks, at this step if none is given."""
        step, among = step or self._step, np.ones(len(values), bool) if among is None else among
        self._metrics.write(
            [
                (step, self._key(member, name), float(value))
                for member, value, wanted in zip(self._members, values, among, strict=True)
                if wanted
            ]
        )

    def _key(self, member, name):
        return metric_name(self._name, member, name)


def metric_name(model_name, member, name):
    """What the metrics call a number of a member: `dense/loss`, or `dense/rate=0.5,seed=1/loss`."""
    return "/".join(filter(None, (model_name, member.label, name)))


# ------------------------------------------------------------------------------------------------------- all models


def read_texts(models):
    """Reads the texts of the models and checks that each is long enough: {path: (text, sentence about it)}."""
    texts = {config.data: data.load(config.data) for config in models.values()}
    for config in models.values():
        data.split(texts[config.data][0], config.heldout, config.batch, config.length)
    return texts


def train_all(run, members, texts):
    """Trains the models of a run in turn: of each config the members that `members(config)` lists."""
    trained = 0
    with common.Signals() as signals:
        for name, config in run.models.items():
            trained += Trainer(name, config, members(config), texts[config.data][0], run.workdir).run(signals)
            signals.end_if_received(f"The run is saved. Go on with: {run.resume_command}")
    common.say("The run is finished." if trained else "The run was finished already; nothing was trained.")
