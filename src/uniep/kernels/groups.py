"""Combine groups on the GPU: which rows are added before they return, and the kernels that add them.

A *line* is one token of one source rank.  Its rows on this rank lie in a table, (lines, K) int32, sorted by (group, k),
-1 behind them; a second table holds the return slot of each row's group: token * W + place behind the source rank's first
slot, as in `routing/groups.py`.  Rows of one group stand side by side, so that one walk along a line adds them all.

Suffixes: L lines (R ranks of T_max tokens), K slots, W return slots of a token, D hidden, N padded rows.
"""

import triton
import triton.language as tl

from uniep.kernels.arguments import GroupRows, Rows, Wire
from uniep.kernels.gemm import (
    biased,
    count_tile,
    halves,
    product_of_rows,
    row_tile_of_step,
    store_halves,
    tile_of_step,
)
from uniep.kernels.header import HEADER, header_of
from uniep.kernels.ptx import after_previous, narrow, next_may_come
from uniep.kernels.rows import group_word, num_row_tiles
from uniep.kernels.sync import STAGE_SUM, deadline, failed, signal_all, wait_for

NO_GROUP = tl.constexpr(2**30)  # of unused slots, behind all others


@triton.jit
def _slot_groups(
    exchange_ptr, call, source, token, mask, K, KP: tl.constexpr, SLOTS: tl.constexpr, NUM_RANKS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """(tokens, KP): the group of each slot of the given tokens, NO_GROUP where there is none."""
    slot = tl.arange(0, KP)
    base = header_of(exchange_ptr, call, source, SLOTS, NUM_RANKS) + HEADER
    ids = tl.load((base + token * K)[:, None] + slot[None, :], mask=mask[:, None] & (slot < K)[None, :], other=-1)
    return tl.where(ids >= 0, ids // GROUP, NO_GROUP)


@triton.jit
def _groups_below(group, limit, K: tl.constexpr, KP: tl.constexpr):
    """How many different groups below `limit` (tokens,) each token has."""
    slot = tl.arange(0, KP)[None, :]
    count = tl.zeros_like(limit)
    for k in range(K):
        other = tl.sum(tl.where(slot == k, group, 0), 1)
        seen = tl.max(((group == other[:, None]) & (slot < k)).to(tl.int32), 1)
        count += ((other < limit) & (seen == 0)).to(tl.int32)
    return count


@triton.jit(do_not_specialize=["rank", "num_tokens"])
def parts_kernel(
    exchange_ptr,
    return_ptr,
    totals_ptr,
    row_ptr,
    slot_ptr,
    used_ptr,
    cursor_ptr,
    call_ptr,
    rank,
    num_tokens,
    LOCAL: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The tables of lines, from the plan and the exchanged ids; `row` is full of -1 before.

    GROUP: experts of a group.  used (T, W): 0 for the return slots that each token of this rank has, -1 for others.
    cursor: zero after it, see `claimed_sum_kernel`.
    Each row finds its place by itself: it counts the slots of its token that come before it.
    """
    call = tl.load(call_ptr)
    num_rows = tl.load(totals_ptr)
    column = tl.arange(0, KP)[None, :]
    lowest = rank * LOCAL // GROUP
    if tl.program_id(0) == 0:
        tl.store(cursor_ptr, 0)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        back = tl.load(return_ptr + row, mask=row < num_rows, other=-1)
        is_row = back >= 0
        back = tl.maximum(back, 0)
        source = back // SLOTS
        token = back % SLOTS // K
        k = (back % K)[:, None]  # SLOTS is a multiple of K
        group = _slot_groups(exchange_ptr, call, source, token, is_row, K, KP, SLOTS, NUM_RANKS, GROUP)
        own = tl.sum(tl.where(column == k, group, 0), 1)
        is_before = (group < own[:, None]) | ((group == own[:, None]) & (column < k))
        place = tl.sum((is_before & (group >= lowest)).to(tl.int32), 1)
        line = source * (SLOTS // K) + token
        at = line.to(tl.int64) * K + place
        tl.store(row_ptr + at, row, mask=is_row)
        tl.store(slot_ptr + at, line * W + _groups_below(group, own, K, KP), mask=is_row)
    slot = tl.arange(0, WP)[None, :]
    for first in range(tl.program_id(0) * ROWS, num_tokens, tl.num_programs(0) * ROWS):
        token = first + tl.arange(0, ROWS)
        group = _slot_groups(
            exchange_ptr, call, rank + tl.zeros_like(token), token, token < num_tokens, K, KP, SLOTS, NUM_RANKS, GROUP
        )
        count = _groups_below(group, tl.full(token.shape, NO_GROUP, tl.int32), K, KP)
        mask = (token < num_tokens)[:, None] & (slot < W)
        tl.store(used_ptr + token[:, None] * W + slot, tl.where(slot < count[:, None], 0, -1), mask=mask)


@triton.jit
def _store_sums(acc, slot, mask, returns_table_ptr, column, D: tl.constexpr, SLOTS: tl.constexpr, dtype: tl.constexpr):
    """Rows of sums into their return slots, at the ranks of their tokens."""
    base = tl.load(returns_table_ptr + slot // SLOTS, mask=mask, other=0).to(tl.pointer_type(dtype))
    out = tl.multiple_of(base + (slot % SLOTS).to(tl.int64) * D, 16)
    tl.store(out[:, None] + column, narrow(acc, dtype), mask=mask[:, None] & (column < D))


@triton.jit
def add_lines(given: GroupRows, returns_table_ptr, line, is_line, column, LINES: tl.constexpr):
    """Add the rows (N, D) of each group of the given lines, in fp32 from 0, and store each sum into its return slot:
    of these columns (1, BLOCK_D).  Not a loop over all: what the compiler takes out of it fills the registers.

    With routing weights each row is added by an fma with its own.
    """
    K: tl.constexpr = LINES.K
    BLOCK_D: tl.constexpr = LINES.BLOCK_D
    dtype: tl.constexpr = given.rows_ND.dtype.element_ty
    at = line.to(tl.int64) * K
    acc = tl.zeros((line.shape[0], BLOCK_D), tl.float32)
    row = tl.load(given.row_LK + at, mask=is_line, other=-1)
    slot = tl.load(given.slot_LK + at, mask=row >= 0, other=0)
    has_sum = row >= 0
    for p in tl.static_range(K):
        used = row >= 0
        start = tl.multiple_of(given.rows_ND + tl.maximum(row, 0).to(tl.int64) * LINES.D, 16)
        value = tl.load(start[:, None] + column, mask=used[:, None] & (column < LINES.D), other=0.0).to(tl.float32)
        if given.weight_N is not None:
            weight = tl.load(given.weight_N + row, mask=used, other=0.0)[:, None]
            added = tl.fma(value, tl.broadcast_to(weight, value.shape), acc)
        else:
            added = acc + value
        acc = tl.where(used[:, None], added, acc)
        if p + 1 < K:
            row = tl.load(given.row_LK + at + p + 1, mask=is_line, other=-1)
        else:
            row = tl.full(line.shape, -1, tl.int32)
        if not LINES.ONE_GROUP:
            next_slot = tl.load(given.slot_LK + at + p + 1, mask=row >= 0, other=-1)
            is_last = used & (next_slot != slot)
            _store_sums(acc, slot, is_last, returns_table_ptr, column, LINES.D, LINES.SLOTS, dtype)
            acc = tl.where(is_last[:, None], 0.0, acc)
            slot = next_slot
    if LINES.ONE_GROUP:
        _store_sums(acc, slot, has_sum, returns_table_ptr, column, LINES.D, LINES.SLOTS, dtype)


@triton.jit(do_not_specialize=["num_lines", "first_line", "returned_offset"])
def group_sum_kernel(
    given: GroupRows,
    wire: Wire,
    returned_offset,
    num_lines,
    first_line,
    LINES: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    SIGNAL: tl.constexpr,
):
    """The sums of all lines, from `first_line` on and around, into their return slots; then, if SIGNAL, every rank is
    told that this rank's are there."""
    count = num_lines
    if SIGNAL:
        count = tl.where(failed(wire.status), 0, num_lines)  # a late peer may still read what an earlier call returned
    BLOCKS: tl.constexpr = (LINES.D + LINES.BLOCK_D - 1) // LINES.BLOCK_D
    for item in range(tl.program_id(0), tl.cdiv(count, LINES.BLOCK_L) * BLOCKS, tl.num_programs(0)):
        number = item // BLOCKS * LINES.BLOCK_L + tl.arange(0, LINES.BLOCK_L)
        column = item % BLOCKS * LINES.BLOCK_D + tl.arange(0, LINES.BLOCK_D)[None, :]
        line = (first_line + number) % num_lines
        add_lines(given, wire.returns_table, line, number < num_lines, column, LINES)
    if SIGNAL:
        signal_all(wire, returned_offset, tl.load(wire.call), wire.return_ticket, tl.num_programs(0), NUM_RANKS)


@triton.jit
def _first_tile(counts, source, at: tl.constexpr, rank, num_tiles, NUM_RANKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(experts,): where the tiles of source rank `at` begin, see `return_order_kernel`; num_tiles behind the last rank."""
    if at == NUM_RANKS:
        first = num_tiles
    else:
        first = (tl.sum(tl.where(source < at, counts, 0), 0) + BLOCK_M - 1) // BLOCK_M
        higher = tl.sum(tl.where(source <= rank, counts, 0), 0) // BLOCK_M  # the tile in which higher ranks' rows begin
        if rank + 1 < NUM_RANKS:
            if at == rank + 1:
                first = higher
            elif at <= rank:
                first = tl.minimum(first, higher)
    return first


@triton.jit(do_not_specialize=["rank", "group_rows"])
def return_order_kernel(
    counts_ptr,
    start_ptr,
    totals_ptr,
    order_ptr,
    group_ptr,
    rank,
    group_rows,
    E: tl.constexpr,
    LOCAL: tl.constexpr,
    LOCAL_P: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The row tiles by source rank, the next rank's first and this rank's own last, inside in expert order.  One program.

    Whole lines finish early so, and those that travel first.  A tile with rows of several ranks counts to the lowest, or
    to the next rank if some are higher than this one.
    group: as of Rows, of the tiles of one expert and source rank, in groups of at most `group_rows`.
    """
    local = tl.arange(0, LOCAL_P)
    source = tl.arange(0, NUM_RANKS)[:, None]
    mask = local < LOCAL
    counts = tl.load(counts_ptr + source * E + rank * LOCAL + local[None, :], mask=mask[None, :], other=0)
    start = tl.load(start_ptr + local, mask=mask, other=0) // BLOCK_M
    num_tiles = tl.load(start_ptr + local + 1, mask=mask, other=0) // BLOCK_M - start
    placed = 0
    if tl.load(totals_ptr) > 0:
        for turn in range(2):  # ranks above this one, then the others
            for at in tl.static_range(NUM_RANKS):
                if (at > rank) == (turn == 0):
                    first = _first_tile(counts, source, at, rank, num_tiles, NUM_RANKS, BLOCK_M)
                    count = _first_tile(counts, source, at + 1, rank, num_tiles, NUM_RANKS, BLOCK_M) - first
                    position = placed + tl.cumsum(count, 0) - count
                    for i in range(0, tl.max(count)):
                        tl.store(order_ptr + position + i, start + first + i, mask=i < count)
                        word = group_word(local, i, count, group_rows)
                        tl.store(group_ptr + position + i, word, mask=i < count)
                    placed += tl.sum(count)


@triton.jit
def counted_product_kernel(
    rows: Rows,
    order_ptr,
    group_ptr,
    a_desc,
    b_desc,
    out_desc,
    bias_ptr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """out (N, WIDTH) = act (N, DEPTH) @ W2^T, row tiles in the order of `order`, in groups; progress (M,) counts the
    finished tiles of each row tile, for the next kernel, which may run beside this one.  b_desc: (e, WIDTH, DEPTH).
    bias: as in `product_kernel`."""
    NUM_N: tl.constexpr = (WIDTH + TILE.N - 1) // TILE.N
    program = tl.program_id(0)
    next_may_come()
    num_m = num_row_tiles(rows)
    num_steps = num_m * NUM_N
    for step in tl.range(program, num_steps, tl.num_programs(0), flatten=True):
        m, expert, n = tile_of_step(step, num_m, order_ptr, group_ptr, NUM_N)
        acc = product_of_rows(None, a_desc, b_desc, m, expert, n, DEPTH, 0, "transposed", False, TILE)
        if step > program:
            before = row_tile_of_step(step - tl.num_programs(0), num_m, order_ptr, group_ptr, NUM_N)
            count_tile(rows.progress_M, before)
        left, right = halves(acc, TILE.M, TILE.N)
        left = biased(left, bias_ptr, rows, m * TILE.M, expert, n * TILE.N, WIDTH, WEIGHTED, TILE)
        right = biased(right, bias_ptr, rows, m * TILE.M, expert, n * TILE.N + TILE.N // 2, WIDTH, WEIGHTED, TILE)
        store_halves(left, right, out_desc, m * TILE.M, n * TILE.N, TILE.M, TILE.N)
    if program < num_steps:
        last = program + (num_steps - 1 - program) // tl.num_programs(0) * tl.num_programs(0)
        count_tile(rows.progress_M, row_tile_of_step(last, num_m, order_ptr, group_ptr, NUM_N))


@triton.jit(do_not_specialize=["num_lines", "first_line", "returned_offset", "timeout_ns", "rank"])
def claimed_sum_kernel(
    given: GroupRows,
    wire: Wire,
    returned_offset,
    num_lines,
    first_line,
    progress_ptr,
    cursor_ptr,
    timeout_ns,
    rank,
    LINES: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    KP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
    ITEM_L: tl.constexpr,
):
    """As `group_sum_kernel`, beside the product that makes the rows, the next kernel in the stream after it.  Programs claim
    ITEM_L lines at a time, and wait for their tiles.

    They start once every product program is resident, in leftover registers, so that the product can always finish.
    The rest start when its programs end.  They end after it.
    TILES: of a row tile of BLOCK_M rows.
    """
    BLOCKS: tl.constexpr = (LINES.D + LINES.BLOCK_D - 1) // LINES.BLOCK_D
    deadline_ns = deadline(wire.status, timeout_ns)
    num_items = tl.where(failed(wire.status), 0, tl.cdiv(num_lines, ITEM_L))
    item = tl.atomic_add(cursor_ptr, 1, sem="relaxed")
    while item < num_items:
        all_lines = item * ITEM_L + tl.arange(0, ITEM_L)
        slot = tl.arange(0, KP)[None, :]
        at = ((first_line + all_lines) % num_lines).to(tl.int64)[:, None] * LINES.K + slot
        row = tl.load(given.row_LK + at, mask=(all_lines < num_lines)[:, None] & (slot < LINES.K), other=-1)
        highest = tl.max(row)
        if highest >= 0:
            tile = tl.where(row >= 0, row, highest) // BLOCK_M
            wait_for(progress_ptr + tile, rank, TILES, deadline_ns, wire.status, STAGE_SUM)
        for part in range(0, tl.cdiv(tl.minimum(num_lines - item * ITEM_L, ITEM_L), LINES.BLOCK_L) * BLOCKS):
            number = item * ITEM_L + part // BLOCKS * LINES.BLOCK_L + tl.arange(0, LINES.BLOCK_L)
            column = part % BLOCKS * LINES.BLOCK_D + tl.arange(0, LINES.BLOCK_D)[None, :]
            line = (first_line + number) % num_lines
            add_lines(given, wire.returns_table, line, number < num_lines, column, LINES)
        item = tl.atomic_add(cursor_ptr, 1, sem="relaxed")
    after_previous()
    signal_all(wire, returned_offset, tl.load(wire.call), wire.return_ticket, tl.num_programs(0), NUM_RANKS)
