"""``numden check`` and ``numden check-step``: status, reports, and errors that help."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from numden.property_tests import cli
from numden.property_tests.reports.report import Report, Verdict

RUNNER = CliRunner(env={"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"})

LOSSES = """
import torch
from hypothesis import strategies as st
from numden.pure import LossTerms

params = {"w": torch.tensor(2.0)}
batch = {"x": torch.tensor([8.0, 2.0, 4.0])}
batches = [batch, {"x": torch.tensor([1.0, 3.0])}]
drawn = st.lists(st.integers(-8, 8), min_size=1).map(lambda xs: {"x": torch.tensor(xs) / 8})

def make_params():
    return params

def make_batches():
    return batches

def right(params, batch):
    print("noise")
    return LossTerms((params["w"] * batch["x"]).sum(), batch["x"].numel())

def mean(params, batch):
    return LossTerms((params["w"] * batch["x"]).mean(), 1)

def raises(params, batch):
    raise KeyError("labels")

def pad_row(batch, n):
    return {"x": torch.cat([batch["x"], torch.zeros(n)])}

module = torch.nn.Linear(1, 1).double()

def of_module(module, batch):
    return LossTerms(module(batch["x"].double()[:, None]).sum(), batch["x"].numel())
"""

STEPS = """
import torch
from numden.pure import window_grad
from numden.property_tests.worlds.problems import tokens

problem = tokens()
loss_fn, params, batches = problem.loss_fn, problem.params, problem.batches

def right(params, world):
    return window_grad(loss_fn)(params, [batch for window in world for batch in window])

def mean_of_means(params, world):
    params = {"w": params["w"].clone().requires_grad_()}
    window = [batch for window in world for batch in window]
    for batch in window:
        terms = loss_fn(params, batch)
        (terms.num / terms.den.clamp(1) / len(window)).backward()
    return {"w": params["w"].grad}

def raises(params, world):
    raise KeyError("labels")
"""


@pytest.fixture(autouse=True)
def _imports_are_undone(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("losses", "steps"):
        sys.modules.pop(name, None)


@pytest.fixture
def losses(tmp_path):
    (tmp_path / "losses.py").write_text(LOSSES)


@pytest.fixture
def steps(tmp_path):
    (tmp_path / "steps.py").write_text(STEPS)


def invoke(*args):
    return RUNNER.invoke(cli.app, [str(arg) for arg in args])


def check(loss, *args, params="params", batch="batch"):
    given = ("--params", f"losses.py:{params}", "--batch", f"losses.py:{batch}")
    return invoke("check", f"losses.py:{loss}", *given, *args)


def check_step(step, *args):
    return invoke("check-step", f"steps.py:{step}", *args)


def verdicts(result):
    return {each["law"]: each["status"] for each in json.loads(result.stdout)["verdicts"]}


# --- a loss function -----------------------------------------------------------------------------


def test_a_right_loss_function_has_status_0(losses):
    result = check("right", "--examples", 5)
    assert result.exit_code == 0, result.output
    assert "losses.py:right: all laws hold" in result.stdout
    assert result.stderr == ""


def test_a_broken_law_has_status_1(losses):
    result = check("mean", "--examples", 5)
    assert result.exit_code == 1, result.output
    assert "additivity is broken" in result.stdout
    assert max(map(len, result.stdout.split("to repeat it")[0].splitlines())) <= 80


def test_a_loss_function_that_raises_has_status_2(losses):
    result = check("raises", "--examples", 5)
    assert result.exit_code == 2, result.output
    assert "KeyError: 'labels'" in " ".join(result.stdout.split())


def test_json_and_nothing_else(losses):
    result = check("right", "--examples", 5, "--seed", 7, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["subject"], report["seed"], report["exit_code"]) == ("losses.py:right", 7, 0)
    assert verdicts(result)["additivity"] == "holds"
    assert "noise" in result.stderr


@pytest.mark.parametrize(
    ("params", "batch"),
    [("make_params", "make_batches"), ("params", "batches"), ("params", "drawn")],
)
def test_values_functions_and_strategies(losses, params, batch):
    result = check("mean", "--examples", 5, "--json", params=params, batch=batch)
    assert verdicts(result)["additivity"] == "broken", result.output


def test_several_batches_and_files_of_tensors(losses):
    torch.save({"w": torch.tensor(2.0)}, "params.pt")
    torch.save({"x": torch.tensor([1.0, 2.0])}, "batch.pt")
    options = ["--params", "params.pt", "--batch", "batch.pt", "--batch", "losses.py:drawn"]
    result = invoke("check", "losses.py:right", *options, "--examples", 5, "--json")
    assert result.exit_code == 0, result.output


def test_a_module(losses):
    result = check("of_module", "--examples", 5, "--json", params="module")
    assert verdicts(result)["additivity"] == "holds", result.output


def test_options_of_laws(losses):
    plain = check("right", "--examples", 5, "--json")
    assert verdicts(plain)["padding"] == "skipped"
    options = ("--pad-row", "losses.py:pad_row", "--empty", "losses.py:batch")
    given = check("right", "--examples", 5, "--json", *options)
    assert verdicts(given)["padding"] == "broken", given.output  # the count has padding
    assert verdicts(given)["emptiness"] == "broken"  # the batch is not empty
    assert given.exit_code == 1


def test_options_reach_the_check(losses, monkeypatch):
    seen = {}

    def report_loss(loss_fn, params, batches, **options):
        seen.update(options, batches=batches)
        return Report("loss_fn", (Verdict("purity", "holds"),), 1, 0.1, 0)

    monkeypatch.setattr(cli, "report_loss", report_loss)
    result = check(
        *("right", "--exact", "--rtol", 0.5, "--budget", 3, "--examples", 9, "--seed", 4),
        *("--batches", "losses.py:batches"),
    )
    assert result.exit_code == 0, result.output
    assert [len(batch["x"]) for batch in seen.pop("batches")] == [3, 3, 2]
    assert callable(seen.pop("progress"))
    assert seen == dict(exact=True, rtol=0.5, budget_s=3.0, max_examples=9, seed=4)


# --- a step --------------------------------------------------------------------------------------


def test_a_right_step_has_status_0(steps):
    result = check_step("right", "--examples", 10, "--ranks", "1-2")
    assert result.exit_code == 0, result.output
    assert "steps.py:right: all laws hold" in result.stdout


def test_a_wrong_step_has_status_1_and_its_fault_is_named(steps):
    result = check_step("mean_of_means", "--ranks", 1)
    assert result.exit_code == 1, result.output
    assert "gradient is broken" in result.stdout
    assert "mean of micro-step means" in " ".join(result.stdout.split())


def test_a_step_that_raises_has_status_2(steps):
    result = check_step("raises", "--ranks", 1, "--json")
    assert result.exit_code == 2, result.output
    assert "failed" in verdicts(result).values()


def test_a_step_with_a_loss_function_of_its_own(steps):
    given = [f"--{name}=steps.py:{name.replace('loss', 'loss_fn')}" for name in ("loss", "params")]
    result = check_step("right", *given, "--batches=steps.py:batches", "--examples", 10, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["subject"] == "steps.py:right"


def test_options_reach_the_check_of_a_step(steps, monkeypatch):
    seen = {}

    def report_step(step, loss_fn, params, batches, **options):
        seen.update(options, given=(loss_fn, params, batches))
        return Report("step", (Verdict("gradient", "holds"),), 1, 0.1, 0)

    monkeypatch.setattr(cli, "report_step", report_step)
    result = check_step(
        *("right", "--ranks", "2-3", "--micro-steps", 5, "--returns", "params", "--lr", 0.5),
        *("--max-norm", 1.5, "--rtol", 0.1, "--examples", 9, "--seed", 4, "--timeout", 7),
        *("--budget", 3, "--objective", "steps.py:problem.objective", "--uneven"),
    )
    assert result.exit_code == 0, result.output
    assert callable(seen.pop("objective"))
    del seen["progress"]
    assert seen == {
        **dict(given=(None, None, None), ranks=(2, 3), max_micro_steps=5, returns="params"),
        **dict(lr=0.5, max_norm=1.5, rtol=0.1, max_examples=9, seed=4, timeout_s=7.0),
        **dict(budget_s=3.0, uneven=True),
    }


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["check", "nothing.py:f", "--params", "losses.py:params", "--batch", "losses.py:batch"],
            "numden check: the loss function: there is no file 'nothing.py'. Check the path.",
        ),
        (
            [
                "check",
                "losses.py:right",
                "--params",
                "losses.py:parms",
                "--batch",
                "losses.py:batch",
            ],
            "numden check: --params: there is no 'parms' in 'losses.py:parms'. "
            "Did you mean 'params'?",
        ),
        (
            [
                "check",
                "losses.py:batch",
                "--params",
                "losses.py:params",
                "--batch",
                "losses.py:batch",
            ],
            "numden check: the loss function: must be a function, got 'losses.py:batch', which is "
            "of type dict. Name a function.",
        ),
        (
            ["check", "losses.py:right", "--params", "losses.py:params"],
            "numden check: needs a batch. Write --batch my_loss.py:batch.",
        ),
        (
            ["check-step", "losses.py:right", "--loss", "losses.py:right"],
            "numden check-step: needs all of --loss, --params and --batch, or none of them.",
        ),
        (
            ["check-step", "losses.py:right", "--ranks", "3-1"],
            "numden check-step: --ranks: must be N or A-B with 1 <= A <= B, got '3-1'. Write 1-3.",
        ),
        (
            ["check-step", "losses.py:right", "--ranks", "two"],
            "numden check-step: --ranks: must be N or A-B with 1 <= A <= B, got 'two'. Write 1-3.",
        ),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(losses, args, said):
    result = invoke(*args)
    assert result.exit_code == 2
    assert (result.stdout, result.stderr) == ("", f"{said}\n")


def test_a_file_that_cannot_be_imported(losses, tmp_path):
    (tmp_path / "losses.py").write_text("x = 1\nraise RuntimeError('no data here')\n")
    result = check("right")
    assert result.exit_code == 2
    assert "importing" in result.stderr
    assert "raised RuntimeError: no data here" in result.stderr
    assert "losses.py:2" in result.stderr
    assert "Traceback" not in result.output


def test_a_fault_of_the_checker_itself_is_status_2_with_its_traceback(losses, monkeypatch):
    def report_loss(*args, **options):
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "report_loss", report_loss)
    result = check("right")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "RuntimeError: a bug" in result.stderr


def test_an_interrupt_is_no_verdict(losses, monkeypatch):
    def report_loss(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "report_loss", report_loss)
    result = check("right")
    assert (result.exit_code, result.stderr) == (130, "numden check: interrupted\n")


# --- the command line joins the parts ------------------------------------------------------------


def numden(*args, without=()):
    """Run ``numden`` in a fresh Python that does not have some packages."""
    code = (
        "import sys, json\n"
        f"for name in {list(without)!r}: sys.modules[name] = None\n"
        f"sys.argv = ['numden', *{[str(arg) for arg in args]!r}]\n"
        "import numden.__main__ as m\n"
        "try: m.main()\n"
        "finally: print('LOADED', json.dumps([n for n in sys.modules if sys.modules[n]]))\n"
    )
    env = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=env
    )
    out, _, loaded = done.stdout.rpartition("LOADED")
    return done, out, set(json.loads(loaded))


OTHER_EXTRAS = ["matplotlib", "transformers", "yaml", "safetensors", "tokenizers", "pytest"]


def test_help_lists_all_commands_and_imports_none():
    done, out, loaded = numden("--help", without=["hypothesis", "matplotlib"])
    assert done.returncode == 0, done.stderr
    for name, told in (("train", "Train a"), ("check", "Try the"), ("check-step", "Compare a")):
        assert f"{name:10}  {told}" in out
    assert not {"torch", "numden.models.cli", "numden.property_tests.cli"} & loaded


@pytest.mark.slow
def test_check_needs_its_own_extra_alone(losses):
    options = ["--params", "losses.py:params", "--batch", "losses.py:batch", "--examples", 3]
    done, out, loaded = numden("check", "losses.py:mean", *options, without=OTHER_EXTRAS)
    assert done.returncode == 1, done.stderr
    assert "additivity is broken" in out
    assert not [name for name in loaded if name.startswith("numden.models")]


@pytest.mark.slow
def test_check_step_needs_its_own_extra_alone(steps):
    done, out, _ = numden("check-step", "steps.py:right", "--examples=3", without=OTHER_EXTRAS)
    assert done.returncode == 0, done.stderr
    assert "steps.py:right: all laws hold" in out


@pytest.mark.slow
def test_train_needs_no_hypothesis():
    done, out, loaded = numden("train", "--help", without=["hypothesis"])
    assert done.returncode == 0, done.stderr
    assert "Usage: numden train [OPTIONS]" in out
    assert not [name for name in loaded if name.startswith("numden.property_tests")]


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("check", "hypothesis", "check"),
        ("check-step", "hypothesis", "check"),
        ("train", "rich", "train"),
    ],
)
def test_without_a_package_it_says_what_to_install(command, package, extra):
    done, _, _ = numden(command, "--help", without=[package])
    assert done.returncode == 1 if command == "train" else 2
    assert f"pip install 'numden[{extra}]'" in done.stderr


@pytest.mark.parametrize(("command", "extra"), [("check", "check"), ("train", "train")])
def test_without_typer_it_says_which_extra(command, extra):
    done, _, _ = numden(command, without=["typer"])
    assert done.returncode == 1
    assert done.stderr == (
        f"numden: the command line needs typer. Install it: pip install 'numden[{extra}]'\n"
    )


@pytest.mark.parametrize("command", ["check", "check-step"])
def test_help_names_the_options_and_fits(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    for option in ("--params", "--batch", "--examples", "--seed", "--budget", "--json", "--rtol"):
        assert f" {option} " in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80
