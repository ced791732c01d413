"""The examples in docstrings run and print what they say.

``pytest --doctest-modules`` names modules by their folder, where relative imports between the
parts fail; so the parts are walked as installed.
"""

import doctest
import importlib
import pkgutil

import pytest

PARTS = ("numden.pure", "numden.dist", "numden.models", "numden.property_tests")
SKIPPED = {"_root", "cli", "__main__", "suite"}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules():
    for part in PARTS:
        yield part
        for found in pkgutil.walk_packages(importlib.import_module(part).__path__, f"{part}."):
            if not SKIPPED & set(found.name.split(".")):
                yield found.name


@pytest.mark.parametrize("name", list(modules()))
def test_examples_in_docstrings(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert results.failed == 0


def test_the_walk_finds_the_core():
    assert {"numden.pure.terms", "numden.pure.tree", "numden.property_tests._sum_laws"} <= set(
        modules()
    )
