"""What a user names on the command line: ``module_or_file:name``, or a file of tensors."""

import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["TargetError", "load", "load_function", "load_value", "made"]

_TENSOR_FILES = (".pt", ".pth", ".safetensors")


class TargetError(ValueError):
    """What was named cannot be had; the message says why, and what to write."""


def load_function(target: str, option: str) -> Callable[..., Any]:
    """The function, or other callable, that ``target`` names.

    Args:
        target: ``module_or_file:name``.
        option: what to call it in an error, such as ``--loss``.

    Raises:
        TargetError: there is none, or it is not callable.
    """
    value = load(target, option)
    if not callable(value):
        raise TargetError(
            f"{option}: must be a function, got {target!r}, which is of type "
            f"{type(value).__name__}. Name a function."
        )
    return value


def load_value(target: str, option: str) -> Any:
    """The value that ``target`` names: tensors, a module, a Hypothesis strategy.

    A function, or a class, is called without arguments. A file is read: ``.safetensors``, or
    ``.pt`` and ``.pth`` as ``torch.save`` writes tensors.

    Args:
        target: ``module_or_file:name``, or a path to a file of tensors.
        option: what to call it in an error, such as ``--params``.

    Raises:
        TargetError: there is none, the function raises, or the file cannot be read.
    """
    if target.endswith(_TENSOR_FILES):
        return _read(Path(target), option)
    value = load(target, option)
    try:
        return made(value)
    except Exception as error:
        raise TargetError(
            f"{option}: {target} must be a value or a function without arguments, and it raised "
            f"{_told(error)}"
        ) from error


def made(value: Any) -> Any:
    """``value``, or what it returns if it is a function or a class; a module is a value."""
    is_maker = callable(value) and not isinstance(value, nn.Module)
    return value() if is_maker else value


def load(target: str, option: str) -> Any:
    """What ``target``, ``module_or_file:name``, names; the name may have dots.

    A file is imported under its own name, with its folder, or that of its package, on the path:
    so what it defines can be pickled, for steps that start processes.

    Raises:
        TargetError: there is no such file, module or name, or importing it raised.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise TargetError(
            f"{option}: must be module_or_file:name, got {target!r}. "
            "Write my_loss.py:loss_fn or my_package.my_loss:loss_fn."
        )
    is_file = place.endswith(".py") or "/" in place
    module = _import_file(Path(place), option) if is_file else _import_module(place, option)
    return _attribute(module, name, target, option)


def _attribute(module: ModuleType, name: str, target: str, option: str) -> Any:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            close = get_close_matches(part, [each for each in dir(value) if each[0] != "_"], 1)
            hint = f"Did you mean {close[0]!r}?" if close else "Is it defined at the top level?"
            raise TargetError(f"{option}: there is no {part!r} in {target!r}. {hint}")
        value = getattr(value, part)
    return value


def _import_file(path: Path, option: str) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"{option}: there is no file {str(path)!r}. Check the path.")
    path = path.resolve()
    top, names = path.parent, [path.stem]
    while (top / "__init__.py").is_file():
        top, names = top.parent, [top.name, *names]
    _put_on_path(top)
    name = ".".join(names)
    if name in sys.modules and not _is_of(sys.modules[name], path):
        name = f"numden_target_{path.stem}"  # a file called random.py
        return _run_file(path, name, option)
    return _guarded(lambda: import_module(name), str(path), option)


def _import_module(name: str, option: str) -> ModuleType:
    _put_on_path(Path.cwd())
    try:
        return _guarded(lambda: import_module(name), name, option)
    except TargetError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{name}.".startswith(f"{cause.name}."):
            raise TargetError(
                f"{option}: there is no module {cause.name!r}. For a file write path/to/file.py."
            ) from cause
        raise


def _run_file(path: Path, name: str, option: str) -> ModuleType:
    loader = SourceFileLoader(name, str(path))
    spec = spec_from_file_location(name, path, loader=loader)
    assert spec
    module = sys.modules[name] = module_from_spec(spec)
    _guarded(lambda: loader.exec_module(module), str(path), option)
    return module


def _guarded(run: Callable[[], Any], what: str, option: str) -> Any:
    try:
        return run()
    except (Exception, SystemExit) as error:
        raise TargetError(f"{option}: importing {what} raised {_told(error)}") from error


def _told(error: BaseException) -> str:
    """An exception in a line, with the last place that is not of the import machinery."""
    said = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    own = [frame for frame in frames if frame.filename != __file__]
    return f"{said} ({own[-1].filename}:{own[-1].lineno})" if own else said


def _is_of(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path


def _put_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _read(path: Path, option: str) -> Any:
    if not path.is_file():
        raise TargetError(f"{option}: there is no file {str(path)!r}. Check the path.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        said = f"{type(error).__name__}: {str(error).partition('. ')[0]}"  # torch's go on and on
        raise TargetError(
            f"{option}: {path} must be a file of tensors, and reading it raised {said}. "
            "Name a function that reads it: my_file.py:function."
        ) from error
