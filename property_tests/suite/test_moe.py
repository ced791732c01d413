import math
from dataclasses import replace
from functools import partial, reduce

import pytest
import torch
import torch.distributed as c10d
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import ThreadRanks, cut, make_batch, make_config, make_params
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from numden.dist import all_to_all, run_local, shard, sum_gradients
from numden.dist import window_grad as dist_window_grad
from numden.models import as_module, call, decoder, moe
from numden.models.experts import mix
from numden.pure import add, divide, random, tree, window_grad
from numden.pure.losses import balance_loss

CLOSE = {"rtol": 1e-11, "atol": 1e-12}  # float64; sums in another order, some of them cancel


def whole_grad(config, params, batches, **options):
    """Loss and gradient of a window by autograd on its total sums."""
    leaves, structure = tree.flatten(params)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    run = partial(moe.loss_terms, tree.unflatten(structure, leaves), config=config, **options)
    totals = reduce(add, [run(batch) for batch in batches])
    loss = moe.objective(config)(totals)
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return loss.detach(), tree.unflatten(structure, list(grads))


# Against an implementation that runs all experts on all tokens.


def dense_mix(experts, x, selected, weights):
    gate, up = (torch.einsum("th,emh->tem", x, experts[name]) for name in ("gate", "up"))
    outputs = torch.einsum("tem,ehm->teh", functional.silu(gate) * up, experts["down"])
    chosen = outputs.gather(1, selected[..., None].expand(*selected.shape, x.shape[1]))
    return (chosen * weights[..., None]).sum(1)


@st.composite
def mixes(draw, width=8):
    num_experts = draw(st.sampled_from([1, 2, 4, 6]))
    k = draw(st.integers(1, num_experts))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    normal = partial(torch.randn, generator=g, dtype=torch.float64)
    shape = {"gate": (16, width), "up": (16, width), "down": (width, 16)}
    experts = {name: normal(num_experts, *sizes) for name, sizes in shape.items()}
    num_tokens = draw(st.integers(0, 9))
    favoured = draw(st.sampled_from([0.0, 9.0])) * torch.arange(num_experts)
    selected = (normal(num_tokens, num_experts) + favoured).topk(k).indices
    return experts, normal(num_tokens, width), selected, normal(num_tokens, k)


def value_and_grads(fn, experts, x, selected, weights):
    def loss(experts, x, weights):
        y = fn(experts, x, selected, weights)
        return (y * torch.arange(y.numel(), dtype=y.dtype).sin().view_as(y)).sum()

    return torch.func.grad_and_value(loss, (0, 1, 2))(experts, x, weights)


@given(case=mixes())
def test_mix_runs_the_chosen_experts(case):
    mixed = partial(mix, num_experts=case[0]["gate"].shape[0])
    torch.testing.assert_close(
        value_and_grads(mixed, *case), value_and_grads(dense_mix, *case), **CLOSE
    )


@given(case=mixes(), width=st.sampled_from([8, 7]))
def test_grouped_matmul_gives_the_same(case, width):
    """In float32 torch has one, unless sizes are odd."""
    experts, x, selected, weights = tree.map(
        lambda t: t.float() if t.is_floating_point() else t, case
    )
    experts = {name: w.narrow(2 if name != "down" else 1, 0, width) for name, w in experts.items()}
    case = experts, x[:, :width], selected, weights
    mixed = partial(mix, num_experts=experts["gate"].shape[0])
    # Sums of up to 16 products of numbers near 3, each rounded to 24 bits.
    torch.testing.assert_close(
        value_and_grads(mixed, *case), value_and_grads(dense_mix, *case), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_experts_without_tokens_have_zero_gradients(dtype):
    config = make_config(num_layers=1, expert_size=8)
    params = make_params(config, dtype=dtype)
    params["layers"][0]["router"].zero_()
    batch = make_batch() | {"selected": torch.tensor([0, 2]).expand(2, 5, 1, 2)}
    grads = whole_grad(config, params, [batch])[1]["layers"][0]["experts"]
    for grad in grads.values():
        assert grad.dtype == dtype
        assert not grad[[1, 3]].any()
        assert grad[[0, 2]].any()
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cost_is_that_of_the_chosen(dtype):
    """Rows that matmuls see: k / E of dense, and at most twice that in blocks."""
    from torch.utils.flop_counter import FlopCounterMode

    num_experts, k, num_tokens = 16, 2, 200
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=dtype)
    inner, width = 16, 8
    experts = {"gate": normal(num_experts, inner, width), "up": normal(num_experts, inner, width)}
    experts["down"] = normal(num_experts, width, inner)
    selected = normal(num_tokens, num_experts).topk(k).indices
    with FlopCounterMode(display=False) as counter:
        mix(experts, normal(num_tokens, width), selected, normal(num_tokens, k), num_experts=16)
    rows = counter.get_total_flops() / (2 * 3 * inner * width)
    assert rows <= 2 * num_tokens * k + num_experts


# Against transformers.


def their_model(**changes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    fields = {
        "vocab_size": 13,
        "hidden_size": 8,
        "intermediate_size": 12,
        "moe_intermediate_size": 6,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rms_norm_eps": 1e-5,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "experts_implementation": "eager",
    }
    config = transformers.Qwen3MoeConfig(**fields | changes)
    model = transformers.Qwen3MoeForCausalLM(config).eval().double()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.5)
    return model


def params_of(model):
    def of_layer(layer):
        attn, mlp = layer.self_attn, layer.mlp
        params = {
            "attn_norm": layer.input_layernorm.weight,
            "attn": {name: getattr(attn, f"{name}_proj").weight for name in "qkvo"}
            | {"q_norm": attn.q_norm.weight, "k_norm": attn.k_norm.weight},
            "mlp_norm": layer.post_attention_layernorm.weight,
        }
        if not hasattr(mlp, "experts"):
            names = ("gate", "up", "down")
            return params | {"mlp": {name: getattr(mlp, f"{name}_proj").weight for name in names}}
        gate, up = mlp.experts.gate_up_proj.chunk(2, dim=1)
        experts = {"gate": gate, "up": up, "down": mlp.experts.down_proj}
        return params | {"router": mlp.gate.weight, "experts": experts}

    inner = model.model
    params = {"embed": inner.embed_tokens.weight, "norm": inner.norm.weight}
    params |= {"layers": [of_layer(layer) for layer in inner.layers]}
    return tree.map(torch.Tensor.detach, params | {"head": model.lm_head.weight})


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dense", [(), (0,), (1,)])
def test_equals_transformers(norm, dense):
    model = their_model(norm_topk_prob=norm, mlp_only_layers=list(dense))
    config = make_config(norm_topk_prob=norm, dense_layers=dense)
    params, batch = params_of(model), make_batch(size=7, padding=False)
    tokens, mask = batch["tokens"], batch["loss_mask"]
    theirs = model(tokens, labels=tokens.where(mask, -100), output_router_logits=True)
    # Their tables of RoPE and their sum of squares in norms are float32, whatever the model is.
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(moe.apply(params, tokens, config), theirs.logits, **close)
    terms = moe.loss_terms(params, batch, config)
    ce = divide(terms)["ce"]
    torch.testing.assert_close(ce, (theirs.loss - 0.001 * theirs.aux_loss).to(ce.dtype), **close)
    routings = moe.states(params, tokens, config).routings
    for routing, logits in zip(routings, theirs.router_logits, strict=True):
        torch.testing.assert_close(routing.logits.flatten(0, 1), logits, **close)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_router_loss_of_transformers(num_layers):
    """Theirs pools the layers, and does not divide by k: of one layer, it is k times ours."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    config = make_config(num_layers=num_layers)
    params, batch = make_params(config), make_batch(num_rows=3, size=6)
    routings = moe.states(params, batch["tokens"], config).routings
    logits = tuple(routing.logits.flatten(0, 1) for routing in routings)
    theirs = load_balancing_loss_func(logits, 4, 2, batch["token_mask"]).double()
    stats = moe.router_stats(routings, batch["token_mask"])
    close = {"rtol": 1e-5, "atol": 1e-5}  # they add in float32
    if num_layers == 1:
        torch.testing.assert_close(theirs, 2 * balance_loss(stats, num_selected=2), **close)
    share = {name: value.double().mean(0) / stats.den for name, value in stats.num.items()}
    torch.testing.assert_close(theirs, 4 * (share["counts"] * share["probs"]).sum(), **close)


# The losses.


def test_uniform_router():
    """Balance L and z L (ln E)², whatever is routed where."""
    config = make_config(num_layers=3, dense_layers=(1,), alpha_balance=0.5, alpha_z=0.25)
    params = make_params(config)
    for layer in params["layers"]:
        if "router" in layer:
            layer["router"].zero_()
    totals = moe.loss_terms(params, make_batch(), config)
    assert divide(totals)["z"].item() == pytest.approx(2 * math.log(4) ** 2, rel=1e-12)
    loss = moe.objective(config)(totals) - divide(totals)["ce"]
    assert loss.item() == pytest.approx(0.5 * 2 + 0.25 * 2 * math.log(4) ** 2, rel=1e-12)
    assert totals.num["balance"]["counts"].sum(-1).tolist() == [2 * int(totals.den["balance"])] * 2


def test_terms_count_their_own_tokens():
    config, batch = make_config(), make_batch(num_rows=4, size=6)
    terms = moe.loss_terms(make_params(config), batch, config)
    assert terms.den["ce"] == batch["loss_mask"][:, 1:].sum()
    assert terms.den["balance"] == terms.den["z"] == batch["token_mask"].sum()
    assert terms.num["balance"]["counts"].sum() == 2 * 2 * batch["token_mask"].sum()
    unmasked = {name: batch[name] for name in ("tokens", "loss_mask")}
    assert moe.loss_terms(make_params(config), unmasked, config).den["z"] == 24


def test_ce_is_that_of_the_decoder_when_experts_are_its_mlp():
    """Each token of two equal experts with weights that add up to 1."""
    config = make_config(num_experts=2, num_selected=2, expert_size=12)
    dense = decoder.Config(**{f: getattr(config, f) for f in decoder.Config.__dataclass_fields__})
    params = make_params(config)
    for layer in params["layers"]:
        for weight in layer["experts"].values():
            weight[1] = weight[0]
    layers = [
        {name: layer[name] for name in ("attn_norm", "attn", "mlp_norm")}
        | {"mlp": {name: weight[0] for name, weight in layer["experts"].items()}}
        for layer in params["layers"]
    ]
    batch = make_batch(padding=False)
    ours, theirs = (
        moe.loss_terms(params, batch, config),
        decoder.loss_terms(params | {"layers": layers}, batch, dense),
    )
    torch.testing.assert_close(ours.num["ce"], theirs.num, **CLOSE)


@pytest.mark.parametrize("plan", ["auto", "columns", "replay"])
@pytest.mark.parametrize("scope", ["window", "micro-step"])
def test_plans_give_the_gradient_of_the_totals(plan, scope):
    config = make_config(alpha_balance=0.3, alpha_z=0.2, balance_scope=scope)
    params, window = make_params(config), [make_batch(seed=i, size=3 + i) for i in range(3)]
    loss, grads = whole_grad(config, params, window)
    loss_fn = partial(moe.loss_terms, config=config)
    got = window_grad(loss_fn, moe.objective(config), plan=plan)(params, window)
    torch.testing.assert_close(got.loss, loss, **CLOSE)
    torch.testing.assert_close(got.grads, grads, **CLOSE)


def join(batches):
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def test_balance_of_the_window_does_not_depend_on_how_it_is_cut():
    config = make_config(alpha_balance=0.3, alpha_z=0.2)
    params, parts = make_params(config), [make_batch(seed=i, num_rows=1 + i) for i in range(3)]
    torch.testing.assert_close(
        whole_grad(config, params, parts), whole_grad(config, params, [join(parts)]), **CLOSE
    )


def test_balance_per_micro_step_is_the_mean_by_tokens():
    config = make_config(alpha_balance=1.0, balance_scope="micro-step")
    window = replace(config, balance_scope="window")
    params, parts = make_params(config), [make_batch(seed=i, size=3 + i) for i in range(3)]
    totals = reduce(add, [moe.loss_terms(params, part, config) for part in parts])
    each = [moe.loss_terms(params, part, window) for part in parts]
    losses = [moe.objective(window)(terms) - divide(terms)["ce"] for terms in each]
    sizes = [int(terms.den["balance"]) for terms in each]
    expected = sum(n * loss for n, loss in zip(sizes, losses, strict=True)) / sum(sizes)
    got = moe.objective(config)(totals) - divide(totals)["ce"]
    torch.testing.assert_close(got, expected, **CLOSE)


def test_choices_made_before_are_counted_and_dispatched():
    config = make_config(num_layers=1)
    params, batch = make_params(config), make_batch(padding=False)
    chosen = moe.states(params, batch["tokens"], config).routings[0].selected
    same = moe.loss_terms(params, batch | {"selected": chosen[:, :, None]}, config)
    torch.testing.assert_close(same, moe.loss_terms(params, batch, config), **CLOSE)
    forced = torch.tensor([2, 3]).expand(2, 5, 1, 2)
    terms = moe.loss_terms(params, batch | {"selected": forced}, config)
    assert terms.num["balance"]["counts"].tolist() == [[0, 0, 10, 10]]
    params["layers"][0]["experts"]["down"][2:] = 0
    without = moe.apply(params, batch["tokens"], config, selected=forced)
    params["layers"][0]["experts"]["up"].zero_()
    torch.testing.assert_close(without, moe.apply(params, batch["tokens"], config), **CLOSE)


def test_bias_of_each_router():
    config = make_config(num_layers=3, dense_layers=(1,), router="biased")
    params, batch = make_params(config), make_batch()
    bias = torch.tensor([[9.0, 9, 0, 0], [0, 0, 9, 9]])
    terms = moe.loss_terms(params, batch, config, router_bias=bias)
    n = int(terms.den["balance"])
    assert terms.num["balance"]["counts"].tolist() == [[n, n, 0, 0], [0, 0, n, n]]


def test_tokens_are_causal_and_padding_is_neutral():
    config, batch = make_config(alpha_z=0.1), make_batch()
    params = make_params(config)
    filled = batch | {"tokens": batch["tokens"].where(batch["token_mask"], 7)}
    torch.testing.assert_close(
        whole_grad(config, params, [batch]), whole_grad(config, params, [filled]), **CLOSE
    )


def test_steps_give_the_states_of_the_whole():
    config = make_config(num_layers=3, dense_layers=(1,), router="biased")
    params, tokens = make_params(config), make_batch(size=6)["tokens"]
    bias = torch.rand(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = moe.hidden_states(params, tokens, config, layers=(0, 2), router_bias=bias)
    cache, parts = decoder.init_cache(config, 2, 6, dtype=torch.float64), []
    for part in tokens.split([1, 3, 2], dim=1):
        *found, cache = moe.step(params, part, cache, config, layers=(0, 2), router_bias=bias)
        parts.append(found)
    found = tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    torch.testing.assert_close(found, whole, **CLOSE)


def test_nothing_counted_is_exactly_zero():
    config, batch = make_config(), make_batch()
    empty = batch | {"token_mask": torch.zeros_like(batch["token_mask"])}
    for each in (empty, {name: value[:0] for name, value in batch.items()}):
        _, grads = whole_grad(config, make_params(config), [each])
        assert all(not grad.any() for grad in tree.leaves(grads))
        terms = moe.loss_terms(make_params(config), each, config)
        assert all(not leaf.any() for leaf in tree.leaves(terms))


def test_metrics():
    config, batch = make_config(), make_batch()
    params = make_params(config)
    found, terms = moe.metrics(params, batch, config), moe.loss_terms(params, batch, config)
    torch.testing.assert_close(found["cross_entropy"].num, terms.num["ce"], **CLOSE)
    assert found["accuracy"].den == terms.den["ce"]
    assert torch.equal(found["router_z"].num, terms.num["z"])
    assert torch.equal(found["router"].num["counts"], terms.num["balance"]["counts"])


def test_torch_func_grad_is_autograd():
    config, batch = make_config(alpha_balance=0.3, alpha_z=0.2), make_batch()
    params = make_params(config)

    def loss(params):
        return moe.objective(config)(moe.loss_terms(params, batch, config))

    torch.testing.assert_close(
        torch.func.grad(loss)(params), whole_grad(config, params, [batch])[1], **CLOSE
    )


def test_bfloat16_stays_near_float64():
    config, batch = make_config(expert_size=8, alpha_balance=0.3, alpha_z=0.2), make_batch()
    half = make_params(config, dtype=torch.bfloat16)
    chosen = [routing.selected for routing in moe.states(half, batch["tokens"], config).routings]
    batch |= {"selected": torch.stack(chosen, dim=2)}
    wide = tree.map(lambda x: x.double(), half)
    (loss, grads), (expected, exact) = (
        whole_grad(config, params, [batch]) for params in (half, wide)
    )
    # 8 bits of mantissa, through two blocks.
    torch.testing.assert_close(loss.double(), expected, rtol=2e-2, atol=0)
    for grad, reference in zip(tree.leaves(grads), tree.leaves(exact), strict=True):
        assert grad.dtype == torch.bfloat16
        assert (grad.double() - reference).norm() <= 0.1 * reference.norm() + 1e-3


# Expert parallelism.


def by_threads(config, params, batches):
    """Loss and gradient of ranks with a part of the experts each, by one autograd graph."""
    leaves, structure = tree.flatten(params)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    whole, num_ranks = tree.unflatten(structure, leaves), len(batches)

    def on_rank(rank, exchange):
        own = cut(whole, rank, num_ranks)
        return moe.loss_terms(own, batches[rank], config, exchange=exchange)

    terms = ThreadRanks(num_ranks).run(on_rank)
    totals = reduce(add, terms)
    loss = moe.objective(config)(totals)
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return totals, loss.detach(), tree.unflatten(structure, list(grads))


@settings(max_examples=15)
@given(
    num_ranks=st.sampled_from([2, 4]),
    k=st.integers(1, 4),
    seed=st.integers(0, 99),
    router=st.sampled_from(["softmax", "sigmoid", "biased"]),
    empty=st.booleans(),
)
def test_ranks_with_a_part_of_the_experts(num_ranks, k, seed, router, empty):
    """Sums, loss and every gradient are those of one rank with all rows; each rank has its own."""
    config = make_config(
        num_selected=k, router=router, alpha_balance=0.3, alpha_z=0.2, dense_layers=(1,)
    )
    params = make_params(config, seed)
    batches = [make_batch(seed=seed + rank) for rank in range(num_ranks)]
    if empty:
        batches[-1]["token_mask"] = torch.zeros_like(batches[-1]["token_mask"])
    totals, *got = by_threads(config, params, batches)
    torch.testing.assert_close(tuple(got), whole_grad(config, params, [join(batches)]), **CLOSE)
    torch.testing.assert_close(totals, moe.loss_terms(params, join(batches), config), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_all_tokens_to_one_expert(dtype):
    """The rank without a used expert sends, receives and gives exact zeros."""
    config = make_config(num_selected=1, num_layers=1, expert_size=8, norm_topk_prob=False)
    params = make_params(config, dtype=dtype)
    forced = {"selected": torch.full((2, 5, 1, 1), 1)}
    batches = [make_batch(seed=rank) | forced for rank in (0, 1)]
    _, loss, grads = by_threads(config, params, batches)
    close = CLOSE if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close((loss, grads), whole_grad(config, params, [join(batches)]), **close)
    for grad in grads["layers"][0]["experts"].values():
        assert not grad[[0, 2, 3]].any()
        assert grad[1].any()


def test_processes_that_exchange_tokens():
    """The same over gloo, each rank by torch.func.grad of its own sums."""
    config = make_config(alpha_balance=0.3, alpha_z=0.2)
    params, batches = make_params(config), [make_batch(seed=rank) for rank in (0, 1)]
    totals = moe.loss_terms(params, join(batches), config)
    balance = totals.num["balance"]

    def on_rank():
        rank = c10d.get_rank()

        def share(own):
            # The rank's own nums; what the objective needs of the others has no gradient.
            terms = moe.loss_terms(own, batches[rank], config, exchange=all_to_all)
            probs = {"counts": balance["counts"], "probs": terms.num["balance"]["probs"]}
            return moe.objective(config)(
                terms._replace(num=terms.num | {"balance": probs}, den=totals.den)
            )

        return torch.func.grad_and_value(share)(cut(params, rank, 2))

    (first, loss0), (second, loss1) = run_local(on_rank, 2, timeout=60)
    loss, grads = whole_grad(config, params, [join(batches)])
    torch.testing.assert_close(loss0 + loss1, loss, **CLOSE)
    for index, layer in enumerate(grads["layers"]):
        for name, grad in layer.pop("experts").items():
            parts = [each["layers"][index]["experts"].pop(name) for each in (first, second)]
            torch.testing.assert_close(torch.cat(parts), grad, **CLOSE)
        assert not first["layers"][index].pop("experts")
        assert not second["layers"][index].pop("experts")
    torch.testing.assert_close(tree.map(torch.add, first, second), grads, **CLOSE)


@pytest.mark.parametrize("plan", ["columns", "replay"])
def test_window_of_ranks_that_own_experts(plan):
    """One rank has two micro-steps, the other one, which it repeats with a mask for the second."""
    config = make_config(alpha_balance=0.3, alpha_z=0.2)
    params, batches = make_params(config), [make_batch(seed=seed) for seed in range(3)]
    loss, grads = whole_grad(config, params, batches)

    def on_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        own = tree.map(torch.clone, params)
        for layer in own["layers"]:
            layer["experts"] = shard(layer["experts"], mesh)
        exchange = partial(all_to_all, axis=mesh["ep"])
        loss_fn = partial(moe.loss_terms, config=config, exchange=exchange)
        grad = dist_window_grad(
            loss_fn, moe.objective(config), mesh=mesh, owned_over="ep", plan=plan
        )
        result = grad(own, batches[c10d.get_rank() :: 2])
        return result.loss, tree.map(whole, result.grads)

    for result in run_local(on_rank, 2, timeout=60):
        torch.testing.assert_close(result, (loss, grads), **CLOSE)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_module_of_fsdp_and_expert_parallelism():
    """Experts are DTensors over `ep`, and FSDP2 shards all over the other dimension."""
    config = make_config(num_layers=1)
    params, batches = make_params(config), [make_batch(seed=rank) for rank in range(4)]
    expected = moe.loss_terms(params, join(batches), config)
    # The sum of nats, without its den.
    alone = replace(config, alpha_balance=0.0)
    ce_grads = whole_grad(alone, params, [join(batches)])[1]["layers"][0]["experts"]
    ce_grads = tree.map(lambda grad: grad * expected.den["ce"], ce_grads)

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
        own = cut(params, mesh["ep"].get_local_rank(), 2)
        for layer in own["layers"]:
            layer["experts"] = {
                name: DTensor.from_local(weight, mesh["ep"], [Shard(0)])
                for name, weight in layer["experts"].items()
            }
        module = as_module(moe.apply, own)
        for layer in [*module["layers"], module]:
            fully_shard(layer, mesh=mesh["fsdp"])
        sum_gradients(module)
        exchange = partial(all_to_all, axis=mesh["ep"])
        loss_fn = partial(call, partial(moe.loss_terms, config=config, exchange=exchange))
        terms = loss_fn(module, batches[c10d.get_rank()])
        terms.num["ce"].backward()
        experts = dict(module["layers"][0]["experts"].named_parameters())
        grads = {name: weight.grad.full_tensor() for name, weight in experts.items()}
        return tree.map(torch.Tensor.detach, terms), grads

    results = run_local(on_rank, 4, timeout=90)
    torch.testing.assert_close(reduce(add, [terms for terms, _ in results]), expected, **CLOSE)
    for _, grads in results:
        torch.testing.assert_close(grads, ce_grads, **CLOSE)


# Errors.


def test_experts_elsewhere_need_exchange():
    config = make_config()
    part = cut(make_params(config), 0, 2)
    message = r"mix: experts that are on 2 ranks need exchange, got None. Give functools.partial"
    with pytest.raises(ValueError, match=message):
        moe.apply(part, make_batch()["tokens"], config)


def test_parts_of_experts_are_equal():
    config = make_config()
    params = make_params(config)
    for layer in params["layers"]:
        layer["experts"] = {name: weight[:3] for name, weight in layer["experts"].items()}
    with pytest.raises(ValueError, match=r"the same share of num_experts=4, got 3 experts\. Cut"):
        moe.apply(params, make_batch()["tokens"], config)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts": 0}, ValueError, "num_experts must be positive, got num_experts=0"),
        ({"num_selected": 2.0}, TypeError, "num_selected must be int, got num_selected=2.0"),
        ({"router": "topk"}, ValueError, r"router must be one of .*, got router='topk'"),
        ({"group_rule": "all"}, ValueError, "group_rule must be one of"),
        ({"balance_scope": "rank"}, ValueError, "balance_scope must be one of"),
        ({"alpha_z": -1.0}, ValueError, "alpha_z must not be negative, got alpha_z=-1.0"),
        ({"num_selected": 5}, ValueError, "num_selected must be at most the experts to choose"),
        ({"num_groups": 3}, ValueError, "num_experts must be a multiple of num_groups"),
        ({"num_best_groups": 2}, ValueError, "num_best_groups must be at most num_groups"),
        ({"num_groups": 2}, ValueError, 'groups of the rule "best" need router="biased"'),
        (
            {"num_groups": 2, "router": "biased", "num_selected": 3},
            ValueError,
            "num_selected must be at most the experts to choose from",
        ),
        (
            {"num_groups": 4, "group_rule": "each"},
            ValueError,
            'num_groups must divide num_selected by the rule "each"',
        ),
        ({"dense_layers": (0, 1)}, ValueError, "leave one with experts, got dense_layers="),
        ({"dense_layers": (2,)}, ValueError, "must be some of the 2 layers"),
        ({"num_layers": -1}, ValueError, "num_layers must be positive"),
    ],
)
def test_config_names_what_is_wrong(changes, error, message):
    with pytest.raises(error, match=message):
        make_config(**changes)


def test_init():
    config = make_config(dense_layers=(0,))
    params = moe.init(config, random.key(0), dtype=torch.bfloat16)
    assert tree.structure(params) == tree.structure(moe.shapes(config))
    assert "mlp" in params["layers"][0]
    assert "mlp" not in params["layers"][1]
    wider = moe.init(make_config(dense_layers=(0,), num_experts=8), random.key(0))
    experts = params["layers"][1]["experts"]["up"]
    assert torch.equal(wider["layers"][1]["experts"]["up"][:4].bfloat16(), experts)
