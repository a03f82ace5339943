"""Grouped GEMM kernels: persistent loops over the row tiles of all local experts.

Row tiles are BLOCK_M consecutive rows of one expert's segment (segments are multiples of BLOCK_M, so a
tile never spans two experts).  Tile bodies never wait; the loops that run them do.  Accumulation is fp32
over ascending k groups from the segment start, never split, so bits do not depend on the tile.

Both operands of a dot come straight from a descriptor or a gather: a reshaped A operand would go through
registers, which is slow and was seen to race (Triton 3.6, docs/log.md).

Suffixes: M row tiles, D hidden, F ffn, e local experts, N padded rows.
"""

import triton
import triton.language as tl

from uniep.kernels.activation import activate
from uniep.kernels.arguments import Counted, GateUpBlocks, LowRank, Offsets, Rows, Tokens, Wire
from uniep.kernels.biases import add_b2, bias_columns
from uniep.kernels.ptx import block_loads_follow, block_stores_complete, narrow, next_may_come, widen
from uniep.kernels.rows import gathered_rows, group_of, load_rows, num_row_tiles, wait_for_rows
from uniep.kernels.sync import STAGE_ROWS, WIDE, deadline, failed, signal_all, wait_for
from uniep.kernels.transfer import push_tokens

CLAIMED = tl.constexpr(8)  # row tiles, of any expert, that a product claims at once beside the one that makes them


@triton.jit
def _first_of_part(rows: Rows, num_m, NUMBER: tl.constexpr, COUNT: tl.constexpr):
    """The position in `order` at which a part begins: that of a group."""
    position = num_m * NUMBER // COUNT
    _, place, _ = group_of(tl.load(rows.order_group_M + position, mask=position < num_m, other=0))
    return position - place


@triton.jit
def part_of_row_tiles(rows: Rows, PART: tl.constexpr):
    """(First position in `order`, the position behind the last) of a part, which may have none; None: of all."""
    num_m = num_row_tiles(rows)
    first = 0
    end = num_m
    if PART is not None:
        if PART.NUMBER > 0:
            first = _first_of_part(rows, num_m, PART.NUMBER, PART.COUNT)
        if PART.NUMBER + 1 < PART.COUNT:
            end = _first_of_part(rows, num_m, PART.NUMBER + 1, PART.COUNT)
    return first, end


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
def tile_of_step(step, num_m, order_ptr, group_ptr, NUM_N: tl.constexpr):
    """(row tile, its expert, n) of a step; past the last one expert 0, and a row tile that must not be used.

    The row tiles of a group share a column of weights, then the next one: weights are read from DRAM once a group.
    order: of row tiles, or None: as they lie.  group: see Rows.  Both are read at once.
    """
    position = step // NUM_N
    inside = position < num_m
    expert, place, height = group_of(tl.load(group_ptr + position, mask=inside, other=1))
    if order_ptr is None:
        m = position
    else:
        m = tl.load(order_ptr + position, mask=inside, other=0)
    within = step - (position - place) * NUM_N
    return m - place + within % height, expert, within // height


@triton.jit
def row_tile_of_step(step, num_m, order_ptr, group_ptr, NUM_N: tl.constexpr):
    """The row tile of a step; of a step below 0, any.

    What is counted a turn late is looked up by its step: a tile that a loop carries on to the next turn arrives there a
    turn early where Triton flattens the loop (docs/log.md).
    """
    m, _, _ = tile_of_step(tl.maximum(step, 0), num_m, order_ptr, group_ptr, NUM_N)
    return m


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
def weights_step(b_desc, expert, half, n, depth, K: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr):
    """The block (K, TILE.N) of an expert's weights from row `depth` of B on, columns n.

    B: how they lie.  "gate_up": (e, 2, F, D), half of the columns from each half, `half` first; "ungated": (e, 1, F, D),
    of a tile half as wide.  "transposed": (e, WIDTH, DEPTH).  "plain": (e, DEPTH, WIDTH).  "halves": (e, HALVES, DEPTH,
    WIDTH), of which `half` is meant.
    """
    if B == "gate_up":
        return b_desc.load([expert, half, n * (TILE.N // 2), depth]).reshape(TILE.N, K).T
    elif B == "ungated":
        return b_desc.load([expert, 0, n * (TILE.N // 2), depth]).reshape(TILE.N // 2, K).T
    elif B == "transposed":
        return b_desc.load([expert, n * TILE.N, depth]).reshape(TILE.N, K).T
    elif B == "plain":
        return b_desc.load([expert, depth, n * TILE.N]).reshape(K, TILE.N)
    else:
        tl.static_assert(B == "halves")
        return b_desc.load([expert, half, depth, n * TILE.N]).reshape(K, TILE.N)


@triton.jit
def product_of_rows(
    a_ptrs,
    a_desc,
    b_desc,
    m,
    expert,
    n,
    DEPTH: tl.constexpr,
    HALVES: tl.constexpr,
    B: tl.constexpr,
    UP_FIRST: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile of A @ B in fp32, k ascending: the loop over k of all products of rows.  "ungated": of TILE.N / 2 columns.

    A: (N, DEPTH), gathered (a_ptrs: see `gathered_rows`) or row tile m of a_desc; with HALVES > 0 (N, HALVES * DEPTH).
    UP_FIRST turns the halves of B.  B: see `weights_step`.
    With HALVES = 1 k is divided as with 2, and the row is found inside the loop: code that was timed.
    """
    BLOCK_M: tl.constexpr = TILE.M
    BLOCK_N: tl.constexpr = TILE.N // 2 if B == "ungated" else TILE.N
    STEPS: tl.constexpr = (DEPTH + TILE.K - 1) // TILE.K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, STEPS if HALVES == 0 else HALVES * STEPS):
        if HALVES > 0:
            half = k // STEPS
            depth = k % STEPS * TILE.K
            a = a_desc.load([m * BLOCK_M, half * DEPTH + depth])
            part = 1 - half if UP_FIRST else half
        else:
            if a_ptrs is not None:
                a = load_rows(a_ptrs, k, DEPTH, TILE.K)
            else:
                a = a_desc.load([m * BLOCK_M, k * TILE.K])
            depth = k * TILE.K
            part = 0
        acc = tl.dot(a, weights_step(b_desc, expert, part, n, depth, TILE.K, B, TILE), acc)
    return acc


@triton.jit
def add_low_rank(acc, low: LowRank, m, expert, n, B: tl.constexpr, SWAPPED: tl.constexpr, TILE: tl.constexpr):
    """A tile plus row tile m of low.rows @ low.factor, in the same accumulator; without low the tile as it is.

    B: as of `weights_step`, with R for the depth.  SWAPPED ("gate_up"): the tile's first half is up, though the
    factor begins with gate: each half is added apart, beside zeros from beyond the factor.
    """
    if low is not None:
        R: tl.constexpr = low.rows.block_shape[1]
        rows = low.rows.load([m * TILE.M, 0])
        if SWAPPED and B == "gate_up":
            acc = tl.dot(rows, weights_step(low.factor, expert, 1, n, 0, R, B, TILE), acc)
            acc = tl.dot(rows, weights_step(low.factor, expert, -1, n, 0, R, B, TILE), acc)
        else:
            acc = tl.dot(rows, weights_step(low.factor, expert, 0, n, 0, R, B, TILE), acc)
    return acc


@triton.jit
def count_before(counted: Counted):
    """Count the tile that this program stored in its turn before: a turn late, so that nobody waits for stores that are
    under way."""
    if counted is not None:
        if counted.turns > 0:
            count_tile(counted.progress, counted.row_tile)


@triton.jit
def plus_b13(half, b13_ptr, expert, first, column, LAYER: tl.constexpr, COLUMNS: tl.constexpr):
    """Half of a tile of h plus its biases, `column` of the projection whose first one is `first`; without b13 as it is."""
    if b13_ptr is not None:
        half += bias_columns(b13_ptr, expert, first, column, LAYER.F, (1 + LAYER.GATED) * LAYER.F, COLUMNS)
    return half


@triton.jit
def gate_up_tile(
    a_ptrs,
    blocks: GateUpBlocks,
    weight,
    m,
    row,
    expert,
    n,
    counted: Counted,
    LAYER: tl.constexpr,
    TILE: tl.constexpr,
    UP_FIRST: tl.constexpr,
    CROWDED: tl.constexpr,
):
    """One tile of `gate_up_kernel`.  a_ptrs: of gathered rows, or None.  weight: of the rows, if WEIGHTED.
    row: the first of row tile m.

    counted: the tile that is counted meanwhile, or None.
    CROWDED: registers are short.  So bf16 stays in pairs, and biases of up are read when gate is stored.
    """
    dtype: tl.constexpr = blocks.w13.dtype
    HALF: tl.constexpr = TILE.N // 2
    UP_LATER: tl.constexpr = CROWDED and blocks.b13 is not None
    B: tl.constexpr = "gate_up" if LAYER.GATED else "ungated"
    acc = product_of_rows(a_ptrs, blocks.rows, blocks.w13, m, expert, n, LAYER.D, 0, B, False, TILE)
    acc = add_low_rank(acc, blocks.low, m, expert, n, B, UP_FIRST, TILE)
    if LAYER.GATED:
        gate, up = halves(acc, TILE.M, TILE.N)
        if UP_FIRST:
            up, gate = gate, up
    else:
        gate = acc
    gate = plus_b13(gate, blocks.b13, expert, 0, n * HALF, LAYER, HALF)
    if LAYER.GATED and not UP_LATER:
        up = plus_b13(up, blocks.b13, expert, LAYER.F, n * HALF, LAYER, HALF)
    gate_16 = narrow(gate, dtype)
    if LAYER.GATED and not UP_LATER:
        up_16 = narrow(up, dtype)
    count_before(counted)
    if blocks.gate is not None:
        blocks.gate.store([row, n * HALF], gate_16)
    if LAYER.GATED:
        if UP_LATER:
            up_16 = narrow(plus_b13(up, blocks.b13, expert, LAYER.F, n * HALF, LAYER, HALF), dtype)
        if blocks.up is not None:
            blocks.up.store([row, n * HALF], up_16)
    if blocks.act is not None:
        ACTIVATION: tl.constexpr = LAYER.ACTIVATION  # a text reaches a function as a constexpr only (Triton 3.6)
        LIMIT: tl.constexpr = LAYER.LIMIT
        gate = widen(gate_16) if CROWDED else gate_16.to(tl.float32)
        if LAYER.GATED:
            up = widen(up_16) if CROWDED else up_16.to(tl.float32)
            act = activate(gate, up, ACTIVATION, LIMIT)
        else:
            act = activate(gate, None, ACTIVATION, LIMIT)
        if LAYER.WEIGHTED:
            act = act * weight[:, None]
        blocks.act.store([row, n * HALF], narrow(act, dtype))


@triton.jit(
    do_not_specialize=[
        "timeout_ns", "rank", "arrived_offset", "finished_offset", "num_tokens", "push_programs", "push_rounds",
    ]
)  # fmt: skip
def gate_up_kernel(
    tokens: Tokens,
    rows: Rows,
    wire: Wire,
    timeout_ns,
    rank,
    arrived_offset,
    finished_offset,
    num_tokens,
    push_programs,
    push_rounds,
    address_ptr,
    rows_desc,
    w13_desc,
    gate_desc,
    up_desc,
    act_desc,
    b13_ptr,
    low_desc,
    factor_desc,
    LAYER: tl.constexpr,
    TILE: tl.constexpr,
    SENDING: tl.constexpr,
    FUSED: tl.constexpr,
    UP_FIRST: tl.constexpr,
    COUNT_TILES: tl.constexpr,
    PART: tl.constexpr,
):
    """h = rows @ W13^T, plus b13 unless it is None; act = ACTIVATION of h (times the routing weight if WEIGHTED).

    rows_desc: (N, D), or None: rows are read where they lie: at `address` (N,), or, if it is None, among local tokens
    and receive slots.
    FUSED (and gathered): tiles wait for their tokens; where programs push (CHUNK > 0), the first `push_programs`
    push this rank's before they join.
    PART: of the row tiles, groups of this kernel; the first one pushes all tokens.  None: all row tiles.
    COUNT_TILES: progress (M,) counts the finished tiles of each row tile, for a product that runs beside.
    w13_desc: (e, 2, F, D); a tile multiplies TILE.N/2 gate columns and the same up columns.  Without a gate: (e, 1, F, D),
    tiles of TILE.N/2 columns, and no up_desc.  b13: (e, 2F or F).
    UP_FIRST: the descriptor's first half is the up projection (w1 and w3 apart, w3 at the lower address).
    low_desc (N, R), factor_desc (e, 2, F, r), or (e, 1, F, r): what is added to rows @ W13^T, low @ factor^T; or None.
    gate_desc, up_desc (the halves of h, or None), act_desc (or None): (N, F).  Blocks of one shape leave through the same
    shared memory, which makes room for a fourth stage.
    """
    NUM_N: tl.constexpr = (LAYER.F + TILE.N // 2 - 1) // (TILE.N // 2)
    GATHERED: tl.constexpr = rows_desc is None
    # The tables of the next tile are read while this one is multiplied, where the lint finds registers left for them.
    AHEAD: tl.constexpr = GATHERED and (
        SENDING.CHUNK == 0 or (LAYER.WEIGHTED and LAYER.LIMIT is None) or address_ptr is not None
    )
    FLAT: tl.constexpr = not GATHERED and low_desc is None
    # The plain layer whose tokens are copied has registers left, and keeps the code that was timed.
    PLAIN: tl.constexpr = (
        LAYER.ACTIVATION == "swiglu" and LAYER.LIMIT is None and not LAYER.WEIGHTED and b13_ptr is None
    )
    CROWDED: tl.constexpr = not PLAIN or (FUSED and SENDING.CHUNK > 0)
    if low_desc is None:
        low = None
    else:
        low = LowRank(low_desc, factor_desc)
    blocks = GateUpBlocks(rows_desc, w13_desc, gate_desc, up_desc, act_desc, b13_ptr, low)
    if address_ptr is None:
        source_ptr = rows.source_N
    else:
        source_ptr = address_ptr
    program = tl.program_id(0)
    IS_FIRST: tl.constexpr = PART is None or PART.NUMBER == 0
    if not IS_FIRST:
        push_programs = 0
        push_rounds = 0
    if FUSED and IS_FIRST and SENDING.CHUNK > 0:
        if program < push_programs:
            offsets = Offsets(arrived_offset, finished_offset, None)
            push_tokens(tokens.local, rows, wire, offsets, num_tokens, rank, program, push_programs, SENDING)
    first, num_m = part_of_row_tiles(rows, PART)
    num_steps = num_m * NUM_N
    deadline_ns = deadline(wire.status, timeout_ns)
    alone, shared, count = turns(num_steps - first * NUM_N, program, push_programs, push_rounds)
    shared += first * NUM_N
    all_here = 0
    if AHEAD:
        step = step_of_turn(0, alone, shared, program, push_programs)
        m, expert, n = tile_of_step(step, num_m, rows.order_M, rows.order_group_M, NUM_N)
        source = tl.load(source_ptr + m * TILE.M + tl.arange(0, TILE.M), mask=step < num_steps, other=0)
    for turn in tl.range(0, count, flatten=FLAT):
        if not AHEAD:
            step = step_of_turn(turn, alone, shared, program, push_programs)
            m, expert, n = tile_of_step(step, num_m, rows.order_M, rows.order_group_M, NUM_N)
        row = m * TILE.M
        if COUNT_TILES:
            step_before = step_of_turn(turn - 1, alone, shared, program, push_programs)
            step_before = tl.where(turn > 0, step_before, -1)
            before = row_tile_of_step(step_before, num_m, rows.order_M, rows.order_group_M, NUM_N)
            counted = Counted(rows.progress_M, turn, before)
        else:
            counted = None
        if LAYER.WEIGHTED:  # loaded where it is used, it costs registers that the epilogue does not have
            weight = tl.load(rows.weight_N + row + tl.arange(0, TILE.M))
        else:
            weight = None
        if GATHERED:
            if not AHEAD:
                source = tl.load(source_ptr + row + tl.arange(0, TILE.M))
            if FUSED:
                all_here = wait_for_rows(source, all_here, wire, deadline_ns, rank, TILE.M, SENDING)
            if address_ptr is None:
                a_ptrs = gathered_rows(source, tokens, LAYER.D, SENDING)
            else:  # those of pad rows are of a row of zeros
                a_ptrs = tl.multiple_of(source.to(tokens.local.dtype), 16)
        else:
            a_ptrs = None
        if AHEAD:
            step = step_of_turn(turn + 1, alone, shared, program, push_programs)
            next_m, next_expert, next_n = tile_of_step(step, num_m, rows.order_M, rows.order_group_M, NUM_N)
            next_rows = next_m * TILE.M + tl.arange(0, TILE.M)
            next_source = tl.load(source_ptr + next_rows, mask=step < num_steps, other=0)
        gate_up_tile(a_ptrs, blocks, weight, m, row, expert, n, counted, LAYER, TILE, UP_FIRST, CROWDED)
        if AHEAD:
            m = next_m
            expert = next_expert
            n = next_n
            source = next_source
    if COUNT_TILES:
        if count > 0:
            last = step_of_turn(count - 1, alone, shared, program, push_programs)
            stored = row_tile_of_step(last, num_m, rows.order_M, rows.order_group_M, NUM_N)
            count_tile(rows.progress_M, stored)


@triton.jit
def gathered_product_tile(
    a_ptrs, b_desc, low: LowRank, out_desc, m, expert, n, counted: Counted, D: tl.constexpr, TILE: tl.constexpr
):
    """One tile of a product of gathered rows, a_ptrs.  counted: as in `gate_up_tile`."""
    acc = product_of_rows(a_ptrs, None, b_desc, m, expert, n, D, 0, "plain", False, TILE)
    acc = add_low_rank(acc, low, m, expert, n, "plain", False, TILE)
    count_before(counted)
    store_tile(acc, out_desc, m * TILE.M, n * TILE.N, TILE.M, TILE.N)


@triton.jit(
    do_not_specialize=[
        "timeout_ns", "rank", "arrived_offset", "finished_offset", "num_tokens", "push_programs", "push_rounds",
    ]
)  # fmt: skip
def gathered_product_kernel(
    tokens: Tokens,
    rows: Rows,
    wire: Wire,
    timeout_ns,
    rank,
    arrived_offset,
    finished_offset,
    num_tokens,
    push_programs,
    push_rounds,
    progress_ptr,
    b_desc,
    low_desc,
    factor_desc,
    out_desc,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SENDING: tl.constexpr,
    FUSED: tl.constexpr,
):
    """out (N, WIDTH) fp32 = rows (N, D) @ B, rows read where they lie.  b_desc: (e, D, WIDTH).  FUSED: as above.

    low_desc (N, R), factor_desc (e, r, WIDTH): low @ factor is added; or None.
    progress (M,): counts finished tiles, as above, for the next kernel, which may run beside this one; or None.
    """
    NUM_N: tl.constexpr = (WIDTH + TILE.N - 1) // TILE.N
    if low_desc is None:
        low = None
    else:
        low = LowRank(low_desc, factor_desc)
    program = tl.program_id(0)
    if progress_ptr is not None:
        next_may_come()
    if FUSED and SENDING.CHUNK > 0:
        if program < push_programs:
            offsets = Offsets(arrived_offset, finished_offset, None)
            push_tokens(tokens.local, rows, wire, offsets, num_tokens, rank, program, push_programs, SENDING)
    num_m = num_row_tiles(rows)
    deadline_ns = deadline(wire.status, timeout_ns)
    alone, shared, count = turns(num_m * NUM_N, program, push_programs, push_rounds)
    all_here = 0
    for turn in tl.range(0, count):
        step = step_of_turn(turn, alone, shared, program, push_programs)
        m, expert, n = tile_of_step(step, num_m, rows.backward_order_M, rows.backward_group_M, NUM_N)
        row = m * TILE.M
        source = tl.load(rows.source_N + row + tl.arange(0, TILE.M))
        if FUSED:
            all_here = wait_for_rows(source, all_here, wire, deadline_ns, rank, TILE.M, SENDING)
        a_ptrs = gathered_rows(source, tokens, D, SENDING)
        if progress_ptr is not None:
            step_before = step_of_turn(turn - 1, alone, shared, program, push_programs)
            step_before = tl.where(turn > 0, step_before, -1)
            before = row_tile_of_step(step_before, num_m, rows.backward_order_M, rows.backward_group_M, NUM_N)
            counted = Counted(progress_ptr, turn, before)
        else:
            counted = None
        gathered_product_tile(a_ptrs, b_desc, low, out_desc, m, expert, n, counted, D, TILE)
    if progress_ptr is not None:
        if count > 0:
            last = step_of_turn(count - 1, alone, shared, program, push_programs)
            stored = row_tile_of_step(last, num_m, rows.backward_order_M, rows.backward_group_M, NUM_N)
            count_tile(progress_ptr, stored)


@triton.jit
def store_tile(acc, out_desc, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile in out_desc's dtype, in blocks that take half of its shared memory, or, in fp32, a quarter."""
    left, right = halves(acc, BLOCK_M, BLOCK_N)
    store_halves(left, right, out_desc, row, column, BLOCK_M, BLOCK_N)


@triton.jit
def store_halves(left, right, out_desc, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """As `store_tile`."""
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
    a_desc, b_desc, low: LowRank, out_desc, bias_ptr, rows: Rows, wire: Wire, m, expert, n, PRODUCT: tl.constexpr,
    TILE: tl.constexpr
):  # fmt: skip
    """One tile of `product_kernel`."""
    BLOCK_M: tl.constexpr = TILE.M
    BLOCK_N: tl.constexpr = TILE.N
    dtype: tl.constexpr = out_desc.dtype
    WIDTH: tl.constexpr = PRODUCT.WIDTH
    HALF: tl.constexpr = BLOCK_N // 2
    B: tl.constexpr = "transposed" if PRODUCT.TRANSPOSED else "halves"
    row = m * BLOCK_M
    if PRODUCT.CHECKED:
        is_lost = tl.load(wire.status, volatile=True) != 0
    acc = product_of_rows(None, a_desc, b_desc, m, expert, n, PRODUCT.DEPTH, PRODUCT.HALVES, B, PRODUCT.UP_FIRST, TILE)
    acc = add_low_rank(acc, low, m, expert, n, "transposed" if PRODUCT.TRANSPOSED else "plain", False, TILE)
    left, right = halves(acc, BLOCK_M, BLOCK_N)
    left = biased(left, bias_ptr, rows, row, expert, n * BLOCK_N, WIDTH, PRODUCT.WEIGHTED, TILE)
    if PRODUCT.SCATTER:
        slot = tl.load(rows.return_N + row + tl.arange(0, BLOCK_M))
        if PRODUCT.CHECKED:
            slot = tl.where(is_lost, -1, slot)
        base = tl.load(wire.returns_table + tl.maximum(slot, 0) // PRODUCT.SLOTS)
        address = base + (tl.maximum(slot, 0) % PRODUCT.SLOTS).to(tl.int64) * (WIDTH * (dtype.primitive_bitwidth // 8))
        ptrs = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
        column = n * BLOCK_N + tl.arange(0, HALF)
        mask = (slot >= 0)[:, None]
        if WIDTH % BLOCK_N != 0:
            right_mask = mask & (column + HALF < WIDTH)[None, :]
            mask &= (column < WIDTH)[None, :]
        else:
            right_mask = mask
        tl.store(ptrs[:, None] + column[None, :], narrow(left, dtype), mask=mask)
        # Behind a store: the biases of a whole tile take too many registers.
        right = biased(right, bias_ptr, rows, row, expert, n * BLOCK_N + HALF, WIDTH, PRODUCT.WEIGHTED, TILE)
        tl.store(ptrs[:, None] + (column + HALF)[None, :], narrow(right, dtype), mask=right_mask)
    else:
        right = biased(right, bias_ptr, rows, row, expert, n * BLOCK_N + HALF, WIDTH, PRODUCT.WEIGHTED, TILE)
        store_halves(left, right, out_desc, row, n * BLOCK_N, BLOCK_M, BLOCK_N)


@triton.jit
def biased(
    half, b2_ptr, rows: Rows, row, expert, column, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, TILE: tl.constexpr
):
    """Half of a tile from `row` and `column` on, plus b2, or plus w * b2 if WEIGHTED; without b2 as it is."""
    if b2_ptr is not None:
        weight = tl.load(rows.weight_N + row + tl.arange(0, TILE.M)) if WEIGHTED else None
        half = add_b2(half, b2_ptr, weight, expert, column, WIDTH, TILE.N // 2)
    return half


@triton.jit(do_not_specialize=["returned_offset", "programs", "rank", "timeout_ns"])
def product_kernel(
    rows: Rows,
    wire: Wire,
    returned_offset,
    programs,
    timeout_ns,
    rank,
    a_desc,
    b_desc,
    low_desc,
    factor_desc,
    out_desc,
    bias_ptr,
    PRODUCT: tl.constexpr,
    TILE: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    TILES_BEFORE: tl.constexpr,
    PART: tl.constexpr,
):
    """out = a @ B, each row stored straight into its slot at the source rank (SCATTER) or in place.

    bias: (e, WIDTH), added before the rounding, by the routing weight if WEIGHTED; or None.
    a_desc: (N, HALVES * DEPTH); where TILE.K does not divide DEPTH, a step reads on into the next half and
    meets zeros of B.  b_desc: (e, WIDTH, DEPTH) if TRANSPOSED (W2 in the forward), else (e, HALVES, DEPTH, WIDTH)
    (W13, and W2 with one half, in the backward).  The contraction runs over gate, then up; UP_FIRST as above.
    low_desc (N, R), factor_desc (e, WIDTH, r) if TRANSPOSED, else (e, r, WIDTH): low @ factor is added; or None.
    out_desc: (N, WIDTH) in the layer's dtype, or fp32 for a product that is not rounded.
    programs: of all launches that share this product.
    PART: of the row tiles, that of the `gate_up_kernel` that this one follows; None: all.
    TILES_BEFORE: 0, or this product runs beside the one that makes `a`, in one or more launches.  A column of
    CLAIMED row tiles, in the order of `order`, is then claimed at the shared cursor, and begins when `progress` counts
    TILES_BEFORE finished tiles for each of them.
    """
    NUM_N: tl.constexpr = (PRODUCT.WIDTH + TILE.N - 1) // TILE.N
    FLAT: tl.constexpr = low_desc is None
    if low_desc is None:
        low = None
    else:
        low = LowRank(low_desc, factor_desc)
    first_m, num_m = part_of_row_tiles(rows, PART)
    if PRODUCT.SCATTER:
        num_m = tl.where(failed(wire.status), 0, num_m)  # a late peer may still read what an earlier call returned
    if TILES_BEFORE == 0:
        order_ptr = None if PART is None else rows.order_M
        group_ptr = rows.group_M if PART is None else rows.order_group_M
        first_step = first_m * NUM_N + tl.program_id(0)
        for step in tl.range(first_step, num_m * NUM_N, tl.num_programs(0), flatten=FLAT):
            m, expert, n = tile_of_step(step, num_m, order_ptr, group_ptr, NUM_N)
            product_tile(a_desc, b_desc, low, out_desc, bias_ptr, rows, wire, m, expert, n, PRODUCT, TILE)
    else:
        # Twice the time: whoever makes `a` may wait for its peers as long as that.
        deadline_ns = deadline(wire.status, timeout_ns.to(tl.int64) * 2)
        num_columns = tl.cdiv(num_m, CLAIMED) * NUM_N
        column = tl.atomic_add(rows.cursor, 1, sem="relaxed")
        while column < num_columns:
            first = column // NUM_N * CLAIMED
            height = tl.minimum(num_m - first, CLAIMED)
            made = tl.load(rows.order_M + first + tl.arange(0, WIDE) % height)
            wait_for(rows.progress_M + made, rank, TILES_BEFORE, deadline_ns, wire.status, STAGE_ROWS)
            block_loads_follow()
            for i in tl.range(0, height, flatten=True):
                m = tl.load(rows.order_M + first + i)
                expert, _, _ = group_of(tl.load(rows.order_group_M + first + i))
                n = column % NUM_N
                product_tile(a_desc, b_desc, low, out_desc, bias_ptr, rows, wire, m, expert, n, PRODUCT, TILE)
            column = tl.atomic_add(rows.cursor, 1, sem="relaxed")
    if PRODUCT.SCATTER:
        signal_all(wire, returned_offset, tl.load(wire.call), wire.return_ticket, programs, NUM_RANKS)
