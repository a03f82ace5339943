"""The rows of each block of source ranks, for weight gradients that are summed by blocks (`MoEConfig.gradient_shards`).

Shape suffixes: R ranks, e local experts, B blocks, S their segments (expert, block), N padded rows, P places.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class RowBlocks:
    """Segments of all blocks of each expert, one after the other: each as long as if there were no others, in whole
    steps of a product, and at least one step long.

    number: B.  start_S: first place of each segment, the end of the last, and one more.  row_P: the row of the call at
    each place, -1: none; two more steps than are needed.  begin_S, rows_S: first row of each block in the call, rows.
    """

    number: int
    start_S: Tensor
    row_P: Tensor
    begin_S: Tensor
    rows_S: Tensor

    def of_experts(self, first: int, last: int) -> RowBlocks:
        """Those of experts `first` up to `last`, which is left out."""
        of = slice(first * self.number, last * self.number)
        start_S = self.start_S[of.start : of.stop + 2].clone()  # aligned
        return dataclasses.replace(self, start_S=start_S, begin_S=self.begin_S[of], rows_S=self.rows_S[of])

    def addresses_of(self, a: Tensor) -> Tensor:
        """(P,) int64 of rows (N, X), or of their addresses (N,); where there is no row, any."""
        row_P = self.row_P.clamp(min=0)
        if a.dtype == torch.int64:
            return a[row_P]
        return a.data_ptr() + row_P.long() * (a.shape[1] * a.element_size())


def row_blocks(
    counts_Re: Tensor, start_e1: Tensor, rows_e: Tensor, num_rows: int, blocks: int, depth: int
) -> RowBlocks:
    """Blocks of R / blocks consecutive ranks, without the host.

    counts_Re: rows of each source rank and expert.  start_e1, rows_e: of the call.  num_rows: N, at least the aligned
    rows of the call.  depth: of a step.
    """
    # No further than the call's rows, nor than memory: after a failed call counts may be anything.
    of_block_eB = counts_Re.long().unflatten(0, (blocks, -1)).sum(1).T.clamp(min=0)
    end_eB = torch.cumsum(of_block_eB, 1).minimum(rows_e[:, None])
    before_eB = torch.cat([torch.zeros_like(end_eB[:, :1]), end_eB[:, :-1]], 1)
    rows_S = (end_eB - before_eB).flatten()
    begin_S = (start_e1[:-1, None] + before_eB).flatten()
    end_S = torch.cumsum((rows_S.clamp(min=1) + depth - 1) // depth * depth, 0)
    start_S = torch.cat([end_S.new_zeros(1), end_S, end_S[-1:]])
    place_P = torch.arange(num_rows + (len(rows_S) + 2) * depth, device=counts_Re.device)
    segment_P = torch.searchsorted(end_S, place_P, right=True).clamp(max=len(rows_S) - 1)
    inside_P = place_P - start_S[segment_P]
    row_P = torch.where(inside_P < rows_S[segment_P], begin_S[segment_P] + inside_P, -1).clamp(-1, num_rows - 1)
    return RowBlocks(blocks, start_S.int(), row_P.int(), begin_S.int(), rows_S.int())
