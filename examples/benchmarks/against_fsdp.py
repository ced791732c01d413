"""FSDP2 by ``window_grad`` against the loop that one would write by hand, on two ranks.

The loop knows the den of the window before, has nothing to check, and reduces in the last backward
pass. Beside it the same model as a tree of shards, which are gathered once per window or in each
micro-step.
"""

import ctypes
import gc
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from measure import save, table
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from numden import dist
from numden.dist import run_local
from numden.models import decoder
from numden.models.module import as_module, call
from numden.pure import random, tree

NUM_RANKS, NUM_MICRO_STEPS = 2, 8
PEAK_ROUNDS = 3
CONFIG = decoder.Config(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    tie_embeddings=True,
)
LOOP = "hand-written FSDP2 loop"
LOSS = partial(call, partial(decoder.loss_terms, config=CONFIG))
MODEL = partial(decoder.loss_terms, config=CONFIG)

Batch = dict[str, Tensor]


class Found(NamedTuple):
    """What one rank found, by variant.

    Attributes:
        seconds: of each round.
        peaks: bytes that a window adds at its peak.
        apart: the distance of gradients from those of the loop, as a share of their length.
    """

    seconds: dict[str, list[float]]
    peaks: dict[str, float]
    apart: dict[str, float]


def make_window(rank: int) -> list[Batch]:
    """Ragged micro-batches of two rows, all tokens supervised."""
    window = []
    for i in range(NUM_MICRO_STEPS):
        key = random.fold_in(random.key(rank), i)
        tokens = random.bits(key, (2, 96 + 16 * ((i + rank) % 5))) % CONFIG.vocab_size
        window.append({"tokens": tokens, "loss_mask": torch.ones_like(tokens).bool()})
    return window


def den(window: list[Batch]) -> int:
    """The supervised tokens of a window."""
    return sum(int(batch["loss_mask"][:, 1:].sum()) for batch in window)


def sharded_module(params: Any) -> Any:
    """Each layer a unit, and the embedding with the rest."""
    module = as_module(MODEL, params)
    for layer in module["layers"]:
        fully_shard(layer)
    return fully_shard(module)


def by_hand(module: Any, window: list[Batch], total: int) -> Any:
    """The floor: each micro-step is divided by a den that is known, and the last one reduces."""
    loss = torch.zeros(())
    for i, batch in enumerate(window):
        module.set_requires_gradient_sync(i == len(window) - 1)
        share = LOSS(module, batch).num / total
        share.backward()
        loss += share.detach()
    c10d.all_reduce(loss)
    grads = {name: param.grad for name, param in module.named_parameters()}
    module.zero_grad()
    return loss, grads


def variants(window: list[Batch]) -> dict[str, Any]:
    """All ways to the gradient, each with parameters of its own."""
    params = decoder.init(CONFIG, random.key(0))
    mesh = init_device_mesh("cpu", (c10d.get_world_size(),))
    total = den([batch for rank in range(NUM_RANKS) for batch in make_window(rank)])
    copy = partial(tree.map, Tensor.clone, params)
    shards = dist.shard(params, mesh)
    grad = partial(dist.window_grad, LOSS, plan="after", mesh=mesh)
    module, plain = sharded_module(copy()), dist.sum_gradients(sharded_module(copy()))
    return {
        LOOP: partial(by_hand, plain, window, total),
        "window_grad, FSDP2": partial(grad(), module, window),
        "window_grad, FSDP2, equal_steps": partial(grad(equal_steps=True), module, window),
        'shards, gather="window"': partial(grad(), shards, window),
        'shards, gather="micro-step"': partial(grad(gather="micro-step"), shards, window),
    }


def on_rank(rounds: int) -> Found:
    """All variants in turn, after a round that does not count."""
    runs = variants(make_window(c10d.get_rank()))
    grads = {name: _flat(run()[1]) for name, run in runs.items()}
    apart = {name: float((g - grads[LOOP]).norm() / g.norm()) for name, g in grads.items()}
    del grads
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    peaks: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(_seconds(run))
            if round_ < PEAK_ROUNDS:
                peaks[name].append(_peak(run))
    return Found(seconds, {name: median(found) for name, found in peaks.items()}, apart)


def _flat(grads: Any) -> Tensor:
    """All gradients in one, in the order of their names."""
    named = sorted(zip(tree.names(grads), tree.leaves(grads), strict=True))
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for _, g in named]
    return torch.cat([g.reshape(-1) for g in whole])


def _seconds(run: Any) -> float:
    gc.collect()
    c10d.barrier()
    start = time.perf_counter()
    run()
    c10d.barrier()
    return time.perf_counter() - start


def _peak(run: Any) -> float:
    """Bytes at the peak over those before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before hides what is needed now
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from what there is
    before = _status("VmRSS")
    c10d.barrier()
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    """Bytes, of a line of what Linux says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(rounds: int, out: Path, console: Console) -> None:
    """Measure, print and save."""
    torch.set_num_threads(1)
    with console.status(f"{rounds} rounds on {NUM_RANKS} ranks"):
        found = run_local(on_rank, NUM_RANKS, rounds, timeout=900)
    num_params = sum(leaf.numel() for leaf in tree.leaves(decoder.init(CONFIG, random.key(0))))
    what = f"{num_params / 1e6:.1f} M parameters, {NUM_MICRO_STEPS} ragged micro-steps"
    rows = [_row(name, found) for name in found[0].seconds]
    table(f"FSDP2 on {NUM_RANKS} ranks, {what}: ratios to the loop", rows, console)
    save("fsdp", {"num_params": num_params, "ranks": [each._asdict() for each in found]}, out)


def _row(name: str, found: list[Found]) -> dict[str, Any]:
    """Time as the first rank saw it, from barrier to barrier; memory of the rank with most."""
    times = found[0].seconds
    by_round = [a / b for a, b in zip(times[name], times[LOOP], strict=True)]
    peak, of_loop = (max(each.peaks[n] for each in found) for n in (name, LOOP))
    return {
        "variant": name,
        "time": median(by_round),
        "least": min(by_round),
        "most": max(by_round),
        "memory": peak / of_loop,
        "MiB": peak / 2**20,
        "gradient apart": max(each.apart[name] for each in found),
    }
