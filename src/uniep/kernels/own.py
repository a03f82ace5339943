"""An operator of one's own that is a Triton function: see `uniep.row_operator`.

Suffixes: N padded rows, X columns.
"""

import triton
import triton.language as tl

from uniep.kernels.arguments import Rows
from uniep.kernels.ptx import narrow


@triton.jit
def row_operator_kernel(
    values_ptr, rows: Rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BODY: tl.constexpr
):
    """values (N, WIDTH) = BODY(values) in place, rounded once, of rows that belong to a token.

    BODY: (ROWS, COLUMNS) fp32 -> the same.  COLUMNS: a power of two, WIDTH or more; zeros from WIDTH on.
    ROWS: a divisor of all row tiles.
    """
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    column = tl.arange(0, COLUMNS)[None, :]
    for item in range(tl.program_id(0), tl.load(rows.totals) // ROWS, tl.num_programs(0)):
        row = item * ROWS + tl.arange(0, ROWS)
        used = tl.load(rows.return_N + row) >= 0
        at = values_ptr + row.to(tl.int64)[:, None] * WIDTH + column
        mask = used[:, None] & (column < WIDTH)
        tl.store(at, narrow(BODY(tl.load(at, mask=mask, other=0.0).to(tl.float32)), dtype), mask=mask)
