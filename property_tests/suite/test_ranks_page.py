"""The page on ranks says what the tests say."""

import re
import subprocess
from importlib import import_module

import pytest
import reduction_table
from fault_table import BETWEEN, PAGE, RESUMES, tables

from numden.models.train_config import TrainConfig

TEXT = PAGE.read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)


def test_fault_table_is_the_one_of_the_tests():
    """If not: ``python property_tests/suite/fault_table.py``."""
    assert BETWEEN.search(TEXT).group() == tables()


def test_reduction_table_is_the_one_of_the_tests():
    """If not: ``python property_tests/suite/reduction_table.py``."""
    assert reduction_table.BETWEEN.search(TEXT).group() == reduction_table.table()


@pytest.mark.parametrize("resume", RESUMES, ids=lambda resume: resume.name)
def test_named_tests_are_there(resume):
    module, _, name = resume.test.partition("::")
    assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split()[0])
def test_commands_can_be_parsed(block):
    done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    options = set(re.findall(r" (--[a-z-]+) ", block.partition("torchrun")[2].partition("-m ")[0]))
    assert options <= set(_options_of_torchrun())


def _options_of_torchrun():
    parser = import_module("torch.distributed.run").get_args_parser()
    return [option for action in parser._actions for option in action.option_strings]


def test_keys_of_the_configuration_are_there():
    config = TrainConfig()
    for section, key in re.findall(r"--set (\w+)\.(\w+)=", TEXT):
        assert hasattr(getattr(config, section), key)


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT)
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
