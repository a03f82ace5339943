"""`uniep explain`: which Schedule a call gets on a card, and why.  The card itself is not needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from uniep.cli.options import (
    DType,
    Dtype,
    JsonFile,
    ShapeName,
    check_file,
    check_lora,
    check_picture,
    print_whole,
    write_json,
)
from uniep.errors import ConfigError
from uniep.limits import group_limit, shape_limit
from uniep.shapes import parse_shape
from uniep.sim.machine import machines
from uniep.tuner import tables
from uniep.tuner.explain import explain as explained
from uniep.tuner.model import Card, cards, load_card
from uniep.way import ADAPTABLE, resolve


def explain(
    shape: ShapeName = "qwen3-30b",
    ep: Annotated[int, typer.Option(help="Ranks of the expert-parallel group.", min=1)] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens per rank.", min=1)] = 8192,
    card: Annotated[
        str | None,
        typer.Option(
            help=f"Card to choose for: {', '.join(cards())}, or the path of a card file; default: h200, and with "
            "--backend cpu this machine, once it is calibrated."
        ),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="Backend: hopper, or cpu after uniep tune --calibrate --backend cpu.")
    ] = "hopper",
    dtype: Dtype = DType.bf16,
    combine_groups: Annotated[int | None, typer.Option(help="MoEConfig.combine_groups.", min=1)] = None,
    lora: Annotated[
        int | None, typer.Option(help="Rank of low-rank factors: show how calls with them run.", min=1)
    ] = None,
    results: Annotated[
        list[Path] | None, typer.Option(help="Result file of benchmarks/moe.py with measurements; may be repeated.")
    ] = None,
    json_file: JsonFile = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the cost of strategies and dimensions into this file.")
    ] = None,
) -> None:
    """Show which Schedule a call gets on a card, its time, the runner-up, and the dimension that matters most.

    The choice comes from a tuned table if one fits, else from the model; docs/tuner.md gives the model's error.
    With --lora the times stay those of whole experts: the model knows no low-rank factors.
    """
    torch.set_num_threads(1)
    console = Console(highlight=False)
    check_file(json_file, "--json")
    check_picture(picture, "--picture")
    made, known = parse_shape(shape), _card(card, backend)
    cfg = made.config(
        ep, tokens, dtype=dtype.torch, combine_groups=combine_groups, max_rows=made.sync_free_rows(tokens)
    )
    cfg.check_group(ep)
    if backend == "hopper" and (limit := shape_limit(cfg) or group_limit(ep)) is not None:
        raise limit
    if lora is not None:
        check_lora(lora, "--lora", cfg, backend)
    here = torch.cuda.is_available() and tables.card_name(torch.device("cuda")) == known.name
    found = tables.find(cfg, ep, backend, known.name, here)
    document = explained(cfg, ep, backend, known, made.name, results or (), found)
    way = resolve(cfg, ep, tokens, found.schedule, backend=backend, lora=ADAPTABLE if lora is not None else ())
    document["lora"], document["calls"] = lora, [choice._asdict() for choice in way.choices()]
    _print(console, document)
    console.print(f"\nHow calls{' with low-rank factors' * (lora is not None)} run there:")
    console.print(way.explain(), soft_wrap=True)
    write_json(json_file, document)
    if picture is not None:
        _draw(document, picture)
        console.print(f"written: {picture}")


def _card(given: str | None, backend: str) -> Card:
    """The card to predict for.  Raises ConfigError for one that does not have this backend, or is not there."""
    if backend not in ("hopper", "cpu"):
        raise ConfigError(f"--backend is {backend!r}; the model knows hopper and cpu")
    calibrate = "uniep tune --calibrate --backend cpu writes the card file of this machine"
    file = tables.card_file(given or ("cpu" if backend == "cpu" else "h200"))
    if backend == "cpu" and file == "cpu":
        raise ConfigError(f"--backend cpu: this machine has no card file yet; {calibrate}")
    known = load_card(file)
    if (backend == "cpu") == (known.machine.name in machines()):
        what = f"a GPU; {calibrate}" if backend == "cpu" else "no GPU; use --backend cpu"
        raise ConfigError(f"--backend {backend} beside --card {given}, which is {what}")
    return known


def _changes(changes: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items()) or "nothing"


def _print(console: Console, document: dict[str, Any]) -> None:
    console.print(
        f"{document['shape']}, EP {document['ep']}, {document['tokens']} tokens per rank, forward + backward, on "
        f"{document['card']} ({document['backend']})"
    )
    kept = "the default, which stays" if document["choice"]["changes"] == {} else "what a tuned table has"
    chosen = {"table": kept, "model": f"the fastest of {document['points']:,} by the model"}
    console.print(f"choice: {chosen[document['by']]}")
    console.print(f"A Workspace there runs with {document['serves']}", style="dim")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("Schedule", no_wrap=True)
    table.add_column("predicted us", justify="right", no_wrap=True)
    table.add_column("measured us", justify="right", no_wrap=True)
    table.add_column("differs from the default in", ratio=1)
    for title in ("choice", "default", "runner_up"):
        if (of := document[title]) is not None:
            measured = f"{of['measured_us']:.1f}" if of["measured_us"] is not None else "-"
            table.add_row(title.replace("_", " "), f"{of['predicted_us']:.1f}", measured, _changes(of["changes"]))
    print_whole(console, table)
    for source in dict.fromkeys(
        document[title]["measured_by"] for title in ("choice", "default") if document[title]["measured_by"]
    ):
        console.print(f"measured: {source}", style="dim")
    if document["runner_up"] is not None:
        differs = _changes(document["runner_up"]["differs_from_choice"])
        console.print(f"The runner-up ({differs}): {document['runner_up']['why']}.")
    if document["matters_most"] is not None:
        of = document["dimensions"][document["matters_most"]]
        costs = ", ".join(f"{cost:+.1%} with {value}" for value, cost in of["costs"].items())
        console.print(f"Matters most: {document['matters_most']}={of['is']}; time changes by {costs}.")
    else:
        console.print("By the model no dimension changes the time.")
    strategies = ", ".join(f"{name} {us / 1e3:.3f}" for name, us in document["strategies"].items())
    console.print(f"Named strategies, predicted ms: {strategies}", style="dim")


SHOWN = 0.0005
"""The smallest cost that has a bar: a twentieth of a percent."""


def _draw(document: dict[str, Any], path: Path) -> None:
    """Above: predicted time of the choice, the runner-up and named strategies, with measurements as dots.  Below: the
    cost of the slowest value of each dimension."""
    from uniep.cli.pictures import BLUE, ORANGE, WIDTH, figure_style, title

    plt = figure_style()
    figure, (above, below) = plt.subplots(2, figsize=(WIDTH, 7.6), layout="constrained")
    bars = {title.replace("_", " "): document[title] for title in ("choice", "default", "runner_up") if document[title]}
    named = {name: {"predicted_us": us, "measured_us": None} for name, us in document["strategies"].items()}
    rows = list({**bars, **named}.items())[::-1]
    above.barh([name for name, _ in rows], [of["predicted_us"] / 1e3 for _, of in rows], color=BLUE)
    dots = [(name, of["measured_us"] / 1e3) for name, of in rows if of["measured_us"]]
    if dots:
        above.plot([ms for _, ms in dots], [name for name, _ in dots], "o", color=ORANGE)
    above.set_xlabel("ms of forward + backward, predicted" + "; dots: measured" * bool(dots))
    costs = [(n, max(of["costs"].values())) for n, of in document["dimensions"].items()][::-1]
    costs = [(name, cost) for name, cost in costs if cost >= SHOWN]
    below.barh([name for name, _ in costs], [100 * cost for _, cost in costs], color=ORANGE)
    below.set_xlabel("% slower with the slowest value of this dimension")
    title(
        figure,
        "What strategies and dimensions cost",
        f"{document['shape']}, EP {document['ep']}, {document['tokens']} tokens per rank, on {document['card']}",
    )
    figure.savefig(path)
    plt.close(figure)
