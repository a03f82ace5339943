"""Tile bodies of the CPU executor: what each task computes, in torch.  A body never waits.

Shape suffixes: T tokens of this rank, K slots, D hidden, F ffn, N padded rows, G column groups.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from uniep.activation import activation_of
from uniep.backends.base import MainGrads, Needs
from uniep.config import COLUMN_GROUP, MoEConfig
from uniep.numerics import (
    add_ascending,
    bias_groups,
    column_group_sums,
    column_groups,
    combine_parts,
    combine_slots,
    matmul,
    row_block_sums,
    widened,
)
from uniep.routing import Parts, RoutingPlan, recv_base, token_groups
from uniep.taskflow.graph import Block
from uniep.weights import ExpertWeights


@dataclasses.dataclass(frozen=True)
class Shared:
    """What peers may write into on one rank; see `layout.cpu_arrays`."""

    receive: Tensor
    returns: Tensor
    dweights: Tensor


@dataclasses.dataclass(frozen=True)
class Rows:
    """This rank's rows of the experts: plan, and weights of all ranks by row.

    target_N, slot_N: rank and slot (t*K + k) that a row returns to; target -1 for pad rows.
    parts, part_slot_P: with combine groups, the sums that return instead of rows, and the slots they return to.
    """

    rank: int
    cfg: MoEConfig
    plan: RoutingPlan
    weight_N1: Tensor
    target_N: Tensor
    slot_N: Tensor
    parts: Parts | None = None
    part_slot_P: Tensor | None = None

    @classmethod
    def make(
        cls,
        rank: int,
        cfg: MoEConfig,
        plan: RoutingPlan,
        weights_of_rank: list[Tensor],
        parts: Parts | None = None,
        part_slot_P: Tensor | None = None,
    ) -> Rows:
        slots = cfg.max_tokens_per_rank * cfg.top_k
        table = torch.zeros(len(weights_of_rank), slots, dtype=torch.float32)
        for source, weights in enumerate(weights_of_rank):
            table[source, : weights.numel()] = weights.reshape(-1)
        back_N = plan.row_return_N.long()
        used_N = back_N >= 0
        weight_N = torch.where(used_N, table.view(-1)[back_N.clamp(min=0)], 0.0)
        target_N = torch.where(used_N, back_N // slots, -1)
        return cls(rank, cfg, plan, weight_N[:, None], target_N, back_N % slots, parts, part_slot_P)


class Gather:
    """Gathers the experts' rows from local tokens and tokens of other ranks; pad rows are zeros."""

    def __init__(self, local_TD: Tensor, remote_MD: Tensor, rows: Rows, compact: bool = False) -> None:
        """compact: remote_MD holds the received tokens without gaps instead of the receive buffer."""
        self.local_TD, self.remote_MD = local_TD, remote_MD
        source_N, used_N = rows.plan.row_source_N.long(), rows.target_N >= 0
        self.is_local_N = used_N & (source_N >= 0)
        self.is_remote_N = used_N & (source_N < 0)
        slot_N = torch.where(self.is_remote_N, -source_N - 1, 0)
        if compact:
            block = rows.cfg.receive_block
            slot_N = compact_base(rows.plan, rows.rank)[slot_N // block] + slot_N % block
        self.index_N = torch.where(self.is_remote_N, slot_N, source_N)

    def __call__(self, rows: slice, columns: slice = slice(None)) -> Tensor:
        local, remote, index = self.is_local_N[rows], self.is_remote_N[rows], self.index_N[rows]
        out = self.local_TD.new_zeros(index.shape[0], self.local_TD[:0, columns].shape[1])
        out[local] = self.local_TD[:, columns][index[local]]
        out[remote] = self.remote_MD[:, columns][index[remote]]
        return out


def compact_base(plan: RoutingPlan, rank: int) -> Tensor:
    """Per block of the receive buffer (one per peer, without this rank): number of rows before it without the gaps."""
    counts = plan.recv_count_R.long()
    others = torch.cat([counts[:rank], counts[rank + 1 :], counts.new_zeros(1)])
    return torch.cumsum(others, 0) - others


def _of_h(h_NF: Tensor, block: Block, cfg: MoEConfig) -> list[Tensor]:
    """The columns of a tile in each half of h, or of dh."""
    rows, columns = slice(block.row0, block.row1), slice(block.column0, block.column1)
    return [half[rows, columns] for half in h_NF.chunk(1 + cfg.gated, 1)]


class _Bodies:
    """What forward and backward share: dispatch and the one-sided return of rows or of their sums.

    weight_results: the sums multiply each row by its routing weight.
    """

    weight_results = False

    def __init__(self, rows: Rows, shared: list[Shared], send_TD: Tensor, ids_TK: Tensor) -> None:
        self.rows, self.shared, self.send_TD, self.ids_TK = rows, shared, send_TD, ids_TK
        self.cfg, self.plan, self.rank = rows.cfg, rows.plan, rows.rank
        self.num_rows = rows.plan.num_rows
        if rows.parts is not None:
            self.results_ND = send_TD.new_empty(self.num_rows, self.cfg.hidden)

    def push(self, block: Block) -> None:
        """Copy tokens row0..row1 of a send list into the peer's receive buffer."""
        tokens = self.plan.send_token_RT[block.group, block.row0 : block.row1]
        start = recv_base(self.cfg, self.rank, block.group) + block.row0
        self.shared[block.group].receive[start : start + tokens.shape[0]] = self.send_TD[tokens]

    def _write(self, block: Block, value: Tensor, name: str) -> None:
        """Write the rows of `value` into the slots they return to, in array `name` of their token's rank."""
        target = self.rows.target_N[block.row0 : block.row1]
        slot = self.rows.slot_N[block.row0 : block.row1]
        for rank in torch.unique(target).tolist():
            if rank >= 0:
                pick = torch.nonzero(target == rank).flatten()
                array = getattr(self.shared[rank], name)
                part = array[:, block.column0 : block.column1] if array.dim() == 2 else array
                part.index_copy_(0, slot[pick], value[pick])

    def _return(self, block: Block, value: Tensor) -> None:
        """Store a tile of results, or of dX: in the slots of its rows or, with combine groups, where they are added."""
        value = value.to(self.cfg.dtype)
        if self.rows.parts is None:
            self._write(block, value, "returns")
        else:
            self.results_ND[block.row0 : block.row1, block.column0 : block.column1] = value

    def group_sum(self, block: Block) -> None:
        """Add the rows of parts row0..row1, each into its slot at rank `group`."""
        assert self.rows.parts is not None and self.rows.part_slot_P is not None
        row_PK = self.rows.parts.row_PK[block.row0 : block.row1]
        weight_N = self.rows.weight_N1[:, 0] if self.weight_results else None
        sums_PD = combine_parts(self.results_ND, row_PK, weight_N).to(self.cfg.dtype)
        self.shared[block.group].returns.index_copy_(0, self.rows.part_slot_P[block.row0 : block.row1], sums_PD)

    def _sum(self, block: Block, out_TD: Tensor, weights_TK: Tensor | None) -> None:
        """Add the slots of tokens row0..row1."""
        tokens, width = slice(block.row0, block.row1), self.cfg.return_slots
        slots = self.shared[self.rank].returns[block.row0 * width : block.row1 * width].unflatten(0, (-1, width))
        if self.rows.parts is not None:  # the rows of parts are weighted already
            total = combine_slots(slots, token_groups(self.ids_TK[tokens], self.cfg), None)
        else:
            total = combine_slots(slots, self.ids_TK[tokens], weights_TK[tokens] if weights_TK is not None else None)
        out_TD[tokens] = total.to(out_TD.dtype)


class Dispatch(_Bodies):
    """Sends tokens to the ranks of their experts, and makes a compact copy of the received ones."""

    def __init__(self, rows: Rows, shared: list[Shared], send_TD: Tensor, ids_TK: Tensor, keep: bool) -> None:
        super().__init__(rows, shared, send_TD, ids_TK)
        self.base = compact_base(self.plan, self.rank).tolist()
        count = int(self.plan.recv_count_R.sum()) if keep else 0
        self.received_MD = send_TD.new_empty(count, self.cfg.hidden)

    def keep(self, block: Block) -> None:
        start = self.base[block.group - (block.group > self.rank)]
        slot = recv_base(self.cfg, block.group, self.rank)
        count = block.row1 - block.row0
        self.received_MD[start : start + count] = self.shared[self.rank].receive[slot : slot + count]


class Forward(Dispatch):
    """Bodies of `lower_forward`.  separate: the activation is a task of its own."""

    def __init__(
        self,
        rows: Rows,
        shared: list[Shared],
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        experts: ExpertWeights,
        keep: bool,
        separate: bool = False,
    ) -> None:
        super().__init__(rows, shared, x_TD, ids_TK, keep)
        self.separate = separate
        self.weight_results = self.cfg.weight_at == "output"
        self.weights_TK = weights_TK if self.weight_results else None
        self.experts = experts
        self.x_rows = Gather(x_TD, shared[self.rank].receive, rows)
        self.y_TD = torch.empty_like(x_TD)
        self.h_NF = x_TD.new_empty(self.num_rows, self.cfg.h_columns)
        self.act_NF = x_TD.new_empty(self.num_rows, self.cfg.ffn)

    def gate_up(self, block: Block) -> None:
        columns = slice(block.column0, block.column1)
        x, experts = self.x_rows(slice(block.row0, block.row1)), self.experts
        halves = _of_h(self.h_NF, block, self.cfg), experts.halves(block.group), experts.half_biases(block.group)
        for h, weight, bias in zip(*halves, strict=True):
            product = matmul(x, weight[columns].T)
            h.copy_(product if bias is None else product + bias[columns].float())
        if not self.separate:
            self.activation(block)

    def activation(self, block: Block) -> None:
        rows, columns = slice(block.row0, block.row1), slice(block.column0, block.column1)
        inputs = (widened(half) for half in _of_h(self.h_NF, block, self.cfg))
        act = activation_of(self.cfg.activation, self.cfg.activation_limit).forward(*inputs)
        if self.cfg.weight_at == "activation":
            act = self.rows.weight_N1[rows] * act
        self.act_NF[rows, columns] = act[:, : block.column1 - block.column0].to(self.cfg.dtype)

    def down(self, block: Block) -> None:
        rows, columns = slice(block.row0, block.row1), slice(block.column0, block.column1)
        product = matmul(self.act_NF[rows], self.experts.down(block.group)[columns].T)
        if self.experts.b2 is not None:
            bias = self.experts.b2[block.group, columns].float()
            product += bias if self.weight_results else self.rows.weight_N1[rows] * bias
        self._return(block, product)

    def combine(self, block: Block) -> None:
        self._sum(block, self.y_TD, self.weights_TK)


class Backward(_Bodies):
    """Bodies of `lower_backward`.  x_rows: the forward's inputs by row, for gate_up_wgrad.  separate: as in `Forward`.

    gradients: those of the experts, in the layer's dtype, or `main_grads`.  Those of biases (db13, db2) are made with
    those of the weights beside them."""

    def __init__(
        self,
        rows: Rows,
        shared: list[Shared],
        dy_TD: Tensor,
        ids_TK: Tensor,
        experts: ExpertWeights,
        h_NF: Tensor,
        x_rows: Gather,
        needs: Needs,
        main_grads: MainGrads | None = None,
        separate: bool = False,
    ) -> None:
        super().__init__(rows, shared, dy_TD, ids_TK)
        self.raw_NF = torch.empty(self.num_rows, self.cfg.ffn, dtype=torch.float32) if separate else None
        self.experts, self.h_NF, self.x_rows, self.needs = experts, h_NF, x_rows, needs
        self.dy_rows = Gather(dy_TD, shared[self.rank].receive, rows)
        self.ffn_groups = column_groups(self.cfg.ffn)
        groups = self.ffn_groups + (column_groups(self.cfg.hidden) if experts.biases else 0)
        self.group_sums_NG = torch.empty(self.num_rows, groups, dtype=torch.float32)
        self.weighted_NF = dy_TD.new_empty(self.num_rows, self.cfg.ffn)
        self.dh_NF = dy_TD.new_empty(self.num_rows, self.cfg.h_columns)
        self.dx_TD = torch.empty_like(dy_TD)
        self.dweights_TK = torch.empty(ids_TK.shape, dtype=torch.float32)
        self.accumulate = main_grads is not None and main_grads.accumulate
        if main_grads is None:
            self.gradients = experts.like(fill=True)
        else:
            self.gradients = dataclasses.replace(experts, w13=main_grads.w13, w2=main_grads.w2)
            main_grads.clear()
        self.biases = tuple(torch.zeros_like(b) for b in experts.biases)  # of b13 and b2, or none

    def down_grad(self, block: Block) -> None:
        """Gradient through the second GEMM, and through the activation unless that is a task of its own."""
        rows, columns = slice(block.row0, block.row1), slice(block.column0, block.column1)
        dy = self.dy_rows(rows)
        raw = matmul(dy, self.experts.down(block.group)[:, columns])
        if self.experts.b2 is not None and block.column0 == 0:
            self.group_sums_NG[rows, self.ffn_groups :] = bias_groups(dy, self.experts.b2[block.group])
        if self.raw_NF is None:
            self._through_activation(block, raw)
        else:
            self.raw_NF[rows, columns] = raw

    def activation_gradient(self, block: Block) -> None:
        assert self.raw_NF is not None
        self._through_activation(block, self.raw_NF[block.row0 : block.row1, block.column0 : block.column1])

    def _through_activation(self, block: Block, raw: Tensor) -> None:
        """dh, the weighted activation, column groups of d(weight)."""
        rows, columns = slice(block.row0, block.row1), slice(block.column0, block.column1)
        dtype, width = self.cfg.dtype, block.column1 - block.column0
        raw = widened(raw)
        inputs = [widened(half) for half in _of_h(self.h_NF, block, self.cfg)]
        activation = activation_of(self.cfg.activation, self.cfg.activation_limit)
        weight, act = self.rows.weight_N1[rows], activation.forward(*inputs)
        if self.cfg.weight_at == "output":
            act = act.to(dtype).float()
        first = block.column0 // COLUMN_GROUP
        sums = column_group_sums(raw * act)
        self.group_sums_NG[rows, first : first + sums.shape[1]] = sums
        self.weighted_NF[rows, columns] = (weight * act)[:, :width].to(dtype)
        gradients = activation.backward(*inputs, weight * raw)
        for dh, gradient in zip(_of_h(self.dh_NF, block, self.cfg), gradients, strict=True):
            dh.copy_(gradient[:, :width])

    def dweight(self, block: Block) -> None:
        self._write(block, add_ascending(self.group_sums_NG[block.row0 : block.row1]), "dweights")

    def gate_up_grad(self, block: Block) -> None:
        halves = self.experts.halves(block.group)
        weight = torch.cat([half[:, block.column0 : block.column1] for half in halves])
        self._return(block, matmul(self.dh_NF[block.row0 : block.row1], weight))

    def _segment(self, expert: int) -> slice:
        start, stop = self.plan.expert_start_e1[expert : expert + 2].tolist()
        return slice(start, stop)

    def down_wgrad(self, block: Block) -> None:
        """A tile of dW2; those of its first columns make db2 of the same rows."""
        rows, columns = self._segment(block.group), slice(block.column0, block.column1)
        dy = self.dy_rows(rows, slice(block.row0, block.row1))
        if self.biases and self.needs.biases and block.column0 == 0:
            self.biases[1][block.group, block.row0 : block.row1] = row_block_sums(self.rows.weight_N1[rows] * dy)
        if self.needs.w2:
            out = matmul(dy.T, self.weighted_NF[rows, columns])
            self._put(self.gradients.down(block.group)[block.row0 : block.row1, columns], out)

    def gate_up_wgrad(self, block: Block) -> None:
        """A tile of dW13; those of its first columns make db13 of the same rows."""
        rows, columns = self._segment(block.group), slice(block.column0, block.column1)
        dh = self.dh_NF[rows, block.row0 : block.row1]
        if self.biases and self.needs.biases and block.column0 == 0:
            self.biases[0][block.group, block.row0 : block.row1] = row_block_sums(dh.float())
        if not self.needs.w13:
            return
        out = matmul(dh.T, self.x_rows(rows, columns))
        for number, half in enumerate(self.gradients.halves(block.group)):
            base = number * self.cfg.ffn
            first, last = max(block.row0, base), min(block.row1, base + self.cfg.ffn)
            if first < last:
                self._put(half[first - base : last - base, columns], out[first - block.row0 : last - block.row0])

    def _put(self, target: Tensor, value: Tensor) -> None:
        """Store a finished fp32 block of a weight gradient."""
        if self.accumulate:
            target += value
        else:
            target.copy_(value)

    def collect(self, block: Block) -> None:
        tokens, top_k = slice(block.row0, block.row1), self.cfg.top_k
        got = self.shared[self.rank].dweights[block.row0 * top_k : block.row1 * top_k].view(-1, top_k)
        self.dweights_TK[tokens] = torch.where(self.ids_TK[tokens] >= 0, got, 0.0)

    def combine(self, block: Block) -> None:
        self._sum(block, self.dx_TD, None)
