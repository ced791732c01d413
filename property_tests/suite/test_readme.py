"""The code in the README does what the README says."""

import re
from pathlib import Path

import pytest

from numden.property_tests import CheckFailed

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_point_in_one_example():
    names = {}
    exec(BLOCKS[0], names)
    assert names["leaf"].grad == 5
    assert names["result"].grads == names["result"].loss == 3.5


def test_the_checker_finds_the_mean_of_means():
    with pytest.raises(CheckFailed, match="mean of micro-step means"):
        exec(BLOCKS[1], {})


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text())
    assert [link for link in links if not (README.parent / link).exists()] == []
