"""A mean of means goes wrong, and the same three lines go right.

Two micro-steps: one token with loss 8, and three tokens with loss 2 each. The mean over tokens is
14 / 4 = 3.5. Dividing in each micro-step and averaging gives 5.
"""

import torch

from numden.pure import LossTerms, window_grad

w = torch.tensor(1.0)
window = [torch.tensor([8.0]), torch.tensor([2.0, 2.0, 2.0])]

# What most training loops do: a mean in each micro-step, a mean of those.
leaf = w.clone().requires_grad_()
for tokens in window:
    ((leaf * tokens).mean() / len(window)).backward()
print(f"mean of means:  gradient {leaf.grad}")


# Sums first, one division.
def loss_fn(w, tokens):
    return LossTerms(num=(w * tokens).sum(), den=tokens.numel())


result = window_grad(loss_fn)(w, window)
print(f"sum over count: gradient {result.grads}, loss {result.loss}")

assert float(leaf.grad or 0) == 5.0
assert float(result.grads) == float(result.loss) == 3.5
