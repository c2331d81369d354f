"""The command line of every experiment: a named preset, `key=value`, a folder to work in, `--resume`."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import shlex
import sys
from typing import Any

import jax

from experiments.common import CommandError, Metrics, say, write_text


def run(main):
    """Runs `main(arguments)` as the program, and ends it as a `CommandError` says."""
    try:
        main(sys.argv[1:])
    except CommandError as error:
        say(f"error: {error}" if error.code == 2 else error, sys.stderr)
        sys.exit(error.code)
    except KeyboardInterrupt:  # before a run notes signals, or the second one
        say("Stopped at once. What a run saved before is whole.", sys.stderr)
        sys.exit(130)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of an experiment.

    Attributes:
      module: the module whose command it is, as in `python -m module`.
      preset: the name of the preset.
      models: {name: config} of the models to train in turn.
      workdir: the folder of all that the run writes.
      resume: whether to go on with what is there.
      options: a dataclass of what the command takes beside the options of the models, or None.
    """

    module: str
    preset: str
    models: dict
    workdir: pathlib.Path
    resume: bool
    options: Any = None

    @contextlib.contextmanager
    def open(self, data):
        """Holds the folder for this run alone: a new one gets `config.json`, a resumed one must have that of this run.

        Args:
          data: sentences that identify the data of the run.

        Raises:
          CommandError: if a fresh run finds another one there, or a resumed one another configuration or data; if
            another process works there; if inside the context the disk is full, or a file cannot be written.
        """
        record = {
            "module": self.module,
            "preset": self.preset,
            "options": self.options and dataclasses.asdict(self.options),
            "models": {name: dataclasses.asdict(config) for name, config in self.models.items()},
            "data": data,
        }
        with contextlib.ExitStack() as stack:
            try:
                if self.resume:
                    self._check(record)
                self.workdir.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_lock(self.workdir))
                if self.resume:
                    self._mend()
                else:
                    self._begin(record)
            except OSError as error:
                raise CommandError(f"`workdir` must be a folder to write in; {error}.") from None
            try:
                yield
            except OSError as error:
                raise CommandError(
                    f"The run cannot write: {error}. What it saved before is whole. When that is mended, go on with: "
                    f"{self.resume_command}",
                    code=1,
                ) from error

    def _begin(self, record):
        path = self.workdir / "config.json"
        if path.exists():
            raise CommandError(
                f"`workdir` {self.workdir} holds a run already. Go on with it: {self.resume_command}; "
                "or name a new folder: workdir=PATH."
            )
        record = {**record, "jax": jax.__version__, "digest": _digest(record)}
        write_text(path, json.dumps(record, indent=2) + "\n")

    def _check(self, record):
        stored = _read_record(self.workdir, self.module)
        changed = [key for key in record if record[key] != stored[key]]
        if changed:
            raise CommandError(
                f"A resumed run must be as it was begun; its {' and '.join(changed)} differ from "
                f"{self.workdir / 'config.json'}. Go on as it was: {self.resume_command}; "
                "or name a new folder: workdir=PATH."
            )

    def _mend(self):
        path = self.workdir / "metrics.jsonl"
        damaged = Metrics(path).damaged()
        if damaged:
            numbers = ", ".join(map(str, damaged))
            say(f"{path}: what stands in line {numbers} is no metric, and is left out.", sys.stderr)

    @property
    def resume_command(self):
        return shlex.join(["python", "-m", self.module, "--resume", f"workdir={self.workdir}"])


@contextlib.contextmanager
def _lock(folder):
    """Keeps other processes out of a run's folder; the system opens it again when this one ends, however it does."""
    with (folder / "lock").open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            raise CommandError(
                f"`workdir` {folder} is in use by process {stream.read().strip()}. Wait for it or stop it; "
                "or name another folder: workdir=PATH."
            ) from None
        stream.truncate(0)
        print(os.getpid(), file=stream, flush=True)
        yield


def parse(arguments, module, presets, usage, options=None):
    """Reads `[PRESET] [key=value ...] [workdir=PATH] [--resume]`.

    Args:
      arguments: the words of the command line.
      module: the module whose command it is.
      presets: {name: function that makes {model name: config}}, the first the default.
      usage: what --help prints.
      options: the defaults of what the command takes beside the options of the models: a dataclass, or None.

    Returns:
      The `Run`. A resumed one takes its configuration from the folder unless the words name one.

    Raises:
      CommandError: if a word is not understood, or there is nothing to resume.
    """
    if {"-h", "--help"} & set(arguments):
        say(usage)
        sys.exit(0)
    pairs = [word for word in arguments if "=" in word]
    words = [word for word in arguments if "=" not in word and word != "--resume"]
    preset = words[0] if words else next(iter(presets))
    if len(words) > 1 or preset not in presets:
        raise CommandError(
            f"The command takes one preset, of {', '.join(presets)}, and key=value; got {' '.join(words)}."
        )
    folders = [word.partition("=")[2] for word in pairs if word.startswith("workdir=")]
    if "" in folders:
        raise CommandError("`workdir` must name a folder; got nothing after workdir=.")
    parts = [part for part in module.split(".")[1:] if part != "train"]
    workdir = pathlib.Path(folders[-1] if folders else f"runs/{'-'.join([*parts, preset])}").expanduser()
    pairs = [word for word in pairs if not word.startswith("workdir=")]
    own = [field.name for field in dataclasses.fields(options)] if options else []
    ours = [word for word in pairs if word.partition("=")[0] in own]
    others = [word for word in pairs if word not in ours]
    models = override(presets[preset](), others, ["workdir", *own])
    if options:
        options = override({"": options}, ours)[""]
    run = Run(module, preset, models, workdir, "--resume" in arguments, options)
    if run.resume and not pairs and not words:
        stored = read_config(workdir, type(next(iter(models.values()))), module)
        stored["options"] = options and type(options)(**stored["options"])
        run = dataclasses.replace(run, **stored)
    return run


def read_config(workdir, kind, module):
    """What a run's folder says of it: a dict of its `preset`, its `options` and its `models`, configs of class `kind`.

    Raises:
      CommandError: if the folder holds no run of this module and version.
    """
    stored, fields = _read_record(workdir, module), {field.name for field in dataclasses.fields(kind)}
    if any(set(config) != fields for config in stored["models"].values()):
        raise CommandError(f"`workdir` {workdir} holds a run of another version, whose options are other ones.")
    models = {name: kind(**config) for name, config in stored["models"].items()}
    return {"preset": stored["preset"], "options": stored["options"], "models": models}


def _read_record(workdir, module):
    path = workdir / "config.json"
    try:
        stored = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise CommandError(f"`workdir` must hold a run; {workdir} has no config.json.") from None
    except (ValueError, OSError) as error:
        raise CommandError(f"`workdir` must hold a run; {path} is damaged: {error}.") from None
    known = ("module", "preset", "options", "models", "data")
    if not isinstance(stored, dict) or not {*known, "digest"} <= set(stored):
        raise CommandError(f"`workdir` must hold a run; {path} lacks what this version writes there.")
    if stored["digest"] != _digest({key: stored[key] for key in known}):
        raise CommandError(
            f"A resumed run must be as it was begun; {path} was edited since. Put it back, or start a new run: "
            "workdir=PATH."
        )
    if stored["module"] != module:
        raise CommandError(f"`workdir` must hold a run of {module}; {workdir} holds one of {stored['module']}.")
    return stored


def _digest(record):
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def override(configs, options, others=("workdir",)):
    """Applies `key=value` to every config of a dict, and `name.key=value` to the one of that name.

    Args:
      configs: {name: frozen dataclass}.
      options: words with a `=`.
      others: what else the command takes, to be named where a key is unknown.

    Returns:
      The changed dict.

    Raises:
      CommandError: if a name or key is unknown (it lists them), or a value is not of the field's type.
    """
    changes = {name: {} for name in configs}
    for option in options:
        path, _, text = option.partition("=")
        name, _, key = path.rpartition(".")
        if name and name not in configs:
            raise CommandError(f"`{name}` is no model of the preset; its models are {', '.join(configs)}.")
        for own in [name] if name else configs:
            changes[own][key] = _value(configs[own], key, text, others)
    # All at once: a config may check one field against another.
    return {name: dataclasses.replace(config, **changes[name]) for name, config in configs.items()}


def _value(config, key, text, others):
    kinds = {field.name: type(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if key not in kinds:
        names = dict.fromkeys([*others, *kinds])
        raise CommandError(f"`{key}` is no option; the options are {', '.join(names)}.")
    try:
        return kinds[key](text)
    except ValueError:
        raise CommandError(f"`{key}` must be of type {kinds[key].__name__}; got {text!r}.") from None
