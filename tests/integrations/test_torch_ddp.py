"""`data_parallel` where models are not plain: layers left out, shared experts, wrapped twice, frozen parts, options."""

import copy
import dataclasses

import case
import pytest
import test_torch as plain
import torch
import torch.distributed as dist
from case import config
from test_torch import TOKENS, Model, batches, loss_of, meshes, share
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import uniep
from uniep.integrations import torch as uniep_torch

X, TARGET = batches()[0]
HALF = sum(TOKENS[0][:2])


def of_rank(world):
    """This rank's tokens and targets, and the number by which its sum is divided."""
    mine = share(world.rank, TOKENS[0])
    return X[mine], TARGET[mine], len(X) / world.size


def grads_of(model, mesh=None):
    """Whole gradients by name; mesh: of ranks with a part of the experts."""
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {n: g if g is None or mesh is None else plain.whole(n, g, mesh, 8) for n, g in found.items()}


def close(got, want):
    assert got.keys() == want.keys()
    for name, ref in want.items():
        assert (ref is None) == (got[name] is None), name
        if ref is not None:
            torch.testing.assert_close(got[name], ref, rtol=2e-5, atol=1e-6 * float(ref.abs().max()), msg=name)


def opened(mesh):
    return uniep.Workspace(config(), mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S)


def skipping(model, block):
    model.blocks = nn.Sequential(*(nn.Identity() if n == block else b for n, b in enumerate(model.blocks)))


def left_out(world, drops):
    """Gradients of two steps in which each copy leaves out a block, after one under no_sync with all blocks."""
    mesh, _ = meshes(world, 2)
    with opened(mesh) as workspace:
        model = Model(workspace, 3)
        blocks, found = model.blocks, []
        ddp = uniep_torch.data_parallel(model, mesh, find_unused_parameters=True)
        for accumulated in (False, False, True):
            model.zero_grad()
            if accumulated:
                with ddp.no_sync():
                    loss_of(ddp, *of_rank(world)).backward()
            skipping(model, drops[mesh["dp"].get_local_rank()])
            loss_of(ddp, *of_rank(world)).backward()
            model.blocks = blocks
            found.append(grads_of(model, mesh))
        return found


@pytest.mark.smoke
@pytest.mark.parametrize("drops", [(0, 2), (1, 1), (None, 1)], ids=str)
def test_layers_that_some_copies_leave_out(pool, drops):
    """As with stochastic depth: a layer's gradients are averaged with those of the same layer, or with zeros."""
    want = []
    with uniep.Workspace(config(), device="cpu") as workspace:
        for accumulated in (False, False, True):
            model = Model(workspace, 3)
            blocks = model.blocks
            for half, drop in zip((slice(HALF), slice(HALF, None)), drops, strict=True):
                if accumulated:
                    loss_of(model, X[half], TARGET[half], len(X)).backward()
                skipping(model, drop)
                loss_of(model, X[half], TARGET[half], len(X)).backward()
                model.blocks = blocks
            want.append(grads_of(model))
    for found in pool.run(left_out, drops):
        for got, ref in zip(found, want, strict=True):
            close(got, ref)


def evaluated_between(world):
    """Gradients of a step with a forward without gradients between its forward and its backward."""
    mesh, _ = meshes(world, 2)
    with opened(mesh) as workspace:
        ddp = uniep_torch.data_parallel(Model(workspace), mesh)
        loss = loss_of(ddp, *of_rank(world))
        with ddp.no_sync(), torch.no_grad():
            ddp(of_rank(world)[0])
        loss.backward()
        return grads_of(ddp.module, mesh)


@pytest.mark.smoke
def test_evaluation_before_the_backward(pool):
    """Only a forward that has a backward decides whether that reduces, as in DDP."""
    with uniep.Workspace(config(), device="cpu") as workspace:
        model = Model(workspace)
        loss_of(model, X, TARGET, len(X)).backward()
    for got in pool.run(evaluated_between):
        close(got, grads_of(model))


def freeze_dense(block):
    for name, parameter in block.named_parameters():
        parameter.requires_grad_("experts" in name)


def left_out_unseen(world, drops, options):
    """Gradients where DDP has nothing to reduce in the block that is left out, and number of reductions of flags."""
    mesh, _ = meshes(world, 2)
    with opened(mesh) as workspace, pytest.MonkeyPatch.context() as patch:
        model = Model(workspace, 3)
        freeze_dense(model.blocks[1])
        ddp = uniep_torch.data_parallel(model, mesh, **options)
        blocks, flags, reduce = model.blocks, [], dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda t, *a, **k: (flags.append(t.dtype), reduce(t, *a, **k))[1])
        skipping(model, drops[mesh["dp"].get_local_rank()])
        loss_of(ddp, *of_rank(world)).backward()
        model.blocks = blocks
        return grads_of(model, mesh), flags.count(torch.int32)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["all run", "unused"])
@pytest.mark.parametrize("drops", [(1, None), (1, 1)], ids=str)
def test_experts_left_out_unseen_by_ddp(pool, drops, options):
    """Right without the option, too, which costs a reduction of flags: only what no copy ran gets zeros, not None."""
    with uniep.Workspace(config(), device="cpu") as workspace:
        model = Model(workspace, 3)
        blocks = model.blocks
        freeze_dense(blocks[1])
        for half, drop in zip((slice(HALF), slice(HALF, None)), drops, strict=True):
            skipping(model, drop)
            loss_of(model, X[half], TARGET[half], len(X)).backward()
            model.blocks = blocks
        if not options:
            for parameter in blocks[1].moe.experts.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        want = grads_of(model)
    for got, flags in pool.run(left_out_unseen, drops, options):
        close(got, want)
        assert flags == len(options)


class Both(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(self.first(x))


def two_models(workspace, wrap, of, how):
    """Gradients of two models that share two blocks."""
    trunk = Model(workspace).blocks
    torch.manual_seed(5)
    own = nn.Sequential(uniep.nn.MoE(workspace.cfg, workspace=workspace, seed=9), nn.Linear(64, 16))
    models = Both(trunk, nn.Linear(64, 16)), Both(trunk, own)
    wrapped = [wrap(model) for model in models]
    if how == "together":
        sum(loss_of(model, *of) for model in wrapped).backward()
    else:
        for model in wrapped:
            loss_of(model, *of).backward()
    return nn.ModuleList(models)


def two_wrapped(world, how):
    mesh, _ = meshes(world, 2)
    with opened(mesh) as workspace:
        models = two_models(workspace, lambda m: uniep_torch.data_parallel(m, mesh), of_rank(world), how)
        # the layer of one model alone has another name there
        return {n.replace("second.0", "experts of "): g for n, g in grads_of(models, mesh).items()}


@pytest.mark.parametrize("how", ["together", "in turn"])
def test_experts_of_two_models(pool, how):
    """Two models, each in DDP, share experts: these are divided once, not once for each model."""
    with uniep.Workspace(config(), device="cpu") as workspace:
        want = grads_of(two_models(workspace, lambda m: m, (X, TARGET, len(X)), how))
    for got in pool.run(two_wrapped, how):
        close(got, {n.replace("second.0", "experts of "): g for n, g in want.items()})


def wrapped_again(world, ep):
    mesh, _ = meshes(world, ep)
    with opened(mesh) as workspace:
        model = Model(workspace)
        ddp = uniep_torch.data_parallel(model, mesh)
        loss_of(ddp, *of_rank(world)).backward()
        model.zero_grad()
        ddp = uniep_torch.data_parallel(ddp.module, mesh, find_unused_parameters=True)
        loss_of(ddp, *of_rank(world)).backward()
        return grads_of(model, mesh)


@pytest.mark.smoke
@pytest.mark.parametrize("ep", [2, 4])
def test_wrapped_again(pool, ep):
    """Such as with other options: an expert's gradient is still the mean."""
    for got in pool.run(wrapped_again, ep):
        close(got, plain.alone(8, False)[0][0])


@dataclasses.dataclass
class Output:
    y: torch.Tensor


class Wrapping(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return Output(self.model(x))


def frozen_on_one(world):
    """Gradients of a model whose output is a dataclass, with the experts of one rank of each EP group frozen."""
    mesh, _ = meshes(world, 2)
    with opened(mesh) as workspace:
        model = Model(workspace)
        for block in model.blocks:
            block.moe.experts.requires_grad_(workspace.rank != 1)
        ddp = uniep_torch.data_parallel(Wrapping(model), mesh)
        loss_of(lambda x: ddp(x).y, *of_rank(world)).backward()
        return workspace.rank, {n: g for n, g in grads_of(model).items() if g is not None}


@pytest.mark.smoke
def test_experts_of_one_rank_frozen(pool):
    """Ranks wait for each other at the end of the backward: all of them get there."""
    want = plain.alone(8, False)[0][0]
    for rank, got in pool.run(frozen_on_one):
        assert {n for n in want if n not in got} == ({n for n in want if "experts" in n} if rank == 1 else set())
        close(got, {n: g[:4] if "experts" in n else g for n, g in want.items() if n in got})


def frozen_and_shared(world, again):
    """Gradients of experts that another DDP has handled before, and that one rank of each EP group has frozen since."""
    mesh, _ = meshes(world, 2)
    with opened(mesh) as workspace:
        model = Model(workspace)
        first = uniep_torch.data_parallel(model, mesh)
        second = None if again else uniep_torch.data_parallel(Wrapping(model), mesh)
        loss_of(first, *of_rank(world)).backward()
        model.zero_grad()
        for block in model.blocks:
            block.moe.experts.requires_grad_(workspace.rank != 1)
        second = uniep_torch.data_parallel(first.module, mesh) if again else lambda x, ddp=second: ddp(x).y
        loss_of(second, *of_rank(world)).backward()
        return workspace.rank, {n: g for n, g in grads_of(model).items() if g is not None}


@pytest.mark.parametrize("again", [False, True])
def test_experts_of_one_rank_frozen_after_another_ddp(pool, again):
    """The number of parameters that a rank still handles must not decide whether it waits for the others."""
    want = plain.alone(8, False)[0][0]
    for rank, got in pool.run(frozen_and_shared, again):
        assert any("experts" in n for n in got) == (rank != 1)
        close(got, {n: want[n][:4] if "experts" in n else want[n] for n in got})


def tie(model, how):
    """Experts used several times, in backwards of their own (reentrant checkpoints) or in the outer one."""
    reentrant = [n for n, way in enumerate(how) if way == "reentrant"]
    model.blocks[-1].moe.experts = model.blocks[0].moe.experts
    for n in reentrant:
        block = model.blocks[n]
        block.forward = lambda x, block=block: checkpoint(block.inner, x, use_reentrant=True)


def tied_and_recomputed(world, how):
    """Gradients of two backwards."""
    mesh, _ = meshes(world, 2)
    with opened(mesh) as workspace:
        model, found = Model(workspace, len(how)), []
        tie(model, how)
        ddp = uniep_torch.data_parallel(model, mesh, static_graph=True)
        x, *rest = of_rank(world)
        for _ in range(2):
            model.zero_grad()
            loss_of(ddp, x.clone().requires_grad_(), *rest).backward()
            found.append(grads_of(model, mesh))
        return found


def recomputed_later(world, how):
    """What the second backward says if blocks are in reentrant checkpoints only then; gradients when wrapped again."""
    mesh, _ = meshes(world, 2)
    with opened(mesh) as workspace:
        model = Model(workspace, len(how))
        tie(model, ())
        ddp = uniep_torch.data_parallel(model, mesh)
        x, *rest = of_rank(world)
        x = x.clone().requires_grad_()
        loss_of(ddp, x, *rest).backward()
        tie(model, how)
        said = case.named_error(lambda: loss_of(ddp, x, *rest).backward())
        ddp = uniep_torch.data_parallel(ddp.module, mesh)
        model.zero_grad()
        loss_of(ddp, x, *rest).backward()
        return said, grads_of(model, mesh)


def tied_alone(blocks):
    with uniep.Workspace(config(), device="cpu") as workspace:
        model = Model(workspace, blocks)
        tie(model, ())
        loss_of(model, X, TARGET, len(X)).backward()
        return grads_of(model)


MIXED = [
    ("reentrant", "reentrant"),
    ("reentrant", "plain", "reentrant"),
    ("reentrant", "plain", "plain"),
    ("plain", "plain", "reentrant"),
]


@pytest.mark.parametrize("how", MIXED, ids="-".join)
def test_tied_experts_recomputed_in_backwards_of_their_own(pool, how):
    """Several backwards inside one add to the same gradient: it is averaged when all have."""
    want = tied_alone(len(how))
    for found in pool.run(tied_and_recomputed, how):
        for got in found:
            close(got, want)


def test_tied_experts_recomputed_only_later(pool):
    """The first backward says which parameters wait.  If it did not, the one that would be wrong says so."""
    how = ("reentrant", "plain", "plain")
    for said, again in pool.run(recomputed_later, how):
        assert said[0] == "UnsupportedError" and "when a reentrant checkpoint added to it" in said[1]
        close(again, tied_alone(len(how)))


def chosen(world):
    """What a forward says of a dense parameter that was frozen; gradients with one that the user left out of DDP."""
    mesh, _ = meshes(world, 2)
    with opened(mesh) as workspace:
        model = Model(workspace)
        model.head.bias.requires_grad_(False)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["head.weight"])
        ddp = uniep_torch.data_parallel(model, mesh)
        loss_of(ddp, *of_rank(world)).backward()
        parts = [torch.empty_like(model.head.weight) for _ in range(world.size)]
        dist.all_gather(parts, model.head.weight.grad)
        model.head.bias.requires_grad_(True)
        said = case.named_error(lambda: ddp(X))
        model.zero_grad()
        ddp = uniep_torch.data_parallel(ddp.module, mesh)
        loss_of(ddp, *of_rank(world)).backward()
        return said, torch.equal(parts[0], parts[1]), model.head.bias.grad


@pytest.mark.smoke
def test_what_ddp_leaves_out(pool):
    """DDP never reduces what was frozen when it was made: told, with the remedy.  What the user left out stays so."""
    want = plain.alone(8, False)[0][0]["head.bias"]
    for said, reduced, bias in pool.run(chosen):
        assert said[0] == "ConfigError" and "head.bias requires gradients, but did not when" in said[1]
        assert not reduced
        torch.testing.assert_close(bias, want, rtol=2e-5, atol=1e-6)


class Negated(nn.Module):
    def forward(self, x):
        return -x


def parametrized_late(world):
    """Gradients of a model, and of its copy, of which a frozen dense parameter got a parametrization."""
    mesh, _ = meshes(world, 2)
    with opened(mesh) as workspace:
        model = Model(workspace)
        model.head.weight.requires_grad_(False)
        ddp = uniep_torch.data_parallel(model, mesh)
        model.head.weight.detach().neg_()
        parametrize.register_parametrization(model.head, "weight", Negated())
        both = ddp, copy.deepcopy(ddp)
        for one in both:
            loss_of(one, *of_rank(world)).backward()
        return [grads_of(one.module, mesh) for one in both]


def test_frozen_parameter_parametrized_late(pool):
    want = plain.alone(8, False)[0][0]
    want = {n: g for n, g in want.items() if n != "head.weight"} | {"head.parametrizations.weight.original": None}
    for both in pool.run(parametrized_late):
        for got in both:
            close(got, want)


def adapted_late(world):
    """What a forward says of factors that were added after data_parallel; how much their copies differ when wrapped."""
    mesh, _ = meshes(world, 2)
    with opened(mesh) as workspace:
        model = Model(workspace)
        ddp = uniep_torch.data_parallel(model, mesh)
        uniep.nn.add_lora(model, r=8, seed=1)
        said = case.named_error(lambda: ddp(X))
        ddp = uniep_torch.data_parallel(ddp.module, mesh)
        loss_of(ddp, *of_rank(world)).backward()
        grad = model.blocks[0].moe.experts.lora_b13.grad
        parts = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(parts, grad, group=mesh["dp"].get_group())
        return said, torch.equal(*parts) and bool(grad.any())


@pytest.mark.smoke
def test_factors_added_late(pool):
    for said, reduced in pool.run(adapted_late):
        assert said[0] == "ConfigError" and "other parameters since data_parallel, such as those of add_lora" in said[1]
        assert reduced
