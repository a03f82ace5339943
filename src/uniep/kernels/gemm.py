"""Grouped GEMM kernels: persistent loops over the row tiles of all local experts.

Row tiles are BLOCK_M consecutive rows of one expert's segment (segments are multiples of ROW_ALIGN, so a
tile never spans two experts).  Tile bodies never wait; the loops that run them do.  Accumulation is fp32
over ascending k groups from the segment start, never split, so bits do not depend on the tile.

Suffixes: M row tiles, D hidden, F ffn, e local experts, N padded rows.
"""

import triton
import triton.language as tl

from uniep.kernels.ptx import narrow, sigmoid
from uniep.kernels.rows import load_rows, row_pointers, wait_for_rows
from uniep.kernels.sync import deadline, signal_all
from uniep.kernels.transfer import push_tokens


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up in fp32: the one definition for forward, backward and recomputation."""
    return gate * sigmoid(gate) * up


@triton.jit
def pair_tree_sum(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS) -> (ROWS, COLUMNS / 64): adjacent pairs, six times.

    A sum of two has one order only, so that no layout can change it.
    """
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 2, 2)), 2)
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 4, 2)), 2)
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 8, 2)), 2)
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 16, 2)), 2)
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 32, 2)), 2)
    return tl.sum(tl.reshape(x, (ROWS, COLUMNS // 64, 2)), 2)


@triton.jit
def tile_coordinates(step, num_m, NUM_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(m, n) of the step-th tile: columns of GROUP_M row tiles, so that weights stay in L2."""
    per_group = GROUP_M * NUM_N
    first = step // per_group * GROUP_M
    height = tl.minimum(num_m - first, GROUP_M)
    within = step % per_group
    return first + within % height, within // height


@triton.jit
def first_steps(num_steps, program, push_programs, push_rounds):
    """How programs that push tokens first join the tiles later: (first step, own turns, first shared step).

    For `push_rounds` turns the other programs walk the steps alone; from then on all do.
    """
    others = tl.num_programs(0) - push_programs
    rounds = tl.minimum(push_rounds, num_steps // others)
    alone = tl.where(program < push_programs, 0, rounds)
    return program - push_programs, alone, rounds * others + program


@triton.jit
def halves(acc, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit(
    do_not_specialize=[
        "timeout_ns",
        "rank",
        "arrived_offset",
        "finished_offset",
        "num_tokens",
        "push_programs",
        "push_rounds",
    ]
)
def gate_up_kernel(
    x_ptr,
    receive_ptr,
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
    w13_desc,
    h_desc,
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
    FUSED: tl.constexpr,
    SAVE_H: tl.constexpr,
    WEIGHTED: tl.constexpr,
    UP_FIRST: tl.constexpr,
):
    """h = rows @ W13^T, act = swiglu(h) (times the routing weight if WEIGHTED), rows gathered in place.

    FUSED: the first `push_programs` programs push this rank's tokens, and tiles wait for theirs.
    w13_desc: (e, 2, F, D); a tile multiplies BLOCK_N/2 gate columns and the same up columns.  UP_FIRST:
    the descriptor's first half is the up projection (w1 and w3 apart, w3 at the lower address).
    h_desc: (N, 2, F).  act_desc: (N, F).
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    HALF: tl.constexpr = BLOCK_N // 2
    NUM_N: tl.constexpr = (F + HALF - 1) // HALF
    program = tl.program_id(0)
    if FUSED:
        if program < push_programs:
            push_tokens(
                x_ptr, send_token_ptr, send_count_ptr, receive_table_ptr, flag_table_ptr, arrived_offset, finished_offset, call_ptr,
                ticket_ptr, num_tokens, rank, program, push_programs, D, PUSH_D, PUSH_ROWS, CHUNK, RECEIVE_BLOCK, NUM_RANKS,
            )  # fmt: skip
    num_m = tl.load(totals_ptr + 1)
    deadline_ns = deadline(status_ptr, timeout_ns)
    first, alone, shared = first_steps(num_m * NUM_N, program, push_programs, push_rounds)
    count = alone + tl.cdiv(tl.maximum(num_m * NUM_N - shared, 0), tl.num_programs(0))
    all_here = 0
    for turn in tl.range(0, count):
        step = tl.where(
            turn < alone,
            first + turn * (tl.num_programs(0) - push_programs),
            shared + (turn - alone) * tl.num_programs(0),
        )
        position, n = tile_coordinates(step, num_m, NUM_N, GROUP_M)
        m = tl.load(order_ptr + position)
        expert = tl.load(expert_ptr + m)
        row = m * BLOCK_M
        source = tl.load(source_ptr + row + tl.arange(0, BLOCK_M))
        if FUSED:
            all_here = wait_for_rows(
                source,
                all_here,
                arrived_ptr,
                finished_ptr,
                call_ptr,
                deadline_ns,
                status_ptr,
                rank,
                NUM_RANKS,
                CHUNK,
                RECEIVE_BLOCK,
            )
        a_ptrs = row_pointers(source, x_ptr, receive_ptr, D)[:, None] + tl.arange(0, BLOCK_K)[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, tl.cdiv(D, BLOCK_K)):
            a = load_rows(a_ptrs, k, D, BLOCK_K)
            b = w13_desc.load([expert, 0, n * HALF, k * BLOCK_K]).reshape(BLOCK_N, BLOCK_K)
            acc = tl.dot(a, b.T, acc)
        gate, up = halves(acc, BLOCK_M, BLOCK_N)
        if UP_FIRST:
            up, gate = gate, up
        gate_16 = narrow(gate, dtype)
        up_16 = narrow(up, dtype)
        if SAVE_H:
            h_desc.store([row, 0, n * HALF], gate_16.reshape(BLOCK_M, 1, HALF))
            h_desc.store([row, 1, n * HALF], up_16.reshape(BLOCK_M, 1, HALF))
        act = swiglu(gate_16.to(tl.float32), up_16.to(tl.float32))
        if WEIGHTED:
            act = act * tl.load(weight_ptr + row + tl.arange(0, BLOCK_M))[:, None]
        act_desc.store([row, n * HALF], narrow(act, dtype))


@triton.jit(do_not_specialize=["flag_offset"])
def return_kernel(
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
):
    """out = rows @ B, each row stored straight into its slot at the source rank (SCATTER) or in place.

    a_desc: (N, HALVES * DEPTH); where BLOCK_K does not divide DEPTH, a step reads on into the next half and
    meets zeros of B.  (A reshaped A operand would go through registers.)  b_desc: (e, WIDTH, DEPTH) if TRANSPOSED (W2, forward), else
    (e, HALVES, DEPTH, WIDTH) (W13, backward).  The contraction runs over gate, then up; UP_FIRST as above.
    """
    dtype: tl.constexpr = a_desc.dtype
    NUM_N: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    num_m = tl.load(totals_ptr + 1)
    for step in tl.range(tl.program_id(0), num_m * NUM_N, tl.num_programs(0), flatten=True):
        m, n = tile_coordinates(step, num_m, NUM_N, GROUP_M)
        expert = tl.load(expert_ptr + m)
        row = m * BLOCK_M
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
            slot = tl.load(return_ptr + row + tl.arange(0, BLOCK_M))
            base = tl.load(returns_table_ptr + tl.maximum(slot, 0) // SLOTS)
            address = base + (tl.maximum(slot, 0) % SLOTS).to(tl.int64) * (WIDTH * (dtype.primitive_bitwidth // 8))
            ptrs = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
            left, right = halves(acc, BLOCK_M, BLOCK_N)
            column = n * BLOCK_N + tl.arange(0, BLOCK_N // 2)
            used = (slot >= 0)[:, None]
            if WIDTH % BLOCK_N == 0:
                tl.store(ptrs[:, None] + column[None, :], narrow(left, dtype), mask=used)
                tl.store(ptrs[:, None] + (column + BLOCK_N // 2)[None, :], narrow(right, dtype), mask=used)
            else:
                tl.store(ptrs[:, None] + column[None, :], narrow(left, dtype), mask=used & (column < WIDTH)[None, :])
                column += BLOCK_N // 2
                tl.store(ptrs[:, None] + column[None, :], narrow(right, dtype), mask=used & (column < WIDTH)[None, :])
        else:
            out_desc.store([row, n * BLOCK_N], narrow(acc, dtype))
    if SCATTER:
        signal_all(flag_table_ptr, flag_offset, tl.load(call_ptr), ticket_ptr, tl.num_programs(0), NUM_RANKS)


@triton.jit
def activation_gradient(
    raw,
    weight,
    row,
    column,
    h_desc,
    dh_desc,
    act_desc,
    groups_ptr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Epilogue of one (ROWS, COLUMNS) piece of raw = dO @ W2: dh, the activation that dW2 contracts, d(weight)."""
    dtype: tl.constexpr = h_desc.dtype
    GROUPS: tl.constexpr = (F + 63) // 64
    gate = h_desc.load([row, 0, column]).reshape(ROWS, COLUMNS).to(tl.float32)
    up = h_desc.load([row, 1, column]).reshape(ROWS, COLUMNS).to(tl.float32)
    act = swiglu(gate, up)
    if WEIGHTED:
        scored = act
        weighted = narrow(weight[:, None] * act, dtype)
    else:
        scored = narrow(act, dtype).to(tl.float32)
        weighted = narrow(weight[:, None] * scored, dtype)
    act_desc.store([row, column], weighted)
    sums = pair_tree_sum(raw * scored, ROWS, COLUMNS)
    group = column // 64 + tl.arange(0, COLUMNS // 64)
    at = groups_ptr + (row + tl.arange(0, ROWS)).to(tl.int64)[:, None] * GROUPS + group[None, :]
    tl.store(at, sums, mask=(group < GROUPS)[None, :])
    d_act = weight[:, None] * raw
    gate_sigmoid = sigmoid(gate)
    d_gate = d_act * up * (gate_sigmoid * (1.0 + gate * (1.0 - gate_sigmoid)))
    dh_desc.store([row, 0, column], narrow(d_gate, dtype).reshape(ROWS, 1, COLUMNS))
    d_up = d_act * (gate * gate_sigmoid)
    dh_desc.store([row, 1, column], narrow(d_up, dtype).reshape(ROWS, 1, COLUMNS))


@triton.jit(
    do_not_specialize=[
        "timeout_ns",
        "rank",
        "arrived_offset",
        "finished_offset",
        "num_tokens",
        "push_programs",
        "push_rounds",
    ]
)
def down_gradient_kernel(
    dy_ptr,
    receive_ptr,
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
    groups_ptr,
    w2_desc,
    h_desc,
    dh_desc,
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
    FUSED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """raw = dO rows @ W2 and, in its epilogue, dh, the weighted activation and the sums for d(weight).

    w2_desc: (e, D, F).  h_desc, dh_desc: (N, 2, F).  act_desc: (N, F).  groups: (N, ceil(F / 64)) fp32.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    NUM_N: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    if FUSED:
        if program < push_programs:
            push_tokens(
                dy_ptr, send_token_ptr, send_count_ptr, receive_table_ptr, flag_table_ptr, arrived_offset, finished_offset, call_ptr,
                ticket_ptr, num_tokens, rank, program, push_programs, D, PUSH_D, PUSH_ROWS, CHUNK, RECEIVE_BLOCK, NUM_RANKS,
            )  # fmt: skip
    num_m = tl.load(totals_ptr + 1)
    deadline_ns = deadline(status_ptr, timeout_ns)
    first, alone, shared = first_steps(num_m * NUM_N, program, push_programs, push_rounds)
    count = alone + tl.cdiv(tl.maximum(num_m * NUM_N - shared, 0), tl.num_programs(0))
    all_here = 0
    for turn in tl.range(0, count):
        step = tl.where(
            turn < alone,
            first + turn * (tl.num_programs(0) - push_programs),
            shared + (turn - alone) * tl.num_programs(0),
        )
        position, n = tile_coordinates(step, num_m, NUM_N, GROUP_M)
        m = tl.load(order_ptr + position)
        expert = tl.load(expert_ptr + m)
        row = m * BLOCK_M
        source = tl.load(source_ptr + row + tl.arange(0, BLOCK_M))
        if FUSED:
            all_here = wait_for_rows(
                source,
                all_here,
                arrived_ptr,
                finished_ptr,
                call_ptr,
                deadline_ns,
                status_ptr,
                rank,
                NUM_RANKS,
                CHUNK,
                RECEIVE_BLOCK,
            )
        a_ptrs = row_pointers(source, dy_ptr, receive_ptr, D)[:, None] + tl.arange(0, BLOCK_K)[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, tl.cdiv(D, BLOCK_K)):
            a = load_rows(a_ptrs, k, D, BLOCK_K)
            b = w2_desc.load([expert, k * BLOCK_K, n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
            acc = tl.dot(a, b, acc)
        weight = tl.load(weight_ptr + row + tl.arange(0, BLOCK_M))
        column = n * BLOCK_N
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        activation_gradient(
            left, weight, row, column, h_desc, dh_desc, act_desc, groups_ptr, F, BLOCK_M, HALF, WEIGHTED
        )
        activation_gradient(
            right, weight, row, column + HALF, h_desc, dh_desc, act_desc, groups_ptr, F, BLOCK_M, HALF, WEIGHTED
        )


@triton.jit(do_not_specialize=["first_column"])
def weight_gradient_kernel(
    a_desc,
    b_desc,
    out_desc,
    start_ptr,
    first_column,
    LOCAL: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """dW[e] = a[rows of e, first_column :]^T @ b[rows of e]: the whole segment in one accumulator, from zero.

    a_desc: (N, at least first_column + HEIGHT).  b_desc: (N, WIDTH).  out_desc: (e, HEIGHT, WIDTH).  Experts
    without rows get exact zeros.
    """
    dtype: tl.constexpr = out_desc.dtype
    NUM_M: tl.constexpr = (HEIGHT + BLOCK_M - 1) // BLOCK_M
    NUM_N: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    HALF: tl.constexpr = BLOCK_N // 2
    for step in tl.range(tl.program_id(0), LOCAL * NUM_M * NUM_N, tl.num_programs(0)):
        expert = step // (NUM_M * NUM_N)
        m, n = tile_coordinates(step % (NUM_M * NUM_N), NUM_M, NUM_N, GROUP_M)
        begin = tl.load(start_ptr + expert)
        steps = (tl.load(start_ptr + expert + 1) - begin) // BLOCK_K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, steps):
            a = a_desc.load([begin + k * BLOCK_K, first_column + m * BLOCK_M])
            b = b_desc.load([begin + k * BLOCK_K, n * BLOCK_N])
            acc = tl.dot(a.T, b, acc)
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        out_desc.store([expert, m * BLOCK_M, n * BLOCK_N], narrow(left, dtype).reshape(1, BLOCK_M, HALF))
        out_desc.store([expert, m * BLOCK_M, n * BLOCK_N + HALF], narrow(right, dtype).reshape(1, BLOCK_M, HALF))
