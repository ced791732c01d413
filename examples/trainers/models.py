"""Tiny random models, token batches, and the sums that are right for them."""

from typing import Any

import lightning
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from numden.property_tests.worlds.problems import Problem, tokens
from numden.pure import LossTerms, term_mean

VOCAB_SIZE, IGNORED = 13, -100
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "initializer_range": 0.7,  # so that the losses of tokens differ
}
ROUTER_COEFFICIENT = 0.5
"""Large, so that what happens to the term is seen; the default of Mixtral is 0.001."""

Batch = dict[str, Tensor]


def dense() -> Problem:
    """Qwen3: the mean over predicted tokens."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).double()
    return Problem(_cross_entropy, model, token_batches())


def mixture_of_experts() -> Problem:
    """Mixtral: the same, and the mean over micro-batches of its loss of the router."""
    torch.manual_seed(0)
    config = MixtralConfig(
        **SHAPE,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=ROUTER_COEFFICIENT,
    )
    model = MixtralForCausalLM(config).double()
    model.set_experts_implementation("eager")  # torch's grouped_mm knows no float64
    objective = term_mean({"ce": 1.0, "router": ROUTER_COEFFICIENT})
    return Problem(_with_router, model, token_batches(), objective)


def probe() -> Problem:
    """One weight; each token has the loss that the batch says."""
    return tokens()


class Probe(nn.Module):
    """The model of ``probe``: the weight times the sum of the losses of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, losses: Tensor, mask: Tensor, **other: Tensor) -> Tensor:
        """The sum."""
        return self.w * (losses * mask).sum()


class MeanProbe(Probe):
    """The same with a mean, as a model of one's own may return it to transformers' Trainer."""

    # Named fields alone: one that takes any keyword would be handed a count, and be relied on.
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, losses: Tensor, mask: Tensor, labels: Tensor, attention_mask: Tensor
    ) -> dict[str, Tensor]:
        """The mean, 0 for no token."""
        return {"loss": super().forward(losses, mask) / mask.sum().clamp(min=1)}


class LightningProbe(lightning.LightningModule):
    """The same with a mean in each training step, logged as an average over the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The mean, 0 for no token."""
        return self._mean(batch, "train_loss")

    def validation_step(self, batch: Batch, index: int) -> Tensor:
        """The same."""
        return self._mean(batch, "val_loss")

    def configure_optimizers(self) -> Any:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def _mean(self, batch: Batch, name: str) -> Tensor:
        num, den = (batch["losses"] * batch["mask"]).sum(), batch["mask"].sum()
        loss = self.w * num / den.clamp(min=1)
        size = len(batch["mask"])
        self.log(name, loss.detach(), on_step=False, on_epoch=True, sync_dist=True, batch_size=size)
        return loss


@st.composite
def token_batches(draw: st.DrawFn) -> Batch:
    """One or two ragged rows, each a prompt and an answer of which the first label is known."""
    width = draw(st.integers(3, 7))
    lengths = [width, *draw(st.lists(st.integers(3, width), max_size=1))]
    prompts = [draw(st.integers(1, length - 1)) for length in lengths]
    size = len(lengths) * width
    ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=size, max_size=size))
    input_ids = torch.tensor(ids).reshape(len(lengths), width)
    place = torch.arange(width)
    present = place < torch.tensor(lengths)[:, None]
    answers = present & (place >= torch.tensor(prompts)[:, None])
    return {
        "input_ids": input_ids,
        "labels": input_ids.where(answers, IGNORED),
        "attention_mask": present.long(),
    }


def _cross_entropy(model: Any, batch: Batch) -> LossTerms:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return _sums(logits, batch)


def _with_router(model: Any, batch: Batch) -> LossTerms:
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    ce = _sums(out.logits, batch)
    return LossTerms({"ce": ce.num, "router": out.aux_loss}, {"ce": ce.den, "router": 1})


def _sums(logits: Tensor, batch: Batch) -> LossTerms:
    labels = batch["labels"][:, 1:].flatten()
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="none")
    return LossTerms(losses.sum(), (labels != IGNORED).sum())
