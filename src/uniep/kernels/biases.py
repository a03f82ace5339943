"""Biases of experts: added to accumulators, in d(weight), and their gradients.

Suffixes: D hidden, F ffn, e local experts, N padded rows.
"""

import triton
import triton.language as tl

from uniep.kernels.ptx import narrow
from uniep.kernels.trees import pair_tree_sum, row_tree_sum


@triton.jit
def bias_columns(bias_ptr, expert, first, column, WIDTH: tl.constexpr, ROW: tl.constexpr, COLUMNS: tl.constexpr):
    """(1, COLUMNS) fp32: an expert's biases, of rows of ROW values, from `first` + `column` on; zeros from WIDTH on.

    column < WIDTH, a multiple of COLUMNS.
    """
    at = column + tl.arange(0, COLUMNS)
    ptrs = bias_ptr + expert.to(tl.int64) * ROW + first + at
    if WIDTH % COLUMNS == 0:
        return tl.load(ptrs).to(tl.float32)[None, :]
    else:
        return tl.load(ptrs, mask=at < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def add_b2(half, b2_ptr, weight, expert, column, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Half of a tile (rows, COLUMNS) of a down product plus b2, or plus w * b2 for the rows' routing weights."""
    at = column + tl.arange(0, COLUMNS)
    ptrs = b2_ptr + expert.to(tl.int64) * WIDTH + at
    if WIDTH % (2 * COLUMNS) == 0:
        bias = tl.load(ptrs).to(tl.float32)[None, :]
    else:
        bias = tl.load(ptrs, mask=at < WIDTH, other=0.0).to(tl.float32)[None, :]
    if weight is not None:
        bias = weight[:, None] * bias
    return half + bias


@triton.jit
def add_bias_groups(total, address_ptr, b2_ptr, expert, row, D: tl.constexpr):
    """total (ROWS,) plus dO . b2 of these rows of one expert: groups of 64 columns, each a tree, ascending.

    address (N,): of each row of dO.
    """
    ROWS: tl.constexpr = row.shape[0]
    first = tl.load(address_ptr + row).to(tl.pointer_type(b2_ptr.dtype.element_ty))
    for column in range(0, D, 64):
        at = (column + tl.arange(0, 64))[None, :]
        dy = tl.load(first[:, None] + at, mask=at < D, other=0.0).to(tl.float32)
        sums = pair_tree_sum(dy * bias_columns(b2_ptr, expert, 0, column, D, D, 64), ROWS, 64)
        total += tl.reshape(sums, (ROWS,))
    return total


@triton.jit
def bias_gradient_kernel(
    start_ptr,
    count_ptr,
    values_ptr,
    weight_ptr,
    address_ptr,
    b2_ptr,
    status_ptr,
    out_ptr,
    LOCAL: tl.constexpr,
    BLOCKS: tl.constexpr,
    APART: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out (e, WIDTH): sums of columns over the rows of each expert, rounded once; by BLOCKS blocks of its rows, which
    are added in ascending order; APART: not added, (BLOCKS, e, WIDTH).

    Of values (N, WIDTH), or, if None, of w * dO, rounded to fp32: weight (N,) fp32, address (N,) of each row of dO,
    whose dtype is that of b2.  start, count: first row and number of rows of each block, expert by expert.
    **Order** in a block: 128 rows at a time from its first, each by a tree of adjacent rows; ascending, from 0.
    Experts without rows get exact zeros.  After a failed call gradients are NaN.
    """
    PARTS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    SUMMED: tl.constexpr = 1 if APART else BLOCKS
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    for item in range(tl.program_id(0), LOCAL * BLOCKS // SUMMED * PARTS, tl.num_programs(0)):
        result = item // PARTS
        column = item % PARTS * COLUMNS + tl.arange(0, COLUMNS)
        first = result * SUMMED
        total = _block_sum(
            start_ptr, count_ptr, values_ptr, weight_ptr, address_ptr, b2_ptr, first, column, WIDTH, COLUMNS
        )
        if SUMMED > 1:
            for block in range(first + 1, first + SUMMED):
                total += _block_sum(
                    start_ptr, count_ptr, values_ptr, weight_ptr, address_ptr, b2_ptr, block, column, WIDTH, COLUMNS
                )
        total = tl.where(tl.load(status_ptr) != 0, float("nan"), total)
        if APART:
            result = result % BLOCKS * LOCAL + result // BLOCKS
        ptrs, mask = out_ptr + result.to(tl.int64) * WIDTH + column, column < WIDTH
        tl.store(ptrs, narrow(total, dtype), mask=mask)


@triton.jit
def _block_sum(
    start_ptr, count_ptr, values_ptr, weight_ptr, address_ptr, b2_ptr, block, column, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sum of a block of rows of an expert."""
    begin = tl.load(start_ptr + block)
    num_rows = tl.load(count_ptr + block)
    total = tl.zeros((COLUMNS,), tl.float32)
    upper = total
    for half in range(0, tl.cdiv(num_rows, 128) * 2):  # of 128 rows: all at once would take too many registers
        first = half * 64
        left = _part_sum(values_ptr, weight_ptr, address_ptr, b2_ptr, begin, first, num_rows, column, WIDTH, COLUMNS)
        right = _part_sum(
            values_ptr, weight_ptr, address_ptr, b2_ptr, begin, first + 32, num_rows, column, WIDTH, COLUMNS
        )
        lower = left + right
        total = tl.where(half % 2 == 0, total, total + (upper + lower))
        upper = lower
    return total


@triton.jit
def _part_sum(
    values_ptr, weight_ptr, address_ptr, b2_ptr, begin, first, num_rows, column, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The tree of 32 rows of an expert, from `first` on; zeros from num_rows on."""
    lane = first + tl.arange(0, 32)
    row = begin + lane
    used = lane < num_rows
    mask = used[:, None] & (column < WIDTH)[None, :]
    if values_ptr is not None:
        ptrs = values_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        value = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    else:
        base = tl.load(address_ptr + row, mask=used, other=0).to(tl.pointer_type(b2_ptr.dtype.element_ty))
        weight = tl.load(weight_ptr + row, mask=used, other=0.0)
        dy = tl.load(base[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        value = weight[:, None] * dy
    return row_tree_sum(value, COLUMNS)
