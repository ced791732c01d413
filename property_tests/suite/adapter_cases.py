"""A module with one weight, worlds to try steps on, and what is right there."""

import torch
from torch import nn

from numden.property_tests.worlds.problems import token_batch
from numden.property_tests.worlds.world import World

PARAMS = {"w": torch.tensor([2.0], dtype=torch.float64)}

LONG, SHORT, NONE = [[2.0, 2.0, 2.0]], [[8.0]], [[], []]


def window(*batches):
    return [token_batch(rows) for rows in batches]


ONE_RANK = {
    "ragged": World([window(SHORT, LONG)]),
    "partial": World([window(SHORT, LONG)], accumulation=4),
    "a micro-step without tokens": World([window(SHORT, NONE, LONG)]),
    "one micro-step": World([window([[1.0, 5.0], [3.0]])]),
}
TWO_RANKS = {
    "ragged": World([window(SHORT, LONG), window(LONG, [[1.0]])]),
    "partial": World([window(SHORT), window(LONG)], accumulation=3),
    "a rank without tokens": World([window(SHORT, LONG), window(NONE, NONE)]),
}
UNEVEN = World([window(SHORT, LONG), window(LONG)])


def batches(world):
    return [batch for rank in world.data_ranks for batch in world[rank]]


def mean(world):
    """Sum over sum."""
    num = sum((batch["losses"] * batch["mask"]).sum() for batch in batches(world))
    return num / sum(batch["mask"].sum() for batch in batches(world))


def mean_of_means(world):
    """What the micro-steps of all ranks give as means of their own; empty ones count as 0."""
    means = [
        (batch["losses"] * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)
        for batch in batches(world)
    ]
    return torch.stack(means).mean()


class Probe(nn.Module):
    """``w`` times the sum of the losses of a batch; FSDP2 has no scalar params."""

    def __init__(self, *shape):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape, dtype=torch.float64))

    def forward(self, losses, mask, labels=None, attention_mask=None):
        return self.w.sum() * (losses * mask).sum()


def count(batch):
    return batch["mask"].sum()


def assert_gradient(result, expected):
    # One division and a few additions apart.
    torch.testing.assert_close(result.grads, {"w": expected.reshape(1)}, rtol=1e-14, atol=0)


def assert_updated(result, expected):
    assert_gradient(result, expected)
    torch.testing.assert_close(
        result.params, {"w": 2.0 - expected.reshape(1)}, rtol=1e-14, atol=1e-14
    )
