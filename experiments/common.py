"""What every experiment shares besides its command line: metrics, checkpoints, progress, signals, plots."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import sys
import time

import jax
import orbax.checkpoint as ocp
from tqdm import tqdm


class CommandError(Exception):
    """Ends a command with one sentence and an exit code, without a traceback; 2 is a user's mistake."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code


# --------------------------------------------------------------------------------------------------------- files


def write_text(path, text):
    """Writes a file whole or not at all."""
    with _replaced(path) as temporary:
        temporary.write_text(text)


def save_figure(figure, path):
    """Writes a matplotlib figure as PNG, whole or not at all."""
    with _replaced(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


@contextlib.contextmanager
def _replaced(path):
    temporary = pathlib.Path(f"{path}.tmp")
    yield temporary
    os.replace(temporary, path)


class Metrics:
    """Numbers as JSON lines `{"step": 3, "name": "dense/loss", "value": 2.5}`, in the order written."""

    def __init__(self, path):
        self._path = pathlib.Path(path)
        self._path.touch()

    def write(self, lines):
        """Appends `(step, name, value)` triples; they are with the operating system when this returns."""
        text = "".join(json.dumps({"step": step, "name": name, "value": value}) + "\n" for step, name, value in lines)
        with self._path.open("a") as stream:
            stream.write(text)

    def read(self):
        """All `(step, name, value)` triples; a last line that a kill cut short is left out."""
        whole, _, _ = self._path.read_text().rpartition("\n")
        return [tuple(json.loads(line).values()) for line in whole.splitlines()]

    def rewind(self, prefix, step):
        """Drops what names that begin with `prefix` said after `step`, so that a resumed run says it again."""
        kept = [line for line in self.read() if not (line[1].startswith(prefix) and line[0] > step)]
        lines = (json.dumps(dict(zip(("step", "name", "value"), line, strict=True))) for line in kept)
        write_text(self._path, "".join(line + "\n" for line in lines))


class Checkpoints:
    """The newest two states of a run in a folder, by Orbax: a write that a kill cuts short leaves the others usable."""

    def __init__(self, folder):
        # Written before save returns: the next step donates the buffers that a background write would read.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(pathlib.Path(folder).absolute(), options=options)

    def latest_step(self):
        """The step of the newest state, or None."""
        return self._manager.latest_step()

    def save(self, step, state):
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, like):
        """The newest state, in the structure, shapes, dtypes and placement of the pytree `like`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._manager.restore(self.latest_step(), args=ocp.args.StandardRestore(abstract))


# ------------------------------------------------------------------------------------------------------ while it runs


class Progress:
    """A bar on a terminal; elsewhere a line every ten seconds."""

    def __init__(self, name, step_bytes, steps, step):
        self._name, self._step_bytes = name, step_bytes
        width, height = shutil.get_terminal_size()  # unlike tqdm's own, never zero
        self._bar = tqdm(
            desc=name,
            total=steps * step_bytes,
            initial=step * step_bytes,
            unit="B",
            unit_scale=True,
            ncols=width,
            nrows=height,
            disable=not sys.stderr.isatty(),
        )
        self._step, self._steps = step, steps
        self._printed, self._printed_step = time.monotonic(), step

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._bar.close()

    def update(self, steps, loss):
        self._bar.set_postfix_str(f"{loss:.3f} bits/byte", refresh=False)
        self._bar.update(steps * self._step_bytes)
        self._step += steps
        seconds = time.monotonic() - self._printed
        if self._bar.disable and seconds >= 10:
            rate = (self._step - self._printed_step) * self._step_bytes / seconds
            share = self._step / self._steps
            print(
                f"{self._name}: {share:4.0%}, {loss:.3f} bits/byte, {rate / 1e3:.1f} kB/s",
                flush=True,
            )
            self._printed, self._printed_step = time.monotonic(), self._step


class Signals:
    """Notes an interrupt or a request to end, so that a loop can save first; the same one again ends at once.

    Attributes:
      received: the signal's number, or None.
    """

    def __init__(self):
        self.received = None

    def __enter__(self):
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def end_if_received(self, message):
        if self.received:
            raise CommandError(f"{signal.Signals(self.received).name}. {message}", code=128 + self.received)

    def _note(self, number, frame):
        self.received = number
        signal.signal(number, self._before[number])
