"""The vocabulary of a drafter: the ids of the target that it can draft, a part of all.

A draft vocabulary is one tensor, ``draft_ids``: the target's id of each draft id, ascending.
Checkpoints hold it as two maps: ``t2d`` says of each target id whether it can be drafted, and
``d2t`` is what to add to a draft id to have the target's.

Shapes: V ids of the target, D ids of the drafter.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = [
    "can_draft",
    "choose_draft_ids",
    "count_labels",
    "draft_ids_of_maps",
    "maps_of_draft_ids",
    "require_draft_ids",
]


def count_labels(tokens: Tensor, loss_mask: Tensor, vocab_size: int) -> Tensor:
    """How often each token is a label; add up the counts of batches.

    Args:
        tokens: ``[...]`` int64 below ``vocab_size``.
        loss_mask: ``[...]``; a token is a label where it exceeds 0.5.
        vocab_size: V.

    Returns:
        ``[V]`` int64.

    Examples:
        >>> count_labels(torch.tensor([2, 0, 2]), torch.tensor([1, 0, 1]), vocab_size=4)
        tensor([0, 0, 2, 0])
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64, device=tokens.device)
    return counts.scatter_add(0, tokens.flatten(), (loss_mask > 0.5).long().flatten())


def choose_draft_ids(counts: Tensor, size: int) -> Tensor:
    """The most frequent ids; of equally frequent ones, such as those never seen, the lowest.

    Args:
        counts: ``[V]``, how often each token is a label.
        size: D, from 1 to V.

    Returns:
        ``[D]`` int64, ascending.

    Raises:
        ValueError: ``size`` is out of range.

    Examples:
        >>> choose_draft_ids(torch.tensor([0, 5, 0, 0, 7]), 3)
        tensor([0, 1, 4])
    """
    if not 1 <= size <= len(counts):
        raise ValueError(
            f"choose_draft_ids: size must be from 1 to the {len(counts)} ids of the target, got "
            f"{size=}."
        )
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def can_draft(draft_ids: Tensor | None, ids: Tensor, vocab_size: int) -> Tensor:
    """Whether each id of the target is in the draft vocabulary.

    Args:
        draft_ids: ``[D]`` int64; None for all ids.
        ids: ``[...]`` int64 below ``vocab_size``.
        vocab_size: V.

    Returns:
        ``[...]`` bool.

    Examples:
        >>> can_draft(torch.tensor([0, 1, 4]), torch.tensor([3, 4]), vocab_size=5)
        tensor([False,  True])
    """
    if draft_ids is None:
        return torch.ones_like(ids, dtype=torch.bool)
    none = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
    return none.index_fill(0, draft_ids, True)[ids]


def maps_of_draft_ids(draft_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The two maps of checkpoints.

    Args:
        draft_ids: ``[D]`` int64, ascending.
        vocab_size: V.

    Returns:
        ``(t2d, d2t)``: ``[V]`` bool and ``[D]`` int64 offsets.

    Examples:
        >>> maps_of_draft_ids(torch.tensor([0, 1, 4]), vocab_size=5)
        (tensor([ True,  True, False, False,  True]), tensor([0, 0, 2]))
    """
    every = torch.arange(vocab_size, device=draft_ids.device)
    return can_draft(draft_ids, every, vocab_size), draft_ids - every[: len(draft_ids)]


def draft_ids_of_maps(t2d: Tensor, d2t: Tensor) -> Tensor:
    """The draft vocabulary of the two maps of a checkpoint. Reads them on the host.

    Args:
        t2d: ``[V]``, bool or 0 and 1.
        d2t: ``[D]``, integers.

    Returns:
        ``[D]`` int64, ascending.

    Raises:
        ValueError: the maps are wrong; the message tells all that is.

    Examples:
        >>> draft_ids_of_maps(torch.tensor([1, 1, 0, 0, 1]), torch.tensor([0, 0, 2]))
        tensor([0, 1, 4])
    """
    draft_ids = d2t.long() + torch.arange(len(d2t), device=d2t.device)
    drafted = t2d.nonzero().flatten()
    wrong = [*_faults(draft_ids, len(t2d))]
    if len(drafted) != len(d2t):
        wrong.append(f"t2d has {len(drafted)} ids and d2t has {len(d2t)}")
    elif (which := (drafted != draft_ids).nonzero().flatten()).numel():
        i = int(which[0])
        wrong.append(f"draft id {i} is {int(draft_ids[i])} by d2t and {int(drafted[i])} by t2d")
    if wrong:
        raise ValueError(
            "draft_ids_of_maps: d2t + arange must be the ids that t2d selects, in ascending order, "
            f"got maps where {'; '.join(wrong)}. Is d2t a list of offsets, and of this target?"
        )
    return draft_ids


def require_draft_ids(
    function: str, draft_ids: Tensor | None, vocab_size: int, draft_vocab_size: int
) -> None:
    """Check a draft vocabulary, on the host, before training.

    Args:
        function: for the message.
        draft_ids: ``[D]`` int64, ascending; None for all ids.
        vocab_size: V.
        draft_vocab_size: the D that is expected.

    Raises:
        ValueError: it has another size, or ids that are out of range or not ascending; the message
            tells all of that.
        TypeError: it is not int64.

    Examples:
        >>> require_draft_ids("train", torch.tensor([0, 1, 4]), vocab_size=5, draft_vocab_size=3)
    """
    size = vocab_size if draft_ids is None else draft_ids.numel()
    if draft_ids is not None and draft_ids.dtype != torch.int64:
        raise TypeError(f"{function}: draft_ids must be int64, got {draft_ids.dtype}.")
    wrong = [] if size == draft_vocab_size else [f"there are {size} ids"]
    wrong += [] if draft_ids is None else _faults(draft_ids, vocab_size)
    if wrong:
        raise ValueError(
            f"{function}: draft_ids must be draft_vocab_size={draft_vocab_size} ids, ascending and "
            f"below vocab_size={vocab_size}, got ids where {'; '.join(wrong)}. Give the target "
            "`draft_ids` of `draft_ids_of_maps` or `choose_draft_ids`."
        )


def _faults(draft_ids: Tensor, vocab_size: int) -> Iterable[str]:
    outside = draft_ids[(draft_ids < 0) | (draft_ids >= vocab_size)]
    if outside.numel():
        yield f"{int(outside[0])} is no id of the target, which has {vocab_size}"
    falls = (draft_ids.diff() <= 0).nonzero().flatten()
    if falls.numel():
        i = int(falls[0])
        yield f"{int(draft_ids[i])} stands before {int(draft_ids[i + 1])}"
