"""Each script in examples/ runs to its end, and prints something."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def scripts():
    return sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("script", scripts(), ids=lambda path: path.stem)
def test_example(script, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()
