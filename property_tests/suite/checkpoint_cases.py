"""Runs that are stopped and resumed, for ranks."""

import torch
import torch.distributed as c10d
from dist_cases import DEALS, mean_loss, wrapped

from numden import dist
from numden.pure import optim, random, tree

ADAM = optim.from_torch(torch.optim.AdamW, lr=0.01)
MOMENTUM = optim.from_torch(torch.optim.SGD, lr=0.125, momentum=0.5)
EXTRA = {"position": {"epoch": 2, "cursor": 31}, "key": random.key(7), "rate": 0.1, "warm": True}
BLANK = {
    "position": {"epoch": 0, "cursor": 0},
    "key": random.key(0),
    "rate": 0.0,
    "warm": False,
}
DEAL_ORDER = ("ragged", "even", "a rank without supervised rows", "even")


def window(number):
    """This rank's share of a window that is the same for any number of ranks."""
    first, second = DEALS[DEAL_ORDER[number]]
    if c10d.get_world_size() == 1:
        return first + second
    return (first, second)[c10d.get_rank()]


def start(kind):
    params, on = wrapped(kind)
    step = dist.train_step(dist.window_grad(on(mean_loss)), ADAM)
    return dist.init_state(params, ADAM), step


def other_values(state):
    """The same state with nothing in it that could be right by chance."""
    params = state.params
    with torch.no_grad():
        for leaf in params.parameters() if hasattr(params, "parameters") else tree.leaves(params):
            leaf.fill_(7.0)
    return state


def train(kind, folder, numbers, *, resume=False):
    """Train on windows, save after the last; what there is in the end, whole and by rank."""
    state, step = start(kind)
    if resume:
        state, extra = dist.load(folder, other_values(state), extra=BLANK)
        assert extra.keys() == EXTRA.keys()
        assert torch.equal(extra["key"], EXTRA["key"])
        assert {**extra, "key": 0} == {**EXTRA, "key": 0}
        assert isinstance(extra["warm"], bool)
        assert state.step == numbers[0]
    for number in numbers:
        state, _ = step(state, window(number))
    dist.save(folder, state, extra=EXTRA)
    return whole(state)


def whole(state):
    """All tensors and numbers of a state, gathered."""
    params = state.params
    if hasattr(params, "state_dict"):
        params = dict(params.state_dict())
    leaves = tree.leaves(dist.gather((params, state.opt_state, state.step)))
    return [torch.as_tensor(leaf).detach().clone() for leaf in leaves]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def apart(a, b):
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True))
