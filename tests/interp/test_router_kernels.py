"""The router's kernels, interpreted, against the formulas in PyTorch."""

import dataclasses

import numpy as np
import pytest
import torch

from uniep.launch import router as launches
from uniep.nn import RouterConfig, choose_experts, router_ops

NAN, INF = float("nan"), float("inf")
LIMITED = RouterConfig(score="sigmoid", scale=2.5, groups=4, groups_per_token=2, selection_bias=True)
LOSSES = {"aux_loss": 0.3, "z_loss": 0.7}
CASES = {  # config, experts, top-k
    "softmax": (RouterConfig(), 32, 4),
    "losses": (RouterConfig(renormalize=False, **LOSSES), 24, 3),
    "deepseek": (dataclasses.replace(LIMITED, **LOSSES), 20, 6),
    "sigmoid": (RouterConfig(score="sigmoid", renormalize=False, aux_loss=0.3), 33, 1),
    "grouped": (RouterConfig(groups=5, groups_per_token=3, group_top=1, scale=0.7), 40, 8),
    "z": (RouterConfig(score="sigmoid", z_loss=0.7, capacity_factor=1.0), 2, 2),
}


@pytest.fixture(autouse=True)
def one_exponential(monkeypatch):
    """PyTorch with the exponential and the logarithm of the interpreter, which are numpy's: all else must have the same
    bits."""
    monkeypatch.setattr(torch, "exp", lambda x: torch.from_numpy(np.exp(x.numpy())))
    monkeypatch.setattr(torch, "log", lambda x: torch.from_numpy(np.log(x.numpy())))
    monkeypatch.setattr(launches, "PROGRAMS", 3)
    monkeypatch.setattr(launches, "COPIES", 2)


def equal(ours, theirs, what):
    """Bits; any NaN equals any other."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, what
    same = (ours == theirs) & (torch.signbit(ours) == torch.signbit(theirs)) | (ours.isnan() & theirs.isnan())
    assert bool(same.all()), f"{what}: {ours[~same]} is not {theirs[~same]}"


def drawn(experts):
    """Logits, among them ties, rows of equal values and of infinities, and NaN; a bias with all of these."""
    make = torch.Generator().manual_seed(experts)
    logits = torch.randn(14, experts, generator=make) * 3
    logits[1] = logits[1].round()
    logits[2:5] = torch.tensor([[0.0], [INF], [-INF]])
    logits[5, 1], logits[6, 0], logits[7, experts - 1], logits[8, 1] = NAN, INF, -INF, 300.0
    logits[9] *= 40
    bias = torch.randn(experts, generator=make)
    bias[:4] = torch.tensor([NAN, INF, -INF, 0.0])[:experts]
    return logits, bias


def route(logits, bias, given, cfg, top_k):
    return launches.route(
        logits, bias, given, top_k, sigmoid=cfg.score == "sigmoid", renormalize=cfg.renormalize, scale=cfg.scale,
        groups=cfg.groups, groups_per_token=cfg.groups_per_token, group_top=cfg.highest_of_group(top_k),
        losses=cfg.exchanges,
    )  # fmt: skip


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_route_has_the_bits_of_the_formulas(name, biased):
    """Choice, weights and integers; a row alone is what it is among others."""
    cfg, experts, top_k = CASES[name]
    logits, bias = drawn(experts)
    bias = bias if biased else None
    got, want = route(logits, bias, None, cfg, top_k), router_ops._route(logits, 14, bias, None, cfg, top_k)
    for ours, theirs, what in zip(got, want, ("chosen", "weights", "integers"), strict=True):
        equal(ours, theirs, what)
    for rows in (slice(0, 1), slice(9, 11)):
        for alone, whole in zip(route(logits[rows], bias, None, cfg, top_k)[:2], got[:2], strict=True):
            equal(alone, whole[rows], "alone")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", CASES)
def test_a_given_choice(name, dtype):
    """Unused slots, and an expert twice; on GPUs nobody has looked at the ids, so ones that no expert has, too."""
    cfg, experts, top_k = CASES[name]
    logits, _ = drawn(experts)
    given = torch.randint(-1, experts, (14, top_k), generator=torch.Generator().manual_seed(1))
    given[0], given[1, 0], given[2, 0] = 1, experts + 3, -7
    given = given.to(dtype)
    kept = given.clone()
    want = router_ops._route(logits, 14, None, given, cfg, top_k)
    for ours, theirs in zip(route(logits, None, given, cfg, top_k), want, strict=True):
        equal(ours, theirs, "given")
    assert torch.equal(given, kept)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_have_the_bits_of_the_formulas(name, finite):
    cfg, experts, top_k = CASES[name]
    logits, _ = drawn(experts)
    logits = torch.cat([logits[:3], logits[9:]]) if finite else logits
    chosen, _, mine = route(logits, None, None, cfg, top_k)
    every = torch.stack([mine * 3, mine, mine + torch.tensor([1] * len(mine[:-1]) + [0])])
    if finite:
        every[:, -2:] = 0
    got = launches.losses(every, 1, aux_loss=cfg.aux_loss, z_loss=cfg.z_loss)
    names = "aux loss", "z-loss", "counts", "d(aux loss)", "tokens"
    for ours, theirs, what in zip(got, router_ops._losses(every, 1, cfg), names, strict=True):
        equal(ours, theirs, what)
    _, _, _, d_aux, tokens = got
    make = torch.Generator().manual_seed(3)
    d_weights = torch.randn(chosen.shape, generator=make)
    chosen[0, 0], chosen[1] = -1, 1
    ids = torch.where(torch.rand(chosen.shape, generator=make) < 0.2, -1, chosen)
    d_losses = torch.tensor(0.9), torch.tensor(-1.3)
    ours = launches.d_logits(
        logits, ids, chosen, d_weights, d_aux if cfg.aux_loss else None, *d_losses, tokens,
        sigmoid=cfg.score == "sigmoid", renormalize=cfg.renormalize, scale=cfg.scale, z_loss=cfg.z_loss,
    )  # fmt: skip
    d_square = d_losses[1] * cfg.z_loss / tokens.clamp(min=1)
    equal(ours, router_ops.d_logits(logits, ids, chosen, d_weights, d_aux * d_losses[0], d_square, cfg), "d_logits")


@pytest.mark.parametrize("tokens", [0, 7])
@pytest.mark.parametrize(
    "cfg",
    [
        RouterConfig(),
        dataclasses.replace(LIMITED, **LOSSES, jitter=0.1),
        RouterConfig(**LOSSES, capacity_factor=0.5, overflow="drop"),
    ],
    ids=["softmax", "deepseek", "capacity"],
)
def test_the_operator(cfg, tokens, monkeypatch):
    """All results and gradients through it."""
    make = torch.Generator().manual_seed(0)
    x, weight = torch.randn(tokens, 40, generator=make), torch.randn(24, 40, generator=make)
    bias, dw = torch.randn(24, generator=make), torch.randn(tokens, 4, generator=make)

    def run():
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        ids = torch.arange(tokens) if cfg.jitter else None
        got = choose_experts(*leaves, 4, cfg, bias_E=bias if cfg.selection_bias else None, token_ids_T=ids)
        total = (got.weights_TK * dw).sum() + 2 * got.aux_loss + 3 * got.z_loss
        return [t.detach() for t in (*got, *torch.autograd.grad(total, leaves))]

    want = run()
    monkeypatch.setattr(router_ops, "_kernels", lambda *given: launches)
    for number, (ours, theirs) in enumerate(zip(run(), want, strict=True)):
        equal(ours, theirs, str(number))


def test_what_fits():
    """Beyond that PyTorch computes."""
    assert not any(launches.beyond(*sizes) for sizes in ((1024, 32, 1), (160, 8, 8), (1024, 8, 8)))
    assert launches.beyond(1025, 8, 1) == "1025 experts; kernels take 1024"
    assert launches.beyond(64, 33, 1) == "top_k is 33; kernels take 32"
    assert "padded to 2048" in launches.beyond(1000, 8, 40)
