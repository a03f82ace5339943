"""`uniep trace`: record one layer task by task, and write what happened as a trace and as a page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.table import Table

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
    Seed,
    ShapeOrSizes,
    Tokens,
    TopK,
    check_file,
    check_folder,
    layer_sizes,
    parse_schedule,
    print_whole,
    refuse,
    write_json,
)
from uniep.cli.page import write_page
from uniep.cli.progress import progress
from uniep.cli.timeline import fastest
from uniep.cli.verify import Problem
from uniep.schedule import default_schedule, is_valid
from uniep.sim.beside import predicted
from uniep.sim.machine import load_machine
from uniep.taskflow.trace import Span, shares, write_trace
from uniep.way import resolve

WARM_UP, RECORDED = 2, 6


def trace(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for trace.json and timeline.html.")] = Path("out"),
    ep: Annotated[int, typer.Option(help="Expert-parallel ranks, as processes of this machine.", min=1)] = 2,
    gpus: Annotated[bool, typer.Option("--gpus", help="Record on GPUs, one rank each, with overlap=mega.")] = False,
    shape: ShapeOrSizes = None,
    hidden: Hidden = 512,
    ffn: Ffn = 256,
    num_experts: NumExperts = 16,
    top_k: TopK = 4,
    tokens: Tokens = 1024,
    dtype: Dtype = DType.bf16,
    schedule: Annotated[
        str,
        typer.Option(
            metavar="FIELD=VALUE,...",
            help="Fields of uniep.Schedule, for example tile_order=critical-path, vector_workers=2.",
        ),
    ] = "",
    predict: Annotated[
        bool,
        typer.Option("--predict", help="Also show the simulator's prediction for the same tasks."),
    ] = False,
    machine: Annotated[
        str, typer.Option(help="Machine for --predict with --gpus: a name or a file, as for uniep simulate.")
    ] = "h200-node",
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Record forward and backward of one layer task by task, on CPU processes or on GPUs.

    Writes trace.json, which ui.perfetto.dev and chrome://tracing load, and timeline.html, which any browser shows.
    Both say how the workers of each class spent their time: busy, waiting for their own rank, waiting for peers
    (exposed communication), idle. The fastest of several steps is kept. With --predict both also show the simulated
    tasks, after the recorded ones.
    """
    cfg = uniep.MoEConfig(**layer_sizes(context, shape, ep), max_tokens_per_rank=tokens, dtype=dtype.torch)
    cfg.experts_per_rank(ep)
    check_folder(out)
    check_file(json_file, "--json")
    if not (predict and gpus):
        refuse(context, ("machine",), "is for --predict with --gpus; give both, too, or leave it out")
    model = load_machine(machine) if predict and gpus else None
    device, backend, default = "CPU processes", "cpu", uniep.Schedule()
    if gpus:
        if ep > (have := torch.cuda.device_count()):
            raise uniep.ConfigError(f"--gpus --ep {ep}: this machine has {have} GPUs; a rank needs one of its own")
        device, backend = "GPUs", "hopper"
        default = dataclasses.replace(default_schedule("hopper", cfg, ep), overlap="mega")
    chosen = parse_schedule(schedule, "--schedule", default)
    if reasons := is_valid(chosen, cfg, ep, backend):
        raise uniep.ConfigError(f"--schedule {schedule}: {'; '.join(reasons)}")
    if gpus and chosen.overlap != "mega":
        raise uniep.ConfigError(
            f"--gpus records overlap=mega, not {chosen.overlap}: other schedules have no tasks there"
        )
    if not launch.under_torchrun():
        launch.run_again(ep)
    with launch.ranks(cpu=not gpus) as world:
        if world.size != ep:
            raise uniep.ConfigError(f"--ep {ep}: torchrun started {world.size} ranks; the two numbers must be equal")
        problem = Problem(cfg, tokens, ep, seed)
        spans = _record(problem, chosen, world, backend)
        if world.rank == 0:
            if predict:
                way = resolve(cfg, ep, max(problem.shard_sizes), chosen, backend=backend)
                spans += predicted(problem.ids.split(problem.shard_sizes), cfg, way, model, spans)
            about = {
                "layer": f"hidden {cfg.hidden}, ffn {cfg.ffn}, {cfg.num_experts} experts, top-{cfg.top_k}, "
                f"{dtype.value}",
                "tokens": f"{tokens} over {ep} ranks",
                "schedule": chosen.name
                if gpus
                else f"{chosen.name}, {chosen.matrix_workers} matrix and "
                f"{chosen.vector_workers} vector workers per rank",
                "recorded": f"{device}, the fastest of {RECORDED} steps, uniep {uniep.__version__}, "
                f"PyTorch {torch.__version__}",
            }
            write_trace(spans, about, out / "trace.json")
            write_page(spans, about, out / "timeline.html")
            print_whole(world.console, _table(spans))
            world.console.print(
                "waits for peers: their tokens or results are on the way, or not computed yet; for its rank: for tasks "
                "of the same rank",
                style="dim",
            )
            files = f"{out / 'trace.json'} (ui.perfetto.dev), {out / 'timeline.html'} (a browser)"
            world.console.print(f"written: {files}", markup=False)
            found = [dataclasses.asdict(share) for share in shares(spans)]
            write_json(json_file, {"command": summary.command_line(), **about, "shares": found})


def _record(problem: Problem, schedule: uniep.Schedule, world: World, backend: str) -> list[Span]:
    """Spans of all ranks, in the step that other work of the machine disturbed least."""
    steps = []
    group = None
    if world.size > 1:
        group = world.control if backend == "cpu" else world.first(world.size)
    with (
        uniep.Workspace(problem.cfg, group, device=world.device, backend=backend, schedule=schedule) as workspace,
        progress(world.console, "recorded", WARM_UP + RECORDED) as done,
    ):
        for step in range(WARM_UP + RECORDED):
            spans: list[Span] = []
            workspace.backend.trace = spans if step >= WARM_UP else None  # type: ignore[attr-defined]
            problem.run(workspace)
            steps.append(spans)
            done()
    of_rank = world.gather(steps[WARM_UP:])
    return list(fastest([[span for part in step for span in part] for step in zip(*of_rank, strict=True)]))


def _table(spans: list[Span]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", "workers", "busy", "waits for peers", "for its rank", "idle"):
        table.add_column(column, justify="left" if column in ("", "workers") else "right")
    for s in shares(spans):
        table.add_row(s.phase, s.worker, *(f"{part:.1%}" for part in (s.busy, s.exposed, s.waiting, s.idle)))
    return table
