"""uniep inside Megatron-Core: a layer, a whole model, its DDP and its checkpoints against Megatron's own experts.

Numbers: a tensor may be as far from fp64 as twice Megatron's own result, or one rounding.
"""

import dataclasses
import functools
import logging
import re
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import uniep
from uniep.integrations import megatron
from uniep.integrations.checkpoints import join_experts

HIDDEN, EXPERTS = 32, 8


def config(ep: int, dtype: torch.dtype = torch.float32, **changes) -> TransformerConfig:
    fields = {
        "num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 4, "ffn_hidden_size": 64,
        "num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "moe_layer_freq": [0, 1],
        "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False, "normalization": "RMSNorm",
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True, "params_dtype": dtype,
        "moe_router_dtype": "fp64" if dtype is torch.float64 else "fp32", "expert_model_parallel_size": ep,
    }  # fmt: skip
    return TransformerConfig(**fields | changes)


_state: dict[tuple[int, ...], tuple[dict, set]] = {}
"""The last sizes -> Megatron's globals of this worker, and the groups that are not Megatron's."""


def parallel(*sizes: int) -> None:
    """Expert, tensor, expert-tensor, pipeline and virtual pipeline parallel sizes.

    Megatron makes dozens of groups, each with a thread that looks 100 times a second: those of other sizes end here.
    """
    from megatron_on_cpu import stand_in

    if sizes not in _state:
        stand_in()
        for _, others in _state.values():
            for group in set(dist.distributed_c10d._world.pg_map) - others:
                dist.destroy_process_group(group)
        others = set(dist.distributed_c10d._world.pg_map)
        parallel_state.destroy_model_parallel()
        ep, tensor, expert_tensor, pipeline, virtual = (*sizes, *(1, 1, 1, None)[len(sizes) - 1 :])
        parallel_state.initialize_model_parallel(
            tensor, pipeline, virtual, expert_model_parallel_size=ep, expert_tensor_parallel_size=expert_tensor
        )
        _state.clear()
        made = {name: value for name, value in vars(parallel_state).items() if name.startswith("_")}
        _state[sizes] = made, others
    vars(parallel_state).update(_state[sizes][0])


@torch.no_grad()
def fill(module: nn.Module) -> nn.Module:
    """The same values at every EP size and dtype: experts by their global ids."""
    for name, p in module.named_parameters():
        found = re.search(r"local_experts\.(\d+)", name)
        if found:
            local = EXPERTS // parallel_state.get_expert_model_parallel_world_size()
            number = parallel_state.get_expert_model_parallel_rank() * local + int(found[1])
            name = name.replace(found[0], str(number))
        seed = sum(ord(c) * (i + 1) for i, c in enumerate(name))
        value = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        p.copy_(1 + value / 10 if p.dim() == 1 else (value * p.shape[-1] ** -0.5).bfloat16())
    return module


def layer(cfg: TransformerConfig, change=lambda spec: spec) -> nn.Module:
    spec = change(get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False))
    return fill(spec.submodules.mlp(config=cfg, pg_collection=None, is_mtp_layer=False, name="mlp"))


def model(cfg: TransformerConfig, change=lambda spec: spec) -> nn.Module:
    spec = change(get_gpt_decoder_block_spec(cfg, use_transformer_engine=False))
    made = GPTModel(cfg, spec, vocab_size=64, max_sequence_length=16)
    made.decoder.layers[1].mlp.router.layer_number = 2
    return fill(made.to(cfg.params_dtype))


def batch(rank: int, sequences: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(64, (sequences, 16), generator=torch.Generator().manual_seed(rank))
    return {
        "input_ids": ids,
        "position_ids": torch.arange(16).expand(sequences, -1),
        "attention_mask": torch.ones(sequences, 1, 16, 16).triu(1).bool(),
        "labels": ids,
    }


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    assert all(p.grad is not None for p in module.parameters())
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def distance(tensor: torch.Tensor, true: torch.Tensor) -> float:
    return float((tensor.double() - true).norm() / true.norm().clamp_min(1e-30))


def check(ours: dict, theirs: dict, truth: dict, dtype: torch.dtype) -> None:
    assert ours.keys() == theirs.keys() == truth.keys()
    for name, true in truth.items():
        error, allowed = distance(ours[name], true), distance(theirs[name], true)
        assert ours[name].dtype == theirs[name].dtype
        assert error <= 2 * allowed + torch.finfo(dtype).eps, f"{name}: {error:.2e}, Megatron's own {allowed:.2e}"


# Layers.


def layer_runs(world, ep: int, dtype: torch.dtype, options: dict) -> dict:
    parallel(ep)
    runs = {"true": (lambda spec: spec, torch.float64), "stock": (lambda spec: spec, dtype)}
    runs["uniep"] = (megatron.use_uniep, dtype)
    got = {}
    for name, (change, kind) in runs.items():
        made = layer(config(ep, kind, **options), change)
        draw = torch.Generator().manual_seed(world.rank)
        x, dy = (torch.randn(5, 2, HIDDEN, generator=draw).to(dtype) for _ in range(2))
        x = x.to(kind).requires_grad_()
        y, bias = made(x)
        assert bias is None
        y.backward(dy.to(kind))
        got[name] = {"y": y.detach(), "dx": x.grad, **gradients(made)}
        if name == "uniep":
            got["weight_at"] = [workspace.cfg.weight_at for workspace in made.workspaces.workspaces]
        megatron.free(made)
    return got


LAYERS = {
    "ep 1": (1, torch.float32, {}),
    "ep 2": (2, torch.float32, {}),
    "ep 4, shared expert": (4, torch.float32, {"moe_shared_expert_intermediate_size": 16}),
    "bf16": (2, torch.bfloat16, {"moe_shared_expert_intermediate_size": 16}),
    "sigmoid, groups": (2, torch.float32, {
        "moe_router_score_function": "sigmoid", "moe_router_num_groups": 4, "moe_router_group_topk": 2,
        "moe_router_topk": 3, "moe_router_topk_scaling_factor": 2.5,
    }),
    "top 1": (2, torch.float32, {"moe_router_topk": 1, "moe_router_pre_softmax": True}),
    "geglu": (2, torch.float32, {"activation_func": F.gelu}),
    "geglu, tanh": (2, torch.float32, {"activation_func": fast_gelu}),
    "clamped": (2, torch.float32, {
        "activation_func": quick_gelu, "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.5,
    }),
    "no gate": (2, torch.float32, {"activation_func": squared_relu, "gated_linear_unit": False}),
    "weights in bf16": (2, torch.bfloat16, {"moe_router_dtype": None}),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYERS)
def test_layer(frameworks, case):
    """y, dx, the router's and the experts' gradients."""
    ep, dtype, options = LAYERS[case]
    for got in frameworks.run(layer_runs, ep, dtype, options):  # Megatron compiles "geglu, tanh" on each rank
        check(got["uniep"], got["stock"], got["true"], dtype)
        assert got["weight_at"] == ["activation"]  # which the numbers hardly show


@pytest.mark.smoke
def test_chosen_experts():
    """Ascending; a slot is unused where the router chose fewer than top-k experts, even if their weight is 0."""
    chosen = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]]).bool()
    weights = torch.tensor([[0.0, 0.4, 0.0, 0.6], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]])
    layer = types.SimpleNamespace(config=types.SimpleNamespace(moe_router_topk=2))
    _, (ids, picked) = megatron.UniEPMoELayer.preprocess(layer, None, weights, chosen)
    assert ids.tolist() == [[1, 3], [2, -1], [-1, -1], [0, 3]]
    assert torch.equal(picked[ids >= 0], torch.tensor([0.4, 0.6, 1.0, 0.0, 1.0]))


@pytest.mark.smoke
def test_layer_bits(frameworks):
    """80: the same y at EP 1, 2 and 4; a group of one rank is no special case."""
    runs = [frameworks.run(layer_runs, ep, torch.float32, {}) for ep in (1, 2, 4)]
    for alone, two, four in zip(*runs, strict=True):
        for name in ("y", "dx", "router.weight"):
            assert torch.equal(alone["uniep"][name], two["uniep"][name])
            assert torch.equal(alone["uniep"][name], four["uniep"][name])


def replay_runs(world) -> list:
    """Megatron's own replay, by other routers: (recorded choice, y, y without) of uniep's layer and its own."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    parallel(2)
    got = []
    for change in (megatron.use_uniep, lambda spec: spec):
        RouterReplay.clear_global_router_replay_instances()
        made = layer(config(2, moe_enable_routing_replay=True), change)
        x = torch.randn(5, 2, HIDDEN, generator=torch.Generator().manual_seed(world.rank))
        with torch.no_grad():
            RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
            made(x)
            record = [ids.clone() for ids in RouterReplay.get_recorded_data()]
            made.router.weight.copy_(made.router.weight.flip(0))
            RouterReplay.clear_global_router_replay_action()
            free = made(x)[0]
            RouterReplay.set_replay_data(record)
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            got.append((record[0], made(x)[0], free))
        megatron.free(made)
    RouterReplay.clear_global_router_replay_instances()
    return got


def test_megatrons_own_replay_of_routing(frameworks):
    """It acts before uniep's layer, whose results are those of Megatron's."""
    for (ids, y, free), (stock_ids, stock_y, _) in frameworks.run(replay_runs):
        assert torch.equal(ids, stock_ids) and not torch.equal(y, free)
        torch.testing.assert_close(y, stock_y)


# Whole models.


def model_runs(world, dtype: torch.dtype) -> dict:
    parallel(2)
    options = {"moe_shared_expert_intermediate_size": 16, "moe_router_load_balancing_type": "aux_loss"}
    options["moe_aux_loss_coeff"] = 0.01
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    runs = {"true": (lambda spec: spec, torch.float64, {}), "stock": (lambda spec: spec, dtype, {})}
    runs |= {"uniep": (megatron.use_uniep, dtype, {}), "recomputed": (megatron.use_uniep, dtype, recompute)}
    got = {}
    for name, (change, kind, more) in runs.items():
        made = model(config(2, kind, **options, **more), change)
        loss = made(**batch(world.rank)).mean()
        loss.backward()
        got[name] = {"loss": loss.detach(), **gradients(made)}
        got[f"{name} status"] = str(megatron.status(made))
        got[f"{name} names"] = sorted(made.state_dict()), sorted(made.sharded_state_dict())
        got[f"{name} attributes"] = {n: getattr(p, "allreduce", True) for n, p in made.named_parameters()}
        megatron.free(made)
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model(frameworks, dtype):
    """Loss and every gradient; names in checkpoints and what tells DDP an expert from the rest are Megatron's."""
    for got in frameworks.run(model_runs, dtype):
        check(got["uniep"], got["stock"], got["true"], dtype)
        assert all(torch.equal(got["recomputed"][name], value) for name, value in got["uniep"].items())
        assert got["uniep names"] == got["stock names"]
        assert got["uniep attributes"] == got["stock attributes"]
        assert sum(not reduced for reduced in got["uniep attributes"].values()) == 2 * EXPERTS // 2
        assert got["uniep status"].splitlines()[0] == "uniep runs 1 of 1 MoE layers"
        assert "decoder.layers.1.mlp: uniep, expert parallel over 2 ranks" in got["uniep status"]
        assert "runs 0 of 1" in got["stock status"] and "not passed through use_uniep" in got["stock status"]


def counted(world) -> list:
    """Tokens that the router has counted per expert: a training step, an evaluation, a recomputed step."""
    parallel(2)
    options = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    got = []
    for change, more in ((lambda spec: spec, {}), (megatron.use_uniep, {}), (megatron.use_uniep, recompute)):
        made = layer(config(2, **options, **more), change)
        x = torch.randn(24, 2, HIDDEN, generator=torch.Generator().manual_seed(world.rank))
        made(x.requires_grad_())[0].sum().backward()
        with torch.no_grad():
            made.eval()(x)
        got.append(made.router.local_tokens_per_expert)
        megatron.free(made)
    return got


def test_77_counts(frameworks):
    """Every routed token counts once, also when the layer is recomputed; evaluation adds nothing."""
    for stock, ours, recomputed in frameworks.run(counted):
        assert stock.sum() == 24 * 2 * 2
        assert torch.equal(stock, ours) and torch.equal(stock, recomputed)


# Megatron's DDP.


def reduced(world, main_grad: bool, ours: bool, options: dict) -> dict:
    """main_grads after two micro batches; all tokens of the first go to the experts of rank 0."""
    parallel(2)
    cfg = config(2)
    change = functools.partial(megatron.use_uniep, main_grad=main_grad) if ours else lambda spec: spec
    made = model(cfg, change)
    with torch.no_grad():
        frozen = made.decoder.layers[0].mlp.linear_fc1.weight.requires_grad_(False)
        made.decoder.layers[1].mlp.router.weight[4:] = made.decoder.layers[1].mlp.router.weight[:4].mean(0)
    ddp = DistributedDataParallel(cfg, DistributedDataParallelConfig(**options), made)
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        ddp(**batch(world.rank)).mean().backward()
    ddp(**batch(world.rank + 4)).mean().backward()
    ddp.finish_grad_sync()
    assert frozen.grad is None and not hasattr(frozen, "main_grad")
    assert all(p.grad is None for p in made.parameters())
    told = [p.grad_added_to_main_grad for name, p in made.named_parameters() if "local_experts" in name]
    assert all(told) if main_grad and ours else not any(told)
    megatron.free(made)
    return {name: p.main_grad.clone() for name, p in made.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("overlap", [False, True])
def test_ddp(frameworks, overlap):
    """81: main_grads of all parameters, experts without tokens included, by way of .grad and written by uniep."""
    options = {"overlap_grad_reduce": overlap}
    runs = [frameworks.run(reduced, *how, options) for how in ((False, False), (False, True), (True, True))]
    for stock, through_grad, written in zip(*runs, strict=True):
        assert stock.keys() == written.keys()
        for name, value in stock.items():
            torch.testing.assert_close(written[name], value, rtol=1e-4, atol=1e-5)
            assert torch.equal(written[name], through_grad[name]), name


def hooked(world) -> list:
    """Names of linear layers whose pre-forward hooks ran, and gradients of a frozen and a parametrised expert."""
    parallel(2)
    made, seen = layer(config(2), megatron.use_uniep), []
    for name, module in made.experts.named_modules():
        if hasattr(module, "weight"):
            module.register_forward_pre_hook(lambda module, args, name=name: seen.append(name))
    experts = made.experts.local_experts
    experts[0].linear_fc1.weight.requires_grad_(False)

    class LowRank(nn.Module):
        def __init__(self, weight) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.ones(n, 1)) for n in weight.shape)

        def forward(self, weight):
            return weight + self.a @ self.b.T

    fc2 = experts[1].linear_fc2
    nn.utils.parametrize.register_parametrization(fc2, "weight", LowRank(fc2.weight))
    x = torch.randn(9, 2, HIDDEN, requires_grad=True)
    made(x)[0].square().sum().backward()
    a = fc2.parametrizations.weight[0].a
    got = (
        sorted(seen),
        experts[0].linear_fc1.weight.grad,
        bool(a.grad.any()),
        bool(experts[2].linear_fc1.weight.grad.any()),
    )
    fc2.bias = nn.Parameter(torch.zeros(2))
    try:
        made(x)
    except uniep.UnsupportedError as error:
        got = *got, str(error)
    megatron.free(made)
    return got


def test_54_hooks_and_adapters(frameworks):
    """DDP's hooks of parameters that uniep reads run once; what would get no gradient is refused."""
    for seen, frozen, adapter, trained, error in frameworks.run(hooked):
        assert seen == sorted(f"local_experts.{i}.linear_fc{n}" for i in range(4) for n in (1, 2))
        assert frozen is None and adapter and trained
        assert "SequentialMLP: it would leave local_experts.1.linear_fc2.bias (1 parameters) unused" in error


# Checkpoints.


def pieces(world, ep: int) -> list:
    """What each tensor of a checkpoint is a piece of: of Megatron's model and of uniep's."""
    parallel(ep)
    found = []
    for change in (lambda spec: spec, megatron.use_uniep):
        states = model(config(ep), change).sharded_state_dict()
        apply_factories(states)  # of gate and up rows, two pieces
        fields = ("key", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id", "dtype")
        found.append([[getattr(state, field, None) for field in fields] for state in nested_values(states)])
    return found


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_78_checkpoints(frameworks, ep):
    """Every rank saves and loads the same pieces under the same names as with Megatron's own layers."""
    experts = set()
    for stock, ours in frameworks.run(pieces, ep):
        assert stock == ours
        weights = [piece for piece in ours if ".experts.experts." in piece[0] and "weight" in piece[0]]
        assert all(piece[2][0] == EXPERTS for piece in weights)
        experts |= {(piece[0], *piece[3][:2]) for piece in weights}
    assert len(experts) == 3 * EXPERTS  # gate, up and down of all ranks


# The distributed optimizer, and pipelines.


def optimized(ours: bool, ep: int) -> tuple:
    """(model, DDP, optimizer), whose fp32 masters and averages are spread over data-parallel ranks."""
    parallel(ep)
    cfg = config(ep)
    made = model(cfg, megatron.use_uniep if ours else lambda spec: spec)
    how = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(cfg, how, made)
    options = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, clip_grad=1.0)
    return made, ddp, get_megatron_optimizer(options, [ddp])


def steps(ddp: nn.Module, optimizer: object, numbers: range) -> list[tuple[float, float]]:
    """(loss, norm of the gradients) of each."""
    found = []
    for number in numbers:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = ddp(**batch(dist.get_rank() + 4 * number)).mean()
        loss.backward()
        ddp.finish_grad_sync()
        found.append((float(loss), float(optimizer.step()[1])))
    return found


def whole_state(made: nn.Module, optimizer: object, loading: bool = False) -> dict:
    sharded = made.sharded_state_dict()
    kind = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}
    return {"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded, is_loading=loading, metadata=kind)}


def resumed(world, folder: str) -> list:
    """Steps 2 and 3 of Megatron's layers, of uniep's at EP 2, and of uniep's at EP 4 from a checkpoint of EP 2."""
    from megatron_on_cpu import distributed_optimizer

    found = []
    with distributed_optimizer():
        for ours in (False, True):
            made, ddp, optimizer = optimized(ours, 2)
            steps(ddp, optimizer, range(2))
            if ours:
                Path(folder).mkdir(exist_ok=True)
                dist_checkpointing.save(whole_state(made, optimizer), folder)
            found.append(steps(ddp, optimizer, range(2, 4)))
        megatron.free(made)
        made, ddp, optimizer = optimized(True, 4)
        loaded = dist_checkpointing.load(whole_state(made, optimizer, True), folder)
        made.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        found.append(steps(ddp, optimizer, range(2, 4)))
        megatron.free(made)
    return found


def test_distributed_optimizer(frameworks, tmp_path):
    """Trains as Megatron's own layers do, and goes on at another EP size, with its averages."""
    found = frameworks.run(resumed, str(tmp_path / "saved"))
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "one.pt")
    files = torch.load(tmp_path / "one.pt", weights_only=False)
    tensors = {name: t for name, t in files.items() if isinstance(t, torch.Tensor)}
    state = join_experts(tensors, gate_up="linear_fc1", down="linear_fc2", router="router.weight")
    of_experts = {name: tuple(t.shape) for name, t in state.items() if name.startswith("decoder.layers.1.mlp.experts.")}
    shapes = {"w13": (EXPERTS, 2 * 16, HIDDEN), "w2": (EXPERTS, HIDDEN, 16)}
    assert of_experts == {f"decoder.layers.1.mlp.experts.{name}": shape for name, shape in shapes.items()}
    for theirs, ours, later in found:
        for wanted, *found in zip(theirs, ours, later, strict=True):
            for got in found:
                assert got == pytest.approx(wanted, rel=1e-5)


def interleaved(world) -> tuple:
    """Two pipeline stages of two chunks each, in EP groups of two: losses and gradients of Megatron's layers and of
    uniep's; the status of the chunks."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron_on_cpu import OnCpu

    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # of the class: another test's may have another shape
    parallel(2, 1, 1, 2, 2)
    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    cfg = config(2, num_layers=4, moe_layer_freq=1, pipeline_dtype=torch.float32, batch_p2p_comm=False, **stages)
    rank, found = parallel_state.get_data_parallel_rank(), []

    def forward(batches, part: nn.Module) -> tuple:
        return part(**next(batches)), lambda loss: (loss.mean(), {"loss": float(loss.mean())})

    with OnCpu():
        for ours in (False, True):
            parts = []
            for number in range(2):
                spec = get_gpt_decoder_block_spec(cfg, use_transformer_engine=False, vp_stage=number)
                ends = {
                    "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
                    "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
                }
                spec = megatron.use_uniep(spec, max_tokens_per_rank=64) if ours else spec
                made = GPTModel(
                    cfg, spec, vocab_size=64, max_sequence_length=16, vp_stage=number,
                    share_embeddings_and_output_weights=False, **ends,
                )  # fmt: skip
                parts.append(fill(made))
            losses = get_forward_backward_func()(
                forward_step_func=forward, data_iterator=[iter([batch(rank + 2 * i) for i in range(4)]) for _ in parts],
                model=parts, num_microbatches=4, seq_length=16, micro_batch_size=2, forward_only=False,
            )  # fmt: skip
            found.append(([loss["loss"] for loss in losses], [gradients(part) for part in parts]))
    status = megatron.status(parts)
    megatron.free(parts)
    return *found, (status.num_active, len(status))


def test_interleaved_pipeline(frameworks):
    """Virtual stages, whose forwards and backwards take turns on one Workspace."""
    for (losses, theirs), (got, ours), status in frameworks.run(interleaved):
        assert status == (2, 2) and len(losses) in (0, 4)
        assert got == pytest.approx(losses, rel=1e-5)
        for stock, part in zip(theirs, ours, strict=True):
            for name, want in stock.items():
                torch.testing.assert_close(part[name], want, rtol=1e-4, atol=1e-5, msg=name)


# Experts as one tensor, as on GPUs.


def stacked(world, one: bool, main_grad: bool, reverse: bool) -> dict:
    """Gradients of two steps; main_grads lie one behind the other, or as in DDP's buffer in reverse order."""
    parallel(2)
    made = layer(config(2), functools.partial(megatron.use_uniep, main_grad=main_grad))
    if one:
        made._takes_lists = lambda x: False
    experts = list(made.experts.parameters())[:: -1 if reverse else 1]
    memory, at = torch.zeros(sum(p.numel() for p in experts)), 0
    for p in experts if main_grad else ():
        p.main_grad = memory[at : (at := at + p.numel())].view(p.shape)
        p.grad_added_to_main_grad = False
    x = torch.randn(9, 2, HIDDEN, generator=torch.Generator().manual_seed(world.rank), requires_grad=True)
    for _ in range(2):
        made(x)[0].square().sum().backward()
    got = {name: p.main_grad if main_grad else p.grad for name, p in made.experts.named_parameters()}
    together = len({p.untyped_storage().data_ptr() for p in experts})
    told = all(getattr(p, "grad_added_to_main_grad", False) for p in experts)
    error = ""
    if one and main_grad:  # in no order
        experts[0].main_grad, experts[2].main_grad = experts[2].main_grad, experts[0].main_grad
        try:
            made(x)
        except uniep.UnsupportedError as refused:
            error = str(refused)
    megatron.free(made)
    return {"x": x.grad, "memories": together, "told": told, "error": error, **got}


@pytest.mark.parametrize(("main_grad", "reverse"), [(False, False), (True, False), (True, True)])
def test_experts_as_one_tensor(frameworks, main_grad, reverse):
    """The same bits; parameters move into one memory per GEMM, once; main_grad without a copy or refused."""
    runs = [frameworks.run(stacked, one, main_grad, reverse) for one in (False, True)]
    for lists, one in zip(*runs, strict=True):
        assert lists.pop("memories") == 8 and one.pop("memories") == 2
        assert lists.pop("told") == one.pop("told") == main_grad
        assert not lists.pop("error") and ("pass main_grad=False" in one.pop("error")) == main_grad
        assert all(torch.equal(value, one[name]) for name, value in lists.items())


def buffered(world, one: bool) -> dict:
    """Gradients of a layer whose parameters and main_grads lie in the buffers of Megatron's distributed optimizer."""
    parallel(2)
    cfg = config(2)
    made = layer(cfg, functools.partial(megatron.use_uniep, main_grad=one))
    how = DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = DistributedDataParallel(cfg, how, made)
    ddp.zero_grad_buffer()
    if one:
        made._takes_lists = lambda x: False
    x = torch.randn(9, 2, HIDDEN, generator=torch.Generator().manual_seed(world.rank), requires_grad=True)
    y, _ = ddp(x)
    y.square().sum().backward()
    before = len({p.untyped_storage().data_ptr() for p in made.experts.parameters()})
    megatron.free(made)
    return {"x": x.grad, "y": y.detach(), "memories": before} | {n: p.main_grad for n, p in made.named_parameters()}


def test_experts_in_a_buffer(frameworks):
    """In reverse order, interleaved; read, and main_grads written, where they lie."""
    for lists, one in zip(*(frameworks.run(buffered, one) for one in (False, True)), strict=True):
        assert lists["memories"] == one["memories"] == 1
        assert all(torch.equal(value, one[name]) for name, value in lists.items() if name != "memories")


@pytest.mark.parametrize("starts", [(12, 6, 0), (0, 6, 12), (0, 12, 6)])
def test_in_any_order(starts):
    """Views of a buffer in their order, in reverse, or stacked; each gets its gradient."""
    memory = torch.arange(24.0)
    parts = [memory[at : at + 6].view(2, 3).requires_grad_() for at in starts]
    w13, w2, reverse = megatron._one_tensor_each(parts, parts, False)
    assert reverse == (starts == (12, 6, 0)) and torch.equal(w13, torch.stack(parts[::-1] if reverse else parts))
    assert (w13.data_ptr() == memory.data_ptr()) == (starts != (0, 12, 6))
    ((w13 + w2) * torch.arange(3.0).view(3, 1, 1)).sum().backward()
    assert [float(p.grad.mean()) for p in parts] == ([4, 2, 0] if reverse else [0, 2, 4])


# What is refused, and who says so.

BAD = {
    "activation_func": F.relu, "glu_linear_offset": 1.0,
    "fp8": "e4m3", "fp4": "e2m1", "expert_gtp_weight_remat_size": 2, "moe_expert_capacity_factor": 1.0,
    "moe_expert_rank_capacity_factor": 1.0, "moe_mlp_glu_interleave_size": 32, "moe_latent_size": 16,
    "quant_recipe": object(), "moe_dispatch_fwd_dtype": "mxfp8", "moe_combine_bwd_dtype": "mxfp8",
    "recompute_modules": ["moe_act"], "offload_modules": ["expert_fc1"], "transformer_impl": "inference_optimized",
}  # fmt: skip
FLAGS = ["activation_func", "glu_linear_offset", *megatron.ALLOWED, *megatron.FORBIDDEN, "transformer_impl"]


@pytest.mark.smoke
@pytest.mark.parametrize("flag", FLAGS)
def test_refused_flags(flag):
    """Each by its name, before anything is made."""
    cfg = config(1)
    setattr(cfg, flag, BAD.get(flag, True))
    mlp = megatron.use_uniep(get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)).submodules.mlp
    with pytest.raises(uniep.UnsupportedError, match=f"cannot run these MoE layers: {flag} (is|has) "):
        mlp(config=cfg)


@pytest.mark.parametrize(
    ("kind", "modules"), [("full_iteration", []), ("local", ["moe_router"]), ("transformer_engine", [])]
)
def test_refused_graphs(kind, modules):
    cfg = config(1)
    cfg.cuda_graph_impl, cfg.cuda_graph_modules = kind, modules
    assert "cuda_graph_impl is" in megatron._refused_flags(cfg)[0]
    cfg.cuda_graph_impl, cfg.cuda_graph_modules = "local", ["attn"]
    assert megatron._refused_flags(cfg) == []


def tensor_parallel(world) -> str:
    parallel(2, 2, 2)
    cfg = config(2, tensor_model_parallel_size=2, expert_tensor_parallel_size=2, sequence_parallel=True)
    spec = megatron.use_uniep(get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False))
    try:
        spec.submodules.mlp(config=cfg, pg_collection=None)
    except uniep.UnsupportedError as error:
        return str(error)
    return ""


def test_83_experts_cut_in_pieces(frameworks):
    """Expert tensor parallelism beside expert parallelism is refused at construction."""
    assert all("expert_tensor_parallel_size is 2" in error for error in frameworks.run(tensor_parallel))


def test_nothing_to_replace(caplog):
    """79: a spec without MoE layers, layers of other classes, and a pattern that matches nothing are told."""
    dense = get_gpt_layer_local_spec()
    with pytest.raises(uniep.ConfigError, match="no MoELayer in this ModuleSpec, so uniep would run nothing"):
        megatron.use_uniep(dense)

    class Own(MoELayer):
        pass

    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    own = dataclasses.replace(spec.submodules, mlp=functools.partial(Own, **spec.submodules.mlp.keywords))
    with pytest.raises(uniep.ConfigError, match=r"\(there are Own\)"):
        megatron.use_uniep(own)
    with caplog.at_level(logging.WARNING, "uniep"):
        both = megatron.use_uniep([spec, own])
    assert "use_uniep leaves Own alone" in caplog.text
    assert both[0].submodules.mlp.func is megatron.UniEPMoELayer and both[1] is own
    assert spec.submodules.mlp.func is MoELayer  # as it was
    with pytest.raises(uniep.ConfigError, match=r"'\*' matches none of the 0 MoE layers of Linear"):
        megatron.status(nn.Linear(2, 2))


def test_other_specs():
    """A layer's ModuleSpec, nested in a stack's submodules, in tuples and in dictionaries."""

    @dataclasses.dataclass
    class Stack:
        moe_layer: ModuleSpec
        others: tuple

    mlp = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False).submodules.mlp
    old = ModuleSpec(module=MoELayer, submodules=mlp.keywords["submodules"])
    stack = ModuleSpec(module=object, submodules=Stack(old, ({"mlp": mlp}, functools.partial(print, mlp, end=mlp))))
    made = megatron.use_uniep(stack, max_tokens_per_rank=8).submodules
    assert made.moe_layer.module is megatron.UniEPMoELayer and made.moe_layer.submodules is old.submodules
    assert made.moe_layer.params["workspaces"].max_tokens_per_rank == 8
    assert made.others[0]["mlp"].func is megatron.UniEPMoELayer
    assert made.others[1].args[0] is made.others[1].keywords["end"] is made.others[0]["mlp"]
    assert old.module is MoELayer


@pytest.mark.smoke
def test_status_of_other_layers():
    class Other(BaseMoELayer):
        forward = None

        def __init__(self) -> None:
            nn.Module.__init__(self)

    (found,) = megatron.status([nn.ModuleDict({"mlp": Other()}), nn.Linear(2, 2)], "0.*").layers
    assert not found.active and found.name == "0.mlp" and "not a MoELayer" in found.why


def test_other_experts():
    with pytest.raises(uniep.UnsupportedError, match="linear_fc1 is a NoneType without a tensor weight0"):
        megatron._linears(types.SimpleNamespace(num_local_experts=2))


def test_example(losses_of, tmp_path):
    """The example trains with 2 processes; one process goes on from its checkpoint of Megatron's kind."""
    before, after, later = losses = losses_of("megatron_train.py", "uniep, expert parallel over {ranks} ranks")
    assert before > 5 and after < 3.7 and later < 3.7, losses
    saved = FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        assert any(name.startswith(f"optimizer.{kind}.") for name in saved), kind


def test_order_of_experts_is_for_good():
    """Parameters that move together at a call without a backward lie as main_grads do, which later calls need."""
    from uniep.integrations.megatron import _one_tensor_each

    w13, w2 = ([torch.nn.Parameter(torch.randn(shape)) for _ in range(4)] for shape in ((8, 4), (4, 4)))
    for parts in (w13, w2):
        buffer = torch.zeros(4, *parts[0].shape)
        for number, parameter in enumerate(parts):
            parameter.main_grad = buffer[3 - number]  # as in Megatron's DDP
    with torch.no_grad():
        assert _one_tensor_each(w13, w2, True)[2]
    stacked, _, reverse = _one_tensor_each(w13, w2, True)
    assert reverse and torch.equal(stacked[3], w13[0])
