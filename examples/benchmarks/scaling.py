"""The cost of a window against its number of micro-steps, and against its number of terms."""

from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from against_loop import make_window
from measure import save, seconds, table
from rich.console import Console
from torch import Tensor

from numden.models import decoder
from numden.pure import LossTerms, random, term_mean, window_grad

CONFIG = decoder.Config(
    vocab_size=1024,
    hidden_size=192,
    intermediate_size=512,
    num_layers=4,
    num_heads=3,
    num_kv_heads=1,
    head_dim=64,
    tie_embeddings=True,
)


def terms_of(num_terms: int, params: Any, batch: dict[str, Tensor]) -> LossTerms:
    """The cross-entropy as ``num_terms`` terms, each with a share of it, and one den."""
    terms = decoder.loss_terms(params, batch, CONFIG)
    shares = {f"term {i}": terms.num * ((i + 1) / num_terms) for i in range(num_terms)}
    return LossTerms(shares, terms.den)


def measure(rounds: int, threads: int, out: Path, console: Console) -> None:
    """Measure, print and save."""
    torch.set_num_threads(threads)
    params = decoder.init(CONFIG, random.key(0))
    grad = window_grad(partial(terms_of, 1), plan="after")
    equal = [
        {
            name: field % CONFIG.vocab_size if name == "tokens" else field
            for name, field in b.items()
        }
        for b in make_window(1) * 32
    ]
    by_steps = {n: partial(grad, params, equal[:n]) for n in (1, 2, 4, 8, 16, 32)}
    by_terms = {
        n: partial(window_grad(partial(terms_of, n), term_mean(), plan="after"), params, equal[:8])
        for n in range(1, 9)
    }
    steps = _medians(by_steps, rounds, "micro-steps")
    terms = _medians(by_terms, rounds, "terms")
    rows = [
        {"micro-steps": str(n), "seconds": t, "seconds for each": t / n} for n, t in steps.items()
    ]
    table("Against the number of micro-steps: a straight line", rows, console)
    rows = [{"terms": str(n), "seconds": t, "to 1 term": t / terms[1]} for n, t in terms.items()]
    table("Against the number of terms: flat", rows, console)
    save("scaling", {"micro_steps": steps, "terms": terms}, out)


def _medians(variants: dict[int, Any], rounds: int, label: str) -> dict[int, float]:
    named = {str(n): run for n, run in variants.items()}
    times = seconds(named, rounds=rounds, label=label)
    return {n: median(times[str(n)]) for n in variants}
