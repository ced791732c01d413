"""The public surface is what it says, and dependencies point one way."""

import ast
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("pure", "dist", "models", "property_tests")
ENTRY_POINTS = {"_root", "cli", "commands", "__main__"}


def names_of_modules():
    for part in PARTS:
        path = importlib.import_module(f"numden.{part}").__path__
        found = [module.name for module in pkgutil.walk_packages(path, f"numden.{part}.")]
        yield from [f"numden.{part}", *found]


MODULES = [n for n in names_of_modules() if not {*ENTRY_POINTS, "suite"} & set(n.split("."))]
SOURCES = [path for part in PARTS for path in sorted((ROOT / part).glob("*.py"))]


def public_names(module):
    """``__all__``, or for a page of imports the names that are imported under their own name."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    tree = ast.parse(inspect.getsource(module))
    aliases = [
        alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    return [alias.name for alias in aliases if alias.asname == alias.name]


def imports(path):
    """Absolute names of the modules that a file of the repository imports, wherever it does so."""
    package = ["numden", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_in(name, module):
    return name == module or name.startswith(f"{module}.")


def importers(modules, paths):
    """``file: module`` for each import of one of ``modules`` or of what is in them."""
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in paths
        for name in imports(path)
        if any(is_in(name, module) for module in modules)
    ]


def sources(part):
    return [path for path in SOURCES if path.parent.name == part]


@pytest.mark.parametrize("name", MODULES)
def test_each_module_says_what_is_public(name):
    module = importlib.import_module(name)
    assert module.__doc__, "a module has a docstring"
    names = public_names(module)
    assert names, "a module has __all__, or imports names as themselves"
    assert len(names) == len(set(names))
    missing = [each for each in names if not hasattr(module, each)]
    assert missing == []


@pytest.mark.parametrize("name", MODULES)
def test_each_public_function_and_class_has_a_docstring(name):
    module = importlib.import_module(name)
    values = {each: getattr(module, each) for each in public_names(module)}
    bare = [each for each, value in values.items() if not documented(value)]
    assert bare == []


def documented(value):
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return True
    generated = inspect.isclass(value) and (value.__doc__ or "").startswith(f"{value.__name__}(")
    return bool(value.__doc__) and not generated


def test_the_root_serves_its_parts():
    numden = importlib.import_module("numden")
    assert sorted(numden.__all__) == sorted(PARTS)
    for part in PARTS:
        assert getattr(numden, part) is importlib.import_module(f"numden.{part}")
    with pytest.raises(AttributeError, match="module 'numden' has no attribute 'nothing'"):
        numden.nothing  # noqa: B018


def loaded_after(statement):
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


HEAVY = (
    "typer",
    "rich",
    "matplotlib",
    "transformers",
    "hypothesis",
    "pytest",
    "safetensors",
    "tokenizers",
)


def test_importing_pure_loads_nothing_heavy():
    torch_alone = loaded_after("import torch, optree")
    added = loaded_after("import numden, numden.pure") - torch_alone
    assert "numden.pure.terms" in added
    assert [name for name in added if is_in(name, "torch.distributed")] == []
    assert [name for name in added for heavy in HEAVY if is_in(name, heavy)] == []
    assert [name for name in added for part in PARTS[1:] if is_in(name, f"numden.{part}")] == []


def test_importing_the_root_loads_no_torch():
    assert "torch" not in loaded_after("import numden")


def test_laws_need_no_hypothesis():
    assert "hypothesis" not in loaded_after("from numden.property_tests import laws, LawViolation")


def test_imports_are_seen():
    # The tests below pass when nothing is found, so see that there is something to find.
    assert importers(["optree"], [ROOT / "pure/tree.py"]) == ["pure/tree.py: optree"]
    assert importers(["numden.pure"], [ROOT / "pure/terms.py"])
    assert importers(["numden.property_tests.laws"], [ROOT / "property_tests/__init__.py"])
    assert len(SOURCES) > 20


@pytest.mark.parametrize("part", ["pure", "models"])
def test_no_torch_distributed_in(part):
    files = [path for path in sources(part) if path.name != "cli.py"]
    assert importers(["torch.distributed"], files) == []
    assert [str(path) for path in files if names_torch_distributed(path)] == []


def names_torch_distributed(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(ast.unparse(n) == "torch.distributed" for n in nodes if isinstance(n, ast.Attribute))


def test_torch_distributed_is_imported_as_c10d():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                aliases = [a.asname for a in node.names if a.name == "torch.distributed"]
                assert set(aliases) <= {"c10d"}, path


def test_only_tree_imports_optree():
    assert importers(["optree"], [p for p in SOURCES if p != ROOT / "pure/tree.py"]) == []


@pytest.mark.parametrize(
    ("part", "others"),
    [
        ("pure", ["dist", "models", "property_tests"]),
        ("dist", ["models", "property_tests"]),
        ("models", ["dist", "property_tests"]),
    ],
)
def test_dependencies_point_one_way(part, others):
    files = [path for path in sources(part) if path.relative_to(ROOT) != Path("models/cli.py")]
    assert importers([f"numden.{other}" for other in others], files) == []


def test_nothing_imports_examples_or_a_bare_folder():
    tests = sorted((ROOT / "property_tests/suite").glob("*.py"))
    assert importers(["examples", *PARTS], [*SOURCES, *tests]) == []


def test_parts_refer_to_each_other_by_relative_imports():
    for path in SOURCES:
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
        assert [n.module for n in nodes if not n.level and is_in(str(n.module), "numden")] == [], (
            path
        )


def test_source_folder_dist_is_not_ignored():
    # Build tools leave a .gitignore with `*` in dist/, and new source files vanish from sight.
    assert not (ROOT / "dist/.gitignore").exists()
    assert [path.name for path in (ROOT / "dist").iterdir() if path.suffix in (".whl", ".gz")] == []
