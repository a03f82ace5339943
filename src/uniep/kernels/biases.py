"""Biases of experts: added to accumulators, in d(weight), and their gradients.

Suffixes: D hidden, F ffn, e local experts, N padded rows.
"""

import triton
import triton.language as tl

from uniep.kernels.arguments import Rows
from uniep.kernels.trees import pair_tree_sum, row_tree_sum


@triton.jit
def bias_columns(bias_ptr, expert, first, column, WIDTH: tl.constexpr, ROW: tl.constexpr, COLUMNS: tl.constexpr):
    """(1, COLUMNS) fp32: an expert's biases, of rows of ROW values, from `first` + `column` on; zeros from WIDTH on."""
    at = column + tl.arange(0, COLUMNS)
    ptrs = bias_ptr + expert.to(tl.int64) * ROW + first + at
    if WIDTH % COLUMNS == 0:
        return tl.load(ptrs).to(tl.float32)[None, :]
    else:
        return tl.load(ptrs, mask=at < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def bias_of_rows(bias_ptr, weight, expert, column, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """What is added to rows of a down product: b2, or w * b2 for the rows' routing weights."""
    bias = bias_columns(bias_ptr, expert, 0, column, WIDTH, WIDTH, COLUMNS)
    if weight is not None:
        bias = weight[:, None] * bias
    return bias


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
    rows: Rows,
    values_ptr,
    address_ptr,
    status_ptr,
    out_ptr,
    LOCAL: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out (e, WIDTH) in the layer's dtype: sums of columns over the rows of each expert, rounded once.

    Of values (N, WIDTH), or, if None, of w * dO, rounded to fp32, address (N,) of each row of dO.
    **Order**: blocks of 128 rows from the expert's first, each by a tree of adjacent rows; blocks ascending, from 0.
    Experts without rows get exact zeros.  After a failed call gradients are NaN.
    """
    BLOCKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    for item in range(tl.program_id(0), LOCAL * BLOCKS, tl.num_programs(0)):
        expert = item // BLOCKS
        column = item % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        begin = tl.load(rows.start_e1 + expert)
        num_rows = tl.load(rows.rows_e + expert)
        total = tl.zeros((COLUMNS,), tl.float32)
        for first in range(0, num_rows, 128):
            lane = first + tl.arange(0, 128)
            used = lane < num_rows
            row = begin + lane
            mask = used[:, None] & inside[None, :]
            if values_ptr is not None:
                ptrs = values_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
                value = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
            else:
                base = tl.load(address_ptr + row, mask=used, other=0).to(tl.pointer_type(dtype))
                weight = tl.load(rows.weight_N + row, mask=used, other=0.0)
                dy = tl.load(base[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
                value = weight[:, None] * dy
            total += row_tree_sum(value, COLUMNS)
        total = tl.where(tl.load(status_ptr) != 0, float("nan"), total)
        tl.store(out_ptr + expert.to(tl.int64) * WIDTH + column, total.to(dtype), mask=inside)
