"""Runs that are stopped and resumed, for ranks."""

import os
import signal
from itertools import count

import torch
import torch.distributed as c10d
from dist_cases import CASES, DEALS, WINDOW, mean_loss, wrapped

from numden import dist
from numden.dist.train import trainable
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


def start(kind, loss=mean_loss):
    params, on = wrapped(kind)
    step = dist.train_step(dist.window_grad(on(loss)), ADAM)
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


# --- in the middle of a window -------------------------------------------------------------------


def middle(kind, case):
    params, on = wrapped(kind)
    plan = {"mean": "after", "own dens": "columns"}[case]
    options = {"objective": CASES[case].objective, "plan": plan}
    loss = on(CASES[case].loss)
    return params, dist.accumulator(loss, **options), dist.window_grad(loss, **options)


def shares():
    """How the ranks share the micro-batches of a window."""
    return DEALS["ragged"] if c10d.get_world_size() == 2 else [WINDOW]


def rounds(shares):
    """The micro-batches in the order in which ranks that work side by side have done them."""
    for number in range(max(map(len, shares))):
        yield [share[number] if number < len(share) else None for share in shares]


def updated(result, state):
    params, opt_state = MOMENTUM.update(result.grads, state.opt_state, trainable(state.params))
    return whole(dist.TrainState(params, opt_state, state.step + 1))


def save_in_each_micro_step(kind, case, folder):
    """Save before the window and after each of its micro-steps; the update that it ends in."""
    params, (init, update, finish), grad = middle(kind, case)
    state = dist.init_state(params, MOMENTUM)
    on_rank = dist.gather(params) if kind == "shard" else params
    state = state._replace(carry=init(on_rank))
    paths = [dist.save(folder, state)]
    for batches in rounds(shares()):
        batch = batches[c10d.get_rank()]
        if batch is not None:
            state = state._replace(carry=update(state.carry, on_rank, batch))
        paths.append(dist.save(folder, state))
    ended = updated(finish(state.carry, params), state)
    assert same(ended, updated(grad(params, shares()[c10d.get_rank()]), state))
    return paths, ended


def resume_in_each_micro_step(kind, case, paths, shares):
    """Resume from each, with what was left of the window, dealt out to the ranks there are now."""
    params, (_, update, finish), _ = middle(kind, case)
    found = []
    for done, path in enumerate(paths):
        state, _ = dist.load(path, dist.init_state(params, MOMENTUM))
        left = [share[done:] for share in shares]
        if c10d.get_world_size() != len(shares):
            one_by_one = [batch for share in left for batch in share]
            left = [one_by_one[rank :: c10d.get_world_size()] for rank in range(2)]
        on_rank = dist.gather(state.params) if kind == "shard" else state.params
        carry = state.carry
        for batch in left[c10d.get_rank()]:
            carry = update(carry, on_rank, batch)
        found.append(updated(finish(carry, state.params), state))
    return found


# --- fit -----------------------------------------------------------------------------------------

NUM_WINDOWS = 5


def stream(done=0):
    """The windows of a run after the first ``done``, without end."""
    while True:
        yield window(done % len(DEAL_ORDER))
        done += 1


def fit(
    kind, folder, num_windows=NUM_WINDOWS, *, told=(), windows=stream, loss=mean_loss, **options
):
    """Train; ``told`` is a rank and in which of its windows it gets SIGTERM."""
    state, step = start(kind, loss)

    def watched(state, window):
        if (c10d.get_rank(), state.step) == told:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(state, window)

    before = signal.getsignal(signal.SIGTERM)
    options = {"num_windows": num_windows, "checkpoints": folder, "progress": False, **options}
    state, records = dist.fit(watched, state, windows, log_every=2, **options)
    assert signal.getsignal(signal.SIGTERM) == before
    return whole(state), state.step, [record.step for record in records]


def killed_in_pass(number):
    """The loss, in whose forward pass ``number`` rank 1 is killed."""
    passes = count()

    def loss(predict, batch):
        if c10d.get_rank() == 1 and next(passes) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return mean_loss(predict, batch)

    return loss
