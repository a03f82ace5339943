"""`uniep memory`: what a layer's Workspace allocates, buffer by buffer, and what a whole model takes on a rank."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

import uniep
from uniep.cli import whole_model
from uniep.cli.options import (
    DType,
    Dtype,
    Ffn,
    Groups,
    Hidden,
    JsonFile,
    NumExperts,
    ShapeOrSizes,
    TopK,
    Weight,
    WeightAt,
    check_file,
    layer_sizes,
    print_whole,
    refuse,
    write_json,
)
from uniep.cli.whole_model import Optimizer
from uniep.memory import MemoryPlan, size_text
from uniep.schedule import default_schedule


class BackendName(enum.StrEnum):
    cpu = "cpu"
    hopper = "hopper"
    nccl = "nccl"


MODEL = "Whole model"


def memory(
    context: typer.Context,
    shape: ShapeOrSizes = None,
    hidden: Hidden = 2048,
    ffn: Ffn = 768,
    num_experts: NumExperts = 128,
    top_k: TopK = 8,
    tokens: Annotated[
        int,
        typer.Option(help="Tokens per rank, the most that one passes in a call.", min=1, rich_help_panel="Shape"),
    ] = 8192,
    dtype: Dtype = DType.bf16,
    weight_at: Weight = WeightAt.output,
    combine_groups: Groups = None,
    gradient_shards: Annotated[int, typer.Option(help="MoEConfig.gradient_shards.", min=1)] = 1,
    copies: Annotated[int, typer.Option(help="EP groups with the same experts, of Workspace(copies=).", min=1)] = 1,
    lora: Annotated[
        int | None, typer.Option(help="Rank of low-rank factors, trained instead of whole experts.", min=1)
    ] = None,
    ep: Annotated[int, typer.Option(help="Ranks of the expert-parallel group.", min=1)] = 8,
    backend: Annotated[BackendName, typer.Option(help="Backend whose buffers to list.")] = BackendName.hopper,
    max_rows: Annotated[
        int | None,
        typer.Option(help="Limit of routed rows per rank (no host read); default: allocated as needed.", min=1),
    ] = None,
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="With Schedule(preactivation='recomputed'): the backward makes gate and up."),
    ] = False,
    layers: Annotated[
        int | None, typer.Option(help="Number of MoE layers: also show the whole model.", min=1, rich_help_panel=MODEL)
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="config.json of a Hugging Face model, instead of --layers and the shape; needs the extra hf "
            "(transformers), which builds the model without memory.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    dense: Annotated[
        float,
        typer.Option(
            help="Parameters besides experts and routers, as 1.5e9 (with --layers).",
            min=0,
            max=1e15,
            rich_help_panel=MODEL,
        ),
    ] = 0,
    optimizer: Annotated[
        Optimizer,
        typer.Option(
            help="Memory per parameter: adamw-fp32 (fp32 gradients, masters, averages), adamw or sgd (all "
            "in --dtype), none (inference).",
            rich_help_panel=MODEL,
        ),
    ] = Optimizer.adamw_fp32,
    fsdp: Annotated[
        int,
        typer.Option(
            help="Ranks over which FSDP2 shards parameters, gradients and optimizer state; 1: not sharded.",
            min=1,
            rich_help_panel=MODEL,
        ),
    ] = 1,
    json_file: JsonFile = None,
) -> None:
    """Print the buffers of one rank, with their bytes and what they are for; with --layers or --config a whole model.

    Allocates nothing. The number of expert rows assumes balanced routing; on the hopper backend --max-rows sets it.
    Of a whole model's activations those of the MoE layers are counted, and no others.
    """
    check_file(json_file, "--json")
    console = Console(highlight=False)
    if lora is not None and (layers is not None or config is not None):
        raise uniep.ConfigError(
            f"--lora {lora} is of one layer, but a whole model is counted trained whole; leave one out"
        )
    sizes: dict[str, Any] = layer_sizes(context, shape, ep)
    size = None
    if config is None and layers is None:
        refuse(context, ("dense", "optimizer", "fsdp"), "without effect on one layer; give --layers or --config, too")
    if config is not None:
        given = ("shape", "hidden", "ffn", "num_experts", "top_k", "dense")
        refuse(context, given, f"beside --config {config}, which says it; give one")
        if layers is not None:
            raise uniep.ConfigError(
                f"--layers {layers} and --config {config} both say how many layers; give one of them"
            )
        with console.status("the model is built, without memory"):
            size, sizes = whole_model.of_config(config)
    cfg = uniep.MoEConfig(
        **sizes,
        max_tokens_per_rank=tokens,
        dtype=dtype.torch,
        weight_at=weight_at.value,
        combine_groups=combine_groups,
        gradient_shards=gradient_shards,
        max_rows=max_rows,
    )
    usual = default_schedule(backend.value, cfg, ep)
    ways = {how: dataclasses.replace(usual, preactivation=how) for how in ("saved", "recomputed")}
    plans = {
        how: uniep.plan_memory(cfg, ep_size=ep, copies=copies, backend=backend.value, schedule=schedule, lora=lora)
        for how, schedule in ways.items()
    }
    plan = plans["recomputed" if recompute else "saved"]
    typer.echo(plan.explain())
    sizes_of = {
        how: {"kept_bytes": of.total_bytes("saved"), "peak_bytes": of.peak_bytes()} for how, of in plans.items()
    }
    typer.echo("\ngate and up   kept by a call   peak of a call")
    for how, of_call in sizes_of.items():
        typer.echo(f"{how:<11}   {size_text(of_call['kept_bytes']):<14}   {size_text(of_call['peak_bytes'])}")
    document: dict[str, Any] = {"layer": _as_document(plan), "gate and up": sizes_of}
    if layers is not None:
        size = whole_model.of_layers(cfg, layers, int(dense))
    if size is not None:
        found = whole_model.rows(size, plan, cfg.dtype, ep, fsdp, optimizer)
        console.print("\n" + whole_model.describe(size, ep, fsdp, optimizer))
        print_whole(console, _table(found))
        document["model"] = whole_model.as_document(size, found)
    write_json(json_file, document)


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("GiB", "experts", "other", "together"):
        table.add_column(column, justify="left" if column == "GiB" else "right", no_wrap=True)
    for row in found:
        cells = [f"{row[part] / 2**30:.2f}" if row[part] else "-" for part in ("experts", "dense", "total")]
        table.add_row(row["what"], *cells, style="bold" if row["what"] == "total" else "")
    return table


def _as_document(plan: MemoryPlan) -> dict[str, Any]:
    listed = [{**dataclasses.asdict(b), "dtype": str(b.dtype), "bytes": b.bytes} for b in plan.buffers]
    return {"title": plan.title, "buffers": listed, "peak_bytes": plan.peak_bytes()}
