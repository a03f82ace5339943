"""Every large buffer of a rank by name, size and reason: `plan_memory`.

Rows of the experts are ordinary tensors, allocated per call; what peers write into is laid out by `uniep.layout`.

Legend: R ranks, T max_tokens_per_rank, K slots, D hidden, F ffn, N padded rows of this rank.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from uniep.config import COLUMN_GROUP, ROW_ALIGN, MoEConfig, refused_number
from uniep.errors import CapacityError, ConfigError, check_kind
from uniep.layout import (
    SUMMED_AT_ONCE,
    Arrays,
    backward_tiles,
    balanced_rows,
    cpu_arrays,
    hopper_arrays,
    hopper_histogram,
    hopper_parts_arrays,
    hopper_plan_arrays,
    hopper_rows,
    kept_block,
    kept_shape,
    list_words,
    padded_rank,
    plan_words,
    row_tables,
    steps,
    tile_tables,
)
from uniep.limits import group_limit, lora_limit, shape_limit
from uniep.row_operator import RowOperator, refuse_operators
from uniep.schedule import Schedule, refuse_invalid
from uniep.stages import CALLER, DIRECTIONS, END, SAVED, stages
from uniep.way import ADAPTABLE, Way, resolve

Kind = Literal["shared", "saved", "transient"]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One allocation of a rank: what it holds and why it has this size.

    during: the stages of a forward and its backward in which a transient buffer exists.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind
    why: str
    during: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """All buffers of one rank for one layer."""

    title: str
    buffers: tuple[Buffer, ...]

    def total_bytes(self, kind: Kind | None = None) -> int:
        return sum(b.bytes for b in self.buffers if kind in (None, b.kind))

    def peak_bytes(self) -> int:
        """Most bytes that one forward and its backward need on top of shared buffers."""
        at_once = collections.Counter[str]()
        for b in self.buffers:
            at_once.update(dict.fromkeys(b.during, b.bytes))
        return self.total_bytes("saved") + max(at_once.values())

    def explain(self, only: Kind | None = None) -> str:
        """A table: one line per buffer, then the totals.  only: list only buffers of this kind."""
        rows: list[tuple[str, ...]] = [
            (b.kind, b.name, " x ".join(map(str, b.shape)), _dtype(b.dtype), size_text(b.bytes), b.why)
            for b in self.buffers
            if only in (None, b.kind)
        ]
        kinds = {kind: why for kind, why in _KINDS.items() if only in (None, kind)}
        rows += [("total", kind, "", "", size_text(self.total_bytes(kind)), why) for kind, why in kinds.items()]
        if only is None:
            rows.append(
                ("peak", "call", "", "", size_text(self.peak_bytes()), "saved, and transient buffers alive at once")
            )
        head = ("kind", "buffer", "shape", "dtype", "size", "why")
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head) - 1)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]).rstrip()
            for row in (head, *rows)
        ]
        return "\n".join([self.title, *lines])

    def __str__(self) -> str:
        return self.explain()


_KINDS: dict[Kind, str] = {
    "shared": "once per Workspace, for all its layers",
    "saved": "per call, from forward to backward",
    "transient": "during one call, not all at once",
}


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def size_text(count: int) -> str:
    """A number of bytes in the largest unit that fits."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


_SHARED_WHY = {
    "receive": "tokens of the other ranks, each once per rank, and one zero row that pad rows read",
    "returns": "a row per slot (or combine group) of a token: experts' ranks write results (and dX) straight into it",
    "dweights": "one fp32 gradient per routing weight, written by the expert's rank",
    "exchange": "T, routing ids, weights and refusals of every rank; two parities",
    "status": "this rank's failure; why each other rank gave up or left",
    "exchange_header": "call number, operation, T and refusals of every rank; two parities",
    "exchange_text": "the text of a refusal; two parities",
    "exchange_ids": "routing ids of every rank; two parities",
    "exchange_weights": "routing weights of every rank; two parities",
    "entered": "the last call that each rank entered",
    "failed": "set, with the reason, by a rank that gave up",
    "flags": "arrival and return signals",
    "tokens": "this rank's tokens, from where peers fetch them; in a backward its rows of dO",
}


def plan_memory(
    cfg: MoEConfig,
    ep_size: int,
    *,
    copies: int = 1,
    backend: str = "hopper",
    schedule: Schedule | None = None,
    tokens: int | None = None,
    operators: Sequence[RowOperator] = (),
    lora: int | None = None,
) -> MemoryPlan:
    """The buffers of one rank: those that peers write into, those saved for backward, and the large ones of a call.

    Needs no GPU and no process group.  copies: EP groups with the same experts, of `Workspace(copies=)`.
    backend: "hopper", "cpu" or "nccl".  schedule: default the backend's own.
    operators: of `Workspace(operators=)`; what they allocate themselves is not known.
    lora: rank r of low-rank factors beside w13 and w2, which get the gradients; None: whole experts are trained.
    tokens: T per rank and call; default cfg.max_tokens_per_rank.  Rows of the experts are those of balanced
    routing unless cfg.max_rows fixes them (hopper).
    Raises ConfigError if ep_size ranks of this backend, and their copies, cannot run cfg or schedule, tokens exceed the
    maximum, or the backend is unknown; UnsupportedError if it cannot run factors of rank `lora`.
    """
    check_kind("cfg", cfg, MoEConfig)
    if backend not in tuple(_BUFFERS):
        raise ConfigError(f"backend is {backend!r}; plan_memory knows {', '.join(map(repr, _BUFFERS))}")
    if reason := refused_number(copies, 1):
        raise ConfigError(f"copies is {reason}")
    cfg.check_group(ep_size, copies)
    if backend == "hopper" and (limit := shape_limit(cfg) or group_limit(ep_size)) is not None:
        raise type(limit)(f"{limit}; or use backend='nccl'")
    if schedule is not None:
        refuse_invalid(schedule, cfg, ep_size, backend)
    tokens = cfg.max_tokens_per_rank if tokens is None else tokens
    if not isinstance(tokens, int) or not 0 <= tokens <= cfg.max_tokens_per_rank:
        raise ConfigError(f"tokens is {tokens}; it must be between 0 and max_tokens_per_rank={cfg.max_tokens_per_rank}")
    refuse_operators(operators, backend)
    adapted: tuple[str, ...] = ()
    if lora is not None:
        if reason := refused_number(lora, 1):
            raise ConfigError(f"lora is {reason}")
        if backend == "hopper" and (error := lora_limit(lora)) is not None:
            raise type(error)(f"lora: {error}")
        adapted = ADAPTABLE
    way = resolve(cfg, ep_size, tokens, schedule, backend=backend, operators=operators, lora=adapted)
    call = _Call(cfg, ep_size, tokens, way, copies, lora)
    title = (
        f"{backend}: {cfg.num_experts} experts over {ep_size} ranks, T={tokens} of {cfg.max_tokens_per_rank}, "
        f"K={cfg.top_k}, D={cfg.hidden}, F={cfg.ffn}, {_dtype(cfg.dtype)}"
        + (f", LoRA of rank {lora}" if lora is not None else "")
        + (f", {cfg.gradient_shards} gradient shards over {copies} copies" if cfg.gradient_shards > 1 else "")
    )
    sizes, lives = [*_BUFFERS[backend](call), *_gradient_blocks(call, backend), *_results(call)], _lives(cfg, call.way)
    buffers = [
        Buffer(size.name, size.shape, size.dtype, kind, size.why, during)
        for size in sizes
        if (size.like or size.name) in lives
        for kind, during in [lives[size.like or size.name]]
    ]
    return MemoryPlan(title, (*_shared(call, backend), *buffers))


def check_room(plan: MemoryPlan, needed: int, free_R: Sequence[int]) -> None:
    """Raise CapacityError, the same on every rank, unless each rank's GPU has room for the shared buffers.

    needed: bytes on each rank.  free_R: free bytes of each rank.  plan: the buffers.
    """
    short = {rank: free for rank, free in enumerate(free_R) if free < needed}
    if short:
        which = ", ".join(f"rank {rank}: {size_text(free)}" for rank, free in short.items())
        raise CapacityError(
            f"shared buffers take {size_text(needed)} of every rank's GPU, which has less free ({which}); lower "
            "max_tokens_per_rank, free other memory, or use backend='nccl' (collectives), which shares none.\n"
            f"{plan.explain('shared')}"
        )


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of balanced routing on one rank."""

    cfg: MoEConfig
    ep_size: int
    tokens: int
    way: Way
    copies: int
    lora: int | None = None

    @property
    def local(self) -> int:
        return self.cfg.experts_per_rank(self.ep_size)

    @property
    def rows(self) -> int:
        return balanced_rows(self.cfg, self.ep_size, self.tokens)

    @property
    def received(self) -> int:
        """Tokens of other ranks, each once."""
        return round((self.ep_size - 1) * self.tokens * self.cfg.wanted(self.ep_size))

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what has gradients: weights of experts, or both of their factors as one."""
        e, d, f, h, r = self.local, self.cfg.hidden, self.cfg.ffn, self.cfg.h_columns, self.lora
        return {"w13": (e, h, d), "w2": (e, d, f)} if r is None else {"lora13": (e, r, d + h), "lora2": (e, r, f + d)}

    @property
    def column_groups(self) -> int:
        return -(-self.cfg.ffn // COLUMN_GROUP)

    @property
    def parts(self) -> int:
        """Sums of combine groups; with balanced routing as many leave this rank as arrive."""
        groups = self.cfg.combine_groups or 0
        return round(self.tokens * groups * self.cfg.wanted(groups)) if groups else 0


class _Size(NamedTuple):
    """Of a buffer that a call makes, if its stages do.  like: one that lives as long."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    why: str
    like: str = ""


def _shared(c: _Call, backend: str) -> list[Buffer]:
    """What peers write into."""
    arrays: Arrays = _ARRAYS[backend](c.cfg, c.ep_size, c.way) if backend in _ARRAYS else {}
    return [Buffer(name, *array, "shared", _SHARED_WHY[name]) for name, array in arrays.items()]


_ARRAYS = {"hopper": hopper_arrays, "cpu": cpu_arrays}


def _lives(cfg: MoEConfig, way: Way) -> dict[str, tuple[Kind, tuple[str, ...]]]:
    """Kind of each buffer that stages make, and the stages in which a transient one exists."""
    kinds: dict[str, Kind] = {}
    during: dict[str, list[str]] = {}
    after: list[str] = []  # what is the caller's from the forward on
    for direction in DIRECTIONS:
        made = stages(cfg, way, direction)
        moments, names = [f"{direction}: {s.name}" for s in made], [s.name for s in made]
        for name in after:
            during[name] += moments
        for first, (name, until) in ((n, held) for n, s in enumerate(made) for held in s.buffers):
            kinds[name] = "saved" if until == SAVED else "transient"
            last = len(made) if until in (SAVED, CALLER, END) else names.index(until) + 1
            during.setdefault(name, []).extend(moments[first:last])
            after += [name] * (until == CALLER)
    return {name: (kind, tuple(during[name]) if kind == "transient" else ()) for name, kind in kinds.items()}


_RESULTS = "results (and dX) of every row"
_ALIGNED = f"rows of balanced routing, each expert aligned to {ROW_ALIGN}"
_F32, _I32, _I64 = torch.float32, torch.int32, torch.int64


def _cpu(c: _Call) -> list[_Size]:
    cfg, rows, dtype = c.cfg, c.rows, c.cfg.dtype
    received = 0 if c.way.again else c.received
    return [
        _Size("raw", (rows, cfg.ffn), _F32, "backward: dO @ W2"),
        _Size("received", (received, cfg.hidden), dtype, "compact copy of other ranks' tokens, for dW13"),
        _Size("h", (rows, cfg.h_columns), dtype, f"gate and up before the activation; {_ALIGNED}"),
        _Size("fingerprint", (1,), _I64, "names the forward that a backward belongs to"),
        _Size("act", (rows, cfg.ffn), dtype, "activation; in backward, weighted, for dW2"),
        _Size("dh", (rows, cfg.h_columns), dtype, "backward: gradient of h"),
        _Size("results", (rows, cfg.hidden), dtype, _RESULTS),
        _groups(c, rows, of_bias=True),
    ]


def _hopper(c: _Call) -> list[_Size]:
    cfg, dtype = c.cfg, c.cfg.dtype
    rows, _ = hopper_rows(cfg, c.ep_size, c.tokens)
    rows_why = f"room for max_rows={cfg.max_rows}" if cfg.max_rows is not None else f"{_ALIGNED}, and 1/32 more"
    plan = sum(plan_words(hopper_plan_arrays(cfg, c.ep_size, c.tokens)))
    extent = 3 if cfg.max_rows is None else 0
    expanded = c.way.expanded
    sent = c.tokens if c.way.transfer == "copy" else c.received // max(c.ep_size - 1, 1)
    block = kept_block(cfg, c.ep_size, sent, copying=c.way.transfer == "copy")
    kept = (rows, cfg.hidden) if expanded else kept_shape(cfg, c.ep_size, c.way, block)
    again = (c.ep_size - 1) * cfg.receive_block, cfg.hidden
    parts = sum(plan_words(hopper_parts_arrays(cfg, c.ep_size))) if c.way.grouped else 0
    tiles = backward_tiles(cfg, c.way, w13=True, w2=True)
    lists = sum(list_words(rows // c.way.gate_up.rows, c.local, tiles, backward=True))
    return [
        _Size("extent", (extent,), _I64, "on the host: how many of the allocated rows a call has"),
        _Size("plan", (plan,), _I32, "counts and send lists"),
        _Size("tiles", tile_tables(rows, c.way.gate_up.rows), _I32, "expert, orders and groups of every row tile"),
        _Size("histogram", hopper_histogram(cfg, c.ep_size, c.way.sends_by_expert), _I32, "what the plan counts"),
        _Size("rows", row_tables(rows, c.way.pulls), _I32, f"source, return slot and weight of every row; {rows_why}"),
        _Size("parts", (parts,), _I32, "which rows combine groups add, and where sums go"),
        _Size("h", (1 + cfg.gated, rows, cfg.ffn), dtype, "gate and up before the activation"),
        _Size("kept", kept, dtype, "every row's input" if expanded else "received tokens, for dW13"),
        _Size("received_again", again, dtype, "backward: tokens dispatched again, for h and dW13"),
        _Size("act", (rows, cfg.ffn), dtype, "activation; in backward, weighted, for dW2"),
        _Size("raw", (rows, cfg.ffn), _F32, "backward: dO @ W2"),
        _Size("lists", (lists,), _I64, "tasks of the kernel"),
        _Size("valid", (rows,), torch.bool, "which rows are of tokens, for torch functions of one's own"),
        _Size("dh", (rows, 1 + cfg.gated, cfg.ffn), dtype, "backward: gradient of h"),
        _Size("address", (2, rows + 2 * ROW_ALIGN), _I64, "of rows of x and dO"),
        _groups(c, rows),
        _Size("results", (rows, cfg.hidden), dtype, _RESULTS),
        *(
            _Size(name, (rows, padded_rank(c.lora or 1)), dtype, f"{why}, r padded")
            for name, why in (
                ("u13", "s x A13^T, for dB13"),
                ("u2", "s act A2^T; in backward, weighted, for dB2"),
                ("v2", "backward: s dO B2, for dA2"),
                ("v13", "backward: s dh B13, for dA13"),
            )
        ),
    ]


def _nccl(c: _Call) -> list[_Size]:
    """Assumes the hopper kernels, except with low-rank factors, which torch operations compute: an expert at a time,
    without copies of x and dO by row."""
    cfg, ranks, rows, dtype = c.cfg, c.ep_size, c.rows, c.cfg.dtype
    received = 0 if c.way.again else c.received + 1
    plan = ranks * (cfg.num_experts + c.tokens + 2) + c.local + 1
    return [
        _Size("received", (received, cfg.hidden), dtype, "other ranks' tokens and a zero row, for dW13"),
        _Size("h", (rows, cfg.h_columns), dtype, f"gate and up before the activation; {_ALIGNED}"),
        _Size("fingerprint", (1,), _I64, "names the forward that a backward belongs to"),
        _Size("row_weight", (rows,), _F32, "routing weight of every row"),
        _Size("plan", (plan,), _I32, "RoutingPlan: counts, segments, send lists"),
        _Size("rows", (2, rows), _I32, "RoutingPlan: source and return slot of every row"),
        _Size("act", (rows, cfg.ffn), dtype, "activation; in backward, weighted, for dW2"),
        _Size("sent", (c.received, cfg.hidden), dtype, "tokens for other ranks, sorted by rank"),
        _Size("received_again", (c.received + 1, cfg.hidden), dtype, "other ranks' tokens, not kept for backward"),
        _Size("received_dy", (c.received + 1, cfg.hidden), dtype, "backward: other ranks' dO"),
        _Size("x_rows", (rows, cfg.hidden), dtype, "x of every row; in backward, dO, too"),
        _Size("results", (rows, cfg.hidden), dtype, _RESULTS),
        *_nccl_returns(c),
        _Size("raw", (rows, cfg.ffn), _F32, "backward: dO @ W2"),
        _Size("dh", (rows, cfg.h_columns), dtype, "backward: gradient of h"),
        _Size("of_expert", (_AT_ONCE, rows // c.local, cfg.ffn), _F32, "backward: one expert's rows at a time"),
        _groups(c, rows),
    ]


_AT_ONCE = 11
"""Matrices of an expert's rows in the gradient of the activation, by torch operations."""


def _nccl_returns(c: _Call) -> list[_Size]:
    cfg, dtype = c.cfg, c.cfg.dtype
    sent = c.parts if c.way.grouped else c.tokens * cfg.top_k
    return [
        _Size("parts", (c.parts, cfg.top_k), _I64, "which rows combine groups add"),
        _Size("sorted", (2, sent, cfg.hidden), dtype, "results, or sums of groups, as they are sent, and arrived"),
        _Size("slots", (c.tokens * cfg.return_slots, cfg.hidden), dtype, "what arrived, by slot"),
    ]


_BUFFERS: dict[str, Callable[[_Call], list[_Size]]] = {"hopper": _hopper, "cpu": _cpu, "nccl": _nccl}


def _groups(c: _Call, rows: int, of_bias: bool = False) -> _Size:
    """of_bias: those of dO . b2 are kept, too."""
    why = f"backward: sums of {COLUMN_GROUP} columns"
    groups = c.column_groups + (steps(c.cfg.hidden, COLUMN_GROUP) if of_bias and c.cfg.bias else 0)
    return _Size("dweight_groups", (rows, groups), _F32, why)


def _gradient_blocks(c: _Call, backend: str) -> list[_Size]:
    """What `MoEConfig.gradient_shards` needs beyond the gradients."""
    cfg, blocks = c.cfg, c.cfg.gradient_shards // c.copies
    found, of, like = [], c.trained, f"d{[*c.trained][1]}"
    if c.copies > 1:
        if cfg.bias and c.lora is None:
            of |= {"b13": (c.local, cfg.h_columns), "b2": (c.local, cfg.hidden)}
        why = f"fp32, {blocks} blocks of ranks apart"
        at_once = (2 * blocks + 2, min(max(map(math.prod, of.values())), SUMMED_AT_ONCE))
        found += [
            *(_Size(f"d{name}_blocks", (blocks, *shape), _F32, why, like) for name, shape in of.items()),
            _Size("dw_copies", at_once, _F32, "sent to copies and received, a part at a time", like),
            *(_Size(f"d{name}_sum", shape, _F32, "fp32, over all blocks", like) for name, shape in of.items()),
        ]
    if blocks > 1 and (backend == "hopper" or (backend == "nccl" and c.lora is None)):  # kernels contract them
        rows, _ = hopper_rows(cfg, c.ep_size, c.tokens)
        places = rows + (c.local * blocks + 2) * max(c.way.weight_gradient.depth, 64)
        found.append(_Size("block_rows", (6, places), _I64, "which rows each block has, and where they lie", like))
    return found


def _results(c: _Call) -> list[_Size]:
    cfg, why = c.cfg, "backward: gradient; belongs to the caller"
    return [
        _Size("y", (c.tokens, cfg.hidden), cfg.dtype, "the result; belongs to the caller"),
        _Size("dx", (c.tokens, cfg.hidden), cfg.dtype, why),
        *(_Size(f"d{name}", shape, cfg.dtype, why) for name, shape in c.trained.items()),
        *(
            _Size(name, (c.local, columns), cfg.dtype, why)
            for name, columns in (("db13", cfg.h_columns), ("db2", cfg.hidden))
            if cfg.bias and c.lora is None
        ),
    ]
