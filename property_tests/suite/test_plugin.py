"""The pytest plugin, in sessions of its own: laws as tests, fixtures, options, reports."""

import json
import os
import subprocess
import sys

import pytest

from numden.property_tests.loss_checker.trials import LAWS
from numden.property_tests.plugin import law_tests

TESTS = """
import pytest
import torch
from numden.property_tests.plugin import law_tests
from numden.pure import LossTerms

BATCHES = [{"x": torch.tensor([8.0, 2.0, 4.0])}, {"x": torch.tensor([1.0, 3.0])}]
W = torch.tensor(2.0)

def wrong(w, batch):
    return LossTerms((w * batch["x"]).mean(), 1)

@law_tests(params=W, batches=BATCHES, max_examples=2)
def test_right(w, batch):
    return LossTerms((w * batch["x"]).sum(), batch["x"].numel())

some = dict(laws=["repeatability", "additivity"], max_examples=5)
test_wrong = law_tests(params=lambda: W, batches=lambda: BATCHES, **some)(wrong)

def test_check_loss(check_loss):
    report = check_loss(test_right.loss_fn, W, BATCHES, seed=3, max_examples=20)
    print("seed", report.seed, "examples", report.examples)
    check_loss(wrong, W, BATCHES)  # line 23

def test_check_step(check_step):
    def step(params, world):
        raise ValueError("no such world")
    check_step(step, ranks=1)  # line 28

def test_other():
    assert 1 == 2
"""


class Session:
    """A run of pytest on ``TESTS`` in a process of its own."""

    def __init__(self, folder, *args, **env):
        (folder / "test_it.py").write_text(TESTS)
        (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
        env = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1", **env}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        self.text, self.status = done.stdout + done.stderr, done.returncode
        self.lines = self.text.splitlines()

    def fnmatch(self, *lines):
        pytest.LineMatcher(self.lines).fnmatch_lines(lines)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return Session(tmp_path_factory.mktemp("session"), "-v", "-rsf", "--numden-seed=9")


def test_a_loss_function_becomes_a_test_for_each_law(session):
    said = [line.split()[:2] for line in session.lines if line.startswith("test_it.py::")]
    outcomes = {name.partition("::")[2]: outcome for name, outcome in said}
    of_laws = {name for name in outcomes if "[" in name}
    of_wrong = {"test_wrong[additivity]", "test_wrong[repeatability]"}
    assert of_laws == {f"test_right[{law}]" for law in LAWS} | of_wrong
    assert {outcomes[f"test_right[{law}]"] for law in LAWS} == {"PASSED", "SKIPPED"}
    assert outcomes["test_right[additivity]"] == "PASSED"
    assert outcomes["test_right[padding]"] == "SKIPPED"
    assert outcomes["test_wrong[additivity]"] == "FAILED"
    assert outcomes["test_wrong[repeatability]"] == "PASSED"
    assert session.status == 1


def test_a_law_that_is_skipped_says_why(session):
    session.fnmatch(
        "SKIPPED * test_it.py:13: rows: no field of the batch is recognised as labels or a mask*"
    )


def test_a_failure_shows_the_report_and_no_traceback(session):
    session.fnmatch(
        "*_ test_wrong[[]additivity[]] _*",
        "test_it.py:10: wrong: 1 of 1 laws broken: additivity",
        "*- numden -*",
        "wrong: 1 of 1 laws broken: additivity",
        "  additivity  BROKEN   num: expected *",
        "additivity is broken",
        "  rule         the sums of joined batches must be the sums over the batches.",
        "  values       num: expected *, got *",
        "FAILED test_it.py::test_wrong[[]additivity[]] - wrong: 1 of 1 laws broken: additivity",
    )
    assert [line[1:].strip() for line in session.lines if line[:3] == "E  "] == ["assert 1 == 2"]
    assert "property_tests/" not in session.text


def test_the_fixtures_check_and_show_their_report(session):
    session.fnmatch(
        "test_it.py:23: wrong: * laws broken: *additivity*",
        "*- numden -*",
        "*additivity is broken*",
        "test_it.py:28: step: * could not be tried: *",
        "*- numden -*",
        "*ValueError: no such world*",
    )


def test_the_command_line_overrides_what_tests_say(session, tmp_path):
    [line] = [line for line in session.lines if line.startswith("seed ")]
    few = Session(tmp_path, "-k", "test_check_loss", "--numden-examples=1")
    [other] = [line for line in few.lines if line.startswith("seed ")]
    assert line.startswith("seed 9 ")
    assert other.startswith("seed 3 ")
    assert int(other.split()[-1]) < int(line.split()[-1])


@pytest.mark.slow
def test_without_the_plugin_the_laws_are_still_tests(tmp_path):
    session = Session(tmp_path, "-p", "no:numden", "-k", "additivity or test_check_step")
    session.fnmatch(
        "E *fixture 'check_step' not found", "*1 failed, 1 passed, * deselected, 1 error*"
    )


@pytest.mark.slow
def test_by_its_name_it_is_loaded_without_autoload_and_without_torch(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import sys\n"
        "def pytest_report_header(config):\n"
        "    return f\"torch {'torch' in sys.modules}, seed {config.getoption('--numden-seed')}\"\n"
    )
    args = ("-p", "numden", "--numden-seed=3", "-k", "test_other")
    session = Session(tmp_path, *args, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    session.fnmatch("torch False, seed 3", "E  *assert 1 == 2", "*1 failed, * deselected*")


def test_loading_it_is_cheap():
    code = "import sys, json, numden.property_tests.plugin; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert loaded & {"torch", "optree", "hypothesis", "pytest", "rich", "typer", "numpy"} == set()


def test_the_tests_take_the_name_and_place_of_the_loss_function():
    def test_my_loss(params, batch):
        """A loss."""

    tests = law_tests(params=None, batches=[], laws=["purity"])(test_my_loss)
    assert (tests.__name__, tests.__doc__) == ("test_my_loss", "A loss.")
    assert tests.__module__ == test_my_loss.__module__
    [mark] = tests.pytestmark
    assert mark.args == ("law", ["purity"])
    assert tests.loss_fn is test_my_loss
