"""Values as Python that rebuilds them, to paste a failing example into a file."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Verbatim", "as_call", "as_code"]

WIDTH = 100


class Verbatim(NamedTuple):
    """Code that stands as it is, such as the name of a variable."""

    code: str


def as_code(value: Any) -> str:
    """An expression that rebuilds a pytree of tensors, in lines of at most 100 columns if it can.

    Tensors come back with every bit, the dtype and the device; whether they require grad does not.
    It needs the name ``torch``, and those of the classes of tuples and dicts with a class of
    their own. Leaves of other kinds are written as their ``repr``.

    Examples:
        >>> print(as_code({"x": torch.tensor([0.1, -0.0]), "n": [1, None]}))
        {"x": torch.tensor([0.1, -0.0], dtype=torch.float32), "n": [1, None]}
    """
    return _lines(_part(value), 0)


def as_call(function: str, *args: Any, **options: Any) -> str:
    """The call of ``function``, its arguments as code.

    Examples:
        >>> print(as_call("laws.purity", Verbatim("loss_fn"), {"x": torch.tensor(1)}, n=2))
        laws.purity(loss_fn, {"x": torch.tensor(1)}, n=2)
    """
    return _lines(_call(function, args, options), 0)


class _Group(NamedTuple):
    """Brackets around parts: in one line if that fits, else with lines of their own."""

    start: str
    parts: list["str | _Group"]
    end: str
    filled: bool = False  # as many parts in a line as fit, not one


_Part = str | _Group


def _part(value: Any) -> _Part:
    if isinstance(value, Verbatim):
        return value.code
    if isinstance(value, Tensor):
        return _tensor(value.detach())
    if isinstance(value, tuple) and (fields := getattr(value, "_fields", None)):
        return _call(type(value).__name__, (), dict(zip(fields, value, strict=True)))
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, list):
        return _Group("[", [_part(each) for each in value], "]")
    if isinstance(value, tuple):  # A comma makes one element a tuple.
        return _Group("(", [_part(each) for each in value], ",)" if len(value) == 1 else ")")
    return _atom(value)


def _mapping(value: Mapping[Any, Any]) -> _Group:
    items = [_prefixed(f"{_atom(key)}: ", _part(each)) for key, each in value.items()]
    group = _Group("{", items, "}")
    return group if type(value) is dict else _Group(f"{type(value).__name__}(", [group], ")")


def _call(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> _Group:
    named = [_prefixed(f"{key}=", _part(value)) for key, value in options.items()]
    return _Group(f"{name}(", [*map(_part, args), *named], ")")


def _prefixed(prefix: str, part: _Part) -> _Part:
    return prefix + part if isinstance(part, str) else part._replace(start=prefix + part.start)


def _atom(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, str) and '"' not in repr(value):
        return f'"{repr(value)[1:-1]}"'
    return repr(value)


def _tensor(value: Tensor) -> _Group:
    options = {"dtype": Verbatim(str(value.dtype))}
    if value.device.type != "cpu":
        options["device"] = Verbatim(f'"{value.device}"')
    value = value.cpu()
    if value.numel() > 8 or not value.numel():
        for name in ("zeros", "ones"):
            if _same_bits(getattr(torch, name)(value.shape, dtype=value.dtype), value):
                return _call(f"torch.{name}", [tuple(value.shape)], options)
    numbers = _numbers(value.reshape(-1))
    if not _same_bits(torch.tensor(numbers, dtype=value.dtype).reshape(value.shape), value):
        return _from_bits(value)
    if value.dtype in (torch.bool, torch.int64):  # What Python's own numbers become.
        del options["dtype"]
    call = _call("torch.tensor", [], options)
    return call._replace(parts=[_nested([*map(_atom, numbers)], value.shape), *call.parts])


def _from_bits(value: Tensor) -> _Group:
    """For NaNs that are not the usual one."""
    wide = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    # A tensor of bits with one dim, since no other can be viewed as a dtype of another kind.
    bits = _tensor(value.contiguous().view(wide[value.element_size()]))
    return bits._replace(end=f").view({value.dtype})")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = (each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(a, b)


def _numbers(flat: Tensor) -> list[Any]:
    """The elements, floats with as few digits as bring them back."""
    numbers = flat.tolist()
    left = list(range(len(numbers)))
    if not flat.is_floating_point() or flat.dtype == torch.float64:
        return numbers
    for digits in range(1, 10):
        tried = [float(f"{numbers[i]:.{digits}g}") for i in left]
        back = torch.tensor(tried, dtype=flat.dtype) == flat[left]
        for i, number, same in zip(list(left), tried, back.tolist(), strict=True):
            if same:
                numbers[i] = number
                left.remove(i)
    return numbers


def _nested(atoms: list[str], shape: Sequence[int]) -> _Part:
    if not shape:
        return atoms[0]
    if len(shape) == 1:
        return _Group("[", list(atoms), "]", filled=True)
    size = len(atoms) // shape[0]
    rows = [_nested(atoms[i : i + size], shape[1:]) for i in range(0, len(atoms), size)]
    return _Group("[", rows, "]")


def _lines(part: _Part, indent: int, after: int = 0) -> str:
    """``part`` as code that starts at column ``indent``, with ``after`` columns to follow it."""
    flat = _flat(part)
    if isinstance(part, str) or not part.parts or indent + len(flat) + after <= WIDTH:
        return flat
    inner = indent + 4
    if part.filled:
        room = WIDTH - inner
        lines = textwrap.wrap(", ".join(map(_flat, part.parts)) + ",", room, break_long_words=False)
    else:
        lines = [f"{_lines(each, inner, 1)}," for each in part.parts]
    start, end = " " * inner, " " * indent
    body = "\n".join(f"{start}{line}" for line in lines)
    return f"{part.start}\n{body}\n{end}{part.end.removeprefix(',')}"


def _flat(part: _Part) -> str:
    return (
        part
        if isinstance(part, str)
        else f"{part.start}{', '.join(map(_flat, part.parts))}{part.end}"
    )
