"""`uniep simulate`: predict how long a layer takes on some machine, without that machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from uniep.cli.options import JsonFile, ShapeName, check_file, check_picture, print_whole, refuse, write_json
from uniep.cli.progress import progress
from uniep.shapes import parse_shape
from uniep.sim.machine import Machine, load_machine, machines, parse_changes
from uniep.sim.problem import ROUTINGS, Problem
from uniep.sim.rows import row_of
from uniep.sim.strategies import STRATEGIES, Simulated, parse_strategies
from uniep.sim.strategies import simulate as run

_STRATEGIES = "\n\n".join(f"- `{s.name}`: {s.about}" for s in STRATEGIES.values())


def simulate(
    context: typer.Context,
    machine: Annotated[
        str,
        typer.Option(help=f"Machine: {', '.join(machines())}, or the path of a TOML file.", rich_help_panel="Machine"),
    ] = "h200-node",
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change one value of the machine: KEY=NUMBER, such as link_gbps=225; may be repeated.",
            rich_help_panel="Machine",
        ),
    ] = None,
    shape: ShapeName = "qwen3-30b",
    ep: Annotated[int, typer.Option(help="Ranks of the expert-parallel group.", min=1, rich_help_panel="Layer")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens per rank.", min=1, rich_help_panel="Layer")] = 4096,
    routing: Annotated[
        str,
        typer.Option(
            help=f"Routing: {', '.join(ROUTINGS)}; balanced simulates one rank that stands for all.",
            rich_help_panel="Layer",
        ),
    ] = "balanced",
    direction: Annotated[str, typer.Option(help="Direction: fwd or bwd.", rich_help_panel="Layer")] = "fwd",
    combine_groups: Annotated[
        int | None,
        typer.Option(
            help="Number of expert groups; results of a group are added before they return (uniep's schedules).",
            min=1,
            rich_help_panel="Layer",
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(
            help=f"Schedules to simulate, comma-separated: {', '.join(STRATEGIES)}.", rich_help_panel="Schedules"
        ),
    ] = "serialized,deepep,taskflow",
    json_file: JsonFile = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw what workers did into this file, one lane per schedule and class.")
    ] = None,
    a3: Annotated[
        bool, typer.Option("--a3", help="Reproduce HyperParallel-MoE's table on Ascend A3: fit, predict, controls.")
    ] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="With --a3: move every parameter by 10 %, with and without refit.")
    ] = False,
) -> None:
    """Predict how long one layer takes on a machine: no GPU, no processes.

    A schedule is compiled to tile tasks with events. The tasks are put into the workers' queues, and the queues run on
    a model of the machine, whose memory, links and network the tasks share. docs/simulator.md says what is modelled,
    how far predictions were from measurements, and what the schedules are.
    """
    torch.set_num_threads(1)  # many small tensors
    console = Console(highlight=False)
    check_file(json_file, "--json")
    check_picture(picture, "--picture")
    if a3:
        given = ("machine", "shape", "ep", "tokens", "routing", "direction", "combine_groups", "schedule", "picture")
        refuse(context, given, "beside --a3, which has its own; leave one out")
        from uniep.cli.simulate_a3 import reproduce

        document = reproduce(console, load_machine("ascend-a3", parse_changes(changes or [])), sensitivity)
    else:
        refuse(context, ("sensitivity",), "is for --a3; give it, too")
        made = load_machine(machine, parse_changes(changes or []))
        problem = Problem(parse_shape(shape), ep, tokens, routing, direction, combine_groups=combine_groups)  # type: ignore[arg-type]
        strategies = parse_strategies(schedule)
        arranged = [strategy.arrange(problem, made) for strategy in strategies]  # refused before any is run
        rows, ran = [], dict[str, Simulated]()
        with progress(console, "simulated", len(strategies)) as done:
            for strategy, arrangement in zip(strategies, arranged, strict=True):
                result = run(problem, made, arrangement)
                rows.append(row_of(problem, made, strategy, result))
                if picture is not None:
                    ran[strategy.name] = result
                done()
        print_whole(console, _table(rows, _nodes(made, ep)))
        console.print(
            "matrix, vector, link: how busy. exposed: ms in which rows travel, less what is computed meanwhile. "
            "phases: the longest, from the first start to the last end",
            style="dim",
        )
        document = {"rows": rows}
        if picture is not None:
            from uniep.cli.simulate_picture import draw_lanes

            draw_lanes(ran, _title(rows[0]), picture)
            console.print(f"written: {picture}")
    write_json(json_file, document)


def _title(row: dict[str, Any]) -> str:
    return (
        f"{row['shape']} {row['direction']}, EP {row['ep']}, {row['tokens']} tokens per rank, {row['routing']}, "
        f"on {row['machine']}"
    )


def _nodes(machine: Machine, ep: int) -> str:
    """How the group lies on nodes: the part of a title that says whether anything crosses the network."""
    each = machine.per_node(ep)
    return "one node" if each == ep else f"{ep // each} nodes of {each}"


def _table(rows: list[dict[str, Any]], nodes: str) -> Table:
    first = rows[0]
    table = Table(title=f"{_title(first)}, {nodes}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("schedule", no_wrap=True)
    for column in ("ms", "", "matrix", "vector", "link", "exposed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("phases, ms", ratio=1)
    for row in rows:
        busy = row["busy"]
        longest = sorted(row["phases"].items(), key=lambda item: -item[1])[:3]
        table.add_row(
            row["schedule"], f"{row['makespan_us'] / 1e3:.3f}", f"{first['makespan_us'] / row['makespan_us']:.2f}x",
            f"{busy['matrix']:.0%}", f"{busy['vector']:.0%}", f"{busy['link']:.0%}",
            f"{row['exposed_comm_us'] / 1e3:.3f}", ", ".join(f"{name} {us / 1e3:.2f}" for name, us in longest),
        )  # fmt: skip
    return table


simulate.__doc__ = f"{simulate.__doc__}\n\n    Schedules:\n\n    " + _STRATEGIES.replace("\n", "\n    ")
