"""Numbers of experts and slots, dtypes, strides, groups of one rank.  Numbers: see test_odd_routings.py."""

import dataclasses

import case
import pytest
import torch
from case import config, exact_batch, random_batch, run, same_bits

import uniep


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_14_more_than_256_experts(pool, dtype):
    """14: E=512, R=2, K=10, only experts 0, 255, 256, 257, 511, each twice; v = e+1, w = 1/8: closed form."""
    cfg = config(num_experts=512, top_k=10, dtype=dtype)
    five = torch.tensor([0, 255, 256, 257, 511]).repeat(2)
    ids = torch.stack([five[torch.randperm(10, generator=torch.Generator().manual_seed(t))] for t in range(8)])
    batch = exact_batch(cfg, (2, 2, 2, 2), ids, torch.full((8, 10), 1 / 8), torch.arange(512.0) + 1)
    expected = 2 * (1 + 256 + 257 + 258 + 512) / 8
    assert run(pool, cfg, batch, 2).y.unique().tolist() == [expected]


@pytest.mark.parametrize(
    ("experts", "ep_size"), [(6, 2), (60, 4), pytest.param(384, 4, marks=pytest.mark.slow), (4, 4)]
)
def test_15_expert_counts(pool, experts, ep_size):
    """15: expert counts that are no power of two, and one local expert."""
    cfg = config(num_experts=experts, dtype=torch.bfloat16)
    batch = random_batch(cfg, (11, 40, 0, 13))
    want = case.oracle(pool, cfg, batch)
    case.accurate(want, batch, cfg)
    same_bits(run(pool, cfg, batch, ep_size), want)


def refused_workspace(world, cfg, ep_size):
    return case.named_error(case.workspace, world, cfg, ep_size)


def test_15_experts_that_do_not_divide(pool):
    """15: (E, R) = (10, 4) is refused at construction on every rank with E, R and what to change."""
    for kind, message in pool.run(refused_workspace, config(num_experts=10), 4):
        assert kind == "ConfigError"
        assert "num_experts=10" in message and "4 ranks" in message and "group of 2" in message


INCOMING = {
    "sum": lambda y: y.sum(),
    "cat": lambda y: (torch.cat([y, y.detach()], 1) * torch.arange(2.0 * y.shape[1], dtype=y.dtype)).sum(),
    "transposed": lambda y: (y.t().contiguous() * torch.arange(y.shape[0], dtype=y.dtype)).sum(),
    "every second row": lambda y: y[::2].sum(),
}


def gradients_of_losses(world, cfg, batch, ep_size):
    """For each loss: the gradients, and those of the same dy handed over contiguous."""
    found = []
    with case.workspace(world, cfg, ep_size) as ws:
        rows, experts = batch.rows(ws.rank, ep_size), batch.experts(ws.rank, ep_size)
        for loss in INCOMING.values():
            pair = []
            for contiguous in (False, True):
                t = [case.leaf(v) for v in (batch.x[rows], batch.weights[rows], batch.w13[experts], batch.w2[experts])]
                y = uniep.moe(t[0], batch.ids[rows], *t[1:], workspace=ws)
                if contiguous:
                    copy = case.leaf(y)
                    loss(copy).backward()
                    y.backward(copy.grad.contiguous())
                else:
                    loss(y).backward()
                pair.append(case.Outcome(y.detach(), *(v.grad for v in t)))
            found.append(pair)
    return found


def test_34_strides_of_the_incoming_gradient(pool):
    """34: expanded, sliced, transposed and partly used outputs: bits as with a contiguous dO."""
    cfg = config()
    batch = random_batch(cfg, (9, 5, 4, 7))
    for found in pool.run(gradients_of_losses, cfg, batch, 2, ranks=2):
        for name, (got, want) in zip(INCOMING, found, strict=True):
            same_bits(got, want, name)
            assert want.dw2.any()


@pytest.mark.parametrize("top_k", [1, 3, 8, 10, 14, 32])
def test_35_top_k(pool, top_k):
    """35: K from 1 to 32 of E=64."""
    cfg = config(num_experts=64, top_k=top_k)
    batch = random_batch(cfg, (6, 3, 0, 7))
    want = case.oracle(pool, cfg, batch)
    case.accurate(want, batch, cfg)
    same_bits(run(pool, cfg, batch, 4), want)


def test_35_every_expert_chosen(pool):
    """35: K = E = 8."""
    cfg = config(top_k=8)
    batch = random_batch(cfg, (20, 1, 0, 12))
    want = case.oracle(pool, cfg, batch)
    case.accurate(want, batch, cfg)
    same_bits(run(pool, cfg, batch, 2), want)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_37_index_width_and_weight_precision(pool, ep_size):
    """37: every integer width gives the same bits; w = [1 + 2^-10, -1], v = 1024 gives 1.0 (bf16 weights: 0.0).

    With weight_at="activation" the weight is rounded with the activation, as documented: 0.0 in bf16, 1.0 in fp32.
    """
    ids, w, v = torch.tensor([[1, 6]]), torch.tensor([[1 + 2**-10, -1.0]]), torch.full((8,), 1024.0)
    for dtype, weight_at, expected in (
        (torch.bfloat16, "output", 1.0),
        (torch.float32, "output", 1.0),
        (torch.bfloat16, "activation", 0.0),
        (torch.float32, "activation", 1.0),
    ):
        cfg = config(dtype=dtype, weight_at=weight_at)
        batch = exact_batch(cfg, (1, 0, 0, 0), ids, w, v)
        assert run(pool, cfg, batch, ep_size).y.unique().tolist() == [expected], (dtype, weight_at)
    batch = random_batch(config(), (9, 2, 0, 4), unused=0.2)
    wide = run(pool, config(), batch, ep_size)
    for width in (torch.int32, torch.int16, torch.int8):
        same_bits(run(pool, config(), dataclasses.replace(batch, ids=batch.ids.to(width)), ep_size), wide, str(width))


def single(world, cfg, batch, how):
    """EP=1 without a process group, or with a group of one rank."""
    group = None if how == "no group" else world.groups[1]
    with uniep.Workspace(cfg, group, device="cpu") as ws:
        assert ws.ep_size == 1
        return case.forward_backward(ws, batch)


def test_80_one_rank(pool):
    """80: EP=1 without a process group, and with a group of size 1: (T, H), bits as at EP=2."""
    cfg = config(dtype=torch.bfloat16)
    batch = random_batch(cfg, (16, 3, 0, 9))
    want = run(pool, cfg, batch, 2)
    for how in ("no group", "group of one"):
        (got,) = pool.run(single, cfg, batch, how, ranks=1)
        assert got.y.shape == (28, cfg.hidden)
        same_bits(got, want, how)
    with uniep.Workspace(cfg, device="cpu") as ws:  # and in a process that never heard of process groups
        assert not torch.distributed.is_initialized()
        same_bits(case.forward_backward(ws, batch), want)
