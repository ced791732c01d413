"""What ``module_or_file:name`` finds, and what is said when it finds nothing."""

import pickle
import random
import sys

import pytest
import torch
from torch import nn

from numden.property_tests._targets import TargetError, load, load_function, load_value, made


@pytest.fixture(autouse=True)
def _imports_are_undone(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


# --- what is found -------------------------------------------------------------------------------


def test_a_name_of_a_file(tmp_path):
    file = written(tmp_path / "my_loss.py", "def loss_fn(w, x): return w\nclass A:\n  b = [3]\n")
    assert load(f"{file}:loss_fn", "--loss")(2, 3) == 2
    assert load(f"{file}:A.b", "--loss") == [3]
    assert pickle.loads(pickle.dumps(load(f"{file}:loss_fn", "--loss"))).__module__ == "my_loss"


def test_a_file_imports_its_neighbours(tmp_path):
    written(tmp_path / "next_to_it.py", "value = 7")
    file = written(tmp_path / "my_loss.py", "from next_to_it import value")
    assert load(f"{file}:value", "--params") == 7


def test_a_file_in_a_package_has_its_relative_imports(tmp_path):
    written(tmp_path / "a_package/__init__.py", "")
    written(tmp_path / "a_package/other.py", "value = 7")
    file = written(tmp_path / "a_package/my_loss.py", "from .other import value\ndef f(): pass")
    assert load(f"{file}:value", "--params") == 7
    assert load(f"{file}:f", "--params").__module__ == "a_package.my_loss"


def test_a_file_may_have_the_name_of_a_module(tmp_path):
    file = written(tmp_path / "random.py", "value = 7")
    assert load(f"{file}:value", "--params") == 7
    assert sys.modules["random"] is random


def test_a_module_by_its_name_or_from_the_folder_of_work(tmp_path, monkeypatch):
    assert load("math:pi", "--params") > 3
    written(tmp_path / "in_this_folder.py", "value = 7")
    monkeypatch.chdir(tmp_path)
    assert load("in_this_folder:value", "--params") == 7


def test_values_are_taken_and_makers_are_called(tmp_path):
    module = nn.Linear(1, 1)
    assert made(module) is module
    assert made({"w": 1}) == {"w": 1}
    assert made(lambda: {"w": 1}) == {"w": 1}
    assert isinstance(made(nn.Identity), nn.Identity)
    file = written(tmp_path / "values.py", "def params(): return {'w': 1}")
    assert load_value(f"{file}:params", "--params") == {"w": 1}


def test_files_of_tensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    params = {"w": torch.tensor([1.0, 2.0])}
    torch.save(params, tmp_path / "params.pt")
    safetensors.save_file(params, tmp_path / "params.safetensors")
    for name in ("params.pt", "params.safetensors"):
        read = load_value(str(tmp_path / name), "--params")
        assert list(read) == ["w"]
        assert torch.equal(read["w"], params["w"])


# --- what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["my_loss.py", "my_loss.py:", ":loss_fn", ""])
def test_a_target_has_a_place_and_a_name(target):
    with pytest.raises(TargetError, match=r"--loss: must be module_or_file:name, got '.*'\. Write"):
        load(target, "--loss")


def test_there_is_no_such_file_or_module(tmp_path):
    with pytest.raises(TargetError, match=r"--loss: there is no file 'nothing.py'\. Check"):
        load("nothing.py:loss_fn", "--loss")
    with pytest.raises(TargetError, match=r"--loss: there is no file 'some/nothing'\. Check"):
        load("some/nothing:loss_fn", "--loss")
    with pytest.raises(TargetError, match=r"there is no module 'no_such_thing'\. For a file write"):
        load("no_such_thing:loss_fn", "--loss")
    with pytest.raises(TargetError, match=r"there is no module 'numden\.nothing'"):
        load("numden.nothing:loss_fn", "--loss")
    with pytest.raises(TargetError, match=r"--params: there is no file 'nothing.pt'\. Check"):
        load_value("nothing.pt", "--params")


def test_there_is_no_such_name(tmp_path):
    file = written(tmp_path / "my_loss.py", "def loss_fn(): pass")
    with pytest.raises(TargetError, match=r"no 'los_fn' in '.*'\. Did you mean 'loss_fn'\?"):
        load(f"{file}:los_fn", "--loss")
    with pytest.raises(TargetError, match=r"no 'zzz' in '.*'\. Is it defined at the top level\?"):
        load(f"{file}:zzz", "--loss")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ny = 1 / 0\n", r"raised ZeroDivisionError: division by zero \(.*broken.py:2\)$"),
        ("import no_such_thing", r"raised ModuleNotFoundError: .*'no_such_thing' \(.*broken.py:1"),
        ("import sys\nsys.exit(3)", r"raised SystemExit: 3 \(.*broken.py:2\)$"),
        ("def f(:\n", r"raised SyntaxError: invalid syntax \(.*broken.py:1\)$"),
    ],
)
def test_importing_raises(tmp_path, monkeypatch, text, said):
    file = written(tmp_path / "broken.py", text)
    with pytest.raises(TargetError, match=f"--loss: importing .*broken.py {said}"):
        load(f"{file}:loss_fn", "--loss")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match=f"--loss: importing broken {said}"):
        load("broken:loss_fn", "--loss")


def test_the_kind_is_wrong(tmp_path):
    file = written(
        tmp_path / "my_loss.py",
        "value = 3\ndef needs(x): pass\ndef raises():\n  raise KeyError('w')\n",
    )
    with pytest.raises(TargetError, match=r"--loss: must be a function, got .* of type int\. Name"):
        load_function(f"{file}:value", "--loss")
    with pytest.raises(TargetError, match=r"or a function without arguments, and it raised TypeE"):
        load_value(f"{file}:needs", "--params")
    with pytest.raises(TargetError, match=r"raised KeyError: 'w' \(.*my_loss.py:4\)$"):
        load_value(f"{file}:raises", "--params")


def test_a_file_of_something_else(tmp_path):
    torch.save({"fn": print}, tmp_path / "a.pt")
    written(tmp_path / "b.safetensors", "no tensors")
    for name in ("a.pt", "b.safetensors"):
        with pytest.raises(
            TargetError, match=r"must be a file of tensors, and .* raised [^\n]*\. Name a"
        ):
            load_value(str(tmp_path / name), "--params")
