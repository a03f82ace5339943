"""Checks of test_hopper.py: expert gradients by blocks of source ranks, over copies, and LoRA on experts."""

import dataclasses
import functools

import torch
import torch.distributed as dist

import uniep
from uniep import MoEConfig, Schedule, Workspace
from uniep.reference import composition

SHAPE = {"hidden": 512, "ffn": 264, "num_experts": 16, "top_k": 4, "max_tokens_per_rank": 1024}
WAYS = {
    "copied": {"schedule": Schedule(transfer="copy")},
    "pushed, serial": {"schedule": Schedule(transfer="push", overlap="serial")},
    "expanded": {"schedule": Schedule(operand="expanded")},
    "again": {"schedule": Schedule(received="again")},
    "mega": {"schedule": Schedule(overlap="mega")},  # takes stages
    "nccl": {"backend": "nccl"},
}


def check_gradient_shards(r):
    """A block for each rank.  Each way at EP = ranks, and EP 1 with as many copies: the sum of the fp32 gradients of
    calls with one rank's tokens alone, in the order of ranks; y, dx and d(weight) as without blocks."""
    plain = MoEConfig(**SHAPE)
    cfg = dataclasses.replace(plain, gradient_shards=r.size)
    x, ids, weights, w13, w2, dy = data = r.data(cfg, [900, 300, 0, 17][r.rank % 4])
    every = [torch.cat(r.gather(w)) for w in (w13, w2)]
    with Workspace(plain, None, device=r.device, timeout_s=60) as workspace:
        parameters = [w.clone().requires_grad_() for w in every]
        for w in parameters:
            w.main_grad = torch.full(w.shape, torch.nan, device=r.device)
        uniep.moe(x, ids, weights, *parameters, workspace=workspace, main_grad="overwrite").backward(dy)
        blocks = [r.gather(w.main_grad) for w in parameters]
    whole = [functools.reduce(torch.add, of_ranks).to(cfg.dtype) for of_ranks in blocks]
    experts = slice(r.rank * len(w13), (r.rank + 1) * len(w13))
    want = [*r.once(plain, data)[:3], *(dw[experts] for dw in whole)]
    found = {how: r.once(cfg, data, **options) for how, options in WAYS.items()}
    found["sync-free"] = r.once(dataclasses.replace(cfg, max_rows=8192), data)
    wrong = {
        how: [
            n
            for n, a, b in zip(("y", "dx", "dweights", "dw13", "dw2"), want, got, strict=True)
            if not torch.equal(a, b)
        ]
        for how, got in found.items()
    }
    for backend in ("hopper", "nccl"):
        how = {"copies": r.group, "device": r.device, "backend": backend, "timeout_s": 60}
        with Workspace(cfg, None, **how) as workspace:
            for repeat in range(3):  # calls that are made again may be recorded
                got = r.run(workspace, (x, ids, weights, *every, dy))
                pairs = zip(("y", "dw13", "dw2"), (want[0], *whole), (got[0], *got[3:]), strict=True)
                wrong[f"{backend}, copies", repeat] = [n for n, a, b in pairs if not torch.equal(a, b)]
    assert not any(wrong.values()), {how: names for how, names in wrong.items() if names}


def check_bias_shards(r):
    """The same of experts with biases, in fp32, whose casts do nothing: their gradients are sums of those of each
    block."""
    plain = MoEConfig(**SHAPE, dtype=torch.float32, bias=True, activation="swiglu_oai", activation_limit=1.0)
    cfg = dataclasses.replace(plain, gradient_shards=r.size)
    data = r.data(cfg, [900, 300, 0, 17][r.rank % 4])
    x, ids, weights, w13, w2, dy, *biases = data
    every = [torch.cat(r.gather(w)) for w in (w13, w2, *biases)]
    given = x, ids, weights, *every[:2], dy, *every[2:]
    with Workspace(plain, None, device=r.device, timeout_s=60) as workspace:
        blocks = [r.gather(grad) for grad in r.run(workspace, given)[3:]]
    whole = [functools.reduce(torch.add, of_ranks) for of_ranks in blocks]
    experts = slice(r.rank * len(w13), (r.rank + 1) * len(w13))
    found = {how: (r.once(cfg, data, **options)[3:], experts) for how, options in WAYS.items()}
    for backend in ("hopper", "nccl"):
        how = {"copies": r.group, "device": r.device, "backend": backend, "timeout_s": 60}
        with Workspace(cfg, None, **how) as workspace:
            found[f"{backend}, copies"] = r.run(workspace, given)[3:], slice(None)
    for how, (grads, mine) in found.items():
        wrong = [
            n for n, a, b in zip(("dw13", "dw2", "db13", "db2"), whole, grads, strict=True) if not a[mine].equal(b)
        ]
        assert not wrong, (how, wrong)


def check_lora(r):
    """Factors of rank 16 on the collective backend: EP = ranks has the bits of EP 1 with all tokens; gradients are near
    the composition's."""
    cfg = MoEConfig(**SHAPE)
    x, ids, weights, w13, w2, dy = r.data(cfg, 300)
    make = torch.Generator(r.device).manual_seed(5)
    shapes = ((16, 16, 512), (16, 528, 16), (16, 16, 264), (16, 512, 16))
    factors = [(torch.randn(s, device=r.device, generator=make) * s[2] ** -0.5).to(cfg.dtype) for s in shapes]
    local = len(w13)
    mine = slice(r.rank * local, (r.rank + 1) * local)

    def gradients(workspace, x, ids, weights, w13, w2, dy, factors):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weights, *factors)]
        lora = uniep.nn.Lora(tuple(leaves[2:4]), tuple(leaves[4:]), 0.5)
        y = uniep.moe(leaves[0], ids, leaves[1], w13, w2, workspace=workspace, lora=lora)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    with Workspace(cfg, r.group, backend="nccl", timeout_s=60) as workspace:
        got = gradients(workspace, x, ids, weights, w13, w2, dy, [f[mine] for f in factors])
    joined = [torch.cat(r.gather(t)) for t in (x, ids, weights, w13, w2, dy)]
    whole = dataclasses.replace(cfg, max_tokens_per_rank=1024 * r.size)
    with Workspace(whole, None, device=r.device, backend="nccl", timeout_s=60) as workspace:
        want = gradients(workspace, *joined, factors)
    rows = slice(r.rank * 300, (r.rank + 1) * 300)
    for name, a, b in zip(("y", "dx", "dweights"), got, want, strict=False):
        assert torch.equal(a, b[rows]), name
    for name, a, b in zip(("a13", "b13", "a2", "b2"), got[3:], want[3:], strict=True):
        assert torch.equal(a, b[mine]), name
    x, ids, weights, w13, w2, dy = (t.float() if t.is_floating_point() else t for t in joined)
    leaves = [f.float().requires_grad_() for f in factors]
    a13, b13, a2, b2 = leaves
    y = composition(x, ids, weights, w13 + 0.5 * b13 @ a13, w2 + 0.5 * b2 @ a2, cfg.weight_at)
    for name, exact, ours in zip(("a13", "b13", "a2", "b2"), torch.autograd.grad(y, leaves, dy), want[3:], strict=True):
        error = float((ours.float() - exact).norm() / exact.norm())
        assert error < 0.02, f"{name}: off by {error:.3g}"
    dist.barrier()
