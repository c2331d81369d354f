"""The command line of every experiment: a named preset, `key=value`, a folder to work in, `--resume`."""

import dataclasses
import json
import pathlib
import shlex
import sys

import jax

from experiments.common import CommandError, write_text


def run(main):
    """Runs `main(arguments)` as the program, and ends it as a `CommandError` says."""
    try:
        main(sys.argv[1:])
    except CommandError as error:
        print(f"error: {error}" if error.code == 2 else error, file=sys.stderr)
        sys.exit(error.code)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of an experiment.

    Attributes:
      module: the module whose command it is, as in `python -m module`.
      preset: the name of the preset.
      models: {name: config} of the models to train in turn.
      workdir: the folder of all that the run writes.
      resume: whether to go on with what is there.
    """

    module: str
    preset: str
    models: dict
    workdir: pathlib.Path
    resume: bool

    def open(self, data):
        """Makes the folder and writes `config.json` there, or checks that it holds this very run.

        Args:
          data: sentences that identify the data of the run.

        Raises:
          CommandError: if a fresh run finds another one there, or a resumed one another configuration or data.
        """
        record = {
            "preset": self.preset,
            "models": {name: dataclasses.asdict(config) for name, config in self.models.items()},
            "data": data,
        }
        path = self.workdir / "config.json"
        if not self.resume:
            if path.exists():
                raise CommandError(
                    f"`workdir` {self.workdir} holds a run already. Go on with it: {self.resume_command}; "
                    "or name a new folder: workdir=PATH."
                )
            try:
                self.workdir.mkdir(parents=True, exist_ok=True)
                write_text(path, json.dumps({**record, "jax": jax.__version__}, indent=2) + "\n")
            except OSError as error:
                raise CommandError(f"`workdir` must be a folder to write in; {error}.") from None
            return
        stored = _read_record(self.workdir)
        changed = [key for key in record if record[key] != stored[key]]
        if changed:
            raise CommandError(
                f"A resumed run must be as it was begun; its {' and '.join(changed)} differ from {path}. "
                f"Go on as it was: {self.resume_command}; or name a new folder: workdir=PATH."
            )

    @property
    def resume_command(self):
        return shlex.join(["python", "-m", self.module, "--resume", f"workdir={self.workdir}"])


def parse(arguments, module, presets, usage):
    """Reads `[PRESET] [key=value ...] [workdir=PATH] [--resume]`.

    Args:
      arguments: the words of the command line.
      module: the module whose command it is.
      presets: {name: function that makes {model name: config}}, the first the default.
      usage: what --help prints.

    Returns:
      The `Run`. A resumed one takes its configuration from the folder unless the words name one.

    Raises:
      CommandError: if a word is not understood, or there is nothing to resume.
    """
    if {"-h", "--help"} & set(arguments):
        print(usage)
        sys.exit(0)
    options = [word for word in arguments if "=" in word]
    words = [word for word in arguments if "=" not in word and word != "--resume"]
    preset = words[0] if words else next(iter(presets))
    if len(words) > 1 or preset not in presets:
        raise CommandError(
            f"The command takes one preset, of {', '.join(presets)}, and key=value; got {' '.join(words)}."
        )
    folders = [word.partition("=")[2] for word in options if word.startswith("workdir=")]
    default = f"runs/{module.split('.')[1]}-{preset}"
    workdir = pathlib.Path(folders[-1] if folders else default).expanduser()
    options = [word for word in options if not word.startswith("workdir=")]
    models = override(presets[preset](), options)
    run = Run(module, preset, models, workdir, "--resume" in arguments)
    if run.resume and not options and not words:
        kind = type(next(iter(models.values())))
        run = dataclasses.replace(run, **read_config(workdir, kind))
    return run


def read_config(workdir, kind):
    """What a run's folder says of it: a dict of its `preset` and its `models`, configs of class `kind`.

    Raises:
      CommandError: if the folder holds no run, or one with other options.
    """
    stored = _read_record(workdir)
    try:
        models = {name: kind(**config) for name, config in stored["models"].items()}
    except TypeError as error:
        raise CommandError(f"`workdir` {workdir} holds a run of another version: {error}.") from None
    return {"preset": stored["preset"], "models": models}


def _read_record(workdir):
    path = workdir / "config.json"
    if not path.exists():
        raise CommandError(f"`workdir` must hold a run; {workdir} has no config.json.")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise CommandError(f"`workdir` must hold a run; {path} is damaged: {error}.") from None


def override(configs, options):
    """Applies `key=value` to every config of a dict, and `name.key=value` to the one of that name.

    Args:
      configs: {name: frozen dataclass}.
      options: words with a `=`.

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
            changes[own][key] = _value(configs[own], key, text)
    # All at once: a config may check one field against another.
    return {name: dataclasses.replace(config, **changes[name]) for name, config in configs.items()}


def _value(config, key, text):
    kinds = {field.name: type(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if key not in kinds:
        names = dict.fromkeys(["workdir", *kinds])
        raise CommandError(f"`{key}` is no option; the options are {', '.join(names)}.")
    try:
        return kinds[key](text)
    except ValueError:
        raise CommandError(f"`{key}` must be of type {kinds[key].__name__}; got {text!r}.") from None
