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

from uniep.kernels.arguments import (
    Activation,
    Addresses,
    Biases,
    Counted,
    GateUpBlocks,
    Kept,
    Lists,
    Offsets,
    Rows,
    Sums,
    Tokens,
    Wire,
)
from uniep.kernels.claims import (
    claim,
    claimed,
    count_kept,
    count_made,
    count_pushes,
    has_all,
    keep,
    now_if,
    push_first,
    record_task,
    wait_for_peers,
    wait_for_tokens,
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
    task_expert,
    task_m,
    task_n,
    task_op,
    task_tile,
)
from uniep.kernels.ptx import block_loads_follow
from uniep.kernels.rows import gathered_rows, num_row_tiles, wait_for_rows
from uniep.kernels.sync import (
    STAGE_ACTIVATED,
    STAGE_COMBINE,
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

KEEP_ROWS = tl.constexpr(4)  # received tokens that a program copies at once; more take registers


@triton.jit(
    do_not_specialize=[
        "timeout_ns", "rank", "arrived_offset", "finished_offset", "returned_offset", "num_tokens", "push_programs",
        "sum_tokens", "kept_parity", "kept_stride", "kept_block",
    ]
)  # fmt: skip
def forward_kernel(
    tokens: Tokens,
    rows: Rows,
    wire: Wire,
    lists: Lists,
    kept: Kept,
    sums: Sums,
    timeout_ns,
    rank,
    arrived_offset,
    finished_offset,
    returned_offset,
    num_tokens,
    push_programs,
    sum_tokens,
    kept_parity,
    kept_stride,
    kept_block,
    w13_desc,
    gate_desc,
    up_desc,
    made_desc,
    act_desc,
    w2_desc,
    biases: Biases,
    LAYER: tl.constexpr,
    TILE: tl.constexpr,
    DOWN_TILE: tl.constexpr,
    DOWN: tl.constexpr,
    SENDING: tl.constexpr,
    WAY: tl.constexpr,
):
    """Everything of a forward behind its plan: push, gate and up, down, the copy of what was received, sums.

    made_desc, act_desc: the activation (N, F) in blocks as it is stored and as it is multiplied.  gate_desc, up_desc: of h,
    None if it is not saved.  FUSED: peers send tokens, and this rank does where CHUNK > 0.
    kept: of what was received kept_block tokens of each source at most, or None; the counts of sources are kept_stride words
    apart, those of odd calls kept_parity words behind those of even ones.  DOWN: the product that returns rows.  Other
    arguments as in kernels/gemm.py and kernels/transfer.py.
    """
    NUM_N1: tl.constexpr = (LAYER.F + TILE.N // 2 - 1) // (TILE.N // 2)
    NUM_N2: tl.constexpr = (LAYER.D + DOWN_TILE.N - 1) // DOWN_TILE.N
    NUM_RANKS: tl.constexpr = SENDING.NUM_RANKS
    PUSHES: tl.constexpr = WAY.FUSED and SENDING.CHUNK > 0
    blocks = GateUpBlocks(None, w13_desc, gate_desc, up_desc, made_desc, biases.b13)
    offsets = Offsets(arrived_offset, finished_offset, returned_offset)
    arrival = tl.atomic_add(lists.counters + ARRIVED, 1, sem="relaxed")
    num_pushes = 0  # of a trace, whose rows they come first in
    if PUSHES:
        push_first(tokens.local, rows, wire, offsets, lists, num_tokens, rank, arrival, push_programs, SENDING)
        if lists.vector_records is not None:
            num_pushes = count_pushes(rows, rank, SENDING)
    deadline_ns = deadline(wire.status, timeout_ns)
    num_m = num_row_tiles(rows)
    num_first = num_m * NUM_N1
    num_matrix = tl.load(lists.counters + TASKS)
    num_kept = 0
    SAVE: tl.constexpr = kept.tokens is not None
    if SAVE:
        kept_count_ptr = kept.count + (tl.load(wire.call) & 1) * kept_parity
        num_kept = count_kept(kept_count_ptr, kept_stride, rank, WAY.KEPT, NUM_RANKS)
    before_sums = num_kept
    num_vector = before_sums + tl.cdiv(num_tokens, sum_tokens)
    progress_ptr = lists.counters + COUNTERS
    all_here = 0
    all_made = 0
    back = 0  # 1: all results have returned; 2: the call has failed
    made = 0  # tiles of the first product that are not in MADE yet, the last of them, of row tile `stored`, not counted
    stored = 0
    unsent = (arrival == 0).to(tl.int32)  # of RETURNED
    place = tl.atomic_add(lists.counters + MATRIX, 1, sem="relaxed")
    vector_place = tl.atomic_add(lists.counters + VECTOR, 1, sem="relaxed")
    while (place < num_matrix) | (vector_place < num_vector):
        claimed_ns = now_if(lists.matrix_records)
        is_matrix = place < num_matrix
        word = tl.load(lists.matrix + place, mask=is_matrix, other=-1)
        is_first = is_matrix & (task_op(word) == FIRST)
        if (made > 0) & (not is_first):
            count_made(lists.counters, stored, made)
            made = 0
        if is_matrix:
            answer = claim(lists.counters + MATRIX, WAY.THREADS)
            m = task_m(word)
            n = task_n(word)
            row = m * TILE.M
            if is_first:
                expert = task_expert(word)
                if LAYER.WEIGHTED:
                    weight = tl.load(rows.weight_N + row + tl.arange(0, TILE.M))
                else:
                    weight = None
                source = tl.load(rows.source_N + row + tl.arange(0, TILE.M))
                if WAY.FUSED:
                    all_here = wait_for_rows(source, all_here, wire, deadline_ns, rank, TILE.M, SENDING)
                started_ns = now_if(lists.matrix_records)
                a_ptrs = gathered_rows(source, tokens, LAYER.D, SENDING)
                counted = Counted(progress_ptr, made, stored)
                gate_up_tile(a_ptrs, blocks, weight, m, row, expert, n, counted, LAYER, TILE, WAY.UP_FIRST, False)
                stored = m
                made += 1
                record_task(lists.matrix_records, place, claimed_ns, started_ns)
            else:
                if all_made == 0:
                    all_made = has_all(lists.counters + MADE, num_first).to(tl.int32)
                    if all_made == 0:
                        lanes = tl.zeros((WIDE,), tl.int32)
                        wait_for(
                            progress_ptr + m + lanes, lanes + rank, NUM_N1, deadline_ns + timeout_ns, wire.status,
                            STAGE_ROWS,
                        )  # fmt: skip
                    block_loads_follow()
                started_ns = now_if(lists.matrix_records)
                expert = task_expert(word)
                product_tile(act_desc, w2_desc, None, made_desc, biases.b2, rows, wire, m, expert, n, DOWN, DOWN_TILE)
                unsent += 1
                record_task(lists.matrix_records, place, claimed_ns, started_ns)
            place = claimed(answer, WAY.THREADS)
        else:
            if unsent > 0:
                signal_when_all(
                    wire,
                    returned_offset,
                    tl.load(wire.call),
                    lists.counters + RETURNED,
                    unsent,
                    num_m * NUM_N2 + 1,
                    NUM_RANKS,
                )
                unsent = 0
            answer = claim(lists.counters + VECTOR, WAY.THREADS)
            started_ns = claimed_ns
            if vector_place < before_sums:
                if SAVE and NUM_RANKS > 1:
                    if WAY.FUSED:
                        if all_here == 0:
                            wait_for_tokens(wire, rank, deadline_ns, SENDING)
                            all_here = 1
                    started_ns = now_if(lists.matrix_records)
                    keep(
                        tokens.received, kept.tokens, kept_count_ptr, kept_stride, kept_block, rank, vector_place, KEEP_ROWS,
                        WAY.KEPT, SENDING,
                    )  # fmt: skip
            else:
                if back == 0:
                    wait_for_peers(wire.returned, wire, deadline_ns + timeout_ns, NUM_RANKS, STAGE_COMBINE)
                    back = tl.where(failed(wire.status), 2, 1)
                    if back == 2:
                        pass_on(wire.status)
                started_ns = now_if(lists.matrix_records)
                first = (vector_place - before_sums) * sum_tokens
                COLUMNS: tl.constexpr = (LAYER.D + WAY.BLOCK_D - 1) // WAY.BLOCK_D
                for item in range(first * COLUMNS, tl.minimum(first + sum_tokens, num_tokens) * COLUMNS):
                    token = (item // COLUMNS).to(tl.int64)
                    column = item % COLUMNS * WAY.BLOCK_D + tl.arange(0, WAY.BLOCK_D)
                    combine_item(sums, back == 2, token, column, LAYER.D, LAYER.K, WAY.BLOCK_D)
            record_task(lists.vector_records, num_pushes + vector_place, claimed_ns, started_ns)
            vector_place = claimed(answer, WAY.THREADS)
    # Flush counts this program has not published.
    if made > 0:
        count_made(lists.counters, stored, made)
    if unsent > 0:
        signal_when_all(
            wire, returned_offset, tl.load(wire.call), lists.counters + RETURNED, unsent, num_m * NUM_N2 + 1, NUM_RANKS
        )


@triton.jit(
    do_not_specialize=[
        "timeout_ns", "rank", "arrived_offset", "finished_offset", "returned_offset", "num_tokens", "push_programs",
        "sum_tokens",
    ]
)  # fmt: skip
def backward_kernel(
    tokens: Tokens,
    rows: Rows,
    wire: Wire,
    lists: Lists,
    through: Activation,
    addresses: Addresses,
    sums: Sums,
    timeout_ns,
    rank,
    arrived_offset,
    finished_offset,
    returned_offset,
    num_tokens,
    push_programs,
    sum_tokens,
    w2_desc,
    raw_desc,
    dh_desc,
    w13_desc,
    act_rows_desc,
    dh_rows_desc,
    dw2_desc,
    dw_gate_desc,
    dw_up_desc,
    LAYER: tl.constexpr,
    TILE: tl.constexpr,
    WEIGHT_TILE: tl.constexpr,
    RETURNING: tl.constexpr,
    SENDING: tl.constexpr,
    WAY: tl.constexpr,
):
    """Everything of a backward behind its entry: push of dO, both data gradients around that of the activation, d(weight),
    weight gradients, sums.

    tokens: of dO.  Descriptors: what is multiplied, raw in blocks as it is stored, dh and act as rows that weight gradients
    contract, and dW.  RETURNING: the product that returns rows.  Other
    arguments as in kernels/gemm.py and kernels/transfer.py.
    """
    D: tl.constexpr = LAYER.D
    F: tl.constexpr = LAYER.F
    ACTIVATION: tl.constexpr = LAYER.ACTIVATION
    LIMIT: tl.constexpr = LAYER.LIMIT
    NUM_F: tl.constexpr = (F + TILE.N - 1) // TILE.N
    NUM_D: tl.constexpr = (D + TILE.N - 1) // TILE.N
    WEIGHT_D: tl.constexpr = (D + WEIGHT_TILE.M - 1) // WEIGHT_TILE.M
    WEIGHT_F: tl.constexpr = (F + WEIGHT_TILE.N - 1) // WEIGHT_TILE.N
    GROUPS: tl.constexpr = (F + 63) // 64
    NUM_RANKS: tl.constexpr = SENDING.NUM_RANKS
    PUSHES: tl.constexpr = WAY.FUSED and SENDING.CHUNK > 0
    offsets = Offsets(arrived_offset, finished_offset, returned_offset)
    arrival = tl.atomic_add(lists.counters + ARRIVED, 1, sem="relaxed")
    num_pushes = 0  # of a trace, whose rows they come first in
    if PUSHES:
        push_first(tokens.local, rows, wire, offsets, lists, num_tokens, rank, arrival, push_programs, SENDING)
        if lists.vector_records is not None:
            num_pushes = count_pushes(rows, rank, SENDING)
    deadline_ns = deadline(wire.status, timeout_ns)
    num_m = num_row_tiles(rows)
    num_matrix = tl.load(lists.counters + TASKS)
    before_sums = num_m * (NUM_F + 1)
    num_vector = before_sums + tl.cdiv(num_tokens, sum_tokens)
    num_returns = num_m * (NUM_D + 1) + 1  # rows, d(weight), and one
    progress_ptr = lists.counters + COUNTERS
    activated_ptr = progress_ptr + num_m
    need_ptr = activated_ptr + num_m
    all_here = 0
    all_made = 0
    all_activated = 0
    back = 0  # as in `forward_kernel`
    made = 0
    stored = 0
    unsent = (arrival == 0).to(tl.int32)
    place = tl.atomic_add(lists.counters + MATRIX, 1, sem="relaxed")
    vector_place = tl.atomic_add(lists.counters + VECTOR, 1, sem="relaxed")
    while (place < num_matrix) | (vector_place < num_vector):
        claimed_ns = now_if(lists.matrix_records)
        is_matrix = place < num_matrix
        word = tl.load(lists.matrix + place, mask=is_matrix, other=0)
        op = task_op(word).to(tl.int32)
        expert = task_expert(word)
        # A tile of the first product needs what those before it needed, if tiles of later products lie before it.
        asks = is_matrix
        if not WAY.MIXED:
            asks = is_matrix & (op != FIRST)
        need = tl.load(need_ptr + expert * 2 + (op != FIRST), mask=asks, other=0)
        if is_matrix:
            is_matrix = vector_place >= need
        if (made > 0) & ((not is_matrix) | (op != FIRST)):
            count_made(lists.counters, stored, made)
            made = 0
        owes = (unsent > 0) & tl.where(is_matrix, op >= DOWN_WEIGHTS, vector_place >= before_sums)
        if owes:
            signal_when_all(
                wire, returned_offset, tl.load(wire.call), lists.counters + RETURNED, unsent, num_returns, NUM_RANKS
            )
            unsent = 0
        started_ns = claimed_ns
        if is_matrix:
            answer = claim(lists.counters + MATRIX, WAY.THREADS)
            if op == FIRST:
                m = task_m(word)
                n = task_n(word)
                source = tl.load(rows.source_N + m * TILE.M + tl.arange(0, TILE.M))
                if WAY.FUSED:
                    all_here = wait_for_rows(source, all_here, wire, deadline_ns, rank, TILE.M, SENDING)
                started_ns = now_if(lists.matrix_records)
                a_ptrs = gathered_rows(source, tokens, D, SENDING)
                counted = Counted(progress_ptr, made, stored)
                gathered_product_tile(a_ptrs, w2_desc, None, raw_desc, m, expert, n, counted, D, TILE)
                stored = m
                made += 1
            else:
                begin = tl.load(rows.start_e1 + expert)
                if all_activated == 0:
                    all_activated = has_all(lists.counters + ACTIVATED, num_m * NUM_F).to(tl.int32)
                    if all_activated == 0:
                        first_m = begin // TILE.M
                        num_awaited = tl.load(rows.start_e1 + expert + 1) // TILE.M - first_m
                        if op == RETURN:
                            first_m = task_m(word)
                            num_awaited = tl.full((), 1, tl.int32)
                        for i in range(0, num_awaited, WIDE):
                            lanes = tl.minimum(i + tl.arange(0, WIDE), num_awaited - 1)
                            wait_for(
                                activated_ptr + first_m + lanes, tl.zeros_like(lanes) + rank, NUM_F, deadline_ns + timeout_ns,
                                wire.status, STAGE_ACTIVATED,
                            )  # fmt: skip
                    block_loads_follow()
                started_ns = now_if(lists.matrix_records)
                if op == RETURN:
                    m = task_m(word)
                    n = task_n(word)
                    product_tile(dh_desc, w13_desc, None, dh_desc, None, rows, wire, m, expert, n, RETURNING, TILE)
                    unsent += 1
                else:
                    is_lost = tl.load(wire.status, volatile=True) != 0
                    tile = task_tile(word)
                    if op == DOWN_WEIGHTS:
                        m = tile // WEIGHT_F
                        n = tile % WEIGHT_F
                        acc = weight_gradient_tile(
                            None,
                            addresses.dy_N,
                            act_rows_desc,
                            rows.rows_e,
                            begin,
                            is_lost,
                            expert,
                            m,
                            0,
                            n,
                            D,
                            WEIGHT_TILE,
                        )
                        put_tile(
                            acc,
                            dw2_desc,
                            expert,
                            m * WEIGHT_TILE.M,
                            n * WEIGHT_TILE.N,
                            WEIGHT_TILE.M,
                            WEIGHT_TILE.N,
                            False,
                            WAY.ACCUMULATE,
                        )
                    else:
                        part = tile // (WEIGHT_F * WEIGHT_D)
                        m = tile % WEIGHT_D
                        n = tile // WEIGHT_D % WEIGHT_F
                        acc = weight_gradient_tile(
                            None, addresses.x_N, dh_rows_desc, rows.rows_e, begin, is_lost, expert, m, part * F, n, D,
                            WEIGHT_TILE,
                        )  # fmt: skip
                        if part == 0:
                            put_tile(
                                acc, dw_gate_desc, expert, m * WEIGHT_TILE.M, n * WEIGHT_TILE.N, WEIGHT_TILE.M, WEIGHT_TILE.N,
                                True, WAY.ACCUMULATE,
                            )  # fmt: skip
                        elif LAYER.GATED:
                            put_tile(
                                acc, dw_up_desc, expert, m * WEIGHT_TILE.M, n * WEIGHT_TILE.N, WEIGHT_TILE.M, WEIGHT_TILE.N,
                                True, WAY.ACCUMULATE,
                            )  # fmt: skip
            record_task(lists.matrix_records, place, claimed_ns, started_ns)
            place = claimed(answer, WAY.THREADS)
        else:
            answer = claim(lists.counters + VECTOR, WAY.THREADS)
            if vector_place < before_sums:
                word = tl.load(lists.vector + vector_place)
                m = task_m(word)
                n = task_n(word)
                lanes = tl.zeros((WIDE,), tl.int32)
                if task_op(word) == ACTIVATION_GRADIENT:
                    if all_made == 0:
                        all_made = has_all(lists.counters + MADE, num_m * NUM_F).to(tl.int32)
                        if all_made == 0:
                            wait_for(
                                progress_ptr + m + lanes, lanes + rank, NUM_F, deadline_ns + timeout_ns, wire.status,
                                STAGE_RAW,
                            )  # fmt: skip
                    started_ns = now_if(lists.matrix_records)
                    for first in range(0, TILE.M, WAY.ITEM_ROWS):
                        row = (m * TILE.M + first + tl.arange(0, WAY.ITEM_ROWS)).to(tl.int64)
                        activation_gradient_item(
                            through, rows.weight_N, row, n, F, WAY.ITEM_ROWS, TILE.N, ACTIVATION, LIMIT, LAYER.WEIGHTED
                        )
                    block_loads_follow()  # of what was stored here, by whoever counts on it
                    tl.atomic_add(activated_ptr + m, 1, sem="release", scope="gpu")
                    tl.atomic_add(lists.counters + ACTIVATED, 1, sem="release", scope="gpu")
                else:
                    if all_activated == 0:
                        wait_for(
                            activated_ptr + m + lanes, lanes + rank, NUM_F, deadline_ns + timeout_ns, wire.status,
                            STAGE_ACTIVATED,
                        )  # fmt: skip
                    started_ns = now_if(lists.matrix_records)
                    row = m * TILE.M + tl.arange(0, TILE.M)
                    return_dweights(
                        through.groups_NG, addresses.dy_N, through.b2, rows, wire, row, m, GROUPS, LAYER.SLOTS, D
                    )
                    unsent += 1
            else:
                if back == 0:
                    wait_for_peers(wire.returned, wire, deadline_ns + timeout_ns, NUM_RANKS, STAGE_COMBINE)
                    back = tl.where(failed(wire.status), 2, 1)
                    if back == 2:
                        pass_on(wire.status)
                started_ns = now_if(lists.matrix_records)
                begin = (vector_place - before_sums) * sum_tokens
                end = tl.minimum(begin + sum_tokens, num_tokens)
                COLUMNS: tl.constexpr = (D + WAY.BLOCK_D - 1) // WAY.BLOCK_D
                for item in range(begin * COLUMNS, end * COLUMNS):
                    token = (item // COLUMNS).to(tl.int64)
                    column = item % COLUMNS * WAY.BLOCK_D + tl.arange(0, WAY.BLOCK_D)
                    combine_item(sums, back == 2, token, column, D, LAYER.K, WAY.BLOCK_D)
                if sums.dweights_TK is not None:
                    for token in range(begin, end):
                        slot = token * LAYER.K + tl.arange(0, LAYER.KP)
                        inside = tl.arange(0, LAYER.KP) < LAYER.K
                        used = tl.load(sums.ids_TK + slot, mask=inside, other=-1) >= 0
                        value = tl.load(sums.dweights_S + slot, mask=used, other=0.0)
                        tl.store(sums.dweights_TK + slot, tl.where(back == 2, float("nan"), value), mask=inside)
            record_task(lists.vector_records, num_pushes + vector_place, claimed_ns, started_ns)
            vector_place = claimed(answer, WAY.THREADS)
    if made > 0:
        count_made(lists.counters, stored, made)
    if unsent > 0:
        signal_when_all(
            wire, returned_offset, tl.load(wire.call), lists.counters + RETURNED, unsent, num_returns, NUM_RANKS
        )
