"""Options that several commands share."""

from __future__ import annotations

import enum
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from uniep import schedule as schedules
from uniep.activation import ACTIVATIONS
from uniep.config import MoEConfig
from uniep.errors import ConfigError
from uniep.limits import lora_limit
from uniep.schedule import Schedule
from uniep.shapes import SHAPES, parse_shape


class DType(enum.StrEnum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"

    @property
    def torch(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.value]


class WeightAt(enum.StrEnum):
    output = "output"
    activation = "activation"


Hidden = Annotated[int, typer.Option(help="Width of a token (D).", min=1, rich_help_panel="Shape")]
Ffn = Annotated[int, typer.Option(help="Width of one expert (F).", min=1, rich_help_panel="Shape")]
NumExperts = Annotated[int, typer.Option("--experts", help="Experts over all ranks.", min=1, rich_help_panel="Shape")]
TopK = Annotated[int, typer.Option(help="Experts per token.", min=1, rich_help_panel="Shape")]
Tokens = Annotated[int, typer.Option(help="Tokens of all ranks together.", min=1, rich_help_panel="Shape")]
_SHAPES = f"{', '.join(SHAPES)}, or DxFxExK (hidden, ffn, experts, top-k)"
ShapeName = Annotated[str, typer.Option("--shape", help=f"Shape of the layer: {_SHAPES}.", rich_help_panel="Shape")]
ShapeOrSizes = Annotated[
    str | None,
    typer.Option(
        "--shape",
        help=f"{_SHAPES}; instead of --hidden, --ffn, --experts and --top-k.",
        rich_help_panel="Shape",
    ),
]
Dtype = Annotated[DType, typer.Option(help="dtype of tokens, parameters and results.", rich_help_panel="Shape")]
Seed = Annotated[int, typer.Option(help="Random seed for tokens, routing and weights.", min=0, max=2**32 - 1)]
Weight = Annotated[
    WeightAt,
    typer.Option(help="Where the routing weight is applied: to the expert's output, or to its activation (Megatron)."),
]
Activation = Annotated[str, typer.Option(help=f"Activation between the experts' two GEMMs: {', '.join(ACTIVATIONS)}.")]
Limit = Annotated[
    float | None, typer.Option("--activation-limit", help="Limit to which gate and up are clamped; default: none.")
]
Bias = Annotated[bool, typer.Option("--bias", help="Experts have biases.")]
Groups = Annotated[
    int | None,
    typer.Option(
        "--combine-groups", help="Number of expert groups; results of a group are added before they return.", min=1
    ),
]


def layer_sizes(context: typer.Context, shape: str | None, ep: int = 1) -> dict[str, Any]:
    """hidden, ffn, num_experts and top_k for a MoEConfig: of `shape`, else of the four options.  ep: the number of
    ranks, for shapes that have a number of experts on each.

    Raises ConfigError for a shape that is unknown, and where one of the four is given beside it.
    """
    names = {"hidden": "--hidden", "ffn": "--ffn", "num_experts": "--experts", "top_k": "--top-k"}
    if shape is None:
        return {name: context.params[name] for name in names}
    given = [option for name, option in names.items() if _told(context, name)]
    if given:
        raise ConfigError(f"--shape {shape} beside {', '.join(given)}; give the shape, or the four sizes")
    made = parse_shape(shape)
    return {"hidden": made.hidden, "ffn": made.ffn, "num_experts": made.experts(ep), "top_k": made.top_k}


def refuse(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raises ConfigError if one of these parameters stands on the command line: it would have no effect."""
    options = {param.name: param.opts[0] for param in context.command.params}
    given = [options[name] for name in names if _told(context, name)]
    if given:
        raise ConfigError(f"{', '.join(given)} {why}")


def _told(context: typer.Context, name: str) -> bool:
    """Whether this parameter stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file as JSON.")]


def write_json(path: Path | None, document: Any) -> None:
    """Write the document, and say where; nothing without a path.  Raises ConfigError if there is no space."""
    if path is not None:
        try:
            path.write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"--json {path}: {error.strerror}; free space, or name another file") from None
        typer.echo(f"written: {path}")


def print_whole(console: Console, table: Table) -> None:
    """Print a table, up to 80 characters wide also where the terminal has fewer and would cut numbers off: it wraps
    the lines."""
    width = console.width
    console.width = max(width, min(80, Measurement.get(console, console.options.update(max_width=80), table).maximum))
    console.print(table)
    console.width = width


def numbers(text: str, option: str) -> list[int]:
    """'1,2,4' -> [1, 2, 4].  Raises typer.BadParameter, which names `option`."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of positive numbers such as 1,2,4", param_hint=option)
    return values


def check_folder(out: Path, option: str = "--out") -> None:
    """Make the folder.  Raises ConfigError now, before any work is done, if files cannot be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise ConfigError(f"{option} {out}: {error.strerror}; name a folder that can be written") from None


def check_file(path: Path | None, option: str) -> None:
    """Raises ConfigError now, before any work is done, if the file cannot be written: a folder of this name, one
    that is read-only, or its own folder is missing, which is not made (only that of --out is)."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it, or name another file")
    check_folder(path.parent, option)
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written; name another file, or make it writable")


def check_picture(path: Path | None, option: str) -> None:
    """As `check_file`; also if the name does not end in a format that matplotlib draws."""
    check_file(path, option)
    if path is not None:
        from matplotlib.backend_bases import FigureCanvasBase

        known = FigureCanvasBase.get_supported_filetypes()
        if path.suffix.removeprefix(".").lower() not in known:
            raise ConfigError(f"{option} {path}: the name must end in a format, one of .{', .'.join(sorted(known))}")


def check_lora(r: int, option: str, cfg: MoEConfig, backend: str, instead: str = "") -> None:
    """Raises what `add_lora` would of factors of rank r, before any work is done.  instead: a remedy of the command."""
    if backend == "hopper" and (error := lora_limit(r, instead=instead)) is not None:
        raise type(error)(f"{option}: {error}")
    if r > (most := min(cfg.hidden, cfg.ffn)):
        raise ConfigError(f"{option}: r is {r}, but experts have only {most} columns; use at most {most}")


def parse_schedule(text: str, option: str, default: Schedule | None = None) -> Schedule:
    """As `uniep.schedule.parse_schedule`.  Raises typer.BadParameter, which names `option`."""
    try:
        return schedules.parse_schedule(text, default or Schedule())
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
