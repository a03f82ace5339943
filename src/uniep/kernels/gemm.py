"""Grouped GEMM kernels: persistent loops over the row tiles of all local experts.

Row tiles are BLOCK_M consecutive rows of one expert's segment (segments are multiples of ROW_ALIGN, so a
tile never spans two experts).  Tile bodies never wait; the loops that run them do.  Accumulation is fp32
over ascending k groups from the segment start, never split, so bits do not depend on the tile.

Both operands of a dot come straight from a descriptor or a gather: a reshaped A operand would go through
registers, which is slow and was seen to race (Triton 3.6, docs/log.md).

Suffixes: M row tiles, D hidden, F ffn, e local experts, N padded rows.
"""

import triton
import triton.language as tl

from uniep.kernels.activation import activate
from uniep.kernels.ptx import block_loads_follow, block_stores_complete, narrow, next_may_come
from uniep.kernels.rows import load_rows, row_pointers, wait_for_rows
from uniep.kernels.sync import STAGE_ROWS, WIDE, deadline, failed, signal_all, wait_for
from uniep.kernels.transfer import push_tokens


@triton.jit
def tile_coordinates(step, num_m, NUM_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(m, n) of the step-th tile: columns of GROUP_M row tiles, so that weights stay in L2.  Also behind the last."""
    per_group = GROUP_M * NUM_N
    first = step // per_group * GROUP_M
    height = tl.maximum(tl.minimum(num_m - first, GROUP_M), 1)
    within = step % per_group
    return first + within % height, within // height


@triton.jit
def turns(num_steps, program, push_programs, push_rounds):
    """How steps are dealt out when `push_programs` programs push tokens first.

    For `push_rounds` turns the other programs walk the steps alone; from then on all do.  Returns a program's
    turns alone, its first step of those that all walk, and its turns in all.
    """
    others = tl.num_programs(0) - push_programs
    rounds = tl.minimum(push_rounds, num_steps // others)
    alone = tl.where(program < push_programs, 0, rounds)
    shared = rounds * others + program
    return alone, shared, alone + tl.cdiv(tl.maximum(num_steps - shared, 0), tl.num_programs(0))


@triton.jit
def step_of_turn(turn, alone, shared, program, push_programs):
    """The step of a program's turn, as dealt out by `turns`."""
    programs = tl.num_programs(0)
    by_others = turn * (programs - push_programs) + program - push_programs
    return tl.where(turn < alone, by_others, shared + (turn - alone) * programs)


@triton.jit
def tile_of_step(step, num_m, order_ptr, expert_ptr, NUM_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(row tile, its expert, n) of a step; zeros after the last one."""
    position, n = tile_coordinates(step, num_m, NUM_N, GROUP_M)
    inside = step < num_m * NUM_N
    m = tl.load(order_ptr + position, mask=inside, other=0)
    return m, tl.load(expert_ptr + m, mask=inside, other=0), n


@triton.jit
def row_tile_of_step(step, num_m, order_ptr, NUM_N: tl.constexpr, GROUP_M: tl.constexpr):
    """The row tile of a step; of a step below 0, any.

    What is counted a turn late is looked up by its step: a tile that a loop carries on to the next turn arrives there a
    turn early where Triton flattens the loop (docs/log.md).
    """
    position, _ = tile_coordinates(step, num_m, NUM_N, GROUP_M)
    return tl.load(order_ptr + position, mask=step >= 0, other=0)


@triton.jit
def count_tile(progress_ptr, m):
    """Count a finished tile at its row tile, once its block stores are visible."""
    block_stores_complete()
    tl.atomic_add(progress_ptr + m, 1, sem="release", scope="gpu")


@triton.jit
def halves(acc, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def gate_up_tile(
    a_ptrs,
    rows_desc,
    w13_desc,
    gate_desc,
    up_desc,
    act_desc,
    weight,
    row,
    expert,
    n,
    progress_ptr,
    turn,
    before,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATHERED: tl.constexpr,
    SAVE_H: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHTED: tl.constexpr,
    UP_FIRST: tl.constexpr,
    COUNT_TILES: tl.constexpr,
):
    """One tile of `gate_up_kernel`.  a_ptrs: first step of the rows, if GATHERED.  weight: of the rows, if WEIGHTED.

    COUNT_TILES: the tile that this program stored in its turn before, of row tile `before`, is counted.
    """
    dtype: tl.constexpr = act_desc.dtype
    HALF: tl.constexpr = BLOCK_N // 2
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, tl.cdiv(D, BLOCK_K)):
        if GATHERED:
            a = load_rows(a_ptrs, k, D, BLOCK_K)
        else:
            a = rows_desc.load([row, k * BLOCK_K])
        b = w13_desc.load([expert, 0, n * HALF, k * BLOCK_K]).reshape(BLOCK_N, BLOCK_K)
        acc = tl.dot(a, b.T, acc)
    gate, up = halves(acc, BLOCK_M, BLOCK_N)
    if UP_FIRST:
        up, gate = gate, up
    gate_16 = narrow(gate, dtype)
    up_16 = narrow(up, dtype)
    if COUNT_TILES:
        # A turn late, so that nobody waits for stores that are under way.
        if turn > 0:
            count_tile(progress_ptr, before)
    if SAVE_H:
        gate_desc.store([row, n * HALF], gate_16)
        up_desc.store([row, n * HALF], up_16)
    act = activate(gate_16.to(tl.float32), up_16.to(tl.float32), ACTIVATION)
    if WEIGHTED:
        act = act * weight[:, None]
    act_desc.store([row, n * HALF], narrow(act, dtype))


@triton.jit(
    do_not_specialize=[
        "timeout_ns", "rank", "arrived_offset", "finished_offset", "num_tokens", "push_programs", "push_rounds",
    ]
)  # fmt: skip
def gate_up_kernel(
    x_ptr,
    receive_ptr,
    rows_desc,
    source_ptr,
    weight_ptr,
    order_ptr,
    expert_ptr,
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
    push_rounds,
    progress_ptr,
    w13_desc,
    gate_desc,
    up_desc,
    act_desc,
    D: tl.constexpr,
    F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    RECEIVE_BLOCK: tl.constexpr,
    PUSH_D: tl.constexpr,
    PUSH_ROWS: tl.constexpr,
    GATHERED: tl.constexpr,
    FUSED: tl.constexpr,
    SAVE_H: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHTED: tl.constexpr,
    UP_FIRST: tl.constexpr,
    COUNT_TILES: tl.constexpr,
):
    """h = rows @ W13^T, act = ACTIVATION of h (times the routing weight if WEIGHTED).

    GATHERED: rows are read where they lie, local tokens and receive slots; else from rows_desc (N, D).
    FUSED (and GATHERED): tiles wait for their tokens; where programs push (CHUNK > 0), the first `push_programs`
    push this rank's before they join.
    COUNT_TILES: progress (M,) counts the finished tiles of each row tile, for a product that runs beside.
    w13_desc: (e, 2, F, D); a tile multiplies BLOCK_N/2 gate columns and the same up columns.  UP_FIRST:
    the descriptor's first half is the up projection (w1 and w3 apart, w3 at the lower address).
    gate_desc, up_desc (SAVE_H: the halves of h), act_desc: (N, F).  Blocks of one shape leave through the same shared
    memory, which makes room for a fourth stage.
    """
    NUM_N: tl.constexpr = (F + BLOCK_N // 2 - 1) // (BLOCK_N // 2)
    # The tables of the next tile are read while this one is multiplied, where the lint finds registers left for them.
    AHEAD: tl.constexpr = GATHERED and (CHUNK == 0 or WEIGHTED)
    program = tl.program_id(0)
    if FUSED and CHUNK > 0:
        if program < push_programs:
            push_tokens(
                x_ptr, send_token_ptr, send_count_ptr, receive_table_ptr, flag_table_ptr, arrived_offset,
                finished_offset, call_ptr, ticket_ptr, status_ptr, num_tokens, rank, program, push_programs, D,
                PUSH_D, PUSH_ROWS, CHUNK, RECEIVE_BLOCK, NUM_RANKS,
            )  # fmt: skip
    num_m = tl.load(totals_ptr + 1)
    num_steps = num_m * NUM_N
    deadline_ns = deadline(status_ptr, timeout_ns)
    alone, shared, count = turns(num_steps, program, push_programs, push_rounds)
    all_here = 0
    if AHEAD:
        step = step_of_turn(0, alone, shared, program, push_programs)
        m, expert, n = tile_of_step(step, num_m, order_ptr, expert_ptr, NUM_N, GROUP_M)
        source = tl.load(source_ptr + m * BLOCK_M + tl.arange(0, BLOCK_M), mask=step < num_steps, other=0)
    for turn in tl.range(0, count, flatten=not GATHERED):
        if not AHEAD:
            step = step_of_turn(turn, alone, shared, program, push_programs)
            m, expert, n = tile_of_step(step, num_m, order_ptr, expert_ptr, NUM_N, GROUP_M)
        row = m * BLOCK_M
        before = 0
        if COUNT_TILES:
            step_before = step_of_turn(turn - 1, alone, shared, program, push_programs)
            before = row_tile_of_step(tl.where(turn > 0, step_before, -1), num_m, order_ptr, NUM_N, GROUP_M)
        if WEIGHTED:  # loaded where it is used, it costs registers that the epilogue does not have
            weight = tl.load(weight_ptr + row + tl.arange(0, BLOCK_M))
        else:
            weight = weight_ptr
        if GATHERED:
            if not AHEAD:
                source = tl.load(source_ptr + row + tl.arange(0, BLOCK_M))
            if FUSED:
                all_here = wait_for_rows(
                    source, all_here, arrived_ptr, finished_ptr, call_ptr, deadline_ns, status_ptr, rank, BLOCK_M,
                    NUM_RANKS, CHUNK, RECEIVE_BLOCK,
                )  # fmt: skip
            a_ptrs = row_pointers(source, x_ptr, receive_ptr, D)[:, None] + tl.arange(0, BLOCK_K)[None, :]
        else:
            a_ptrs = x_ptr
        if AHEAD:
            step = step_of_turn(turn + 1, alone, shared, program, push_programs)
            next_m, next_expert, next_n = tile_of_step(step, num_m, order_ptr, expert_ptr, NUM_N, GROUP_M)
            next_rows = next_m * BLOCK_M + tl.arange(0, BLOCK_M)
            next_source = tl.load(source_ptr + next_rows, mask=step < num_steps, other=0)
        gate_up_tile(
            a_ptrs, rows_desc, w13_desc, gate_desc, up_desc, act_desc, weight, row, expert, n, progress_ptr, turn, before,
            D, BLOCK_M, BLOCK_N, BLOCK_K, GATHERED, SAVE_H, ACTIVATION, WEIGHTED, UP_FIRST,
            COUNT_TILES,
        )  # fmt: skip
        if AHEAD:
            m = next_m
            expert = next_expert
            n = next_n
            source = next_source
    if COUNT_TILES:
        if count > 0:
            last = step_of_turn(count - 1, alone, shared, program, push_programs)
            count_tile(progress_ptr, row_tile_of_step(last, num_m, order_ptr, NUM_N, GROUP_M))


@triton.jit
def gathered_product_tile(
    a_ptrs,
    b_desc,
    out_desc,
    row,
    expert,
    n,
    progress_ptr,
    turn,
    before,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COUNT_TILES: tl.constexpr,
):
    """One tile of a product of gathered rows.  a_ptrs: their first step.  COUNT_TILES: as in `gate_up_tile`."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, tl.cdiv(D, BLOCK_K)):
        a = load_rows(a_ptrs, k, D, BLOCK_K)
        b = b_desc.load([expert, k * BLOCK_K, n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
        acc = tl.dot(a, b, acc)
    if COUNT_TILES:
        if turn > 0:
            count_tile(progress_ptr, before)
    store_tile(acc, out_desc, row, n * BLOCK_N, BLOCK_M, BLOCK_N)


@triton.jit(
    do_not_specialize=[
        "timeout_ns", "rank", "arrived_offset", "finished_offset", "num_tokens", "push_programs", "push_rounds",
    ]
)  # fmt: skip
def gathered_product_kernel(
    x_ptr,
    receive_ptr,
    source_ptr,
    order_ptr,
    expert_ptr,
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
    push_rounds,
    progress_ptr,
    b_desc,
    out_desc,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    RECEIVE_BLOCK: tl.constexpr,
    PUSH_D: tl.constexpr,
    PUSH_ROWS: tl.constexpr,
    FUSED: tl.constexpr,
    COUNT_TILES: tl.constexpr,
):
    """out (N, WIDTH) fp32 = rows (N, D) @ B, rows read where they lie.  b_desc: (e, D, WIDTH).  FUSED: as above.

    COUNT_TILES: as above, for the next kernel, which may run beside this one.
    """
    NUM_N: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    if COUNT_TILES:
        next_may_come()
    if FUSED and CHUNK > 0:
        if program < push_programs:
            push_tokens(
                x_ptr, send_token_ptr, send_count_ptr, receive_table_ptr, flag_table_ptr, arrived_offset,
                finished_offset, call_ptr, ticket_ptr, status_ptr, num_tokens, rank, program, push_programs, D,
                PUSH_D, PUSH_ROWS, CHUNK, RECEIVE_BLOCK, NUM_RANKS,
            )  # fmt: skip
    num_m = tl.load(totals_ptr + 1)
    deadline_ns = deadline(status_ptr, timeout_ns)
    alone, shared, count = turns(num_m * NUM_N, program, push_programs, push_rounds)
    all_here = 0
    for turn in tl.range(0, count):
        step = step_of_turn(turn, alone, shared, program, push_programs)
        position, n = tile_coordinates(step, num_m, NUM_N, GROUP_M)
        m = tl.load(order_ptr + position)
        expert = tl.load(expert_ptr + m)
        row = m * BLOCK_M
        source = tl.load(source_ptr + row + tl.arange(0, BLOCK_M))
        if FUSED:
            all_here = wait_for_rows(
                source, all_here, arrived_ptr, finished_ptr, call_ptr, deadline_ns, status_ptr, rank, BLOCK_M,
                NUM_RANKS, CHUNK, RECEIVE_BLOCK,
            )  # fmt: skip
        a_ptrs = row_pointers(source, x_ptr, receive_ptr, D)[:, None] + tl.arange(0, BLOCK_K)[None, :]
        before = 0
        if COUNT_TILES:
            step_before = step_of_turn(turn - 1, alone, shared, program, push_programs)
            before = row_tile_of_step(tl.where(turn > 0, step_before, -1), num_m, order_ptr, NUM_N, GROUP_M)
        gathered_product_tile(
            a_ptrs, b_desc, out_desc, row, expert, n, progress_ptr, turn, before, D, BLOCK_M, BLOCK_N, BLOCK_K, COUNT_TILES,
        )  # fmt: skip
    if COUNT_TILES:
        if count > 0:
            last = step_of_turn(count - 1, alone, shared, program, push_programs)
            count_tile(progress_ptr, row_tile_of_step(last, num_m, order_ptr, NUM_N, GROUP_M))


@triton.jit
def store_tile(acc, out_desc, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile in out_desc's dtype, in blocks that take half of its shared memory, or, in fp32, a quarter."""
    left, right = halves(acc, BLOCK_M, BLOCK_N)
    if out_desc.dtype == tl.float32:
        QUARTER: tl.constexpr = BLOCK_N // 4
        a, b = halves(left, BLOCK_M, 2 * QUARTER)
        out_desc.store([row, column], a)
        out_desc.store([row, column + QUARTER], b)
        a, b = halves(right, BLOCK_M, 2 * QUARTER)
        out_desc.store([row, column + 2 * QUARTER], a)
        out_desc.store([row, column + 3 * QUARTER], b)
    else:
        out_desc.store([row, column], narrow(left, out_desc.dtype))
        out_desc.store([row, column + BLOCK_N // 2], narrow(right, out_desc.dtype))


@triton.jit
def product_tile(
    a_desc,
    b_desc,
    out_desc,
    expert_ptr,
    return_ptr,
    returns_table_ptr,
    status_ptr,
    m,
    n,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    HALVES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    UP_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCATTER: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """One tile of `product_kernel`.  CHECKED (and SCATTER): nothing is stored once this call has failed."""
    dtype: tl.constexpr = out_desc.dtype
    STEPS: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    HALF: tl.constexpr = BLOCK_N // 2
    expert = tl.load(expert_ptr + m)
    row = m * BLOCK_M
    if CHECKED:
        is_lost = tl.load(status_ptr, volatile=True) != 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, HALVES * STEPS):
        half = k // STEPS
        depth = k % STEPS * BLOCK_K
        a = a_desc.load([row, half * DEPTH + depth])
        if TRANSPOSED:
            acc = tl.dot(a, b_desc.load([expert, n * BLOCK_N, depth]).reshape(BLOCK_N, BLOCK_K).T, acc)
        else:
            part = 1 - half if UP_FIRST else half
            acc = tl.dot(a, b_desc.load([expert, part, depth, n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N), acc)
    if SCATTER:
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        slot = tl.load(return_ptr + row + tl.arange(0, BLOCK_M))
        if CHECKED:
            slot = tl.where(is_lost, -1, slot)
        base = tl.load(returns_table_ptr + tl.maximum(slot, 0) // SLOTS)
        address = base + (tl.maximum(slot, 0) % SLOTS).to(tl.int64) * (WIDTH * (dtype.primitive_bitwidth // 8))
        ptrs = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
        column = n * BLOCK_N + tl.arange(0, HALF)
        used = (slot >= 0)[:, None]
        if WIDTH % BLOCK_N == 0:
            tl.store(ptrs[:, None] + column[None, :], narrow(left, dtype), mask=used)
            tl.store(ptrs[:, None] + (column + HALF)[None, :], narrow(right, dtype), mask=used)
        else:
            tl.store(ptrs[:, None] + column[None, :], narrow(left, dtype), mask=used & (column < WIDTH)[None, :])
            column += HALF
            tl.store(ptrs[:, None] + column[None, :], narrow(right, dtype), mask=used & (column < WIDTH)[None, :])
    else:
        store_tile(acc, out_desc, row, n * BLOCK_N, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["flag_offset", "programs", "rank", "timeout_ns"])
def product_kernel(
    a_desc,
    b_desc,
    out_desc,
    expert_ptr,
    totals_ptr,
    return_ptr,
    returns_table_ptr,
    flag_table_ptr,
    flag_offset,
    call_ptr,
    ticket_ptr,
    programs,
    order_ptr,
    progress_ptr,
    cursor_ptr,
    status_ptr,
    timeout_ns,
    rank,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    HALVES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    UP_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    SCATTER: tl.constexpr,
    TILES_BEFORE: tl.constexpr,
):
    """out = a @ B, each row stored straight into its slot at the source rank (SCATTER) or in place.

    a_desc: (N, HALVES * DEPTH); where BLOCK_K does not divide DEPTH, a step reads on into the next half and
    meets zeros of B.  b_desc: (e, WIDTH, DEPTH) if TRANSPOSED (W2 in the forward), else (e, HALVES, DEPTH, WIDTH)
    (W13, and W2 with one half, in the backward).  The contraction runs over gate, then up; UP_FIRST as above.
    out_desc: (N, WIDTH) in the layer's dtype, or fp32 for a product that is not rounded.
    programs: of all launches that share this product.
    TILES_BEFORE: 0, or this product runs beside the one that makes `a`, in one or more launches.  A column of
    GROUP_M row tiles, in the order of `order`, is then claimed at the shared cursor, and begins when `progress` counts
    TILES_BEFORE finished tiles for each of them.
    """
    NUM_N: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    num_m = tl.load(totals_ptr + 1)
    if SCATTER:
        num_m = tl.where(failed(status_ptr), 0, num_m)  # a late peer may still read what an earlier call returned
    if TILES_BEFORE == 0:
        for step in tl.range(tl.program_id(0), num_m * NUM_N, tl.num_programs(0), flatten=True):
            m, n = tile_coordinates(step, num_m, NUM_N, GROUP_M)
            product_tile(
                a_desc, b_desc, out_desc, expert_ptr, return_ptr, returns_table_ptr, status_ptr, m, n, DEPTH, WIDTH,
                SLOTS, HALVES, TRANSPOSED, UP_FIRST, BLOCK_M, BLOCK_N, BLOCK_K, SCATTER, False,
            )  # fmt: skip
    else:
        # Twice the time: whoever makes `a` may wait for its peers as long as that.
        deadline_ns = deadline(status_ptr, timeout_ns.to(tl.int64) * 2)
        num_columns = tl.cdiv(num_m, GROUP_M) * NUM_N
        column = tl.atomic_add(cursor_ptr, 1, sem="relaxed")
        while column < num_columns:
            first = column // NUM_N * GROUP_M
            height = tl.minimum(num_m - first, GROUP_M)
            made = tl.load(order_ptr + first + tl.arange(0, WIDE) % height)
            wait_for(progress_ptr + made, rank, TILES_BEFORE, deadline_ns, status_ptr, STAGE_ROWS)
            block_loads_follow()
            for i in tl.range(0, height, flatten=True):
                m = tl.load(order_ptr + first + i)
                product_tile(
                    a_desc, b_desc, out_desc, expert_ptr, return_ptr, returns_table_ptr, status_ptr, m,
                    column % NUM_N, DEPTH, WIDTH, SLOTS, HALVES, TRANSPOSED, UP_FIRST, BLOCK_M, BLOCK_N, BLOCK_K,
                    SCATTER, False,
                )  # fmt: skip
            column = tl.atomic_add(cursor_ptr, 1, sem="relaxed")
    if SCATTER:
        signal_all(flag_table_ptr, flag_offset, tl.load(call_ptr), ticket_ptr, programs, status_ptr, NUM_RANKS)
