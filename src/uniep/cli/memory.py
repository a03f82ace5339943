"""`uniep memory`: what a Workspace of a shape allocates, buffer by buffer."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

import uniep
from uniep.cli.options import DType, Dtype, Ffn, Groups, Hidden, NumExperts, TopK, Weight, WeightAt


class BackendName(enum.StrEnum):
    cpu = "cpu"
    hopper = "hopper"
    nccl = "nccl"


def memory(
    hidden: Hidden = 2048,
    ffn: Ffn = 768,
    num_experts: NumExperts = 128,
    top_k: TopK = 8,
    tokens: Annotated[
        int,
        typer.Option(help="Largest number of tokens that one rank passes in one call.", min=1, rich_help_panel="Shape"),
    ] = 8192,
    dtype: Dtype = DType.bf16,
    weight_at: Weight = WeightAt.output,
    combine_groups: Groups = None,
    gradient_shards: Annotated[int, typer.Option(help="MoEConfig.gradient_shards.", min=1)] = 1,
    copies: Annotated[int, typer.Option(help="EP groups with the same experts, of Workspace(copies=).", min=1)] = 1,
    ep: Annotated[int, typer.Option(help="Ranks of the expert-parallel group.", min=1)] = 8,
    backend: Annotated[BackendName, typer.Option(help="Backend whose buffers to list.")] = BackendName.hopper,
    max_rows: Annotated[
        int | None,
        typer.Option(help="Limit of routed rows per rank (no host read); default: allocated as needed.", min=1),
    ] = None,
) -> None:
    """Print the buffers of one rank, with their bytes and what they are for.

    Allocates nothing. The number of expert rows assumes balanced routing; on the hopper backend --max-rows sets it.
    """
    cfg = uniep.MoEConfig(
        hidden=hidden,
        ffn=ffn,
        num_experts=num_experts,
        top_k=top_k,
        max_tokens_per_rank=tokens,
        dtype=dtype.torch,
        weight_at=weight_at.value,
        combine_groups=combine_groups,
        gradient_shards=gradient_shards,
        max_rows=max_rows,
    )
    typer.echo(uniep.plan_memory(cfg, ep_size=ep, copies=copies, backend=backend.value).explain())
