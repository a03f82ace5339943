"""What autograd keeps of a forward without `max_rows`, whose rows were allocated by the last call's need.

Checkpointing compares the shapes that a forward saves with those of its recomputation, and calls in between may have
changed how much is allocated.  So its hooks get views of what the call really has: their shapes depend on nothing but
its inputs.  Their strides say what was allocated, from which a backward goes on, so that calls stay alike.

The list: extent; of the plan head, tiles_AM, rows_BN; lines and u13_NR, if there are any; h_2NF; kept.  Trimmed, those
with rows have planes before them, also if it is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from uniep.config import ROW_ALIGN, align_rows
from uniep.layout import tile_tables


def extent(rows: int, received: int, sources: int) -> Tensor:
    """(3,) int64 on the host: padded rows; most tokens that one source has sent; sources whose tokens are kept, a block
    of each, or 0: the input of every row is kept, or nothing."""
    return torch.tensor((rows, received, sources), device="cpu")


def trimmed(saved: Sequence[Tensor], tile_rows: int) -> list[Tensor]:
    """Views of what the call has.  tile_rows: of a row tile."""
    of_call, head, tiles_AM, rows_BN, *between, h_2NF, kept = saved
    rows, received, sources = of_call.tolist()
    rows, received = max(rows, ROW_ALIGN), max(align_rows(received), ROW_ALIGN)  # descriptors need memory
    tiles_AM = _first(tiles_AM, tile_tables(rows, tile_rows)[1])
    between = [_first(t.unsqueeze(0), rows) if t.dim() == 2 else t for t in between]
    kept = _first(kept.view(max(sources, 1), -1, kept.shape[1]), received if sources else rows)
    return [of_call, head, tiles_AM, _first(rows_BN, rows), *between, _first(h_2NF, rows), kept]


def whole(saved: Sequence[Tensor], tile_rows: int) -> list[Tensor]:
    """What `trimmed` got, without extent.  Where hooks have moved some elsewhere, which copies what they see, all have
    as many rows as each."""
    _, head, tiles_AM, rows_BN, *between, h_2NF, kept = saved
    if kept.dim() == 2:  # nothing was trimmed
        return [*saved[1:]]
    rows = _allocated(tiles_AM) * tile_rows
    for t in (rows_BN, h_2NF, *between):
        if t.dim() > 1 and t.shape[1]:
            rows = min(rows, _allocated(t))
    tiles_AM = _first(tiles_AM, tile_tables(rows, tile_rows)[1]).contiguous()
    between = [_first(t, rows).contiguous()[0] if t.dim() == 3 else t for t in between]
    kept = _first(kept, _allocated(kept)).flatten(0, 1)
    return [head, tiles_AM, _first(rows_BN, rows).contiguous(), *between, _first(h_2NF, rows).contiguous(), kept]


def _allocated(planes: Tensor) -> int:
    """Rows of each plane that have memory: a copy of one plane may keep its stride, but not what lies behind."""
    there = planes.untyped_storage().nbytes() // planes.element_size() - planes.storage_offset()
    return min(planes.stride(0), there) // planes.stride(1)


def _first(planes: Tensor, rows: int) -> Tensor:
    """So many rows of each plane, also behind those that are seen; none of a plane that has none.  Always the same
    operator: selective checkpointing counts them."""
    shape = planes.shape[0], rows if planes.shape[1] else 0, *planes.shape[2:]
    return planes.as_strided(shape, planes.stride())
