"""Folders of checkpoints: which are whole, which is the last, and how one comes to be.

    runs/a/step-00000400            whole: it has a marker, and got this name when all was written
    runs/a/step-00000400+0003       in the middle of the next window, after 3 micro-steps
    runs/a/.unfinished-...          what a killed process leaves; removed by the next save

A folder gets its name by one rename, which the file system does wholly or not at all.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

__all__ = ["begin", "finish", "latest", "marker_of", "require_whole"]

_MARKER = "numden.json"
_UNFINISHED = ".unfinished-"
_NAME = re.compile(r"step-(\d+)(?:\+(\d+))?(?:~(\d+))?")


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The last whole checkpoint in a folder, or None where there is none.

    Args:
        folder: what ``save`` was given; it need not exist.

    Examples:
        >>> latest("no/such/folder")
    """
    return max(_whole(Path(folder)), key=_order, default=None)


def begin(folder: Path, step: int, num_micro_steps: int | None) -> tuple[Path, Path]:
    """Make a folder to write into; that folder, and the name that it is to get."""
    folder.mkdir(parents=True, exist_ok=True)
    for rubbish in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(rubbish)
    name = f"step-{step:08}" + ("" if num_micro_steps is None else f"+{num_micro_steps:04}")
    # A checkpoint of the same step stays until this one is whole.
    again = [_order(path)[2] for path in _whole(folder) if path.name.partition("~")[0] == name]
    name += f"~{max(again) + 1}" if again else ""
    unfinished = folder / f"{_UNFINISHED}{name}"
    unfinished.mkdir()
    return unfinished, folder / name


def finish(unfinished: Path, path: Path, marker: Any, keep: int | None) -> None:
    """Call what was written whole, and remove all but the last ``keep``."""
    with open(unfinished / _MARKER, "w") as file:
        json.dump(marker, file)
        file.flush()
        os.fsync(file.fileno())
    _sync(unfinished)
    unfinished.rename(path)
    _sync(path.parent)
    older = sorted(_whole(path.parent), key=_order)
    for each in older[: len(older) - keep] if keep else []:
        # So that one killed while it is removed is not taken for a whole one.
        each.rename(unfinished)
        shutil.rmtree(unfinished)


def require_whole(path: Path) -> Path:
    """``path`` itself if it is a whole checkpoint, else the last one in it.

    Raises:
        FileNotFoundError: neither is there.
    """
    found = path if (path / _MARKER).is_file() else latest(path)
    if found is None:
        inside = sorted(each.name for each in path.iterdir()) if path.is_dir() else "no folder"
        raise FileNotFoundError(
            f"load: path must be a whole checkpoint or a folder with one, got {str(path)!r} with "
            f"{inside or 'nothing in it'}. Give the folder that save was given."
        )
    return found


def marker_of(path: Path) -> Any:
    """What ``finish`` wrote about a checkpoint."""
    return json.loads((path / _MARKER).read_text())


def _whole(folder: Path) -> list[Path]:
    return [
        path
        for path in (folder.iterdir() if folder.is_dir() else [])
        if _NAME.fullmatch(path.name) and (path / _MARKER).is_file()
    ]


def _order(path: Path) -> tuple[int, int, int]:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    step, micro_step, again = (int(number or 0) for number in found.groups())
    return step, micro_step, again


def _sync(folder: Path) -> None:
    """Make names durable, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
