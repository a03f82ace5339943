"""`uniep lora`: memory and time of training experts by low-rank factors, against training them whole."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich import box
from rich.table import Table
from torch import Tensor

import uniep
from uniep.cli import launch, summary
from uniep.cli.launch import World
from uniep.cli.options import (
    DType,
    Dtype,
    Ffn,
    Hidden,
    JsonFile,
    NumExperts,
    ShapeOrSizes,
    Tokens,
    TopK,
    check_file,
    check_lora,
    layer_sizes,
    numbers,
    write_json,
)
from uniep.cli.progress import progress

WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one rank: elements that are trained; bytes of all weights of the experts, of gradients, of AdamW's states and,
    on a GPU, the most that was allocated in a step; seconds of a step's parts."""

    trained: int
    weights: int
    gradients: int
    states: int
    peak: int
    seconds: dict[str, float]


def lora(
    context: typer.Context,
    shape: ShapeOrSizes = None,
    hidden: Hidden = 512,
    ffn: Ffn = 256,
    num_experts: NumExperts = 16,
    top_k: TopK = 4,
    tokens: Tokens = 1024,
    dtype: Dtype = DType.bf16,
    rank: Annotated[str, typer.Option(help="LoRA ranks r to compare with full training.")] = "8,128",
    ep: Annotated[int, typer.Option(help="Ranks of the expert-parallel group.", min=1)] = 2,
    steps: Annotated[int, typer.Option(help="Steps that are timed; the median counts.", min=1)] = 5,
    backend: Annotated[
        str, typer.Option(help="Backend of all measurements: cpu, hopper or nccl; auto: as of a Workspace.")
    ] = "auto",
    json_file: JsonFile = None,
) -> None:
    """Measure one layer's training: whole experts, and low-rank factors with the experts frozen.

    Forward, backward and AdamW on random data. Weights, gradients and optimizer states are those of one rank's
    experts. All run on the same backend.
    """
    check_file(json_file, "--json")
    ranks = numbers(rank, "--rank")
    share = -(-tokens // ep)
    cfg = uniep.MoEConfig(**layer_sizes(context, shape, ep), max_tokens_per_rank=share, dtype=dtype.torch)
    cfg.check_group(ep)
    backend = launch.backend(backend)
    for low in ranks:
        check_lora(low, "--rank", cfg, backend, instead=", or --backend nccl (far slower)")
    if not launch.under_torchrun():
        launch.run_again(launch.most_ranks(ep))
    with launch.ranks() as world:
        if world.size < ep:
            raise uniep.ConfigError(f"--ep is {ep}, but {world.shortage}; use at most {world.size}")
        group = world.first(ep)
        found: list[Measured] = []
        if world.rank < ep:
            with (
                uniep.Workspace(cfg, group, device=world.device, backend=backend) as workspace,
                progress(world.console, "measured", 1 + len(ranks)) as done,
            ):
                for r in (None, *ranks):
                    found.append(_measure(workspace, share, r, steps, world))
                    done()
        everyone = [theirs for theirs in world.gather(found) if theirs]
        if world.rank == 0:
            names = ["whole experts", *(f"LoRA, r = {r}" for r in ranks)]
            _print(world, everyone, names, cfg, ep, tokens)
            of_rank = [dict(zip(names, map(dataclasses.asdict, theirs), strict=True)) for theirs in everyone]
            document = {"command": summary.command_line(), "ranks": of_rank, "machine": summary.machine()}
            write_json(json_file, document)


def _measure(workspace: uniep.Workspace, tokens: int, r: int | None, steps: int, world: World) -> Measured:
    """r: of the factors; None: whole experts."""
    cfg, cuda = workspace.cfg, world.device.type == "cuda"
    torch.manual_seed(0)
    layer = uniep.nn.MoE(cfg, workspace=workspace)
    if r is not None:
        uniep.nn.add_lora(layer, r=r)
        with torch.no_grad():
            for name in ("lora_b13", "lora_b2"):
                layer.experts.get_parameter(name).normal_(std=0.01)  # at zero, half of the gradients would be zeros
    layer.router.requires_grad_(False)  # type: ignore[union-attr]
    trained = [p for p in layer.experts.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    x = torch.randn(tokens, cfg.hidden, dtype=cfg.dtype, device=world.device).requires_grad_()
    seconds: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}

    def timed(part: str, run: Callable[[], Tensor | None]) -> Tensor | None:
        if workspace.group is not None:
            dist.barrier(workspace.group)
        begin = time.perf_counter()
        out = run()
        if cuda:
            torch.cuda.synchronize()
        seconds[part].append(time.perf_counter() - begin)
        return out

    for step in range(WARM_UP + steps):
        optimizer.zero_grad()
        if cuda and step == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        y = timed("forward", lambda: layer(x))
        assert y is not None
        loss = y.float().square().mean()
        timed("backward", loss.backward)
        timed("optimizer", optimizer.step)
    states = [v for of in optimizer.state.values() for v in of.values() if isinstance(v, Tensor) and v.numel() > 1]
    return Measured(
        sum(p.numel() for p in trained),
        _bytes(layer.experts.parameters()),
        _bytes(p.grad for p in trained if p.grad is not None),
        _bytes(states),
        torch.cuda.max_memory_allocated() if cuda else 0,
        {part: statistics.median(values[WARM_UP:]) for part, values in seconds.items()},
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _print(
    world: World, everyone: list[list[Measured]], names: list[str], cfg: uniep.MoEConfig, ep: int, tokens: int
) -> None:
    """everyone: of each rank the measurements by name."""
    title = (
        f"{cfg.num_experts} {str(cfg.dtype).removeprefix('torch.')} experts of {cfg.hidden} x {cfg.ffn}, "
        f"top-{cfg.top_k}, {tokens} tokens, EP={ep}; MiB of one rank, ms of the slowest"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    cuda = world.device.type == "cuda"
    columns = ["trained", "M parameters", "weights", "gradients", "AdamW", *(["peak"] if cuda else [])]
    for number, column in enumerate((*columns, "forward", "backward", "optimizer", "of whole")):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    whole = 0.0
    for number, name in enumerate(names):
        of_rank = [theirs[number] for theirs in everyone]
        first, mib = of_rank[0], 2**20
        times = [max(m.seconds[part] for m in of_rank) * 1e3 for part in ("forward", "backward", "optimizer")]
        whole = whole or sum(times)
        sizes = [first.weights, first.gradients, first.states, *([max(m.peak for m in of_rank)] if cuda else [])]
        table.add_row(
            name,
            f"{sum(m.trained for m in of_rank) / 1e6:.2f}",
            *(f"{size / mib:.2f}" for size in sizes),
            *(f"{ms:.1f}" for ms in times),
            f"{sum(times) / whole:.2f}",
        )
    world.console.print(title)
    world.console.print(table)
