"""What the experiments share: the command line, metrics that can be rewound, checkpoints that survive a kill."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import command, common
from experiments.common import CommandError


@dataclasses.dataclass(frozen=True)
class Options:
    hidden: int = 8
    rate: float = 0.5
    name: str = "a"


PRESETS = {
    "both": lambda: {"dense": Options(), "sparse": Options(hidden=16)},
    "one": lambda: {"dense": Options()},
}


def parse(*words):
    return command.parse(words, "experiments.lstm.train", PRESETS, "usage: this")


def enter(run, text="text"):
    with run.open([text]):
        pass


def test_parse_takes_the_first_preset_and_a_folder_named_for_it():
    run = parse()
    assert (run.preset, str(run.workdir), run.resume) == ("both", "runs/lstm-both", False)
    assert run.models == PRESETS["both"]()


def test_parse_overrides_all_models_or_one(tmp_path):
    run = parse("both", "rate=2", "sparse.hidden=32", "name=x=y", f"workdir={tmp_path}", "--resume")
    assert run.models == {"dense": Options(8, 2.0, "x=y"), "sparse": Options(32, 2.0, "x=y")}
    assert run.workdir == tmp_path
    assert run.resume


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["three"], "one preset, of both, one"),
        (["one", "both"], "one preset, of both, one"),
        (["--fast"], "one preset, of both, one"),
        (["widht=3"], "`widht` is no option; the options are workdir, hidden, rate, name"),
        (["hidden=2.5"], "`hidden` must be of type int; got '2.5'"),
        (["third.hidden=2"], "`third` is no model of the preset; its models are dense, sparse"),
    ],
)
def test_parse_says_what_is_wrong(words, message):
    with pytest.raises(CommandError, match=message):
        parse(*words)


def test_help_prints_the_usage(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    assert capsys.readouterr().out == "usage: this\n"


def test_a_run_is_neither_overwritten_nor_resumed_as_another(tmp_path):
    folder = f"workdir={tmp_path / 'run'}"
    with pytest.raises(CommandError, match="must hold a run"):
        parse(folder, "--resume")
    with pytest.raises(CommandError, match="must hold a run"):
        enter(parse("one", folder, "--resume"))
    enter(parse("one", "rate=2", folder))
    with pytest.raises(CommandError, match=r"holds a run already.*--resume workdir="):
        enter(parse("one", "rate=2", folder))
    resumed = parse(folder, "--resume")
    assert (resumed.preset, resumed.models) == ("one", {"dense": Options(rate=2.0)})
    enter(resumed)
    enter(parse("one", "rate=2", folder, "--resume"))
    with pytest.raises(CommandError, match="its models differ"):
        enter(parse("one", "rate=3", folder, "--resume"))
    with pytest.raises(CommandError, match="its data differ"):
        enter(parse(folder, "--resume"), "another text")


def test_a_folder_that_cannot_hold_a_run_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match="`workdir` must be a folder to write in; .*file"):
        enter(parse(f"workdir={tmp_path / 'file'}"))
    (tmp_path / "config.json").write_text('{"models": ')
    with pytest.raises(CommandError, match=r"config.json is damaged"):
        parse(f"workdir={tmp_path}", "--resume")
    for text in ("{}", "[]", "null", '{"preset": "one", "models": {"dense": {"width": 3}}}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CommandError, match=r"`workdir` must hold a run; .*config.json lacks what this version"):
            parse(f"workdir={tmp_path}", "--resume")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CommandError, match=r"config.json is damaged"):
        parse(f"workdir={tmp_path}", "--resume")


def test_run_ends_with_a_sentence_and_a_code(monkeypatch, capsys):
    def main(arguments):
        raise CommandError(f"No {arguments[0]}.")

    monkeypatch.setattr(sys, "argv", ["program", "way"])
    with pytest.raises(SystemExit) as stop:
        command.run(main)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: No way.\n"


def test_metrics_rewind_one_model_and_drop_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [(1, "a/loss", 0.5), (2, "a/loss", 0.25), (1, "b/loss", 3.0), (3, "a/loss", 0.125)]
    common.Metrics(path).write(lines)
    with path.open("a") as stream:
        stream.write('{"step": 4, "name": "a/lo')  # as a kill leaves it
    metrics = common.Metrics(path)
    assert metrics.read() == lines
    metrics.rewind("a/", 1)
    metrics.write([(2, "a/loss", 0.75)])
    assert metrics.read() == [(1, "a/loss", 0.5), (1, "b/loss", 3.0), (2, "a/loss", 0.75)]
    assert json.loads(path.read_text().splitlines()[0]) == {
        "step": 1,
        "name": "a/loss",
        "value": 0.5,
    }


def a_state(value):
    tree = {"x": jnp.full((3, 2), value), "list": [jnp.arange(4), jnp.bfloat16(value)]}
    return {**tree, "key": jax.random.key(int(value))}


def assert_same_state(got, expected):
    def raw(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(raw(a), raw(b))


def test_checkpoints_keep_the_newest_two(tmp_path):
    checkpoints = common.Checkpoints(tmp_path / "c")
    assert checkpoints.latest_step() is None
    for step in (10, 20, 30):
        checkpoints.save(step, a_state(step))
    reopened = common.Checkpoints(tmp_path / "c")
    assert reopened.latest_step() == 30
    step, state = reopened.restore(a_state(0))
    assert step == 30
    assert_same_state(state, a_state(30))
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["20", "30"]


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path):
    program = """
        import os, signal, sys
        import jax.numpy as jnp
        from experiments import common

        checkpoints = common.Checkpoints(sys.argv[1])
        checkpoints.save(1, {"x": jnp.ones(5)})
        rename = os.rename
        def rename_or_die(source, target, **options):
            if os.path.basename(target) == "2":  # all is written, but not yet under its name
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target, **options)
        os.rename = rename_or_die
        checkpoints.save(2, {"x": jnp.zeros(5)})
    """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), tmp_path / "c"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert any(path.name.startswith("2.") for path in (tmp_path / "c").iterdir())
    checkpoints = common.Checkpoints(tmp_path / "c")
    assert checkpoints.latest_step() == 1
    assert_same_state(checkpoints.restore({"x": jnp.zeros(5)})[1], {"x": jnp.ones(5)})
    checkpoints.save(2, {"x": jnp.full(5, 2.0)})
    assert_same_state(checkpoints.restore({"x": jnp.zeros(5)})[1], {"x": jnp.full(5, 2.0)})


def files_of(folder):
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def remove_all(folder):
    for path in files_of(folder):
        path.unlink()


def remove_metadata(folder):
    for path in files_of(folder):
        if "METADATA" in path.name:
            path.unlink()


def truncate_all(folder):
    for path in files_of(folder):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def fill_with_zeros(folder):
    for path in files_of(folder):
        path.write_bytes(bytes(path.stat().st_size))


def flip_bits(folder):
    """One bit in the middle of the longest file, of numbers: what still decodes, only a digest tells from the truth."""
    path = max(files_of(folder), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [remove_all, remove_metadata, truncate_all, fill_with_zeros, flip_bits])
def test_the_newest_whole_checkpoint_serves(damage, tmp_path, capsys):
    folder = tmp_path / "c"
    checkpoints = common.Checkpoints(folder)
    for step in (10, 20):
        checkpoints.save(step, a_state(step))
    damage(folder / "20")
    step, state = common.Checkpoints(folder).restore(a_state(0))
    assert step == 10
    assert_same_state(state, a_state(10))
    message = f"The checkpoint of step 20 in {folder} is damaged; step 10 is whole and serves instead.\n"
    assert capsys.readouterr().err.endswith(message)
    assert (folder / "20").exists()  # looking changes nothing
    checkpoints = common.Checkpoints(folder)
    checkpoints.restore(a_state(0), mend=True)
    assert (folder / "20.damaged").exists()
    checkpoints.save(20, a_state(25))
    step, state = common.Checkpoints(folder).restore(a_state(0))
    assert step == 20
    assert_same_state(state, a_state(25))


def test_without_a_whole_checkpoint_there_is_one_sentence(tmp_path):
    checkpoints = common.Checkpoints(tmp_path / "c")
    step, state = checkpoints.restore(a_state(3))
    assert step == 0
    assert_same_state(state, a_state(3))
    for step in (10, 20):
        checkpoints.save(step, a_state(step))
        truncate_all(tmp_path / "c" / str(step))
    with pytest.raises(
        CommandError, match="The checkpoints of step 20 and 10 in .* are damaged, and no other is there"
    ):
        common.Checkpoints(tmp_path / "c").restore(a_state(0), mend=True)
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"10", "20"}


@pytest.mark.parametrize(
    "garbage", [b"garbage", b"\xff\x00", b"{}", b"[1, 2, 3]", b'{"step": "1", "name": 2, "value": 3}', b""]
)
def test_a_line_of_garbage_among_the_metrics_is_named_and_left_out(garbage, tmp_path, capsys):
    folder, lines = f"workdir={tmp_path / 'run'}", [(1, "a/loss", 0.5), (2, "a/loss", 0.25)]
    enter(parse("one", folder))
    metrics = common.Metrics(tmp_path / "run" / "metrics.jsonl")
    metrics.write(lines[:1])
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as stream:
        stream.write(garbage + b"\n")
    metrics.write(lines[1:])
    assert metrics.read() == lines
    enter(parse(folder, "--resume"))
    assert capsys.readouterr().err.endswith("metrics.jsonl: what stands in line 2 is no metric, and is left out.\n")
    metrics.rewind("a/", 1)
    assert metrics.read() == lines[:1]
    assert metrics.damaged() == []


def test_an_edited_record_is_refused(tmp_path):
    folder, path = f"workdir={tmp_path}", tmp_path / "config.json"
    enter(parse("one", folder))
    written = path.read_text()
    for old, new in (('"hidden": 8', '"hidden": 9'), ('"hidden": 8', '"hidden": "8"'), ('"text"', '"another"')):
        path.write_text(written.replace(old, new))
        with pytest.raises(
            CommandError, match=r"as it was begun; .*config.json was edited since. Put it back, or start"
        ):
            parse(folder, "--resume")
    path.write_text(written)
    enter(parse(folder, "--resume"))


def test_a_folder_in_use_is_refused_until_it_is_free(tmp_path):
    folder = f"workdir={tmp_path}"
    with parse("one", folder).open(["text"]):
        for words in (["one", folder], [folder, "--resume"]):
            with pytest.raises(CommandError, match=f"is in use by process {os.getpid()}. Wait for it or stop it"):
                enter(parse(*words))
    enter(parse(folder, "--resume"))
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    program = f"""
        import contextlib
        from experiments import command
        with command._lock(__import__("pathlib").Path({str(tmp_path)!r})):
            {stop}
    """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    enter(parse(folder, "--resume"))  # a kill leaves no lock behind


def test_a_folder_without_permission_is_named():
    with tempfile.TemporaryDirectory() as folder:  # one that others may enter, as those of tmp_path are not
        folder = pathlib.Path(folder)
        enter(parse("one", f"workdir={folder / 'run'}"))
        for path in (folder, folder / "run"):
            path.chmod(0o555)
        if not os.getuid():
            os.seteuid(65534)  # nobody: to root everything is permitted
        try:
            for words in (["one", f"workdir={folder / 'new'}"], [f"workdir={folder / 'run'}", "--resume"]):
                with pytest.raises(CommandError, match="`workdir` must be a folder to write in; .*Permission denied"):
                    enter(parse(*words))
        finally:
            if not os.getuid():
                os.seteuid(0)
            for path in (folder, folder / "run"):
                path.chmod(0o755)


def test_a_write_that_fails_ends_the_run_with_the_way_to_go_on(tmp_path):
    run = parse("one", f"workdir={tmp_path}")
    with (
        pytest.raises(CommandError, match=r"cannot write: .*No space left.*whole.*--resume workdir=") as stop,
        run.open([]),
    ):
        with open("/dev/full", "w") as stream:
            stream.write("x")
    assert stop.value.code == 1


def test_a_text_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "file"
    common.write_text(path, "old")

    def full(self, text):
        with open("/dev/full", "w") as stream:
            stream.write(text)

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="No space left"):
        common.write_text(path, "new")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_nobody_to_read_is_no_reason_to_stop(stream):
    program = f"""
        import pathlib, sys
        from experiments import common
        for line in range(3):
            common.say(line, sys.{stream})
        with common.Progress("dense", 1, 10) as progress:
            progress.note("compiling")
        pathlib.Path(sys.argv[1]).write_text("done")
    """
    reader, writer = os.pipe()
    os.close(reader)
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), f"{folder}/file"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=writer if stream == "stdout" else subprocess.PIPE,
            stderr=writer if stream == "stderr" else subprocess.PIPE,
            check=False,
        )
        os.close(writer)
        assert (child.returncode, child.stderr or b"") == (0, b"")
        assert pathlib.Path(folder, "file").read_text() == "done"


def test_signals_that_were_ignored_stay_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with common.Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_are_noted_once_and_end_the_command(number):
    outside = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with common.Signals() as signals:
            signals.end_if_received("Not yet.")
            os.kill(os.getpid(), number)
            assert signals.received == number
            assert signal.getsignal(number) == signal.SIG_DFL
            with pytest.raises(CommandError, match=f"{number.name}. Saved.") as stop:
                signals.end_if_received("Saved.")
        assert stop.value.code == 128 + number
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, outside)


def test_progress_is_lines_without_a_terminal(capsys, monkeypatch):
    times = iter([4.0, 9.0, 15.0])
    monkeypatch.setattr(common, "time", types.SimpleNamespace(monotonic=lambda: next(times)))
    with common.Progress("dense", 1000, 100) as progress:
        progress.note("compiling")
        progress.begin(50)
        progress.update(10, 3.0)
        progress.update(12, 2.5)
        progress.update(10, 2.25, "1 of 3 diverged")
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines() == [
        "dense: compiling",
        "dense:  60%, 3.000 bits/byte",
        "dense:  82%, 2.250 bits/byte, 1 of 3 diverged, 2.0 kB/s",
    ]
