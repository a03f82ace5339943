"""Combine groups: which rows are added before they travel back, and where each sum goes.

With `MoEConfig(combine_groups=G)` the experts form G contiguous groups, each on one rank.  A *part* is what one token
gets from one group: the results of its slots there, added in ascending k on the experts' rank.  It travels as one row
to slot `token * W + place` of the token's rank, W = cfg.return_slots; place counts the token's groups below this one,
so that a token's parts lie side by side in the order in which they are added.

Worked example: E=4, G=2, K=3, W=2.  A token with ids [3, 0, 2] has the groups 0 (slot 1) and 1 (slots 0 and 2): part 0
is its slot 1, part 1 the sum of slot 0 and slot 2.

Suffixes: R ranks, T tokens of a rank, K slots, W return slots of a token, N padded rows, P parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from uniep.config import MoEConfig
from uniep.routing.plan import RoutingPlan


def token_groups(ids_TK: Tensor, cfg: MoEConfig) -> Tensor:
    """(T, W) int64: the groups of each token's experts, ascending, each once; then -1."""
    unused = cfg.num_experts
    ordered_TK = torch.where(ids_TK >= 0, ids_TK.long() // cfg.experts_per_group, unused).sort(1).values
    first_TK = ordered_TK < unused
    first_TK[:, 1:] &= ordered_TK[:, 1:] != ordered_TK[:, :-1]
    place_TK = torch.cumsum(first_TK, 1) - 1
    group_TW = ordered_TK.new_full((ids_TK.shape[0], cfg.return_slots), -1)
    token, slot = torch.where(first_TK)
    group_TW[token, place_TK[token, slot]] = ordered_TK[token, slot]
    return group_TW


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of one rank's groups, in the order of (source rank, token, group).  int64.

    source_P, token_P, group_P: source rank, token and group of each part.  row_PK: (P, K), its rows in ascending k,
    then -1.
    """

    source_P: Tensor
    token_P: Tensor
    group_P: Tensor
    row_PK: Tensor


def build_parts(plan: RoutingPlan, rank: int, cfg: MoEConfig) -> Parts:
    """The parts of `rank`, from its plan only: all rows of a part are on that rank."""
    top_k, block = cfg.top_k, cfg.max_tokens_per_rank
    first_expert = rank * (plan.expert_start_e1.shape[0] - 1)
    row = torch.nonzero(plan.row_return_N >= 0).flatten()
    slot = plan.row_return_N[row].long()
    expert = first_expert - 1 + torch.searchsorted(plan.expert_start_e1.long(), row, right=True)
    groups = cfg.num_experts // cfg.experts_per_group
    part = slot // top_k * groups + expert // cfg.experts_per_group
    order = torch.argsort(part * top_k + slot % top_k)
    part_P, number, count_P = torch.unique_consecutive(part[order], return_inverse=True, return_counts=True)
    column = torch.arange(row.shape[0], device=row.device) - (torch.cumsum(count_P, 0) - count_P)[number]
    row_PK = row.new_full((part_P.shape[0], top_k), -1)
    row_PK[number, column] = row[order]
    token_P = part_P // groups
    return Parts(token_P // block, token_P % block, part_P % groups, row_PK)


def return_slots(parts: Parts, ids_of_rank: Sequence[Tensor], cfg: MoEConfig) -> Tensor:
    """(P,) int64: the slot of each part on the rank of its token."""
    group_RTW = parts.row_PK.new_full((len(ids_of_rank), cfg.max_tokens_per_rank, cfg.return_slots), -1)
    for source, ids_TK in enumerate(ids_of_rank):
        group_RTW[source, : ids_TK.shape[0]] = token_groups(ids_TK, cfg)
    is_place = group_RTW[parts.source_P, parts.token_P] == parts.group_P[:, None]
    return parts.token_P * cfg.return_slots + is_place.int().argmax(1)
