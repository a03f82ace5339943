"""What lies inside `Experts` besides w13 and w2: reduced, clipped, copied and skipped as its owner says, or refused."""

import copy
import functools

import case
import pytest
import test_torch as plain
import torch
import torch.distributed as dist
from case import config
from test_torch import batches, loss_of, share
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import uniep
from uniep.integrations import torch as uniep_torch

TOKENS = plain.TOKENS[0]
LORA = "parametrizations.w13.0."
DIMS = {f"{LORA}a": None, f"{LORA}b": 0, f"{LORA}scale": 0, f"{LORA}seen": 0}


class Lora(nn.Module):
    """w13 + scale * b a, with one factor for all experts and the rest for each."""

    def __init__(self, experts):
        super().__init__()
        first, e, g = experts.first_expert, experts.num_local, torch.Generator().manual_seed(2)
        mine = slice(first, first + e)
        total, rows, hidden = experts.cfg.num_experts, 2 * experts.cfg.ffn, experts.cfg.hidden
        self.a = nn.Parameter(torch.randn(2, hidden, generator=g))
        self.b = nn.Parameter(torch.randn(total, rows, 2, generator=g)[mine] * 0.1)
        self.scale = nn.Parameter(torch.rand(total, 1, 1, generator=g)[mine].clone())
        self.register_buffer("seen", torch.arange(total, dtype=torch.float32)[mine].clone())

    def forward(self, w13):
        return w13 + self.scale * (self.b @ self.a)


def adapted(workspace, declared=True):
    model = plain.Model(workspace)
    for block in model.blocks:
        experts = block.moe.experts
        parametrize.register_parametrization(experts, "w13", Lora(experts))
        if declared:
            experts.expert_dims = experts.expert_dims | DIMS
    return model


def step(model, world_size=1, mine=slice(None)):
    x, target = batches()[0]
    loss_of(model, x[mine], target[mine], len(x) / world_size).backward()


def mean_over(name):
    """Whole gradient, parameter names as one process has them."""
    return name.replace("module.", "")


@functools.cache
def alone():
    with uniep.Workspace(config(), device="cpu") as workspace:
        model = adapted(workspace)
        step(model)
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        return grads, nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def wrapped(how, model):
    """The model on four ranks, and its EP mesh: (dp 2, ep 2), or with one more dimension of copies."""
    if "rep" in how:
        shape, names, dp = ((2, 1, 2), ("rep", "dp", "ep"), ("rep", "dp"))
    else:
        shape, names, dp = ((2, 2), ("dp", "ep"), "dp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    workspace = uniep.Workspace(config(), mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S)
    model = model(workspace)
    if "fsdp2" in how:
        uniep_torch.fully_shard_experts(model, mesh, dp=dp)
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    else:
        model = uniep_torch.data_parallel(model, mesh, dp=dp)
    return model, mesh, workspace


def owned(world, how):
    model, mesh, workspace = wrapped(how, adapted)
    with workspace:
        if how == "ddp, copied":
            model = copy.deepcopy(model)
        step(model, world.size, share(world.rank, TOKENS))
        grads = {}
        for name, p in model.named_parameters():
            g = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
            if "experts" in name and not name.endswith(".a") and len(g) == 4:
                parts = [torch.empty_like(g) for _ in range(2)]
                dist.all_gather(parts, g, group=mesh["ep"].get_group())
                g = torch.cat(parts)
            grads[mean_over(name)] = g
        norm = uniep_torch.clip_grad_norm_(*uniep_torch.split_parameters(model), 1.0, mesh["ep"])
        return grads, norm


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["ddp", "ddp, copied", "ddp, rep", "fsdp2", "fsdp2, rep"])
def test_91_98_owners_decide_the_reduction(pool, how):
    """A factor that all experts share is reduced over EP, what is each expert's over all its copies and no others."""
    want, want_norm = alone()
    for grads, norm in pool.run(owned, how):
        assert grads.keys() == want.keys()
        for name, ref in want.items():
            torch.testing.assert_close(grads[name], ref, rtol=2e-5, atol=2e-6 * float(ref.abs().max()), msg=name)
        torch.testing.assert_close(norm, want_norm)


def refused(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    third = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "ep"))
    attempts = {}

    def attempt(name, function, *args, **kwargs):
        attempts[name] = case.named_error(lambda: function(*args, **kwargs))

    with uniep.Workspace(config(), mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
        model = adapted(workspace, declared=False)
        for function in (uniep_torch.data_parallel, uniep_torch.fully_shard_experts):
            attempt(f"{function.__name__}: parametrized", function, model, mesh)
        attempt("TrainState: parametrized", uniep_torch.TrainState, model, None, mesh["ep"])
        attempt("split_parameters: parametrized", uniep_torch.split_parameters, model)
        model = plain.Model(workspace)
        model.blocks[1].moe.experts.register_buffer("load", torch.zeros(4))
        attempt("TrainState: buffer", uniep_torch.TrainState, model, None, mesh["ep"])
        model.blocks[1].moe.experts.expert_dims["load"] = 1
        attempt("TrainState: no such dimension", uniep_torch.TrainState, model, None, mesh["ep"])
        model = plain.Model(workspace)
        attempt("data_parallel: dimension", uniep_torch.data_parallel, model, third)
        attempt("fully_shard_experts: dimension", uniep_torch.fully_shard_experts, model, third)
        model.blocks[0].moe.experts.w2 = model.blocks[1].moe.experts.w2
        attempt("fully_shard_experts: tied", uniep_torch.fully_shard_experts, model, mesh)
        model = plain.Model(workspace)
        fully_shard(model, mesh=mesh["dp"])
        attempt("fully_shard_experts: late", uniep_torch.fully_shard_experts, model, mesh)
        attempt("TrainState: late", uniep_torch.TrainState, model, None, mesh["ep"])
        model = plain.Model(workspace)
        outer = nn.Module()  # as PEFT wraps experts
        outer.base_layer, outer.lora_A = model.blocks[0].moe.experts, nn.Linear(4, 4)
        model.blocks[0].moe.experts = outer
        attempt("data_parallel: adapter", uniep_torch.data_parallel, model, mesh)
        model = plain.Model(workspace)
        uniep_torch.fully_shard_experts(model, mesh)
        attempt("deepcopy: experts in FSDP2", copy.deepcopy, model)
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        attempt("AveragedModel: model in FSDP2", AveragedModel, model)
    return attempts


@pytest.mark.smoke
def test_refusals(pool):
    """92, 94, 98: what has no known owner, or would be copied or reduced wrongly, names the remedy on every rank."""
    texts = {
        "parametrized": "blocks.0.moe.experts.parametrizations.w13.0.a, of shape .* has no known owner.*expert_dims",
        "buffer": "blocks.1.moe.experts.load, of shape .* has no known owner",
        "no such dimension": "its dimension 1 should hold 4 experts",
        "dimension": r"a dimension 'pp' of 2 ranks .* dp=\('pp', 'dp'\)",
        "tied": "blocks.0.moe.experts and blocks.1.moe.experts|blocks.1.moe.experts and blocks.0.moe.experts",
        "late": "call fully_shard_experts before fully_shard",
        "adapter": "is a Module around experts spread over 2 ranks",
        "experts in FSDP2": "cannot be deep-copied",
        "model in FSDP2": "cannot be deep-copied",
    }
    for attempts in pool.run(refused):
        for name, error in attempts.items():
            assert error is not None, name
            assert plain.re.search(texts[name.partition(": ")[2]], error[1], plain.re.S), (name, error)


def copied(world):
    """Whether an average of a DDP model computes, differs from the model, keeps its names and loads strictly."""
    model, _, workspace = wrapped("ddp", plain.Model)
    with workspace:
        before = set(plain.Model(workspace).state_dict())
        average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, world.size, share(world.rank, TOKENS))
        average.update_parameters(model.module)
        optimizer.step()
        average.update_parameters(model.module)
        experts, mean = (m.module.blocks[0].moe.experts for m in (model, average))
        x = torch.randn(3, 64)
        plain.Model(workspace).load_state_dict(model.module.state_dict())
        with torch.no_grad():
            differ = not torch.equal(model(x), average(x))
        return differ and not torch.equal(experts.w13, mean.w13), before == set(model.module.state_dict())


def test_94_copies_and_names(pool):
    assert pool.run(copied) == [(True, True)] * 4


def overflow(world, bad_rank):
    """Scale and a sum over the dense and expert parameters after a step with one rank's expert gradients infinite."""
    model, _, workspace = wrapped("ddp", plain.Model)
    with workspace:
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
        w2 = model.module.blocks[1].moe.experts.w2
        if world.rank == bad_rank:
            w2.register_hook(lambda g: g.masked_fill(g == g.max(), float("inf")))
        before = [p.detach().clone() for p in model.parameters()]
        x, target = (t[share(world.rank, TOKENS)] for t in batches()[0])
        scaler.scale(loss_of(model, x, target, 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        stepped = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        return scaler.get_scale(), any(stepped), all(stepped)


@pytest.mark.smoke
def test_100_all_ranks_skip_or_none(pool):
    """torch's own GradScaler: an overflow in one rank's dW is known to all ranks; without one all step."""
    assert pool.run(overflow, 1) == [(2.0, False, False)] * 4
    assert pool.run(overflow, None) == [(4.0, True, True)] * 4
