"""Time and peak memory of variants of one computation, measured in turn so that ratios hold."""

import gc
import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

Variants = dict[str, Callable[[], Any]]


def seconds(variants: Variants, *, rounds: int, label: str) -> dict[str, list[float]]:
    """Run the variants A B C, A B C, ... after a round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in track(range(rounds + 1), description=label):
        for name, run in variants.items():
            gc.collect()
            start = time.perf_counter()
            run()
            if round_:
                times[name].append(time.perf_counter() - start)
    return times


def peak_bytes(variants: Variants, *, label: str) -> dict[str, int]:
    """How much memory each variant adds at its peak, each in a fork of its own.

    Call it before torch has used a second thread: OpenMP's threads do not survive a fork.
    """
    return {name: _peak(run) for name, run in track(variants.items(), description=label)}


def _peak(run: Callable[[], Any]) -> int:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run_and_tell, args=(run, sender))
    process.start()
    added = receiver.recv()
    process.join()
    return added


def _run_and_tell(run: Callable[[], Any], sender: Connection) -> None:
    gc.collect()
    # A fork's peak starts from what it has, so the difference is what this run added.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    sender.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


def ratios(times: dict[str, list[float]], base: str) -> dict[str, float]:
    """The median over rounds of each variant's time over that of ``base`` in the same round."""
    return {
        name: median(a / b for a, b in zip(values, times[base], strict=True))
        for name, values in times.items()
    }


def table(title: str, rows: list[dict[str, Any]], console: Console) -> None:
    """Print rows with the same keys."""
    shown = Table(title=title, title_justify="left")
    for key in rows[0]:
        shown.add_column(key, justify="left" if isinstance(rows[0][key], str) else "right")
    for row in rows:
        shown.add_row(*(v if isinstance(v, str) else f"{v:.3g}" for v in row.values()))
    console.print(shown)


def save(name: str, found: Any, folder: Path) -> None:
    """Write ``<name>.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
