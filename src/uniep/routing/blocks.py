"""The rows of a block of source ranks, laid out as if there were no others: for weight gradients that are summed by
blocks (`MoEConfig.gradient_shards`).

Shape suffixes: R ranks, e local experts, N padded rows.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from uniep.config import ROW_ALIGN


@dataclasses.dataclass(frozen=True)
class RowBlock:
    """One block's rows.  start_e1: first row of each expert, multiples of ROW_ALIGN.  rows_e: rows without pad rows.

    row_N: for each row here the row of the call, or -1 for pad rows; None: the rows of the call as they are.
    """

    start_e1: Tensor
    rows_e: Tensor
    row_N: Tensor | None = None

    def of(self, matrix_NC: Tensor) -> Tensor:
        """The block's rows of a matrix by rows of the call, in memory of their own unless it is the only block; pad
        rows are zeros."""
        if self.row_N is None:
            return matrix_NC
        found_NC = matrix_NC[self.row_N.clamp(min=0)]
        return found_NC.masked_fill_((self.row_N < 0)[:, None], 0)

    def addresses_of(self, address_M: Tensor, zeros: int) -> Tensor:
        """(N + 2 * ROW_ALIGN,): of the addresses of the call's rows those of the block's.  zeros: of a row of zeros."""
        assert self.row_N is not None, "the rows of the call have their own"
        found_N = torch.where(self.row_N < 0, zeros, address_M[self.row_N.clamp(min=0)])
        return torch.cat([found_N, found_N.new_full((2 * ROW_ALIGN,), zeros)])


def row_block(counts_Re: Tensor, start_e1: Tensor, rows_e: Tensor, num_rows: int, number: int, blocks: int) -> RowBlock:
    """Block `number` of `blocks`: the rows from ranks number * R / blocks up to the next block's, without the host.

    counts_Re: rows of each source rank and expert.  start_e1, rows_e: of the call.  num_rows: N, at least the aligned
    rows of the call.
    """
    if blocks == 1:
        return RowBlock(start_e1, rows_e)
    of_block_Be = counts_Re.long().unflatten(0, (blocks, -1)).sum(1)
    # No further than the call's rows: after a failed call counts may be anything.
    count_e = of_block_Be[number].clamp(min=0).minimum(rows_e)
    before_e = of_block_Be[:number].sum(0).clamp(min=0).minimum(rows_e - count_e)
    aligned_e = (count_e + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN
    first_e1 = torch.cat([aligned_e.new_zeros(1), torch.cumsum(aligned_e, 0)])
    place_N = torch.arange(num_rows, device=counts_Re.device)
    expert_N = torch.searchsorted(first_e1[1:], place_N, right=True).clamp(max=count_e.shape[0] - 1)
    inside_N = place_N - first_e1[expert_N]
    row_N = start_e1.long()[expert_N] + before_e[expert_N] + inside_N
    return RowBlock(first_e1.int(), count_e.int(), torch.where(inside_N < count_e[expert_N], row_N, -1))
