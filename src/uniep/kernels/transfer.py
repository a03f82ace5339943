"""Kernels that move rows: the deduplicated push, the push of finished rows, and the fixed-order slot sum."""

import triton
import triton.language as tl

from uniep.kernels.ptx import narrow
from uniep.kernels.rows import row_pointers, wait_for_rows
from uniep.kernels.sync import deadline, failed, pass_on, signal_all


@triton.jit
def push_chunk(
    x_ptr,
    send_token_ptr,
    receive_table_ptr,
    flag_table_ptr,
    arrived_offset,
    call,
    num_tokens,
    rank,
    peer,
    chunk,
    count,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
):
    """Store one chunk of the `count` tokens that a peer wants into its receive buffer, then raise the chunk's flag."""
    block = (rank - (rank > peer)) * BLOCK_SLOTS
    receive = tl.multiple_of(tl.load(receive_table_ptr + peer).to(x_ptr.dtype), 16)
    for first in range(0, CHUNK, ROWS):
        index = chunk * CHUNK + first + tl.arange(0, ROWS)
        used = index < count
        token = tl.load(send_token_ptr + peer.to(tl.int64) * num_tokens + index, mask=used, other=0).to(tl.int64)
        slot = (block + index).to(tl.int64)
        for d in range(0, D, BLOCK_D):
            column = d + tl.arange(0, BLOCK_D)
            mask = used[:, None] & (column < D)[None, :]
            value = tl.load(x_ptr + token[:, None] * D + column[None, :], mask=mask)
            tl.store(receive + slot[:, None] * D + column[None, :], value, mask=mask)
    tl.debug_barrier()
    flags = tl.load(flag_table_ptr + peer).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags + arrived_offset + block // CHUNK + chunk, call, sem="release", scope="sys")


@triton.jit
def push_tokens(
    x_ptr,
    send_token_ptr,
    send_count_ptr,
    receive_table_ptr,
    flag_table_ptr,
    arrived_offset,
    finished_offset,
    call_ptr,
    ticket_ptr,
    status_ptr,
    num_tokens,
    rank,
    program,
    num_programs,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
):
    """Store each peer's tokens, in list order, into its receive buffer; one release per CHUNK tokens.

    Chunks are dealt out peer by peer, starting behind this rank, so that ranks do not all write to one
    peer.  BLOCK_SLOTS: receive slots per source.  The last program sets this rank's `finished` flags.
    """
    call = tl.load(call_ptr)
    num_chunks = tl.where(failed(status_ptr), 0, tl.cdiv(num_tokens, CHUNK))
    for item in range(program, num_chunks * (NUM_RANKS - 1), num_programs):
        chunk = item // (NUM_RANKS - 1)
        peer = (rank + 1 + item % (NUM_RANKS - 1)) % NUM_RANKS
        count = tl.load(send_count_ptr + peer)
        if chunk * CHUNK < count:
            push_chunk(
                x_ptr, send_token_ptr, receive_table_ptr, flag_table_ptr, arrived_offset, call, num_tokens, rank, peer,
                chunk, count, D, BLOCK_D, ROWS, CHUNK, BLOCK_SLOTS,
            )  # fmt: skip
    signal_all(flag_table_ptr, finished_offset + rank, call, ticket_ptr, num_programs, status_ptr, NUM_RANKS)


@triton.jit(do_not_specialize=["arrived_offset", "finished_offset", "num_tokens", "rank"])
def push_tokens_kernel(
    x_ptr,
    send_token_ptr,
    send_count_ptr,
    receive_table_ptr,
    flag_table_ptr,
    arrived_offset,
    finished_offset,
    call_ptr,
    ticket_ptr,
    status_ptr,
    num_tokens,
    rank,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
):
    """`push_tokens` as a launch of its own: the dispatch of the serial schedule."""
    push_tokens(
        x_ptr, send_token_ptr, send_count_ptr, receive_table_ptr, flag_table_ptr, arrived_offset, finished_offset,
        call_ptr, ticket_ptr, status_ptr, num_tokens, rank, tl.program_id(0), tl.num_programs(0), D, BLOCK_D, ROWS,
        CHUNK, BLOCK_SLOTS, NUM_RANKS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["flag_offset"])
def push_rows_kernel(
    rows_ptr,
    return_ptr,
    num_rows_ptr,
    returns_table_ptr,
    flag_table_ptr,
    flag_offset,
    call_ptr,
    ticket_ptr,
    status_ptr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
):
    """Store finished rows (N, WIDTH) into their return slots: the combine of the serial schedule."""
    num_rows = tl.where(failed(status_ptr), 0, tl.load(num_rows_ptr))
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        slot = tl.load(return_ptr + row, mask=row < num_rows, other=-1)
        base = tl.load(returns_table_ptr + tl.maximum(slot, 0) // SLOTS).to(rows_ptr.dtype)
        out = tl.multiple_of(base + (tl.maximum(slot, 0) % SLOTS).to(tl.int64) * WIDTH, 16)
        for d in range(0, WIDTH, BLOCK_D):
            column = d + tl.arange(0, BLOCK_D)
            mask = (slot >= 0)[:, None] & (column < WIDTH)[None, :]
            value = tl.load(rows_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=mask)
            tl.store(out[:, None] + column[None, :], value, mask=mask)
    signal_all(flag_table_ptr, flag_offset, tl.load(call_ptr), ticket_ptr, tl.num_programs(0), status_ptr, NUM_RANKS)


@triton.jit
def combine_item(
    returns_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    is_lost,
    token,
    column,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """`combine_kernel`'s sum for one token (int64) and these columns."""
    inside = column < D
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for k in tl.static_range(K):
        used = tl.load(ids_ptr + token * K + k) >= 0
        value = tl.load(returns_ptr + (token * K + k) * D + column, mask=inside & used, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights_ptr + token * K + k)
            acc = tl.where(used, tl.fma(value, tl.full((BLOCK_D,), 1.0, tl.float32) * weight, acc), acc)
        else:
            acc = tl.where(used, acc + value, acc)
    if is_lost:
        acc = acc * float("nan")
    tl.store(out_ptr + token * D + column, narrow(acc, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def combine_kernel(
    returns_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    num_tokens,
    status_ptr,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """out[t] = sum over k ascending of w[t,k] * slot[t*K+k] (fp32 fma from 0), unused slots skipped.

    After a failed call (status not zero) the output is NaN, never half a sum.
    """
    is_lost = failed(status_ptr)
    if is_lost & (tl.program_id(0) == 0):
        pass_on(status_ptr)
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    for item in range(tl.program_id(0), num_tokens * blocks, tl.num_programs(0)):
        token = (item // blocks).to(tl.int64)
        column = item % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
        combine_item(returns_ptr, ids_ptr, weights_ptr, out_ptr, is_lost, token, column, D, K, BLOCK_D, WEIGHTED)


@triton.jit(
    do_not_specialize=[
        "timeout_ns", "rank", "arrived_offset", "finished_offset", "num_tokens", "push_programs",
    ]
)  # fmt: skip
def expand_kernel(
    x_ptr,
    receive_ptr,
    rows_ptr,
    source_ptr,
    order_ptr,
    totals_ptr,
    arrived_ptr,
    finished_ptr,
    call_ptr,
    status_ptr,
    timeout_ns,
    rank,
    send_token_ptr,
    send_count_ptr,
    receive_table_ptr,
    flag_table_ptr,
    arrived_offset,
    finished_offset,
    ticket_ptr,
    num_tokens,
    push_programs,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    RECEIVE_BLOCK: tl.constexpr,
    PUSH_D: tl.constexpr,
    PUSH_ROWS: tl.constexpr,
    FUSED: tl.constexpr,
):
    """rows (N, D): every row's input, contiguous; pad rows are zero.

    FUSED: rows are copied in tile order, and waited for; where programs push (CHUNK > 0), the first
    `push_programs` push this rank's tokens before they join.
    """
    program = tl.program_id(0)
    if FUSED and CHUNK > 0:
        if program < push_programs:
            push_tokens(
                x_ptr, send_token_ptr, send_count_ptr, receive_table_ptr, flag_table_ptr, arrived_offset,
                finished_offset, call_ptr, ticket_ptr, status_ptr, num_tokens, rank, program, push_programs, D,
                PUSH_D, PUSH_ROWS, CHUNK, RECEIVE_BLOCK, NUM_RANKS,
            )  # fmt: skip
    deadline_ns = deadline(status_ptr, timeout_ns)
    PER_TILE: tl.constexpr = BLOCK_M // ROWS
    num_items = tl.load(totals_ptr + 1) * PER_TILE
    all_here = 0
    begin = program - push_programs
    if begin < 0:  # a program that has pushed helps from the end of its round
        begin += tl.num_programs(0)
    for item in range(begin, num_items, tl.num_programs(0)):
        row = tl.load(order_ptr + item // PER_TILE) * BLOCK_M + item % PER_TILE * ROWS + tl.arange(0, ROWS)
        source = tl.load(source_ptr + row)
        if FUSED:
            all_here = wait_for_rows(
                source, all_here, arrived_ptr, finished_ptr, call_ptr, deadline_ns, status_ptr, rank, ROWS, NUM_RANKS,
                CHUNK, RECEIVE_BLOCK,
            )  # fmt: skip
        ptrs = row_pointers(source, x_ptr, receive_ptr, D)
        out = rows_ptr + row.to(tl.int64) * D
        for d in range(0, D, BLOCK_D):
            column = d + tl.arange(0, BLOCK_D)
            mask = (column < D)[None, :]
            tl.store(out[:, None] + column[None, :], tl.load(ptrs[:, None] + column[None, :], mask=mask), mask=mask)


@triton.jit
def return_dweights(
    groups_ptr, return_ptr, dweights_table_ptr, status_ptr, row, GROUPS: tl.constexpr, SLOTS: tl.constexpr
):
    """d(weight) of each row, its column groups added in ascending order, stored at the source rank; not after a failure,
    when a late peer may still read what an earlier call returned."""
    slot = tl.load(return_ptr + row)
    total = tl.load(groups_ptr + row.to(tl.int64) * GROUPS)
    for group in range(1, GROUPS):
        total += tl.load(groups_ptr + row.to(tl.int64) * GROUPS + group)
    base = tl.load(dweights_table_ptr + tl.maximum(slot, 0) // SLOTS).to(tl.pointer_type(tl.float32))
    is_lost = tl.load(status_ptr, volatile=True) != 0
    tl.store(base + tl.maximum(slot, 0) % SLOTS, total, mask=(slot >= 0) & (not is_lost))


@triton.jit
def dweights_kernel(
    groups_ptr,
    return_ptr,
    totals_ptr,
    dweights_table_ptr,
    status_ptr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`return_dweights` of all rows."""
    num_rows = tl.load(totals_ptr)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        return_dweights(groups_ptr, return_ptr, dweights_table_ptr, status_ptr, row, GROUPS, SLOTS)


@triton.jit(do_not_specialize=["kept_block"])
def row_addresses_kernel(
    source_ptr,
    totals_ptr,
    a_local_ptr,
    a_receive_ptr,
    a_address_ptr,
    b_local_ptr,
    b_receive_ptr,
    b_address_ptr,
    kept_block,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RECEIVE_BLOCK: tl.constexpr,
):
    """Addresses (int64) of the rows of two matrices (x and dO), each with its local and its received part.

    Of x, kept_block slots of each source lie together, and there is no zero row: pad rows read that of dO.
    """
    num_rows = tl.load(totals_ptr)
    for first in range(tl.program_id(0) * BLOCK, num_rows, tl.num_programs(0) * BLOCK):
        row = first + tl.arange(0, BLOCK)
        mask = row < num_rows
        source = tl.load(source_ptr + row, mask=mask, other=0)
        slot = -source - 1
        kept = slot // RECEIVE_BLOCK * kept_block + slot % RECEIVE_BLOCK
        a = row_pointers(tl.where(source < 0, -kept - 1, source), a_local_ptr, a_receive_ptr, WIDTH).to(tl.int64)
        b = row_pointers(source, b_local_ptr, b_receive_ptr, WIDTH).to(tl.int64)
        is_pad = slot >= (NUM_RANKS - 1) * RECEIVE_BLOCK
        if NUM_RANKS == 1:
            is_pad = slot >= 0
        tl.store(a_address_ptr + row, tl.where(is_pad, b, a), mask=mask)
        tl.store(b_address_ptr + row, b, mask=mask)


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
