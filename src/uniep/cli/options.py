"""Options that several commands share."""

from __future__ import annotations

import enum
from typing import Annotated

import torch
import typer


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


Hidden = Annotated[int, typer.Option(help="Width of a token.", min=1, rich_help_panel="Shape")]
Ffn = Annotated[int, typer.Option(help="Width of one expert.", min=1, rich_help_panel="Shape")]
NumExperts = Annotated[int, typer.Option("--experts", help="Experts over all ranks.", min=1, rich_help_panel="Shape")]
TopK = Annotated[int, typer.Option(help="Experts per token.", min=1, rich_help_panel="Shape")]
Dtype = Annotated[DType, typer.Option(help="Of tokens, expert parameters and results.", rich_help_panel="Shape")]
Weight = Annotated[
    WeightAt,
    typer.Option(help="Where the routing weight acts: on the expert's output, or on its activation (Megatron)."),
]
Groups = Annotated[
    int | None,
    typer.Option("--combine-groups", help="Groups of experts whose results are added before they return.", min=1),
]


def numbers(text: str, option: str) -> list[int]:
    """'1,2,4' -> [1, 2, 4].  Raises typer.BadParameter, which names `option`."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of positive numbers such as 1,2,4", param_hint=option)
    return values
