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
    sums = [functools.reduce(torch.add, of_ranks) for of_ranks in blocks]
    whole = [dw.to(cfg.dtype) for dw in sums]
    experts = slice(r.rank * len(w13), (r.rank + 1) * len(w13))
    with Workspace(cfg, r.group, timeout_s=60) as workspace:
        parameters = [w.clone().requires_grad_() for w in (w13, w2)]
        for how, before in (("overwrite", torch.nan), ("accumulate", 0.3)):
            for w in parameters:
                w.main_grad = torch.full(w.shape, before, device=r.device)
            uniep.moe(x, ids, weights, *parameters, workspace=workspace, main_grad=how).backward(dy)
            for w, dw in zip(parameters, sums, strict=True):
                want = dw[experts] if how == "overwrite" else torch.full_like(w.main_grad, before) + dw[experts]
                assert torch.equal(w.main_grad, want), how
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
    """The same of experts with biases: all ways, and copies, have one set of bits."""
    cfg = MoEConfig(**SHAPE, bias=True, activation="swiglu_oai", activation_limit=1.0, gradient_shards=r.size)
    x, ids, weights, w13, w2, dy, *biases = data = r.data(cfg, [900, 300, 0, 17][r.rank % 4])
    every = [torch.cat(r.gather(w)) for w in (w13, w2, *biases)]
    experts = slice(r.rank * len(w13), (r.rank + 1) * len(w13))
    found = {how: r.once(cfg, data, **options)[3:] for how, options in WAYS.items()}
    for backend in ("hopper", "nccl"):
        how = {"copies": r.group, "device": r.device, "backend": backend, "timeout_s": 60}
        with Workspace(cfg, None, **how) as workspace:
            grads = r.run(workspace, (x, ids, weights, *every[:2], dy, *every[2:]))[3:]
        found[f"{backend}, copies"] = [grad[experts] for grad in grads]
    want = found["nccl"]
    for how, grads in found.items():
        fields = zip(("dw13", "dw2", "db13", "db2"), want, grads, strict=True)
        wrong = [name for name, a, b in fields if not torch.equal(a, b)]
        assert not wrong, (how, wrong)


LORA_WAYS = {
    "serial": {"schedule": Schedule(overlap="serial", tile_order="natural")},
    "pushed": {"schedule": Schedule(transfer="push", activation_gradient="beside", beside_from=0)},
    "pipelined": {"schedule": Schedule(transfer="copy", overlap="pipelined", pipelined_from=0)},  # takes stages
    "w3 below w1": {},
    **WAYS,
}


def check_lora(r):
    """Factors of several ranks: EP = ranks has, every way, the bits of EP 1 with all tokens, also in calls that are
    recorded; gradients are near the composition's."""
    cfg = MoEConfig(**SHAPE)
    data = r.data(cfg, 300)
    joined = [torch.cat(r.gather(t)) for t in data]
    for rank, ways in ((16, LORA_WAYS), (8, {"copied": WAYS["copied"]}), (128, {"copied": WAYS["copied"]})):
        make = torch.Generator(r.device).manual_seed(5)
        shapes = ((16, rank, 512), (16, 528, rank), (16, rank, 264), (16, 512, rank))
        factors = [(torch.randn(s, device=r.device, generator=make) * s[2] ** -0.5).to(cfg.dtype) for s in shapes]
        whole = dataclasses.replace(cfg, max_tokens_per_rank=1024 * r.size)
        want = {}
        for backend in ("hopper", "nccl"):
            with Workspace(whole, None, device=r.device, backend=backend, timeout_s=60) as workspace:
                want[backend] = _lora_step(workspace, *joined, factors)
            _near_the_composition(cfg, joined, factors, want[backend], f"{backend}, r {rank}")
        mine, rows = slice(r.rank * len(data[3]), (r.rank + 1) * len(data[3])), slice(r.rank * 300, (r.rank + 1) * 300)
        for how, options in ways.items():
            backend, given = options.get("backend", "hopper"), list(data)
            if how == "w3 below w1":
                halves = given[3].view(-1, 2, cfg.ffn, cfg.hidden).transpose(0, 1).flip(0).contiguous()
                given[3] = halves[1], halves[0]
            with Workspace(cfg, r.group, timeout_s=60, **options) as workspace:
                for repeat in range(4 if how == "copied" else 1):
                    got = _lora_step(workspace, *given, [f[mine] for f in factors])
                    of = [t[rows] for t in want[backend][:3]] + [t[mine] for t in want[backend][3:]]
                    wrong = [name for name, a, b in zip(LORA_NAMES, got, of, strict=True) if not torch.equal(a, b)]
                    assert not wrong, (how, rank, repeat, wrong)
        dist.barrier()


LORA_NAMES = ("y", "dx", "dweights", "a13", "b13", "a2", "b2")


def _lora_step(workspace, x, ids, weights, w13, w2, dy, factors):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, *factors)]
    lora = uniep.nn.Lora(tuple(leaves[2:4]), tuple(leaves[4:]), 0.5)
    y = uniep.moe(leaves[0], ids, leaves[1], w13, w2, workspace=workspace, lora=lora)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def _near_the_composition(cfg, data, factors, found, what):
    """Against fp64, at most twice the error of W + s B A multiplied out in the layer's dtype."""

    def dense(dtype):
        x, ids, weights, w13, w2, dy = (t.to(dtype) if t.is_floating_point() else t for t in data)
        leaves = [t.detach().clone().to(dtype).requires_grad_() for t in (x, weights, *factors)]
        a13, b13, a2, b2 = leaves[2:]
        y = composition(leaves[0], ids, leaves[1], w13 + 0.5 * b13 @ a13, w2 + 0.5 * b2 @ a2, cfg.weight_at)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    for name, ours, exact, plain in zip(LORA_NAMES, found, dense(torch.float64), dense(cfg.dtype), strict=True):
        error, bound = (float((t.double() - exact).norm() / exact.norm()) for t in (ours, plain))
        assert error <= 2 * bound, f"{what}, {name}: off by {error:.3g}, the composition by {bound:.3g}"
