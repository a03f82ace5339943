"""Kernels of the backward that are no products of rows: the activation's gradient, and the weights' gradients.

Suffixes: M row tiles, D hidden, F ffn, e local experts, N padded rows, S segments, P places.
"""

import triton
import triton.language as tl

from uniep.kernels.activation import activate, gate_gradient, up_gradient
from uniep.kernels.arguments import Activation, Rows, Segments
from uniep.kernels.gemm import halves
from uniep.kernels.ptx import after_previous, narrow
from uniep.kernels.rows import num_row_tiles
from uniep.kernels.sync import STAGE_RAW, WIDE, deadline, wait_for
from uniep.kernels.trees import pair_tree_sum


@triton.jit
def activation_gradient_item(
    made: Activation,
    weight_ptr,
    row,
    block,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """What `activation_gradient_kernel` does with these rows (int64) and this block of columns."""
    dtype: tl.constexpr = made.gate_NF.dtype.element_ty
    GROUPS: tl.constexpr = (F + 63) // 64
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < F)[None, :]
    at = row[:, None] * F + column[None, :]
    gate = tl.load(made.gate_NF + at, mask=inside, other=0.0).to(tl.float32)
    if made.up_NF is not None:
        up = tl.load(made.up_NF + at, mask=inside, other=0.0).to(tl.float32)
    else:
        up = None
    raw = tl.load(made.raw_NF + at, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + row)[:, None]
    act = activate(gate, up, ACTIVATION, LIMIT)
    if WEIGHTED:
        scored = act
    else:
        scored = narrow(act, dtype).to(tl.float32)
    tl.store(made.act_NF + at, narrow(weight * scored, dtype), mask=inside)
    d_act = weight * raw
    d_gate = gate_gradient(gate, up, d_act, ACTIVATION, LIMIT)
    if up is not None:
        at += row[:, None] * F
    tl.store(made.dh_N2F + at, narrow(d_gate, dtype), mask=inside)
    if up is not None:
        tl.store(made.dh_N2F + at + F, narrow(up_gradient(gate, up, d_act, ACTIVATION, LIMIT), dtype), mask=inside)
    sums = pair_tree_sum(raw * scored, ROWS, COLUMNS)
    group = block * (COLUMNS // 64) + tl.arange(0, COLUMNS // 64)
    tl.store(made.groups_NG + row[:, None] * GROUPS + group[None, :], sums, mask=(group < GROUPS)[None, :])


@triton.jit
def activation_gradient_kernel(
    made: Activation,
    rows: Rows,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """From raw = dO @ W2 (N, F) fp32, gate and up (N, F): dh, the activation that dW2 contracts, sums for d(weight).

    dh: (N, 2, F), or (N, F) without a gate.  act: (N, F).  groups: (N, ceil(F / 64)) fp32, raw * act by the adjacent-pairs tree.
    A pass of its own, at memory bandwidth: as the GEMM's epilogue it took twice as long (docs/log.md).
    """
    BLOCKS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    num_rows = tl.load(rows.totals)
    for item in range(tl.program_id(0), num_rows // ROWS * BLOCKS, tl.num_programs(0)):
        row = (item // BLOCKS * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        activation_gradient_item(made, rows.weight_N, row, item % BLOCKS, F, ROWS, COLUMNS, ACTIVATION, LIMIT, WEIGHTED)


@triton.jit(do_not_specialize=["timeout_ns", "rank"])
def claimed_activation_gradient_kernel(
    made: Activation,
    rows: Rows,
    progress_ptr,
    cursor_ptr,
    status_ptr,
    timeout_ns,
    rank,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ITEM_ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """As `activation_gradient_kernel`, beside the product that makes raw, which lies in L2 then; the next kernel in the
    stream after it.  Programs claim ITEM_ROWS rows at a time, in the product's order of row tiles.

    They start once every product program is resident, in leftover registers, so that the product can always finish.
    The rest start when its programs end.  They end after it.
    progress (M,) counts finished tiles, TILES of each row tile.
    """
    BLOCKS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    PER_TILE: tl.constexpr = BLOCK_M // ITEM_ROWS
    # Twice the time: whoever makes raw may wait for its peers as long as that.
    deadline_ns = deadline(status_ptr, timeout_ns.to(tl.int64) * 2)
    num_items = num_row_tiles(rows) * PER_TILE
    item = tl.atomic_add(cursor_ptr, 1, sem="relaxed")
    while item < num_items:
        m = tl.load(rows.backward_order_M + item // PER_TILE)
        wait_for(progress_ptr + m + tl.zeros((WIDE,), tl.int32), rank, TILES, deadline_ns, status_ptr, STAGE_RAW)
        first = m * BLOCK_M + item % PER_TILE * ITEM_ROWS
        for part in range(0, ITEM_ROWS // ROWS * BLOCKS):
            row = (first + part // BLOCKS * ROWS + tl.arange(0, ROWS)).to(tl.int64)
            activation_gradient_item(
                made, rows.weight_N, row, part % BLOCKS, F, ROWS, COLUMNS, ACTIVATION, LIMIT, WEIGHTED
            )
        item = tl.atomic_add(cursor_ptr, 1, sem="relaxed")
    after_previous()


@triton.jit
def put_gradient(
    value,
    out_desc,
    expert,
    row,
    column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """A block of dW[expert], stored or added to what is there."""
    block = narrow(value, out_desc.dtype)
    if TRANSPOSED:
        block = block.T.reshape(1, COLUMNS, ROWS)
        if ACCUMULATE:
            block = out_desc.load([expert, column, row]) + block
        out_desc.store([expert, column, row], block)
    else:
        block = block.reshape(1, ROWS, COLUMNS)
        if ACCUMULATE:
            block = out_desc.load([expert, row, column]) + block
        out_desc.store([expert, row, column], block)


@triton.jit
def tile_coordinates(step, num_m, NUM_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(m, n) of the step-th tile of an expert: columns of GROUP_M tiles, so that what they share stays in L2."""
    per_group = GROUP_M * NUM_N
    first = step // per_group * GROUP_M
    height = tl.minimum(num_m - first, GROUP_M)
    within = step % per_group
    return first + within % height, within // height


@triton.jit
def weight_gradient_tile(
    a_desc,
    address_ptr,
    b_desc,
    rows_ptr,
    begin,
    is_lost,
    expert,
    m,
    first_column,
    n,
    HEIGHT: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of `weight_gradient_kernel`, fp32: column m of `a`, column n of `b` from first_column on.

    begin: first row of the expert.  is_lost: the call has failed.
    """
    BLOCK_M: tl.constexpr = TILE.M
    BLOCK_N: tl.constexpr = TILE.N
    BLOCK_K: tl.constexpr = TILE.K
    dtype: tl.constexpr = b_desc.dtype
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if address_ptr is not None:
        column = (m * BLOCK_M + tl.arange(0, BLOCK_M))[None, :]
        # Addresses are loaded two steps ahead: their latency under load is longer than one (docs/log.md).
        address = tl.load(address_ptr + begin + tl.arange(0, BLOCK_K))
        next_address = tl.load(address_ptr + begin + BLOCK_K + tl.arange(0, BLOCK_K))
    num_rows = tl.load(rows_ptr + expert)
    for k in range(0, tl.cdiv(num_rows, BLOCK_K)):
        if address_ptr is not None:
            base = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)[:, None]
            ptrs = tl.multiple_of(base + column, (1, 16))
            if HEIGHT % BLOCK_M == 0:
                a = tl.load(ptrs)
            else:
                a = tl.load(ptrs, mask=column < HEIGHT, other=0.0)
            # Always the first of the two; as a plain assignment it would stop Triton from pipelining the rows.
            address = tl.where(num_rows > 0, next_address, address)
            next_address = tl.load(address_ptr + begin + (k + 2) * BLOCK_K + tl.arange(0, BLOCK_K))
        else:
            a = a_desc.load([begin + k * BLOCK_K, m * BLOCK_M])
        b = b_desc.load([begin + k * BLOCK_K, first_column + n * BLOCK_N])
        acc = tl.dot(a.T, b, acc)
    return tl.where(is_lost, float("nan"), acc)


@triton.jit
def put_tile(
    acc,
    out_desc,
    expert,
    row,
    column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """A tile of dW[expert], in blocks like those of `store_tile`."""
    HALF: tl.constexpr = BLOCK_N // 2
    left, right = halves(acc, BLOCK_M, BLOCK_N)
    if out_desc.dtype == tl.float32:  # in quarters, as in `store_tile`
        a, b = halves(left, BLOCK_M, HALF)
        put_gradient(a, out_desc, expert, row, column, BLOCK_M, HALF // 2, TRANSPOSED, ACCUMULATE)
        put_gradient(b, out_desc, expert, row, column + HALF // 2, BLOCK_M, HALF // 2, TRANSPOSED, ACCUMULATE)
        a, b = halves(right, BLOCK_M, HALF)
        column += HALF
        put_gradient(a, out_desc, expert, row, column, BLOCK_M, HALF // 2, TRANSPOSED, ACCUMULATE)
        put_gradient(b, out_desc, expert, row, column + HALF // 2, BLOCK_M, HALF // 2, TRANSPOSED, ACCUMULATE)
    else:
        put_gradient(left, out_desc, expert, row, column, BLOCK_M, HALF, TRANSPOSED, ACCUMULATE)
        put_gradient(right, out_desc, expert, row, column + HALF, BLOCK_M, HALF, TRANSPOSED, ACCUMULATE)


@triton.jit(do_not_specialize=["first_column"])
def weight_gradient_kernel(
    b_desc,
    a_desc,
    address_ptr,
    out_desc,
    start_ptr,
    rows_ptr,
    status_ptr,
    first_column,
    LOCAL: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """dW[e] = a[rows of e]^T @ b[rows of e, first_column :]: the whole segment in one accumulator, from zero.

    a_desc: (N, HEIGHT), or None: rows are read where they lie, address (N + 2 * TILE.K,) int64 says where.
    b_desc: (N, at least first_column + WIDTH).  out_desc: (e, HEIGHT, WIDTH), or (e, WIDTH, HEIGHT) if TRANSPOSED,
    in the layer's dtype or fp32; ACCUMULATE: what is there plus the finished dW.
    Experts without rows get exact zeros; steps without rows are left out.  After a failed call dW is NaN.
    """
    NUM_M: tl.constexpr = (HEIGHT + TILE.M - 1) // TILE.M
    NUM_N: tl.constexpr = (WIDTH + TILE.N - 1) // TILE.N
    for step in tl.range(tl.program_id(0), LOCAL * NUM_M * NUM_N, tl.num_programs(0)):
        expert = step // (NUM_M * NUM_N)
        m, n = tile_coordinates(step % (NUM_M * NUM_N), NUM_M, NUM_N, TILE.GROUP_M)
        begin = tl.load(start_ptr + expert)
        is_lost = tl.load(status_ptr) != 0
        acc = weight_gradient_tile(
            a_desc, address_ptr, b_desc, rows_ptr, begin, is_lost, expert, m, first_column, n, HEIGHT, TILE
        )
        put_tile(acc, out_desc, expert, m * TILE.M, n * TILE.N, TILE.M, TILE.N, TRANSPOSED, ACCUMULATE)


@triton.jit
def block_gradient_tile(
    b_ptr,
    segments: Segments,
    segment,
    m,
    first_column,
    n,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    SUMMED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of `block_gradient_kernel`, fp32: the sum over SUMMED blocks from `segment` on, each an accumulator of
    its own from zero, added in ascending order.

    All their steps are one loop, so that loads and products of a block begin before the one before has ended.
    """
    BLOCK_M: tl.constexpr = TILE.M
    BLOCK_N: tl.constexpr = TILE.N
    BLOCK_K: tl.constexpr = TILE.K
    dtype: tl.constexpr = b_ptr.dtype.element_ty
    begin = tl.load(segments.start_S + segment)
    end = tl.load(segments.start_S + segment + SUMMED)
    until = tl.load(segments.start_S + segment + 1)
    a_column = (m * BLOCK_M + tl.arange(0, BLOCK_M))[None, :]
    b_column = (n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    # Two steps ahead, as in `weight_gradient_tile`.
    place = begin + tl.arange(0, BLOCK_K)
    row, address = tl.load(segments.row_P + place), tl.load(segments.address_P + place)
    next_row, next_address = tl.load(segments.row_P + place + BLOCK_K), tl.load(segments.address_P + place + BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = tl.full((BLOCK_M, BLOCK_N), -0.0, tl.float32)  # plus any number is that number
    for at in range(begin, end, BLOCK_K):
        used = (row >= 0)[:, None]
        a_ptrs = tl.multiple_of(address.to(tl.pointer_type(dtype))[:, None] + a_column, (1, 16))
        b_ptrs = tl.multiple_of((b_ptr + row.to(tl.int64) * STRIDE)[:, None] + (first_column + b_column), (1, 16))
        if HEIGHT % BLOCK_M == 0:
            a = tl.load(a_ptrs, mask=used, other=0.0)
        else:
            a = tl.load(a_ptrs, mask=used & (a_column < HEIGHT), other=0.0)
        if WIDTH % BLOCK_N == 0:
            b = tl.load(b_ptrs, mask=used, other=0.0)
        else:
            b = tl.load(b_ptrs, mask=used & (b_column < WIDTH), other=0.0)
        row, address = tl.where(end > begin, next_row, row), tl.where(end > begin, next_address, address)
        place = at + 2 * BLOCK_K + tl.arange(0, BLOCK_K)
        next_row, next_address = tl.load(segments.row_P + place), tl.load(segments.address_P + place)
        acc = tl.dot(a.T, b, acc)
        if SUMMED > 1:
            if at + BLOCK_K == until:
                total += acc
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                segment += 1
                until = tl.load(segments.start_S + segment + 1)
    return acc if SUMMED == 1 else total


@triton.jit(do_not_specialize=["first_column"])
def block_gradient_kernel(
    b_ptr,
    segments: Segments,
    out_desc,
    status_ptr,
    first_column,
    LOCAL: tl.constexpr,
    BLOCKS: tl.constexpr,
    APART: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """`weight_gradient_kernel` by BLOCKS blocks of source ranks: dW[e] = (b_0 + b_1) + ... , rounded once; APART: each
    of them.

    b (N, STRIDE).  segments: of each expert's blocks, addresses of rows of a (HEIGHT).  out_desc: (e, HEIGHT, WIDTH),
    APART: (BLOCKS e, HEIGHT, WIDTH), blocks first; or TRANSPOSED, ACCUMULATE as there.
    """
    NUM_M: tl.constexpr = (HEIGHT + TILE.M - 1) // TILE.M
    NUM_N: tl.constexpr = (WIDTH + TILE.N - 1) // TILE.N
    SUMMED: tl.constexpr = 1 if APART else BLOCKS
    RESULTS: tl.constexpr = LOCAL * BLOCKS // SUMMED
    for step in tl.range(tl.program_id(0), RESULTS * NUM_M * NUM_N, tl.num_programs(0)):
        result = step // (NUM_M * NUM_N)
        m, n = tile_coordinates(step % (NUM_M * NUM_N), NUM_M, NUM_N, TILE.GROUP_M)
        is_lost = tl.load(status_ptr) != 0
        acc = block_gradient_tile(
            b_ptr, segments, result * SUMMED, m, first_column, n, HEIGHT, WIDTH, STRIDE, SUMMED, TILE
        )
        if APART:
            result = result % BLOCKS * LOCAL + result // BLOCKS
        acc = tl.where(is_lost, float("nan"), acc)
        put_tile(acc, out_desc, result, m * TILE.M, n * TILE.N, TILE.M, TILE.N, TRANSPOSED, ACCUMULATE)
