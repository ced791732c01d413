import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numden.models.data import collate
from numden.models.features import load_features, save_features
from numden.models.rows import Row
from numden.pure import random


def rows_of(lengths):
    return [
        Row(torch.arange(n) + 10 * i, torch.arange(n) % 2 == 1, 7 * i)
        for i, n in enumerate(lengths)
    ]


def features_of(batch):
    tokens = batch["tokens"]
    wide = torch.stack((tokens, -tokens), dim=-1).bfloat16()
    return {"hidden_states": wide, "target_last_hidden_states": tokens[..., None].float() / 8}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 3))
def test_round_trip_is_each_row_without_padding(tmp_path_factory, lengths, num_rows):
    rows = rows_of(lengths)
    path = tmp_path_factory.mktemp("features") / "rows.safetensors"
    save_features(path, rows, features_of, num_rows=num_rows, pad_id=99)
    loaded = load_features(path)
    assert [row.sample_id for row in loaded] == [row.sample_id for row in rows]
    for row, own in zip(rows, loaded, strict=True):
        assert torch.equal(own.tokens, row.tokens)
        assert torch.equal(own.loss_mask, row.loss_mask)
        expected = features_of({"tokens": row.tokens})
        assert own.features is not None
        assert own.features.keys() == expected.keys()
        for name, feature in expected.items():
            assert own.features[name].dtype == feature.dtype
            assert torch.equal(own.features[name], feature)


def test_several_files_are_one_list(tmp_path):
    rows = rows_of([3, 2, 4])
    save_features(tmp_path / "a", rows[:2], features_of)
    save_features(tmp_path / "b", rows[2:], features_of)
    loaded = load_features(tmp_path / "a", tmp_path / "b")
    assert [row.sample_id for row in loaded] == [0, 7, 14]
    assert collate(loaded, key=random.key(0))["hidden_states"].shape == (3, 4, 2)


def test_an_interrupted_run_leaves_no_file(tmp_path):
    def fails(batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_features(tmp_path / "a", rows_of([3]), fails)
    save_features(tmp_path / "b", rows_of([3]), features_of)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_gradients_are_not_kept(tmp_path):
    weight = torch.ones(1, requires_grad=True)
    save_features(tmp_path / "a", rows_of([3]), lambda b: {"x": b["tokens"][..., None] * weight})
    (row,) = load_features(tmp_path / "a")
    assert row.features is not None
    assert torch.equal(row.features["x"], torch.tensor([[0.0], [1.0], [2.0]]))


def test_features_may_share_memory(tmp_path):
    def features(batch):
        wide = batch["tokens"][..., None].expand(-1, -1, 3)
        return {"x": wide, "y": wide, "z": wide.transpose(0, 1).contiguous().transpose(0, 1)}

    save_features(tmp_path / "a", rows_of([3, 2]), features)
    for row in load_features(tmp_path / "a"):
        assert row.features is not None
        for feature in row.features.values():
            assert torch.equal(feature, row.tokens[:, None].expand(-1, 3))


def test_bad_values(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    with pytest.raises(ValueError, match=r"save_features: there must be rows"):
        save_features(tmp_path / "a", [], features_of)
    for wrong in ({"x": torch.zeros(1, 2)}, {"tokens": torch.zeros(1, 3)}):
        with pytest.raises(ValueError, match=r"here \(1, 3\), and not be called .* of shape \(1, "):
            save_features(tmp_path / "a", rows_of([3]), lambda _, wrong=wrong: wrong)
    with pytest.raises(ValueError, match=r"load_features: there must be a file"):
        load_features()
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match=r"written by save_features, .*foreign has format=None"):
        load_features(tmp_path / "foreign")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"save_features: needs the package safetensors, .*train"):
        save_features(tmp_path / "a", rows_of([3]), features_of)
