"""uniep inside torchtitan: its MoE layer and a whole sharded model against torchtitan's own dispatch and experts.

Numbers: a tensor may be as far from fp64 as twice torchtitan's own result, or one rounding of the bfloat16 that both
compute in.
"""

import copy
import dataclasses
import inspect
import os

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

import torchtitan.tools.utils as tools

if not torch.cuda.is_available():  # before others import it from there
    tools.device_type, tools.device_module = "cpu", torch.cpu

import spmd_types as spmd
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, OverrideConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as distributed
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_routed_experts_config
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.token_dispatcher import DeepEPTokenDispatcher, LocalTokenDispatcher
from torchtitan.models.qwen3 import parallelize_qwen3, qwen3_configs
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

import uniep
from uniep.integrations import torchtitan as adapter
from uniep.nn import RoutingRecord, record_routing, replay_routing
from uniep.reference import composition

try:
    from torchtitan.models.qwen3 import parallelize_qwen3, qwen3_configs
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    NO_MODEL = ""
except ImportError as error:  # before PyTorch 2.13
    NO_MODEL = str(error)

HIDDEN, FFN, EXPERTS, TOP_K = 64, 32, 8, 2
NAME = "uniep.integrations.torchtitan.routed_experts"
FLAT = "x_TD" in inspect.signature(RoutedExperts.forward).parameters
BOTH = ("partial_dtensor", "spmd_types")
if FLAT:
    NO_MODEL = "this torchtitan has no attention for CPUs"


def layer_config() -> MoE.Config:
    experts = make_routed_experts_config(
        dim=HIDDEN, hidden_dim=FFN, num_experts=EXPERTS, top_k=TOP_K, param_init={}, comm_backend="standard"
    )
    gate = Linear.Config(in_features=HIDDEN, out_features=EXPERTS, bias=False)
    router = TokenChoiceTopKRouter.Config(num_experts=EXPERTS, top_k=TOP_K, gate=gate, route_norm=True)
    return MoE.Config(num_experts=EXPERTS, routed_experts=experts, router=router)


def parallel_dims(world, backend: str, ep: int, tp: int = 1) -> ParallelDims:
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.rank))
    made = ParallelDims.from_config(
        ParallelismConfig(
            data_parallel_shard_degree=world.size // tp,
            expert_parallel_degree=ep,
            tensor_parallel_degree=tp,
            spmd_backend=backend,
        ),
        world.size,
    )
    distributed.set_spmd_backend(backend)
    made.build_mesh()
    return made


def layer(ours: bool, dims: ParallelDims | None = None) -> MoE:
    """The same values everywhere; sharded if there are dims, else on one rank."""
    cfg = layer_config()
    if dims is not None:
        layout = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
        set_moe_sharding_config(cfg, enable_ep=dims.ep > 1, enable_sp=True, expert_param_layout=layout)
    elif not ours:
        cfg.routed_experts.token_dispatcher = LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
    if ours:
        apply_overrides(OverrideConfig(imports=[(NAME, {"timeout_s": 60.0})]), cfg)
    made = cfg.build()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        made.expert_bias_E.zero_()
        made.tokens_per_expert_E.zero_()
    made = made.to(tools.device_type)
    if dims is not None:
        made.parallelize(dims)
    return made


def tokens(rank: int, count: int = 10) -> tuple[Tensor, Tensor]:
    """x and dy."""
    draw = torch.Generator().manual_seed(rank)
    shape = (count, HIDDEN) if FLAT else (2, count // 2, HIDDEN)
    return tuple(torch.randn(shape, generator=draw).to(tools.device_type) for _ in range(2))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def run(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """y, dx and this rank's gradients."""
    x = x.clone().requires_grad_()
    y = module(x)
    local(y).backward(dy)
    return {"y": local(y).detach(), "dx": x.grad, **{n: local(p.grad).clone() for n, p in module.named_parameters()}}


def composed(experts: GroupedExperts):
    """RoutedExperts.forward of one rank, in the parameters' dtype."""

    def forward(x, scores, ids, counts):
        w13 = torch.cat([experts.w1_EFD, experts.w3_EFD], 1)
        return composition(*(t.flatten(0, -2) for t in (x, ids, scores)), w13, experts.w2_EDF).view(x.shape)

    return forward


def in_fp64(inputs: list[tuple[Tensor, Tensor]]) -> list[dict[str, Tensor]]:
    """What each of some ranks should get: y, dx of its own tokens, the router's gradient; the experts' of all."""
    module, found = layer(ours=False).double(), []
    module.routed_experts.forward = composed(module.routed_experts.inner_experts)
    for pair in inputs:
        module.zero_grad()
        found.append(run(module, *(t.double() for t in pair)))
    return found


def distance(tensor: Tensor, true: Tensor) -> float:
    return float((tensor.double() - true).norm() / true.norm().clamp_min(1e-30))


def check(ours: dict, theirs: dict, truth: dict) -> None:
    assert ours.keys() == theirs.keys() == truth.keys()
    for name, true in truth.items():
        error, allowed = distance(ours[name], true), distance(theirs[name], true)
        assert ours[name].dtype == theirs[name].dtype
        assert error <= 2 * allowed + torch.finfo(torch.bfloat16).eps, (
            f"{name}: {error:.2e}, torchtitan's {allowed:.2e}"
        )


# Layers.


@pytest.mark.smoke
def test_one_rank():
    """80: no process group; FSDP without expert parallelism is the same call."""
    pair = tokens(0)
    (truth,) = in_fp64([pair])
    ours = layer(ours=True)
    check(run(ours, *pair), run(layer(ours=False), *pair), truth)
    assert "uniep, expert parallel over 1 ranks" in str(adapter.status(ours))
    adapter.free(ours)


def layer_runs(world, backend: str, ep: int) -> dict:
    """Of torchtitan with DTensors: gloo has not what its other backend asks for."""
    got = {}
    for ours, chosen in ((False, "partial_dtensor"), (True, backend)):
        dims = parallel_dims(world, chosen, ep)
        with distributed.get_spmd_context(parallel_dims=dims)():
            got |= layer_run(world, dims, ours)
    return got


def layer_run(world, dims: ParallelDims, ours: bool) -> dict:
    name, ep, got = "uniep" if ours else "torchtitan", dims.ep, {}
    made = layer(ours, dims)
    got[name] = run(made, *tokens(world.rank))
    got[f"{name} counts"] = local(made.tokens_per_expert_E).clone()
    got[f"{name} status"] = str(adapter.status(made))
    if ours:
        none = made(tokens(0, 0 if world.rank % ep else 10)[0])  # some ranks have no tokens
        none.sum().backward()
        got["idle"] = none.shape, all(p.grad is not None for p in made.parameters())
        adapter.free(made)
    return got


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("backend", BOTH)
def test_layer(frameworks, backend, ep):
    """y, dx and gradients at every EP size; y and dx in the bits of one rank; counters are torchtitan's own."""
    inputs = [tokens(rank) for rank in range(frameworks.size)]
    truths = in_fp64(inputs)
    alone = layer(ours=True)
    for rank, got in enumerate(frameworks.run(layer_runs, backend, ep)):
        truth, held = dict(truths[rank]), EXPERTS // ep
        mine = slice(rank % ep * held, (rank % ep + 1) * held)
        for name in truth:
            if "inner_experts" in name:  # of the tokens of this EP group
                truth[name] = sum(truths[r][name] for r in range(rank // ep * ep, (rank // ep + 1) * ep))[mine]
        check(got["uniep"], got["torchtitan"], truth)
        one = run(alone, *inputs[rank])
        alone.zero_grad()
        assert all(torch.equal(got["uniep"][name], one[name]) for name in ("y", "dx"))
        assert torch.equal(got["uniep counts"], got["torchtitan counts"])
        assert got["idle"] == (tokens(0, 0 if rank % ep else 10)[0].shape, True)
        assert f"routed_experts: uniep, expert parallel over {ep} ranks" in got["uniep status"]
        assert "torchtitan, AllToAllTokenDispatcher; not uniep: it was not overridden" in got["torchtitan status"]
    adapter.free(alone)


def with_tensor_parallel(world, ep: int) -> tuple:
    """Ranks of a tensor-parallel pair hold half of each sequence; x is what this rank holds of it."""
    made = layer(True, parallel_dims(world, "partial_dtensor", ep, tp=2))
    try:
        return run(made, *tokens(world.rank)), ""
    except uniep.UnsupportedError as error:
        return None, str(error)
    finally:
        adapter.free(made)


@pytest.mark.skipif(FLAT, reason="this torchtitan shards flat tokens otherwise")
@pytest.mark.parametrize("ep", [2, 4])
def test_83_beside_tensor_parallelism(frameworks, ep):
    """Expert parallelism over ranks of both kinds: the bits of one rank."""
    alone = layer(ours=True)
    for rank, (ours, _) in enumerate(frameworks.run(with_tensor_parallel, ep)):
        one = run(alone, *tokens(rank))
        assert all(torch.equal(ours[name], one[name]) for name in ("y", "dx"))
    adapter.free(alone)


@pytest.mark.skipif(FLAT, reason="this torchtitan shards flat tokens otherwise")
def test_83_experts_cut_in_pieces(frameworks):
    """Tensor parallelism of the experts themselves is refused."""
    for _, error in frameworks.run(with_tensor_parallel, 1):
        assert "this rank holds w1 (8, 16, 64) of experts of width 32: uniep keeps experts whole" in error


def test_compiled():
    """One graph, the same bits."""
    x, dy = tokens(0)
    made = layer(ours=True)
    made.routed_experts.workspaces.max_tokens_per_rank = 128
    eager = run(made, x, dy)
    made.zero_grad()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = run(torch.compile(made, backend="aot_eager", fullgraph=True), x, dy)
    assert all(torch.equal(eager[name], compiled["_orig_mod." * (name not in ("y", "dx")) + name]) for name in eager)
    made.routed_experts.workspaces.max_tokens_per_rank = None
    adapter.free(made)


# A whole model.


def model_config():
    """Two layers of Qwen3-MoE."""
    cfg = qwen3_configs["debugmodel_moe"](attn_backend="flex")
    cfg.layers = cfg.layers[:2]
    for block in cfg.layers:
        block.attention.inner_attention = ScaledDotProductAttention.Config()  # flex has no backward on CPUs
        moe, routed = block.moe, block.moe.routed_experts
        moe.num_experts = moe.router.num_experts = moe.router.gate.out_features = EXPERTS
        routed.inner_experts.num_experts = routed.token_dispatcher.num_experts = EXPERTS
        moe.router.top_k = routed.token_dispatcher.top_k = TOP_K
        routed.inner_experts.hidden_dim = FFN
    return cfg


def model(ours: bool, dims: ParallelDims, checkpointing: object | None) -> nn.Module:
    """Experts are sharded by FSDP2 over a mesh of their own."""
    cfg = model_config()
    set_qwen3_sharding_config(cfg, enable_sp=True, enable_ep=True)
    if ours:
        apply_overrides(OverrideConfig(imports=[(NAME, {"max_tokens_per_rank": 64})]), cfg)
    with torch.device("meta"):
        made = cfg.build()
    made = parallelize_qwen3(
        made,
        parallel_dims=dims,
        training=TrainingConfig(),
        parallelism=ParallelismConfig(spmd_backend=dims.spmd_backend),
        compile_config=CompileConfig(),
        ac_config=checkpointing,
        dump_folder="",
    )
    for module in made.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply on the way
    made.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        made.init_states(buffer_device=None)
        for parameter in made.parameters():
            local(parameter).mul_(5 if parameter.dim() > 1 else 1)  # so that layers matter
    return made


def loss_of(made: nn.Module, step: int, rank: int) -> Tensor:
    ids = torch.randint(2048, (2, 32), generator=torch.Generator().manual_seed(4 * step + rank))
    return F.cross_entropy(made(ids).flatten(0, 1), ids.flatten())


def model_in_fp64(parameters: dict[str, Tensor], ranks: int) -> dict[str, Tensor]:
    """Losses of the first step and their gradients, summed over ranks as torchtitan's FSDP2 does."""
    made = model_config().build()
    made.init_states(buffer_device=None)
    made.load_state_dict(parameters, strict=False)
    made.double()
    for block in made.layers.values():
        block.moe.routed_experts.forward = composed(block.moe.routed_experts.inner_experts)
    losses = [loss_of(made, 0, rank) for rank in range(ranks)]
    sum(losses).backward()
    return {"losses": torch.stack(losses).detach()} | {name: p.grad for name, p in made.named_parameters()}


CHECKPOINTING = {
    "torchtitan": (False, None),
    "uniep": (True, None),
    "stock selective": (True, SelectiveAC.Config()),
    "selective": (True, adapter.selective_ac(SelectiveAC.Config())),
}


def model_runs(world) -> dict:
    """Three steps; in the second no token goes to the experts of rank 1."""
    from uniep.backends.cpu.backend import CpuBackend

    calls, forward = [], CpuBackend.forward
    CpuBackend.forward = lambda *args: calls.append(1) or forward(*args)
    dims = parallel_dims(world, "partial_dtensor", 2)
    got = {}
    for name, (ours, checkpointing) in CHECKPOINTING.items():
        made = model(ours, dims, checkpointing)
        optimizer, hooks, steps = torch.optim.AdamW(made.parameters(), lr=1e-3), [], []
        for parameter in made.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, hooks=hooks: hooks.append(p.grad is not None))
        calls.clear()
        for step in range(3):
            for block in made.layers.values():
                local(block.moe.expert_bias_E)[EXPERTS // 2 :] = -10.0 if step == 1 else 0.0
            optimizer.zero_grad()
            loss = loss_of(made, step, world.rank)
            loss.backward()
            named = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in made.named_parameters()}
            got.setdefault("parameters", {n: whole(p.detach()).clone() for n, p in named.items()})
            steps.append({"loss": loss.detach(), **{n: whole(p.grad).clone() for n, p in named.items()}})
            optimizer.step()
        got[name] = steps, len(calls), hooks.count(True) / len(list(made.parameters())), len(hooks)
        got[f"{name} status"] = str(adapter.status(made)) if ours else ""
    adapter.free(made)
    CpuBackend.forward = forward
    return got


@pytest.mark.skipif(bool(NO_MODEL), reason=NO_MODEL)
def test_model(frameworks):
    """81: FSDP2 with a mesh for experts; every hook runs once a step; checkpointing does not run a layer again."""
    runs = frameworks.run(model_runs)
    truth = model_in_fp64(runs[0]["parameters"], frameworks.size)
    losses = truth.pop("losses")
    for got, loss in zip(runs, losses, strict=True):
        (theirs, none, *_), (ours, calls, hooks, _) = got["torchtitan"], got["uniep"]
        assert (none, calls, hooks) == (0, 3 * 2, 3.0)
        check(ours[0], theirs[0], {"loss": loss, **truth})
        for name, gradient in ours[1].items():
            if "inner_experts" in name:
                assert not gradient[EXPERTS // 2 :].any() and gradient[: EXPERTS // 2].any()
        for kind, again in (("stock selective", 2), ("selective", 1)):
            steps, calls, hooks, _ = got[kind]
            assert (calls, hooks) == (3 * 2 * again, 3.0)
            for step, other in zip(steps, ours, strict=True):
                assert all(torch.equal(value, other[name]) for name, value in step.items())
        assert "layers.1.moe.routed_experts: uniep, expert parallel over 2 ranks" in got["selective status"]


# Routing.


def moved(made: MoE) -> MoE:
    """The layer with another router."""
    with torch.no_grad():
        local(made.router.gate.weight).neg_()
    return made


@pytest.mark.smoke
@pytest.mark.parametrize("ours", [True, False])
def test_routing_is_recorded_and_replayed(ours):
    """Of a router that would choose otherwise: the recorded experts with its own weights; checkpointing changes
    nothing."""
    x, dy = tokens(0)
    made = layer(ours)
    hooks = adapter.hook_routing(made)
    with record_routing(made) as record:
        made(x)
    assert {name: tuple(ids.shape) for name, ids in record.ids.items()} == {"router": (10, TOP_K)}
    moved(made)
    scores_TE = torch.sigmoid(x.flatten(0, -2) @ made.router.gate.weight.detach().T)
    weights_TK = scores_TE.gather(1, record.of("router").long())
    weights_TK /= weights_TK.sum(-1, keepdim=True) + 1e-20
    with record_routing(made) as free:
        made(x)
    seen_scores = []
    made.routed_experts.register_forward_pre_hook(lambda _, args: seen_scores.append(args[1].flatten(0, -2).detach()))
    got = []
    for wrap in (lambda f: f, lambda f: lambda x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)):
        made.zero_grad()
        with record_routing(made) as seen, replay_routing(made, record):
            y = wrap(made)(x)
            y.backward(dy)
        got.append([y.detach(), *(p.grad.clone() for p in made.parameters())])
        assert seen == record and seen != free
    assert all(map(torch.equal, *got)) and got[0][-1].any()
    torch.testing.assert_close(seen_scores[0], weights_TK)
    with pytest.raises(uniep.InputError, match=r"router has \(10, 2\) choices"), replay_routing(made, record):
        made(tokens(0, 8)[0])
    unused = RoutingRecord({"router": record.of("router") - 9})
    with pytest.raises(uniep.InputError, match="torchtitan take experts 0 to 7"), replay_routing(made, unused):
        made(x)
    hooks.remove()
    with pytest.raises(uniep.ConfigError, match="has no"), record_routing(made):
        pass
    adapter.free(made)


def routing_runs(world) -> tuple:
    """DTensors of half a sequence: choice, y, y of another router, y replayed; the error if rank 1 has too few."""
    made = layer(True, parallel_dims(world, "partial_dtensor", 2, tp=2))
    adapter.hook_routing(made)
    x, error = tokens(world.rank)[0], ""
    with torch.no_grad():
        with record_routing(made) as record:
            y = made(x)
        moved(made)
        free = made(x)
        with replay_routing(made, record):
            replayed = made(x)
        try:
            with replay_routing(made, record.take(slice(world.rank == 1, None))):
                made(x)
        except uniep.InputError as raised:
            error = str(raised)
        with replay_routing(made, record):
            assert torch.equal(local(made(x)), local(replayed))
    adapter.free(made)
    return record.of("router"), *map(local, (y, free, replayed)), error


@pytest.mark.skipif(FLAT, reason="this torchtitan shards flat tokens otherwise")
def test_routing_beside_tensor_parallelism(frameworks):
    """Each rank's tokens, in the bits of one rank; an error of one rank reaches its EP group."""
    alone = layer(ours=True)
    adapter.hook_routing(alone)
    for rank, (ids, y, free, replayed, error) in enumerate(frameworks.run(routing_runs)):
        x = tokens(rank)[0]
        with torch.no_grad():
            with record_routing(alone) as record:
                assert torch.equal(alone(x), y)
            assert torch.equal(record.of("router"), ids)
            with replay_routing(moved(alone), record):
                assert torch.equal(alone(x), replayed) and not torch.equal(free, replayed)
            moved(alone)
        assert ("choices (tokens, top_k)" in error) == (rank < 2), error
    adapter.free(alone)


def test_routing_that_cannot_be_recorded():
    with pytest.raises(uniep.UnsupportedError, match="no MoE of torchtitan"):
        adapter.hook_routing(nn.Linear(1, 1))
    made = layer(ours=True)
    made.router._debug_force_load_balance = True
    with pytest.raises(uniep.UnsupportedError, match="_debug_force_load_balance, which overwrites every choice"):
        adapter.hook_routing([nn.ModuleList([made])])
    made.router.__class__ = type("Own", (TokenChoiceTopKRouter,), {"forward": lambda self, x: None})
    with pytest.raises(uniep.UnsupportedError, match="router is a Own with its own forward"):
        adapter.hook_routing(made)
    made = layer(ours=True)
    made.compile(backend="eager")
    with pytest.raises(uniep.UnsupportedError, match=r"MoE is compiled.*set compile\.enable to False"):
        adapter.hook_routing(made)


# What is refused, and who says so.


def test_refused_dispatchers_and_experts():
    cfg = layer_config()
    cfg.routed_experts.token_dispatcher = DeepEPTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
    with pytest.raises(uniep.UnsupportedError, match="token_dispatcher is a DeepEPTokenDispatcher"):
        apply_overrides(OverrideConfig(imports=[NAME]), cfg)

    class Biased(GroupedExperts):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

        def forward(self, x_RD, num_tokens_per_expert_E):
            return x_RD

    cfg = layer_config()
    cfg.routed_experts.inner_experts = Biased.Config(dim=HIDDEN, hidden_dim=FFN, num_experts=EXPERTS, param_init={})
    (found,) = adapter.status(cfg.build()).layers
    assert not found.active and "inner_experts is a Biased with its own forward" in found.why
    with pytest.raises(uniep.UnsupportedError, match="inner_experts is a Biased with its own forward"):
        adapter.routed_experts(cfg.routed_experts)
    later = adapter.routed_experts(layer_config().routed_experts)
    later.inner_experts = cfg.routed_experts.inner_experts  # by a converter after the override
    with pytest.raises(uniep.UnsupportedError, match="inner_experts is a Biased with its own forward"):
        later.build()
    made = layer(ours=True)
    made.routed_experts.inner_experts.__class__ = type("FSDPGroupedExperts", (FSDPModule, GroupedExperts), {})
    with pytest.raises(uniep.UnsupportedError, match="inner_experts are an FSDP unit of their own"):
        made(tokens(0)[0])


def test_refused_options_and_type_checking(monkeypatch):
    with pytest.raises(ValueError, match=r"deltas for fields not on .*tokens"):
        apply_overrides(OverrideConfig(imports=[(NAME, {"tokens": 1})]), layer_config())
    monkeypatch.setattr(spmd, "is_type_checking", lambda: True)
    with pytest.raises(uniep.UnsupportedError, match="spmd_typechecking is on"):
        layer(ours=True)(tokens(0)[0])


@pytest.mark.smoke
def test_status_and_patterns():
    """79: a pattern that matches nothing is an error; layers of other classes say so."""
    made = layer(ours=True)
    with pytest.raises(uniep.ConfigError, match=r"'layers\.\*' matches none of the 1 MoE layers of MoE"):
        adapter.status(made, "layers.*")

    class Own(RoutedExperts):
        pass

    other = copy.deepcopy(layer(ours=False))
    other.routed_experts.__class__ = Own
    found = adapter.status([made, other])
    assert found.num_active == 1 and "it is a Own" in found.layers[1].why
    assert copy.deepcopy(made).routed_experts.workspaces is made.routed_experts.workspaces


def test_selective_ac():
    saved = adapter.selective_ac(SelectiveAC.Config()).build().get_save_ops()
    assert saved > SelectiveAC.Config().build().get_save_ops() and set(uniep.SAVE_OPS) <= saved


@pytest.mark.skipif(bool(NO_MODEL), reason=NO_MODEL)
def test_example(losses_of, tmp_path):
    """The example trains with 2 processes; one process goes on from its checkpoint."""
    before, after, later = losses = losses_of("torchtitan_train.py", "uniep runs 1 of 1 MoE layers")
    assert before > 7 and after < 3.7 and later < 3.7, losses
    saved = FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    assert any(name.startswith("optimizer.state.") and name.endswith(".w1_EFD.exp_avg") for name in saved)
