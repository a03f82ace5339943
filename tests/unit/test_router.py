"""The router kit in one process: formulas, ties, groups, bias, losses, jitter, capacity, rows by themselves."""

import copy
import logging
import types

import case
import pytest
import torch
from case import config
from torch.utils.checkpoint import checkpoint

import uniep
from uniep.launch import router as launches
from uniep.nn import Router, RouterConfig, choose_experts, router_ops
from uniep.nn.invariant import TOKEN_BLOCK, activate, linear, token_sums
from uniep.nn.router_ops import _integers, count_slots, jitter

T, D, E, K = 150, 72, 24, 4
SWITCH = RouterConfig(renormalize=False, aux_loss=0.1, z_loss=0.01)
DEEPSEEK = RouterConfig(
    score="sigmoid", scale=2.5, groups=4, groups_per_token=2, selection_bias=True, aux_loss=0.1, jitter=0.1
)
KINDS = {"default": RouterConfig(), "switch": SWITCH, "deepseek": DEEPSEEK}


def problem(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(T, D, generator=g).to(dtype), torch.randn(E, D, generator=g) * D**-0.5
    bias, dw = torch.randn(E, generator=g) * 0.1, torch.randn(T, K, generator=g)
    return x, weight, bias, dw


def run(cfg, x, weight, bias, dw, token_ids):
    """(Routing, dx, dW) of sum(dw * weights)."""
    x, weight = case.leaf(x), case.leaf(weight)
    chosen = {"bias_E": bias if cfg.selection_bias else None, "token_ids_T": token_ids, "jitter_seed": 3}
    routing = choose_experts(x, weight, K, cfg, **chosen)
    (routing.weights_TK * dw).sum().backward(retain_graph=cfg.exchanges)
    return routing, x.grad.clone(), weight.grad.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_each_other(kind, dtype):
    """Choice, weights and gradient row of a token have the same bits alone, among few, and in another order."""
    x, weight, bias, dw = problem(dtype)
    ids = torch.arange(T)
    whole, dx, _ = run(KINDS[kind], x, weight, bias, dw, ids)
    for part in (slice(0, 1), slice(7, 10), slice(64, 65), slice(1, 70), torch.randperm(T)):
        routing, part_dx, _ = run(KINDS[kind], x[part], weight, bias, dw[part], ids[part])
        assert torch.equal(routing.ids_TK, whole.ids_TK[part])
        case.equal_bits(routing.weights_TK.detach(), whole.weights_TK[part].detach(), "weights")
        case.equal_bits(part_dx, dx[part], "dx")


def composition(cfg, x, weight, ids, factors):
    """Weights and losses by plain PyTorch in the dtype of x, at a given choice."""
    logits = (x * factors.to(x.dtype)) @ weight.T
    scores = logits.softmax(-1) if cfg.score == "softmax" else logits.sigmoid()
    chosen = scores.gather(1, ids)
    weights = chosen * cfg.scale / (chosen.sum(-1, keepdim=True) if cfg.renormalize else 1)
    share = torch.bincount(ids.flatten(), minlength=E) / ids.numel()
    mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
    return weights, cfg.aux_loss * E * (share * mean).sum() + cfg.z_loss * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("kind", KINDS)
def test_against_fp64(kind):
    """Weights, losses and both gradients are at most twice as far from fp64 as PyTorch's fp32 composition."""
    cfg, (x, weight, bias, dw) = KINDS[kind], problem()
    factors = jitter(torch.arange(T), D, 3, cfg.jitter) if cfg.jitter else torch.ones(1)
    routing, dx, dweight = run(cfg, x, weight, bias, dw, torch.arange(T))
    found = [routing.weights_TK, routing.aux_loss + routing.z_loss, dx, dweight]
    if cfg.exchanges:
        x_leaf, weight_leaf = case.leaf(x), case.leaf(weight)
        again = choose_experts(
            x_leaf, weight_leaf, K, cfg, bias_E=bias if cfg.selection_bias else None, token_ids_T=torch.arange(T),
            jitter_seed=3,
        )  # fmt: skip
        found += torch.autograd.grad(again.aux_loss + again.z_loss, (x_leaf, weight_leaf))

    def plain(dtype):
        leaves = case.leaf(x.to(dtype)), case.leaf(weight.to(dtype))
        weights, loss = composition(cfg, *leaves, routing.ids_TK, factors)
        grads = torch.autograd.grad((weights * dw).sum(), leaves, retain_graph=True)
        return [weights, loss, *grads, *(torch.autograd.grad(loss, leaves) if cfg.exchanges else ())]

    exact = plain(torch.float64)
    for name, ours, truth, theirs in zip(
        ("weights", "losses", "dx", "dW", "dx of losses", "dW of losses"),
        found,
        exact,
        plain(torch.float32),
        strict=False,
    ):
        error, limit = ((t.detach().double() - truth.detach()).norm() for t in (ours, theirs))
        assert error <= 2 * limit + 1e-9, f"{name}: {error} > 2 * {limit}"


def test_the_default_is_softmax_top_k():
    """RouterConfig() chooses as the router of MoE does, with weights equal to rounding."""
    with uniep.Workspace(config(), device="cpu") as ws:
        layer, kit = (uniep.nn.MoE(ws.cfg, workspace=ws, seed=1, router=r) for r in (None, RouterConfig()))
        assert torch.equal(layer.router, kit.router.weight) and torch.equal(layer.experts.w13, kit.experts.w13)
        x = torch.randn(30, 64)
        (ids, weights), (kit_ids, kit_weights) = layer.route(x), kit.route(x)
        assert torch.equal(ids, kit_ids)
        torch.testing.assert_close(weights, kit_weights)
        assert kit(x.view(2, 15, 64)).shape == (2, 15, 64)


def chosen(scores, cfg, top_k, bias=None):
    """The choice for logits that are given: an identity for a weight."""
    scores = torch.tensor(scores)
    got = choose_experts(scores, torch.eye(scores.shape[1]), top_k, cfg, bias_E=bias)
    return got.ids_TK.tolist(), got


def test_ties_go_to_the_lower_expert_and_group():
    assert chosen([[0.0] * 8], RouterConfig(), 2)[0] == [[0, 1]]
    assert chosen([[0.0, 2, 1, 2, 0, 0, 0, 0]], RouterConfig(), 3)[0] == [[1, 3, 2]]
    grouped = RouterConfig(groups=4, groups_per_token=2)
    assert chosen([[0.0] * 8], grouped, 2)[0] == [[0, 1]]
    assert chosen([[0, 0, 1.0, 0, 1, 0, 1, 0]], grouped, 3)[0] == [[2, 4, 3]]


def test_groups_by_their_highest_scores():
    """Group 2 has the highest expert, groups 0 and 1 the highest sums of two."""
    logits = [[3.0, 3, 3, 2.9, 5, -9, 0, 0]]
    limited = {"score": "sigmoid", "groups": 4, "groups_per_token": 2}
    assert chosen(logits, RouterConfig(**limited, group_top=2), 4)[0] == [[0, 1, 2, 3]]
    assert chosen(logits, RouterConfig(**limited, group_top=1), 3)[0] == [[4, 0, 1]]
    assert RouterConfig(**limited).highest_of_group(8) == 4 and RouterConfig(**limited).highest_of_group(1) == 1
    assert [RouterConfig(**limited).max_nodes(n) for n in (1, 2, 4, 8)] == [1, 2, 2, 4]


def test_a_bias_moves_the_choice_alone():
    cfg = RouterConfig(score="sigmoid", selection_bias=True, renormalize=False)
    bias = torch.tensor([0.0, 0, 0, 1])
    ids, got = chosen([[1.0, 2, 3, 0]], cfg, 2, bias)
    assert ids == [[3, 2]]
    torch.testing.assert_close(got.weights_TK, torch.sigmoid(torch.tensor([[0.0, 3]])))
    negative = RouterConfig(score="sigmoid", selection_bias=True, groups=2, groups_per_token=1)
    assert chosen([[1.0, 2, 3, 0]], negative, 2, bias - 9)[0] == [
        [3, 2]
    ]  # all scores below 0 stay above what is masked


def test_bias_update():
    """+ rate for experts below the mean load of the step, - above; counted once, also under checkpointing."""
    cfg = config(hidden=8, num_experts=4)
    router = Router(cfg, RouterConfig(selection_bias=True, bias_rate=0.5))
    with torch.no_grad():
        router.weight.copy_(torch.eye(4, 8))
    x = case.leaf(torch.tensor([[9.0, 8, 0, 1, 0, 0, 0, 0], [9, 0, 0, 8, 0, 0, 0, 0]]))
    weights = checkpoint(lambda v: router(v).weights_TK, x, use_reentrant=True)
    weights[:, 0].sum().backward()
    assert router.load.tolist() == [2, 1, 0, 1]
    assert router.eval()(x).counts_E.tolist() == [2, 1, 0, 1] and router.load.tolist() == [2, 1, 0, 1]
    assert router.update_bias().tolist() == [2, 1, 0, 1]
    assert router.bias.tolist() == [-0.5, 0, 0.5, 0] and router.load.tolist() == [0] * 4
    assert sorted(router.state_dict()) == ["bias", "weight"]


def test_the_bias_stays_fp32():
    router = Router(config(), RouterConfig(selection_bias=True))
    router.bias.fill_(1 + 2**-20)
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16 and router.bias.tolist() == [1 + 2**-20] * 8
    copied = copy.deepcopy(router)
    assert copied.bias is not router.bias and torch.equal(copied.bias, router.bias)


def test_jitter_is_of_the_token():
    """In [1 - eps, 1 + eps), of (seed, id, column); none in eval; a call without ids is refused."""
    ids = torch.tensor([0, 5, 2**40 + 5, -1])
    factors = jitter(ids, 4096, 7, 0.25)
    assert bool((factors >= 0.75).all()) and bool((factors < 1.25).all())
    assert float((factors.mean(1) - 1).abs().max()) < 0.01
    assert float(torch.corrcoef(factors).fill_diagonal_(0).abs().max()) < 0.06
    assert torch.equal(jitter(ids[1:2], 4096, 7, 0.25)[0], factors[1])
    assert not torch.equal(jitter(ids, 4096, 8, 0.25), factors)
    with uniep.Workspace(config(), device="cpu") as ws:
        layer = uniep.nn.MoE(ws.cfg, workspace=ws, router=RouterConfig(jitter=0.25), seed=0)
        x = torch.randn(6, 64)
        with pytest.raises(uniep.ConfigError, match=r"jitter is 0.25, but token_ids is None"):
            layer(x)
        one, two = layer(x, torch.arange(6)), layer(x, torch.arange(6) + 100)
        assert not torch.equal(one, two) and torch.equal(one, layer(x, torch.arange(6)))
        layer.eval()
        assert torch.equal(layer(x), layer(x, torch.arange(6)))


LOGITS = [[2.0, 1, 0, 0], [2, 0, 1, 0], [2, 1, 0, 0], [0, 2, 1, 0]]


def test_capacity_drops_and_counts():
    """4 tokens, top 2, 4 experts, factor 1: two slots each.  Expert 0 is full at token 2, expert 1 at token 3."""
    ids, got = chosen(LOGITS, RouterConfig(capacity_factor=1.0, overflow="drop"), 2)
    assert ids == [[0, 1], [0, 2], [-1, 1], [-1, 2]] and int(got.dropped) == 2
    assert got.counts_E.tolist() == [3, 3, 2, 0]
    whole = chosen(LOGITS, RouterConfig(), 2)[1].weights_TK
    assert torch.equal(got.weights_TK, torch.where(got.ids_TK >= 0, whole, 0.0))
    with pytest.raises(uniep.CapacityError, match=r"2 of 8 slots .* has 3, .*capacity_factor=1.0 allows 2"):
        chosen(LOGITS, RouterConfig(capacity_factor=1.0), 2)
    assert int(chosen(LOGITS, RouterConfig(capacity_factor=1.5), 2)[1].dropped) == 0


def test_a_dropped_slot_gives_no_gradient():
    x, weight, bias, dw = problem()
    cfg = RouterConfig(renormalize=False, capacity_factor=0.5, overflow="drop")
    routing, dx, _ = run(cfg, x, weight, bias, dw, None)
    kept = routing.ids_TK >= 0
    assert 0 < int((~kept).sum()) == int(routing.dropped)
    _, want, _ = run(RouterConfig(renormalize=False), x, weight, bias, dw * kept, None)
    case.equal_bits(dx, want, "dx")


def test_drops_are_said(caplog):
    router = Router(config(), RouterConfig(capacity_factor=0.5, overflow="drop"), seed=0)
    with caplog.at_level(logging.WARNING, "uniep"):
        for _ in range(5):
            router(torch.randn(20, 64))
    assert [record.message.startswith("a router's capacity_factor=0.5 left out") for record in caplog.records] == [
        True
    ] * 3


@pytest.mark.slow
def test_inductor_has_the_bits_of_eager():
    """A layer with router, losses, jitter and shared experts, as one graph: output and all gradients."""
    cfg = config(num_experts=16)
    router = RouterConfig(score="sigmoid", groups=4, groups_per_token=2, aux_loss=0.1, z_loss=0.1, jitter=0.1)
    with uniep.Workspace(cfg, device="cpu") as ws:
        layer = uniep.nn.MoE(cfg, workspace=ws, seed=0, router=router, shared_ffn=40)
        x, ids = case.leaf(torch.randn(37, 64)), torch.arange(37)

        def step(module):
            y = module(x, ids)
            return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]

        for ours, theirs in zip(step(torch.compile(layer, fullgraph=True)), step(layer), strict=True):
            case.equal_bits(ours, theirs, "inductor and eager")
        assert int(layer.router.load.sum()) == 2 * 37 * 2


def test_nan_and_infinite_rows():
    """They stay in their rows: ids valid and distinct, weights NaN; the losses say so."""
    x, weight, *_ = problem()
    x[3], x[5] = float("nan"), 1e38
    for cfg in KINDS.values():
        got = choose_experts(x, weight, K, cfg, bias_E=torch.zeros(E) if cfg.selection_bias else None)
        assert all(len(set(row)) == K and min(row) >= 0 and max(row) < E for row in got.ids_TK.tolist())
        assert bool(got.weights_TK[3].isnan().all())
        assert bool(got.weights_TK[torch.arange(T) > 5].isfinite().all())
        if cfg.exchanges:
            assert bool(got.aux_loss.isnan())


def test_no_tokens():
    """Zero loss, zero gradients."""
    _, weight, bias, _ = problem()
    for cfg in KINDS.values():
        routing, dx, dw = run(cfg, torch.zeros(0, D), weight, bias, torch.zeros(0, K), torch.arange(0))
        assert dx.shape == (0, D) and not dw.any() and float((routing.aux_loss + routing.z_loss).detach()) == 0


def test_sums_over_tokens_are_exact():
    """Integers: whatever the split, the parts' sums add up to the whole's; the error of a mean is below fp32's."""
    p = torch.softmax(torch.randn(999, E), -1)
    z, ids = torch.randn(999).abs() * 40, torch.randint(-1, E, (999, K))

    def of(rows):
        return _integers(count_slots(ids[rows], E), p[rows], z[rows])

    whole = of(slice(None))
    assert torch.equal(sum(of(rows) for rows in torch.randperm(999).split([1, 500, 0, 498])), whole)
    torch.testing.assert_close(whole[E : 2 * E].double() * 2.0**-36, p.double().sum(0), rtol=1e-8, atol=0)
    torch.testing.assert_close(whole[2 * E] * 2.0**-16, (z * z).double().sum().float(), rtol=1e-6, atol=0)


def test_losses_ride_on_the_weights():
    """MoE's backward contains the losses' gradients, times loss_scale."""
    with uniep.Workspace(config(), device="cpu") as ws:
        layer = uniep.nn.MoE(ws.cfg, workspace=ws, router=SWITCH, seed=0)
        x = torch.randn(20, 64)

        def gradient(scale):
            layer.zero_grad()
            layer.router.loss_scale = scale
            layer(x).sum().backward()
            return layer.router.weight.grad.clone()

        routing = layer.router(x)
        (loss,) = torch.autograd.grad(routing.aux_loss + routing.z_loss, layer.router.weight)
        torch.testing.assert_close(gradient(2.0) - gradient(0.0), 2 * loss, rtol=1e-3, atol=1e-5)


def test_shared_experts():
    """y + the dense FFN, one rounding for the sum, rows that ignore each other, gradients against fp64."""
    with uniep.Workspace(config(), device="cpu") as ws:
        layer, alone = (
            uniep.nn.MoE(ws.cfg, workspace=ws, seed=0, router=RouterConfig(), shared_ffn=n) for n in (40, None)
        )
        x = case.leaf(torch.randn(33, 64))
        y = layer(x)
        shared = layer.shared
        assert torch.equal(y, alone(x) + shared(x))
        assert torch.equal(y[5:6], layer(x[5:6]))
        grads = torch.autograd.grad(shared(x).square().sum(), (x, shared.w13, shared.w2))
        leaves = [case.leaf(t.double()) for t in (x, shared.w13, shared.w2)]
        gate, up = (leaves[0] @ leaves[1].T).chunk(2, 1)
        exact = (torch.nn.functional.silu(gate) * up) @ leaves[2].T
        for ours, truth in zip(grads, torch.autograd.grad(exact.square().sum(), leaves), strict=True):
            torch.testing.assert_close(ours.double(), truth, rtol=1e-3, atol=1e-4)
        assert sorted(name for name, _ in shared.named_parameters()) == ["w13", "w2"]


def test_autocast():
    """Experts and shared experts compute in the layer's dtype, the router in fp32 on what it is given."""
    with uniep.Workspace(config(dtype=torch.bfloat16), device="cpu") as ws:
        layer = uniep.nn.MoE(ws.cfg, workspace=ws, seed=0, router=RouterConfig(), shared_ffn=24)
        x = torch.randn(9, 64)
        want = layer(x.bfloat16()), layer.shared(x.bfloat16())
        layer.float()
        routed, dense = layer.route(x), linear(x, layer.router.weight)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
            assert torch.equal(layer.shared(x), want[1]) and all(map(torch.equal, layer.route(x), routed))
            assert torch.equal(linear(x, layer.router.weight), dense)
        assert y.dtype == torch.bfloat16 and (y - want[0]).abs().mean() < 0.02
        y.float().square().sum().backward()
        assert layer.router.weight.grad.dtype == torch.float32


def test_linear_rows_do_not_depend_on_each_other():
    x, weight, *_ = problem(torch.bfloat16)
    dy = torch.randn(T, E).bfloat16()

    def of(part):
        leaf = case.leaf(x[part])
        y = linear(leaf, weight)
        y.backward(dy[part])
        return y.detach(), activate(y.detach(), "swiglu"), leaf.grad

    whole = of(slice(None))
    for part in (slice(0, 1), slice(64, 67), torch.randperm(T)):
        for ours, theirs in zip(of(part), whole, strict=True):
            case.equal_bits(ours, theirs[part], "a part")


def test_sums_over_tokens_are_a_tree_of_blocks():
    """Five blocks and a rest: ((b0+b1)+(b2+b3))+(b4+b5)."""
    a, b = torch.randn(TOKEN_BLOCK * 5 + 3, 6), torch.randn(TOKEN_BLOCK * 5 + 3, 70)
    parts = [token_sums(p, q) for p, q in zip(a.split(TOKEN_BLOCK), b.split(TOKEN_BLOCK), strict=True)]
    want = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + (parts[4] + parts[5])
    assert torch.equal(token_sums(a, b), want)
    torch.testing.assert_close(want, a.T @ b, rtol=1e-4, atol=1e-4)


BAD = {
    "score": ({"score": "tanh"}, "score is 'tanh'"),
    "overflow": ({"overflow": "ignore"}, "overflow is 'ignore'"),
    "scale": ({"scale": float("nan")}, "scale is nan"),
    "jitter": ({"jitter": 1.0}, "jitter is 1.0"),
    "capacity": ({"capacity_factor": 0.0}, "capacity_factor is 0.0"),
    "groups": ({"groups": 3}, "groups is 3; it must divide the 8 experts"),
    "too few groups": ({"groups": 8, "groups_per_token": 1}, "top_k is 2, but groups_per_token=1"),
    "too many": ({"groups": 2, "groups_per_token": 3}, "groups_per_token is 3 but there are 2 groups"),
    "group_top": ({"groups": 2, "group_top": 5}, "group_top is 5, but a group has 4 experts"),
    "no integer": ({"groups": 2.0}, "groups is 2.0, a float; it must be an int of at least 1"),
    "no number": ({"scale": "2.5"}, "scale is '2.5'; it must be a number from 0 to"),
    "no jitter": ({"jitter": None}, "jitter is None; it must be a number of at least 0 and less than 1"),
    "a text": ({"capacity_factor": "1.25"}, "capacity_factor is '1.25'; it must be a number above 0, up to"),
    "no flag": ({"selection_bias": "no"}, "selection_bias is 'no'; it must be True or False"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings(name):
    fields, message = BAD[name]
    with pytest.raises(uniep.ConfigError, match=message):
        Router(config(), RouterConfig(**fields))


def test_a_router_that_began_without_memory():
    """Its parameters were meant to be on the meta device; its load always is where it can count."""
    router = Router(config(), device="meta")
    assert router.weight.is_meta and not router.load.is_meta
    router.to_empty(device="cpu").reset_parameters(seed=3)
    case.equal_bits(router.weight, Router(config(), seed=3).weight, "weight")
    loaded = Router(config(), device="meta", seed=4)  # which no reset follows
    loaded.load_state_dict(router.state_dict(), assign=True)
    assert loaded.jitter_seed == Router(config(), seed=4).jitter_seed == 4


def test_waits_poll_the_innermost_look(monkeypatch):
    """Behind a block, also one that raises, that of the block around it."""
    polled = []
    monkeypatch.setattr(router_ops, "finish", lambda work, timeout_s, look: look())

    def look(name):
        return router_ops.looking(lambda: polled.append(name))

    def poll():
        router_ops._finish(None, None, 1.0, "here", "call this")

    with look("outer"):
        with look("inner"):
            poll()
        poll()
        with pytest.raises(ValueError, match="of the block"), look("raises"):
            raise ValueError("of the block")
        poll()
    poll()
    assert polled == ["inner", "outer", "outer"]


def test_bad_inputs():
    x, weight, bias, _ = problem()
    cfg = RouterConfig(selection_bias=True)
    for error, message, arguments in (
        (uniep.ConfigError, "x has shape", {"x_TD": x[:, 1:]}),
        (uniep.DTypeError, "x has dtype torch.int64", {"x_TD": x.long()}),
        (uniep.ConfigError, "top_k is 25", {"top_k": 25}),
        (uniep.DTypeError, "the bias is", {"bias_E": bias.bfloat16()}),
        (uniep.DTypeError, "token_ids are", {"token_ids_T": torch.arange(T - 1)}),
        (uniep.InputError, "the given choice has shape", {"ids_TK": torch.zeros(T, 3, dtype=torch.int64)}),
    ):
        with pytest.raises(error, match=message):
            choose_experts(**({"x_TD": x, "weight_ED": weight, "top_k": K, "cfg": cfg} | arguments))
    with pytest.raises(uniep.ConfigError, match=r"top_k=1.*renormalize=False"):
        uniep.nn.MoE(config(top_k=1), device="cpu", router=RouterConfig())
    with pytest.raises(uniep.ConfigError, match="set it in the RouterConfig"):
        uniep.nn.MoE(config(), device="cpu", router=RouterConfig(), renormalize=False)


def test_what_computes_a_router_is_shown(caplog):
    """Its repr says it; on a GPU, beyond the kernels' limits, a warning, too, once."""
    moe = uniep.MoEConfig(hidden=D, ffn=D, num_experts=E, top_k=K, max_tokens_per_rank=T)
    assert "computed by PyTorch (no GPU)" in repr(Router(moe))
    on_gpu = types.SimpleNamespace(device=torch.device("cuda", 0))
    assert router_ops._kernels(on_gpu, 1024, 32, RouterConfig()) is launches and not caplog.records
    for _ in range(2):
        assert router_ops._kernels(on_gpu, 64, 33, RouterConfig()) is None
    (record,) = caplog.records
    text = record.getMessage()
    assert "computed by PyTorch on a GPU" in text and "top_k is 33; kernels take 32" in text
