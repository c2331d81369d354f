"""What every experiment shares besides its command line: metrics, checkpoints, progress, signals, plots."""

import contextlib
import hashlib
import json
import logging
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


def say(text, stream=None, end="\n"):
    """Prints at once; where nobody reads any more (`| head -1`, a closed terminal), the run goes on in silence."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, end=end, flush=True)
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())  # also for the flush when Python ends


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
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
        """All `(step, name, value)` triples; what is no such line, or a last one that a kill cut short, is left out."""
        return [line for line in self._parsed() if line]

    def damaged(self):
        """The numbers of the lines, from 1, that `read` leaves out though they are whole."""
        return [number for number, line in enumerate(self._parsed(), 1) if line is None]

    def _parsed(self):
        whole, _, _ = self._path.read_text(errors="replace").rpartition("\n")
        return [_parse_metric(line) for line in whole.split("\n")] if whole else []

    def rewind(self, prefix, step):
        """Drops what names that begin with `prefix` said after `step`, so that a resumed run says it again."""
        kept = [line for line in self.read() if not (line[1].startswith(prefix) and line[0] > step)]
        lines = (json.dumps(dict(zip(("step", "name", "value"), line, strict=True))) for line in kept)
        write_text(self._path, "".join(line + "\n" for line in lines))


def _parse_metric(line):
    try:
        line = json.loads(line)
    except ValueError:
        return None
    kinds = {"step": int, "name": str, "value": (int, float)}
    if not isinstance(line, dict) or list(line) != list(kinds):
        return None
    return tuple(line.values()) if all(isinstance(line[key], kind) for key, kind in kinds.items()) else None


class Checkpoints:
    """The newest two states of a run in a folder, by Orbax: a write that a kill cuts short leaves the others usable."""

    def __init__(self, folder):
        self._folder = pathlib.Path(folder).absolute()
        # Written before save returns: the next step donates the buffers that a background write would read.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def latest_step(self):
        """The step of the newest state, whole or not, or None."""
        return self._manager.latest_step()

    def save(self, step, state):
        """Writes a state under its step.

        Raises:
          OSError: if it cannot be written; the others stay as they are.
        """
        try:
            with _without_log("absl"):  # there Orbax prints the traceback of what it then raises
                self._manager.save(step, args=ocp.args.StandardSave(state))
            write_text(self._folder / str(step) / _DIGEST, _digest(self._folder / str(step)))
        except (OSError, ValueError) as error:  # TensorStore has ValueErrors for what goes wrong on a disk
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise OSError(f"The checkpoint of step {step} cannot be written to {self._folder}: {reason}") from error

    def restore(self, like, mend=False):
        """Reads the newest state that is whole, and says so where newer ones are not.

        Args:
          like: a pytree that has the structure, shapes, dtypes and placement of the state.
          mend: whether to put the damaged ones aside, under their name and `.damaged`, so that their step can be saved
            again.

        Returns:
          The step and the state; 0 and `like` where there is none at all.

        Raises:
          CommandError: if there are states and none of them is whole.
        """
        damaged = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            if not self._is_whole(step):
                damaged.append(step)
                continue
            if damaged:
                say(f"{self._name(damaged)} damaged; step {step} is whole and serves instead.", sys.stderr)
            if mend and damaged:
                self._set_aside(damaged)
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
            return step, self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        if damaged:
            raise CommandError(
                f"{self._name(damaged)} damaged, and no other is there. To begin this model anew, remove "
                f"{self._folder} and resume; or start a new run: workdir=PATH."
            )
        return 0, like

    def _is_whole(self, step):
        # Asked of the files: Orbax takes some damage for numbers, and on most it prints errors of threads that it left.
        path = self._folder / str(step) / _DIGEST
        return path.is_file() and path.read_bytes() == _digest(path.parent).encode()

    def _name(self, steps):
        return f"The checkpoint{'s' * (len(steps) > 1)} of step {' and '.join(map(str, steps))} in {self._folder} " + (
            "are" if len(steps) > 1 else "is"
        )

    def _set_aside(self, steps):
        for step in steps:
            aside = self._folder / f"{step}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            (self._folder / str(step)).rename(aside)
        self._manager.reload()


@contextlib.contextmanager
def _without_log(name):
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


_DIGEST = "sha256"  # the file in a checkpoint's folder that tells whether the others are as they were written


def _digest(folder):
    """A digest of all files of a folder, names and contents, but for that of the digest itself."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != _DIGEST:
            with path.open("rb") as stream:
                total.update(
                    f"{path.relative_to(folder)} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode()
                )
    return total.hexdigest()


# ------------------------------------------------------------------------------------------------------ while it runs


class Progress:
    """A bar on a terminal, from the start; elsewhere a line at the first loss and every ten seconds."""

    def __init__(self, name, step_bytes, steps):
        self._name, self._step_bytes = name, step_bytes
        width, height = shutil.get_terminal_size()  # unlike tqdm's own, never zero
        self._bar = tqdm(
            desc=name,
            total=steps * step_bytes,
            unit="B",
            unit_scale=True,
            ncols=width,
            nrows=height,
            file=_Quiet(sys.stderr),
            disable=not sys.stderr.isatty(),
        )
        self._step, self._steps = 0, steps
        self._printed, self._printed_step = None, 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._bar.close()

    def note(self, text):
        """Says what goes on before the first step."""
        self._bar.set_postfix_str(text)
        if self._bar.disable:
            say(f"{self._name}: {text}")

    def begin(self, step):
        """Sets out from a step."""
        self._step = step
        self._bar.initial = self._bar.n = step * self._step_bytes
        self._bar.refresh()

    def update(self, steps, loss, note=""):
        loss = f"{loss:.3f} bits/byte" + (f", {note}" if note else "")
        self._bar.set_postfix_str(loss, refresh=False)
        self._bar.update(steps * self._step_bytes)
        self._step += steps
        now = time.monotonic()
        if self._bar.disable and (self._printed is None or now - self._printed >= 10):
            if self._printed is not None:  # before that it was compiling, for the most part
                rate = (self._step - self._printed_step) * self._step_bytes / (now - self._printed)
                loss += f", {rate / 1e3:.1f} kB/s"
            say(f"{self._name}: {self._step / self._steps:4.0%}, {loss}")
            self._printed, self._printed_step = now, self._step


class _Quiet:
    """A stream for tqdm that ends no run when nobody reads it any more."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text):
        say(text, self._stream, end="")

    def flush(self):
        say("", self._stream, end="")


class Signals:
    """Notes an interrupt, a closed terminal or a request to end, so that a loop can save first; again, it ends at once.

    Attributes:
      received: the signal's number, or None.
    """

    def __init__(self):
        self.received = None

    def __enter__(self):
        self._before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
                self._before[number] = signal.signal(number, self._note)
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
