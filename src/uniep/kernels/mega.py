"""One launch per direction: programs claim the tasks of lists that the device has made from the plan.

A program claims the next place of the matrix list (kernels/lists.py) and, when the task there needs vector tasks before it,
or none is left, of the vector list.  Nothing is dealt out: a claim is the only way to a task, so that one resident program
finishes everything, and a task waits for tasks at earlier places only.  Behind the tasks of a backward's vector list come
those whose number the host knows: copies of what was received, and sums.  Pushes have a cursor of their own, from which the
programs that arrive first claim before all else.

Suffixes: M row tiles, D hidden, F ffn, e local experts, N padded rows.
"""

import triton
import triton.language as tl

from uniep.kernels.claims import (
    claim,
    claimed,
    count_kept,
    count_made,
    count_pushes,
    has_all,
    keep,
    push_first,
    record_task,
    wait_for_peers,
)
from uniep.kernels.gemm import gate_up_tile, gathered_product_tile, product_tile
from uniep.kernels.gradients import activation_gradient_item, put_tile, weight_gradient_tile
from uniep.kernels.lists import (
    ACTIVATED,
    ACTIVATION_GRADIENT,
    ARRIVED,
    COUNTERS,
    DOWN_WEIGHTS,
    FIRST,
    MADE,
    MATRIX,
    RETURN,
    RETURNED,
    TASKS,
    VECTOR,
)
from uniep.kernels.ptx import (
    block_loads_follow,
    nanoseconds,
)
from uniep.kernels.rows import row_pointers, wait_for_rows
from uniep.kernels.sync import (
    STAGE_ACTIVATED,
    STAGE_COMBINE,
    STAGE_DISPATCH,
    STAGE_RAW,
    STAGE_ROWS,
    WIDE,
    deadline,
    failed,
    pass_on,
    signal_when_all,
    wait_for,
)
from uniep.kernels.transfer import combine_item, return_dweights


@triton.jit(
    do_not_specialize=[
        "timeout_ns", "rank", "arrived_offset", "finished_offset", "returned_offset", "num_tokens", "push_programs",
        "sum_tokens", "kept_parity", "kept_stride", "kept_block",
    ]
)  # fmt: skip
def forward_kernel(
    x_ptr,
    receive_ptr,
    source_ptr,
    weight_ptr,
    return_ptr,
    expert_ptr,
    totals_ptr,
    list_ptr,
    counters_ptr,
    arrived_ptr,
    finished_ptr,
    returned_ptr,
    call_ptr,
    status_ptr,
    timeout_ns,
    rank,
    send_token_ptr,
    send_count_ptr,
    receive_table_ptr,
    returns_table_ptr,
    flag_table_ptr,
    arrived_offset,
    finished_offset,
    returned_offset,
    num_tokens,
    push_programs,
    sum_tokens,
    kept_ptr,
    kept_count_ptr,
    kept_parity,
    kept_stride,
    kept_block,
    returns_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    matrix_trace_ptr,
    vector_trace_ptr,
    w13_desc,
    gate_desc,
    up_desc,
    made_desc,
    act_desc,
    w2_desc,
    D: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N1: tl.constexpr,
    BLOCK_K1: tl.constexpr,
    BLOCK_N2: tl.constexpr,
    BLOCK_K2: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEPT: tl.constexpr,
    RECEIVE_BLOCK: tl.constexpr,
    PUSH_D: tl.constexpr,
    PUSH_ROWS: tl.constexpr,
    FUSED: tl.constexpr,
    SAVE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHTED: tl.constexpr,
    UP_FIRST: tl.constexpr,
    THREADS: tl.constexpr,
    TRACE: tl.constexpr,
):
    """Everything of a forward behind its plan: push, gate and up, down, the copy of what was received, sums.

    made_desc, act_desc: the activation (N, F) in blocks as it is stored and as it is multiplied.  FUSED: peers send tokens,
    and this rank does where CHUNK > 0.  SAVE: h (gate_desc, up_desc) and what was received,
    kept_block tokens of each source at most.  kept_count: tokens that each source has sent, kept_stride words apart, those
    of odd calls kept_parity words behind those of even ones.  Other arguments as in kernels/gemm.py and
    kernels/transfer.py.
    """
    NUM_N1: tl.constexpr = (F + BLOCK_N1 // 2 - 1) // (BLOCK_N1 // 2)
    NUM_N2: tl.constexpr = (D + BLOCK_N2 - 1) // BLOCK_N2
    PUSHES: tl.constexpr = FUSED and CHUNK > 0
    arrival = tl.atomic_add(counters_ptr + ARRIVED, 1, sem="relaxed")
    deadline_ns = deadline(status_ptr, timeout_ns)
    num_m = tl.load(totals_ptr + 1)
    num_first = num_m * NUM_N1
    num_matrix = tl.load(counters_ptr + TASKS)
    num_kept = 0
    kept_count_ptr += (tl.load(call_ptr) & 1) * kept_parity
    if SAVE:
        num_kept = count_kept(kept_count_ptr, kept_stride, rank, KEPT, NUM_RANKS)
    num_pushes = 0  # of a trace, whose rows they come first in
    if PUSHES:
        push_first(
            x_ptr, send_token_ptr, send_count_ptr, receive_table_ptr, flag_table_ptr, arrived_offset, finished_offset,
            tl.load(call_ptr), counters_ptr, status_ptr, num_tokens, rank, arrival, push_programs, vector_trace_ptr, D, PUSH_D,
            PUSH_ROWS, CHUNK, RECEIVE_BLOCK, NUM_RANKS, TRACE,
        )  # fmt: skip
        if TRACE:
            num_pushes = count_pushes(send_count_ptr, rank, CHUNK, NUM_RANKS)
    before_sums = num_kept
    num_vector = before_sums + tl.cdiv(num_tokens, sum_tokens)
    progress_ptr = counters_ptr + COUNTERS
    all_here = 0
    all_made = 0
    back = 0  # 1: all results have returned; 2: the call has failed
    made = 0  # tiles of the first product that are not in MADE yet, the last of them, of row tile `stored`, not counted
    stored = 0
    unsent = (arrival == 0).to(tl.int32)  # of RETURNED
    place = tl.atomic_add(counters_ptr + MATRIX, 1, sem="relaxed")
    vector_place = tl.atomic_add(counters_ptr + VECTOR, 1, sem="relaxed")
    while (place < num_matrix) | (vector_place < num_vector):
        claimed_ns = nanoseconds() if TRACE else 0
        is_matrix = place < num_matrix
        word = tl.load(list_ptr + place, mask=is_matrix, other=-1)
        is_first = is_matrix & ((word >> 56) == FIRST)
        if (made > 0) & (not is_first):
            count_made(counters_ptr, stored, made)
            made = 0
        if is_matrix:
            answer = claim(counters_ptr + MATRIX, THREADS)
            m = ((word >> 16) & 0xFFFFFF).to(tl.int32)
            n = (word & 0xFFFF).to(tl.int32)
            row = m * BLOCK_M
            if is_first:
                expert = ((word >> 40) & 0xFFFF).to(tl.int32)
                if WEIGHTED:
                    weight = tl.load(weight_ptr + row + tl.arange(0, BLOCK_M))
                else:
                    weight = weight_ptr
                source = tl.load(source_ptr + row + tl.arange(0, BLOCK_M))
                if FUSED:
                    all_here = wait_for_rows(
                        source, all_here, arrived_ptr, finished_ptr, call_ptr, deadline_ns, status_ptr, rank, BLOCK_M,
                        NUM_RANKS, CHUNK, RECEIVE_BLOCK,
                    )  # fmt: skip
                started_ns = nanoseconds() if TRACE else 0
                a_ptrs = row_pointers(source, x_ptr, receive_ptr, D)[:, None] + tl.arange(0, BLOCK_K1)[None, :]
                gate_up_tile(
                    a_ptrs, made_desc, w13_desc, gate_desc, up_desc, made_desc, weight, row, expert, n, progress_ptr,
                    made, stored, D, BLOCK_M, BLOCK_N1, BLOCK_K1, True, SAVE, ACTIVATION, WEIGHTED, UP_FIRST,
                    True,
                )  # fmt: skip
                stored = m + 0
                made += 1
                record_task(matrix_trace_ptr, place, claimed_ns, started_ns, TRACE)
            else:
                if all_made == 0:
                    all_made = has_all(counters_ptr + MADE, num_first).to(tl.int32)
                    if all_made == 0:
                        lanes = tl.zeros((WIDE,), tl.int32)
                        wait_for(
                            progress_ptr + m + lanes, lanes + rank, NUM_N1, deadline_ns + timeout_ns, status_ptr,
                            STAGE_ROWS,
                        )  # fmt: skip
                    block_loads_follow()
                started_ns = nanoseconds() if TRACE else 0
                product_tile(
                    act_desc, w2_desc, made_desc, expert_ptr, return_ptr, returns_table_ptr, status_ptr, m, n, F, D,
                    SLOTS, 1, True, False, BLOCK_M, BLOCK_N2, BLOCK_K2, True, True,
                )  # fmt: skip
                unsent += 1
                record_task(matrix_trace_ptr, place, claimed_ns, started_ns, TRACE)
            place = claimed(answer, THREADS)
        else:
            if unsent > 0:
                signal_when_all(
                    flag_table_ptr, returned_offset, tl.load(call_ptr), counters_ptr + RETURNED, unsent, num_m * NUM_N2 + 1,
                    status_ptr, NUM_RANKS,
                )  # fmt: skip
                unsent = 0
            answer = claim(counters_ptr + VECTOR, THREADS)
            started_ns = claimed_ns
            if vector_place < before_sums:
                if SAVE and NUM_RANKS > 1:
                    if FUSED:
                        if all_here == 0:
                            wait_for_peers(
                                finished_ptr, call_ptr, rank, deadline_ns, status_ptr, NUM_RANKS, STAGE_DISPATCH, False
                            )
                            all_here = 1
                    started_ns = nanoseconds() if TRACE else 0
                    keep(
                        receive_ptr, kept_ptr, kept_count_ptr, kept_stride, kept_block, rank, vector_place, D, PUSH_D,
                        8, KEPT, RECEIVE_BLOCK, NUM_RANKS,
                    )  # fmt: skip
            else:
                if back == 0:
                    wait_for_peers(
                        returned_ptr, call_ptr, rank, deadline_ns + timeout_ns, status_ptr, NUM_RANKS, STAGE_COMBINE,
                        True,
                    )  # fmt: skip
                    back = tl.where(failed(status_ptr), 2, 1)
                    if back == 2:
                        pass_on(status_ptr)
                started_ns = nanoseconds() if TRACE else 0
                first = (vector_place - before_sums) * sum_tokens
                blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
                for item in range(first * blocks, tl.minimum(first + sum_tokens, num_tokens) * blocks):
                    token = (item // blocks).to(tl.int64)
                    column = item % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
                    combine_item(
                        returns_ptr, ids_ptr, weights_ptr, out_ptr, back == 2, token, column, D, K, BLOCK_D,
                        not WEIGHTED,
                    )  # fmt: skip
            record_task(vector_trace_ptr, num_pushes + vector_place, claimed_ns, started_ns, TRACE)
            vector_place = claimed(answer, THREADS)
    # What a program owes that found nothing to do behind its products.
    if made > 0:
        count_made(counters_ptr, stored, made)
    if unsent > 0:
        signal_when_all(
            flag_table_ptr, returned_offset, tl.load(call_ptr), counters_ptr + RETURNED, unsent, num_m * NUM_N2 + 1, status_ptr,
            NUM_RANKS,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "timeout_ns", "rank", "arrived_offset", "finished_offset", "returned_offset", "num_tokens", "push_programs",
        "sum_tokens",
    ]
)  # fmt: skip
def backward_kernel(
    dy_ptr,
    receive_ptr,
    source_ptr,
    weight_ptr,
    return_ptr,
    expert_ptr,
    start_ptr,
    rows_ptr,
    totals_ptr,
    matrix_ptr,
    vector_ptr,
    counters_ptr,
    arrived_ptr,
    finished_ptr,
    returned_ptr,
    call_ptr,
    status_ptr,
    timeout_ns,
    rank,
    send_token_ptr,
    send_count_ptr,
    receive_table_ptr,
    returns_table_ptr,
    dweights_table_ptr,
    flag_table_ptr,
    arrived_offset,
    finished_offset,
    returned_offset,
    num_tokens,
    push_programs,
    sum_tokens,
    raw_ptr,
    gate_ptr,
    up_ptr,
    dh_ptr,
    act_ptr,
    groups_ptr,
    x_address_ptr,
    dy_address_ptr,
    returns_ptr,
    dweights_ptr,
    ids_ptr,
    dx_ptr,
    out_dweights_ptr,
    matrix_trace_ptr,
    vector_trace_ptr,
    w2_desc,
    raw_desc,
    dh_desc,
    w13_desc,
    act_rows_desc,
    dh_rows_desc,
    dw2_desc,
    dw_gate_desc,
    dw_up_desc,
    D: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHT_M: tl.constexpr,
    WEIGHT_N: tl.constexpr,
    WEIGHT_K: tl.constexpr,
    ITEM_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    RECEIVE_BLOCK: tl.constexpr,
    PUSH_D: tl.constexpr,
    PUSH_ROWS: tl.constexpr,
    CHUNK_EXPERTS: tl.constexpr,
    FUSED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHTED: tl.constexpr,
    UP_FIRST: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    COLLECTS: tl.constexpr,
    THREADS: tl.constexpr,
    TRACE: tl.constexpr,
):
    """Everything of a backward behind its entry: push of dO, both data gradients around that of the activation, d(weight),
    weight gradients, sums.

    Descriptors: what is multiplied, raw in blocks as it is stored, dh and act as rows that weight gradients contract, and
    dW.  COLLECTS: d(weight) of this rank is needed.  Other arguments as in kernels/gemm.py and kernels/transfer.py.
    """
    NUM_F: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    NUM_D: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    WEIGHT_D: tl.constexpr = (D + WEIGHT_M - 1) // WEIGHT_M
    WEIGHT_F: tl.constexpr = (F + WEIGHT_N - 1) // WEIGHT_N
    GROUPS: tl.constexpr = (F + 63) // 64
    PUSHES: tl.constexpr = FUSED and CHUNK > 0
    arrival = tl.atomic_add(counters_ptr + ARRIVED, 1, sem="relaxed")
    deadline_ns = deadline(status_ptr, timeout_ns)
    num_m = tl.load(totals_ptr + 1)
    num_matrix = tl.load(counters_ptr + TASKS)
    num_pushes = 0  # of a trace, whose rows they come first in
    if PUSHES:
        push_first(
            dy_ptr, send_token_ptr, send_count_ptr, receive_table_ptr, flag_table_ptr, arrived_offset, finished_offset,
            tl.load(call_ptr), counters_ptr, status_ptr, num_tokens, rank, arrival, push_programs, vector_trace_ptr, D, PUSH_D,
            PUSH_ROWS, CHUNK, RECEIVE_BLOCK, NUM_RANKS, TRACE,
        )  # fmt: skip
        if TRACE:
            num_pushes = count_pushes(send_count_ptr, rank, CHUNK, NUM_RANKS)
    before_sums = num_m * (NUM_F + 1)
    num_vector = before_sums + tl.cdiv(num_tokens, sum_tokens)
    num_returns = num_m * (NUM_D + 1) + 1  # rows, d(weight), and one
    progress_ptr = counters_ptr + COUNTERS
    activated_ptr = progress_ptr + num_m
    need_ptr = activated_ptr + num_m
    all_here = 0
    all_made = 0
    all_activated = 0
    back = 0  # as in `forward_kernel`
    made = 0
    stored = 0
    unsent = (arrival == 0).to(tl.int32)
    place = tl.atomic_add(counters_ptr + MATRIX, 1, sem="relaxed")
    vector_place = tl.atomic_add(counters_ptr + VECTOR, 1, sem="relaxed")
    while (place < num_matrix) | (vector_place < num_vector):
        claimed_ns = nanoseconds() if TRACE else 0
        is_matrix = place < num_matrix
        word = tl.load(matrix_ptr + place, mask=is_matrix, other=0)
        op = (word >> 56).to(tl.int32)
        expert = ((word >> 40) & 0xFFFF).to(tl.int32)
        # The first product of a chunk needs what those that return before it needed; without chunks nothing.
        of_expert = expert
        if CHUNK_EXPERTS > 0:
            of_expert = tl.where(op == FIRST, expert - 2 * CHUNK_EXPERTS, expert)
        else:
            of_expert = tl.where(op == FIRST, -1, expert)
        need = tl.load(need_ptr + of_expert, mask=is_matrix & (of_expert >= 0), other=0)
        if is_matrix:
            is_matrix = vector_place >= need
        if (made > 0) & ((not is_matrix) | (op != FIRST)):
            count_made(counters_ptr, stored, made)
            made = 0
        owes = (unsent > 0) & tl.where(is_matrix, op >= DOWN_WEIGHTS, vector_place >= before_sums)
        if owes:
            signal_when_all(
                flag_table_ptr, returned_offset, tl.load(call_ptr), counters_ptr + RETURNED, unsent, num_returns, status_ptr,
                NUM_RANKS,
            )  # fmt: skip
            unsent = 0
        started_ns = claimed_ns
        if is_matrix:
            answer = claim(counters_ptr + MATRIX, THREADS)
            if op == FIRST:
                m = ((word >> 16) & 0xFFFFFF).to(tl.int32)
                n = (word & 0xFFFF).to(tl.int32)
                source = tl.load(source_ptr + m * BLOCK_M + tl.arange(0, BLOCK_M))
                if FUSED:
                    all_here = wait_for_rows(
                        source, all_here, arrived_ptr, finished_ptr, call_ptr, deadline_ns, status_ptr, rank, BLOCK_M,
                        NUM_RANKS, CHUNK, RECEIVE_BLOCK,
                    )  # fmt: skip
                started_ns = nanoseconds() if TRACE else 0
                a_ptrs = row_pointers(source, dy_ptr, receive_ptr, D)[:, None] + tl.arange(0, BLOCK_K)[None, :]
                gathered_product_tile(
                    a_ptrs, w2_desc, raw_desc, m * BLOCK_M, expert, n, progress_ptr, made, stored, D, BLOCK_M, BLOCK_N,
                    BLOCK_K, True,
                )  # fmt: skip
                stored = m + 0
                made += 1
            else:
                begin = tl.load(start_ptr + expert)
                if all_activated == 0:
                    all_activated = has_all(counters_ptr + ACTIVATED, num_m * NUM_F).to(tl.int32)
                    if all_activated == 0:
                        first_m = begin // BLOCK_M
                        num_awaited = tl.load(start_ptr + expert + 1) // BLOCK_M - first_m
                        if op == RETURN:
                            first_m = ((word >> 16) & 0xFFFFFF).to(tl.int32)
                            num_awaited = num_awaited * 0 + 1
                        for i in range(0, num_awaited, WIDE):
                            lanes = tl.minimum(i + tl.arange(0, WIDE), num_awaited - 1)
                            wait_for(
                                activated_ptr + first_m + lanes, lanes * 0 + rank, NUM_F, deadline_ns + timeout_ns,
                                status_ptr, STAGE_ACTIVATED,
                            )  # fmt: skip
                    block_loads_follow()
                started_ns = nanoseconds() if TRACE else 0
                if op == RETURN:
                    m = ((word >> 16) & 0xFFFFFF).to(tl.int32)
                    n = (word & 0xFFFF).to(tl.int32)
                    product_tile(
                        dh_desc, w13_desc, dh_desc, expert_ptr, return_ptr, returns_table_ptr, status_ptr, m, n, F, D,
                        SLOTS, 2, False, UP_FIRST, BLOCK_M, BLOCK_N, BLOCK_K, True, True,
                    )  # fmt: skip
                    unsent += 1
                else:
                    is_lost = tl.load(status_ptr, volatile=True) != 0
                    tile = (word & 0xFFFFFFFF).to(tl.int32)
                    if op == DOWN_WEIGHTS:
                        m = tile // WEIGHT_F
                        n = tile % WEIGHT_F
                        acc = weight_gradient_tile(
                            act_rows_desc, dy_address_ptr, act_rows_desc, rows_ptr, begin, is_lost, expert, m, 0, n, D,
                            WEIGHT_M, WEIGHT_N, WEIGHT_K, True,
                        )  # fmt: skip
                        put_tile(
                            acc, dw2_desc, expert, m * WEIGHT_M, n * WEIGHT_N, WEIGHT_M, WEIGHT_N, False, ACCUMULATE
                        )
                    else:
                        part = tile // (WEIGHT_F * WEIGHT_D)
                        m = tile % WEIGHT_D
                        n = tile // WEIGHT_D % WEIGHT_F
                        acc = weight_gradient_tile(
                            dh_rows_desc, x_address_ptr, dh_rows_desc, rows_ptr, begin, is_lost, expert, m, part * F, n,
                            D, WEIGHT_M, WEIGHT_N, WEIGHT_K, True,
                        )  # fmt: skip
                        if part == 0:
                            put_tile(
                                acc, dw_gate_desc, expert, m * WEIGHT_M, n * WEIGHT_N, WEIGHT_M, WEIGHT_N, True,
                                ACCUMULATE,
                            )  # fmt: skip
                        else:
                            put_tile(
                                acc, dw_up_desc, expert, m * WEIGHT_M, n * WEIGHT_N, WEIGHT_M, WEIGHT_N, True,
                                ACCUMULATE,
                            )  # fmt: skip
            record_task(matrix_trace_ptr, place, claimed_ns, started_ns, TRACE)
            place = claimed(answer, THREADS)
        else:
            answer = claim(counters_ptr + VECTOR, THREADS)
            if vector_place < before_sums:
                word = tl.load(vector_ptr + vector_place)
                m = ((word >> 16) & 0xFFFFFF).to(tl.int32)
                n = (word & 0xFFFF).to(tl.int32)
                lanes = tl.zeros((WIDE,), tl.int32)
                if (word >> 56) == ACTIVATION_GRADIENT:
                    if all_made == 0:
                        all_made = has_all(counters_ptr + MADE, num_m * NUM_F).to(tl.int32)
                        if all_made == 0:
                            wait_for(
                                progress_ptr + m + lanes, lanes + rank, NUM_F, deadline_ns + timeout_ns, status_ptr,
                                STAGE_RAW,
                            )  # fmt: skip
                    started_ns = nanoseconds() if TRACE else 0
                    for first in range(0, BLOCK_M, ITEM_ROWS):
                        row = (m * BLOCK_M + first + tl.arange(0, ITEM_ROWS)).to(tl.int64)
                        activation_gradient_item(
                            raw_ptr, gate_ptr, up_ptr, weight_ptr, dh_ptr, act_ptr, groups_ptr, row, n, F, ITEM_ROWS,
                            BLOCK_N, ACTIVATION, WEIGHTED,
                        )  # fmt: skip
                    block_loads_follow()  # of what was stored here, by whoever counts on it
                    tl.atomic_add(activated_ptr + m, 1, sem="release", scope="gpu")
                    tl.atomic_add(counters_ptr + ACTIVATED, 1, sem="release", scope="gpu")
                else:
                    if all_activated == 0:
                        wait_for(
                            activated_ptr + m + lanes, lanes + rank, NUM_F, deadline_ns + timeout_ns, status_ptr,
                            STAGE_ACTIVATED,
                        )  # fmt: skip
                    started_ns = nanoseconds() if TRACE else 0
                    return_dweights(
                        groups_ptr, return_ptr, dweights_table_ptr, status_ptr, m * BLOCK_M + tl.arange(0, BLOCK_M), GROUPS,
                        SLOTS,
                    )  # fmt: skip
                    unsent += 1
            else:
                if back == 0:
                    wait_for_peers(
                        returned_ptr, call_ptr, rank, deadline_ns + timeout_ns, status_ptr, NUM_RANKS, STAGE_COMBINE,
                        True,
                    )  # fmt: skip
                    back = tl.where(failed(status_ptr), 2, 1)
                    if back == 2:
                        pass_on(status_ptr)
                started_ns = nanoseconds() if TRACE else 0
                begin = (vector_place - before_sums) * sum_tokens
                end = tl.minimum(begin + sum_tokens, num_tokens)
                blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
                for item in range(begin * blocks, end * blocks):
                    token = (item // blocks).to(tl.int64)
                    column = item % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
                    combine_item(returns_ptr, ids_ptr, ids_ptr, dx_ptr, back == 2, token, column, D, K, BLOCK_D, False)
                if COLLECTS:
                    for token in range(begin, end):
                        slot = token * K + tl.arange(0, KP)
                        inside = tl.arange(0, KP) < K
                        used = tl.load(ids_ptr + slot, mask=inside, other=-1) >= 0
                        value = tl.load(dweights_ptr + slot, mask=used, other=0.0)
                        tl.store(out_dweights_ptr + slot, tl.where(back == 2, float("nan"), value), mask=inside)
            record_task(vector_trace_ptr, num_pushes + vector_place, claimed_ns, started_ns, TRACE)
            vector_place = claimed(answer, THREADS)
    if made > 0:
        count_made(counters_ptr, stored, made)
    if unsent > 0:
        signal_when_all(
            flag_table_ptr, returned_offset, tl.load(call_ptr), counters_ptr + RETURNED, unsent, num_returns,
            status_ptr, NUM_RANKS,
        )  # fmt: skip
