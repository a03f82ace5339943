"""RoutingPlan: canonical rows, deduplicated sends, row sources and return slots.

A plan is a pure function of the routing ids of all ranks.  It does not depend on schedule or timing, so the
rows of an expert have the same order however tokens are sent:

    canonical order inside an expert = (source rank, token index, slot k)

Worked example: R=2, E=2 (one expert per rank), K=2, T=2 on both ranks, ids rank 0 = [[0,1],[1,-1]],
ids rank 1 = [[1,0],[0,0]].  Expert 0 (rank 0) has the rows (0,0,0) (1,0,1) (1,1,0) (1,1,1); rank 1
sends rank 0 its tokens 0 and 1, each once, although token 1 fills two rows.

Shape suffixes: R ranks, T tokens of this rank, K slots, E experts, e local experts, N padded rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from uniep.config import ROW_ALIGN, MoEConfig


@dataclasses.dataclass(frozen=True)
class RoutingPlan:
    """One rank's view of one call's routing.  Tensors only, all int32.

    counts_RE: (R, E), routed slots per source rank and expert (unused slots not counted).
    expert_start_e1: (e+1,), first row of each local expert's segment, multiples of `align`; last = N.
    send_count_R: (R,), tokens this rank sends to each rank; 0 for itself.
    send_token_RT: (R, T), indices of these tokens, each once; -1 after the count.  Ascending, or, with
        Schedule(send_order="expert"), by the token's lowest expert on that rank, then ascending.
    recv_count_R: (R,), tokens this rank receives from each rank; 0 for itself.
    row_source_N: (N,), where a row's input lies: v >= 0 is local token v, v < 0 is receive slot -v-1.
        Pad rows name the zero row, the last slot of the receive buffer.
    row_return_N: (N,), where a row's result goes: source * max_tokens_per_rank * K + token * K + k;
        -1 for pad rows.
    """

    counts_RE: Tensor
    expert_start_e1: Tensor
    send_count_R: Tensor
    send_token_RT: Tensor
    recv_count_R: Tensor
    row_source_N: Tensor
    row_return_N: Tensor

    @property
    def num_rows(self) -> int:
        """N, rows with alignment."""
        return self.row_source_N.shape[0]

    def tensors(self) -> list[Tensor]:
        return [getattr(self, f.name) for f in dataclasses.fields(self)]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> RoutingPlan:
        return cls(*tensors)


def recv_base(cfg: MoEConfig, source: int, rank: int) -> int:
    """First receive slot on `rank` of tokens from `source`: one block of cfg.receive_block per peer."""
    return (source - (source > rank)) * cfg.receive_block


def find_bad_id(ids_TK: Tensor, num_experts: int) -> tuple[int, int, int] | None:
    """(token, slot, value) of the first id outside -1 .. E-1, or None."""
    ids_TK = ids_TK.long()  # a narrow dtype would wrap the limits
    bad = (ids_TK < -1) | (ids_TK >= num_experts)
    if not bool(bad.any()):
        return None
    token, slot = (int(v) for v in torch.nonzero(bad)[0])
    return token, slot, int(ids_TK[token, slot])


def build_plan(
    ids_of_rank: Sequence[Tensor], rank: int, cfg: MoEConfig, by_expert: bool = False, align: int = ROW_ALIGN
) -> RoutingPlan:
    """The plan of `rank` from the ids of all ranks.

    ids_of_rank: R tensors (T_s, K), any integer dtype, values -1 .. E-1 (checked by the caller).
    by_expert: the order of send lists, see `RoutingPlan`; receive slots follow it, rows do not.
    align: see `Way.align`.
    Returns tensors on the ids' device.  **Order**: (source rank, token, slot) inside each expert.
    """
    num_ranks = len(ids_of_rank)
    local = cfg.experts_per_rank(num_ranks)
    first = rank * local
    device = ids_of_rank[rank].device
    i64 = torch.int64
    ids_of_rank = [ids.to(i64) for ids in ids_of_rank]  # a narrow dtype would wrap expert numbers

    tokens = [ids.shape[0] for ids in ids_of_rank]
    counts_RE = torch.stack([torch.bincount(ids[ids >= 0], minlength=cfg.num_experts) for ids in ids_of_rank])

    def sent(source: int, target: int) -> Tensor:
        ids = ids_of_rank[source]
        here_TK = (ids >= target * local) & (ids < (target + 1) * local)
        if source == target:
            return ids.new_zeros(0)
        token = torch.nonzero(here_TK.any(1)).flatten()
        if by_expert and token.numel():
            lowest = torch.where(here_TK, ids, cfg.num_experts)[token].amin(1)
            token = token[torch.argsort(lowest, stable=True)]
        return token

    send_token_RT = torch.full((num_ranks, tokens[rank]), -1, dtype=i64, device=device)
    send_count_R = torch.zeros(num_ranks, dtype=i64, device=device)
    recv_count_R = torch.zeros(num_ranks, dtype=i64, device=device)
    source_of_token = []  # per source rank: token -> row_source value
    for peer in range(num_ranks):
        out = sent(rank, peer)
        send_token_RT[peer, : out.numel()] = out
        send_count_R[peer] = out.numel()
        if peer == rank:
            source_of_token.append(torch.arange(tokens[rank], device=device))
            continue
        incoming = sent(peer, rank)
        recv_count_R[peer] = incoming.numel()
        slot_of = torch.zeros(tokens[peer], dtype=i64, device=device)
        slot_of[incoming] = recv_base(cfg, peer, rank) + torch.arange(incoming.numel(), device=device)
        source_of_token.append(-slot_of - 1)

    rows_e = counts_RE[:, first : first + local].sum(0)
    expert_start_e1 = torch.zeros(local + 1, dtype=i64, device=device)
    expert_start_e1[1:] = torch.cumsum((rows_e + align - 1) // align * align, 0)
    total = int(expert_start_e1[-1])

    # All slots of all ranks in (source, token, k) order; a stable sort by expert makes it canonical.
    flat_ids = torch.cat([ids.reshape(-1) for ids in ids_of_rank])
    flat_source = torch.cat([s.repeat_interleave(cfg.top_k) for s in source_of_token])
    block = cfg.max_tokens_per_rank * cfg.top_k
    flat_return = torch.cat([s * block + torch.arange(t * cfg.top_k, device=device) for s, t in enumerate(tokens)])
    mine = torch.nonzero((flat_ids >= first) & (flat_ids < first + local)).flatten()
    mine = mine[torch.argsort(flat_ids[mine], stable=True)]
    expert = flat_ids[mine] - first
    before_e = torch.cumsum(rows_e, 0) - rows_e
    row = expert_start_e1[expert] + torch.arange(mine.numel(), device=device) - before_e[expert]

    zero_row = -cfg.receive_slots(num_ranks) - 1
    row_source_N = torch.full((total,), zero_row, dtype=i64, device=device)
    row_return_N = torch.full((total,), -1, dtype=i64, device=device)
    row_source_N[row] = flat_source[mine]
    row_return_N[row] = flat_return[mine]

    fields = (counts_RE, expert_start_e1, send_count_R, send_token_RT, recv_count_R, row_source_N, row_return_N)
    return RoutingPlan(*(t.to(torch.int32) for t in fields))
