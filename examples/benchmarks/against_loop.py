"""``window_grad`` against the loop that one would write by hand, on a decoder of 20 M weights."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import peak_bytes, ratios, save, seconds, table
from rich.console import Console
from torch import Tensor

from numden.models import decoder
from numden.pure import random, tree, window_grad

CONFIG = decoder.Config(
    vocab_size=8192,
    hidden_size=384,
    intermediate_size=1536,
    num_layers=8,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    tie_embeddings=True,
)
NUM_MICRO_STEPS = 8


def make_window(num_micro_steps: int = NUM_MICRO_STEPS) -> list[dict[str, Tensor]]:
    """Ragged micro-batches of two rows, all tokens supervised."""
    window = []
    for i in range(num_micro_steps):
        length = 96 + 16 * (i % 5)
        tokens = random.bits(random.fold_in(random.key(1), i), (2, length)) % CONFIG.vocab_size
        window.append({"tokens": tokens, "loss_mask": torch.ones_like(tokens).bool()})
    return window


def den(batch: dict[str, Tensor]) -> Tensor:
    """The supervised tokens of a batch."""
    return batch["loss_mask"][:, 1:].sum()


def hand_written(loss_fn: Any, params: Any, window: list[dict[str, Tensor]]) -> Any:
    """The floor: the den is known, each micro-step is divided by it and adds to ``.grad``."""
    leaves = tree.map(lambda leaf: leaf.detach().requires_grad_(), params)
    total = sum(float(den(batch)) for batch in window)
    loss = torch.zeros(())
    for batch in window:
        share = loss_fn(leaves, batch).num / total
        share.backward()
        loss += share.detach()
    return loss, tree.map(lambda leaf: leaf.grad, leaves)


def by_func(loss_fn: Any, params: Any, window: list[dict[str, Tensor]]) -> Any:
    """``torch.func.grad_and_value`` in each micro-step, trees added."""
    total = sum(float(den(batch)) for batch in window)
    step = torch.func.grad_and_value(lambda p, batch: loss_fn(p, batch).num / total)
    grads, loss = step(params, window[0])
    for batch in window[1:]:
        more, share = step(params, batch)
        grads, loss = tree.map(torch.add, grads, more), loss + share
    return loss, grads


def measure(rounds: int, threads: int, out: Path, console: Console) -> None:
    """Measure, print and save."""
    torch.set_num_threads(1)
    loss_fn = partial(decoder.loss_terms, config=CONFIG)
    params, window = decoder.init(CONFIG, random.key(0)), make_window()
    num_params = sum(leaf.numel() for leaf in tree.leaves(params))
    variants = {
        "hand-written loop": partial(hand_written, loss_fn, params, window),
        "window_grad, after": partial(window_grad(loss_fn, plan="after"), params, window),
        "window_grad, before": partial(window_grad(loss_fn, den_fn=den), params, window),
        "torch.func per micro-step": partial(by_func, loss_fn, params, window),
    }
    memory = peak_bytes(variants, label="memory")
    torch.set_num_threads(threads)
    times = seconds(variants, rounds=rounds, label="time")
    base = next(iter(variants))
    slower = ratios(times, base)
    rows = [
        {
            "variant": name,
            "time": slower[name],
            "memory": memory[name] / memory[base],
            "seconds": sorted(times[name])[len(times[name]) // 2],
            "MiB at peak": memory[name] / 2**20,
        }
        for name in variants
    ]
    title = (
        f"{num_params / 1e6:.1f} M parameters, {NUM_MICRO_STEPS} micro-steps: ratios to the loop"
    )
    table(title, rows, console)
    save("window", {"num_params": num_params, "rows": rows, "seconds": times}, out)
