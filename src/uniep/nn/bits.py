"""Numbers that stand for the bits of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ODD = 0x9E3779B97F4A7C1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 24
"""Elements that are looked at together."""


def bits_digest(tensor: Tensor) -> Tensor:
    """() int64, on the tensor's device.  Exact: the same bits in the same order give the same number everywhere."""
    values = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).flatten().to(torch.int64)
    odd = 2 * torch.arange(len(values), device=values.device) + 1
    return (values * odd * _ODD).sum()


def part_digests(part: Tensor, shape: Sequence[int], offset: Sequence[int], each: bool = False) -> Tensor:
    """What a part of a tensor adds to the `bits_digest` of the whole, which is the sum over its parts, modulo 2^64.

    shape: of the whole.  offset: of the part in it, an index for each dimension.  each: the slices along the first
    dimension are tensors of their own.
    Returns (n,) int64 for a part of n slices if `each`, else (1,), on the part's device.
    """
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj())
        shape, offset = (*shape, 2), (*offset, 0)
    if part.ndim < 2:
        part, shape, offset = part.reshape(-1, 1), (math.prod(shape), 1), ((*offset, 0)[0], 0)
    index = torch.zeros((), dtype=torch.int64, device=part.device)  # in a slice
    for dim in range(1, len(shape)):
        along = torch.arange(part.shape[dim], device=part.device) + offset[dim]
        index = index[..., None] + along * math.prod(shape[dim + 1 :])
    step = 0 if each else math.prod(shape[1:])
    rows = max(1, _PIECE // max(index.numel(), 1))
    sums = []
    for start in range(0, len(part), rows):
        values = part[start : start + rows].contiguous().view(_INTEGERS[part.element_size()]).flatten(1).long()
        before = (torch.arange(start, start + len(values), device=part.device) + offset[0]) * step
        odd = 2 * (index.flatten() + before[:, None]) + 1
        sums.append((values * odd * _ODD).sum(1))
    found = torch.cat(sums) if sums else index.new_zeros(0)
    return found if each else found.sum().reshape(1)
