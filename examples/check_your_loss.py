"""Is my loss function a sum that can be cut anywhere? Three of them, and what the checker says."""

# %%
import torch
from torch.nn.functional import cross_entropy

from numden.property_tests import check_loss, report_loss
from numden.pure import LossTerms

torch.manual_seed(0)
params = {"logits": torch.randn(7, 7).double()}
tokens = torch.randint(0, 7, (6, 5))
lengths = torch.tensor([[5], [2], [4], [1], [3], [5]])
batch = {"tokens": tokens, "labels": torch.where(torch.arange(5) < lengths, tokens, -100)}


def losses(params, batch):
    logits = params["logits"][batch["tokens"]].movedim(-1, 1)
    return cross_entropy(logits, batch["labels"], reduction="none")


# %% [markdown]
# **A mean.** It is no sum; the checker says what it is the mean over, so that you know the sum and
# the count to return. It also sees that a batch without labels gives nan.


# %%
def mean(params, batch):
    return losses(params, batch).sum() / (batch["labels"] != -100).sum()


print(report_loss(mean, params, batch, max_examples=10))

# %% [markdown]
# **A sum over one mask, a count over another.** The num leaves out what is masked and the den does
# not.


# %%
def two_masks(params, batch):
    return LossTerms(losses(params, batch).sum(), batch["labels"].numel())


report = report_loss(two_masks, params, batch, max_examples=10)
print(report)
assert "mask_agreement" in {verdict.law for verdict in report.broken}


# %% [markdown]
# **The sum and its count.** All laws hold.


# %%
def right(params, batch):
    return LossTerms(losses(params, batch).sum(), (batch["labels"] != -100).sum())


print(check_loss(right, params, batch))
