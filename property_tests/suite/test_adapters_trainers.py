"""Right and wrong code in the trainers of other people; what they make of it is measured there."""

from contextlib import nullcontext
from functools import partial

import lightning
import pytest
import torch
import transformers
from adapter_cases import (
    ONE_RANK,
    PARAMS,
    TWO_RANKS,
    UNEVEN,
    Probe,
    assert_gradient,
    assert_updated,
    batches,
    count,
    mean,
    mean_of_means,
)

from numden.property_tests.adapters import (
    UnfitWorld,
    from_accelerate,
    from_lightning,
    from_trainer,
)
from numden.property_tests.worlds.world import World

WORLDS = {name: world for name, world in ONE_RANK.items() if name != "a micro-step without tokens"}
WORLDS |= {f"2 ranks, {name}": TWO_RANKS[name] for name in ("ragged", "partial")}
each_world = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)


# --- accelerate ----------------------------------------------------------------------------------


def documented_recipe(accelerator, model, optimizer, window):
    batches = list(window)
    total = accelerator.gather(sum(count(batch) for batch in batches)).sum().item()
    factor = accelerator.gradient_accumulation_steps * accelerator.num_processes
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        with nullcontext() if last else accelerator.no_sync(model):
            accelerator.backward(model(**batch) * factor / total)
    optimizer.step()
    optimizer.zero_grad()


def plain_recipe(accelerator, model, optimizer, window):
    for batch in window:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch) / count(batch))
            optimizer.step()
            optimizer.zero_grad()


@each_world
def test_accelerate_with_its_documented_recipe(world):
    step = from_accelerate(documented_recipe, Probe(1), len(world))
    assert_updated(step(PARAMS, world), mean(world))


@each_world
def test_accelerate_with_means_is_not_mended(world):
    # Each backward is divided by the configured number of micro-steps, on a partial window too.
    steps = sum(map(len, world)) / len(world)
    step = from_accelerate(plain_recipe, Probe(1), len(world))
    assert_updated(step(PARAMS, world), mean_of_means(world) * steps / world.accumulation)


def test_accelerate_leaves_zeroing_to_the_loop():
    def loop(accelerator, model, optimizer, window):
        for batch in window:
            accelerator.backward(model(**batch))
        optimizer.step()

    world = ONE_RANK["one micro-step"]
    step = from_accelerate(loop, Probe(1))
    assert [step(PARAMS, world).grads["w"].item() for _ in range(2)] == [9.0, 18.0]


def test_accelerate_takes_options_and_optimizers():
    def loop(accelerator, model, optimizer, window):
        assert accelerator.mixed_precision == "bf16"
        documented_recipe(accelerator, model, optimizer, window)

    step = from_accelerate(
        loop, Probe(1), optimizer=torch.optim.Adam, options={"mixed_precision": "bf16"}
    )
    result = step(PARAMS, ONE_RANK["ragged"])
    assert_gradient(result, mean(ONE_RANK["ragged"]))
    assert result.params is None


# --- transformers --------------------------------------------------------------------------------


class WithCount(Probe):
    """As models of transformers do: the sum over the count that the Trainer gives, or a mean."""

    def forward(self, losses, mask, labels=None, attention_mask=None, **kwargs):
        total = kwargs.get("num_items_in_batch")
        loss = super().forward(losses, mask) / (mask.sum() if total is None else total)
        return {"loss": loss}


class WithMean(Probe):
    def forward(self, losses, mask, labels=None, attention_mask=None):
        return {"loss": super().forward(losses, mask) / mask.sum()}


FAST = {"ddp_find_unused_parameters": False}  # else torch warns on stderr


def supervised(world):
    """``world`` with labels where something is scored alone, as the Trainer counts labels."""

    def only_scored(batch):
        return batch | {"labels": batch["labels"].where(batch["mask"], -100)}

    return World(
        [[only_scored(batch) for batch in window] for window in world],
        accumulation=world.accumulation,
    )


def pooled(parts):
    """One batch of the rows of several, which are padded to one width."""
    width = max(part["losses"].shape[1] for part in parts)
    fields = ("losses", "mask")
    pad = lambda x: torch.nn.functional.pad(x, (0, width - x.shape[1]))
    return [{name: torch.cat([pad(part[name]) for part in parts]) for name in fields}]


@each_world
def test_trainer_with_a_model_that_takes_the_count(world):
    world = supervised(world)
    result = from_trainer(WithCount(1), len(world), arguments=FAST)(PARAMS, world)
    assert_updated(result, mean(world))
    # The Trainer adds losses up in float32.
    torch.testing.assert_close(result.loss, 2 * mean(world).item(), rtol=1e-6, atol=0)
    # Evaluation: the mean of means, each over what the ranks have at a time.
    together = World([pooled(at_once) for at_once in zip(*world, strict=True)])
    evaluated = 2 * mean_of_means(together).item()
    torch.testing.assert_close(result.eval_loss, evaluated, rtol=1e-6, atol=0)


@each_world
def test_trainer_with_means_is_not_mended(world):
    result = from_trainer(WithMean(1), len(world), arguments=FAST)(PARAMS, world)
    assert_updated(result, mean_of_means(world))


def test_trainer_of_ones_own():
    class Clipping(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            self.args.max_grad_norm = 1.0
            return super().training_step(*args, **kwargs)

    world = supervised(ONE_RANK["ragged"])
    step = from_trainer(WithCount(1), make_trainer=Clipping, evaluate=False)
    assert step.__name__ == "from_trainer(Clipping)"
    result = step(PARAMS, world)
    torch.testing.assert_close(result.grads["w"].item(), 1.0, rtol=1e-5, atol=0)  # its 1e-6
    assert result.eval_loss is None


def test_trainer_without_the_right_batches():
    step = from_trainer(WithCount(1), 2, arguments=FAST)
    with pytest.raises(UnfitWorld, match=r"each rank needs a micro-batch, got windows of \[2, 0\]"):
        step(PARAMS, World([UNEVEN[0], []]))
    assert step(PARAMS, supervised(UNEVEN)).eval_loss is None
    assert_gradient(step(PARAMS, supervised(UNEVEN)), mean(UNEVEN))


def qwen3():
    config = transformers.Qwen3Config(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    return transformers.Qwen3ForCausalLM(config).double()


def token_window(*lengths):
    return [
        {"input_ids": tokens, "labels": tokens.where(torch.arange(size) > 1, -100)}
        for size in lengths
        for tokens in [torch.randint(11, (2, size))]
    ]


def test_trainer_of_a_language_model():
    model = qwen3()
    world = World([token_window(3, 9), token_window(4, 5)], accumulation=2)
    result = from_trainer(model, 2, arguments=FAST)(model, world)
    losses = [
        torch.nn.functional.cross_entropy(
            model(batch["input_ids"]).logits[:, :-1].flatten(0, 1),
            batch["labels"][:, 1:].flatten(),
            reduction="sum",
        )
        for batch in batches(world)
    ]
    total = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches(world))
    loss = sum(losses) / total
    grads = torch.autograd.grad(loss, list(model.parameters()))
    assert list(result.grads) == [name for name, _ in model.named_parameters()]
    for got, grad in zip(result.grads.values(), grads, strict=True):
        # The loss of transformers casts logits to float32.
        torch.testing.assert_close(got, grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(result.loss, loss.item(), rtol=1e-6, atol=0)


# --- Lightning -----------------------------------------------------------------------------------


class Means(lightning.LightningModule):
    """A mean in each micro-step, as Lightning's examples have it."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1).double())

    def loss(self, batch):
        return self.w.sum() * (batch["losses"] * batch["mask"]).sum() / count(batch)

    def log_mean(self, name, loss):
        self.log(name, loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log_mean("train_loss", loss.detach())
        return loss

    def validation_step(self, batch, index):
        self.log_mean("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Sums(Means):
    """Right where the count of the window comes with each batch."""

    def loss(self, batch):
        mean = self.w.sum() * (batch["losses"] * batch["mask"]).sum() / batch["total"]
        return mean * self.trainer.accumulate_grad_batches * self.trainer.world_size


def with_total(world):
    total = sum(count(batch) for batch in batches(world))
    windows = [[batch | {"total": total} for batch in window] for window in world]
    return World(windows, accumulation=world.accumulation)


@each_world
def test_lightning_with_sums(world):
    result = from_lightning(Sums(), len(world))(PARAMS, with_total(world))
    assert_updated(result, mean(world))


@each_world
def test_lightning_with_means_is_not_mended(world):
    result = from_lightning(Means(), len(world), eval_loss="val_loss")(PARAMS, world)
    steps = sum(map(len, world)) / len(world)
    assert_updated(result, mean_of_means(world) * steps / world.accumulation)
    torch.testing.assert_close(result.loss, 2 * mean_of_means(world))
    torch.testing.assert_close(result.eval_loss, 2 * mean_of_means(world).item())


def test_lightning_refuses_what_would_hang():
    words = r"as many micro-batches as the others, got windows of \[2, 1\] micro-steps"
    with pytest.raises(UnfitWorld, match=words):
        from_lightning(Means(), 2)(PARAMS, UNEVEN)


def test_lightning_with_another_optimizer_and_trainer():
    class Adam(Means):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    make = partial(lightning.Trainer, gradient_clip_val=1.0)
    result = from_lightning(Adam(), make_trainer=make)(PARAMS, ONE_RANK["ragged"])
    torch.testing.assert_close(result.grads["w"].item(), 1.0, rtol=1e-5, atol=0)  # clip's 1e-6
    assert result.params is None
