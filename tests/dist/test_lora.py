"""LoRA on experts: bits over EP sizes, schedules and backends; gradients against the dense composition."""

import dataclasses
import functools

import case
import pytest
import torch
from case import config, equal_bits, random_batch

import uniep
from uniep.weights import Lora

TOKENS = (70, 33, 0, 150)
SCALE = 0.75
NAMES = ("y", "dx", "dweights", "a13", "b13", "a2", "b2")


def factors(cfg, rank):
    """a13, b13, a2, b2 of all experts."""
    g = torch.Generator().manual_seed(7)
    e, f, d = cfg.num_experts, cfg.ffn, cfg.hidden
    shapes = (e, rank, d), (e, 2 * f, rank), (e, rank, f), (e, d, rank)
    return [(torch.randn(shape, generator=g) * shape[2] ** -0.5).to(cfg.dtype) for shape in shapes]


def step(ws, batch, rank, given=("w13", "w2"), share=None, shares=None):
    """[y, dx, dweights, factors' gradients] of this rank."""
    rows, experts = (
        batch.rows(share if share is not None else ws.rank, shares or ws.ep_size),
        batch.experts(ws.rank, ws.ep_size),
    )
    x, weights = case.leaf(batch.x[rows]), case.leaf(batch.weights[rows])
    leaves = [case.leaf(t[experts]) for t in factors(ws.cfg, rank)]
    pairs = {"w13": tuple(leaves[:2]), "w2": tuple(leaves[2:])}
    lora = Lora(*(pairs[name] if name in given else None for name in ("w13", "w2")), SCALE)
    y = uniep.moe(x, batch.ids[rows], weights, batch.w13[experts], batch.w2[experts], workspace=ws, lora=lora)
    y.backward(batch.dy[rows])
    return [y.detach(), x.grad, weights.grad, *(t.grad for t in leaves)]


def on_ranks(world, cfg, batch, ep, schedule, backend, rank, given):
    how = {"device": "cpu", "backend": backend, "schedule": schedule, "timeout_s": case.TIMEOUT_S}
    with uniep.Workspace(cfg, world.group(ep), **how) as ws:
        return step(ws, batch, rank, given)


def run(pool, cfg, batch, ep, schedule=None, backend="cpu", rank=8, given=("w13", "w2")):
    found = pool.run(on_ranks, cfg, batch, ep, schedule, backend, rank, given, ranks=ep)
    return [None if ts[0] is None else torch.cat(ts) for ts in zip(*found, strict=True)]


def batch_of(cfg):
    return random_batch(dataclasses.replace(cfg), TOKENS, unused=0.1)


@functools.cache
def oracle(pool, cfg, rank=8):
    return run(pool, dataclasses.replace(cfg, max_tokens_per_rank=256), batch_of(cfg), 1, case.SERIAL, rank=rank)


CONFIGS = {
    "bf16": config(dtype=torch.bfloat16, ffn=72),
    "fp32, activation": config(weight_at="activation", combine_groups=4),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_bits_over_ep_and_schedules(pool, name):
    cfg = CONFIGS[name]
    split = dataclasses.replace(
        case.FUSED, activation="separate", weight_gradient_order="interleaved", received="again"
    )
    for ep, schedule, backend in (
        (1, case.FUSED, "cpu"), (2, case.FUSED, "cpu"), (2, split, "cpu"), (4, None, "cpu"), (2, None, "nccl"),
    ):  # fmt: skip
        found = run(pool, dataclasses.replace(cfg, max_tokens_per_rank=256), batch_of(cfg), ep, schedule, backend)
        for what, got, want in zip(NAMES, found, oracle(pool, cfg), strict=True):
            equal_bits(got, want, f"EP {ep}, {backend}, {schedule}: {what}")


def dense(cfg, batch, rank, dtype, given=("w13", "w2")):
    """The layer with W + scale B A multiplied out, and its autograd."""
    x, weights = (case.leaf(t.to(dtype)) for t in (batch.x, batch.weights))
    leaves = [case.leaf(t.to(dtype)) for t in factors(cfg, rank)]
    a13, b13, a2, b2 = leaves
    w13 = batch.w13.to(dtype) + (SCALE * b13 @ a13 if "w13" in given else 0)
    w2 = batch.w2.to(dtype) + (SCALE * b2 @ a2 if "w2" in given else 0)
    y = uniep.reference.composition(x, batch.ids, weights, w13, w2, cfg.weight_at, cfg.activation)
    y.backward(batch.dy.to(dtype))
    return [y.detach(), x.grad, weights.grad, *(t.grad for t in leaves)]


@pytest.mark.parametrize(("name", "rank"), [("bf16", 8), ("bf16", 128), ("fp32, activation", 8)])
def test_gradients_of_the_dense_composition(pool, name, rank):
    """Against fp64, at most twice the error of the composition in the layer's dtype."""
    cfg = CONFIGS[name]
    batch = batch_of(cfg)
    exact, plain = dense(cfg, batch, rank, torch.float64), dense(cfg, batch, rank, cfg.dtype)
    for what, got, truth, theirs in zip(NAMES, oracle(pool, cfg, rank), exact, plain, strict=True):
        error, bound = ((t.double() - truth).norm() / truth.norm() for t in (got, theirs))
        assert error <= 2 * bound, f"{what}: off by {error:.3g}, the composition by {bound:.3g}"


@pytest.mark.parametrize("given", ["w13", "w2"])
def test_one_of_two(pool, given):
    cfg = CONFIGS["fp32, activation"]
    cfg = dataclasses.replace(cfg, combine_groups=None, max_tokens_per_rank=256)
    batch = batch_of(cfg)
    for what, got, want in zip(
        NAMES, run(pool, cfg, batch, 2, given=(given,)), dense(cfg, batch, 8, torch.float64, (given,)), strict=True
    ):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5, msg=lambda m, w=what: f"{w}: {m}")
