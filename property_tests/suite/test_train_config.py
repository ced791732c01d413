"""The configuration of ``numden train``: strict keys, checked values, and messages that help."""

import dataclasses
import inspect
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from numden.models import train_config
from numden.models.train_config import (
    Data,
    Drafter,
    Run,
    Target,
    TrainConfig,
    load_config,
    with_overrides,
)

SECTIONS = {"data": Data, "target": Target, "drafter": Drafter, "run": Run}
TOML = """
[data]
files = ["a/*.py", "b.py"]
max_length = 64

[drafter]
lr = 1
decay_gamma = 2.5
features = "states"

[run]
seed = 0
"""
EXPECTED = TrainConfig(
    data=Data(files=("a/*.py", "b.py"), max_length=64),
    drafter=Drafter(lr=1.0, decay_gamma=2.5, features="states"),
    run=Run(seed=0),
)


def written(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["c.toml", "c.yaml", "c.yml"])
def test_toml_and_yaml_say_the_same(tmp_path, name):
    table = {"data": {"files": ["a/*.py", "b.py"], "max_length": 64}, "run": {"seed": 0}}
    table["drafter"] = {"lr": 1, "decay_gamma": 2.5, "features": "states"}
    text = TOML if name == "c.toml" else yaml.safe_dump(table)
    config = load_config(written(tmp_path, name, text))
    assert config == EXPECTED
    assert isinstance(config.drafter.lr, float)
    assert isinstance(config.data.files, tuple)


@pytest.mark.parametrize("name", ["c.toml", "c.yaml"])
def test_an_empty_file_is_the_defaults(tmp_path, name):
    assert load_config(written(tmp_path, name, "# nothing\n")) == TrainConfig()


def test_yaml_reads_numbers_without_a_point(tmp_path):
    path = written(tmp_path, "c.yaml", "target: {lr: 3e-4}\ndrafter: {lr: '0.5'}\n")
    config = load_config(path)
    assert (config.target.lr, config.drafter.lr) == (3e-4, 0.5)


def test_overrides_are_values_of_toml_or_text():
    config = with_overrides(
        TrainConfig(),
        [
            "run.seed=3",
            " target.lr = 1e-3",
            'data.files=["a", "b"]',
            "drafter.features = some folder/a=b",
            "run.seed = 4",
        ],
    )
    assert config == TrainConfig(
        data=Data(files=("a", "b")),
        target=Target(lr=1e-3),
        drafter=Drafter(features="some folder/a=b"),
        run=Run(seed=4),
    )
    assert with_overrides(TrainConfig(), ["data.files=src/**/*.py"]).data.files == ("src/**/*.py",)


def test_overrides_come_on_top_of_what_is_there():
    changed = with_overrides(EXPECTED, ["data.max_length=32"])
    assert changed == dataclasses.replace(
        EXPECTED, data=Data(files=("a/*.py", "b.py"), max_length=32)
    )
    assert with_overrides(EXPECTED, []) == EXPECTED


def test_overrides_are_checked_together():
    longer = ["data.max_length=4096", "target.tokens_per_micro_step=4096"]
    assert with_overrides(TrainConfig(), longer) == with_overrides(TrainConfig(), longer[::-1])


ERRORS = {
    "[trains]": "config: there is no key 'trains'. Known: data, target, drafter, run.",
    "[datas]": "config: there is no key 'datas'. Did you mean 'data'?",
    "[run]\nsed = 1": "config: there is no key 'run.sed'. Did you mean 'run.seed'?",
    "[run]\nxyz = 1": "config: there is no key 'run.xyz'. Known: run.ranks, run.seed, "
    "run.max_norm, run.log_every, run.prompts, run.new_tokens, run.save_every, run.keep.",
    "run = 1": "config: run must be a table of keys, got 1.",
    "[run]\nseed = 1.0": "config: run.seed must be int, got 1.0 (float).",
    "[run]\nseed = true": "config: run.seed must be int, got True (bool).",
    "[run]\nseed = '1'": "config: run.seed must be int, got '1' (str).",
    "[target]\nlr = true": "config: target.lr must be float, got True (bool).",
    "[target]\nlr = 'high'": "config: target.lr must be float, got 'high' (str).",
    "[target]\nlr = [1]": "config: target.lr must be float, got [1] (list).",
    "[drafter]\nfeatures = 1": "config: drafter.features must be str, got 1 (int).",
    "[data]\nfiles = 1": "config: data.files must be a list of texts, got 1.",
    "[data]\nfiles = ['a', 1]": "config: data.files must be a list of texts, got ['a', 1].",
    "[run]\nranks = 0": "config: run.ranks must be at least 1, got 0.",
    "[run]\nseed = -1": "config: run.seed must be at least 0, got -1.",
    "[drafter]\nlr = 0": "config: drafter.lr must be positive, got 0.0.",
    "[drafter]\ndecay_gamma = -0.5": "config: drafter.decay_gamma must be positive, got -0.5.",
    "[run]\nmax_norm = nan": "config: run.max_norm must be positive, got nan.",
    "[run]\nmax_norm = inf": "config: run.max_norm must be positive, got inf.",
    "[data]\nmax_length = 1025": "config: target.tokens_per_micro_step must have room for a row of "
    "data.max_length, got 1024 for 1025.",
    "[target]\nnum_layers = 2": "config: drafter.num_target_layers must be at most "
    "target.num_layers, got 3 of 2.",
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors_of_a_file_name_the_key(tmp_path, text):
    with pytest.raises(ValueError, match=r"^config: ") as caught:
        load_config(written(tmp_path, "c.toml", text))
    assert str(caught.value) == ERRORS[text]


@pytest.mark.parametrize("text", ["[1, 2]", "text", "3"])
def test_a_file_must_be_a_table(tmp_path, text):
    with pytest.raises(ValueError, match=r"^config: the file must be a table of keys, got "):
        load_config(written(tmp_path, "c.yaml", text))


def test_a_key_of_yaml_may_be_no_text(tmp_path):
    with pytest.raises(ValueError, match=r"^config: there is no key 1\. Known: data, "):
        load_config(written(tmp_path, "c.yaml", "1: {}"))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.toml", "[run", "c.toml cannot be read: Expected ']'"),
        ("c.yaml", "a: [1\nb: 2", "c.yaml cannot be read: while parsing a flow sequence"),
        ("c.toml", "run = '\xff'", "c.toml cannot be read: 'utf-8' codec"),
    ],
)
def test_a_broken_file_is_named_in_one_line(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"^config: ") as caught:
        load_config(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_kinds_of_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^config: must be a \.toml, \.yaml or \.yml .* c\.json"):
        load_config(written(tmp_path, "c.json", "{}"))


def test_yaml_names_the_package_that_it_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"numden train: needs the package yaml, .*\[train\]"):
        load_config(written(tmp_path, "c.yaml", ""))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=1", "config: an override is section.key=value, got 'seed=1'."),
        ("run.seed", "config: an override is section.key=value, got 'run.seed'."),
        ("run.seed=x", "config: run.seed must be int, got 'x' (str)."),
        ("run.seed=", "config: run.seed must be int, got '' (str)."),
        ("runs.seed=1", "config: there is no key 'runs'. Did you mean 'run'?"),
        ("run.seed.x=1", "config: there is no key 'run.seed.x'. Did you mean 'run.seed'?"),
        ("run.ranks=0", "config: run.ranks must be at least 1, got 0."),
    ],
)
def test_errors_of_overrides_name_the_key(override, said):
    with pytest.raises(ValueError, match=r"^config: ") as caught:
        with_overrides(TrainConfig(), ["run.log_every=1", override])
    assert str(caught.value) == said


def keys():
    return [(s, field.name) for s, kind in SECTIONS.items() for field in dataclasses.fields(kind)]


@pytest.mark.parametrize(("section", "key"), keys())
def test_each_key_can_be_set(tmp_path, section, key):
    default = getattr(getattr(TrainConfig(), section), key)
    value = {int: 2, float: 0.5, str: "text", tuple: ["a"]}[type(default)]
    options = [] if (section, key) != ("target", "num_layers") else ["drafter.num_target_layers=2"]
    small = ["data.max_length=2", *options, f"{section}.{key}={value}"]
    config = with_overrides(TrainConfig(), small)
    assert getattr(getattr(config, section), key) == (("a",) if value == ["a"] else value)


@pytest.mark.parametrize("kind", SECTIONS.values())
def test_each_key_is_documented_in_its_order(kind):
    said = inspect.cleandoc(kind.__doc__).partition("Attributes:\n")[2]
    lines = [line[4:] for line in said.splitlines() if line[:4] == " " * 4 and line[4] != " "]
    assert [line.partition(":")[0] for line in lines] == [f.name for f in dataclasses.fields(kind)]


@given(st.integers(2, 64), st.integers(0, 2**60), st.floats(1e-6, 1e6), st.text("aß /*.-="))
def test_round_trip_of_values(max_length, seed, lr, name):
    overrides = [f"data.max_length={max_length}", f"run.seed={seed}", f"target.lr={lr!r}"]
    config = with_overrides(TrainConfig(), [*overrides, f'data.files=["{name}"]'])
    assert config == TrainConfig(
        data=Data(max_length=max_length, files=(name,)), target=Target(lr=lr), run=Run(seed=seed)
    )


def test_all_sections_are_public():
    assert {kind.__name__ for kind in SECTIONS.values()} < set(train_config.__all__)
