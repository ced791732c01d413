"""The shape of each drafter of ``numden train``, from the options that all of them share.

Each is ``(options, target's shape, mask token) -> config``; ``options.block_size`` tokens are
drafted at once.
"""

from typing import Any

from . import decoder, dflash, domino, dspark, dspine, eagle3, mtp, peagle
from .train_config import Drafter as Options

__all__ = [
    "dflash_config",
    "domino_config",
    "dspark_config",
    "dspine_config",
    "eagle3_config",
    "mtp_config",
    "peagle_config",
]


def _shape(options: Options, target: decoder.Config, mask_token_id: int) -> dict[str, Any]:
    """What every block drafter has: the target's width, and its embedding and head."""
    return {
        "vocab_size": target.vocab_size,
        "mask_token_id": mask_token_id,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_layers": options.num_layers,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "num_target_layers": options.num_target_layers,
        "block_size": options.block_size,
        "num_anchors": options.num_anchors,
        "decay_gamma": options.decay_gamma,
    }


def dspark_config(options: Options, target: decoder.Config, mask_token_id: int) -> dspark.Config:
    """DSpark, with a Markov head."""
    shape = _shape(options, target, mask_token_id)
    return dspark.Config(**shape, markov_rank=options.markov_rank)


def dflash_config(options: Options, target: decoder.Config, mask_token_id: int) -> dflash.Config:
    """DFlash, whose first slot holds the last known token."""
    return dflash.Config(**_one_slot_more(_shape(options, target, mask_token_id)))


def domino_config(options: Options, target: decoder.Config, mask_token_id: int) -> domino.Config:
    """Domino, with a state as wide as the target."""
    return domino.Config(
        **_one_slot_more(_shape(options, target, mask_token_id)),
        gru_size=target.hidden_size,
        correction_rank=options.markov_rank or 1,
    )


def dspine_config(options: Options, target: decoder.Config, mask_token_id: int) -> dspine.Config:
    """DSpine, with half of the directions of the target's head."""
    return dspine.Config(
        **_one_slot_more(_shape(options, target, mask_token_id)),
        transfer_rank=min(target.hidden_size, target.vocab_size - 1) // 2,
        message_size=target.hidden_size,
        alignment_warmup_steps=options.num_windows // 10,
    )


def _one_slot_more(shape: dict[str, Any]) -> dict[str, Any]:
    return {**shape, "block_size": shape["block_size"] + 1}


def mtp_config(options: Options, target: decoder.Config, mask_token_id: int) -> mtp.Config:
    """Multi-token prediction that drafts as in serving."""
    return mtp.Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        num_steps=options.block_size,
        chain_context="prefix",
    )


def _eagle(options: Options, target: decoder.Config) -> dict[str, Any]:
    """The target's width; the head is the drafter's own."""
    return {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "num_target_layers": options.num_target_layers,
    }


def eagle3_config(options: Options, target: decoder.Config, mask_token_id: int) -> eagle3.Config:
    """EAGLE-3 with the target's vocabulary."""
    return eagle3.Config(**_eagle(options, target), num_steps=options.block_size)


def peagle_config(options: Options, target: decoder.Config, mask_token_id: int) -> peagle.Config:
    """P-EAGLE with the target's vocabulary."""
    return peagle.Config(
        **_eagle(options, target),
        mask_token_id=mask_token_id,
        num_layers=options.num_layers,
        num_depths=options.block_size,
    )
