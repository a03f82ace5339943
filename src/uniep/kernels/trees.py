"""Sums by trees of adjacent pairs: a sum of two has one order only, so that no layout can change it."""

import triton
import triton.language as tl


@triton.jit
def pair_tree_sum(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr = 64):
    """(ROWS, COLUMNS) -> (ROWS, COLUMNS / WIDTH): adjacent pairs, until each WIDTH columns, at most 1024, are one."""
    for level in tl.static_range(1, 11):
        if (WIDTH >> level) > 0:
            x = tl.sum(tl.reshape(x, (ROWS, COLUMNS >> level, 2)), 2)
    return x


@triton.jit
def row_tree_sum(x, COLUMNS: tl.constexpr):
    """(32, COLUMNS) -> (COLUMNS,): adjacent pairs of rows, five times."""
    x = tl.sum(tl.reshape(x, (16, 2, COLUMNS)), 1)
    x = tl.sum(tl.reshape(x, (8, 2, COLUMNS)), 1)
    x = tl.sum(tl.reshape(x, (4, 2, COLUMNS)), 1)
    x = tl.sum(tl.reshape(x, (2, 2, COLUMNS)), 1)
    return tl.reshape(tl.sum(tl.reshape(x, (1, 2, COLUMNS)), 1), (COLUMNS,))
