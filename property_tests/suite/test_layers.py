import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from numden.models import layers
from numden.pure import random

# Float64 sums of a few dozen addends of size about 1.
CLOSE = {"rtol": 0, "atol": 1e-13}


def draw(seed, *shape, dtype=torch.float64):
    return random.normal(random.key(seed), shape, dtype=dtype)


def dense_attention(q, k, v, visible):
    """Attention one query at a time, over the visible keys alone."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for b, n, i in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        keys = visible[b, n, i].nonzero()[:, 0]
        scores = k[b, n // group, keys] @ q[b, n, i] / q.shape[-1] ** 0.5
        out[b, n, i] = scores.exp() @ v[b, n // group, keys] / scores.exp().sum()
    return out.nan_to_num()  # 0/0 where no key is visible


@st.composite
def attention_inputs(draw_from):
    batch, kv_heads, group, num_queries = (draw_from(st.integers(1, 3)) for _ in range(4))
    num_keys, dim = draw_from(st.integers(1, 5)), draw_from(st.integers(1, 3)) * 2
    seed = draw_from(st.integers(0, 2**16))
    q = draw(seed, batch, kv_heads * group, num_queries, dim)
    k, v = draw(seed + 1, 2, batch, kv_heads, num_keys, dim)
    return q, k, v, seed


@given(attention_inputs(), st.sampled_from(["rows", "row", "one head", "all heads"]))
def test_equivalent_attention_dense(inputs, kind):
    q, k, v, seed = inputs
    (batch, heads, num_queries, _), num_keys = q.shape, k.shape[2]
    shape = {
        "rows": (num_queries, num_keys),
        "row": (batch, num_queries, num_keys),
        "one head": (batch, 1, num_queries, num_keys),
        "all heads": (batch, heads, num_queries, num_keys),
    }[kind]
    mask = random.bernoulli(random.key(seed), shape)
    visible = mask.unsqueeze(1) if kind == "row" else mask
    expected = dense_attention(q, k, v, visible.expand(batch, heads, num_queries, num_keys))
    torch.testing.assert_close(layers.attention(q, k, v, mask), expected, **CLOSE)


@given(attention_inputs(), st.booleans())
def test_equivalent_causal_masked(inputs, with_mask):
    q, k, v, seed = inputs
    num_queries, num_keys = q.shape[2], k.shape[2]
    order = torch.arange(num_keys) <= torch.arange(num_queries)[:, None] + num_keys - num_queries
    mask = random.bernoulli(random.key(seed), (num_queries, num_keys)) if with_mask else None
    both = order if mask is None else order & mask
    causal = layers.attention(q, k, v, mask, causal=True)
    torch.testing.assert_close(causal, layers.attention(q, k, v, both), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [None, SDPBackend.MATH])
def test_query_without_visible_key_gives_exact_zeros(dtype, backend):
    q, k, v = (draw(s, 2, 2, 3, 4, dtype=dtype).requires_grad_() for s in range(3))
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    with sdpa_kernel(backend) if backend else torch.enable_grad():
        out = layers.attention(q, k, v, mask)
        dead = torch.autograd.grad(out[:, :, 1].sum(), (q, k, v), retain_graph=True)
        whole = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.dtype == dtype
    assert not out[:, :, 1].any()
    assert not any(grad.any() for grad in dead)
    assert all(grad.isfinite().all() for grad in whole)
    assert not whole[0][:, :, 1].any()


# torch's own jvp rules are still scripted.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_attention_composes_with_transforms():
    q, k, v = draw(0, 3, 1, 2, 3, 4), draw(1, 3, 1, 1, 3, 4), draw(2, 3, 1, 1, 3, 4)
    mask = torch.ones(3, 3, dtype=torch.bool).tril()

    def energy(q, k, v):
        return layers.attention(q, k, v, mask).square().sum()

    def whole(q):
        return sum(energy(*row) for row in zip(q, k, v, strict=True))

    grad = torch.func.grad(whole)(q)
    with sdpa_kernel(SDPBackend.MATH):
        per_row = torch.func.vmap(torch.func.grad(energy))(q, k, v)
        slope = torch.func.jvp(whole, (q,), (q,))[1]
        curvature = torch.func.jvp(torch.func.grad(whole), (q,), (0 * q,))[1]
    torch.testing.assert_close(per_row, grad, **CLOSE)
    torch.testing.assert_close(slope, (grad * q).sum(), **CLOSE)
    assert not curvature.any()


def test_attention_refuses():
    q, k = torch.zeros(1, 3, 2, 4), torch.zeros(1, 2, 2, 4)
    with pytest.raises(ValueError, match=r"heads of q must be a multiple.*\(1, 3, 2, 4\).*\(1, 2"):
        layers.attention(q, k, k)
    with pytest.raises(TypeError, match=r"mask must be bool.*got torch.float32"):
        layers.attention(q, q, q, torch.zeros(2, 2))


@given(st.integers(0, 2**16), st.integers(1, 9))
def test_equivalent_rms_norm_torch(seed, width):
    x, weight = draw(seed, 3, width), draw(seed + 1, width)
    expected = torch.nn.functional.rms_norm(x, (width,), weight, eps=1e-6)
    torch.testing.assert_close(layers.rms_norm(x, weight), expected, **CLOSE)


def test_rms_norm_of_half_is_float32_inside():
    # Squares of these overflow float16; the norm of equal entries is 1.
    x = torch.full((4,), 1024.0, dtype=torch.float16)
    assert torch.equal(layers.rms_norm(x, torch.full_like(x, 0.5)), torch.full_like(x, 0.5))


def test_rms_norm_of_zeros_has_finite_gradient():
    x = torch.zeros(2, 3, requires_grad=True)
    out = layers.rms_norm(x, torch.ones(3))
    assert not out.any()
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_rope_product_depends_on_difference(first, second, shift):
    q, k = draw(0, 1, 1, 1, 8), draw(1, 1, 1, 1, 8)

    def product(i, j):
        rotated = [
            layers.apply_rope(x, *layers.rope_tables(torch.tensor([at]), 8, dtype=torch.float64))
            for x, at in ((q, i), (k, j))
        ]
        return (rotated[0] * rotated[1]).sum()

    # The angles, up to 100 radians, are rounded to float32.
    torch.testing.assert_close(
        product(first, second), product(first + shift, second + shift), rtol=0, atol=1e-4
    )


def test_rope_is_a_rotation_of_pairs():
    x = draw(0, 2, 3, 5, 6)
    cos, sin = layers.rope_tables(torch.arange(10).reshape(2, 5), 6, dtype=torch.float64)
    pairs = torch.complex(x[..., :3], x[..., 3:])
    turned = pairs * torch.complex(cos[..., :3], sin[..., :3])[:, None]
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(layers.apply_rope(x, cos, sin), expected, **CLOSE)


def test_rope_has_theta_wavelengths():
    cos, sin = layers.rope_tables(torch.tensor([3]), 4, theta=100.0)
    expected = torch.tensor([[3.0, 0.3, 3.0, 0.3]])
    torch.testing.assert_close(cos, expected.cos())
    torch.testing.assert_close(sin, expected.sin())
    assert layers.rope_tables(torch.tensor([3]), 4, dtype=torch.bfloat16)[0].dtype == torch.bfloat16


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_roundtrip_heads(batch, length, heads, dim):
    x = draw(0, batch, length, heads * dim)
    split = layers.split_heads(x, heads)
    assert split.shape == (batch, heads, length, dim)
    assert torch.equal(split[:, -1, 0], x[:, 0, -dim:])
    assert torch.equal(layers.merge_heads(split), x)


def test_equivalent_swiglu_formula():
    x, gate, up, down = draw(0, 2, 3), draw(1, 4, 3), draw(2, 4, 3), draw(3, 3, 4)
    gated = x @ gate.T
    expected = (gated / (1 + torch.exp(-gated)) * (x @ up.T)) @ down.T
    torch.testing.assert_close(layers.swiglu(x, gate, up, down), expected, **CLOSE)


def test_weight_rows_do_not_depend_on_their_number():
    key = random.key(3)
    # 300 rows of 512 are more than one block of draws.
    whole = layers.init_weight(key, 300, 512)
    assert torch.equal(layers.init_weight(key, 2, 512), whole[:2])
    assert torch.equal(
        layers.init_weight(key, 300, 512, dtype=torch.bfloat16), whole.to(torch.bfloat16)
    )
    # The deviation of 153,600 draws is off by 0.2 % of itself, so 1 % is five of those.
    assert whole.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(whole.mean().item()) < 5 * 0.02 / 300
