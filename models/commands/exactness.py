"""The exactness receipt of ``numden train``, with ranks."""

import re
from typing import Any

from torch import Tensor

from ... import dist
from ...pure import WindowGrad, tree
from .. import job
from ..receipt import receipt
from .ranks import Ranks, rank_and_number, sharded
from .setup import Models, Setup

__all__ = ["receipt_on_ranks"]


def receipt_on_ranks(
    setup: Setup, models: Models, params: Any, on_ranks: Ranks
) -> dict[str, dict[str, float]]:
    """``receipt`` of the drafter's first window, of which ranks compute one row."""
    models, params = tree.map(Tensor.double, (models, params))
    window = next(job.drafter_windows(*setup, models.target))
    config, drafter = setup.config, setup.drafter
    loss_fn = job.drafter_loss(config, drafter, models.frozen)
    objective = job.drafter_objective(config, drafter, config.drafter.num_windows)
    shared = on_ranks(_grad_on_ranks, loss_fn, objective, params, window)[0]
    return receipt(loss_fn, objective, params, window, {f"{on_ranks.name} x ragged": shared})


def _grad_on_ranks(loss_fn: Any, objective: Any, params: Any, window: list[Any]) -> WindowGrad:
    """The gradient of a window dealt unevenly: rank r has about r + 1 shares of it."""
    rank, num_ranks = rank_and_number()
    total = num_ranks * (num_ranks + 1) // 2
    bounds = [len(window) * r * (r + 1) // 2 // total for r in range(num_ranks + 1)]
    share = window[bounds[rank] : bounds[rank + 1]]
    module = sharded(params)
    result = dist.window_grad(loss_fn, objective)(module, share)
    whole = dist.gather(result.grads)
    # The module's parameters are named by the places that the leaves have in the params.
    places = [re.sub(r"\['?(.+?)'?\]", r".\1", name)[1:] for name in tree.names(params)]
    leaves = [whole[place] for place in places]
    return result._replace(grads=tree.unflatten(tree.structure(params), leaves))
