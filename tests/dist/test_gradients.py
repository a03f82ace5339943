"""Each gradient, exactly where it is required, at each EP size.  Numbers: see test_odd_routings.py."""

import dataclasses

import case
import pytest
import torch
from case import config, exact_batch, random_batch, run, same_bits

import uniep

HALF_AND_FULL = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("weight_at", ["output", "activation"])
@pytest.mark.parametrize("dtype", HALF_AND_FULL, ids=str)
def test_48_each_gradient_row_by_row(pool, dtype, weight_at, ep_size):
    """48: 64 different rows; dX, dw, dW1 (gate, up), dW2 each on its own against fp64 autograd, row by row."""
    cfg = config(dtype=dtype, weight_at=weight_at)
    batch = random_batch(cfg, (16, 16, 16, 16))
    case.accurate(run(pool, cfg, batch, ep_size), batch, cfg)


def exact_gradients(cfg, shard_tokens, ids, weights):
    """An exact batch with row-dependent dO and v, and the closed form of every result but dw13."""
    g = torch.Generator().manual_seed(0)
    tokens = sum(shard_tokens)
    v = torch.randint(-2, 3, (cfg.num_experts, cfg.hidden), generator=g).float()
    dy = torch.randint(-2, 3, (tokens, cfg.hidden), generator=g).float()
    batch = exact_batch(cfg, shard_tokens, ids, weights, v, dy)
    scores = torch.einsum("td,tkd->tk", dy, v[ids])  # <dO_t, v_e>
    dx = torch.zeros_like(dy)
    dx[:, 0] = 2 * (weights * scores).sum(1)  # d silu(g)u = (u, silu(g)) = (1/32, 32); times 32 and 1/32: 1 + 1
    dw2 = torch.zeros(cfg.num_experts, cfg.hidden, cfg.ffn)
    for t in range(tokens):
        for k in range(cfg.top_k):
            dw2[ids[t, k], :, 0] += weights[t, k] * dy[t]
    y = torch.einsum("tk,tkd->td", weights, v[ids])
    return batch, {"y": y, "dx": dx, "dweights": scores, "dw2": dw2}


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("weight_at", ["output", "activation"])
def test_49_gradients_of_local_and_remote_experts_arrive(pool, weight_at, ep_size):
    """49: each token has one local and one remote expert: dw = <dO, v_e> in both slots, dX sums both; closed form."""
    cfg = config(weight_at=weight_at)
    ids = torch.tensor([[t % 4, 4 + t // 2 % 4] for t in range(16)])
    ids[8:] = ids[8:].flip(1)
    weights = torch.tensor([[0.5, 0.25]]).expand(16, 2).contiguous()
    batch, expected = exact_gradients(cfg, (4, 4, 4, 4), ids, weights)
    got = run(pool, cfg, batch, ep_size)
    for name, want in expected.items():
        assert torch.equal(getattr(got, name), want), name
    same_bits(got, case.oracle(pool, cfg, batch))


def test_50_expert_gradients_do_not_scale_with_ep(pool):
    """50: dW of the same global batch, loss = sum: sum of w dO exactly, at EP 1, 2, 4."""
    cfg = config()
    ids = torch.rand(40, 8, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :2]
    weights = torch.tensor([[1.0, 0.5]]).expand(40, 2).contiguous()
    batch, expected = exact_gradients(cfg, (10, 20, 0, 10), ids, weights)
    runs = [run(pool, cfg, batch, ep_size) for ep_size in (1, 2, 4)]
    for got in runs:
        assert torch.equal(got.dw2, expected["dw2"])
        same_bits(got, runs[0])


COMBINATIONS = [tuple(bool(n & bit) for bit in (1, 2, 4, 8)) for n in range(16)]


def partial_gradients(world, cfg, batch, ep_size):
    """For each on/off combination of requires_grad: the gradients of x, weights, w13, w2."""
    with case.workspace(world, cfg, ep_size) as ws:
        rows, experts = batch.rows(ws.rank, ep_size), batch.experts(ws.rank, ep_size)
        values = (batch.x[rows], batch.weights[rows], batch.w13[experts], batch.w2[experts])
        found = []
        for wanted in COMBINATIONS:
            t = [v.clone().requires_grad_(on) for v, on in zip(values, wanted, strict=True)]
            y = uniep.moe(t[0], batch.ids[rows], *t[1:], workspace=ws)
            assert y.requires_grad == any(wanted)
            if any(wanted):
                y.backward(batch.dy[rows])
            found.append([v.grad for v in t])
        return found


def test_54_gradients_exactly_where_required(pool):
    """54: all 16 on/off combinations: no crash, gradients exist where required and have the same bits."""
    cfg = config()
    batch = random_batch(cfg, (9, 5, 4, 7))
    for found in pool.run(partial_gradients, cfg, batch, 2, ranks=2):
        for wanted, grads in zip(COMBINATIONS, found, strict=True):
            for on, grad, full in zip(wanted, grads, found[-1], strict=True):
                assert (grad is not None) == on
                if on:
                    case.equal_bits(grad, full, str(wanted))


def adapter_steps(world, cfg, batch, ep_size):
    """Low-rank adapters on frozen experts, three steps; how far each adapter tensor moved."""
    with case.workspace(world, cfg, ep_size) as ws:
        rows, experts = batch.rows(ws.rank, ep_size), batch.experts(ws.rank, ep_size)
        w13, w2 = batch.w13[experts], batch.w2[experts]
        g = torch.Generator().manual_seed(ws.rank)
        shapes = [
            (len(w13), w13.shape[1], 4),
            (len(w13), 4, w13.shape[2]),
            (len(w2), w2.shape[1], 4),
            (len(w2), 4, w2.shape[2]),
        ]
        adapters = [(0.1 * torch.randn(shape, generator=g)).requires_grad_() for shape in shapes]
        start = [a.detach().clone() for a in adapters]
        optimizer = torch.optim.SGD(adapters, lr=0.1)
        for _ in range(3):
            a, b, c, d = adapters
            y = uniep.moe(batch.x[rows], batch.ids[rows], batch.weights[rows], w13 + a @ b, w2 + c @ d, workspace=ws)
            optimizer.zero_grad()
            y.square().sum().backward()
            optimizer.step()
        return [bool((a != s).any()) for a, s in zip(adapters, start, strict=True)]


def test_54_adapters_on_frozen_experts_learn(pool):
    """54: low-rank adapters on W1 and W2: every adapter tensor moves."""
    cfg = config()
    assert pool.run(adapter_steps, cfg, random_batch(cfg, (9, 5, 4, 7)), 2, ranks=2) == [[True] * 4] * 2


def backward_twice(world, cfg, batch, ep_size, schedule):
    """Gradients of backward(retain_graph) twice, and of two losses over one forward, with other calls in between."""
    with case.workspace(world, cfg, ep_size, schedule) as ws:
        rows, experts = batch.rows(ws.rank, ep_size), batch.experts(ws.rank, ep_size)
        t = [case.leaf(v) for v in (batch.x[rows], batch.weights[rows], batch.w13[experts], batch.w2[experts])]
        y = uniep.moe(t[0], batch.ids[rows], *t[1:], workspace=ws)
        dy = batch.dy[rows]
        first = torch.autograd.grad(y, t, dy, retain_graph=True)
        with torch.no_grad():
            uniep.moe(-t[0], batch.ids[rows], *t[1:], workspace=ws)
        second = torch.autograd.grad(y, t, dy, retain_graph=True)
        scaled = torch.autograd.grad((2 * y * dy).sum(), t)
        return first, second, scaled


@pytest.mark.parametrize(
    ("received", "preactivation"), [("saved", "saved"), ("again", "saved"), ("saved", "recomputed")]
)
def test_55_backward_twice(pool, received, preactivation):
    """55: a second backward, and a second loss over the same forward, are right and not different numbers."""
    cfg = config()
    batch = random_batch(cfg, (9, 5, 4, 7))
    schedule = dataclasses.replace(case.FUSED, received=received, preactivation=preactivation)
    for first, second, scaled in pool.run(backward_twice, cfg, batch, 2, schedule, ranks=2):
        for name, a, b, c in zip(case.FIELDS[1:], first, second, scaled, strict=True):
            case.equal_bits(b, a, name)
            case.equal_bits(c, 2 * a, f"doubled {name}")


def router_gradient(world, cfg, x, ep_size):
    layer = uniep.nn.MoE(cfg, world.group(ep_size), device="cpu", renormalize=False, seed=2)
    with layer.experts.workspace as ws:
        mine = x.chunk(ep_size)[ws.rank]
        layer(mine).square().sum().backward()
        return layer.router.grad, layer.router.detach(), layer.experts.w13.detach(), layer.experts.w2.detach()


def test_56_a_router_with_one_choice_learns(pool):
    """56: K=1 without renormalisation: the router's gradient is not zero and equals fp64's."""
    cfg = config(top_k=1)
    x = torch.randn(32, cfg.hidden, generator=torch.Generator().manual_seed(0))
    ranks = pool.run(router_gradient, cfg, x, 2, ranks=2)
    router, w13, w2 = (
        ranks[0][1].double().requires_grad_(),
        *(torch.cat([r[n] for r in ranks]).double() for n in (2, 3)),
    )
    probabilities = torch.softmax(x.double() @ router.T, -1)
    weights, ids = probabilities.max(-1, keepdim=True)
    uniep.reference.composition(x.double(), ids, weights, w13, w2).square().sum().backward()
    got = ranks[0][0] + ranks[1][0]
    assert got.any()
    torch.testing.assert_close(got.double(), router.grad, rtol=1e-4, atol=1e-5 * float(router.grad.abs().max()))
