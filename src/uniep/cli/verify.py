"""`uniep verify`: the bit table for one shape, and its error beside PyTorch's own."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich import box
from rich.table import Table
from torch import Tensor

import uniep
from uniep.cli import launch, rollout, summary
from uniep.cli.bits import BitTable, Digests, digest, merge, verdict
from uniep.cli.launch import World
from uniep.cli.options import (
    Activation,
    Bias,
    DType,
    Dtype,
    Ffn,
    Groups,
    Hidden,
    JsonFile,
    Limit,
    NumExperts,
    Seed,
    ShapeOrSizes,
    Tokens,
    TopK,
    Weight,
    WeightAt,
    check_file,
    layer_sizes,
    numbers,
    write_json,
)
from uniep.cli.progress import progress
from uniep.cli.proof import schedules
from uniep.config import COLUMN_GROUP
from uniep.reference import composition
from uniep.schedule import is_valid

QUANTITIES = ("y", "dx", "dweights", "dw13", "dw2")
BIASES = ("db13", "db2")
"""Further quantities, of experts with biases."""
WORST_RATIO = 2.0
"""Largest allowed error against the precise result, relative to the error of the PyTorch composition in that dtype."""
FEW = 64
"""With fewer values than this, or fewer activations behind them, an error is mostly luck."""
ORDERS = 8
"""Number of orders in which PyTorch's sums are tried where one of its errors is small."""


def verify(
    context: typer.Context,
    shape: ShapeOrSizes = None,
    hidden: Hidden = 512,
    ffn: Ffn = 256,
    num_experts: NumExperts = 16,
    top_k: TopK = 4,
    tokens: Tokens = 1024,
    dtype: Dtype = DType.bf16,
    activation: Activation = "swiglu",
    activation_limit: Limit = None,
    bias: Bias = False,
    weight_at: Weight = WeightAt.output,
    combine_groups: Groups = None,
    ep: Annotated[str, typer.Option(help="EP sizes to compare; EP=1 is always included.")] = "1,2,4",
    seed: Seed = 0,
    rl: Annotated[
        bool,
        typer.Option("--rl", help="Compare a policy's log-probabilities when it is sampled and when it is trained."),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Compare bits and errors across EP sizes and schedules for one shape.

    Forward and backward of one layer on random data: y, dx, dweights, dw13, dw2, and db13, db2. The same global
    tokens, routing and experts are split over 1, 2, 4 ... ranks and run under several
    schedules; every bit must equal EP=1, serial. The error against a more precise run (fp32; fp64 for
    fp32 layers) must be at most twice that of a plain PyTorch composition in the layer's dtype. The exit
    status is 1 if anything differs or is less accurate.

    With --rl: a small language model of that shape samples sequences at each EP size, one position at a time.
    Then it is trained on them at each EP size, all positions together. Every bit of the tokens' log-probabilities,
    the routing and the expert gradients must be the same.

    The last lines are a summary for an issue.
    """
    check_file(json_file, "--json")
    sizes = sorted({1, *numbers(ep, "--ep")})
    cfg = uniep.MoEConfig(
        **layer_sizes(context, shape, sizes[-1]),
        max_tokens_per_rank=tokens,
        dtype=dtype.torch,
        activation=activation,
        activation_limit=activation_limit,
        bias=bias,
        weight_at=weight_at.value,
        combine_groups=combine_groups,
    )
    for size in sizes:
        cfg.check_group(size)
    if rl:
        rollout.check(cfg, tokens, sizes)
    backend = launch.backend()
    if not launch.under_torchrun():
        launch.run_again(launch.most_ranks(sizes[-1]))
    with launch.ranks() as world:
        possible = [size for size in sizes if size <= world.size]
        groups = {size: world.first(size) for size in possible}
        say = world.console.print
        missing = [size for size in sizes if size not in groups]
        layer = _describe(cfg, tokens)
        document: dict[str, Any] = {"layer": layer, "backend": backend, "ep": [*groups], "not_compared": missing}
        accurate, ratio, errors, few = True, 0.0, {}, []
        if rl:
            wrong = rollout.compare(cfg, tokens, seed, world, groups)
        else:
            problem = _problem(cfg, tokens, math.lcm(*sizes), seed, world)
            compared = [s for s in schedules(backend) if not is_valid(s, cfg, sizes[-1], backend)]
            wrong, results = _compare(problem, world, groups, compared)
            errors = _errors(problem, world, results) if world.rank == 0 else {}
            ratio = max((of["ratio"] for of in errors.values() if of["judged"]), default=0.0)
            few = [name for name, of in errors.items() if not of["judged"]]
            accurate = ratio <= WORST_RATIO
            document["errors"] = errors
        if missing:
            say(f"[yellow]not compared[/yellow]: EP {', '.join(map(str, missing))}; {world.shortage}")
        result = f"{len(wrong)} parts differ ({'; '.join(wrong[:3])})" if wrong else "all bits equal"
        if not rl:
            say(verdict(not wrong, groups, backend))
            judged = len(few) < len(errors)
            result += f"; largest error {ratio:.2f} times PyTorch's (limit {WORST_RATIO})" if judged else ""
            unknown = f"too few values to judge the error of {', '.join(few)} (fewer than {FEW})" if few else ""
            result += f"; {unknown}" if few else ""
            if not judged:
                say(f"[yellow]accuracy not judged[/yellow]: {unknown}; raise --tokens or the sizes")
            elif accurate:
                also = f"; {unknown}" if few else ""
                say(f"[bold green]accurate[/bold green]: no error is over {ratio:.2f} times PyTorch's{also}")
            else:
                say(
                    f"[bold red]NOT accurate[/bold red]: an error is {ratio:.2f} times PyTorch's; the limit: "
                    f"{WORST_RATIO}"
                )
        if world.rank == 0:
            summary.say([layer, f"EP {', '.join(map(str, groups))}, backend {backend}: {result}"])
            document |= {"command": summary.command_line(), "differ": wrong, "machine": summary.machine()}
            write_json(json_file, document)
        passed = all(world.gather(not wrong and accurate))
    raise typer.Exit(0 if passed else 1)


def _problem(cfg: uniep.MoEConfig, tokens: int, num_shards: int, seed: int, world: World) -> Problem:
    """Raises ConfigError on every rank, with the reason on rank 0, if one rank runs out of memory."""
    problem, reason = None, ""
    try:
        problem = Problem(cfg, tokens, num_shards, seed)
    except (RuntimeError, MemoryError) as error:  # torch has no error class for CPU memory
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    reasons = [theirs for theirs in world.gather(reason) if theirs]
    if reasons and world.rank > 0:
        raise typer.Exit(2)
    if reasons or problem is None:
        raise uniep.ConfigError(
            f"this shape needs more memory than there is; lower --tokens or the widths ({reasons[0]})"
        )
    return problem


@dataclasses.dataclass(frozen=True)
class Results:
    """What one rank holds after forward and backward: rows of its shards, matrices of its experts."""

    shards: range
    shard_sizes: list[int]
    experts: range
    tensors: dict[str, Tensor]

    def digests(self) -> Digests:
        """Digests per shard and per expert, so that EP sizes can be compared."""
        out: Digests = {}
        for name, tensor in self.tensors.items():
            if name in ("dw13", "dw2", *BIASES):
                out |= {(name, f"expert {e}"): digest(part) for e, part in zip(self.experts, tensor, strict=True)}
            else:
                parts = tensor.split(self.shard_sizes)
                out |= {(name, f"shard {s}"): digest(part) for s, part in zip(self.shards, parts, strict=True)}
        return out


class Problem:
    """One global batch: x and dy (T, D), ids and weights (T, K), and all experts' parameters; quantities: what a step
    gives.

    num_shards: a multiple of every EP size, so that a rank's tokens are always whole shards.
    The routing is uneven, and one slot in 32 is unused.
    """

    def __init__(self, cfg: uniep.MoEConfig, tokens: int, num_shards: int, seed: int) -> None:
        self.cfg = cfg
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw)

        self.x, self.dy = (normal(tokens, cfg.hidden).to(cfg.dtype) for _ in range(2))
        logits = normal(tokens, cfg.num_experts) + normal(cfg.num_experts)
        self.weights, ids = torch.softmax(logits, -1).topk(cfg.top_k)
        self.ids = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 1 / 32, -1)
        self.w13 = (normal(cfg.num_experts, cfg.h_columns, cfg.hidden) * cfg.hidden**-0.5).to(cfg.dtype)
        self.w2 = (normal(cfg.num_experts, cfg.hidden, cfg.ffn) * cfg.ffn**-0.5).to(cfg.dtype)
        widths = (cfg.h_columns, cfg.hidden) if cfg.bias else ()
        self.biases = tuple(normal(cfg.num_experts, width).to(cfg.dtype) for width in widths)
        self.quantities = (*QUANTITIES, *BIASES) if cfg.bias else QUANTITIES
        self.back: dict[str, tuple[Any, ...]] = {}  # where `in_another_order` put each part
        self.num_shards = num_shards
        self.shard_sizes = [len(part) for part in torch.arange(tokens).tensor_split(num_shards)]

    def run(self, workspace: uniep.Workspace) -> Results:
        """Forward and backward of this rank's part of the batch."""
        rank, size = workspace.rank, workspace.ep_size
        units = (self.num_shards, self.cfg.num_experts)
        shards, experts = (range(rank * n // size, (rank + 1) * n // size) for n in units)
        sizes = [self.shard_sizes[s] for s in shards]
        tokens = slice(start := sum(self.shard_sizes[: shards.start]), start + sum(sizes))
        local = slice(experts.start, experts.stop)

        def leaf(part: Tensor) -> Tensor:
            return part.to(workspace.device, copy=True).requires_grad_()

        x, weights = leaf(self.x[tokens]), leaf(self.weights[tokens])
        w13, w2, *biases = (leaf(t[local]) for t in (self.w13, self.w2, *self.biases))
        b13, b2 = biases or (None, None)
        y = uniep.moe(x, self.ids[tokens].to(x.device), weights, w13, w2, workspace=workspace, b13=b13, b2=b2)
        grads = torch.autograd.grad(y, (x, weights, w13, w2, *biases), self.dy[tokens].to(x.device))
        return Results(shards, sizes, experts, dict(zip(self.quantities, (y.detach(), *grads), strict=True)))

    def composition(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The same formulas with plain PyTorch operators and autograd, in `dtype`."""
        x, w13, w2, *biases = (
            t.to(dtype, copy=True).requires_grad_() for t in (self.x, self.w13, self.w2, *self.biases)
        )
        weights = self.weights.to(torch.promote_types(dtype, torch.float32), copy=True).requires_grad_()
        how = (self.cfg.weight_at, self.cfg.activation, self.cfg.activation_limit, tuple(biases) or None)
        y = composition(x, self.ids, weights, w13, w2, *how)
        grads = torch.autograd.grad(y, (x, weights, w13, w2, *biases), self.dy.to(dtype))
        found = dict(zip(self.quantities, (y.detach(), *grads), strict=True))
        return {name: tensor[self.back[name]] if self.back else tensor for name, tensor in found.items()}

    def in_another_order(self, number: int) -> Problem:
        """The same problem, with tokens and columns padded by zeros to full tiles.  0: zeros last; else shuffled.

        For one column or row PyTorch uses other kernels than for many, and their partial sums differ.
        """
        cfg, draw = self.cfg, torch.Generator().manual_seed(number)
        tile, experts = COLUMN_GROUP, cfg.num_experts

        def places(used: int, count: int) -> Tensor:
            return (torch.randperm(count, generator=draw) if number else torch.arange(count))[:used]

        columns, ffn = (places(width, -(-width // tile) * tile) for width in (cfg.hidden, cfg.ffn))
        rows = places(len(self.x), len(self.x) + experts * tile)
        hidden, half = (-(-width // tile) * tile for width in (cfg.hidden, cfg.ffn))
        both = torch.cat([ffn, half + ffn]) if cfg.gated else ffn
        ids = torch.full((len(self.x) + experts * tile, cfg.top_k), -1)
        idle = torch.ones(len(ids), dtype=torch.bool).index_fill(0, rows, False)
        ids[idle, 0] = torch.arange(experts).repeat_interleave(tile)
        ids[rows] = self.ids

        def placed(values: Tensor, *shape: int, at: tuple[Any, ...]) -> Tensor:
            return values.new_zeros(shape).index_put(at, values)

        made, every = copy.copy(self), torch.arange(experts)[:, None, None]
        made.ids = ids
        made.x, made.dy = (placed(t, len(ids), hidden, at=(rows[:, None], columns)) for t in (self.x, self.dy))
        made.weights = placed(self.weights, *ids.shape, at=(rows,))
        halves = (1 + cfg.gated) * half
        made.w13 = placed(self.w13, experts, halves, hidden, at=(every, both[:, None], columns))
        made.w2 = placed(self.w2, experts, hidden, half, at=(every, columns[:, None], ffn))
        made.back = {
            "y": (rows[:, None], columns),
            "dx": (rows[:, None], columns),
            "dweights": (rows,),
            "dw13": (every, both[:, None], columns),
            "dw2": (every, columns[:, None], ffn),
            "db13": (every[:, 0], both),
            "db2": (every[:, 0], columns),
        }
        places_of = ((both, halves), (columns, hidden))
        made.biases = tuple(
            placed(bias, experts, width, at=(every[:, 0], at))
            for bias, (at, width) in zip(self.biases, places_of, strict=False)
        )
        return made


def _compare(
    problem: Problem,
    world: World,
    groups: dict[int, dist.ProcessGroup | None],
    schedules: Sequence[uniep.Schedule],
) -> tuple[list[str], dict[str, Tensor]]:
    """Print the bit table.  Returns the parts that differ, and this rank's results of the first run."""
    layer = _describe(problem.cfg, len(problem.x))
    table = BitTable(f"Parts with the bits of EP=1 serial/natural\n{layer}", problem.quantities)
    first: dict[str, Tensor] = {}
    runs = [(size, schedule) for size in groups for schedule in schedules]
    with progress(world.console, "verified", len(runs)) as done:
        for size, schedule in runs:
            mine: Digests = {}
            if world.rank < size:
                with uniep.Workspace(problem.cfg, groups[size], device=world.device, schedule=schedule) as workspace:
                    results = problem.run(workspace)
                mine, first = results.digests(), first or results.tensors
            table.add(size, schedule.name, merge(world.gather(mine)))
            done()
    table.print(world.console)
    return table.wrong, first


def _errors(problem: Problem, world: World, results: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Print both errors against a more precise run.  Returns them for each quantity, with the ratio of our error to
    PyTorch's, infinite if one is NaN, and whether that is judged.

    PyTorch's error may be small by luck, or because it has a special kernel for narrow shapes.  Where ours is larger
    than allowed, PyTorch's error is taken as the largest over several orders of its sums.  Fewer than `FEW` values are
    not judged.
    """
    precise_dtype = torch.float64 if problem.cfg.dtype == torch.float32 else torch.float32
    precise = problem.composition(precise_dtype)
    plain = problem.composition(problem.cfg.dtype)
    name = str(precise_dtype).removeprefix("torch.")
    world.console.print(f"[italic]Relative error |result - {name}| / |{name}|[/italic]")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", "uniep", "PyTorch", "ratio"):
        table.add_column(column, justify="right" if column else "left")

    def error(of: dict[str, Tensor], quantity: str) -> float:
        exact = precise[quantity].double()  # all zero where no slot is in use
        return float((of[quantity].cpu().double() - exact).norm()) / (float(exact.norm()) or 1.0)

    names = problem.quantities
    ours, theirs = ({quantity: error(of, quantity) for quantity in names} for of in (results, plain))
    if any(math.isfinite(ours[q]) and ours[q] > WORST_RATIO * theirs[q] for q in names):
        for number in range(ORDERS):
            other = problem.in_another_order(number).composition(problem.cfg.dtype)
            theirs = {quantity: max(theirs[quantity], error(other, quantity)) for quantity in names}
    activations = int((problem.ids >= 0).sum()) * problem.cfg.ffn
    found = {}
    for quantity in names:
        ratio = ours[quantity] / theirs[quantity] if theirs[quantity] else (math.inf if ours[quantity] else 1.0)
        if not math.isfinite(ours[quantity]):
            ratio = math.inf
        judged = min(precise[quantity].numel(), activations) >= FEW or not math.isfinite(ratio)
        found[quantity] = {"uniep": ours[quantity], "PyTorch": theirs[quantity], "ratio": ratio, "judged": judged}
        colour = "red" if judged and ratio > WORST_RATIO else "green"
        shown = f"[{colour}]{ratio:.2f}[/{colour}]" if judged else f"({ratio:.2f})"
        table.add_row(quantity, f"{ours[quantity]:.2e}", f"{theirs[quantity]:.2e}", shown)
    world.console.print(table)
    return found


def _describe(cfg: uniep.MoEConfig, tokens: int) -> str:
    return (
        f"hidden {cfg.hidden}, ffn {cfg.ffn}, {cfg.num_experts} experts, top-{cfg.top_k}, {tokens} tokens, "
        f"{str(cfg.dtype).removeprefix('torch.')}, {cfg.activation}, weight_at {cfg.weight_at}"
        + (f", gate and up up to {cfg.activation_limit:g}" if cfg.activation_limit is not None else "")
        + ", biases" * cfg.bias
        + (f", {cfg.combine_groups} combine groups" if cfg.combine_groups else "")
    )
