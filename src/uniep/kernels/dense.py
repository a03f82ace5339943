"""A product whose rows do not depend on each other, for the dense operators of `nn/invariant.py`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def row_products_kernel(
    a_ptr, b_ptr, out_ptr, rows, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, A_PLANES: tl.constexpr,
    B_PLANES: tl.constexpr, ORDERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out (rows, COLUMNS) fp32 = a b^T, of a (A_PLANES, rows, DEPTH) and b (B_PLANES, COLUMNS, DEPTH), whose planes add
    up to the operands, each some 2^-8 of the one before.

    Pairs of planes are multiplied by orders, the smallest first (a's plane i with b's plane order - i, i ascending).
    One fp32 sum for all: of each pair the products of BLOCK_K columns, ascending, each added up by the tensor cores
    alone first, since these truncate (max_num_imprecise_acc keeps Triton from adding in place).  One tile a program.
    """
    tiles: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    row = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_rows = a_ptr + row.to(tl.int64)[:, None] * DEPTH + k[None, :]
    b_rows = b_ptr + column.to(tl.int64)[None, :] * DEPTH + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.static_range(1, ORDERS + 1):
        for i in tl.static_range(A_PLANES):
            if (ORDERS - step - i >= 0) & (ORDERS - step - i < B_PLANES):
                a_plane = a_rows + rows.to(tl.int64) * (i * DEPTH)
                b_plane = b_rows + (ORDERS - step - i) * COLUMNS * DEPTH
                for start in range(0, DEPTH, BLOCK_K):
                    inside = start + k < DEPTH
                    a = tl.load(a_plane + start, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
                    b = tl.load(b_plane + start, mask=(column < COLUMNS)[None, :] & inside[:, None], other=0.0)
                    acc += tl.dot(a, b, max_num_imprecise_acc=BLOCK_K)
    out = out_ptr + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(out, acc, mask=(row < rows)[:, None] & (column < COLUMNS)[None, :])
