"""What ``numden train`` keeps in its output folder to go on from, beside ``dist``'s checkpoints."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as c10d

from ...dist import Record
from ..train_config import TrainConfig

__all__ = ["checkpoints_of", "records_before", "writer"]


def checkpoints_of(config: TrainConfig, out: Path) -> Path | None:
    """The folder of a run's checkpoints; None where it has none.

    Raises:
        ValueError: the folder has those of a run that would have trained something else.
    """
    if not config.run.save_every:
        return None
    folder = out / "checkpoints"
    known, own = folder / "config.json", _what_is_trained(config)
    if known.exists():
        before = json.loads(known.read_text())
        changed = [name for name in own if before.get(name) != own[name]]
        if changed:
            name = changed[0]
            raise ValueError(
                f"the checkpoints in {folder} are of a run with {name}={before.get(name)!r}, got "
                f"{own[name]!r}. Give another --out, or remove them."
            )
    elif os.environ.get("RANK", "0") == "0":
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = known.with_suffix(".unfinished")  # other ranks may be reading the name
        unfinished.write_text(json.dumps(own, indent=2) + "\n")
        unfinished.replace(known)
    return folder


def _what_is_trained(config: TrainConfig) -> dict[str, Any]:
    """All keys but those that change only where it runs, and what is printed."""
    free = {"ranks", "log_every", "prompts", "new_tokens", "save_every", "keep"}
    named = {
        f"{section}.{key}": value
        for section, keys in asdict(config).items()
        for key, value in keys.items()
        if section != "run" or key not in free
    }
    return json.loads(json.dumps(named))  # as it will be read


def writer(log: Path | None) -> Callable[[Record], None] | None:
    """What appends records to a file, on the first rank, so that a later run can plot them."""
    if log is None or (c10d.is_initialized() and c10d.get_rank()):
        return None
    log.parent.mkdir(parents=True, exist_ok=True)

    def write(record: Record) -> None:
        with open(log, "a") as file:
            file.write(json.dumps(record._asdict()) + "\n")

    return write


def records_before(records: list[Record], log: Path | None) -> list[Record]:
    """What earlier runs logged before the first of ``records``, each step as it was last."""
    if log is None or not log.exists():
        return []
    written = [Record(**json.loads(line)) for line in log.read_text().splitlines()]
    by_step = {record.step: record for record in written}
    first = records[0].step if records else math.inf
    return [by_step[step] for step in sorted(by_step) if step < first]
