"""Sums by trees of adjacent pairs: a sum of two has one order only, so that no layout can change it."""

import triton
import triton.language as tl


@triton.jit
def pair_tree_sum(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS) -> (ROWS, COLUMNS / 64): adjacent pairs, six times."""
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 2, 2)), 2)
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 4, 2)), 2)
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 8, 2)), 2)
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 16, 2)), 2)
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 32, 2)), 2)
    return tl.sum(tl.reshape(x, (ROWS, COLUMNS // 64, 2)), 2)


@triton.jit
def row_tree_sum(x, COLUMNS: tl.constexpr):
    """(32, COLUMNS) -> (COLUMNS,): adjacent pairs of rows, five times."""
    x = tl.sum(tl.reshape(x, (16, 2, COLUMNS)), 1)
    x = tl.sum(tl.reshape(x, (8, 2, COLUMNS)), 1)
    x = tl.sum(tl.reshape(x, (4, 2, COLUMNS)), 1)
    x = tl.sum(tl.reshape(x, (2, 2, COLUMNS)), 1)
    return tl.reshape(tl.sum(tl.reshape(x, (1, 2, COLUMNS)), 1), (COLUMNS,))
