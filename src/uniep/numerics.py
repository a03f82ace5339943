"""The formulas of the numerics contract (docs/numerics.md), as PyTorch functions.

`reference.py` and the CPU tile bodies call these same functions and those of activation.py, so a formula has one
definition.  All arithmetic is fp32; `cast` to the layer's dtype happens exactly where the contract says so.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from uniep.config import COLUMN_GROUP, ROW_ALIGN
from uniep.errors import UniEPError

PROBABILITY_UNIT = 2.0**-36
"""A router's sums of probabilities are integers in this unit: 2^27 tokens fit."""
SQUARE_UNIT = 2.0**-16
"""Those of z-loss in this one; a token's part is at most SQUARE_LIMIT, so that 2^27 tokens fit."""
SQUARE_LIMIT = 2.0**20
LEAST_SUM = 1e-20
"""Added to what a router's weights are divided by: sigmoid scores may all be 0."""


@contextlib.contextmanager
def fixed_settings() -> Iterator[None]:
    """Fixes the settings that decide bits on the CPU: one intra-op thread (more would split a contraction), and
    `fp32_products`.

    Use it in one thread at a time: threads that start inside also get one intra-op thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with fp32_products():
            yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def fp32_products() -> Iterator[None]:
    """Compute fp32 products in fp32: the process's setting (`torch.set_float32_matmul_precision`) may say bf16.

    Raises UniEPError if another thread changes the setting meanwhile."""
    _fp32_products.enter()
    try:
        yield
    finally:
        _fp32_products.leave()


class _Fp32Products:
    """The process's setting for fp32 products; restored when the last thread leaves."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, ""
        self.setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        os.register_at_fork(after_in_child=self._after_fork)

    def enter(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.before, self.setting.fp32_precision = self.setting.fp32_precision, "ieee"
            self.inside += 1

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self._put_back()

    def check(self) -> None:
        """After a product, inside."""
        if self.inside and (found := self.setting.fp32_precision) != "ieee":
            raise UniEPError(
                f"another thread set the precision of fp32 products to {found!r} during a call, which changes bits; "
                "call torch.set_float32_matmul_precision before or after"
            )

    def _put_back(self) -> None:
        if self.setting.fp32_precision == "ieee":  # else another thread has changed it meanwhile
            self.setting.fp32_precision = self.before

    def _after_fork(self) -> None:
        """After a fork: the threads that were inside belong to the parent."""
        self.lock = threading.Lock()
        if self.inside:
            self.inside = 0
            self._put_back()


_fp32_products = _Fp32Products()


def matmul(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a @ b in fp32 -> (M, N).  Bits of an output depend only on its row of a and its column of b.

    BLAS picks kernels by shape, leading dimension and alignment, and each kernel sums in its own order.  So every
    block of 64 x 64 outputs is a separate call over the whole contraction, on operands of the same form: fp32,
    zero-padded to 64, dense, aligned.  Whatever tile a caller computes, its blocks are the same calls.
    Callers start tiles at multiples of 64 and run inside `fixed_settings`, or, as the backends do, inside
    `fp32_products` on threads with one intra-op thread each (`PinnedThreads`).

    On a GPU it is one library call, whose bits also depend on the shape; callers pass whole segments.
    """
    if a_MK.is_cuda:
        return _library_matmul(a_MK, b_KN)
    rows, columns = a_MK.shape[0], b_KN.shape[1]
    out = torch.empty(rows, columns, dtype=torch.float32)
    left = [_operand(a_MK[row : row + _BLOCK], 0) for row in range(0, rows, _BLOCK)]
    for column in range(0, columns, _BLOCK):
        right = _operand(b_KN[:, column : column + _BLOCK], 1)
        for index, block in enumerate(left):
            target = out[index * _BLOCK : (index + 1) * _BLOCK, column : column + _BLOCK]
            target.copy_((block @ right)[: target.shape[0], : target.shape[1]])
    _fp32_products.check()
    return out


def _library_matmul(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a @ b by the GPU's library, accumulated and returned in fp32, never TF32."""
    if a_MK.dtype != torch.float32:
        return torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    allowed = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        return a_MK @ b_KN
    finally:
        torch.backends.cuda.matmul.fp32_precision = allowed


_BLOCK = 64
_ALIGN_BYTES = 64


def _operand(block: Tensor, dim: int) -> Tensor:
    """fp32 copy (or the tensor itself, if it already fits) with `dim` padded to _BLOCK, dense in its own major
    order."""
    if block.stride(0) == 1 and block.stride(1) > 1:
        return _operand(block.T, 1 - dim).T
    if block.shape[dim] < _BLOCK:
        shape = list(block.shape)
        shape[dim] = _BLOCK
        padded = torch.zeros(shape, dtype=torch.float32)
        padded.narrow(dim, 0, block.shape[dim]).copy_(block)
        return padded
    dense = block.to(torch.float32).contiguous()
    return dense if dense.data_ptr() % _ALIGN_BYTES == 0 else dense.clone()


def widened(x_RF: Tensor) -> Tensor:
    """Contiguous fp32 copy of x, padded with zero columns to a multiple of COLUMN_GROUP."""
    rows, columns = x_RF.shape
    out = torch.zeros(rows, -(-columns // COLUMN_GROUP) * COLUMN_GROUP, dtype=torch.float32)
    out[:, :columns] = x_RF
    return out


def pair_tree_sum(x: Tensor) -> Tensor:
    """Sum of the last axis (a power of two) by adjacent pairs: ((x0+x1)+(x2+x3))+... ."""
    while x.shape[-1] > 1:
        pairs = x.unflatten(-1, (-1, 2))
        x = pairs[..., 0] + pairs[..., 1]
    return x[..., 0]


def column_group_sums(x_RF: Tensor) -> Tensor:
    """(R, F) fp32 -> (R, F / COLUMN_GROUP): each group of columns by its adjacent-pairs tree."""
    return pair_tree_sum(x_RF.unflatten(-1, (-1, COLUMN_GROUP)))


def column_groups(columns: int) -> int:
    """Groups of COLUMN_GROUP columns, the last of which may be narrower."""
    return -(-columns // COLUMN_GROUP)


def bias_groups(dy_RD: Tensor, b2_D: Tensor) -> Tensor:
    """(R, G) fp32: the column groups of dO * b2, products rounded to fp32; see `column_group_sums`."""
    return column_group_sums(widened(dy_RD) * widened(b2_D[None]))


def row_block_sums(x_RC: Tensor) -> Tensor:
    """(R, C) fp32, R a multiple of ROW_ALIGN, 0 too -> (C,): sums of columns.

    **Order**: each block of ROW_ALIGN rows by its adjacent-pairs tree; blocks ascending, from 0.
    """
    total_C = torch.zeros(x_RC.shape[1], dtype=torch.float32, device=x_RC.device)
    for first in range(0, x_RC.shape[0], ROW_ALIGN):
        total_C += pair_tree_sum(x_RC[first : first + ROW_ALIGN].T)
    return total_C


def add_ascending(x_RG: Tensor) -> Tensor:
    """(R, G) fp32 -> (R,), groups added in ascending order, starting from group 0."""
    total = x_RG[..., 0].clone()
    for group in range(1, x_RG.shape[-1]):
        total += x_RG[..., group]
    return total


def combine_slots(slots_TKD: Tensor, ids_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Sum each token's slots in ascending k, in fp32, skipping slots whose id is -1.

    slots_TKD: (T, K, D) in the layer's dtype; unused slots may hold anything.
    weights_TK: (T, K) fp32: `fma(w_k, y_k, acc)`; None: `acc + y_k`.  Returns (T, D) fp32.
    **Order**: k = 0 .. K-1, from 0.  The fma is exact product plus one rounding in fp64, then fp32.
    """
    num_tokens, top_k, hidden = slots_TKD.shape
    total_TD = torch.zeros(num_tokens, hidden, dtype=torch.float32, device=slots_TKD.device)
    for k in range(top_k):
        slot_TD = slots_TKD[:, k].float()
        if weights_TK is None:
            added_TD = total_TD + slot_TD
        else:
            weight_T1 = weights_TK[:, k : k + 1].double()
            added_TD = (total_TD.double() + weight_T1 * slot_TD.double()).float()
        total_TD = torch.where((ids_TK[:, k] >= 0)[:, None], added_TD, total_TD)
    return total_TD


def combine_parts(rows_ND: Tensor, row_PK: Tensor, weight_N: Tensor | None) -> Tensor:
    """Sum the rows of each part in ascending k, as `combine_slots` does.

    row_PK: (P, K) as in `routing.Parts`, -1 after a part's rows.  weight_N: (N,) fp32 or None.  Returns (P, D) fp32.
    """
    index_PK = row_PK.clamp(min=0)
    return combine_slots(rows_ND[index_PK], row_PK, weight_N[index_PK] if weight_N is not None else None)


def combine_grouped(
    slots_TKD: Tensor, group_TK: Tensor, weights_TK: Tensor | None, num_groups: int, dtype: torch.dtype
) -> Tensor:
    """Sum each token's slots by groups of experts: `combine_slots` over one group's slots, cast to `dtype`; then sum
    groups.

    slots_TKD, weights_TK: as for `combine_slots`.  group_TK: (T, K), the group of each slot's expert, -1 for unused
    slots.  Returns (T, D) fp32.
    **Order**: k ascending inside a group, from 0; groups ascending, from 0; groups without a slot are skipped.
    """
    num_tokens, _, hidden = slots_TKD.shape
    total_TD = torch.zeros(num_tokens, hidden, dtype=torch.float32, device=slots_TKD.device)
    for group in range(num_groups):
        slots = torch.where(group_TK == group, group_TK, -1)
        part_TD = combine_slots(slots_TKD, slots, weights_TK).to(dtype).float()
        total_TD = torch.where((slots >= 0).any(1)[:, None], total_TD + part_TD, total_TD)
    return total_TD
