"""A configuration of ``numden train`` that takes seconds, as values and as a file."""

import dataclasses

import yaml

from numden.models.train_config import Data, Drafter, Run, Target, TrainConfig, with_overrides

TINY = TrainConfig(
    data=Data(max_bytes=8_000, vocab_size=0, max_length=24, held_out=4),
    target=Target(
        hidden_size=16,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        num_windows=3,
        tokens_per_window=96,
        tokens_per_micro_step=48,
    ),
    drafter=Drafter(
        block_size=3,
        num_layers=1,
        num_target_layers=2,
        num_anchors=4,
        markov_rank=4,
        num_windows=3,
        micro_steps=5,
    ),
    run=Run(log_every=2, prompts=3, new_tokens=12),
)


def tiny(*overrides):
    return with_overrides(TINY, list(overrides))


def written(folder, config):
    path = folder / "config.yaml"
    table = dataclasses.asdict(config)
    path.write_text(yaml.safe_dump(table | {"data": {**table["data"], "files": []}}))
    return path
