"""Schedule: one point of the search space.  It decides speed, never results.

One `is_valid` serves search and launch alike.  Fields that an executor does not know are refused by
that executor by name, never ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal, get_args, get_origin, get_type_hints

from uniep.config import COLUMN_GROUP, MAX_INDEX, ROW_ALIGN, MoEConfig, refused_number
from uniep.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """Shape of one GEMM's output tile and how a GPU runs it (the CPU uses rows and columns only)."""

    rows: int = 128
    columns: int = 256
    depth: int = 64
    warps: int = 8
    stages: int = 3
    programs_per_sm: int = 1
    group_rows: int = 8  # row tiles that share a column of weights in L2 before the next column starts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How one call is executed.

    overlap: "serial", every stage waits for the one before (the oracle); "fused", transfers run
        beside the GEMMs that consume or produce them; "pipelined", on GPUs, fused, and the down product runs on
        multiprocessors of its own beside gate and up, so that rows return from the first tile on; "mega", on GPUs, one
        kernel for each direction behind the plan or the entry, whose programs claim the tasks of the compiler's lists.
    transfer: how GPU ranks send tokens.  "push", programs store the deduplicated tokens; "copy", copy engines send
        every token to every peer: no program is lost to it, and it need not wait for the plan, but tokens travel
        that no expert of the peer wants.
    tile_order: "natural", tiles in expert order; "local-first", tiles whose rows are all local first,
        then the rest, each class in expert order; "chunk-major", `chunk_experts` experts go through all GEMMs, one
        GEMM behind the other, while the next ones begin (on GPUs with overlap="mega"); "critical-path", list scheduling
        by the CPU executor: a free worker takes the task that most work still depends on.
    chunk_experts: of tile_order="chunk-major".
    peer_order: inside an expert, "natural", row tiles ascending; "rotated", the first GEMM in the order in which
        peers' tokens arrive, and what returns rows begins with the next rank's, so that no two ranks write to the
        same peer in the same place of their lists.  (On GPUs with overlap="mega".)
    weight_gradient_order: "last", when all else of the backward is done or waits; "interleaved", those of an expert
        behind the rows that it returns, so that returns are spread over the weight gradients.  (On GPUs likewise.)
    activation: "fused", in the epilogue of the GEMM before it; "separate", tiles of their own for vector workers.
    chunk_tokens: tokens pushed under one arrival signal.
    operand: how GPU kernels read the rows of the first GEMM.  "gathered", where they lie, so that the
        dispatch hides under the GEMM; "expanded", from a contiguous copy that the dispatch makes and
        backward uses again (faster GEMM and backward, more memory).
    gemm1, gemm2: tiles of the forward GEMMs; gemm2 also serves dgrad1 and dgrad2.  weight_gradient: of dW13 and
        dW2; its rows and columns tile the output.  (The CPU takes gemm1 and gemm2 for the backward, too.)
    push_programs: GPU programs that push tokens before they join the other work.
    mega_to: tokens of a rank up to which a call of this rank runs as overlap="mega" (unless serial); on GPUs.
    down_sms: multiprocessors of the pipelined down product until gate and up are done.
    pipelined_from: tokens of a rank from which it is pipelined; with fewer, a call of this rank is fused.
    group_sum: where GPUs add the rows of combine groups in the forward.  "after", in a pass behind the down product;
        "beside", by programs of their own as its row tiles are done, those of peers' tokens first, so that sums travel
        while the product goes on (fused only).  In the backward they hide under the weight gradients.
    activation_gradient: where GPUs run the activation's gradient.  "after", in a pass behind the product that feeds it;
        "beside", by programs of their own as its row tiles are done and lie in L2 (not serial).
    beside_from: tokens of a rank from which it runs beside; with fewer, after.
    free_sms: multiprocessors that kernels of GPUs leave to others, such as the collectives of data parallelism.  Where
        others hold more than that, a GEMM takes two rounds on what is left.
    matrix_workers, vector_workers: threads per rank of the CPU executor.
    received: what backward reads of other ranks' tokens.  "saved", a compact copy that forward keeps;
        "again", the tokens are dispatched again (no memory between forward and backward).
    """

    overlap: Literal["serial", "fused", "pipelined", "mega"] = "fused"
    transfer: Literal["push", "copy"] = "push"
    tile_order: Literal["natural", "local-first", "chunk-major", "critical-path"] = "local-first"
    chunk_experts: int = 1
    peer_order: Literal["natural", "rotated"] = "natural"
    weight_gradient_order: Literal["last", "interleaved"] = "last"
    activation: Literal["fused", "separate"] = "fused"
    operand: Literal["gathered", "expanded"] = "gathered"
    gemm1: Tile = Tile(stages=4)
    gemm2: Tile = Tile(stages=4)
    chunk_tokens: int = 64
    weight_gradient: Tile = Tile()
    push_programs: int = 16
    down_sms: int = 32
    pipelined_from: int = 0
    group_sum: Literal["after", "beside"] = "after"
    activation_gradient: Literal["after", "beside"] = "after"
    beside_from: int = 2048
    mega_to: int = 0
    free_sms: int = 0
    matrix_workers: int = 1
    vector_workers: int = 1
    received: Literal["saved", "again"] = "saved"

    def is_mega(self, num_tokens: int) -> bool:
        """Whether a call of a rank with so many tokens is one kernel for each direction."""
        return self.overlap == "mega" or (self.overlap != "serial" and 0 < self.mega_to >= num_tokens)

    def is_beside(self, num_tokens: int) -> bool:
        """Whether the activation's gradient of a call that is not mega runs beside the product that feeds it."""
        return self.overlap != "serial" and self.activation_gradient == "beside" and num_tokens >= self.beside_from

    @property
    def name(self) -> str:
        parts: list[str] = [self.overlap, self.tile_order]
        parts += [self.transfer] * (self.transfer == "copy") + [self.peer_order] * (self.peer_order == "rotated")
        parts += [self.weight_gradient_order] * (self.weight_gradient_order == "interleaved")
        parts += ["activation"] * (self.activation == "separate")
        return "/".join(parts)


CHOICES = {
    field.name: get_args(kind)
    for field in dataclasses.fields(Schedule)
    if get_origin(kind := get_type_hints(Schedule)[field.name]) is Literal
}
"""Of each field that names one of several ways."""

DEFAULT_SCHEDULES = {
    "cpu": Schedule(),
    "hopper": Schedule(push_programs=16, chunk_tokens=32, activation_gradient="beside"),
    "nccl": Schedule(overlap="serial", tile_order="natural"),
}
"""What each backend starts from unless told otherwise; see `default_schedule`."""

WORTH_COPYING = 0.7
"""Part of the tokens that a peer must want for copy engines to send them all."""


FLOP_PER_WIRE_BYTE = 2074
"""What a GPU's grouped GEMM computes while NVLink takes a byte away (726 TFLOP/s, 350 GB/s: 2x H200)."""

WORTH_PIPELINING = 1.7
"""Time that results take on the wire, over the time of the down product, from which they should start under gate_up."""


PIPELINED_FROM = 4096
"""Tokens; with fewer, sharing the multiprocessors costs more than the wire."""

MEGA_TO = 512
"""Tokens; with more, tiles that programs claim cost more than the launches that one kernel saves."""


def default_schedule(backend: str, cfg: MoEConfig, ep_size: int) -> Schedule:
    """What a backend does unless told otherwise: the best measured for most shapes, untuned."""
    schedule = DEFAULT_SCHEDULES[backend]
    if backend != "hopper":
        return schedule
    # Row tiles of one expert, so that its weights are read once; 16 is where the tiles that run at a time share most.
    tiles = cfg.max_tokens_per_rank * ep_size * cfg.top_k // cfg.num_experts // schedule.gemm1.rows
    rows = {"group_rows": min(max(tiles, schedule.gemm1.group_rows), 16)}
    gemm1, gemm2 = (dataclasses.replace(tile, **rows) for tile in (schedule.gemm1, schedule.gemm2))
    mega_to = MEGA_TO if cfg.combine_groups is None else 0
    schedule = dataclasses.replace(schedule, gemm1=gemm1, gemm2=gemm2, mega_to=mega_to)
    if ep_size == 1 or cfg.max_tokens_per_rank <= mega_to:
        return schedule  # a push inside the one kernel beats copies, which are launches, too
    if cfg.wanted(ep_size) >= WORTH_COPYING:
        schedule = dataclasses.replace(schedule, transfer="copy")
    sent_bytes, flop = (1 - 1 / ep_size) * cfg.hidden * cfg.dtype.itemsize, 2 * cfg.hidden * cfg.ffn  # of a row
    if cfg.combine_groups is None and sent_bytes * FLOP_PER_WIRE_BYTE >= WORTH_PIPELINING * flop:
        schedule = dataclasses.replace(schedule, overlap="pipelined", pipelined_from=PIPELINED_FROM)
    return schedule


def forward_tile(schedule: Schedule) -> Tile:
    """Of the first GEMM, as it tiles the columns of F: a GPU's tile holds gate and up."""
    tile = schedule.gemm1
    return dataclasses.replace(tile, columns=tile.columns // 2) if schedule.overlap == "mega" else tile


def down_gradient_tile(schedule: Schedule) -> Tile:
    """Of dgrad2."""
    return schedule.gemm2 if schedule.overlap == "mega" else schedule.gemm1


FROM_TOKENS = ("pipelined_from", "beside_from", "mega_to")
"""Fields that are numbers of tokens from or up to which something is done, 0 for always or never."""


def num_chunks(cfg: MoEConfig, schedule: Schedule) -> int:
    """Chunks of one rank's tokens, and at most of one send list."""
    return -(-cfg.max_tokens_per_rank // schedule.chunk_tokens)


MAX_WORKERS = 1024
"""Threads of one class, per rank."""


def _ill_typed(schedule: Schedule) -> list[str]:
    """Fields that are not of their kind, or out of all bounds, those of tiles included."""
    if not isinstance(schedule, Schedule):
        return [f"it is {schedule!r}, a {type(schedule).__name__}; pass a uniep.Schedule"]
    reasons = []
    for name, choices in CHOICES.items():
        value = getattr(schedule, name)
        if not isinstance(value, str) or value not in choices:
            listed = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
            reasons.append(f"{name} is {value!r}; use {listed}")
    for field in dataclasses.fields(schedule):
        name, value = field.name, getattr(schedule, field.name)
        unit = " tokens" if name in FROM_TOKENS else ""
        if isinstance(field.default, Tile):
            if not isinstance(value, Tile):
                reasons.append(f"{name} is {value!r}, a {type(value).__name__}; pass a uniep.Tile")
                continue
            for part in dataclasses.fields(value):
                if reason := refused_number(getattr(value, part.name), 1):
                    reasons.append(f"{name}.{part.name} is {reason}")
        elif isinstance(field.default, int):
            most = MAX_WORKERS if name.endswith("_workers") else MAX_INDEX
            if reason := refused_number(value, 0 if unit or field.default == 0 else 1, most):
                reasons.append(f"{name} is {reason.replace(';', f'{unit};', 1)}")
    return reasons


def is_valid(schedule: Schedule, cfg: MoEConfig) -> list[str]:
    """Reasons why `schedule` cannot run `cfg`; an empty list means that it can."""
    if reasons := _ill_typed(schedule):
        return reasons

    def need(ok: bool, text: str) -> None:
        if not ok:
            reasons.append(text)

    need(
        schedule.group_sum != "beside" or schedule.overlap == "fused",
        f"group_sum='beside' needs overlap='fused', not {schedule.overlap!r}",
    )
    tiles = {name: getattr(schedule, name) for name in ("gemm1", "gemm2", "weight_gradient")}
    if schedule.is_mega(0):
        way_out = "overlap='fused'" if schedule.overlap == "mega" else "mega_to=0"
        for name, value, only in (
            ("operand", schedule.operand, "gathered"),
            ("received", schedule.received, "saved"),
            ("combine_groups", cfg.combine_groups, None),
            *((f"{name}.programs_per_sm", tile.programs_per_sm, 1) for name, tile in tiles.items()),
            *((f"{name}.warps", tile.warps, schedule.gemm1.warps) for name, tile in tiles.items()),
        ):
            need(value == only, f"{name} is {value!r}; overlap='mega' needs {only!r}, or use {way_out}")
    for name, tile in tiles.items():
        need(
            tile.rows in (64, 128) and ROW_ALIGN % tile.rows == 0,
            f"{name}.rows is {tile.rows}; it must be 64 or 128 (segments are aligned to {ROW_ALIGN})",
        )
        need(
            tile.depth >= 16 and ROW_ALIGN % tile.depth == 0,
            f"{name}.depth is {tile.depth}; it must be 16, 32, 64 or 128 (segments are walked in such steps)",
        )
        need(tile.warps in (4, 8, 16), f"{name}.warps is {tile.warps}; it must be 4, 8 or 16")
        need(1 <= tile.group_rows <= 64, f"{name}.group_rows is {tile.group_rows}; it must be 1 to 64")
        need(
            tile.columns >= COLUMN_GROUP and tile.columns % COLUMN_GROUP == 0,
            f"{name}.columns is {tile.columns}; it must be a multiple of {COLUMN_GROUP}",
        )
    return reasons


MEGA_FIELDS = ("chunk_experts", "peer_order", "weight_gradient_order")
"""Of the GPUs' lists of tasks."""


def refuse_invalid(schedule: Schedule, cfg: MoEConfig) -> None:
    """Raise ConfigError with all reasons of `is_valid`."""
    if reasons := is_valid(schedule, cfg):
        raise ConfigError("this Schedule cannot run this MoEConfig: " + "; ".join(reasons))


def refuse_other_fields(schedule: Schedule, backend: str, known: Collection[str]) -> None:
    """Raise ConfigError for fields, and orders of tiles, that mean nothing to `backend`, unless as in its default."""
    default = DEFAULT_SCHEDULES[backend]
    mega = backend == "hopper" and schedule.overlap == "mega"
    how = f" with overlap={schedule.overlap!r}" if backend == "hopper" else ""
    known = (*known, *(MEGA_FIELDS if mega else ()))
    orders = ("natural", "local-first", *(("chunk-major",) if mega else ()))
    if backend != "cpu" and schedule.tile_order not in orders:
        raise ConfigError(
            f"Schedule.tile_order is {schedule.tile_order!r}, but backend {backend!r} knows only "
            f"{' and '.join(map(repr, orders))}{how}"
        )
    other = [
        f"Schedule.{field.name} is {value!r}, but backend {backend!r} knows only {only!r}{how}"
        for field in dataclasses.fields(schedule)
        if (value := getattr(schedule, field.name)) != (only := getattr(default, field.name))
        and field.name not in known
    ]
    if other:
        raise ConfigError(f"{'; '.join(other)}. It uses {', '.join(known)}")
