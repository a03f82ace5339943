"""Whole steps whose bits do not depend on how ranks are split into EP and DP, plain and with FSDP2."""

import functools

import case
import pytest
import test_torch
import torch
import torch.distributed as dist
from case import config, equal_bits, named_error
from torch.distributed.device_mesh import init_device_mesh

import uniep
from uniep.cli import model as demo
from uniep.integrations import torch as uniep_torch

TOKENS = test_torch.TOKENS
LAYOUTS = ((4, 1), (2, 2), (1, 4))
"""(EP, copies) of four ranks."""


def steps(world, how, ep, num_experts):
    """Of three steps with clipping: (losses, norms, whole gradients, whole parameters), each rank a shard."""
    copies = world.size // ep
    mesh = init_device_mesh("cpu", (copies, ep), mesh_dim_names=("dp", "ep"))
    everyone = init_device_mesh("cpu", (world.size,))
    cfg = config(gradient_shards=4, num_experts=num_experts)
    ep_mesh = mesh["ep"]
    with uniep.Workspace(cfg, ep_mesh, copies=mesh["dp"], device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
        model = test_torch.Model(workspace)
        if how != "plain":
            model = test_torch.wrapped(how, model, mesh, everyone)
        if how == "fsdp2":
            uniep_torch.reduce_in_rank_order(model)
        dense, experts = uniep_torch.split_parameters(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **test_torch.ADAMW)
        losses, norms, grads = [], [], []
        for (x, target), tokens in zip(test_torch.batches(), TOKENS, strict=True):
            optimizer.zero_grad()
            mine = test_torch.share(world.rank, tokens)
            loss = test_torch.loss_of(model, x[mine], target[mine], len(x))
            (loss if how == "plain" else loss * world.size).backward()  # the wrappers make a mean over ranks
            if how == "plain":
                uniep_torch.reduce_dense_gradients(model, [model], everyone)
            losses += uniep_torch.sum_over_shards([[loss.detach()]], everyone)
            norms.append(uniep_torch.clip_grad_norm_(dense, experts, 0.1, ep_mesh, independent=True))
            grads.append(test_torch.all_whole(model, lambda p: p.grad, mesh, num_experts))
            optimizer.step()
        return losses, norms, grads, test_torch.all_whole(model, lambda p: p, mesh, num_experts)


@functools.cache
def of_ranks(pool, how, ep, num_experts=8):
    every = pool.run(steps, how, ep, num_experts)
    same(*every, what=f"{how}, EP {ep}, ranks")
    return every[0]


def same(first, *others, what):
    losses, norms, grads, parameters = first
    for other in others:
        for name, a, b in (("loss", losses, other[0]), ("norm", norms, other[1])):
            equal_bits(torch.stack(b), torch.stack(a), f"{what}: {name}")
        for step, (a, b) in enumerate([*zip(grads, other[2], strict=True), (parameters, other[3])]):
            for name in a:
                equal_bits(b[name], a[name], f"{what}, step {step}: {name}")


@pytest.mark.smoke
@pytest.mark.parametrize(("how", "ep"), [("plain", 2), ("plain", 1), ("fsdp2", 4), ("fsdp2", 2), ("fsdp2", 1)])
def test_equal_bits_over_ep_and_dp(pool, how, ep):
    same(of_ranks(pool, "plain", 4), of_ranks(pool, how, ep), what=f"{how}, EP {ep}")


def test_experts_split_by_columns(pool):
    """6 experts on 4 copies: FSDP2 splits rows of each expert, and the norm gathers sums of rows."""
    same(of_ranks(pool, "plain", 2, 6), of_ranks(pool, "fsdp2", 1, 6), what="split by columns")


def test_right(pool):
    """Against one process with all tokens."""
    _, norms, grads, parameters = of_ranks(pool, "plain", 2)
    alone = test_torch.alone(bias=False)  # which gradient shards refuse
    for step, (wanted, norm, _) in enumerate(alone):
        torch.testing.assert_close(norms[step], norm)
        scale = min(1.0, 0.1 / float(norm))
        for name, grad in wanted.items():
            torch.testing.assert_close(grads[step][name], grad * scale, rtol=1e-4, atol=1e-6)
    for name, value in alone[-1][2].items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-5)


def test_ddp_leaves_complete_experts(pool):
    want = of_ranks(pool, "plain", 4)
    found = pool.run(steps, "ddp", 2, 8)
    torch.testing.assert_close(torch.stack(found[0][1]), torch.stack(want[1]))
    for rank in found:
        for name, grad in rank[2][0].items():
            torch.testing.assert_close(grad, want[2][0][name], rtol=1e-4, atol=1e-7)


def trained(world, ep, copies, blocks):
    """(losses, norms, whole gradients and parameters) of the demo's model: a rank may have several shards."""
    cfg = demo.ModelConfig(
        layers=1, heads=2, context=16, sequences_per_shard=2, hidden=64, ffn=64, gradient_shards=blocks
    )
    ranks = ep * copies
    sub = None if ranks == world.size or ranks == 1 else world.group(ranks)
    device = {"device": "cpu", "timeout_s": case.TIMEOUT_S}
    if copies == 1:
        groups, group = (world.group(ep), None), None
    elif ranks == world.size:
        mesh = init_device_mesh("cpu", (copies, ep), mesh_dim_names=("dp", "ep"))
        groups, group = (mesh["ep"], mesh["dp"]), dist.group.WORLD
    else:
        groups, group = (None, sub), sub
    with uniep.Workspace(cfg.moe(ranks), groups[0], copies=groups[1], **device) as workspace:
        trainer = demo.Trainer(cfg, workspace, 1e-2, group, max_norm=1.0)
        g = torch.Generator().manual_seed(0)
        found = []
        for _ in range(2):
            batch = list(torch.randint(256, (demo.NUM_SHARDS, 2, 17), generator=g))
            found += [trainer.step(batch), trainer.norm]
        first = workspace.rank * workspace.cfg.experts_per_rank(ep)
        for p in trainer.dense.values():
            found += [p.grad, p.detach()]
        return found, {
            (name, first + e): (p.grad[e], p[e].detach()) for name, p in trainer.experts.items() for e in range(len(p))
        }


def test_several_shards_of_a_rank(pool):
    """Two blocks: two or four ranks, one EP group or two."""
    layouts = [(2, 1), (1, 2), (4, 1), (2, 2)]
    found = [pool.run(trained, *layout, 2, ranks=layout[0] * layout[1]) for layout in layouts]
    (common, *_), (experts, *more) = zip(*found[0], strict=True)
    experts = functools.reduce(dict.__or__, more, experts)
    assert len(experts) == 2 * 8
    for layout, ranks in zip(layouts, found, strict=True):
        for rank, (theirs, own) in enumerate(ranks):
            for number, (a, b) in enumerate(zip(theirs, common, strict=True)):
                equal_bits(a, b, f"{layout}, rank {rank}, {number}")
            for key, pair in own.items():
                for a, b in zip(pair, experts[key], strict=True):
                    equal_bits(a, b, f"{layout}, rank {rank}, {key}")


# --- sums ---


def test_shards_are_added_in_order():
    shards = [[torch.tensor([1e8])], [torch.tensor([1.0])], [torch.tensor([-1e8])], [torch.tensor([1.0])]]
    assert uniep_torch.sum_over_shards(shards, None)[0].item() == 1.0
    assert uniep_torch.sum_over_shards(shards[::-1], None)[0].item() == 0.0


def some(world):
    """Parameters without a gradient: in every shard, in some."""
    cfg = config(gradient_shards=4)
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "ep"))
    with uniep.Workspace(cfg, mesh["ep"], copies=mesh["dp"], device="cpu") as workspace:
        model = torch.nn.Sequential(uniep.nn.MoE(cfg, workspace=workspace, seed=0), torch.nn.Linear(2, 2))
        if world.rank == 2:
            model[1].bias.grad = torch.ones(2)
        uniep_torch.reduce_dense_gradients(model, [model], dist.group.WORLD)
        return model[1].bias.grad, model[1].weight.grad


def test_parameters_without_gradients(pool):
    for bias, weight in pool.run(some):
        assert torch.equal(bias, torch.ones(2)) and weight is None


def refused(world, what):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    cfg, copies = (config(), None) if what == "no copies" else (config(gradient_shards=4), mesh["dp"])
    with uniep.Workspace(cfg, mesh["ep"], copies=copies, device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
        model = torch.nn.Sequential(uniep.nn.MoE(cfg, workspace=workspace, seed=0))
        if what == "shards":
            return named_error(uniep_torch.sum_over_shards, [[torch.ones(2)], [torch.ones(3)]], None)
        if what == "no shards":
            return named_error(uniep_torch.sum_over_shards, [], None)
        if what == "fsdp2":
            return named_error(uniep_torch.reduce_in_rank_order, model)
        if what == "hsdp":
            mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("r", "dp", "ep"))
            return named_error(lambda: uniep_torch.fully_shard_experts(model, mesh, dp=("r", "dp")))
        if what == "norm":
            return named_error(
                lambda: uniep_torch.clip_grad_norm_(
                    *uniep_torch.split_parameters(model), 1.0, None, norm_type=1.0, independent=True
                )
            )
        return named_error(uniep_torch.reduce_dense_gradients, model, [model], dist.group.WORLD)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("no copies", "ConfigError", "EP group of 2 ranks and 1 copies, but shards are spread over 4 ranks"),
        ("shards", "ConfigError", "shard 1 of this rank has tensors of shapes"),
        ("no shards", "ConfigError", "this rank has no shard to add"),
        ("fsdp2", "ConfigError", "call fully_shard first"),
        ("hsdp", "UnsupportedError", "FSDP2 would sum them over 'r' again"),
        ("norm", "ConfigError", "norm_type is 1.0; independent=True supports only 2"),
    ],
)
def test_refused(pool, what, kind, text):
    for found in pool.run(refused, what):
        assert found is not None and found[0] == kind and text in found[1], found
