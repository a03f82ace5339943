"""Where the bytes go: every buffer of one layer by name, size and reason; pure arithmetic.

Two kinds of memory are bounded whatever the routing: what peers write into (`shared_layout`), and nothing
else.  Rows of the experts grow with imbalance; they are ordinary tensors, allocated per call.

Legend: R ranks, T max_tokens_per_rank, K slots, D hidden, F ffn, N padded rows of this rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from uniep.config import COLUMN_GROUP, ROW_ALIGN, MoEConfig, align_rows, max_padded_rows
from uniep.errors import ConfigError

ALIGN_BYTES = 256
HEADER_INTS = 64
TEXT_BYTES = 4096

Kind = Literal["shared", "saved", "transient"]


class Field(NamedTuple):
    """One array inside a rank's shared memory."""

    offset: int  # bytes, a multiple of ALIGN_BYTES
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One allocation of a rank: what it holds and why it has this size."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind
    why: str

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

    def explain(self) -> str:
        """A table: one line per buffer, then the totals."""
        rows: list[tuple[str, ...]] = [
            (b.kind, b.name, " x ".join(map(str, b.shape)), _dtype(b.dtype), _size(b.bytes), b.why)
            for b in self.buffers
        ]
        rows += [("total", kind, "", "", _size(self.total_bytes(kind)), why) for kind, why in _KINDS.items()]
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
    "transient": "during one call",
}


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


_SHARED_WHY = {
    "receive": "tokens of the other ranks, each once per rank, and one zero row that pad rows read",
    "returns": "one row per slot: experts write results (and dX) straight into the token's rank",
    "dweights": "one fp32 gradient per routing weight, written by the expert's rank",
    "exchange_header": "call number, operation, T and refusals of every rank; two parities",
    "exchange_text": "the text of a refusal; two parities",
    "exchange_ids": "routing ids of every rank; two parities",
    "exchange_weights": "routing weights of every rank; two parities",
    "entered": "the last call that each rank entered",
    "failed": "set, with the reason, by a rank that gave up",
    "flags": "arrival and return signals",
}


def pack(arrays: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Field]:
    """Place arrays one behind the other, each at a multiple of ALIGN_BYTES."""
    layout, offset = {}, 0
    for name, (shape, dtype) in arrays.items():
        layout[name] = field = Field(offset, shape, dtype)
        offset += -(-field.bytes // ALIGN_BYTES) * ALIGN_BYTES
    return layout


def packed_bytes(layout: Mapping[str, Field]) -> int:
    """Bytes that hold all of `layout`."""
    return max(f.offset + -(-f.bytes // ALIGN_BYTES) * ALIGN_BYTES for f in layout.values())


def shared_arrays(cfg: MoEConfig, ep_size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every array that peers write into."""
    tokens, slots = cfg.max_tokens_per_rank, cfg.top_k
    return {
        "receive": ((cfg.receive_slots(ep_size) + 1, cfg.hidden), cfg.dtype),
        "returns": ((tokens * slots, cfg.hidden), cfg.dtype),
        "dweights": ((tokens * slots,), torch.float32),
        "exchange_header": ((2, ep_size, HEADER_INTS), torch.int32),
        "exchange_text": ((2, ep_size, TEXT_BYTES), torch.uint8),
        "exchange_ids": ((2, ep_size, tokens * slots), torch.int32),
        "exchange_weights": ((2, ep_size, tokens * slots), torch.float32),
        "entered": ((ep_size,), torch.int64),
        "failed": ((1 + TEXT_BYTES // 8,), torch.int64),
        "flags": ((4, ep_size + 1, max(tokens, 64)), torch.int64),
    }


def shared_layout(cfg: MoEConfig, ep_size: int) -> dict[str, Field]:
    """Name -> (offset, shape, dtype) of one rank's shared memory; the same on every rank."""
    cfg.experts_per_rank(ep_size)
    return pack(shared_arrays(cfg, ep_size))


def plan_memory(cfg: MoEConfig, ep_size: int, *, backend: str = "hopper", tokens: int | None = None) -> MemoryPlan:
    """Every buffer of one rank.  Needs no GPU and no process group.

    tokens: T per rank and call; default cfg.max_tokens_per_rank.  Rows of the experts are those of balanced
    routing unless cfg.max_rows fixes them.
    Raises ConfigError if ep_size does not divide num_experts, tokens exceed the maximum, or backend is unknown.
    """
    if backend not in ("cpu", "hopper"):
        raise ConfigError(f"backend is {backend!r}; plan_memory knows 'hopper' and 'cpu'")
    local = cfg.experts_per_rank(ep_size)
    tokens = cfg.max_tokens_per_rank if tokens is None else tokens
    if not 0 <= tokens <= cfg.max_tokens_per_rank:
        raise ConfigError(f"tokens is {tokens}; it must be between 0 and max_tokens_per_rank={cfg.max_tokens_per_rank}")
    if cfg.max_rows is not None:
        rows, rows_why = max_padded_rows(cfg.max_rows, local), f"room for max_rows={cfg.max_rows}"
    else:
        rows = local * align_rows(-(-tokens * cfg.top_k // local))
        rows_why = f"balanced routing, each expert aligned to {ROW_ALIGN} rows"
    # Of C(E, K) balanced choices, this share has no expert on a given rank.
    misses = math.comb(cfg.num_experts - local, cfg.top_k) / math.comb(cfg.num_experts, cfg.top_k)
    received = round((ep_size - 1) * tokens * (1 - misses))
    groups = -(-cfg.ffn // COLUMN_GROUP)
    plan_ints = 2 * rows + ep_size * (cfg.num_experts + tokens + 2) + local + 1
    i32, f32 = torch.int32, torch.float32

    buffers = [
        Buffer(name, shape, dtype, "shared", _SHARED_WHY[name])
        for name, (shape, dtype) in shared_arrays(cfg, ep_size).items()
    ]
    buffers.append(
        Buffer("h", (rows, 2 * cfg.ffn), cfg.dtype, "saved", f"gate and up before the activation; {rows_why}")
    )
    if ep_size > 1:
        buffers.append(
            Buffer(
                "received",
                (received, cfg.hidden),
                cfg.dtype,
                "saved",
                "compact copy of the tokens of other ranks, for dW13",
            )
        )
    if backend == "cpu":
        buffers.append(
            Buffer("fingerprint", (1,), torch.int64, "saved", "names the forward that a backward belongs to")
        )
    else:
        buffers.append(
            Buffer("plan", (plan_ints,), i32, "saved", "RoutingPlan: counts, row sources, return slots, send lists")
        )
        buffers.append(Buffer("row_weight", (rows,), f32, "saved", "routing weight of every row"))
    buffers += [
        Buffer("y", (tokens, cfg.hidden), cfg.dtype, "transient", "the result; belongs to the caller"),
        Buffer("act", (rows, cfg.ffn), cfg.dtype, "transient", "activation; in backward, weighted, for dW2"),
        Buffer("dh", (rows, 2 * cfg.ffn), cfg.dtype, "transient", "backward: gradient of h"),
        Buffer(
            "dweight_groups",
            (rows, groups),
            f32,
            "transient",
            f"backward: sums of {COLUMN_GROUP} columns for d(weight)",
        ),
        Buffer(
            "dw13",
            (local, 2 * cfg.ffn, cfg.hidden),
            cfg.dtype,
            "transient",
            "backward: gradient; belongs to the caller",
        ),
        Buffer(
            "dw2", (local, cfg.hidden, cfg.ffn), cfg.dtype, "transient", "backward: gradient; belongs to the caller"
        ),
    ]
    title = (
        f"{cfg.num_experts} experts over {ep_size} ranks, T={tokens} of {cfg.max_tokens_per_rank}, K={cfg.top_k}, "
        f"D={cfg.hidden}, F={cfg.ffn}, {_dtype(cfg.dtype)}"
    )
    return MemoryPlan(title, tuple(buffers))
