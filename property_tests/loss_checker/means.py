"""What a number that a loss function returns is the mean over: the den that makes it a sum."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...pure import tree
from ...pure.terms import LossFn
from ..evaluation import backward, forward, leaves_of
from ..mask_fields import mask_fields, mask_out
from ..rows import join_rows, num_rows, take_rows
from ..worlds.counts import counts

__all__ = ["Mean", "find_den"]


class Mean(NamedTuple):
    """What a scalar loss is.

    Attributes:
        kind: ``"mean"``, over ``codes[0]``; ``"sum"``, already; ``"weighted"``, a mean with
            weights that no count explains; ``"none"``, no den makes it additive; ``"unknown"``,
            nothing could be compared.
        codes: the counts that explain it, as expressions on ``batch``: all that agree on each
            batch that was seen, the most likely first.
        words: the same as a sentence.
        pairs: how many pairs of batches were compared.
        pair: for ``"none"``, the smallest pair for which no den was found.
        values: the values of that pair, and of both joined.
    """

    kind: Literal["mean", "sum", "weighted", "none", "unknown"]
    codes: tuple[str, ...]
    words: str
    pairs: int
    pair: tuple[Any, Any] | None = None
    values: tuple[float, float, float] | None = None

    def den_fn(self, batch: Any) -> Tensor:
        """The den of a mean, counted in ``batch``."""
        return next(each.by_row.sum() for each in counts(batch) if each.code == self.codes[0])


def find_den(
    loss_fn: LossFn,
    params: Any,
    batches: Sequence[Any],
    *,
    join: Callable[[Sequence[Any]], Any] = join_rows,
) -> Mean:
    """Which den turns the scalar of ``loss_fn`` into a pair of sums.

    A mean ``m`` over what a den counts has ``m(a ∪ b) = (1-λ) m(a) + λ m(b)`` with
    ``λ = den(b) / (den(a) + den(b))``, the same λ for the value and for each gradient. So the
    joined vector of value and gradients lies on the line between those of a and b; where it does,
    λ says how the den weighs the two, and each of ``counts(batch)`` is compared with it.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` whose num is the scalar.
        params: a pytree of tensors or an ``nn.Module``.
        batches: with at least two rows each; the more ragged, the better counts are told apart.
        join: makes one batch of several.

    Examples:
        >>> from numden.property_tests.loss_checker.outputs import as_loss_fn
        >>> def masked_mean(w, batch):
        ...     return (w * batch["x"] * batch["mask"]).sum() / batch["mask"].sum()
        >>> x, mask = torch.tensor([[4.0, 2.0], [1.0, 1.0]]), torch.tensor([[1, 0], [1, 1]]) > 0
        >>> find_den(as_loss_fn(masked_mean), torch.tensor(1.0), [{"x": x, "mask": mask}]).words
        "a mean over batch['mask'].sum()"
    """
    triples = [
        triple
        for batch in batches
        for variant in _variants(batch)
        for triple in _triples(loss_fn, params, variant, join)
    ]
    if not any(triple.tells for triple in triples):
        words = "nothing can be said: no two batches with different finite values were drawn"
        return Mean("unknown", (), words, len(triples))
    if all(triple.off(triple.a + triple.b) <= 1 for triple in triples):
        words = "a sum already, whose count is not returned. Return it as well"
        return Mean("sum", (), words, len(triples))
    apart = [triple for triple in triples if not triple.is_between]
    if apart:
        return _none(min(apart, key=lambda triple: triple.num_rows), len(triples))
    codes = _matching(triples)
    if not codes:
        return _weighted(triples)
    others = f"; {' and '.join(codes[1:])} agree with it on each batch seen" if codes[1:] else ""
    return Mean("mean", codes, f"a mean over {codes[0]}{others}", len(triples))


class _Triple(NamedTuple):
    """The value and gradients, as one vector, of two batches and of both joined."""

    a: Tensor
    b: Tensor
    joined: Tensor
    counts: dict[str, tuple[float, float]]
    batches: tuple[Any, Any]
    tolerance: float

    @property
    def tells(self) -> bool:
        """Whether a and b are so different that a weight between them can be seen."""
        return float((self.a - self.b).abs().max()) > 100 * self.tolerance

    @property
    def weight(self) -> float:
        """The λ for which the joined vector is next to ``(1-λ) a + λ b``."""
        step = self.b - self.a
        return float((self.joined - self.a) @ step / (step @ step))

    @property
    def is_between(self) -> bool:
        """Whether some λ in [0, 1] explains the joined vector."""
        return self.explained_by(min(1.0, max(0.0, self.weight)) if self.tells else 0.5)

    @property
    def num_rows(self) -> int:
        """The rows of both batches."""
        return sum(map(num_rows, self.batches))

    def explained_by(self, weight: float) -> bool:
        """Whether the joined vector is ``(1-λ) a + λ b``."""
        # Vectors too near to each other to tell weights apart may be a little off the line.
        allowed = 1 if self.tells else 101
        return self.off((1 - weight) * self.a + weight * self.b) <= allowed

    def off(self, expected: Tensor) -> float:
        """The distance of the joined vector from another, in tolerances."""
        return float((self.joined - expected).abs().max()) / self.tolerance


def _variants(batch: Any) -> list[Any]:
    """``batch``, and for each mask one copy with more masked at the end and one at the start.

    Counts of two masks, and of labels before and after the shift, differ then.
    """
    found = [batch]
    leaves = tree.leaves(batch)
    for field in mask_fields(batch):
        leaf = leaves[field.leaf]
        if leaf.ndim == 2 and leaf.shape[1] > 2:
            found.append(mask_out(batch, [field], (0, slice(2, None))))
            found.append(mask_out(batch, [field], (-1, 0)))
    return found


def _triples(
    loss_fn: LossFn, params: Any, batch: Any, join: Callable[[Sequence[Any]], Any]
) -> Iterator[_Triple]:
    """The first row against others, and the first half against the second."""
    rows = range(num_rows(batch))
    cuts = [([0], [i]) for i in rows[1:4]] + [([0], [*rows[1:]])]
    cuts.append(([*rows[: len(rows) // 2]], [*rows[len(rows) // 2 :]]))
    for first, second in cuts if len(rows) > 2 else cuts[:1]:
        a, b = take_rows(batch, first), take_rows(batch, second)
        try:
            va, vb, vj = (_vector(loss_fn, params, each) for each in (a, b, join([a, b])))
        except Exception:
            continue  # A variant that the function refuses says nothing.
        if bool((va.isfinite() & vb.isfinite() & vj.isfinite()).all()):
            yield _Triple(va, vb, vj, _counted(a, b), (a, b), _tolerance(params, va, vb, vj))


def _vector(loss_fn: LossFn, params: Any, batch: Any) -> Tensor:
    passed = forward(loss_fn, params, batch)
    grads = [grad.double().reshape(-1) for grad in backward(passed).values()]
    return torch.cat([passed.terms.num.detach().double().reshape(1), *grads])


def _counted(a: Any, b: Any) -> dict[str, tuple[float, float]]:
    pairs = zip(counts(a), counts(b), strict=True)
    return {x.code: (float(x.by_row.sum()), float(y.by_row.sum())) for x, y in pairs}


def _tolerance(params: Any, *vectors: Tensor) -> float:
    """Above rounding, also of counts in float32, and far below what wrong weights do."""
    leaves = [leaf for leaf in leaves_of(params).values() if isinstance(leaf, Tensor)]
    epsilons = [torch.finfo(leaf.dtype).eps for leaf in leaves if leaf.is_floating_point()]
    size = max(float(vector.abs().max()) for vector in vectors)
    eps = max(epsilons, default=torch.finfo(torch.float32).eps)
    return max(1e-6, eps**0.7) * max(size, 1e-30)


def _matching(triples: Sequence[_Triple]) -> tuple[str, ...]:
    """The counts whose shares explain each triple."""
    codes = [code for code in triples[0].counts if all(code in t.counts for t in triples)]
    right = [code for code in codes if all(_explains(code, triple) for triple in triples)]
    # Where nothing is ignored, `x != -100` is a long way to say how many there are.
    whole = {t for t in right if t.endswith(".numel()")}
    return tuple(c for c in right if f"{c.partition(' != ')[0].lstrip('(')}.numel()" not in whole)


def _explains(code: str, triple: _Triple) -> bool:
    first, second = triple.counts[code]
    if first + second == 0:
        return False  # A finite value over nothing.
    return triple.explained_by(second / (first + second))


def _none(triple: _Triple, num: int) -> Mean:
    values = tuple(float(v[0]) for v in (triple.a, triple.b, triple.joined))
    words = (
        f"no den makes it additive: two batches have the values {values[0]:.6g} and "
        f"{values[1]:.6g}, joined {values[2]:.6g}, and no one weight between the two explains that "
        "value and its gradients. It has several terms with dens of their own (return a num and "
        "a den for each), or uses statistics of the batch (batch norm, a balancing loss)"
    )
    return Mean("none", (), words, num, triple.batches, (values[0], values[1], values[2]))


def _weighted(triples: Sequence[_Triple]) -> Mean:
    alone = [t for t in triples if t.tells and t.num_rows == 2]
    example = (alone or [t for t in triples if t.tells])[0]
    share = example.weight
    ratio = f"{share / (1 - share):.6g}" if share < 1 else "all"
    words = (
        "a mean with weights that no count of the batch explains: against the first of two "
        f"batches that have {example.num_rows} rows in all, the second has the weight {ratio}. "
        "Return the sum of the weighted losses and the sum of the weights"
    )
    values = [float(v[0]) for v in (example.a, example.b, example.joined)]
    return Mean(
        "weighted", (), words, len(triples), example.batches, (values[0], values[1], values[2])
    )
