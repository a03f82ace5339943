"""Plain PyTorch on an EP x DP mesh: DDP, FSDP2, clipping and checkpoints, against one process with all tokens."""

import contextlib
import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import case
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from case import config, equal_bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import uniep
from uniep.integrations import torch as uniep_torch

TOKENS = ((9, 5, 4, 7), (6, 0, 11, 3), (2, 8, 8, 2))
"""Per step and rank; rank 1 idles in the second step."""

CPU_ONLY = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


class Block(nn.Module):
    """In the first step the last expert gets no token: of logits a, -a, b, -b, 0 the last is not among the best 2."""

    def __init__(self, workspace, seed, recompute):
        super().__init__()
        self.recompute = recompute
        self.mix = nn.Linear(workspace.cfg.hidden, workspace.cfg.hidden)
        self.moe = uniep.nn.MoE(workspace.cfg, workspace=workspace, seed=seed)
        with torch.no_grad():
            a, b = self.moe.router[:2].clone()
            self.moe.router[-5:] = torch.stack([a, -a, b, -b, 0 * a])

    def inner(self, x):
        return x + self.moe(torch.tanh(self.mix(x)))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)


class Model(nn.Module):
    """Two blocks and a head, the same values at every EP size."""

    def __init__(self, workspace, blocks=2, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block(workspace, seed, recompute) for seed in range(blocks)))
        self.head = nn.Linear(workspace.cfg.hidden, 16)

    def forward(self, x):
        return self.head(self.blocks(x))


def batches():
    """(x, target) of each step, all ranks' tokens one behind the other."""
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(sum(n), 64, generator=g), torch.randint(16, (sum(n),), generator=g)) for n in TOKENS]


def share(rank, tokens):
    return slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))


def loss_of(model, x, target, tokens):
    """The sum over these tokens, divided by the number of all ranks' tokens."""
    return F.cross_entropy(model(x), target, reduction="sum") / tokens


def whole(name, t, mesh, num_experts):
    """The tensor of all experts, or of the dense parameter, from its parts on the ranks."""
    t = t.full_tensor() if isinstance(t, DTensor) else t.detach().clone()
    if "experts" in name and t.dim() and len(t) != num_experts:
        parts = [torch.empty_like(t) for _ in range(mesh["ep"].size())]
        dist.all_gather(parts, t.contiguous(), group=mesh["ep"].get_group())
        t = torch.cat(parts)
    return t.detach().clone()


def all_whole(model, what, mesh, num_experts):
    named = {name.replace("module.", ""): what(p) for name, p in model.named_parameters()}
    assert None not in named.values()
    return {name: whole(name, t, mesh, num_experts) for name, t in named.items()}


def meshes(world, ep, names=("dp", "ep")):
    sizes = {"ep": ep, "dp": world.size // ep}
    mesh = init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names)
    return mesh, init_device_mesh("cpu", (world.size,))


def wrapped(how, model, mesh, world_mesh, experts=None, **options):
    if how == "plain":
        return model
    if how == "ddp":
        return uniep_torch.data_parallel(model, mesh, **options)
    uniep_torch.fully_shard_experts(model, mesh, **options, **(experts or {}))
    for block in model.blocks:
        fully_shard(block, mesh=world_mesh, **options)
    return fully_shard(model, mesh=world_mesh, **options)


ADAMW = {"lr": 1e-2, "eps": 1e-3}  # with a smaller eps, rounding of the smallest gradients becomes steps


@functools.cache
def alone(num_experts=8, bias=True):
    """Gradients, their norm, and the parameters after each step of one process with all tokens."""
    cfg = config(num_experts=num_experts, bias=bias)
    with uniep.Workspace(cfg, device="cpu") as workspace:
        model = Model(workspace)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        found = []
        for x, target in batches():
            optimizer.zero_grad()
            loss_of(model, x, target, len(x)).backward()
            grads = {name: p.grad.clone() for name, p in model.named_parameters()}
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            found.append((grads, norm, {name: p.detach().clone() for name, p in model.named_parameters()}))
        return found


@dataclasses.dataclass(frozen=True)
class Run:
    how: str
    ep: int
    options: dict = dataclasses.field(default_factory=dict)
    micro_batches: int = 1
    synchronize: bool = True
    recompute: bool = False
    compiled: bool = False
    num_experts: int = 8
    replicas: int = 1
    dims: tuple[str, str] = ("dp", "ep")  # the mesh's, from the outer one
    debug: bool = False


RUNS = {
    "ddp": Run("ddp", 2),
    "ddp, ep 4": Run("ddp", 4),
    "ddp, ep 1": Run("ddp", 1),
    "ddp, recomputed": Run("ddp", 2, recompute=True),
    "ddp, accumulated": Run("ddp", 2, micro_batches=2),
    "ddp, accumulated without synchronizing": Run("ddp", 2, micro_batches=3, synchronize=False),
    "ddp, EP outside DP": Run("ddp", 2, dims=("ep", "dp")),
    "ddp, options": Run("ddp", 2, {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1}),
    "ddp, unused parameters": Run("ddp", 2, {"find_unused_parameters": True, "broadcast_buffers": False}),
    "ddp, collectives checked": Run("ddp", 2, debug=True),
    "fsdp2": Run("fsdp2", 2, {"reshard_after_forward": True}),
    "fsdp2, EP outside DP": Run("fsdp2", 2, dims=("ep", "dp")),
    "fsdp2, kept after forward": Run("fsdp2", 2, {"reshard_after_forward": False}),
    "fsdp2, ep 4": Run("fsdp2", 4),
    "fsdp2, ep 1": Run("fsdp2", 1),
    "fsdp2, two replicas of the dense": Run("fsdp2", 2, replicas=2),
    "fsdp2, recomputed": Run("fsdp2", 2, recompute=True),
    "fsdp2, compiled": Run("fsdp2", 2, compiled=True),
    "fsdp2, accumulated": Run("fsdp2", 2, micro_batches=2),
    "fsdp2, accumulated without synchronizing": Run("fsdp2", 2, micro_batches=3, synchronize=False),
    "fsdp2, experts do not divide": Run("fsdp2", 1, num_experts=6),
    "fsdp2, split by columns": Run("fsdp2", 2, {"experts": {"shard_placement_fn": lambda p: Shard(p.dim() - 1)}}),
}


def trained(world, name):
    """As `alone`, each rank with its share of each batch; gradients and parameters gathered whole."""
    run = RUNS[name]
    cfg = config(num_experts=run.num_experts, bias=True)
    if run.debug:
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # groups made from here on compare every collective
    mesh, world_mesh = meshes(world, run.ep, run.dims)
    dist.set_debug_level(dist.DebugLevel.OFF)
    if run.replicas > 1:
        world_mesh = init_device_mesh("cpu", (run.replicas, world.size // run.replicas), mesh_dim_names=("r", "s"))
    with uniep.Workspace(cfg, mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
        model = Model(workspace, recompute=run.recompute)
        if run.compiled:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        model = wrapped(run.how, model, mesh, world_mesh, **run.options)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        calls = []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad is not None))
        found = []
        for (x, target), tokens in zip(batches(), TOKENS, strict=True):
            optimizer.zero_grad()
            mine = share(world.rank, tokens)
            pieces = [t[mine].tensor_split(run.micro_batches) for t in (x, target)]
            for number, (a, b) in enumerate(zip(*pieces, strict=True)):
                synchronize = run.synchronize or number == run.micro_batches - 1
                if run.how == "fsdp2":
                    model.set_requires_gradient_sync(synchronize)
                with contextlib.nullcontext() if synchronize or run.how == "fsdp2" else model.no_sync():
                    # Wrappers take the mean over ranks, so this rank's part counts once for each rank.
                    loss_of(model, a, b, len(x) / world.size).backward()
            grads = all_whole(model, lambda p: p.grad, mesh, cfg.num_experts)
            norm = uniep_torch.clip_grad_norm_(*uniep_torch.split_parameters(model), 0.1, mesh["ep"])
            optimizer.step()
            found.append((grads, norm, all_whole(model, lambda p: p, mesh, cfg.num_experts)))
        if run.synchronize:
            assert all(calls) and len(calls) == len(TOKENS) * run.micro_batches * len(list(model.parameters())), calls
        return found


SMOKE = {"ddp", "fsdp2"}


@pytest.mark.parametrize("run", [pytest.param(run, marks=pytest.mark.smoke) if run in SMOKE else run for run in RUNS])
def test_as_one_process(pool, run):
    """50, 51, 80, 81, 103, 111, 113: gradients, norm, clipped steps; a rank and an expert idle; each hook runs once."""
    want = alone(RUNS[run].num_experts)
    first, second = (pool.run(trained, run) for _ in range(2))
    for rank, steps in enumerate(first):
        for step, ((grads, norm, after), (ref_grads, ref_norm, ref_after)) in enumerate(zip(steps, want, strict=True)):
            assert grads.keys() == ref_grads.keys()
            for name, ref in ref_grads.items():
                torch.testing.assert_close(grads[name], ref, rtol=2e-5, atol=1e-6 * float(ref.abs().max()))
                torch.testing.assert_close(after[name], ref_after[name], rtol=1e-4, atol=1e-4)
                if "experts" in name and step == 0:
                    assert not grads[name][-1].any() and grads[name][0].any(), f"{name}: idle, busy expert"
                equal_bits(grads[name], second[rank][step][0][name], f"rerun: step {step}, {name}")
                equal_bits(after[name], first[0][step][2][name], f"rank {rank}, step {step}, {name}")
            torch.testing.assert_close(norm, ref_norm)
            equal_bits(norm, first[0][step][1], f"norm of rank {rank}")


def frozen(world, how):
    """Norm and gradients of a step without w13 of the first block and all experts of the second."""
    mesh, world_mesh = meshes(world, 2)
    (x, target), mine = batches()[0], share(world.rank, TOKENS[0])
    with uniep.Workspace(config(bias=True), mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
        model = Model(workspace)
        for p in (model.blocks[0].moe.experts.w13, *model.blocks[1].moe.experts.parameters()):
            p.requires_grad_(False)
        model = wrapped(how, model, mesh, world_mesh)
        loss_of(model, x[mine], target[mine], len(x) / world.size).backward()
        norm = uniep_torch.clip_grad_norm_(*uniep_torch.split_parameters(model), 1e9, mesh["ep"])
        grads = {name.replace("module.", ""): p.grad for name, p in model.named_parameters()}
        return norm, {name: None if g is None else whole(name, g, mesh, 8) for name, g in grads.items()}


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_54_frozen_experts(pool, how):
    """54: the others' gradients are as ever, and the norm is theirs."""
    want = alone()[0][0]
    for norm, grads in pool.run(frozen, how):
        none = {name for name, g in grads.items() if g is None}
        still = (0, "w13"), *((1, name) for name in ("w13", "w2", "b13", "b2"))
        assert none == {f"blocks.{block}.moe.experts.{name}" for block, name in still}
        rest = {name: g for name, g in want.items() if name not in none}
        for name, ref in rest.items():
            torch.testing.assert_close(grads[name], ref, rtol=2e-5, atol=1e-6 * float(ref.abs().max()))
        torch.testing.assert_close(norm, torch.stack([g.norm() for g in rest.values()]).norm())


def mixed_precision(world):
    """dtypes of what the experts got, whether routing weights were rounded, dtypes of parameters and gradients."""
    mesh, world_mesh = meshes(world, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with uniep.Workspace(config(dtype=torch.bfloat16), mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
        model = wrapped("fsdp2", Model(workspace).float(), mesh, world_mesh, mp_policy=policy)
        experts, seen = model.blocks[0].moe.experts, []
        experts.register_forward_pre_hook(lambda module, args: seen.extend([*args, module.w13]))
        experts.register_forward_hook(lambda module, args, y: seen.append(y))
        model(torch.randn(5, 64)).sum().backward()
        x, _, weights, w13, y = seen
        rounded = bool((weights == weights.bfloat16()).all())
        return [t.dtype for t in (x, weights, w13, y, experts.w13, experts.w13.grad)], rounded


def test_mixed_precision(pool):
    """fp32 parameters computed in bf16: routing weights reach the layer in fp32, not by way of bf16."""
    half, single = torch.bfloat16, torch.float32
    for dtypes, rounded in pool.run(mixed_precision):
        assert dtypes == [half, single, half, half, single, single] and not rounded


def clipped(world, second, norm_type):
    """Norm and gradients: dense [84] everywhere; experts [3, 4] on rank 0 and `second` on rank 1."""
    dense, expert = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2 - world.rank))
    dense.grad = torch.full((1,), 84.0)
    expert.grad = torch.tensor([3.0, 4.0]) if world.rank == 0 else second
    norm = uniep_torch.clip_grad_norm_([dense], [expert], 1.0, world.group(2), norm_type=norm_type)
    return float(norm), dense.grad, expert.grad


@pytest.mark.parametrize(
    ("second", "norm_type", "want"),
    [(12.0, 2.0, 85.0), (0.0, 2.0, 7081**0.5), (None, 2.0, 7081**0.5), (12.0, float("inf"), 84.0), (12.0, 1.0, 103.0)],
)
def test_51_clip_norm(pool, second, norm_type, want):
    """Dense parameters count once, experts of all ranks; ranks agree, also where one has no gradient."""
    other = None if second is None else torch.tensor([second])
    for rank, (norm, dense, expert) in enumerate(pool.run(clipped, other, norm_type, ranks=2)):
        assert norm == pytest.approx(want, rel=1e-6)
        torch.testing.assert_close(dense, torch.tensor([84.0]) / want)
        unclipped = (torch.tensor([3.0, 4.0]), other)[rank]
        assert (expert is None) == (unclipped is None)
        if expert is not None:
            torch.testing.assert_close(expert, unclipped / want)


def cut(world, norm_type):
    """Norm and this rank's rows of a gradient [3, 4, 12] over four ranks, the last of which has none."""
    mesh = init_device_mesh("cpu", (world.size,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.tensor([3.0, 4.0, 12.0]), mesh, [Shard(0)])
    norm = uniep_torch.clip_grad_norm_([parameter], [], 1.0, None, norm_type=norm_type)
    return float(norm), parameter.grad.to_local().tolist()


@pytest.mark.smoke
@pytest.mark.parametrize(("norm_type", "want"), [(2.0, 13.0), (float("inf"), 12.0)])
def test_clip_where_a_rank_has_no_rows(pool, norm_type, want):
    """As FSDP2 leaves it of a bias shorter than the ranks; the largest of no numbers is an error in PyTorch."""
    for rank, (norm, rows) in enumerate(pool.run(cut, norm_type, timeout=60)):
        assert norm == want
        assert rows == pytest.approx([n / want for n in (3.0, 4.0, 12.0)[rank : rank + 1]])


def not_clipped(world):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([0.3, float(world.rank)])
    before = parameter.grad.clone()
    norm = uniep_torch.clip_grad_norm_([], [parameter], 100.0, world.group(2))
    assert torch.equal(parameter.grad, before) and float(norm) == pytest.approx((2 * 0.09 + 1) ** 0.5)
    parameter.grad = torch.tensor([0.3, float("inf") if world.rank else 1.0])
    try:
        uniep_torch.clip_grad_norm_([parameter], [], 1.0, None, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error), float(parameter.grad[0])


@pytest.mark.smoke
def test_clip_within_and_not_finite(pool):
    """Small gradients stay as they are; a norm that is not finite raises, if asked to, before anything is scaled."""
    fine, raised = pool.run(not_clipped, ranks=2)
    assert fine is None and "norm is inf" in raised[0] and raised[1] == pytest.approx(0.3)


def state_of(model, optimizer, mesh, x):
    """Parameters and Adam's averages gathered whole, and this rank's output."""
    state = {"parameters": all_whole(model, lambda p: p, mesh, 8)}
    for moment in ("exp_avg", "exp_avg_sq", "step"):
        state[moment] = all_whole(model, lambda p, moment=moment: optimizer.state[p][moment], mesh, 8)
    with torch.no_grad():
        return state, model(x), optimizer.param_groups[0]["lr"]


def resharded(world, folder, hows):
    """Train one step, save; then load what the one before saved into a model full of NaN, and save again."""
    found = []
    x, target = batches()[0]
    for number, (how, ep) in enumerate(hows):
        mesh, world_mesh = meshes(world, ep)
        with uniep.Workspace(config(), mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
            model = wrapped(how, Model(workspace), mesh, world_mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1.0 if found else 1e-2)
            state = {"train": uniep_torch.TrainState(model, optimizer, mesh["ep"])}
            if not found:
                loss_of(model, x, target, len(x)).backward()
                optimizer.step()
            else:
                with torch.no_grad():
                    for p in model.parameters():
                        p.fill_(case.POISON)
                dcp.load(state, checkpoint_id=f"{folder}/{number - 1}")
            dcp.save(state, checkpoint_id=f"{folder}/{number}")
            names = sorted(dcp.FileSystemReader(f"{folder}/{number}").read_metadata().state_dict_metadata)
            found.append((*state_of(model, optimizer, mesh, x[share(world.rank, TOKENS[0])]), names))
    return found


@pytest.mark.parametrize(
    "hows",
    [
        [("ddp", 2), ("fsdp2", 1), ("fsdp2", 4), ("ddp", 4)],
        [("fsdp2", 2), ("ddp", 1), ("plain", 4), ("fsdp2", 2)],
    ],
    ids=["from ddp", "from fsdp2"],
)
def test_78_checkpoints_at_other_sizes(pool, tmp_path, hows):
    """EP 2, 1, 4: parameters, optimizer and outputs bit for bit, whatever wrapped the model; names do not change."""
    for rank, (saved, *loaded) in enumerate(pool.run(resharded, str(tmp_path), hows)):
        state, y, lr, names = saved
        assert not any(t.isnan().any() for t in state["parameters"].values()) and lr == 1e-2
        assert "train.model.blocks.0.moe.experts.w13" in names
        for (how, ep), (other, other_y, other_lr, other_names) in zip(hows[1:], loaded, strict=True):
            for kind, tensors in state.items():
                for name, t in tensors.items():
                    equal_bits(other[kind][name], t, f"{how} at EP {ep}, rank {rank}: {kind} of {name}")
            equal_bits(other_y, y, f"output of {how} at EP {ep}")
            assert (other_lr, other_names) == (lr, names)


def incomplete(world, folder):
    """Errors of loading more experts than were saved, and another layer."""
    mesh, _ = meshes(world, 2)
    errors = []
    for experts, blocks in ((8, 1), (16, 1), (8, 2)):
        cfg = config(num_experts=experts)
        with uniep.Workspace(cfg, mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
            state = {"train": uniep_torch.TrainState(Model(workspace, blocks), None, mesh["ep"])}
            if not errors:
                dcp.save(state, checkpoint_id=folder)
            try:
                dcp.load(state, checkpoint_id=folder)
                errors.append("")
            except BaseException as error:  # dcp's CheckpointException is not an Exception
                errors.append(str(error))
    return errors


def test_78_what_a_checkpoint_lacks(pool, tmp_path):
    for complete, experts, layer in pool.run(incomplete, str(tmp_path)):
        assert complete == ""
        assert re.search(r"Size mismatch.*\[8, .*\[16, ", experts, re.S), experts
        assert re.search(r"Missing key.*train\.model\.blocks\.1\.", layer), layer


def test_example(tmp_path):
    """The example trains with 2 processes, and goes on with one, behind the last step."""
    example = Path(__file__).parents[2] / "examples/fsdp2_train.py"
    losses = []
    for ranks, arguments in ((2, ["--steps", "21", "--save"]), (1, ["--steps", "1", "--ep", "1", "--load"])):
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(example)]
        command = [*run, "--layers", "1", *arguments, str(tmp_path / "checkpoint")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=CPU_ONLY)
        assert done.returncode == 0, done.stderr
        losses += [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert "resumed at step 21\nstep  21 " in done.stdout, done.stdout
    before, after, later = losses
    assert before > 5 and after < 3.5 and later < 3.5, losses


def test_example_of_equal_bits(tmp_path):
    """Parameters, gradients, states, losses and norms of another EP size, as `uniep diff` compares them."""
    example = Path(__file__).parents[2] / "examples/equal_bits.py"
    printed = set()
    for ranks in (1, 4):
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(example)]
        command = [*run, "--steps", "3", "--out", str(tmp_path / str(ranks))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=CPU_ONLY)
        assert done.returncode == 0, done.stderr
        printed.add(done.stdout)
    assert len(printed) == 1 and done.stdout.count("loss") == 3
    differ = [sys.executable, "-m", "uniep", "diff", str(tmp_path / "1"), str(tmp_path / "4")]
    done = subprocess.run(differ, capture_output=True, text=True, timeout=60, env=CPU_ONLY)
    assert done.returncode == 0 and "identical" in done.stdout and "not compared" not in done.stdout, done.stdout


def refused(world):
    mesh, world_mesh = meshes(world, 2)
    attempts = {}

    def attempt(name, function, *args, **kwargs):
        attempts[name] = case.named_error(lambda: function(*args, **kwargs))

    cfg, options = config(), {"device": "cpu", "timeout_s": case.TIMEOUT_S}
    with (
        uniep.Workspace(cfg, mesh["ep"], **options) as workspace,
        uniep.Workspace(cfg, world_mesh, **options) as everyone,
    ):
        model, layers = Model(workspace), nn.Linear(2, 2)
        for name, function in (("ddp", uniep_torch.data_parallel), ("fsdp2", uniep_torch.fully_shard_experts)):
            attempt(f"{name}: no experts", function, layers, mesh)
            attempt(f"{name}: another group", function, Model(everyone), mesh)
            attempt(f"{name}: no such dimension", function, model, mesh, dp="data")
            model.blocks[1].moe.experts.main_grad = "accumulate"
            attempt(f"{name}: main_grad", function, model, mesh)
            model.blocks[1].moe.experts.main_grad = None
        attempt("ddp: itself", uniep_torch.data_parallel, model.blocks[0].moe.experts, mesh)
        attempt("split: no experts", uniep_torch.split_parameters, layers)
        attempt("checkpoint: another group", uniep_torch.TrainState, model, None, world_mesh)
        dense, experts = uniep_torch.split_parameters(model)
        attempt("clip: negative", uniep_torch.clip_grad_norm_, dense, experts, -1.0, mesh["ep"])
        attempt("clip: nothing", uniep_torch.clip_grad_norm_, iter([]), [], 1.0, mesh["ep"])
        for name, arguments in {
            "swapped": (experts, dense, 1.0, mesh["ep"]),
            "no group": (dense, experts, 1.0, None),
            "all dense": (model.parameters(), [], 1.0, None),
            "all dense, group": (model.parameters(), [], 1.0, mesh["ep"]),
            "all experts": ([], model.parameters(), 1.0, mesh["ep"]),
            "dp": (dense, experts, 1.0, mesh["dp"]),
            "all ranks": (dense, experts, 1.0, dist.group.WORLD),
            "two dimensions": (dense, experts, 1.0, mesh),
        }.items():
            attempt(f"clip: {name}", uniep_torch.clip_grad_norm_, *arguments)
        first = model.blocks[0].moe.experts
        first.scale, first.expert_dims["scale"] = nn.Parameter(torch.ones(())), None
        attempt("clip: shared", uniep_torch.clip_grad_norm_, [], [*experts, first.scale], 1.0, mesh["ep"])
        del first.scale
        attempt("share: None", uniep_torch.share_nonfinite_, experts, None)
        attempt("TrainState: two dimensions", uniep_torch.TrainState, model, None, mesh)
        attempt("TrainState: None", uniep_torch.TrainState, model, None, None)
        attempt("distribute: two dimensions", uniep_torch.distribute_experts, model, mesh)
        attempt("fsdp2: no mesh", uniep_torch.fully_shard_experts, model, None)
        attempt("ddp: no mesh", uniep_torch.data_parallel, model, dist.group.WORLD)
        attempt("ddp: a group", uniep_torch.data_parallel, model, mesh, process_group=None)
        attempt("ddp: a mesh", uniep_torch.data_parallel, model, mesh, device_mesh=mesh["dp"])
        third = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "ep"))
        attempt("ddp: few ranks", uniep_torch.data_parallel, model, third["dp", "ep"])
        uniep_torch.fully_shard_experts(model, mesh)
        attempt("ddp: sharded", uniep_torch.data_parallel, model, mesh)
        attempt("reset: sharded", model.blocks[0].moe.experts.reset_parameters)
    return attempts


@pytest.mark.smoke
def test_refusals(pool):
    """79: what cannot work, or would do nothing, is refused by name before anything changes."""
    texts = {
        "no experts": "no uniep.nn.Experts in this Linear",
        "another group": "blocks.[01].moe.experts exchanges tokens among ranks",
        "no such dimension": "needs 'data' and 'ep'",
        "main_grad": "blocks.1.moe.experts has main_grad='accumulate'",
        "negative": "max_norm is -1.0",
        "nothing": "no parameters to clip",
        "itself": "is itself an Experts",
        "few ranks": "the mesh has 2 ranks but the job has 4",
        "a group": "process_group is decided by the mesh",
        "a mesh": "device_mesh is decided by the mesh",
        "swapped": r"dense\[0\] is w13 of experts [04]..[37] of 8, which are spread over 2 ranks, and would count",
        "no group": r"experts\[0\] is w13 of .* would count on this rank alone.*and the EP group",
        "all dense": r"dense\[3\] is w13 of .* would count on this rank alone",
        "all dense, group": r"dense\[3\] is w13 of .* would count on this rank alone",
        "all experts": r"experts\[0\], of shape \(64, 64\), is in no uniep.nn.Experts, and would count once for each",
        "dp": r"experts\[0\] is w13 .*over 2 ranks \[[02], [13]\], but ep_group is of ranks \[[01], [23]\]",
        "all ranks": r"experts\[0\] is w13 .*over 2 ranks .*, but ep_group is of ranks \[0, 1, 2, 3\]",
        "shared": r"experts\[4\], of shape \(\), is scale, which all experts share, and would count once for each of",
        "None": r"(ep_group|ep_mesh) is None; pass mesh\['ep'\]",
        "two dimensions": r"(ep_group|ep_mesh) is a DeviceMesh of 2 dimensions \('dp', 'ep'\); pass one of them",
        "no mesh": "mesh is a (NoneType|ProcessGroup); pass a DeviceMesh of two named dimensions",
        "sharded": "fully_shard_experts|before sharding",
    }
    for attempts in pool.run(refused):
        for name, error in attempts.items():
            assert error is not None, name
            assert re.search(texts[name.partition(": ")[2]], error[1]), (name, error)
            assert error[0] == (
                "UnsupportedError" if name in ("ddp: main_grad", "fsdp2: main_grad", "ddp: sharded") else "ConfigError"
            )
