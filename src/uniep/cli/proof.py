"""The demo's proof: the same optimizer steps however ranks share the work, compared bit by bit.

At several EP sizes and schedules; with ranks split into EP groups and copies; and resumed at another EP size.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

import uniep
from uniep.cli.bits import BitTable, Digests, digest, merge
from uniep.cli.launch import World
from uniep.cli.model import ModelConfig, Trainer
from uniep.schedule import DEFAULT_SCHEDULES, known_fields

QUANTITIES = ("loss", "norm", "logits", "d dense", "d router", "dw13", "dw2", "params")

MAX_NORM = 1.0
"""Of the gradients of a step."""

OVERLAPS: tuple[Literal["serial", "fused"], ...] = ("serial", "fused")
TILE_ORDERS: tuple[Literal["natural", "local-first"], ...] = ("natural", "local-first")


def schedules(backend: str) -> list[uniep.Schedule]:
    """The schedules to compare, as far as `backend` supports them.

    serial and fused, each in natural and local-first tile order; tokens and gate and up made again in the backward.  On
    GPUs also: tokens sent by copy engines, pipelined, in parts with dW2 beside, and in waves; one kernel for each
    direction; tokens fetched; rows expanded.  Send lists in the order of experts, where that can be.  The first is the
    reference.
    """
    default = DEFAULT_SCHEDULES[backend]
    known = known_fields(backend)
    found = [
        dataclasses.replace(default, overlap=overlap, tile_order=order)
        for overlap in (OVERLAPS if "overlap" in known else (default.overlap,))
        for order in (TILE_ORDERS if "tile_order" in known else (default.tile_order,))
    ]
    again = dataclasses.replace(default, received="again", preactivation="recomputed")
    if "transfer" not in known:
        return [*found, dataclasses.replace(again, send_order="expert" if "send_order" in known else again.send_order)]
    copied = dataclasses.replace(default, transfer="copy")
    found += [copied, *(dataclasses.replace(copied, overlap=overlap) for overlap in ("pipelined", "mega"))]
    found.append(dataclasses.replace(copied, overlap="pipelined", gate_up_parts=2, down_wgrad="beside"))
    found.append(dataclasses.replace(default, overlap="mega"))
    found.append(dataclasses.replace(again, transfer="copy", arrival_waves=2))
    found.append(dataclasses.replace(again, received="saved", transfer="pull", send_order="expert"))
    return [*found, dataclasses.replace(default, operand="expanded")]


def prove(
    cfg: ModelConfig,
    world: World,
    groups: dict[int, dist.ProcessGroup | None],
    schedules: Sequence[uniep.Schedule],
    batches: Sequence[list[Tensor]],
    learning_rate: float,
) -> bool:
    """Train on `batches` from the same start at each EP size under each schedule; print the table.

    Returns, on every rank, whether all bits equal those of EP=1, serial.
    """
    table = BitTable(f"Parts with the bits of EP=1 serial/natural, {len(batches)} optimizer steps", QUANTITIES)
    runs = [(ep_size, schedule) for ep_size in groups for schedule in schedules]
    start = time.perf_counter()
    with world.console.status("proof") as status:
        for number, (ep_size, schedule) in enumerate(runs, 1):
            what = f"proof {number} of {len(runs)}: EP={ep_size} {schedule.name}"
            status.update(what)
            if not world.console.is_terminal:  # no status line there
                world.console.print(what)
            mine: Digests = {}
            if world.rank < ep_size:
                workspace = uniep.Workspace(cfg.moe(ep_size), groups[ep_size], device=world.device, schedule=schedule)
                with workspace:
                    mine = dict(_run(Trainer(cfg, workspace, learning_rate, max_norm=MAX_NORM), batches))
            table.add(ep_size, schedule.name, merge(world.gather(mine)))
    table.print(world.console)
    world.console.print(f"{len(runs)} runs in {time.perf_counter() - start:.0f} s")
    return not table.wrong


def prove_copies(cfg: ModelConfig, world: World, batches: Sequence[list[Tensor]], learning_rate: float) -> bool | None:
    """Train on `batches` with ranks split into EP groups and copies of experts in other ways; print the table.

    Returns, on every rank, whether all bits equal those of the first way; None if there is only one rank.
    """
    layouts = [(ep, ranks // ep) for ranks in (2, 4) if ranks <= world.size for ep in (ranks, ranks // 2)]
    if not layouts:
        return None
    cfg = dataclasses.replace(cfg, gradient_shards=2)
    table = BitTable(f"The same with {cfg.gradient_shards} gradient shards, EP x copies", QUANTITIES, "EP x copies")
    for ep, copies in layouts:
        ranks = ep * copies
        group, everyone, over = world.split(ep, copies)
        mine: Digests = {}
        if world.rank < ranks:
            workspace = uniep.Workspace(cfg.moe(ranks), group, copies=over, device=world.device)
            with workspace:
                mine = dict(_run(Trainer(cfg, workspace, learning_rate, everyone, MAX_NORM), batches))
        table.add(f"{ep} x {copies}", "default", merge(world.gather(mine)))
    table.print(world.console)
    return not table.wrong


def _run(trainer: Trainer, batches: Sequence[list[Tensor]]) -> Iterator[tuple[tuple[str, str], str]]:
    """Digests of one run: this rank's shards and experts, and everything that all ranks hold."""
    for step, batch in enumerate(batches):
        loss = trainer.step(batch)
        yield ("loss", f"step {step}"), digest(loss)
        yield ("norm", f"step {step}"), digest(trainer.norm)
        for shard, logits in zip(trainer.shards, trainer.logits, strict=True):
            yield ("logits", f"step {step} shard {shard}"), digest(logits)
        for name, parameter in trainer.dense.items():
            quantity = "d router" if name.endswith("router") else "d dense"
            yield (quantity, f"step {step} {name}"), digest(_grad(parameter))
        for name, expert, parameter in _experts(trainer):
            quantity = "d" + name.rpartition(".")[2]
            yield (quantity, f"step {step} {name} expert {expert}"), digest(_grad(parameter)[expert - _first(trainer)])
    yield from parameters(trainer)


def parameters(trainer: Trainer) -> Iterator[tuple[tuple[str, str], str]]:
    """Digests of this rank's experts and of all dense parameters."""
    for name, parameter in trainer.dense.items():
        yield ("params", name), digest(parameter)
    for name, expert, parameter in _experts(trainer):
        yield ("params", f"{name} expert {expert}"), digest(parameter[expert - _first(trainer)])


def _first(trainer: Trainer) -> int:
    workspace = trainer.workspace
    return workspace.rank * workspace.cfg.experts_per_rank(workspace.ep_size)


def _experts(trainer: Trainer) -> Iterator[tuple[str, int, torch.nn.Parameter]]:
    """(name, global expert id, parameter that holds it) of this rank's experts."""
    for name, parameter in trainer.experts.items():
        for local in range(parameter.shape[0]):
            yield name, _first(trainer) + local, parameter


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in every step"
    return parameter.grad
