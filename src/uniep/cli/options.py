"""Options that several commands share."""

from __future__ import annotations

import enum
import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from uniep import schedule as schedules
from uniep.activation import ACTIVATIONS
from uniep.errors import ConfigError
from uniep.schedule import Schedule
from uniep.shapes import SHAPES


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
Tokens = Annotated[int, typer.Option(help="Tokens over all ranks.", min=1, rich_help_panel="Shape")]
ShapeName = Annotated[
    str, typer.Option(help=f"Shape of the layer: {', '.join(SHAPES)}, or DxFxExK (hidden, ffn, experts, top-k).")
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

JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file as JSON.")]


def write_json(path: Path | None, document: Any) -> None:
    """Write the document, and say where; nothing without a path."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")
        typer.echo(f"written: {path}")


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
    """As `check_folder` of the file's folder; a path that is a folder is refused, too."""
    if path is not None and path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name a file")
    if path is not None:
        check_folder(path.parent, option)


def parse_schedule(text: str, option: str, default: Schedule | None = None) -> Schedule:
    """As `uniep.schedule.parse_schedule`.  Raises typer.BadParameter, which names `option`."""
    try:
        return schedules.parse_schedule(text, default or Schedule())
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
