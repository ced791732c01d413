"""A training step against transformers' ``Trainer``: same model, weights, data and optimizer.

Ragged rows of which 30 % of the tokens are supervised, 8 micro-steps in a window. The Trainer
computes logits for every position; ``decoder.loss_terms`` runs the head on supervised ones alone.
"""

import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import peak_bytes, ratios, save, table
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from numden import dist
from numden.models import decoder, hf
from numden.models.data import Row, collate
from numden.pure import optim, random, window_grad

NUM_MICRO_STEPS, ROWS, NUM_STEPS = 8, 2, 2
SUPERVISED = 0.3
VOCABULARIES = (32_000, 152_000)


def model_config(vocab_size: int) -> decoder.Config:
    """Six layers of width 384."""
    return decoder.Config(
        vocab_size=vocab_size,
        hidden_size=384,
        intermediate_size=1024,
        num_layers=6,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        tie_embeddings=True,
    )


def make_rows(vocab_size: int) -> list[Row]:
    """Rows of 64 to 256 tokens; the last 30 % of each are supervised, as an answer is."""
    rows = []
    for i in range(NUM_MICRO_STEPS * ROWS):
        key = random.fold_in(random.key(2), i)
        length = 64 + int(random.bits(key, (1,))) % 193
        tokens = random.bits(random.fold_in(key, 1), (length,)) % vocab_size
        rows.append(Row(tokens, torch.arange(length) >= (1 - SUPERVISED) * length, i))
    return rows


def numden_steps(folder: Path, rows: list[Row]) -> tuple[list[float], list[float]]:
    """Seconds of each step after the first, and the losses of all."""
    config, params = hf.load(folder)
    loss_fn = partial(decoder.loss_terms, config=config)
    adamw = optim.from_torch(torch.optim.AdamW, lr=1e-4, weight_decay=0.0)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), adamw)
    step = dist.train_step(window_grad(loss_fn), optimizer, donate=True)
    state = dist.init_state(params, optimizer)
    key = random.key(0)
    times, losses = [], []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        cuts = [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]
        window = [collate(cut, key=key) for cut in cuts]
        state, result = step(state, window)
        losses.append(float(result.loss))
        times.append(time.perf_counter() - start)
    return times[1:], losses


def trainer_steps(folder: Path, rows: list[Row]) -> tuple[list[float], list[float]]:
    """Seconds of each step after the first, and the losses of all."""
    logging.disable_progress_bar()
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    clock = _Clock()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=NUM_MICRO_STEPS,
            max_steps=NUM_STEPS,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            optim="adamw_torch",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="steps",
            logging_steps=1,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = _Ordered(
            model=model,
            args=arguments,
            train_dataset=rows,  # pyright: ignore[reportArgumentType]
            data_collator=_collate,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return clock.times[1:], [log["loss"] for log in trainer.state.log_history if "loss" in log]


class _Ordered(Trainer):
    """The Trainer with the rows in their order, so that both see the same micro-steps."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(train_dataset or self.train_dataset)  # pyright: ignore[reportArgumentType]


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start."""
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop."""
        self.times.append(time.perf_counter() - self.start)


def _collate(rows: list[Row]) -> dict[str, Tensor]:
    batch = collate(rows, key=random.key(0))
    lengths = torch.tensor([len(row.tokens) for row in rows])
    attention = torch.arange(batch["tokens"].shape[1]) < lengths[:, None]
    labels = torch.where(batch["loss_mask"], batch["tokens"], -100)
    return {"input_ids": batch["tokens"], "labels": labels, "attention_mask": attention.long()}


def measure(rounds: int, threads: int, out: Path, console: Console) -> None:
    """Measure, print and save."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        runs = {size: _runs(size, Path(scratch) / str(size)) for size in VOCABULARIES}
        memory = {size: peak_bytes(runs[size], label=f"memory, V = {size:,}") for size in runs}
        torch.set_num_threads(threads)
        found = [_row(size, runs[size], memory[size], rounds) for size in runs]
    table("A training step of numden over one of transformers' Trainer", found, console)
    save("trainer", found, out)


def _runs(vocab_size: int, folder: Path) -> dict[str, Any]:
    config, rows = model_config(vocab_size), make_rows(vocab_size)
    hf.save(folder, decoder.init(config, random.key(0)), config)
    return {
        "numden": partial(numden_steps, folder, rows),
        "Trainer": partial(trainer_steps, folder, rows),
    }


def _row(
    vocab_size: int, runs: dict[str, Any], memory: dict[str, int], rounds: int
) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    losses = {}
    for _ in track(range(rounds), description=f"time, V = {vocab_size:,}"):
        for name, run in runs.items():
            seconds, losses[name] = run()
            times[name].append(median(seconds))
    pairs = zip(losses["numden"], losses["Trainer"], strict=True)
    return {
        "V": f"{vocab_size:,}",
        "time": ratios(times, "Trainer")["numden"],
        "memory": memory["numden"] / memory["Trainer"],
        "numden s": median(times["numden"]),
        "Trainer s": median(times["Trainer"]),
        "losses apart": max(abs(a - b) / abs(b) for a, b in pairs),
    }
