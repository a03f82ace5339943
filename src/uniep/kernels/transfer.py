"""Kernels that move rows: the deduplicated push or pull, the push of finished rows, and the fixed-order slot sum."""

import triton
import triton.language as tl

from uniep.kernels.arguments import Addresses, Offsets, Rows, Sums, Tokens, Wire
from uniep.kernels.biases import add_bias_groups
from uniep.kernels.ptx import narrow
from uniep.kernels.rows import num_row_tiles, row_pointers, wait_for_rows
from uniep.kernels.sync import deadline, failed, pass_on, signal_all


@triton.jit(do_not_specialize=["num_tokens"])
def publish_kernel(x_ptr, out_ptr, status_ptr, num_tokens, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """out = x (T, D), where peers fetch tokens; not after a failure, when a late peer may still fetch those of an earlier
    call."""
    for first in range(tl.program_id(0) * ROWS, tl.where(failed(status_ptr), 0, num_tokens), tl.num_programs(0) * ROWS):
        token = first + tl.arange(0, ROWS)
        at = token.to(tl.int64)[:, None] * D
        for d in range(0, D, BLOCK_D):
            column = (d + tl.arange(0, BLOCK_D))[None, :]
            mask = (token < num_tokens)[:, None] & (column < D)
            tl.store(out_ptr + at + column, tl.load(x_ptr + at + column, mask=mask), mask=mask)


@triton.jit
def moved_counts(rows: Rows, SENDING: tl.constexpr):
    """How many tokens this rank's programs move to each peer, or, with PULL, from each."""
    if SENDING.PULL:
        return rows.recv_count_R
    else:
        return rows.send_count_R


@triton.jit
def move_chunk(
    x_ptr, rows: Rows, wire: Wire, arrived_offset, call, num_tokens, rank, peer, chunk, count, SENDING: tl.constexpr
):
    """Store one chunk of the `count` tokens that a peer wants into its receive buffer, then raise the chunk's flag.

    PULL: of the tokens that this rank wants of the peer, into its own.
    """
    if SENDING.PULL:
        source = peer
        target = rank
        tokens = tl.multiple_of(tl.load(wire.tokens_table + peer).to(x_ptr.dtype), 16)
        other = tl.arange(0, SENDING.NUM_RANKS)
        list_ptr = rows.recv_token_N + tl.sum(tl.load(rows.recv_count_R + other, mask=other < peer, other=0))
    else:
        source = rank
        target = peer
        tokens = x_ptr
        list_ptr = rows.send_token_RT + peer.to(tl.int64) * num_tokens
    block = (source - (source > target)) * SENDING.RECEIVE_BLOCK
    receive = tl.multiple_of(tl.load(wire.receive_table + target).to(x_ptr.dtype), 16)
    for first in range(0, SENDING.CHUNK, SENDING.PUSH_ROWS):
        index = chunk * SENDING.CHUNK + first + tl.arange(0, SENDING.PUSH_ROWS)
        used = index < count
        token = tl.load(list_ptr + index, mask=used, other=0).to(tl.int64)
        slot = (block + index).to(tl.int64)
        for d in range(0, SENDING.WIDTH, SENDING.PUSH_D):
            column = d + tl.arange(0, SENDING.PUSH_D)
            mask = used[:, None] & (column < SENDING.WIDTH)[None, :]
            value = tl.load(tokens + token[:, None] * SENDING.WIDTH + column[None, :], mask=mask)
            tl.store(receive + slot[:, None] * SENDING.WIDTH + column[None, :], value, mask=mask)
    tl.debug_barrier()
    flags = tl.load(wire.flag_table + target).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags + arrived_offset + block // SENDING.CHUNK + chunk, call, sem="release", scope="sys")


@triton.jit
def push_tokens(
    x_ptr, rows: Rows, wire: Wire, offsets: Offsets, num_tokens, rank, program, num_programs, SENDING: tl.constexpr
):
    """Store each peer's tokens, in list order, into its receive buffer; one release per CHUNK tokens.  PULL: fetch those
    of each peer.

    Chunks are dealt out peer by peer, starting behind this rank, so that ranks do not all write to one
    peer.  The last program sets this rank's `finished` flags, also its own: with PULL that one says that all is here, and
    the others that peers' tokens may change.
    """
    OTHERS: tl.constexpr = SENDING.NUM_RANKS - 1
    call = tl.load(wire.call)
    counts_ptr = moved_counts(rows, SENDING)
    most = num_tokens
    if SENDING.PULL:
        most = tl.max(tl.load(counts_ptr + tl.arange(0, SENDING.NUM_RANKS)))
    num_chunks = tl.where(failed(wire.status), 0, tl.cdiv(most, SENDING.CHUNK))
    for item in range(program, num_chunks * OTHERS, num_programs):
        chunk = item // OTHERS
        peer = (rank + 1 + item % OTHERS) % SENDING.NUM_RANKS
        count = tl.load(counts_ptr + peer)
        if chunk * SENDING.CHUNK < count:
            move_chunk(x_ptr, rows, wire, offsets.arrived, call, num_tokens, rank, peer, chunk, count, SENDING)
    finished_offset = offsets.finished + rank
    signal_all(wire, finished_offset, call, wire.push_ticket, num_programs, SENDING.NUM_RANKS)


@triton.jit(do_not_specialize=["arrived_offset", "finished_offset", "num_tokens", "rank"])
def push_tokens_kernel(
    x_ptr, rows: Rows, wire: Wire, arrived_offset, finished_offset, num_tokens, rank, SENDING: tl.constexpr
):
    """`push_tokens` as a launch of its own: the dispatch of the serial schedule, and x's second one in a backward."""
    offsets = Offsets(arrived_offset, finished_offset, None)
    push_tokens(x_ptr, rows, wire, offsets, num_tokens, rank, tl.program_id(0), tl.num_programs(0), SENDING)


@triton.jit(do_not_specialize=["returned_offset"])
def push_rows_kernel(
    out_ptr,
    rows: Rows,
    wire: Wire,
    returned_offset,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
):
    """Store finished rows, out (N, WIDTH), into their return slots: the combine of the serial schedule, and of rows behind
    operators of one's own."""
    num_rows = tl.where(failed(wire.status), 0, tl.load(rows.totals))
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        slot = tl.load(rows.return_N + row, mask=row < num_rows, other=-1)
        base = tl.load(wire.returns_table + tl.maximum(slot, 0) // SLOTS).to(out_ptr.dtype)
        out = tl.multiple_of(base + (tl.maximum(slot, 0) % SLOTS).to(tl.int64) * WIDTH, 16)
        for d in range(0, WIDTH, BLOCK_D):
            column = d + tl.arange(0, BLOCK_D)
            mask = (slot >= 0)[:, None] & (column < WIDTH)[None, :]
            value = tl.load(out_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=mask)
            tl.store(out[:, None] + column[None, :], value, mask=mask)
    signal_all(wire, returned_offset, tl.load(wire.call), wire.return_ticket, tl.num_programs(0), NUM_RANKS)


@triton.jit
def combine_item(sums: Sums, is_lost, token, column, D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr):
    """`combine_kernel`'s sum for one token (int64) and these columns."""
    inside = column < D
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for k in tl.static_range(K):
        used = tl.load(sums.ids_TK + token * K + k) >= 0
        value = tl.load(sums.returns_SD + (token * K + k) * D + column, mask=inside & used, other=0.0).to(tl.float32)
        if sums.weights_TK is not None:
            weight = tl.load(sums.weights_TK + token * K + k)
            acc = tl.where(used, tl.fma(value, tl.full((BLOCK_D,), 1.0, tl.float32) * weight, acc), acc)
        else:
            acc = tl.where(used, acc + value, acc)
    if is_lost:
        acc = acc * float("nan")
    tl.store(sums.out_TD + token * D + column, narrow(acc, sums.out_TD.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def combine_kernel(sums: Sums, wire: Wire, num_tokens, D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr):
    """out[t] = sum over k ascending of w[t,k] * slot[t*K+k] (fp32 fma from 0), unused slots skipped.

    For one token with K = 3 and ids (5, -1, 2): out = w[0] * slot[0] + w[2] * slot[2].
    After a failed call (status not zero) the output is NaN, never half a sum.
    """
    is_lost = failed(wire.status)
    if is_lost & (tl.program_id(0) == 0):
        pass_on(wire.status)
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    for item in range(tl.program_id(0), num_tokens * blocks, tl.num_programs(0)):
        token = (item // blocks).to(tl.int64)
        column = item % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
        combine_item(sums, is_lost, token, column, D, K, BLOCK_D)


@triton.jit(
    do_not_specialize=[
        "timeout_ns", "rank", "arrived_offset", "finished_offset", "num_tokens", "push_programs",
    ]
)  # fmt: skip
def expand_kernel(
    tokens: Tokens,
    out_ptr,
    rows: Rows,
    wire: Wire,
    timeout_ns,
    rank,
    arrived_offset,
    finished_offset,
    num_tokens,
    push_programs,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SENDING: tl.constexpr,
    FUSED: tl.constexpr,
):
    """out (N, D): every row's input, contiguous; pad rows are zero.

    FUSED: rows are copied in tile order, and waited for; where programs push (CHUNK > 0), the first
    `push_programs` push this rank's tokens before they join.
    """
    program = tl.program_id(0)
    if FUSED and SENDING.CHUNK > 0:
        if program < push_programs:
            offsets = Offsets(arrived_offset, finished_offset, None)
            push_tokens(tokens.local, rows, wire, offsets, num_tokens, rank, program, push_programs, SENDING)
    deadline_ns = deadline(wire.status, timeout_ns)
    PER_TILE: tl.constexpr = BLOCK_M // ROWS
    num_items = num_row_tiles(rows) * PER_TILE
    all_here = 0
    begin = program - push_programs
    if begin < 0:  # a program that has pushed helps from the end of its round
        begin += tl.num_programs(0)
    for item in range(begin, num_items, tl.num_programs(0)):
        row = tl.load(rows.order_M + item // PER_TILE) * BLOCK_M + item % PER_TILE * ROWS + tl.arange(0, ROWS)
        source = tl.load(rows.source_N + row)
        if FUSED:
            all_here = wait_for_rows(source, all_here, wire, deadline_ns, rank, ROWS, SENDING)
        ptrs = row_pointers(source, tokens.local, tokens.received, D)
        out = out_ptr + row.to(tl.int64) * D
        for d in range(0, D, BLOCK_D):
            column = d + tl.arange(0, BLOCK_D)
            mask = (column < D)[None, :]
            tl.store(out[:, None] + column[None, :], tl.load(ptrs[:, None] + column[None, :], mask=mask), mask=mask)


@triton.jit
def return_dweights(
    groups_ptr, dy_ptr, b2_ptr, rows: Rows, wire: Wire, row, m, GROUPS: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """d(weight) of each row, of row tile m, its column groups added in ascending order, then, unless b2 is None, those of
    dO . b2; stored at the source rank; not after a failure, when a late peer may still read what an earlier call
    returned.  dy: addresses of the rows of dO."""
    slot = tl.load(rows.return_N + row)
    total = tl.load(groups_ptr + row.to(tl.int64) * GROUPS)
    for group in range(1, GROUPS):
        total += tl.load(groups_ptr + row.to(tl.int64) * GROUPS + group)
    if b2_ptr is not None:
        total = add_bias_groups(total, dy_ptr, b2_ptr, tl.load(rows.expert_M + m), row, D)
    base = tl.load(wire.dweights_table + tl.maximum(slot, 0) // SLOTS).to(tl.pointer_type(tl.float32))
    is_lost = tl.load(wire.status, volatile=True) != 0
    tl.store(base + tl.maximum(slot, 0) % SLOTS, total, mask=(slot >= 0) & (not is_lost))


@triton.jit
def dweights_kernel(
    groups_ptr,
    dy_ptr,
    b2_ptr,
    rows: Rows,
    wire: Wire,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """`return_dweights` of all rows, a row tile at a time.  groups: (N, GROUPS)."""
    for m in range(tl.program_id(0), num_row_tiles(rows), tl.num_programs(0)):
        row = m * BLOCK_M + tl.arange(0, BLOCK_M)
        return_dweights(groups_ptr, dy_ptr, b2_ptr, rows, wire, row, m, GROUPS, SLOTS, D)


@triton.jit(do_not_specialize=["kept_block"])
def row_addresses_kernel(
    rows: Rows,
    a: Tokens,
    b: Tokens,
    addresses: Addresses,
    kept_block,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RECEIVE_BLOCK: tl.constexpr,
):
    """Addresses (int64) of the rows of two matrices, a (x) and b (dO).

    Of x, kept_block slots of each source lie together, and there is no zero row: pad rows read that of dO.
    """
    num_rows = tl.load(rows.totals)
    for first in range(tl.program_id(0) * BLOCK, num_rows, tl.num_programs(0) * BLOCK):
        row = first + tl.arange(0, BLOCK)
        mask = row < num_rows
        source = tl.load(rows.source_N + row, mask=mask, other=0)
        slot = -source - 1
        kept = slot // RECEIVE_BLOCK * kept_block + slot % RECEIVE_BLOCK
        of_a = row_pointers(tl.where(source < 0, -kept - 1, source), a.local, a.received, WIDTH).to(tl.int64)
        of_b = row_pointers(source, b.local, b.received, WIDTH).to(tl.int64)
        is_pad = slot >= (NUM_RANKS - 1) * RECEIVE_BLOCK
        if NUM_RANKS == 1:
            is_pad = slot >= 0
        tl.store(addresses.x_N + row, tl.where(is_pad, of_b, of_a), mask=mask)
        tl.store(addresses.dy_N + row, of_b, mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def used_dweights_kernel(dweights_ptr, ids_ptr, status_ptr, out_ptr, num_slots, BLOCK: tl.constexpr):
    """d(weight) of this rank's slots, as their experts' ranks stored it; 0 where unused, NaN after a failed call."""
    is_lost = failed(status_ptr)
    for first in range(tl.program_id(0) * BLOCK, num_slots, tl.num_programs(0) * BLOCK):
        slot = first + tl.arange(0, BLOCK)
        mask = slot < num_slots
        used = tl.load(ids_ptr + slot, mask=mask, other=-1) >= 0
        value = tl.load(dweights_ptr + slot, mask=used, other=0.0)
        tl.store(out_ptr + slot, tl.where(is_lost, float("nan"), value), mask=mask)
