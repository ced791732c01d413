"""A trainer with a planted fault, and a checker that finds it and says what it is.

The trainer below is an ordinary PyTorch loop with gradient accumulation. It divides each
micro-step's loss by the tokens of that micro-step, then by the number of micro-steps: a mean of
means. It runs, it learns, and a token in a short micro-step weighs more than one in a long one.
"""

# %%
import torch
from torch import nn

from numden.property_tests import adapters, check_step, report_step
from numden.pure import LossTerms


class Model(nn.Module):
    """Token logits from the token before; any model of yours will do."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Embedding(5, 5, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the token after each of ``tokens``."""
        return self.logits(tokens)


def loss_sum(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["tokens"][:, :-1])
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )


def count(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


# %% [markdown]
# The loop under test gets the module and the micro-batches of one window, and leaves gradients.


# %%
def loop(model: nn.Module, window: list[dict[str, torch.Tensor]]) -> float:
    model.zero_grad()
    logged = 0.0
    for batch in window:
        loss = loss_sum(model, batch) / count(batch).clamp(min=1) / len(window)
        loss.backward()
        logged += loss.item()
    return logged


# %% [markdown]
# What is right is said by sums: a numerator and a denominator for each micro-batch.


# %%
def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossTerms:
    return LossTerms(num=loss_sum(model, batch), den=count(batch))


torch.manual_seed(0)
model = Model()
tokens = torch.randint(0, 5, (4, 4))
lengths = torch.tensor([[4], [2], [3], [1]])
batch = {"tokens": tokens, "labels": torch.where(torch.arange(4) < lengths, tokens, -100)}

report = report_step(adapters.from_loop(loop, model), loss_fn, model, batch, max_examples=20)
print(report)

# %% [markdown]
# The report names the fault, shows the smallest window on which it is seen, and the remedy: count
# the window's tokens first, and divide each micro-step's sum by that. Then all laws hold.


# %%
def repaired(model: nn.Module, window: list[dict[str, torch.Tensor]]) -> float:
    model.zero_grad()
    total, logged = sum(int(count(batch)) for batch in window), 0.0
    for batch in window:
        loss = loss_sum(model, batch) / total
        loss.backward()
        logged += loss.item()
    return logged


report_of_repaired = check_step(adapters.from_loop(repaired, model), loss_fn, model, batch)
print(report_of_repaired)

# %%
found = {verdict.law: verdict.diagnoses[0].faults for verdict in report.broken}
assert found["gradient"] == found["logged loss"] == ("mean of micro-step means",)
