"""Counts of what costs a micro-step most: collectives, and reads that make the host wait.

Both counters see the forward and the backward pass, and what tensor subclasses (DTensor, the
results of functional collectives) do inside. They look at operators, not at clocks, so that a
CPU run says what a GPU run would do.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Calls", "count_collectives", "count_host_syncs"]


class Calls(Counter[str]):
    """How often each operator ran, by its name.

    Attributes:
        places: the line of code behind each call, in the order of the calls; a call that the
            backward pass makes has the line that started the backward pass.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.places: list[str] = []

    def record(self, name: str) -> None:
        """Count one call, with the line it comes from."""
        self[name] += 1
        self.places.append(f"{name} at {_place()}")


@contextmanager
def count_collectives() -> Iterator[Calls]:
    """Count the collectives that are issued inside the ``with`` block, point-to-point included.

    It sees ``torch.distributed`` calls, functional collectives, and those of DDP, FSDP2 and
    DTensor. Waiting for a result is not a call.

    Yields:
        ``Calls``, by operator: ``c10d.allreduce_``, ``_c10d_functional.all_reduce``, …

    Examples:
        >>> with count_collectives() as calls:
        ...     torch.ones(3).sum()
        tensor(3.)
        >>> calls.total()
        0
    """
    calls = Calls()
    with _OperatorCounter(calls, _is_collective):
        yield calls


@contextmanager
def count_host_syncs() -> Iterator[Calls]:
    """Count the reads inside the ``with`` block that make the host wait for the device.

    These are ``item()``, ``bool(tensor)`` and ``tensor[i]`` with a tensor index
    (``aten._local_scalar_dense``), results whose shape depends on values (``nonzero``,
    ``x[mask]``, ``masked_select``, ``unique``, ``repeat_interleave`` without ``output_size``,
    ``bincount``), ``torch.equal``, copies to the host, and ``tolist()``, ``numpy()`` and
    ``cpu()``, also of tensors that live on the host already: what they do on a GPU matters.

    Yields:
        ``Calls``, by operator.

    Examples:
        >>> with count_host_syncs() as calls:
        ...     x = torch.tensor([1.0, -2.0])
        ...     positive = x[x > 0].sum() if x.any() else 0.0
        >>> dict(calls)
        {'aten._local_scalar_dense': 1, 'aten.index': 1}
    """
    calls = Calls()
    with _OperatorCounter(calls, _is_host_sync), _HostMethodCounter(calls):
        yield calls


class _OperatorCounter(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, calls: Calls, is_counted: Callable[[OpOverload, Any, Any], bool]):
        super().__init__()
        self.calls = calls
        self.is_counted = is_counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for t in types):
            return NotImplemented  # A subclass takes itself apart; its inner calls come back here.
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and self.is_counted(func, args, kwargs):
            self.calls.record(str(func.overloadpacket))
        return func(*args, **kwargs)


_COLLECTIVE_NAMESPACES = {"c10d", "_c10d_functional", "_dtensor", "symm_mem"}
_NO_COLLECTIVES = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}


def _is_collective(op: OpOverload, args: Any, kwargs: Any) -> bool:
    return op.namespace in _COLLECTIVE_NAMESPACES and _name(op) not in _NO_COLLECTIVES


_READS = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
}
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}


def _is_host_sync(op: OpOverload, args: Any, kwargs: Any) -> bool:
    name = _name(op)
    if op.namespace != "aten":
        return False
    if name in _INDEXING:
        return _indexes_by_mask(args)
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("_to_copy", "copy_"):
        return _copies_to_host(name, args, kwargs)
    return name in _READS


def _indexes_by_mask(args: Any) -> bool:
    # Writing a number through one mask is a masked_fill, on which nobody waits.
    is_fill = len(args) > 2 and args[2].numel() == 1 and len(args[1]) == 1
    masks = (torch.bool, torch.uint8)
    return not is_fill and any(index is not None and index.dtype in masks for index in args[1])


def _copies_to_host(name: str, args: Any, kwargs: Any) -> bool:
    if name == "copy_":
        target, source = args[0].device, args[1].device
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    else:
        target, source = kwargs.get("device"), args[0].device
        waits = not kwargs.get("non_blocking")
    to_host = target is not None and target.type == "cpu"
    return to_host and source.type not in ("cpu", "meta") and waits


class _HostMethodCounter(TorchFunctionMode):
    """Sees what a host tensor hands over without an operator."""

    def __init__(self, calls: Calls):
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_METHODS and args[0].device.type == "cpu":
            self.calls.record(f"Tensor.{func.__name__}")
        elif func is torch.tensor and _holds_tensor(args[0] if args else None):
            self.calls.record("torch.tensor of tensors")
        return func(*args, **(kwargs or {}))


_HOST_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu, Tensor.__repr__}


def _holds_tensor(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return any(_holds_tensor(each) for each in data)
    return isinstance(data, Tensor)


def _name(op: OpOverload) -> str:
    return op.overloadpacket.__name__


_TORCH = str(Path(torch.__file__).parent)
_HERE = Path(__file__).parent


def _place() -> str:
    for frame, line in traceback.walk_stack(None):
        filename = frame.f_code.co_filename
        if not filename.startswith(_TORCH) and Path(filename).parent != _HERE:
            return f"{filename}:{line}"
    return "an unknown line"
