"""Sweeps of the LSTM experiment: members in one program, a diverged one among them, resuming, and the verdicts."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from bsjax import info
from experiments import common
from experiments.common import CommandError
from experiments.lstm import comparison, configs, model, sweep, trainer

# As little to compile as can be: nearly all that these tests take is the compiler's time.
TOY = configs.Config(hidden=16, depth=2, embedding=4, batch=4, length=4, steps=40, evaluated=3, heldout=0.1, warmup=0.0)
PAIR = configs.pair(TOY, ratio=2, block_size=8)
WORDS = ["depth=2", "embedding=4", "batch=4", "length=4", "steps=40", "evaluated=3", "heldout=0.1", "hidden=16"]
WORDS += ["sparse.hidden=32", "sparse.stride=2", "sparse.degree=1", "checkpoint_every=10"]


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # for optax
        yield


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"line %d: what is %d + %d?\n" % (i, i, i * i) for i in range(100)))
    return path


def windows(config, count):
    return np.random.default_rng(0).integers(0, 256, (count, config.length + 1, config.batch)).astype(np.int32)


def start(config, members):
    layouts = model.make_layouts(config)
    return layouts, trainer.init(config, layouts, *trainer.columns(members))


# ---------------------------------------------------------------------------------------------------------- members


@pytest.mark.parametrize("config", PAIR.values(), ids=PAIR)
def test_members_are_one_program_and_train_as_each_would_alone(config):
    rates, seeds = [1.0, 1.0, 4.0, 1e38, 2.0, 2.0], [0, 1, 0, 0, 2, 3]
    members = [trainer.Member(rate, seed) for rate, seed in zip(rates, seeds, strict=True)]
    texts = windows(config, 3)

    def compiled(members):
        layouts, state = start(config, members)
        lowered = trainer.train_step.lower(config, layouts, state, texts[0][:-1], texts[0][1:], np.bool_(False))
        program = lowered.compile()

        def train(members):
            _, state = start(config, members)
            states, losses = [], []
            for text in texts:
                state, told = program(layouts, state, text[:-1], text[1:], np.bool_(False))
                states.append(jax.tree.map(np.asarray, {key: state[key] for key in ("params", "clipped")}))
                losses.append(told)
            return states, jax.device_get(losses)

        return train, program.as_text() or ""

    together, text = compiled(members)
    alone, text_alone = compiled(members[:1])
    if config.pattern != "dense" and "native" in info.kernels()["cpu"]:
        products = config.depth + 1
        for program in (text, text_alone):
            calls = [program.count(f'custom_call_target="bsjax_{op}"') for op in ("spmm", "sddmm")]
            assert calls == [2 * products, products]  # forward and to the inputs; to the weights, after the loop
    assert text.count(" while(") == text_alone.count(" while(")  # no loop over members

    states, losses = together(members)
    assert losses[-1][1].tolist() == [False, False, False, True, False, False]
    for i in (0, 1, 2):
        lone_states, lone_losses = alone(members[i : i + 1])
        assert_rates_are_those_of_the_config(members[i], config, lone_states[0])
        # Products of several members may add in another order than one member's.
        np.testing.assert_allclose(losses[-1][0][i], lone_losses[-1][0][0], rtol=1e-3)
    assert len(set(losses[-1][0][:3].tolist())) == 3
    assert (states[-1]["clipped"] <= 3).all()


def assert_rates_are_those_of_the_config(member, config, state):
    """Adam's first step is the learning rate, whatever the gradient and its clipping."""
    _, first = start(config, [member])
    moved = jax.tree.map(lambda new, old: np.abs(new - np.asarray(old)).max(), state["params"], first["params"])
    np.testing.assert_allclose(moved["output_bias"], config.learning_rate, rtol=1e-2)
    fan_in = 16 if config.pattern == "dense" else 8
    np.testing.assert_allclose(moved["weights"], member.rate / fan_in, rtol=1e-2)


# ------------------------------------------------------------------------------------------------------------ sweeps


def run(*words):
    sweep.main([str(word) for word in words])


def metrics(workdir):
    return [line for line in common.Metrics(workdir / "metrics.jsonl").read() if not line[1].endswith("/seconds")]


@pytest.fixture(scope="module")
def swept(tmp_path_factory, text_file):
    """A sweep with a rate at which all members diverge, and what it printed."""
    workdir = tmp_path_factory.mktemp("sweep") / "run"
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        told = []
        patch.setattr(common, "say", lambda text, *args, **options: told.append(text))
        run(*WORDS, "rates=1,2,1e38", "seeds=2", f"data={text_file}", f"workdir={workdir}")
    return workdir, "\n".join(told)


def test_a_diverged_member_is_reported_and_left_out(swept):
    workdir, told = swept
    table = comparison.read(workdir / "table.json")
    for name in PAIR:
        assert table.bits[name][2] == [None, None]
        assert all(0 < bits < 8.5 for row in table.bits[name][:2] for bits in row)
        assert table.best(name) in (1.0, 2.0)
    assert sum("1e+38" in line and "diverged" in line and "2 of 2" in line for line in told.splitlines()) == 2
    assert "best" in told
    assert "sparse - dense, at their best c (" in told
    assert (workdir / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_sweep_resumes_to_the_same_bits(swept, text_file, tmp_path, monkeypatch):
    workdir, step = tmp_path / "run", trainer.Trainer._train_step

    def trapped(self):
        if (self._name, self._step) == ("sparse", 25):
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(trainer.Trainer, "_train_step", trapped)
    with pytest.raises(KeyboardInterrupt):
        run(*WORDS, "rates=1,2,1e38", "seeds=2", f"data={text_file}", f"workdir={workdir}")
    monkeypatch.undo()
    run("--resume", f"workdir={workdir}")
    assert metrics(workdir) == metrics(swept[0])
    assert comparison.read(workdir / "table.json").bits == comparison.read(swept[0] / "table.json").bits


def test_a_sweep_of_which_nothing_is_left_ends(text_file, tmp_path):
    with pytest.raises(CommandError, match=r"of any member is not finite at step \d+ of dense") as stop:
        run(*WORDS, "rates=1e38,2e38,3e38", "seeds=2", f"data={text_file}", f"workdir={tmp_path / 'run'}")
    assert stop.value.code == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rates="], "`rates` must be different numbers above 0 with commas between; got ''"),
        (["rates=1,1"], "`rates` must be different numbers"),
        (["rates=1,-1"], "`rates` must be different numbers"),
        (["rates=1;2"], "`rates` must be different numbers"),
        (["seeds=0"], "`seeds` must be at least 1; got 0"),
        (["sedes=2"], "`sedes` is no option; the options are workdir, rates, seeds, data"),
        (["seeds=3", "--resume", "workdir={swept}"], "its options and models and data differ from"),
    ],
)
def test_bad_options_are_one_sentence(words, message, swept):
    with pytest.raises(CommandError) as stop:
        run(*(word.format(swept=swept[0]) for word in words))
    assert message in str(stop.value)


def test_a_folder_of_a_sweep_is_no_run_of_training(swept):
    from experiments.lstm import sample, train

    with pytest.raises(CommandError, match=r"must hold a run of experiments.lstm.train; .* holds one of .*sweep"):
        train.main(["--resume", f"workdir={swept[0]}"])
    with pytest.raises(CommandError, match=r"must hold a run of experiments.lstm.train"):
        sample.sample(sample.Options(workdir=str(swept[0])))


# ---------------------------------------------------------------------------------------------------------- verdicts


def a_table(dense, sparse, rates=(1.0, 2.0)):
    models = {name: dataclasses.asdict(config) for name, config in PAIR.items()}
    return comparison.Table(models, list(rates), [0, 1, 2], {"dense": dense, "sparse": sparse}, {"text": ["a text"]})


@pytest.mark.parametrize(
    ("sparse", "verdict"),
    [
        ([2.06, 2.11, 2.16], "+0.0100 bits per byte, spread 0.0500 over 3 seeds: level"),
        ([1.99, 2.00, 2.01], "-0.1000 bits per byte, spread 0.0100 over 3 seeds: sparse ahead"),
        ([2.21, 2.20, 2.22], "+0.1100 bits per byte, spread 0.0100 over 3 seeds: dense ahead"),
        ([2.111, 2.121, 2.131], "+0.0210 bits per byte, spread 0.0100 over 3 seeds: dense ahead"),
        ([2.109, 2.119, 2.129], "+0.0190 bits per byte, spread 0.0100 over 3 seeds: level"),
    ],
)
def test_less_than_twice_the_spread_is_level(sparse, verdict):
    table = a_table([[2.1, 2.1, 2.1], [2.0, 2.0, None]], [sparse, [9.0, 9.0, 9.0]])
    (line,) = comparison.judge_table(table, PAIR)
    assert line == f"sparse - dense, at their best c (1, 1): {verdict}"


def test_a_verdict_that_cannot_be_is_not_given():
    one = dataclasses.replace(a_table([[2.0]], [[1.0]], [1.0]), seeds=[0])
    assert "no verdict: one seed has no spread" in comparison.judge_table(one, PAIR)[0]
    none = a_table([[2.0, 2.0, None]], [[1.0, 1.0, 1.0]], [1.0])
    assert "no verdict: at every rate a member of dense diverged" in comparison.judge_table(none, PAIR)[0]
    unequal = {**PAIR, "dense": dataclasses.replace(TOY, hidden=18)}
    (line,) = comparison.judge_table(a_table([[2.0] * 3] * 2, [[1.0] * 3] * 2), unequal)
    assert line.startswith("no verdict: Recurrent weights differ (dense 1,944, sparse 1,536)")
    assert "No verdict: Recurrent weights differ" in comparison.judge_run(unequal, {"dense": 2.0, "sparse": 1.0})


def test_a_run_is_judged_by_the_table_that_fits_it(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "RESULTS", tmp_path)
    bits = {"dense": 2.10, "sparse": 2.05}
    assert "no spread is known for this configuration" in comparison.judge_run(PAIR, bits)
    table = a_table([[2.1, 2.1, 2.1], [2.0, 2.0, None]], [[2.05, 2.10, 2.15], [2.0, 2.01, 2.02]])
    (tmp_path / "pair.json").write_text(json.dumps(dataclasses.asdict(table)))
    told = comparison.judge_run(PAIR, bits)
    assert told == (
        "sparse - dense: -0.0500 bits per byte: level, by the spread of 0.0500 over 3 seeds in pair.json (a text)"
    )
    fast = {**PAIR, "sparse": dataclasses.replace(PAIR["sparse"], rate=2.0, seed=7)}
    assert "sparse ahead, by the spread of 0.0100" in comparison.judge_run(fast, bits)
    diverged = {**PAIR, "dense": dataclasses.replace(PAIR["dense"], rate=2.0)}
    assert "no spread is known" in comparison.judge_run(diverged, bits)
    longer = {name: dataclasses.replace(config, steps=50) for name, config in PAIR.items()}
    assert "no spread is known" in comparison.judge_run(longer, bits)


def test_committed_tables_can_be_read():
    for path in comparison.RESULTS.glob("*.json"):
        table = comparison.read(path)
        assert comparison.judge_table(table, {name: configs.Config(**config) for name, config in table.models.items()})


def test_the_main_job_has_a_committed_table():
    """Its preset fits it at the c of each model, which are the best ones; and the README says what it says."""
    models = configs.smoke()
    told = comparison.judge_run(models, {"dense": 2.0, "sparse": 3.0})
    assert "dense ahead, by the spread of" in told
    assert "level, by the spread of" in comparison.judge_run(models, {"dense": 2.0, "sparse": 2.0})
    table = comparison.read(comparison.RESULTS / "smoke.json")
    assert {name: table.best(name) for name in models} == {name: config.rate for name, config in models.items()}
    assert len(table.seeds) >= 3
    readme = comparison.RESULTS.with_name("README.md").read_text()
    for name in models:
        for rate, row in zip(table.rates, table.bits[name], strict=True):
            cells = f"{np.mean(row):.4f} | {comparison.spread(row):.4f}".replace("| 0", "| ")
            assert f"| {name} | {f'{rate:g}'.lstrip('0')}" in readme
            assert cells in readme
    (judged,) = comparison.judge_table(table, models)
    assert judged.endswith("level")
    assert "**level**" in readme
