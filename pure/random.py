"""Stateless keyed draws: a counter-based generator, the same on each device and for each batching.

A key is two 32-bit words in an int64 tensor ``[..., 2]``. Draw ``i`` of a key is
``threefry(key, i)`` and nothing else: it does not depend on how many are drawn, on what shares the
batch, or on any state. In an n-dimensional draw ``i`` is the flat row-major index. Key axes come
first: keys ``[..., 2]`` and a shape give ``[..., *shape]``.

Use a key for one thing: draw from it, or ``fold_in``, or ``split`` it. The words are those of JAX
with ``jax_threefry_partitionable``, its default.

References:
    Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Threefry).
    JAX, ``jax.random``.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "bernoulli",
    "bits",
    "choice",
    "fold_in",
    "key",
    "normal",
    "permutation",
    "split",
    "threefry",
    "uniform",
]

_MASK = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA  # keeps the three words of the key schedule from all being zero
_PIECE = 2**16


def key(seed: int | Tensor, *, device: torch.device | str | None = None) -> Tensor:
    """A key from a seed: its high and its low 32 bits.

    Args:
        seed: any 64-bit integer, or an int64 tensor ``[...]`` of them.
        device: where the key lives, and all that is drawn from it; default: that of ``seed``.

    Returns:
        int64 ``[..., 2]``.

    Examples:
        >>> key(42)
        tensor([ 0, 42])
    """
    return _words(torch.as_tensor(seed, dtype=torch.int64, device=device))


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key from a key and a number: a row's id, an epoch, a step.

    Args:
        key: int64 ``[..., 2]``.
        data: any 64-bit integer, or an int64 tensor of them that broadcasts with ``key[..., 0]``.

    Returns:
        int64 ``[..., 2]``, the leading axes broadcast.

    Raises:
        TypeError: ``key`` is not a key.

    Examples:
        >>> rows = fold_in(key(0), torch.tensor([7, 3]))  # one key for each row
        >>> torch.equal(rows[1], fold_in(key(0), 3))
        True
    """
    data = torch.as_tensor(data, dtype=torch.int64, device=_checked("fold_in", key).device)
    return threefry(key, _words(data))


def split(key: Tensor, num: int = 2) -> Tensor:
    """``num`` keys from one: the i-th is ``fold_in(key, i)``.

    Returns:
        int64 ``[..., num, 2]``.

    Raises:
        TypeError: ``key`` is not a key.

    Examples:
        >>> split(key(42))
        tensor([[1832780943,  270669613],
                [  64467757, 2916123636]])
    """
    index = torch.arange(num, device=_checked("split", key).device)
    return threefry(key[..., None, :], _words(index))


def bits(key: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Uniform 32-bit integers.

    Returns:
        int64 ``[..., *shape]`` in ``[0, 2^32)``.

    Raises:
        TypeError: ``key`` is not a key.

    Examples:
        >>> torch.equal(bits(key(0), (3,)), bits(key(0), (9,))[:3])
        True
    """
    words = _block("bits", key, shape)
    return words[..., 0] ^ words[..., 1]


def uniform(
    key: Tensor,
    shape: Sequence[int] = (),
    *,
    dtype: torch.dtype = torch.float32,
    minval: float = 0.0,
    maxval: float = 1.0,
) -> Tensor:
    """Uniform floats in ``[minval, maxval)``: multiples of the dtype's epsilon, scaled.

    Args:
        key: int64 ``[..., 2]``.
        shape: of the draws of each key.
        dtype: a floating dtype. A float64 has 52 random bits, a float32 23, a bfloat16 7.
        minval: the lower bound, which is drawn.
        maxval: the upper bound, which is not.

    Returns:
        ``dtype`` ``[..., *shape]``.

    Raises:
        TypeError: ``key`` is not a key.
        ValueError: ``minval`` is not below ``maxval``.

    Examples:
        >>> uniform(key(0), (2,), minval=-1.0)
        tensor([0.8953, 0.9572])
    """
    if not minval < maxval:
        raise ValueError(
            f"uniform: minval must be below maxval, got {minval=} and {maxval=}. Swap them?"
        )
    unit = _unit("uniform", key, shape, dtype)
    value = unit * (maxval - minval) + minval
    # Rounding can reach the bound that is not drawn.
    return torch.where(value < maxval, value, minval)


def normal(key: Tensor, shape: Sequence[int] = (), *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draws from the standard normal distribution: ``√2 erfinv(u)``, u uniform in (-1, 1).

    It is computed in float64 and rounded to ``dtype``, so that devices agree.

    Returns:
        ``dtype`` ``[..., *shape]``.

    Raises:
        TypeError: ``key`` is not a key.

    Examples:
        >>> normal(key(42))
        tensor(-0.0283)
    """
    fine = dtype if dtype == torch.float64 else torch.float32
    unit = _unit("normal", key, shape, fine).double()
    half = torch.finfo(fine).eps / 2  # the middle of each cell: symmetric, and never -1 or 1
    return (math.sqrt(2) * torch.erfinv(2 * (unit + half) - 1)).to(dtype)


def bernoulli(key: Tensor, shape: Sequence[int] = (), *, p: float | Tensor = 0.5) -> Tensor:
    """True with probability ``p``, to a resolution of 2^-23.

    Args:
        key: int64 ``[..., 2]``.
        shape: of the draws of each key.
        p: a probability, or a tensor of them that broadcasts with ``[..., *shape]``.

    Returns:
        bool ``[..., *shape]``.

    Raises:
        TypeError: ``key`` is not a key.

    Examples:
        >>> bernoulli(key(0), (4,), p=0.25)
        tensor([False, False, False, False])
    """
    return _unit("bernoulli", key, shape, torch.float32) < p


def permutation(key: Tensor, n: int) -> Tensor:
    """The numbers below ``n`` in random order: the order of ``n`` 64-bit draws.

    Returns:
        int64 ``[..., n]``. Not a prefix of the permutation of more.

    Raises:
        TypeError: ``key`` is not a key.

    Examples:
        >>> permutation(key(0), 5)
        tensor([4, 3, 2, 1, 0])
    """
    words = _block("permutation", key, (n,))
    return torch.argsort((words[..., 0] << 32) | words[..., 1], dim=-1, stable=True)


def choice(
    key: Tensor, a: int | Tensor, shape: Sequence[int] = (), *, replace: bool = True
) -> Tensor:
    """Entries of ``a``, each with the same probability.

    Args:
        key: int64 ``[..., 2]``.
        a: a tensor ``[n, ...]`` to choose from along dim 0; an int n stands for ``arange(n)``.
        shape: of the draws of each key.
        replace: whether an entry may come twice. With it draw i depends on the key, i and n alone.

    Returns:
        int64 ``[..., *shape]``, or ``[..., *shape, *a.shape[1:]]`` of ``a``'s dtype.

    Raises:
        TypeError: ``key`` is not a key.
        ValueError: ``a`` is empty, or has fewer entries than are drawn without replacement.

    Examples:
        >>> choice(key(0), 100, (3,))
        tensor([41, 21, 96])
    """
    n = a if isinstance(a, int) else a.shape[0]
    num = math.prod(shape)
    if not 0 < n < 2**31 or (not replace and num > n):
        raise ValueError(
            f"choice: a must have from 1 to 2^31-1 entries, and no fewer than are drawn without "
            f"replacement, got {n} for {tuple(shape)=} and {replace=}. Draw fewer?"
        )
    if replace:
        index = _below(_block("choice", key, shape), n)
    else:
        index = permutation(key, n)[..., :num].reshape(*key.shape[:-1], *shape)
    return index if isinstance(a, int) else a[index]


def threefry(key: Tensor, counter: Tensor) -> Tensor:
    """The block function Threefry-2x32 with 20 rounds: a counter's two words, scrambled by a key.

    Args:
        key: int64 ``[..., 2]`` of 32-bit words.
        counter: int64 ``[..., 2]`` of 32-bit words, broadcast against ``key``.

    Returns:
        int64 ``[..., 2]`` of 32-bit words.

    Examples:
        >>> [hex(word) for word in threefry(key(0), torch.tensor([0, 0])).tolist()]
        ['0x6b200159', '0x99ba4efe']
    """
    k0, k1 = key[..., 0], key[..., 1]
    schedule = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0 = counter[..., 0] + k0
    x1 = (counter[..., 1] + k1) & _MASK
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0, x1 = _round(x0, x1, rotation)
        x0 += schedule[(group + 1) % 3]
        x1 += schedule[(group + 2) % 3] + (group + 1)
        x1 &= _MASK
    return torch.stack((x0 & _MASK, x1), dim=-1)


def _round(x0: Tensor, x1: Tensor, rotation: int) -> tuple[Tensor, Tensor]:
    # In place, which is several times faster. x0 is only added and xored: its low 32 bits are right
    # whatever gathers above them, so one mask at the end will do.
    x0 += x1
    wrapped = x1 >> (32 - rotation)
    x1 <<= rotation
    x1 |= wrapped
    x1 ^= x0
    x1 &= _MASK
    return x0, x1


def _words(number: Tensor) -> Tensor:
    return torch.stack(((number >> 32) & _MASK, number & _MASK), dim=-1)


def _block(name: str, key: Tensor, shape: Sequence[int]) -> Tensor:
    """Two 32-bit words for each element of ``shape``: int64 ``[..., *shape, 2]``."""
    index = torch.arange(math.prod(shape), device=_checked(name, key).device)
    # Pieces that stay in a processor's cache are several times faster.
    pieces = index.split(_PIECE) if index.device.type == "cpu" else (index,)
    words = [threefry(key[..., None, :], _words(piece)) for piece in pieces]
    return torch.cat(words, dim=-2).reshape(*key.shape[:-1], *shape, 2)


def _unit(name: str, key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Multiples of the dtype's epsilon in [0, 1): as many random bits as its fraction has."""
    words = _block(name, key, shape)
    digits = round(-math.log2(torch.finfo(dtype).eps))
    if digits > 32:
        number = (words[..., 0] << (digits - 32)) | (words[..., 1] >> (64 - digits))
    else:
        number = (words[..., 0] ^ words[..., 1]) >> (32 - digits)
    return number.to(dtype) * 2.0**-digits


def _below(words: Tensor, n: int) -> Tensor:
    """``floor(w n / 2^64)`` of the 64-bit numbers w, without a product beyond 63 bits."""
    return (words[..., 0] * n + ((words[..., 1] * n) >> 32)) >> 32


def _checked(name: str, key: Tensor) -> Tensor:
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or key.shape[-1:] != (2,):
        got = f"{key.dtype} {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
        raise TypeError(
            f"{name}: key must be an int64 tensor [..., 2], got {got}. Make one with key(seed)."
        )
    return key
