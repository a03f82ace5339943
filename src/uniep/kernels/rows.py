"""Row tiles and their groups; rows where they lie: gathered operands and the wait for their arrival."""

import triton
import triton.language as tl

from uniep.kernels.arguments import Rows, Tokens, Wire
from uniep.kernels.ptx import load_acquire
from uniep.kernels.sync import STAGE_DISPATCH, WIDE, every_rank, wait_for
from uniep.layout import GROUP_BITS

PLACE_SHIFT = tl.constexpr(GROUP_BITS)
EXPERT_SHIFT = tl.constexpr(2 * GROUP_BITS)
FIELD_MASK = tl.constexpr(2**GROUP_BITS - 1)


@triton.jit
def num_row_tiles(rows: Rows):
    return tl.load(rows.totals + 1)


@triton.jit
def group_word(expert, tile, tiles, most):
    """What `group_of` reads, of the `tile`-th of a run of `tiles` row tiles of one expert, in groups of at most `most`.

    As `layout.group_words` cuts them: evenly, the larger ones first.  Of an empty run, anything.
    """
    tiles = tl.maximum(tiles, 1)
    groups = tl.cdiv(tiles, most)
    low = tiles // groups
    high = low + 1
    of_high = tiles % groups * high
    is_high = tile < of_high
    place = tl.where(is_high, tile % high, (tile - of_high) % low)
    return (expert << EXPERT_SHIFT) | (place << PLACE_SHIFT) | tl.where(is_high, high, low)


@triton.jit
def group_of(word):
    """(expert, place in its group, height of that) of a row tile."""
    return word >> EXPERT_SHIFT, (word >> PLACE_SHIFT) & FIELD_MASK, word & FIELD_MASK


@triton.jit
def row_pointers(source, local_ptr, receive_ptr, WIDTH: tl.constexpr):
    """Address of each row's first element: local token `source`, or receive slot `-source - 1`."""
    is_local = source >= 0
    row = tl.where(is_local, source, -source - 1).to(tl.int64)
    base = tl.where(is_local, local_ptr.to(tl.int64), receive_ptr.to(tl.int64))
    address = base + row * (WIDTH * (local_ptr.dtype.element_ty.primitive_bitwidth // 8))
    return tl.multiple_of(address.to(local_ptr.dtype), 16)


@triton.jit
def gathered_rows(source, tokens: Tokens, WIDTH: tl.constexpr, SENDING: tl.constexpr):
    """As `row_pointers`; null for pad rows.

    They are not read: all of them are the one row of zeros, and many reads of one line are slow (docs/log.md).
    """
    is_pad = -source - 1 >= (SENDING.NUM_RANKS - 1) * SENDING.RECEIVE_BLOCK
    address = row_pointers(source, tokens.local, tokens.received, WIDTH).to(tl.int64)
    return tl.multiple_of(tl.where(is_pad, 0, address).to(tokens.local.dtype), 16)


@triton.jit
def wait_for_rows(source, all_here, wire: Wire, deadline_ns, rank, ROWS: tl.constexpr, SENDING: tl.constexpr):
    """Wait for what `source` (ROWS,) needs of other ranks; returns 1 once everything has arrived."""
    if all_here == 0:
        REPEAT: tl.constexpr = (WIDE + ROWS - 1) // ROWS
        slot = tl.broadcast_to((-source - 1)[:, None], (ROWS, REPEAT))
        remote = (slot >= 0) & (slot < (SENDING.NUM_RANKS - 1) * SENDING.RECEIVE_BLOCK)
        if tl.max(remote.to(tl.int32)) != 0:
            call = tl.load(wire.call)
            ranks = every_rank(SENDING.NUM_RANKS)
            missing = (load_acquire(wire.finished + ranks) - call < 0) & ((ranks == rank) == SENDING.PULL)
            if tl.max(missing.to(tl.int32)) == 0:
                all_here = 1
            else:
                peer = slot // SENDING.RECEIVE_BLOCK
                peer += (peer >= rank).to(tl.int32)
                if SENDING.CHUNK > 0:
                    flags = wire.arrived + slot // SENDING.CHUNK
                else:
                    flags = wire.finished + peer
                if SENDING.PULL:
                    peer = tl.zeros_like(peer) + rank  # whose programs raise those flags
                wait_for(tl.where(remote, flags, wire.call), peer, call, deadline_ns, wire.status, STAGE_DISPATCH)
    return all_here


@triton.jit
def load_rows(first, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """One (rows, BLOCK_K) step of gathered rows, in 16-byte copies (multiple_of counts bytes here).

    first: their first elements; null: a row of zeros.
    """
    column = (k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    mask = (first.to(tl.int64) != 0)[:, None]
    if WIDTH % BLOCK_K != 0:
        mask &= column < WIDTH
    return tl.load(tl.multiple_of(first[:, None] + column, (1, 16)), mask=mask, other=0.0)
