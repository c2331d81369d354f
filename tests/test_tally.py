"""The last lines of ./test.sh, which people and machines read to learn whether all is well."""

import sys

import pytest
import tally

XML = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_1"/>
<testcase classname="tests.test_a" name="test_2"><failure/></testcase>
<testcase classname="tests.test_b"><error/></testcase>
<testcase classname="tests.test_b" name="test_4"><skipped/></testcase>
</testsuite></testsuites>"""
PASSED = '<testsuite><testcase classname="tests.test_a" name="test_1"/></testsuite>'


@pytest.fixture
def say(tmp_path, monkeypatch, capsys):
    """Calls tally with arguments, and returns its status and its lines."""
    monkeypatch.setattr(tally, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(tally, "LOCKS", tmp_path / "locks")
    tally.RESULTS.mkdir()
    tally.LOCKS.mkdir()
    (tally.LOCKS / "3.11.txt").write_text("jax==0.10.2 \\\n    --hash=sha256:00\nnumpy==2.4.6\n")
    (tally.RESULTS / "3.11.txt").write_text("bsjax @ file:///x.whl\njax==0.10.2\n")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["tally.py", *arguments])
        status = tally.main()
        return status, capsys.readouterr().out.splitlines()

    return call


def test_all_passed(say):
    (tally.RESULTS / "3.11.xml").write_text(PASSED)
    (tally.RESULTS / "3.12.xml").write_text(PASSED)
    assert say("--locked") == (0, ["", "2 passed, 0 failed"])


def test_failures_are_named(say):
    (tally.RESULTS / "3.11.xml").write_text(XML)
    status, lines = say()
    assert status == 1
    assert lines[1:4] == ["Failed in 3.11:", "  tests.test_a::test_2", "  tests.test_b"]
    assert lines[-1] == "1 passed, 2 failed, 1 skipped"


def test_a_broken_stage_is_named_and_fails(say):
    (tally.RESULTS / "3.11.xml").write_text(PASSED)
    status, lines = say("--broken", "Hooks")
    assert status == 1
    assert lines == ["", "Broken:", "  Hooks", "", "1 passed, 0 failed"]


def test_no_test_is_a_failure(say):
    assert say() == (1, ["", "0 passed, 0 failed"])


@pytest.mark.parametrize("arguments", [[], ["--locked"]])
def test_what_differs_from_the_lock(say, arguments):
    (tally.RESULTS / "3.11.xml").write_text(PASSED)
    (tally.RESULTS / "3.11.txt").write_text("jax==0.12.1\nsix==1.17.0\n")
    status, lines = say(*arguments)
    assert status == len(arguments)  # news where the newest are tried, else a failure
    assert lines[1:4] == [
        "Not as in 3.11.txt of bazel/locks:",
        "  jax 0.12.1, in the lock 0.10.2",
        "  six 1.17.0, in the lock not at all",
    ]
