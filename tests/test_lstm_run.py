"""Runs of the LSTM experiment: the command, kill and resume, bad input, samples."""

import lzma
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from experiments import command as commands
from experiments import common
from experiments.common import CommandError
from experiments.lstm import configs, model, sample, train, trainer

# 16 units against 32 in blocks of 8, 1,792 recurrent weights each.
TOY = [
    "hidden=16",
    "embedding=4",
    "batch=4",
    "length=8",
    "steps=60",
    "checkpoint_every=20",
    "sparse.hidden=32",
    "sparse.stride=2",
    "sparse.degree=1",
    "dropout=0.1",
    "heldout=0.1",
]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"line %d: what is %d + %d?\n" % (i, i, i * i) for i in range(300)))
    return path


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs the training command in a process of its own, after a prelude that may set a trap in it."""
    cache = tmp_path_factory.mktemp("cache")  # shared, so that only the first process compiles

    def run(*words, prelude=""):
        main = "from experiments import command\nfrom experiments.lstm import train\ncommand.run(train.main)"
        path = [*sys.path, str(pathlib.Path(train.__file__).parents[2])]
        return subprocess.run(
            [sys.executable, "-c", f"{textwrap.dedent(prelude)}\n{main}", *map(str, words)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path),
                "JAX_COMPILATION_CACHE_DIR": str(cache),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def at_step(name, step, action):
    """A prelude that acts just before a model's step."""
    return f"""
        import os, signal
        from experiments.lstm import trainer
        train_step = trainer.Trainer._train_step
        def trapped(self):
            if (self._name, self._step) == ("{name}", {step}):
                {action}
            return train_step(self)
        trainer.Trainer._train_step = trapped
    """


@pytest.fixture(scope="module")
def straight(tmp_path_factory, command, text_file):
    """A run that nothing interrupted."""
    workdir = tmp_path_factory.mktemp("straight") / "run"
    result = command("smoke", *TOY, f"data={text_file}", f"workdir={workdir}")
    assert result.returncode == 0, result.stderr
    return workdir, result


def losses(workdir):
    return [line for line in common.Metrics(workdir / "metrics.jsonl").read() if not line[1].endswith("/seconds")]


def final_states(workdir):
    stored = commands.read_config(workdir, configs.Config, train.MODULE)["models"]
    states = {}
    for name, config in stored.items():
        checkpoints = common.Checkpoints(workdir / name)
        columns = trainer.columns(train.members(config))
        step, state = checkpoints.restore(trainer.init(config, model.make_layouts(config), *columns))
        assert step == config.steps
        states[name] = {**state, "key": jax.random.key_data(state["key"])}
    return states


def assert_same_run(workdir, straight):
    assert losses(workdir) == losses(straight)
    with jax.numpy_dtype_promotion("standard"):  # for optax
        got, expected = final_states(workdir), final_states(straight)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_a_run_writes_all_that_it_promises(straight, text_file):
    workdir, result = straight
    lines = losses(workdir)
    names = ["dense/loss", "dense/heldout", "sparse/loss", "sparse/heldout"]
    for name, number in zip(names, [60, 2, 60, 2], strict=True):
        assert sum(key == name for _, key, _ in lines) == number
    heldout = {(key, step): value for step, key, value in lines if key.endswith("heldout")}
    assert heldout["dense/heldout", 60] < heldout["dense/heldout", 0]
    assert heldout["sparse/heldout", 60] < heldout["sparse/heldout", 0]
    assert (workdir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert f"{text_file}: 1 files" in result.stdout
    assert f"{heldout['sparse/heldout', 60]:.4f}" in result.stdout.splitlines()[-4]
    assert "Recurrent weights: 1,792 in each model, exactly" in result.stdout
    difference = heldout["sparse/heldout", 60] - heldout["dense/heldout", 60]
    assert result.stdout.splitlines()[-3].startswith(f"sparse - dense: {difference:+.4f} bits per byte; no verdict")
    assert "kB/s" in result.stdout


def test_a_killed_run_resumes_to_the_same_bits(straight, command, text_file, tmp_path):
    workdir = tmp_path / "run"
    kill = at_step("sparse", 33, "os.kill(os.getpid(), signal.SIGKILL)")
    killed = command("smoke", *TOY, f"data={text_file}", f"workdir={workdir}", prelude=kill)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert common.Checkpoints(workdir / "sparse").latest_step() == 20
    with (workdir / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 34, "na')  # a line that the kill cut short
    resumed = command("--resume", f"workdir={workdir}")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(workdir, straight[0])


def test_a_damaged_run_resumes_from_the_checkpoint_before(straight, command, text_file, tmp_path):
    workdir = tmp_path / "run"
    kill = at_step("dense", 45, "os.kill(os.getpid(), signal.SIGKILL)")
    killed = command("smoke", *TOY, f"data={text_file}", f"workdir={workdir}", prelude=kill)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    for path in (workdir / "dense" / "40").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:10])
    with (workdir / "metrics.jsonl").open("a") as stream:
        stream.write("garbage\n")
    resumed = command("--resume", f"workdir={workdir}")
    assert resumed.returncode == 0, resumed.stderr
    assert "The checkpoint of step 40" in resumed.stderr
    assert "step 20 is whole and serves instead." in resumed.stderr
    assert "is no metric, and is left out." in resumed.stderr
    assert "Traceback" not in resumed.stderr
    assert_same_run(workdir, straight[0])


@pytest.mark.parametrize("cause", ["disk", "terminal", "reader"])
def test_what_happens_around_a_run_loses_nothing(cause, command, text_file, tmp_path):
    """A file system without room, a terminal that is closed (SIGHUP, and no more output), a pipe nobody reads."""
    workdir = tmp_path / "run"
    prelude = {
        # No file may grow beyond what a checkpoint of step 20 and its metrics take: real writes fail, in Python and in
        # TensorStore.
        "disk": at_step("dense", 35, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))"),
        "terminal": at_step("dense", 35, "os.close(terminal)"),
        "reader": "import os; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)",
    }[cause]
    if cause == "terminal":
        prelude = textwrap.dedent("""
            import os, pty, signal, termios, fcntl
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
            os.setsid()
            terminal, own = pty.openpty()
            fcntl.ioctl(own, termios.TIOCSCTTY, 0)
            os.dup2(own, 1)
            os.dup2(own, 2)
            os.close(own)
        """) + textwrap.dedent(prelude)
    ended = command("smoke", *TOY, f"data={text_file}", f"workdir={workdir}", prelude=prelude)
    step = {"disk": 20, "terminal": 36, "reader": 60}[cause]
    code = {"disk": 1, "terminal": 128 + signal.SIGHUP, "reader": 0}[cause]
    assert ended.returncode == code, ended.stderr
    # None of ours: where several writes fail at once, threads of TensorStore may print some of asyncio's own.
    assert "/experiments/" not in ended.stderr.replace(str(workdir), "")
    if cause == "disk":
        assert "The run cannot write: " in ended.stderr
        assert f"--resume workdir={workdir}" in ended.stderr
    config = commands.read_config(workdir, configs.Config, train.MODULE)["models"]["dense"]
    with jax.numpy_dtype_promotion("standard"):
        like = trainer.init(config, model.make_layouts(config), *trainer.columns(train.members(config)))
    assert common.Checkpoints(workdir / "dense").restore(like)[0] == step


def test_a_stopped_run_saves_first_and_resumes_to_the_same_bits(straight, command, text_file, tmp_path):
    workdir = tmp_path / "run"
    stop = at_step("dense", 27, "os.kill(os.getpid(), signal.SIGTERM)")
    stopped = command("smoke", *TOY, f"data={text_file}", f"workdir={workdir}", prelude=stop)
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert f"--resume workdir={workdir}" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert common.Checkpoints(workdir / "dense").latest_step() == 28
    resumed = command("--resume", f"workdir={workdir}")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(workdir, straight[0])


def test_a_finished_run_says_so_and_shows_its_table_again(straight, command):
    workdir, result = straight
    before = (workdir / "metrics.jsonl").read_bytes()
    again = command("--resume", f"workdir={workdir}")
    assert again.returncode == 0, again.stderr
    assert "finished" in again.stdout
    assert again.stdout.splitlines()[-5:] == result.stdout.splitlines()[-5:]
    assert (workdir / "metrics.jsonl").read_bytes() == before


def in_process(*words):
    with jax.numpy_dtype_promotion("standard"):  # for optax
        train.main([str(word) for word in words])


def test_a_loss_that_is_not_finite_ends_the_run(text_file, tmp_path):
    words = [
        "smoke",
        *TOY,
        f"data={text_file}",
        f"workdir={tmp_path}",
        "learning_rate=1e30",
        "clip=1e30",
    ]
    with pytest.raises(CommandError, match=r"not finite at step \d+ of dense. The last good checkpoint is") as stop:
        in_process(*words)
    assert stop.value.code == 1


@pytest.mark.parametrize("preset", configs.PRESETS)
def test_every_preset_takes_three_steps(preset, text_file, tmp_path):
    words = [preset, *TOY, "steps=3", f"data={text_file}", f"workdir={tmp_path}"]
    in_process(*words)
    assert (tmp_path / "curves.png").exists()


def test_smoke_models_have_exactly_as_many_recurrent_weights():
    assert {model.count_recurrent(config) for config in configs.smoke().values()} == {258_048}


def test_a_model_learns_a_text_by_heart(tmp_path):
    (tmp_path / "text").write_bytes(b"abcdefgh" * 300)
    words = [
        "smoke",
        *TOY,
        "steps=150",
        "learning_rate=0.02",
        f"data={tmp_path / 'text'}",
        f"workdir={tmp_path / 'run'}",
    ]
    in_process(*words, "hidden=32", "dropout=0", "ema=0.9", "rate=2")
    last = {name: value for step, name, value in losses(tmp_path / "run") if step == 150}
    assert last["dense/heldout"] < 0.1  # of 8 before
    assert last["sparse/heldout"] < 0.1
    options = sample.Options(workdir=str(tmp_path / "run"), prompt="cde", bytes=12, temperature=0)
    with jax.numpy_dtype_promotion("standard"):
        assert sample.sample(options) == b"fghabcdefgha"


def test_samples_follow_the_seed(straight):
    def draw(**options):
        with jax.numpy_dtype_promotion("standard"):
            return sample.sample(sample.Options(workdir=str(straight[0]), bytes=40, **options))

    assert draw(seed=1) == draw(seed=1)
    assert draw(seed=1) != draw(seed=2)
    assert draw(seed=1) != draw(seed=1, temperature=3.0)
    assert draw(seed=1) != draw(seed=1, model="dense")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=/nowhere"], "`data` must be a file or a folder; /nowhere does not exist"),
        (["data={tmp}/empty"], "`data` must hold text"),
        (["data={tmp}/short"], "must have `batch` x (`length` + 1) bytes or more, 528; it has"),
        (["data={tmp}/cut.xz"], "`data` must be readable"),
        (["hidden=100", "pattern=banded"], "`pattern` must be one of dense, barabasi_albert"),
        (["sparse.hidden=100"], "`hidden` must be a positive multiple of 8; got 100"),
        (["stride=5"], "`stride` must be a divisor of `hidden`, 192; got 5"),
        (["noise=-1"], "`noise` must be at least 0; got -1.0"),
        (["rate=inf"], "`rate` must be above 0, and finite; got inf"),
        (["workdir="], "`workdir` must name a folder"),
        (
            ["hidden=64", "stride=1", "pattern=watts_strogatz", "degree=3"],
            "`degree` 3 makes no watts_strogatz pattern of 8 x 8 blocks",
        ),
        (["dtype=int8"], "`dtype` must be one of float32"),
        (["steps=0"], "`steps` must be at least 1; got 0"),
        (["learning_rate=nan"], "`learning_rate` must be above 0, and finite; got nan"),
        (["heldout=1"], "`heldout` must be between 0 and 1; got 1.0"),
    ],
)
def test_bad_input_is_one_sentence(words, message, tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"too short")
    (tmp_path / "cut.xz").write_bytes(lzma.compress(b"text" * 100)[:40])
    words = [word.format(tmp=tmp_path) for word in words]
    with pytest.raises(CommandError) as stop:
        train.main([f"workdir={tmp_path / 'run'}", *words])
    assert message in str(stop.value)
    assert stop.value.code == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "other"}, "`model` must be one of dense, sparse; got other"),
        ({"workdir": "/nowhere"}, "`workdir` must hold a run"),
    ],
)
def test_sampling_says_what_is_wrong(options, message, straight):
    with pytest.raises(CommandError, match=message):
        sample.sample(sample.Options(**{"workdir": str(straight[0]), **options}))
