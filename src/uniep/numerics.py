"""The formulas of the numerics contract (docs/numerics.md), as PyTorch functions.

`reference.py` and the CPU tile bodies call these same functions, so a formula has one definition.
All arithmetic is fp32; `cast` to the layer's dtype happens exactly where the contract says so.

Callers pass contiguous tiles whose width is a multiple of COLUMN_GROUP: PyTorch's vectorised
sigmoid uses another code path for a ragged tail, whose bits differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uniep.config import COLUMN_GROUP


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """f(h) = silu(gate) * up, fp32 in and out."""
    return gate * torch.sigmoid(gate) * up


def swiglu_backward(gate: Tensor, up: Tensor, d_act: Tensor) -> tuple[Tensor, Tensor]:
    """(d_gate, d_up) of `swiglu` for the fp32 gradient `d_act`."""
    sigmoid = torch.sigmoid(gate)
    return d_act * up * (sigmoid * (1 + gate * (1 - sigmoid))), d_act * (gate * sigmoid)


def pair_tree_sum(x: Tensor) -> Tensor:
    """Sum of the last axis (a power of two) by adjacent pairs: ((x0+x1)+(x2+x3))+... ."""
    while x.shape[-1] > 1:
        pairs = x.unflatten(-1, (-1, 2))
        x = pairs[..., 0] + pairs[..., 1]
    return x[..., 0]


def column_group_sums(x_RF: Tensor) -> Tensor:
    """(R, F) fp32 -> (R, F / COLUMN_GROUP): each group of columns by its adjacent-pairs tree."""
    return pair_tree_sum(x_RF.unflatten(-1, (-1, COLUMN_GROUP)))


def add_ascending(x_RG: Tensor) -> Tensor:
    """(R, G) fp32 -> (R,), groups added in ascending order, starting from group 0."""
    total = x_RG[..., 0].clone()
    for group in range(1, x_RG.shape[-1]):
        total += x_RG[..., group]
    return total


def combine_slots(slots_TKD: Tensor, ids_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Sum each token's slots in ascending k, in fp32, skipping slots whose id is -1.

    slots_TKD: (T, K, D) in the layer's dtype; slots that are not used may hold anything.
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
