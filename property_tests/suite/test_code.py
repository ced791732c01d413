"""A value as code is that value again, bit for bit."""

import collections
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numden.property_tests.reports.code import Verbatim, as_call, as_code
from numden.pure import tree


class Pair(NamedTuple):
    x: object
    y: object


NAMES = {"torch": torch, "Pair": Pair, "OrderedDict": collections.OrderedDict}

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    size = torch.Size(shape).numel() * dtype.itemsize
    if dtype == torch.bool:
        data = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        return torch.tensor(data, dtype=dtype).reshape(shape)
    data = draw(st.binary(min_size=size, max_size=size))  # Every NaN there is.
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.tensor([], dtype=dtype)
    return flat.reshape(shape)


def numbers():
    values = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1e30, float("inf")]))
    return st.builds(
        lambda values, dtype: torch.tensor(values, dtype=dtype),
        st.lists(values, max_size=40),
        st.sampled_from(FLOATS),
    )


leaves = st.one_of(
    tensors(),
    numbers(),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=6,
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)
    return type(a) is type(b) and repr(a) == repr(b)


@given(trees)
def test_identity_as_code(value):
    again = eval(as_code(value), dict(NAMES))
    assert tree.structure(again) == tree.structure(value)
    assert all(map(same, tree.leaves(value), tree.leaves(again)))


@given(st.lists(tensors(), max_size=3))
def test_lines_are_short(values):
    # Numbers in the brackets of 3 dims at most: no line needs more than the width.
    assert max(map(len, as_code(values).splitlines())) <= 100


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (torch.tensor([0.1, 2.5]), "torch.tensor([0.1, 2.5], dtype=torch.float32)"),
        (torch.tensor(0.1).bfloat16(), "torch.tensor(0.1, dtype=torch.bfloat16)"),
        (torch.tensor([[1, -100]]), "torch.tensor([[1, -100]])"),
        (torch.tensor(True), "torch.tensor(True)"),
        (torch.zeros(0, 3), "torch.zeros((0, 3), dtype=torch.float32)"),
        (torch.zeros(3, 4, dtype=torch.int64), "torch.zeros((3, 4), dtype=torch.int64)"),
        (torch.ones(9), "torch.ones((9,), dtype=torch.float32)"),
        ({"a": (1,), "b": [float("nan")]}, '{"a": (1,), "b": [float("nan")]}'),
        (Pair(1, "x"), 'Pair(x=1, y="x")'),
        (collections.OrderedDict(a=1), 'OrderedDict({"a": 1})'),
    ],
)
def test_as_code(value, code):
    assert as_code(value) == code


def test_what_does_not_fit_a_line_takes_several():
    batch = {"ids": torch.arange(50).reshape(2, 25) % 10, "y": torch.arange(2.0)}
    assert as_call("laws.purity", Verbatim("loss_fn"), batch) == "\n".join(
        [
            "laws.purity(",
            "    loss_fn,",
            "    {",
            '        "ids": torch.tensor(',
            "            [",
            " " * 16
            + "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4],",
            " " * 16
            + "[5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9],",
            "            ],",
            "        ),",
            '        "y": torch.tensor([0.0, 1.0], dtype=torch.float32),',
            "    },",
            ")",
        ]
    )


def test_many_numbers_fill_lines():
    lines = as_code(torch.arange(60)).splitlines()
    assert lines[1].startswith("    [")
    assert lines[2].startswith("        0, 1, 2, 3,")
    assert len(lines) == 7
