"""LoRA on experts: bits over EP sizes, schedules and backends; gradients against the dense composition."""

import dataclasses
import functools

import case
import pytest
import test_gradient_shards
import torch
from case import config, equal_bits, named_error, random_batch

import uniep
from uniep.weights import Lora

TOKENS = (70, 33, 0, 150)
SCALE = 0.75
NAMES = ("y", "dx", "dweights", "a13", "b13", "a2", "b2")


def factors(cfg, rank):
    """a13, b13, a2, b2 of all experts."""
    g = torch.Generator().manual_seed(7)
    e, f, d = cfg.num_experts, cfg.ffn, cfg.hidden
    shapes = (e, rank, d), (e, cfg.h_columns, rank), (e, rank, f), (e, d, rank)
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
    biases = case.named([b[experts] for b in batch.biases])
    of_experts = batch.w13[experts], batch.w2[experts]
    y = uniep.moe(x, batch.ids[rows], weights, *of_experts, workspace=ws, lora=lora, **biases)
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
    "biases, no gate": config(activation="relu2", bias=True, ffn=136),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_bits_over_ep_and_schedules(pool, name):
    cfg = CONFIGS[name]
    split = dataclasses.replace(
        case.FUSED, activation="separate", weight_gradient_order="interleaved", received="again"
    )
    recomputed = dataclasses.replace(split, preactivation="recomputed")
    collective = uniep.Schedule(overlap="serial", tile_order="natural", preactivation="recomputed")
    for ep, schedule, backend in (
        (1, case.FUSED, "cpu"), (2, case.FUSED, "cpu"), (2, split, "cpu"), (2, recomputed, "cpu"), (4, None, "cpu"),
        (2, None, "nccl"), (2, collective, "nccl"),
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
    biases = tuple(b.to(dtype) for b in batch.biases) or None
    how = (cfg.weight_at, cfg.activation, cfg.activation_limit, biases)
    y = uniep.reference.composition(x, batch.ids, weights, w13, w2, *how)
    y.backward(batch.dy.to(dtype))
    return [y.detach(), x.grad, weights.grad, *(t.grad for t in leaves)]


@pytest.mark.parametrize(
    ("name", "rank"), [("bf16", 8), ("bf16", 128), ("fp32, activation", 8), ("biases, no gate", 8)]
)
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


# --- add_lora ---


class Net(torch.nn.Module):
    def __init__(self, cfg, workspace):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(uniep.nn.MoE(cfg, workspace=workspace, seed=n) for n in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def trained(world, cfg, ep, targets, merged):
    """Three steps of the factors: (names, whole factors by name, w13 before and after, y before, with B = 0, and in the
    end)."""
    batch = batch_of(cfg)
    with case.workspace(world, cfg, ep) as ws:
        net = Net(cfg, ws)
        x = batch.x[batch.rows(ws.rank, ep)]
        with torch.no_grad():
            plain = net(x)
        before = net.layers[0].experts.w13.detach().clone()
        torch.manual_seed(1)
        names = uniep.nn.add_lora(net, r=8, lora_alpha=6.0, target_parameters=targets)
        with torch.no_grad():
            started = net(x)
        for name, p in net.named_parameters():
            p.requires_grad_("lora" in name)
        optimizer = torch.optim.AdamW([net.get_parameter(n) for n in names], lr=0.05, foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            (net(x).float() - batch.dy[batch.rows(ws.rank, ep)].float()).square().sum().backward()
            optimizer.step()
        factors = {n: net.get_parameter(n).detach().clone() for n in names}
        with torch.no_grad():
            ended = net(x)
            if merged:
                uniep.nn.merge_lora(net)
                assert not any("lora" in n for n, _ in net.named_parameters())
                merged = net(x)
        return names, factors, before, net.layers[0].experts.w13.detach().clone(), plain, started, ended, merged


EVERY = ("experts.w13", "experts.w2")
EVERY_WEIGHT = ("w13", "w2")


def test_trained_alike_at_every_ep_size(pool):
    cfg = config(dtype=torch.bfloat16, max_tokens_per_rank=256)
    found = {ep: pool.run(trained, cfg, ep, EVERY, ep == 1, ranks=ep) for ep in (1, 2, 4)}
    names, alone, before, after, plain, started, ended, merged = found[1][0]
    assert names == [f"layers.{n}.experts.lora_{f}{w}" for n in (0, 1) for w in ("13", "2") for f in "ab"]
    assert all(t.any() for t in alone.values()), "every factor was trained"
    assert not torch.equal(before, after), "merged"
    equal_bits(plain, started, "y with B = 0")
    assert float((ended.float() - plain.float()).norm()) > 0.1 * float(plain.float().norm()), "it has learnt"
    assert float((merged.float() - ended.float()).norm()) < 0.05 * float(ended.float().norm()), "merged: rounded anew"
    for ep in (2, 4):
        equal_bits(torch.cat([r[6] for r in found[ep]]), ended, f"EP {ep}: y")
        for name in names:
            equal_bits(torch.cat([r[1][name] for r in found[ep]]), alone[name], f"EP {ep}: {name}")
        assert all(torch.equal(r[2], r[3]) for r in found[ep]), "w13 is frozen"


def errors(world, cfg):
    how = {"device": "cpu", "timeout_s": case.TIMEOUT_S}
    with uniep.Workspace(cfg, world.group(2), **how) as ws:
        net, add = Net(cfg, ws), uniep.nn.add_lora
        net.head = torch.nn.Linear(2, 2)
        found = [
            named_error(lambda: add(net, r=0)),
            named_error(lambda: add(net, r=65)),
            named_error(lambda: add(net, target_parameters=["experts.w1"])),
            named_error(lambda: add(net, target_parameters=["head.weight"])),
            named_error(lambda: uniep.nn.merge_lora(net)),
        ]
        assert add(net, target_parameters=["layers.1.experts.w2"])
        found.append(named_error(lambda: add(net, target_parameters=["layers.1.experts.w2"])))
        experts = net.layers[1].experts
        call = functools.partial(experts, torch.zeros(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
        experts.w13.requires_grad_(world.rank == 1)
        found.append(named_error(call))
        experts.w13.requires_grad_(False)
        experts.main_grad = "accumulate"
        found.append(named_error(call))
        experts.main_grad = None
        experts.lora_a2 = torch.nn.Parameter(torch.zeros(4, 3, 64))
        found.append(named_error(call))
        return found


def test_errors(pool):
    wanted = [
        ("ConfigError", "r is 0; it must be at least 1"),
        ("ConfigError", "r is 65, but layers.0.experts has only 64 columns"),
        (
            "ConfigError",
            "'experts.w1', but no parameter of this Net has that name or ending; those of its experts are layers.0",
        ),
        ("ConfigError", "head.weight, not w13 or w2 of a uniep.nn.Experts; adapt dense layers with PEFT"),
        ("ConfigError", "no Experts of this model has LoRA factors"),
        ("ConfigError", "layers.1.experts has LoRA factors already"),
        ("ConfigError", "requires a gradient beside LoRA factors"),
        ("UnsupportedError", "main_grad is 'accumulate'"),
        ("ConfigError", "have shapes (4, 3, 64) and (4, 64, 16); for 4 local experts they must be (4, r, 64) and"),
    ]
    for rank in pool.run(errors, config(), ranks=2):
        for number, ((kind, text), found) in enumerate(zip(wanted, rank, strict=True)):
            assert found is not None and found[0] == kind and text in found[1], f"{number}: {found}"


def copies(world, cfg):
    """Factors' gradients with two copies of the experts."""
    with test_gradient_shards.workspace(world, cfg, 2, 2) as ws:
        return step(ws, batch_of(cfg), 8, share=world.rank, shares=4)[3:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_ranks(pool, dtype):
    """Blocks of a source rank each, over copies: up to the order of their sums in fp32, and one rounding of bf16, those
    of a run with all tokens."""
    cfg = config(gradient_shards=4, dtype=dtype)
    alone = dataclasses.replace(cfg, gradient_shards=1, max_tokens_per_rank=256)
    four = pool.run(on_ranks, dataclasses.replace(cfg), batch_of(cfg), 4, None, "cpu", 8, EVERY_WEIGHT, ranks=4)
    whole = [torch.cat(ts) for ts in list(zip(*four, strict=True))[3:]]
    one_chain = run(pool, alone, batch_of(cfg), 1)[3:]
    if dtype == torch.float32:  # bf16 may hide it
        assert not all(torch.equal(a, b) for a, b in zip(whole, one_chain, strict=True)), "another function"
    for a, b in zip(whole, one_chain, strict=True):
        torch.testing.assert_close(a, b, rtol=max(torch.finfo(dtype).eps, 1e-5), atol=1e-5)
    for rank, found in enumerate(pool.run(copies, cfg)):
        for name, got, want in zip(NAMES[3:], found, whole, strict=True):
            equal_bits(got, want[batch_of(cfg).experts(rank % 2, 2)], f"rank {rank}: {name}")
