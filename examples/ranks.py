"""Two ranks on this machine: ragged windows, one of them empty, and the gradient of one process."""

import torch
import torch.distributed as c10d

from numden import dist, pure
from numden.dist import run_local
from numden.pure import LossTerms


def loss_fn(params, tokens):
    return LossTerms(num=(params["w"] * tokens).square().sum(), den=tokens.numel())


batches = [torch.tensor([8.0]), torch.tensor([2.0, 2.0, 2.0]), torch.tensor([1.0, 5.0])]
shares = {
    "2 + 1 micro-steps": [batches[:2], batches[2:]],
    "3 + 0 micro-steps": [batches, []],
}


def gradient(windows):
    """What each rank runs: its own window, no collective of its own."""
    params = {"w": torch.tensor(1.0, dtype=torch.float64)}
    result = dist.window_grad(loss_fn)(params, windows[c10d.get_rank()])
    return float(result.loss), float(result.grads["w"])


if __name__ == "__main__":
    params = {"w": torch.tensor(1.0, dtype=torch.float64)}
    alone = pure.window_grad(loss_fn)(params, [torch.cat(batches)])
    print(f"one process, whole batch: loss {alone.loss:.6f}, gradient {alone.grads['w']:.6f}")
    for name, windows in shares.items():
        for rank, (loss, grad) in enumerate(run_local(gradient, 2, windows)):
            print(f"{name}, rank {rank}: loss {loss:.6f}, gradient {grad:.6f}")
            assert (loss, grad) == (float(alone.loss), float(alone.grads["w"]))
