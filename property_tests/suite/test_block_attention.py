import pytest
import torch
from block_cases import SHAPE, assert_close, make_batch
from dspark_cases import TARGET, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from numden.models import dflash
from numden.models.anchors import block_mask
from numden.models.block_attention import block_attention, choose_kernel, mask_function
from numden.pure import random

# It says that without the compiler it is slow.
uncompiled = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")


def draw_blocks(seed, num_rows, num_blocks, context_size):
    anchors = random.choice(random.key(seed), context_size, (num_rows, num_blocks))
    return anchors, random.bernoulli(random.key(seed + 1), (num_rows, num_blocks), p=0.7)


@settings(max_examples=15)
@given(
    st.integers(0, 999),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 5),
    st.none() | st.integers(1, 6),
)
def test_equivalent_mask_function_block_mask(seed, rows, blocks, context, size, window):
    drawn = draw_blocks(seed, rows, blocks, context)
    num_slots = blocks * size
    sees = mask_function(*drawn, context, size, window=window)
    made = create_mask(sees, rows, None, num_slots, context + num_slots, device="cpu")
    assert torch.equal(made[:, 0], block_mask(*drawn, context, size, window=window))


@uncompiled
@pytest.mark.parametrize("window", [None, 4])
def test_equivalent_kernels(window):
    anchors, keep = torch.tensor([[1, 5, 7], [0, 9, 0]]), torch.ones(2, 3, dtype=torch.bool)
    keep[1, 2] = False
    q, k, v = (
        normal(i, 2, heads, size, 8) for i, heads, size in [(0, 4, 12), (1, 2, 23), (2, 2, 23)]
    )
    flex, dense = (
        block_attention(anchors, keep, 11, 4, window=window, kernel=kernel)(q, k, v)
        for kernel in ("flex", "dense")
    )
    torch.testing.assert_close(flex, dense)
    assert flex[1, :, 8:].count_nonzero() == 0  # a block that is not kept sees nothing
    assert flex[1, :, :8].count_nonzero() > 0


@uncompiled
def test_equivalent_losses_by_kernel():
    """The network takes the kernel that its configuration names, in layers of both kinds."""
    sliding = {"sliding_layers": (1,), "sliding_window": 3}
    found = []
    for kernel in ("flex", "dense"):
        config = dflash.Config(**SHAPE, **sliding, kernel=kernel)
        batch = make_batch(dflash.prepare, config, supervised=0.6)
        params = dflash.init(config, random.key(0), std=0.4, dtype=torch.float64)
        found.append(dflash.loss_terms(params, batch, config, TARGET))
    assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused kernel needs a GPU")
@pytest.mark.parametrize("window", [None, 40])
def test_equivalent_kernels_on_a_gpu(window):
    anchors, keep = draw_blocks(0, 2, 9, 300)
    inputs = [
        normal(i, 2, heads, size, 64) for i, heads, size in [(0, 4, 144), (1, 2, 444), (2, 2, 444)]
    ]
    found = []
    for kernel in ("auto", "dense"):
        q, k, v = (x.float().cuda().requires_grad_() for x in inputs)
        chosen = choose_kernel(kernel, q, 64)
        attend = block_attention(anchors.cuda(), keep.cuda(), 300, 16, window=window, kernel=chosen)
        out = attend(q, k, v)
        out.square().sum().backward()
        found.append([out, q.grad, k.grad, v.grad])
    assert choose_kernel("auto", q, 64) == "flex"
    for flex, dense in zip(*found, strict=True):
        # The kernel multiplies in TF32.
        torch.testing.assert_close(flex, dense, rtol=1e-2, atol=1e-2)


def test_auto_is_dense_where_there_is_no_fused_kernel():
    like = torch.zeros(1)
    assert choose_kernel("auto", like, 64) == "dense"
    assert choose_kernel("flex", like, 64) == "flex"
