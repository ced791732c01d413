"""Keyed draws. A statistical test fails on a perfect generator with probability ``ERROR``."""

import math
import random as python_random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

from numden.pure import random

ERROR = 1e-9

words = st.integers(0, 2**32 - 1)
seeds = st.integers(-(2**63), 2**63 - 1)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)

# Draws whose element i depends on the key and i alone.
DRAWS = {
    "bits": random.bits,
    "uniform": random.uniform,
    "uniform64": lambda key, shape: random.uniform(key, shape, dtype=torch.float64),
    "uniform16": lambda key, shape: random.uniform(key, shape, dtype=torch.bfloat16, maxval=3.0),
    "normal": random.normal,
    "bernoulli": lambda key, shape: random.bernoulli(key, shape, p=0.3),
    "choice": lambda key, shape: random.choice(key, 1000, shape),
}
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())


def python_threefry(key, counter):
    """Threefry-2x32-20 from the paper's description, in Python's integers."""
    schedule = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    x, y = ((counter[i] + key[i]) % 2**32 for i in (0, 1))
    for number in range(20):
        x = (x + y) % 2**32
        turn = (13, 15, 26, 6, 17, 29, 16, 24)[number % 8]
        y = (y * 2**turn % 2**32 + y // 2 ** (32 - turn)) ^ x
        if number % 4 == 3:
            injection = number // 4 + 1
            x = (x + schedule[injection % 3]) % 2**32
            y = (y + schedule[(injection + 1) % 3] + injection) % 2**32
    return [x, y]


def chi_square_probability(counts):
    """Of counts at least this uneven, if all were equally likely (asymptotic, so many a cell)."""
    counts = torch.as_tensor(counts).double().flatten()
    expected = counts.mean()
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2).double()
    return torch.special.gammaincc(freedom, statistic / 2).item()


def distance_allowed(num):
    """Dvoretzky-Kiefer-Wolfowitz: a distribution function of num draws is no farther, but ERROR."""
    return math.sqrt(math.log(2 / ERROR) / (2 * num))


def distance(draws, distribution):
    """The largest gap between the draws' distribution function and the given one."""
    at = distribution(draws.double().sort().values)
    step = torch.arange(len(at) + 1).double() / len(at)
    return torch.maximum((step[1:] - at).max(), (at - step[:-1]).max()).item()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers_of_random123(counter, key, expected):
    block = random.threefry(torch.tensor(key), torch.tensor(counter))
    assert block.tolist() == list(expected)


@given(st.tuples(words, words), st.tuples(words, words))
def test_equivalent_threefry_python(key, counter):
    block = random.threefry(torch.tensor(key), torch.tensor(counter))
    assert block.tolist() == python_threefry(key, counter)


def test_known_answers_of_jax():
    # From JAX's documentation, with jax_threefry_partitionable.
    assert random.split(random.key(42)).tolist() == [
        [1832780943, 270669613],
        [64467757, 2916123636],
    ]
    # Ours is the middle of JAX's cell of 2^-23, hence the tolerance.
    assert random.normal(random.key(42)).item() == pytest.approx(-0.028304616, abs=2**-22)


@given(seeds)
def test_key_is_the_words_of_the_seed(seed):
    assert random.key(seed).tolist() == [seed % 2**64 >> 32, seed % 2**32]


@given(seeds, st.integers(0, 8))
def test_bits_follow_the_counter(seed, at):
    key = random.key(seed)
    high, low = python_threefry(key.tolist(), [0, at])
    assert random.bits(key, (9,))[at] == high ^ low


def test_bits_follow_the_counter_past_a_piece():
    num = random._PIECE + 5
    at = num - 2
    high, low = python_threefry([0, 3], [0, at])
    assert random.bits(random.key(3), (num,))[at] == high ^ low


@each_draw
@given(seed=seeds, short=st.integers(0, 9), more=st.integers(0, 9))
def test_prefix_stable(draw, seed, short, more):
    key = random.key(seed)
    assert torch.equal(draw(key, (short + more,))[:short], draw(key, (short,)))


@each_draw
@given(seed=seeds, shape=shapes)
def test_index_is_row_major(draw, seed, shape):
    key = random.key(seed)
    assert torch.equal(draw(key, shape).flatten(), draw(key, (math.prod(shape),)))


@pytest.mark.parametrize(
    "draw",
    [
        *(lambda key, draw=draw: draw(key, (2, 3)) for draw in DRAWS.values()),
        lambda key: random.permutation(key, 6),
        lambda key: random.choice(key, 6, (2, 2), replace=False),
        lambda key: random.choice(key, torch.eye(4), (3,)),
        lambda key: random.split(key, 3),
        lambda key: random.fold_in(key, 5),
    ],
)
@given(seed=seeds, batch=st.sampled_from([(3,), (2, 2)]))
def test_equivalent_batch_vmap_loop(draw, seed, batch):
    keys = random.split(random.key(seed), math.prod(batch))
    loop = torch.stack([draw(key) for key in keys])
    assert torch.equal(vmap(draw)(keys), loop)
    whole = draw(keys.reshape(*batch, 2))
    assert torch.equal(whole, loop.reshape(*batch, *loop.shape[1:]))


@given(seeds, st.lists(seeds, min_size=1, max_size=4), st.integers(1, 3))
def test_fold_in_broadcasts(seed, data, num_keys):
    keys = random.split(random.key(seed), num_keys)
    folded = random.fold_in(keys[:, None], torch.tensor(data))
    assert folded.shape == (num_keys, len(data), 2)
    for i, number in enumerate(data):
        assert torch.equal(folded[:, i], random.fold_in(keys, number))
        # A permutation of the 64-bit counters: different numbers never give one key.
        assert (folded[0, i] == folded[0, 0]).all() == (number == data[0])


@given(seeds, st.integers(1, 5))
def test_split_is_fold_in_of_the_index(seed, num):
    key = random.key(seed)
    assert torch.equal(random.split(key, num), random.fold_in(key, torch.arange(num)))


@each_draw
def test_pure(draw):
    key = random.key(1)
    states = torch.get_rng_state(), python_random.getstate(), key.clone()
    first = draw(key, (5,))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert python_random.getstate() == states[1]
    assert torch.equal(key, states[2])
    torch.manual_seed(7)
    python_random.seed(7)
    assert torch.equal(draw(key, (5,)), first)


@each_draw
def test_device_is_that_of_the_key(draw):
    key = random.split(random.fold_in(random.key(0, device="meta"), 3))
    assert draw(key, (4,)).device.type == "meta"
    assert random.permutation(key, 4).device.type == "meta"


@pytest.mark.parametrize("name", ["uniform64", "normal", "choice"])
def test_equivalent_compiled_eager(name):
    draw = DRAWS[name]
    compiled = torch.compile(lambda key: draw(key, (5,)), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(random.key(2)), draw(random.key(2), (5,)))


def test_inside_grad():
    noise = lambda: random.normal(random.key(0), (3,))
    slope = grad(lambda scale: (scale * noise()).sum())(torch.tensor(2.0))
    assert torch.equal(slope, noise().sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@given(seed=seeds, low=st.integers(-8, 8), width=st.integers(1, 64))
def test_uniform_is_half_open(dtype, seed, low, width):
    low, high = low / 8, (low + width) / 8
    draws = random.uniform(random.key(seed), (200,), dtype=dtype, minval=low, maxval=high)
    assert draws.dtype == dtype
    assert ((draws >= low) & (draws < high)).all()


def test_uniform_rounds_below_the_upper_bound():
    # In bfloat16 128.5 is no number: u + 128 rounds to 128 or 129, and 129 is not drawn.
    draws = random.uniform(random.key(0), (200,), dtype=torch.bfloat16, minval=128.0, maxval=129.0)
    assert (draws == 128).all()


@given(seeds)
def test_uniform_is_uniform(seed):
    for dtype in (torch.float32, torch.float64):
        draws = random.uniform(random.key(seed), (4000,), dtype=dtype)
        assert distance(draws, lambda x: x) < distance_allowed(4000)


@given(seeds)
def test_normal_is_normal(seed):
    for dtype in (torch.float32, torch.float64):
        draws = random.normal(random.key(seed), (4000,), dtype=dtype)
        assert draws.isfinite().all()
        assert distance(draws, torch.special.ndtr) < distance_allowed(4000)


@given(seeds, st.integers(0, 8))
def test_bernoulli_has_its_probability(seed, eighths):
    p = eighths / 8
    share = random.bernoulli(random.key(seed), (4000,), p=p).double().mean().item()
    # Hoeffding's inequality has the same bound as the distance of distribution functions.
    assert abs(share - p) < distance_allowed(4000)
    if p in (0, 1):
        assert share == p


def test_bernoulli_takes_a_tensor_of_probabilities():
    keys = random.split(random.key(0), 2)
    draws = random.bernoulli(keys, (50,), p=torch.tensor([[0.0], [1.0]]))
    assert torch.equal(draws, torch.tensor([[False], [True]]).expand(2, 50))


@given(seeds)
def test_each_bit_is_fair_and_apart_from_the_next_key(seed):
    draws = random.bits(random.fold_in(random.key(seed), torch.arange(2)), (4000,))
    flags = (draws[..., None] >> torch.arange(32)) & 1
    agree = (flags[0] == flags[1]).double().mean(0)
    bound = math.sqrt(math.log(2 * 64 / ERROR) / (2 * 4000))  # 64 bounds at once
    assert (flags[0].double().mean(0) - 0.5).abs().max() < bound
    assert (agree - 0.5).abs().max() < bound


@given(seeds)
def test_permutation_is_uniform(seed):
    drawn = random.permutation(random.split(random.key(seed), 4800), 4)
    code = (drawn * torch.tensor([64, 16, 4, 1])).sum(-1)
    assert torch.equal(drawn.sort(-1).values, torch.arange(4).expand(4800, 4))
    counts = code.unique(return_counts=True)[1]
    assert len(counts) == 24
    assert chi_square_probability(counts) > ERROR


@given(seeds, st.booleans())
def test_choice_is_uniform(seed, replace):
    drawn = random.choice(random.split(random.key(seed), 2000), 10, (3,), replace=replace)
    for column in drawn.T:
        assert chi_square_probability(column.bincount(minlength=10)) > ERROR


@given(seeds, st.integers(1, 2**31 - 1))
def test_choice_is_the_floor_of_the_64_bit_word(seed, n):
    high, low = python_threefry(random.key(seed).tolist(), [0, 0])
    assert random.choice(random.key(seed), n) == (high * 2**32 + low) * n >> 64


@given(seeds, st.integers(1, 20))
def test_choice_without_replacement_repeats_nothing(seed, n):
    drawn = random.choice(random.key(seed), n, (n,), replace=False)
    assert torch.equal(drawn.sort().values, torch.arange(n))


def test_choice_of_tensor_rows():
    rows = torch.arange(12).reshape(4, 3)
    index = random.choice(random.key(5), 4, (2, 5))
    assert torch.equal(random.choice(random.key(5), rows, (2, 5)), rows[index])


@pytest.mark.parametrize("name", [*DRAWS, "split", "fold_in", "permutation"])
def test_not_a_key(name):
    draw = DRAWS.get(name) or getattr(random, name)
    with pytest.raises(
        TypeError, match=r"key must be an int64 tensor \[..., 2\], got 3\. Make one"
    ):
        draw(3, 3 if name in ("split", "fold_in", "permutation") else (3,))
    with pytest.raises(TypeError, match=r"got torch.float32 \(2,\)"):
        random.bits(torch.zeros(2))
    with pytest.raises(TypeError, match=r"got torch.int64 \(3,\)"):
        random.bits(torch.arange(3))


def test_bad_values():
    key = random.key(0)
    with pytest.raises(ValueError, match=r"uniform: minval must be below maxval, got minval=1.0"):
        random.uniform(key, minval=1.0)
    with pytest.raises(ValueError, match=r"choice: a must have from 1 to .* got 0 for"):
        random.choice(key, 0, (1,))
    with pytest.raises(ValueError, match=r"got 3 for .*=\(2, 2\) and replace=False"):
        random.choice(key, torch.ones(3), (2, 2), replace=False)
