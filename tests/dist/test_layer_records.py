"""Ranks notice when their layers are not one layer: others, experts taken for copies, other draws, other states."""

import contextlib
import copy
import functools
import io
import logging

import case
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from case import config, equal_bits
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import uniep
from uniep.backends.protocol import tell_alike
from uniep.integrations.torch import data_parallel, distribute_experts, fully_shard_experts

CFG = config(hidden=16, ffn=8, num_experts=4, max_tokens_per_rank=32)
BACKENDS = ["cpu", "nccl"]
IDS = torch.tensor([[0, 2]] * 4)


def made(group, backend="cpu"):
    return uniep.Workspace(CFG, group, device="cpu", backend=backend, timeout_s=case.TIMEOUT_S)


def bare(ws, seed):
    """`uniep.moe` with parameters and no layer."""
    experts = uniep.nn.Experts(CFG, workspace=ws, seed=seed)
    return lambda x, ids, weights: uniep.moe(x, ids, weights, experts.w13, experts.w2, workspace=ws)


def swapped(world, backend, kind, how):
    """What a rank hears of two layers, of which rank 1 takes the other one, and then of both in order."""
    with made(world.group(2), backend) as ws:
        make = {"module": lambda seed: uniep.nn.Experts(CFG, workspace=ws, seed=seed), "bare": lambda s: bare(ws, s)}
        layers = [make[kind](seed) for seed in (1, 2)]
        x = torch.ones(4, 16, requires_grad=True)
        weights = torch.ones(4, 2)
        order = layers if ws.rank == 0 else layers[::-1]

        def steps():
            if how == "recomputed":
                losses = [checkpoint(f, x, IDS, weights, use_reentrant=False).sum() for f in layers]
            else:
                losses = [f(x, IDS, weights).sum() for f in layers]
            if how == "forward":
                order[0](x, IDS, weights)
            (losses if ws.rank == 0 else losses[::-1])[0].backward()

        heard = case.named_error(steps)
        for f in layers:
            f(x, IDS, weights).sum().backward()
        return heard


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["module", "bare"])
@pytest.mark.parametrize("how", ["forward", "backward", "recomputed"])
def test_107_another_layer_on_one_rank(pool, backend, kind, how):
    """107: equal shapes, routing and inputs: only the layer tells; every rank is told, and goes on."""
    for kind_of_error, text in pool.run(swapped, backend, kind, how, ranks=2):
        assert kind_of_error == "UniEPError" and "rank 0: layer 1, rank 1: layer 2" in text


def one_sided(world, backend):
    """Legal programs in which ranks make, copy or know different things."""
    with made(world.group(2), backend) as ws:
        x, weights = torch.ones(4, 16), torch.ones(4, 2)
        a = uniep.nn.Experts(CFG, workspace=ws, seed=1)
        if ws.rank == 0:  # an average and a layer that are never called
            copy.deepcopy(a), uniep.nn.Experts(CFG, workspace=ws, seed=5)
        new = uniep.nn.Experts(CFG, workspace=ws, seed=2)
        bad = torch.full_like(IDS, 9) if ws.rank == 0 else IDS
        refused = case.named_error(lambda: new(x, bad, weights))
        wide = case.named_error(lambda: new(x[:, : 8 if ws.rank == 0 else 16], IDS, weights))
        for layer in (a, new, copy.deepcopy(a)):
            layer(x, IDS, weights)
        w13, w2 = (nn.Parameter(t.detach().clone()) for t in (a.w13, a.w2))
        for n in range(3):
            plain = n == 0 and ws.rank == 1
            uniep.moe(x, IDS, weights, w13.detach() if plain else w13, w2, workspace=ws)
            uniep.moe(x, IDS, weights, nn.Parameter(new.w13.detach()), w2, workspace=ws)
        return refused[0], wide[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_false_alarm_of_layers(pool, backend):
    """Copies and layers of one rank, calls that were refused, parameters that one rank passes as plain tensors."""
    assert pool.run(one_sided, backend, ranks=2) == [("InputError", "ConfigError")] * 2


def give_to_all(experts):
    for t in experts.parameters():
        dist.broadcast(t.data, dist.get_process_group_ranks(experts.workspace.group)[0], group=experts.workspace.group)


def damaged(world, backend, how, calls):
    """What a rank hears in 4 calls, after `calls` good ones, when its experts have changed by `how`."""
    with made(world.group(2), backend) as ws:
        torch.manual_seed(0)
        experts = uniep.nn.Experts(CFG, workspace=ws)
        call = lambda: experts(torch.ones(4, 16), IDS, torch.ones(4, 2))  # noqa: E731
        for _ in range(calls):
            call()
        with torch.no_grad():
            if how == "copied":
                give_to_all(experts)
            elif how == "nan":
                for p in experts.parameters():
                    p.fill_(float("nan"))
            elif how == "loaded":
                whole = {name: t.new_full((4, *t.shape[1:]), 0.5) for name, t in experts.named_parameters()}
                experts.load_state_dict(whole)
            elif how == "made alike":
                for p in experts.parameters():
                    p.fill_(0.25)
        return [case.named_error(call) for _ in range(4)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_92_93_copies_are_noticed(pool, backend, calls):
    """Experts that differed and have become equal, in the next of the calls 1, 2, 4, 8 ..., and from then on."""
    for heard in pool.run(damaged, backend, "copied", calls, ranks=2):
        assert all(error is not None and "treated them as copies" in error[1] for error in heard)


@pytest.mark.parametrize(("how", "calls"), [("nan", 1), ("loaded", 1), ("made alike", 0)])
def test_experts_may_be_equal(pool, how, calls):
    """Upcycled, made equal before the first call, or lost to NaN: no copies."""
    assert pool.run(damaged, "cpu", how, calls, ranks=2) == [[None] * 4] * 2


def initialised(world, how):
    """What is logged in two calls of two layers, initialised by `how`."""
    told, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    tell_alike.cache_clear()
    logging.getLogger("uniep").addHandler(handler)
    try:
        with made(world.group(2)) as ws:
            torch.manual_seed(0)
            with torch.device("meta") if how == "meta" else contextlib.nullcontext():
                layers = [uniep.nn.Experts(CFG, workspace=ws) for _ in "ab"]
            for layer in layers:
                layer.to_empty(device="cpu") if how == "meta" else None
                for p in layer.parameters() if how != "own" else ():
                    nn.init.normal_(p)
            for layer in layers * 2:
                layer(torch.ones(4, 16), IDS, torch.ones(4, 2))
    finally:
        logging.getLogger("uniep").removeHandler(handler)
    return told


@pytest.mark.parametrize("how", ["own", "alike", "meta"])
def test_95_initialised_alike_by_the_user(pool, how):
    """95: the same random numbers on all ranks, as in a loop over parameters: fewer experts, and they are told."""
    for told in pool.run(initialised, how, ranks=2):
        assert len(told) == (how != "own")
        assert all(
            "ranks of an EP group hold the same experts" in text and "reset_parameters()" in text for text in told
        )


class Model(nn.Module):
    def __init__(self, ws, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.dense = nn.Linear(16, 16)
        self.moe = uniep.nn.MoE(CFG, workspace=ws)

    def forward(self, x):
        return self.moe(self.dense(x))


def ignoring(model):
    names = [name for name, _ in model.named_parameters() if "experts" in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


def nested(model, mesh, everyone):
    fully_shard_experts(model, mesh)
    fully_shard(model.moe, mesh=everyone)
    return fully_shard(model, mesh=everyone)


def sharded_over_dp(model, mesh, everyone):
    """By hand: experts over their copies."""
    fully_shard(model.moe.experts, mesh=mesh["dp"])
    return fully_shard(model, mesh=everyone)


WRAPPERS = {
    "DDP": lambda model, mesh, everyone: DistributedDataParallel(model),
    "FSDP1": lambda model, mesh, everyone: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "FSDP1, parameters": lambda model, mesh, everyone: FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True
    ),
    "FSDP2": lambda model, mesh, everyone: fully_shard(model, mesh=everyone),
    "FSDP2 of blocks": lambda model, mesh, everyone: fully_shard(fully_shard(model.moe, mesh=everyone) and model),
    "FSDP2 of experts": lambda model, mesh, everyone: fully_shard(model.moe.experts, mesh=everyone) and model,
    "HSDP": lambda model, mesh, everyone: fully_shard(model, mesh=mesh),
    "DDP, compiled": lambda model, mesh, everyone: DistributedDataParallel(torch.compile(model, backend="eager")),
    "DDP, experts ignored": lambda model, mesh, everyone: ignoring(model),
    "data_parallel": lambda model, mesh, everyone: data_parallel(model, mesh),
    "fully_shard_experts": nested,
    "FSDP2 of experts over dp": sharded_over_dp,
    "distribute_experts": lambda model, mesh, everyone: distribute_experts(model, mesh["ep"]) or model,
}
GOOD = list(WRAPPERS)[8:]


def wrapped(world, backend):
    """Of each wrapper, what a rank hears in two steps."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    everyone = init_device_mesh("cpu", (4,))
    heard = {}
    for name, wrap in WRAPPERS.items():
        torch._dynamo.reset()
        with made(mesh["ep"], backend) as ws:
            model = wrap(Model(ws), mesh, everyone)
            heard[name] = case.named_error(
                lambda model=model: [model(torch.ones(4, 16)).sum().backward() for _ in "ab"]
            )
    return heard


@pytest.mark.parametrize("backend", ["cpu", pytest.param("nccl", marks=pytest.mark.slow)])
def test_92_wrappers(pool, backend):
    """92: DDP, FSDP1, FSDP2 and HSDP over ranks with other experts are refused by the first call, on every rank."""
    for heard in pool.run(wrapped, backend):
        assert [name for name, error in heard.items() if error is None] == GOOD
        for name, error in heard.items():
            if name not in GOOD:
                assert error[0] == "ConfigError" and "fully_shard_experts(model, mesh) before" in error[1], (
                    name,
                    error,
                )


def zero(world):
    """What a rank hears in five steps with ZeRO-1 over the ranks of its experts."""
    with made(world.group(2)) as ws:
        model, heard = Model(ws), []
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, process_group=world.group(2))
        with contextlib.suppress(uniep.UniEPError):
            for _ in range(5):
                model(torch.ones(4, 16)).sum().backward()
                optimizer.step()
                heard.append(1)
        return len(heard)


def test_93_zero_redundancy_optimizer(pool):
    """93: one step, which makes the experts those of one rank; the next call refuses them."""
    assert pool.run(zero, ranks=2) == [1, 1]


def drawn(world, ep_size, seed_of):
    """Parameters of two layers, and what the first call of the first says.  seed_of: torch's seed, by rank."""
    torch.manual_seed(seed_of(world.rank) if callable(seed_of) else seed_of + world.rank)
    with uniep.Workspace(CFG, world.group(ep_size), device="cpu", timeout_s=case.TIMEOUT_S) as ws:
        layers = [uniep.nn.MoE(CFG, workspace=ws) for _ in range(2)]
        after = torch.rand(2)
        heard = case.named_error(lambda: layers[0](torch.ones(3, 16)))
        if heard is not None:  # loaded, it matters no more where they came from
            for layer in layers:
                layer.load_state_dict(layer.state_dict())
            layers[0](torch.ones(3, 16))
        return heard, [p.detach() for layer in layers for p in layer.parameters()], after


def zero_seed(rank):
    return 7


def test_drawn_alike_at_each_ep_size(pool):
    """One draw from torch's generator for a layer, whatever the EP size."""
    (_, want, after), *_ = pool.run(drawn, 1, zero_seed, ranks=1)
    assert not torch.equal(want[0], want[3]) and not torch.equal(want[1], want[4])
    ranks = pool.run(drawn, 2, zero_seed, ranks=2)
    for n, whole in enumerate(want):
        parts = [got[n] for _, got, _ in ranks]
        equal_bits(parts[0] if n % 3 == 0 else torch.cat(parts), whole, f"parameter {n}")
    for heard, _, rest in ranks:
        assert heard is None and torch.equal(rest, after)


def test_other_draws_are_refused(pool):
    """Ranks that were seeded differently hear so in the first call; loaded layers do not."""
    for (kind, text), *_ in pool.run(drawn, 2, 3, ranks=2):
        assert kind == "UniEPError" and "torch.manual_seed with the same seed on all ranks" in text


HOWS = {
    "plain": lambda model, mesh, everyone: model,
    "ddp": WRAPPERS["data_parallel"],
    "distribute_experts": WRAPPERS["distribute_experts"],
    "fsdp2": nested,
}


def full_states(world):
    """Differences of what is saved and loaded by full_state_dict and broadcast_from_rank0 to one process's model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    everyone = init_device_mesh("cpu", (4,))
    with uniep.Workspace(CFG, device="cpu") as ws:
        whole = Model(ws).state_dict()
    bad = []
    for how, wrap in HOWS.items():
        with made(mesh["ep"]) as ws:
            full = get_model_state_dict(
                wrap(Model(ws), mesh, everyone), options=StateDictOptions(full_state_dict=True, cpu_offload=True)
            )
            if world.rank == 0:
                bad += [(how, "saved", name) for name, t in whole.items() if not torch.equal(full[name], t)]
            model = wrap(Model(ws, seed=9), mesh, everyone)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model, full if world.rank == 0 else {}, options=options)
            for name, p in model.named_parameters():
                name = name.replace("module.", "")
                got, want = p.full_tensor() if hasattr(p, "full_tensor") else p, whole[name]
                if len(got) != len(want):
                    want = want.chunk(2)[ws.rank]
                bad += [] if torch.equal(got, want) else [(how, "loaded", name)]
    return bad


def test_105_full_states(pool):
    """105: a full state has the experts of all ranks, and each rank takes its own from it."""
    assert pool.run(full_states) == [[]] * 4


def full_optimizer_states(world):
    """What is said of the optimizer's full state; differences of what comes back to what was saved."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    everyone = init_device_mesh("cpu", (4,))
    found = {}
    for how, wrap in HOWS.items():
        with made(mesh["ep"]) as ws:
            pairs = []
            for seed in (1, 2):
                model = wrap(Model(ws, seed), mesh, everyone)
                optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
                (model(torch.randn(4, 16)) ** 2).sum().backward()
                optimizer.step()
                pairs.append((model, optimizer))
            (model, optimizer), other = pairs
            full = StateDictOptions(full_state_dict=True)
            own = get_optimizer_state_dict(model, optimizer)  # of this rank, for files of each rank
            said = [
                case.named_error(functools.partial(get_state_dict, model, optimizer, options=full)),
                case.named_error(functools.partial(get_optimizer_state_dict, model, optimizer, options=full)),
                case.named_error(functools.partial(set_optimizer_state_dict, *other, own, options=full)),
            ]
            bad = []
            if said == [None] * 3:
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                whole = get_optimizer_state_dict(model, optimizer, options=full)
                set_optimizer_state_dict(*other, whole if world.rank == 0 else {}, options=options)
                pair = zip(model.parameters(), other[0].parameters(), strict=True)
                for a, b in pair:
                    one, two = optimizer.state[a]["exp_avg"], other[1].state[b]["exp_avg"]
                    bad += [] if torch.equal(*(getattr(t, "_local_tensor", t) for t in (one, two))) else [a.shape]
            found[how] = said, bad
    return found


def test_105_full_states_of_optimizers(pool):
    """Of plain experts they would be rank 0's for all: refused on all ranks.  Of DTensors they come back."""
    for found in pool.run(full_optimizer_states):
        for how in ("distribute_experts", "fsdp2"):
            assert found[how] == ([None] * 3, []), how
        for how in ("plain", "ddp"):
            said, _ = found[how]
            assert all(kind == "UnsupportedError" and "TrainState(model" in text for kind, text in said), (how, said)


def other_states(world):
    """What loading says of this rank's state, of rank 0's, of that without a record, of one process's, cut by hand."""
    with uniep.Workspace(CFG, device="cpu") as ws:
        whole = Model(ws).state_dict()
    with made(world.group(2)) as ws:
        model = Model(ws, seed=3)
        states = [None, None]
        dist.all_gather_object(states, model.state_dict(), group=world.group(2))
        old = {name: t for name, t in model.state_dict().items() if "extra" not in name}
        cut = {name: t.chunk(2)[ws.rank] if "experts" in name else t for name, t in whole.items()}
        half = {name: t.bfloat16() for name, t in states[ws.rank].items()}
        loads = [states[ws.rank], states[0], old, whole, cut, half]
        said = [(error := case.named_error(lambda s=s: model.load_state_dict(s))) and error[1] for s in loads]
    with uniep.Workspace(CFG, device="cpu") as ws:
        said.append(case.named_error(lambda: Model(ws).load_state_dict(states[0]))[1])
    with made(world.group(2)) as ws:
        model = Model(ws)
        distribute_experts(model, world.group(2))
        said.append(case.named_error(lambda: model.load_state_dict(states[ws.rank]))[1])
    return said


def test_105_states_of_another_rank(pool):
    first, second = pool.run(other_states, ranks=2)
    assert first[:6] == [None] * 6
    assert second[:1] + second[2:6] == [None] * 5
    assert "rank 1 holds experts 2..3, but" in second[1] and "those of rank 0, experts 0..1" in second[1]
    for alone, distributed in (first[6:], second[6:]):
        assert "w13 was saved at EP size 2, by rank 0" in alone and "runs at EP size 1; take" in alone
        assert "TrainState" in alone and "load_full_state_dict" in alone
        assert (
            "saved at EP size 2" in distributed and "runs at EP size 2 and has DTensors of all experts" in distributed
        )


def written_together(world, folder):
    """What torch.distributed.checkpoint says of a state of this rank's experts; whether one for each rank comes back;
    what kinds of copies of the state keep."""
    said, group = [], {"process_group": world.group(2)}
    with made(world.group(2)) as ws:
        model = Model(ws, seed=3)

        def attempt(function, *args, **options):
            try:
                return function(*args, **options)
            except BaseException as error:  # dcp's CheckpointException is not an Exception
                said.append(str(error))

        attempt(dcp.save, {"m": model.state_dict()}, checkpoint_id=f"{folder}/plain", **group)
        attempt(dcp.save, {"m": model}, checkpoint_id=f"{folder}/stateful", **group)
        attempt(dcp.save, {"m": get_model_state_dict(model)}, checkpoint_id=f"{folder}/taken", **group)
        attempt(lambda: dcp.async_save({"m": model.state_dict()}, checkpoint_id=f"{folder}/later", **group).result())
        old = {n: torch.Tensor(t) if "extra" in n else t for n, t in model.state_dict().items()}
        dcp.save({"m": old}, checkpoint_id=f"{folder}/old", **group)  # as a version without the refusal wrote it
        attempt(dcp.load, {"m": model.state_dict()}, checkpoint_id=f"{folder}/old", **group)
        own = f"{folder}/rank{ws.rank}"
        dcp.save({"m": model.state_dict()}, checkpoint_id=own, no_dist=True)
        fresh = Model(ws, seed=4)
        found = {"m": fresh.state_dict()}
        dcp.load(found, checkpoint_id=own, no_dist=True)
        fresh.load_state_dict(found["m"])
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
        buffer = io.BytesIO()
        torch.save(copy.deepcopy(model.state_dict()), buffer)
        buffer.seek(0)
        kinds = {type(t) for t in torch.load(buffer, weights_only=True).values()}
    return said, same, kinds == {torch.Tensor}


def test_105_distributed_checkpoints_of_plain_states(pool, tmp_path):
    """Half of the experts would be lost, w13 of one rank beside w2 of another: refused on all ranks, when saved."""
    for said, same, plain in pool.run(written_together, str(tmp_path), ranks=2):
        assert len(said) == 5 and same and plain
        for what, text in zip(("save",) * 4 + ("load",), said, strict=True):
            assert f"cannot {what} a state of plain experts" in text and "TrainState" in text
