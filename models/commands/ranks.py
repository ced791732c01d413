"""Where a command runs: on ranks of this machine, or on those that torchrun started."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from typing import Any

import torch.distributed as c10d
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from ... import dist
from ...pure import tree
from ..module import as_module

__all__ = ["Ranks", "rank_and_number", "sharded"]

_WEEK = 7 * 24 * 3600.0


class Ranks:
    """Runs functions on ranks: forks of this process, or the ranks that torchrun started."""

    def __init__(self, num_ranks: int) -> None:
        self.launched = c10d.is_torchelastic_launched()
        self.num_ranks = int(os.environ["WORLD_SIZE"]) if self.launched else num_ranks

    def __enter__(self) -> "Ranks":
        if self.launched:
            c10d.init_process_group()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.launched:
            c10d.destroy_process_group()

    @property
    def name(self) -> str:
        """What a run on the ranks is called, beside one without ranks."""
        return f"{self.num_ranks} ranks" if self.num_ranks > 1 else "1 rank with FSDP2"

    @property
    def is_first(self) -> bool:
        """Whether this process is to print."""
        return not self.launched or c10d.get_rank() == 0

    def __call__(self, fun: Callable[..., Any], *args: Any) -> list[Any]:
        """``fun(*args)`` on each rank; the results by rank, or under torchrun this rank's alone."""
        if self.launched:
            return [fun(*args)]
        with _sigterm_to_ranks():
            return dist.run_local(fun, self.num_ranks, *args, timeout=_WEEK)


@contextmanager
def _sigterm_to_ranks() -> Iterator[None]:
    """SIGTERM is for the ranks, which stop cleanly; this process then ends by itself."""

    def pass_on(number: int, frame: Any) -> None:
        for process in active_children():
            process.terminate()

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def rank_and_number() -> tuple[int, int]:
    """This rank, and how many there are."""
    return c10d.get_rank(), c10d.get_world_size()


def sharded(params: Any) -> Any:
    """FSDP2 over the params of a model, each block on its own."""
    module = as_module(lambda params: params, tree.map(Tensor.clone, params))
    if "layers" in module:
        for layer in module["layers"]:
            fully_shard(layer)
    return fully_shard(module)
