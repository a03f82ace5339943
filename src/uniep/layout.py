"""The layout of the memory that peers write into, and the sizes of plans, lists and rows.

Pure arithmetic.  Memory that peers write into is allocated once, with a size that does not depend on the routing
(`cpu_arrays`, `hopper_arrays`; the nccl backend has none).  Rows of the experts grow with imbalance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from uniep.config import MoEConfig, align_rows, max_padded_rows
from uniep.schedule import num_chunks
from uniep.way import Way

ALIGN_BYTES = 256
HEADER_WORDS = 32  # int64 words in which a rank of the cpu backend describes a call
EXCHANGE_HEADER = 256  # int32 words ahead of the ids in an exchange slot of the hopper backend
STATUS_RECORD = 16  # int32 words in which a rank of the hopper backend notes its failure
LOST_SLOT = 256  # int32 words in which another rank writes why it left
TEXT_BYTES = 4096  # most bytes of the text of a refusal or failure

Arrays = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Field(NamedTuple):
    """One array inside a rank's shared memory."""

    offset: int  # bytes, a multiple of ALIGN_BYTES
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def pack(arrays: Arrays) -> dict[str, Field]:
    """Place arrays one after the other, each at a multiple of ALIGN_BYTES."""
    layout, offset = {}, 0
    for name, (shape, dtype) in arrays.items():
        layout[name] = field = Field(offset, shape, dtype)
        offset += -(-field.bytes // ALIGN_BYTES) * ALIGN_BYTES
    return layout


def packed_bytes(layout: Mapping[str, Field]) -> int:
    """Bytes that hold all of `layout`."""
    return max(f.offset + -(-f.bytes // ALIGN_BYTES) * ALIGN_BYTES for f in layout.values())


def _row_arrays(cfg: MoEConfig, ep_size: int) -> Arrays:
    slots = cfg.max_tokens_per_rank * cfg.top_k
    return {
        "receive": ((cfg.receive_slots(ep_size) + 1, cfg.hidden), cfg.dtype),
        "returns": ((cfg.max_tokens_per_rank * cfg.return_slots, cfg.hidden), cfg.dtype),
        "dweights": ((slots,), torch.float32),
    }


def cpu_arrays(cfg: MoEConfig, ep_size: int, way: Way) -> Arrays:
    """Every array that peers of the cpu backend write into.

    flags: per parity, a counter for each event (a chunk arrived from a rank, rows of a chunk returned, its weights
    returned), with a column for each worker of each rank.
    """
    slots = cfg.max_tokens_per_rank * cfg.top_k
    events = (ep_size + 2) * num_chunks(cfg, way.chunk_tokens)
    columns = ep_size * (way.matrix_workers + way.vector_workers)
    return {
        **_row_arrays(cfg, ep_size),
        "exchange_header": ((2, ep_size, HEADER_WORDS), torch.int64),
        "exchange_text": ((2, ep_size, TEXT_BYTES), torch.uint8),
        "exchange_ids": ((2, ep_size, slots), torch.int32),
        "exchange_weights": ((2, ep_size, slots), torch.float32),
        "entered": ((ep_size,), torch.int64),
        "failed": ((1 + TEXT_BYTES // 8,), torch.int64),
        "flags": ((2, events, columns), torch.int64),
    }


def hopper_arrays(cfg: MoEConfig, ep_size: int, way: Way) -> Arrays:
    """Every array that peers of the hopper backend write into or, of `tokens`, read from.

    exchange: per parity and source rank, EXCHANGE_HEADER words, then ids and weights.  status: this rank's failure,
    then LOST_SLOT words for each rank.  flags: three words for each rank (entered, finished, returned), then one for
    each chunk of receive slots.  tokens: of this rank, if peers fetch them.
    """
    slots = cfg.max_tokens_per_rank * cfg.top_k
    chunks = cfg.receive_slots(ep_size) // way.chunk_tokens if way.transfer != "copy" else 0
    tokens = ((cfg.max_tokens_per_rank, cfg.hidden), cfg.dtype)
    return {
        **_row_arrays(cfg, ep_size),
        "exchange": ((2, ep_size, EXCHANGE_HEADER + 2 * slots), torch.int32),
        "status": ((STATUS_RECORD + ep_size * LOST_SLOT,), torch.int32),
        "flags": ((3 * flag_step(ep_size) + chunks,), torch.int32),
        **({"tokens": tokens} if way.transfer == "pull" and ep_size > 1 else {}),
    }


def flag_step(ep_size: int) -> int:
    """Words from one kind of the hopper backend's flags to the next; each kind is 16-byte aligned."""
    return -(-ep_size // 4) * 4


TILE_TABLES = (
    "expert_M", "order_M", "backward_order_M", "progress_M", "group_M", "order_group_M", "backward_group_M",
)  # fmt: skip
GROUP_BITS = 7
"""Of a row tile's place in its group, and of the number of row tiles in that: at most 64 (`Tile.group_rows`)."""


def group_words(expert_M: Tensor, tiles_e: Tensor, most: int) -> Tensor:
    """(M,) int32: of each row tile its expert, its place in its group and the height of that, as kernels read them.

    The tiles_e row tiles of each expert are cut evenly into groups of at most `most`, the larger ones first.
    """
    tiles_M = tiles_e[expert_M]
    tile_M = torch.arange(len(expert_M), device=expert_M.device) - (tiles_e.cumsum(0) - tiles_e)[expert_M]
    groups_M = (tiles_M + most - 1) // most
    low_M = tiles_M // groups_M
    of_high_M = tiles_M % groups_M * (low_M + 1)
    is_high_M = tile_M < of_high_M
    height_M = low_M + is_high_M
    place_M = torch.where(is_high_M, tile_M, tile_M - of_high_M) % height_M
    return ((expert_M << 2 * GROUP_BITS) | (place_M << GROUP_BITS) | height_M).int()


def tile_tables(rows: Any, tile_rows: int) -> tuple[int, Any]:
    """Shape of a plan's int32 TILE_TABLES, each aligned to 16 bytes."""
    return len(TILE_TABLES), -(-rows // (4 * tile_rows)) * 4


def row_tables(rows: Any, fetches: bool) -> tuple[int, Any]:
    """Shape of a plan's 4-byte tables of rows: source_N, return_N, weight_N, and with `fetches` recv_token_N: every
    token that this rank fetches has a row."""
    return 3 + fetches, rows


def hopper_plan_arrays(cfg: MoEConfig, ep_size: int, tokens: int | torch.SymInt) -> dict[str, Any]:
    """Shapes of a plan's int32 arrays, except those of rows and tiles; one allocation, see `plan_words`."""
    local = cfg.experts_per_rank(ep_size)
    return {
        "counts_RE": (ep_size, cfg.num_experts),
        "start_e1": (local + 1,),
        "rows_e": (local,),
        "send_count_R": (ep_size,),
        "recv_count_R": (ep_size,),
        "send_token_RT": (ep_size, tokens),
        "cursor": (1,),
        "totals": (2,),  # padded rows, row tiles
        "forward": (1,),  # number of the call that this plan belongs to
    }


def hopper_parts_arrays(cfg: MoEConfig, ep_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the int32 arrays that say which rows combine groups add; one allocation, see kernels/groups.py."""
    lines = (ep_size * cfg.max_tokens_per_rank, cfg.top_k)
    used = (cfg.max_tokens_per_rank, cfg.return_slots)
    return {"row_LK": lines, "slot_LK": lines, "used_TW": used, "cursor": (1,)}


PLAN_ENTRIES = 128  # (token, slot) pairs that one program of the hopper backend's plan reads at once
PLAN_CHUNKS = 1024  # chunks of the tokens of all ranks, each counted by one program
FIRST_TOKENS = 4096  # per rank; a first call allocates rows for at least so many
SUMMED_AT_ONCE = 2**24  # elements of each block of gradients that ranks sum at once


def plan_blocks(cfg: MoEConfig, ep_size: int) -> tuple[int, int]:
    """(Tokens of a block, chunks of the tokens of a rank).  The number of blocks in a chunk depends on the call."""
    tokens = max(PLAN_ENTRIES // power_of_2(cfg.top_k), 1)
    blocks = steps(cfg.max_tokens_per_rank, tokens)
    return tokens, min(max(PLAN_CHUNKS // ep_size, 1), power_of_2(blocks))


def hopper_histogram(cfg: MoEConfig, ep_size: int, by_expert: bool = False) -> tuple[int, int]:
    """Shape of the int32 array for a plan's counts: (experts and ranks) x (chunks of the tokens of all ranks).
    by_expert: with those that order send lists."""
    return cfg.num_experts * (1 + by_expert) + 1 + ep_size, ep_size * plan_blocks(cfg, ep_size)[1]


def steps(extent: int, step: int) -> int:
    """Steps that cover `extent`."""
    return -(-extent // step)


def forward_tiles(cfg: MoEConfig, way: Way) -> tuple[int, int, int, int]:
    """Tile counts of a forward in one kernel: columns of tiles of both products; no tiles of weight gradients."""
    return steps(cfg.ffn, way.gate_up.columns // 2), steps(cfg.hidden, way.down.columns), 0, 0


def backward_tiles(cfg: MoEConfig, way: Way, *, w13: bool, w2: bool) -> tuple[int, int, int, int]:
    """Tile counts of a backward: columns of down_grad and gate_up_grad; tiles of an expert's dW2 and dW13, if
    needed."""
    tile, columns = way.weight_gradient, way.down.columns
    of_expert = steps(cfg.hidden, tile.rows) * steps(cfg.ffn, tile.columns)
    return steps(cfg.ffn, columns), steps(cfg.hidden, columns), of_expert * w2, (1 + cfg.gated) * of_expert * w13


def list_words(most: int, local: int, tiles: tuple[int, int, int, int], *, backward: bool) -> tuple[int, int]:
    """Tasks of the matrix list and of the vector list that a device makes for at most `most` row tiles."""
    first, returning, *weights = tiles
    return most * (first + returning) + local * sum(weights), most * (first + 1) if backward else 1


def padded_rank(r: int) -> int:
    """Columns of rows times a factor of LoRA, as kernels multiply them."""
    return max(power_of_2(r), 16)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def plan_words(arrays: Mapping[str, Any]) -> list[Any]:
    """Words of each array of `hopper_plan_arrays`, padded to 16 bytes."""
    return [-(-math.prod(shape) // 4) * 4 for shape in arrays.values()]


def balanced_rows(cfg: MoEConfig, ep_size: int, tokens: int) -> int:
    """N if every rank has `tokens` tokens and all experts are chosen equally often."""
    local = cfg.experts_per_rank(ep_size)
    return local * align_rows(-(-tokens * cfg.top_k // local))


def with_headroom(rows: int) -> int:
    """Rows to allocate if `rows` are needed: 1/32 more, and never zero (descriptors need memory)."""
    return align_rows(rows + rows // 32 + 1)


def hopper_rows(cfg: MoEConfig, ep_size: int, tokens: int) -> tuple[int, int]:
    """(Rows to allocate for `tokens` balanced tokens per rank, most rows that any call may need)."""
    slots = ep_size * cfg.max_tokens_per_rank * cfg.top_k
    if cfg.max_rows is not None:
        capacity = max_padded_rows(min(cfg.max_rows, slots), cfg.experts_per_rank(ep_size))
        return capacity, capacity
    capacity = max_padded_rows(slots, cfg.experts_per_rank(ep_size))
    return min(with_headroom(balanced_rows(cfg, ep_size, tokens)), capacity), capacity


def kept_block(cfg: MoEConfig, ep_size: int, tokens: int, *, copying: bool) -> int:
    """Receive slots per source whose tokens a forward keeps.  tokens: most that one source is expected to send.

    With cfg.max_rows the host may not read counts, so there is room for all tokens that may come: every pushed token
    has at least one row.
    """
    most = cfg.receive_block
    if cfg.max_rows is not None:
        return most if copying else min(hopper_rows(cfg, ep_size, 0)[1], most)
    return min(with_headroom(tokens), most)


def kept_shape(cfg: MoEConfig, ep_size: int, way: Way, block: int) -> tuple[int, int]:
    """Shape of the tokens that a forward keeps, `block` of each source."""
    return (ep_size - 1) * block if not way.again else 0, cfg.hidden
