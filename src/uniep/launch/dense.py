"""Launches of `kernels/dense.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from uniep.kernels.dense import row_products_kernel
from uniep.launch.driver import launch

BLOCK_M, BLOCK_N, BLOCK_K = 128, 64, 64
PLANES = {torch.bfloat16: 1, torch.float16: 2}
"""bf16 values that add up to one of the dtype; of fp32 and others three, 24 bits."""


def planes(values: Tensor, count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """(count, ...): the values as sums of `count` of `dtype`, largest first."""
    if count == 1:
        return values.to(dtype).contiguous()[None]
    made, rest = values.new_empty(count, *values.shape, dtype=dtype), values.float()
    for plane in made:
        plane.copy_(rest)
        rest = (rest - plane.float()).nan_to_num_(0.0)  # of infinity, all is in the first plane
    return made


def row_products(a_TK: Tensor, b_NK: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """a b^T in fp32 -> (T, N), on tensor cores in planes of `dtype`: exact products, but for those of the last 8 bits
    of two fp32 values.  Bits of a row depend on that row and on b alone.

    **Order**: `row_products_kernel`.
    """
    rows, columns, depth = a_TK.shape[0], *b_NK.shape
    out_TN = a_TK.new_empty(rows, columns, dtype=torch.float32)
    if out_TN.numel() == 0:
        return out_TN
    a, b = (planes(t, 1 if t.dtype == dtype else PLANES.get(t.dtype, 3), dtype) for t in (a_TK, b_NK))
    programs = -(-rows // BLOCK_M) * -(-columns // BLOCK_N)
    constants = {
        "COLUMNS": columns, "DEPTH": depth, "A_PLANES": len(a), "B_PLANES": len(b),
        "ORDERS": min(len(a) + len(b) - 1, 3), "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K,
    }  # fmt: skip
    launch(row_products_kernel, programs, (a, b, out_TN, rows), constants, num_warps=8, num_stages=3)
    return out_TN
