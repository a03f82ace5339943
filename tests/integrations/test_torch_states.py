"""Checkpoints: every tensor comes back to its owner at any other EP size, or saving or loading raises."""

import logging

import case
import pytest
import test_torch as plain
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from case import config, equal_bits
from test_torch_owners import adapted, step
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer

import uniep
from uniep.integrations import torch as uniep_torch
from uniep.integrations.torch.owners import owners


def made(model, kind):
    """The optimizer, or several, of a kind."""
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    dense = [p for name, p in model.named_parameters() if "experts" not in name]
    match kind:
        case "fused":
            return torch.optim.AdamW([{"params": dense}, {"params": experts, "lr": 1e-3}], fused=True)
        case "factored":
            return torch.optim.Adafactor(model.parameters())
        case "momentum":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        case "two":
            return [torch.optim.NAdam(dense), torch.optim.Adagrad(experts)]
    return kind(model.parameters())


def tied(workspace):
    """Two blocks that share their experts, and a frozen router."""
    model = adapted(workspace)
    model.blocks[1].moe.experts = model.blocks[0].moe.experts
    model.blocks[1].moe.router.requires_grad_(False)
    return model


def unused(workspace):
    """The second block gets no gradient."""
    model = plain.Model(workspace)
    model.blocks[1].inner = lambda x: x
    return model


MODELS = {"adapted": adapted, "tied": tied, "unused": unused}


def everything(model, optimizer, mesh):
    """Every tensor of model and optimizer, whole, by name."""
    values = {}
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    own = owners(model)
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        name = name.replace("module.", "")
        states = {k: v for o in optimizers for k, v in o.state.get(t, {}).items()}
        for key, value in {"": t, **states}.items():
            dim = own[name][1].dim if name in own else None
            if isinstance(value, torch.distributed.tensor.DTensor):
                value = value.full_tensor()
            elif dim is not None and value.dim():
                parts = [torch.empty_like(value) for _ in range(mesh.size())]
                dist.all_gather(parts, value.detach().contiguous(), group=mesh.get_group())
                value = torch.cat(parts, dim)
            values[f"{name} {key}"] = value.detach().clone()
    groups = [{k: v for k, v in g.items() if k != "params"} for o in optimizers for g in o.param_groups]
    return values, groups


def saved_and_loaded(world, folder, kind, build, hows, asynchronous=False):
    """Train a step and save with the first of hows; load with the others into what was trained otherwise."""
    found = []
    cfg = config(bias=kind != "factored")  # which would mix the biases of experts in one factor, and is refused
    for how, ep in hows:
        mesh, world_mesh = plain.meshes(world, ep)
        with uniep.Workspace(cfg, mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
            model = plain.wrapped(how, MODELS[build](workspace), mesh, world_mesh)
            optimizer = made(model, kind)
            state = {"train": uniep_torch.TrainState(model, optimizer, mesh["ep"])}
            step(model, world.size)
            if not found:
                for one in optimizer if isinstance(optimizer, list) else [optimizer]:
                    one.step()
                if asynchronous:
                    dcp.async_save(state, checkpoint_id=folder).result()
                else:
                    dcp.save(state, checkpoint_id=folder)
            else:
                with torch.no_grad():
                    for t in (*model.parameters(), *model.buffers()):
                        t.fill_(case.POISON)
                dcp.load(state, checkpoint_id=folder)
            found.append(everything(model, optimizer, mesh["ep"]))
    return found


@pytest.mark.parametrize(
    ("kind", "build", "hows", "asynchronous"),
    [
        ("fused", "adapted", [("ddp", 2), ("plain", 1), ("ddp", 4), ("ddp", 2)], False),
        ("two", "adapted", [("ddp", 4), ("ddp", 1), ("ddp", 2)], True),
        (torch.optim.AdamW, "adapted", [("fsdp2", 2), ("ddp", 4), ("ddp", 1), ("fsdp2", 2)], False),
        ("factored", "tied", [("ddp", 2), ("plain", 1), ("ddp", 4)], False),
        ("momentum", "unused", [("plain", 2), ("plain", 1), ("plain", 4)], False),
    ],
    ids=["fused, groups", "two optimizers, async", "fsdp2", "factored, tied, frozen", "unused layer"],
)
def test_106_every_state_comes_back(pool, tmp_path, kind, build, hows, asynchronous):
    """Bit for bit and by name, into a new optimizer with gradients present; what had no state has none."""
    for (values, groups), *loaded in pool.run(saved_and_loaded, str(tmp_path), kind, build, hows, asynchronous):
        assert len(values) > 18
        for (how, ep), (other, other_groups) in zip(hows[1:], loaded, strict=True):
            assert other.keys() == values.keys(), other.keys() ^ values.keys()
            for name, t in values.items():
                equal_bits(other[name], t, f"{how} at EP {ep}: {name}")
            assert str(other_groups) == str(groups)


class Strange(torch.optim.SGD):
    """Keeps, for each parameter, `state` of its gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["strange"] = self.keeps(p.grad)


class Vector(Strange):
    keeps = staticmethod(lambda g: torch.zeros(4))  # as long as there are experts here


class Flat(Strange):
    keeps = staticmethod(lambda g: g.flatten())


class Norm(Strange):
    keeps = staticmethod(lambda g: g.norm())


class Square(Strange):
    keeps = staticmethod(lambda g: g.flatten(1) @ g.flatten(1).T if g.dim() > 1 else g)


class Blocks(Strange):
    keeps = staticmethod(lambda g: {"codes": g.to(torch.uint8), "absmax": g.abs().max()})


class History(Strange):
    keeps = staticmethod(lambda g: [g, g])


def named(function, *args, **kwargs):
    """(class name, message), also of dcp's errors."""
    try:
        function(*args, **kwargs)
    except BaseException as error:
        return type(error).__name__, str(error)


def refused(world, folder):
    mesh, _ = plain.meshes(world, 2)
    attempts = {}
    with uniep.Workspace(config(), mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as workspace:

        def state(build=plain.Model, optimizer=None, **options):
            model = build(workspace)
            step(model, world.size)
            optimizer = optimizer and optimizer(model.parameters())
            if optimizer and not isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step()
            return uniep_torch.TrainState(model, optimizer, mesh["ep"], **options)

        for kind in (Vector, Flat, Norm, Square, Blocks, History):
            attempts[f"save: {kind.__name__}"] = named(state(optimizer=kind).state_dict)
        attempts["save: LBFGS"] = named(state(optimizer=torch.optim.LBFGS).state_dict)
        attempts["save: ZeRO"] = named(
            state, optimizer=lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=1e-3)
        )
        attempts["save: shared, but different"] = named(state(optimizer=Norm, expert_dims={"strange": None}).state_dict)
        other = state(optimizer=torch.optim.AdamW)
        if workspace.rank == 1:
            other.optimizers[0].state.clear()
            other.model.blocks[0].moe.experts.w2.requires_grad_(False)
        attempts["save: frozen on one rank"] = named(other.state_dict)

        saved = state(optimizer=torch.optim.AdamW)
        dcp.save({"train": saved}, checkpoint_id=folder)

        writer = dcp.HuggingFaceStorageWriter(f"{folder}/safetensors", save_distributed=True)
        attempts["save: safetensors"] = named(dcp.save, {"train": saved}, storage_writer=writer)
        attempts["save: safetensors, a state"] = named(dcp.save, saved.state_dict(), storage_writer=writer)

        def load(change=lambda model: None, build=plain.Model, optimizer=torch.optim.AdamW):
            model = build(workspace)
            change(model)
            one = uniep_torch.TrainState(model, optimizer(model.parameters()), mesh["ep"])
            dcp.load({"train": one}, checkpoint_id=folder)

        attempts["load: frozen"] = named(load, lambda m: m.blocks[0].moe.experts.w2.requires_grad_(False))
        attempts["load: fewer layers"] = named(load, build=lambda workspace: plain.Model(workspace, blocks=1))
        attempts["load: other optimizer"] = named(load, optimizer=torch.optim.SGD)
        attempts["load: fewer parameters"] = named(load, optimizer=lambda p: torch.optim.AdamW(list(p)[1:]))
        attempts["load: dtype"] = named(load, lambda m: m.double())
        attempts["load: fine"] = named(load)
        with uniep.Workspace(config(top_k=3), mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as three:
            attempts["load: top_k"] = named(load, build=lambda workspace: plain.Model(three))
    return attempts


@pytest.mark.smoke
def test_states_without_an_owner(pool, tmp_path):
    """Raised on every rank, with the state's name: nothing is guessed from a shape, nothing is dropped."""
    texts = {
        "Vector": r"optimizer state 'strange' of blocks.*shape \(4,\), has no known owner.*expert_dims",
        "Flat": r"'strange' of blocks.* shape \(\d+,\), has no known owner",
        "Norm": r"'strange' of blocks.* has no known owner",
        "Square": r"'strange' of blocks.* has no known owner",
        "Blocks": "a dict .*has no known owner",
        "History": "a list .*has no known owner",
        "LBFGS": "LBFGS has no state of .* take a step",
        "ZeRO": "takes the experts of all ranks for copies",
        "shared, but different": "'strange' of blocks.* differs between rank",
        "safetensors": "safetensors hold tensors alone",
        "safetensors, a state": "safetensors hold tensors alone",
        "frozen on one rank": "experts.w2 should be the same on all expert-parallel ranks",
        "frozen": "has an optimizer state of blocks.0.moe.experts.w2, which this optimizer lacks or holds as frozen",
        "fewer layers": "the checkpoint has blocks.1.* which this model lacks",
        "other optimizer": "which this optimizer lacks|was saved as",
        "fewer parameters": "has an optimizer state of blocks.0.mix.weight, which this optimizer lacks",
        "dtype": "is torch.float32 in the checkpoint and torch.float64 here",
        "top_k": "was saved with {'top_k': 2.* and has {'top_k': 3",
    }
    for attempts in pool.run(refused, str(tmp_path)):
        assert attempts.pop("load: fine") is None
        for name, error in attempts.items():
            assert error is not None, name
            assert plain.re.search(texts[name.partition(": ")[2]], error[1], plain.re.S), (name, error)


def in_safetensors(world, folder):
    """Whether the model alone, saved at EP 2, comes back from safetensors at EP 4."""
    found = []
    for ep in (2, 4):
        mesh, _ = plain.meshes(world, ep)
        with uniep.Workspace(config(), mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
            model = adapted(workspace)
            state = uniep_torch.TrainState(model, None, mesh["ep"]).state_dict()["model"]
            if ep == 2:
                dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(folder, save_distributed=True))
            else:
                with torch.no_grad():
                    for t in (*model.parameters(), *model.buffers()):
                        t.fill_(case.POISON)
                dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder))
            found.append(everything(model, [], mesh["ep"])[0])
    return [name for name, t in found[0].items() if not torch.equal(found[1][name], t)], len(found[0])


@pytest.mark.smoke
def test_a_model_in_safetensors(pool, tmp_path):
    """Tensors are loaded in place: a plain model's DTensors share its memory."""
    assert pool.run(in_safetensors, str(tmp_path)) == [([], 20)] * 4


def by_name(world, folder):
    """What loading says, and this optimizer's names: of one group in reverse, into which two groups are loaded."""
    mesh, _ = plain.meshes(world, 2)
    with uniep.Workspace(config(), mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
        model = uniep_torch.data_parallel(plain.Model(workspace, blocks=1), mesh)
        names = list(model.named_parameters())
        optimizer = torch.optim.AdamW([{"params": names[:3]}, {"params": names[3:]}])
        step(model, world.size)
        optimizer.step()
        dcp.save({"train": uniep_torch.TrainState(model, optimizer, mesh["ep"])}, checkpoint_id=folder)
        other = plain.Model(workspace, blocks=1)
        names = list(other.named_parameters())[::-1]
        optimizer = torch.optim.AdamW(names)
        state = uniep_torch.TrainState(other, optimizer, mesh["ep"])
        said = named(dcp.load, {"train": state}, checkpoint_id=folder)
        return said, optimizer.param_groups[0]["param_names"] == [name for name, _ in names]


@pytest.mark.smoke
def test_optimizers_with_names(pool, tmp_path):
    """torch's `param_names` belong to the optimizer that loads."""
    assert pool.run(by_name, str(tmp_path)) == [(None, True)] * 4


def declared(world, folder):
    """A state of shape (e,) and a buffer, told whose they are, at EP 2 and then at EP 4: the first of each expert."""
    found = []
    for ep in (2, 4):
        mesh, _ = plain.meshes(world, ep)
        with uniep.Workspace(config(), mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
            model = plain.Model(workspace, blocks=1)
            experts = model.blocks[0].moe.experts
            optimizer = PerExpert(experts.parameters(), lr=1.0)
            state = uniep_torch.TrainState(model, optimizer, mesh["ep"], expert_dims={"strange": 0})
            if ep == 2:
                experts.w2.grad = experts.w2.detach().clone()
                experts.w13.grad = experts.w13.detach().clone()
                optimizer.step()
                dcp.save({"train": state}, checkpoint_id=folder)
            else:
                dcp.load({"train": state}, checkpoint_id=folder)
            found.append(torch.equal(optimizer.state[experts.w2]["strange"], experts.w2.detach().sum((1, 2))))
    return found


class PerExpert(Strange):
    keeps = staticmethod(lambda g: g.sum((1, 2)))


def test_declared_states(pool, tmp_path):
    assert pool.run(declared, str(tmp_path)) == [[True, True]] * 4


def by_group(world, folder):
    """Whether a state saved with a process group comes back with a mesh, and can be taken from a closed Workspace; what
    is said of a layer without a group, and of half an optimizer."""
    group, told = world.group(2), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    with uniep.Workspace(config(), group, device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
        model, fresh = plain.Model(workspace), plain.Model(workspace)
        step(model, world.size)
        dense, experts = uniep_torch.split_parameters(model)
        one, other = torch.optim.AdamW(dense), torch.optim.AdamW(experts)
        one.step(), other.step()
        logging.getLogger("uniep").addHandler(handler)
        try:
            uniep.nn.Experts(config(), device="cpu").workspace.close()
            uniep_torch.TrainState(model, one, group)
            dcp.save(
                {"train": uniep_torch.TrainState(model, [one, other], group)}, checkpoint_id=folder, process_group=group
            )
        finally:
            logging.getLogger("uniep").removeHandler(handler)
        mesh = DeviceMesh.from_group(group, "cpu")
        groups = [torch.optim.AdamW(part) for part in uniep_torch.split_parameters(fresh)]
        both = uniep_torch.TrainState(fresh, groups, mesh)
        dcp.load({"train": both}, checkpoint_id=folder, process_group=group)
        same = [torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True)]
    closed = uniep_torch.TrainState(model, [one, other], group).state_dict()
    return all(same) and len(closed["model"]) >= 12, told


@pytest.mark.smoke
def test_a_process_group_instead_of_a_mesh(pool, tmp_path):
    for same, told in pool.run(by_group, str(tmp_path), ranks=2):
        assert same and len(told) == 2
        assert "a layer without group= or workspace= has all" in told[0]
        assert "optimizers hold 8 of the model's 12 parameters" in told[1] and "blocks.0.moe.experts.w13" in told[1]


def whole_loaded(world):
    """Whether a file of all experts, converted from w1, w3, w2, reaches each rank; and an error for a wrong shape."""
    with uniep.Workspace(config(), device="cpu") as workspace:
        torch.manual_seed(0)
        source = {name: torch.randn_like(t) for name, t in plain.Model(workspace).state_dict().items() if t.numel() > 2}
    found = []
    for how, ep in (("plain", 4), ("ddp", 2), ("fsdp2", 2)):
        mesh, world_mesh = plain.meshes(world, ep)
        with uniep.Workspace(config(), mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
            model = plain.wrapped(how, plain.Model(workspace), mesh, world_mesh)
            uniep_torch.load_full_state_dict(model, source)
            got = plain.all_whole(model, lambda p: p, mesh, 8)
            found.append(all(torch.equal(got[name], t) for name, t in source.items()))
            wrong = source | {"head.bias": torch.zeros(3)}
            found.append(case.named_error(uniep_torch.load_full_state_dict, model, wrong)[1])
    return found


@pytest.mark.smoke
def test_a_converted_checkpoint(pool):
    for plain_, error, *others in pool.run(whole_loaded):
        assert plain_ and "head.bias is (3,) in the state; whole it has shape (16,)" in error
        assert others[0] and others[2]
