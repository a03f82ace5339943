"""Tile bodies of the CPU executor: what each task computes, in torch.  A body never waits.

Shape suffixes: T tokens of this rank, K slots, D hidden, F ffn, N padded rows, G column groups.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from uniep.activation import activation_of
from uniep.backends.base import MainGrads, Needs
from uniep.config import COLUMN_GROUP, ROW_ALIGN, MoEConfig
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
    keeps_results: results are stored by row first, and return later.
    """

    rank: int
    cfg: MoEConfig
    plan: RoutingPlan
    weight_N1: Tensor
    target_N: Tensor
    slot_N: Tensor
    parts: Parts | None = None
    part_slot_P: Tensor | None = None
    keeps_results: bool = False

    @classmethod
    def make(
        cls,
        rank: int,
        cfg: MoEConfig,
        plan: RoutingPlan,
        weights_of_rank: list[Tensor],
        parts: Parts | None = None,
        part_slot_P: Tensor | None = None,
        keeps_results: bool = False,
    ) -> Rows:
        slots = cfg.max_tokens_per_rank * cfg.top_k
        table = torch.zeros(len(weights_of_rank), slots, dtype=torch.float32)
        for source, weights in enumerate(weights_of_rank):
            table[source, : weights.numel()] = weights.reshape(-1)
        back_N = plan.row_return_N.long()
        used_N = back_N >= 0
        weight_N = torch.where(used_N, table.view(-1)[back_N.clamp(min=0)], 0.0)
        target_N = torch.where(used_N, back_N // slots, -1)
        of_row = weight_N[:, None], target_N, back_N % slots
        return cls(rank, cfg, plan, *of_row, parts, part_slot_P, keeps_results or bool(parts))


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


def slices_of_blocks(plan: RoutingPlan, rank: int, blocks: int) -> list[list[slice]]:
    """For each local expert, its rows by blocks of consecutive source ranks, without pad rows; one block: with them."""
    starts = plan.expert_start_e1.tolist()
    if blocks == 1:
        return [[slice(*segment)] for segment in itertools.pairwise(starts)]
    local = len(starts) - 1
    counts_RE = plan.counts_RE[:, rank * local : (rank + 1) * local]
    ends_eB = torch.cumsum(counts_RE.view(blocks, -1, local).sum(1), 0).T.tolist()
    return [
        [slice(start + first, start + last) for first, last in itertools.pairwise([0, *ends])]
        for start, ends in zip(starts, ends_eB, strict=False)
    ]


def whole_tiles(rows_NC: Tensor) -> Tensor:
    """With zero rows up to a multiple of ROW_ALIGN: a block is contracted as if it were all of its expert's rows."""
    missing = -rows_NC.shape[0] % ROW_ALIGN
    return rows_NC if not missing else torch.cat([rows_NC, rows_NC.new_zeros(missing, rows_NC.shape[1])])


def low_rank(rows_ND: Tensor, down_DR: Tensor, up_RC: Tensor, scale: float) -> Tensor:
    """cast(scale (rows down)) up (N, C) in fp32."""
    return matmul(shrunk(rows_ND, down_DR, scale), up_RC)


def shrunk(rows_ND: Tensor, down_DR: Tensor, scale: float) -> Tensor:
    """cast(scale (rows down)) (N, R), to the rows' dtype."""
    return (matmul(rows_ND, down_DR) * scale).to(rows_ND.dtype)


def _put(target: Tensor, value: Tensor, accumulate: bool) -> None:
    """Store a finished fp32 block of a weight gradient."""
    if accumulate:
        target += value
    else:
        target.copy_(value)


def _of_h(h_NF: Tensor, block: Block, cfg: MoEConfig) -> list[Tensor]:
    """The columns of a tile in each half of h, or of dh."""
    rows, columns = slice(block.row0, block.row1), slice(block.column0, block.column1)
    return [half[rows, columns] for half in h_NF.chunk(1 + cfg.gated, 1)]


class _Bodies:
    """What forward and backward share: dispatch, h, and the one-sided return of rows or of their sums.

    weight_results: the sums multiply each row by its routing weight.
    """

    weight_results = False
    experts: ExpertWeights
    x_rows: Gather
    h_NF: Tensor

    def __init__(self, rows: Rows, shared: list[Shared], send_TD: Tensor, ids_TK: Tensor) -> None:
        self.rows, self.shared, self.send_TD, self.ids_TK = rows, shared, send_TD, ids_TK
        self.cfg, self.plan, self.rank = rows.cfg, rows.plan, rows.rank
        self.num_rows = rows.plan.num_rows
        if rows.keeps_results:
            self.results_ND = send_TD.new_empty(self.num_rows, self.cfg.hidden)

    def push(self, block: Block) -> None:
        """Copy tokens row0..row1 of a send list into the peer's receive buffer."""
        tokens = self.plan.send_token_RT[block.group, block.row0 : block.row1]
        start = recv_base(self.cfg, self.rank, block.group) + block.row0
        self.shared[block.group].receive[start : start + tokens.shape[0]] = self.send_TD[tokens]

    def _make_h(self, block: Block) -> None:
        """A tile of h = x W13^T + b13."""
        columns = slice(block.column0, block.column1)
        x, experts = self.x_rows(slice(block.row0, block.row1)), self.experts
        halves = _of_h(self.h_NF, block, self.cfg), experts.halves(block.group), experts.half_biases(block.group)
        inner, lora = None, experts.lora
        if lora is not None and lora.w13 is not None:
            inner = shrunk(x, lora.w13[0][block.group].T, lora.scale)
        for half, (h, weight, bias) in enumerate(zip(*halves, strict=True)):
            product = matmul(x, weight[columns].T)
            if inner is not None and lora is not None and lora.w13 is not None:
                high = lora.w13[1][block.group].chunk(1 + self.cfg.gated)[half]
                product += matmul(inner, high[columns].T)
            h.copy_(product if bias is None else product + bias[columns].float())

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
        """Store a tile of results, or of dX: in the slots of its rows, or where they wait to be added or pushed."""
        value = value.to(self.cfg.dtype)
        if self.rows.keeps_results:
            self.results_ND[block.row0 : block.row1, block.column0 : block.column1] = value
        else:
            self._write(block, value, "returns")

    def push_rows(self, block: Block) -> None:
        """Finished rows into the slots that they return to."""
        part = self.results_ND[block.row0 : block.row1, block.column0 : block.column1]
        self._write(block, part, "returns")

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
        self._make_h(block)
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
        act = self.act_NF[rows]
        product = matmul(act, self.experts.down(block.group)[columns].T)
        if (lora := self.experts.lora) is not None and lora.w2 is not None:
            a, b = (factor[block.group] for factor in lora.w2)
            product += low_rank(act, a.T, b[columns].T, lora.scale)
        if self.experts.b2 is not None:
            bias = self.experts.b2[block.group, columns].float()
            product += bias if self.weight_results else self.rows.weight_N1[rows] * bias
        self._return(block, product)

    def combine(self, block: Block) -> None:
        self._sum(block, self.y_TD, self.weights_TK)


class Backward(_Bodies):
    """Bodies of `lower_backward`.  h: None, if it is recomputed.  x_rows: the forward's inputs by row, for that and for
    gate_up_wgrad.  separate: as in `Forward`.  blocks: see `Backend.backward`.

    gradients: those of the experts, in the layer's dtype, or `main_grads`.  Those of biases (db13, db2) are made with
    those of the weights beside them."""

    def __init__(
        self,
        rows: Rows,
        shared: list[Shared],
        dy_TD: Tensor,
        ids_TK: Tensor,
        experts: ExpertWeights,
        h_NF: Tensor | None,
        x_rows: Gather,
        needs: Needs,
        main_grads: MainGrads | None = None,
        blocks: int = 1,
        separate: bool = False,
    ) -> None:
        super().__init__(rows, shared, dy_TD, ids_TK)
        self.raw_NF = torch.empty(self.num_rows, self.cfg.ffn, dtype=torch.float32) if separate else None
        self.experts, self.x_rows, self.needs = experts, x_rows, needs
        self.h_NF = h_NF if h_NF is not None else dy_TD.new_empty(self.num_rows, self.cfg.h_columns)
        self.dy_rows = Gather(dy_TD, shared[self.rank].receive, rows)
        self.ffn_groups = column_groups(self.cfg.ffn)
        groups = self.ffn_groups + (column_groups(self.cfg.hidden) if experts.biases else 0)
        self.group_sums_NG = torch.empty(self.num_rows, groups, dtype=torch.float32)
        self.weighted_NF = dy_TD.new_empty(self.num_rows, self.cfg.ffn)
        self.dh_NF = dy_TD.new_empty(self.num_rows, self.cfg.h_columns)
        self.dx_TD = torch.empty_like(dy_TD)
        self.dweights_TK = torch.empty(ids_TK.shape, dtype=torch.float32)
        if main_grads is None:
            zeros = functools.partial(torch.zeros_like, memory_format=torch.contiguous_format)
            w13, w2 = (tuple(map(zeros, ts)) for ts in experts.trained)
            main_grads = MainGrads(w13, w2, accumulate=False)
        else:
            main_grads.clear()
        self.gradients, self.rows_eB = main_grads, slices_of_blocks(self.plan, self.rank, blocks)
        self.biases = () if main_grads.biases else tuple(torch.zeros_like(b) for b in experts.biases)

    def recompute(self, block: Block) -> None:
        self._make_h(block)

    def down_grad(self, block: Block) -> None:
        """Gradient through the second GEMM, and through the activation unless that is a task of its own."""
        rows, columns = slice(block.row0, block.row1), slice(block.column0, block.column1)
        dy = self.dy_rows(rows)
        raw = matmul(dy, self.experts.down(block.group)[:, columns])
        if (lora := self.experts.lora) is not None and lora.w2 is not None:
            a, b = (factor[block.group] for factor in lora.w2)
            raw += low_rank(dy, b, a[:, columns], lora.scale)
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
        dh = self.dh_NF[block.row0 : block.row1]
        out = matmul(dh, weight)
        if (lora := self.experts.lora) is not None and lora.w13 is not None:
            a, b = (factor[block.group] for factor in lora.w13)
            out += low_rank(dh, b, a[:, block.column0 : block.column1], lora.scale)
        self._return(block, out)

    def down_wgrad(self, block: Block) -> None:
        """A tile of dW2; those of its first columns make db2 of the same rows."""
        outputs, columns, lora = slice(block.row0, block.row1), slice(block.column0, block.column1), self.experts.lora
        if self._makes_bias(block):
            self._put_bias(1, block, lambda rows: self.rows.weight_N1[rows] * self.dy_rows(rows, outputs))
        if not self.needs.w2:
            return
        if lora is not None:
            if block.row0 == block.column0 == 0 and lora.w2 is not None:  # the first of the expert's tasks
                given = self.weighted_NF.__getitem__
                self._factors(self.dy_rows, given, lora.w2, lambda of: of.w2, block.group)
            return

        def product(rows: slice) -> Tensor:
            return matmul(whole_tiles(self.dy_rows(rows, outputs)).T, whole_tiles(self.weighted_NF[rows, columns]))

        for out, of in self._sums(block.group, product):
            into = ExpertWeights((), of.w2, self.experts.layout)
            _put(into.down(block.group)[outputs, columns], out, of.accumulate)

    def gate_up_wgrad(self, block: Block) -> None:
        """A tile of dW13; those of its first columns make db13 of the same rows."""
        outputs, columns, lora = slice(block.row0, block.row1), slice(block.column0, block.column1), self.experts.lora
        if self._makes_bias(block):
            self._put_bias(0, block, lambda rows: self.dh_NF[rows, outputs].float())
        if not self.needs.w13:
            return
        if lora is not None:
            if block.row0 == block.column0 == 0 and lora.w13 is not None:
                d_out = self.dh_NF.__getitem__
                self._factors(d_out, self.x_rows, lora.w13, lambda of: of.w13, block.group)
            return

        def product(rows: slice) -> Tensor:
            return matmul(whole_tiles(self.dh_NF[rows, outputs]).T, whole_tiles(self.x_rows(rows, columns)))

        for out, of in self._sums(block.group, product):
            into = ExpertWeights(of.w13, (), self.experts.layout, self.cfg.gated)
            for number, half in enumerate(into.halves(block.group)):
                base = number * self.cfg.ffn
                first, last = max(block.row0, base), min(block.row1, base + self.cfg.ffn)
                if first < last:
                    value = out[first - block.row0 : last - block.row0]
                    _put(half[first - base : last - base, columns], value, of.accumulate)

    def _makes_bias(self, block: Block) -> bool:
        return self.cfg.bias and self.needs.biases and block.column0 == 0

    def _put_bias(self, number: int, block: Block, values: Callable[[slice], Tensor]) -> None:
        """Columns row0..row1 of db13 or db2, 0 or 1: sums of values of rows, (rows, C)."""
        for sums_C, of in self._sums(block.group, lambda rows: row_block_sums(whole_tiles(values(rows)))):
            into = of.biases or self.biases
            _put(into[number][block.group, block.row0 : block.row1], sums_C, False)

    def _factors(
        self, d_out: Callable[[slice], Tensor], given: Callable[[slice], Tensor], pair: tuple[Tensor, Tensor],
        into: Callable[[MainGrads], tuple[Tensor, ...]], expert: int,
    ) -> None:  # fmt: skip
        """Gradients of A and B of out = given (W + scale B A)^T: dA = cast(scale (d_out B))^T given, dB = d_out^T
        cast(scale (given A^T))."""
        assert self.experts.lora is not None
        a, b = (factor[expert] for factor in pair)
        scale = self.experts.lora.scale

        def d_a(rows: slice) -> Tensor:
            return matmul(shrunk(whole_tiles(d_out(rows)), b, scale).T, whole_tiles(given(rows)))

        def d_b(rows: slice) -> Tensor:
            return matmul(whole_tiles(d_out(rows)).T, shrunk(whole_tiles(given(rows)), a.T, scale))

        for number, product in enumerate((d_a, d_b)):
            for out, of in self._sums(expert, product):
                _put(into(of)[number][expert], out, of.accumulate)

    def _sums(self, expert: int, product: Callable[[slice], Tensor]) -> Iterator[tuple[Tensor, MainGrads]]:
        """(gradient by `product` of rows, where it goes): of each block of source ranks, also of those without rows, or
        of all, added ascending."""
        found = map(product, self.rows_eB[expert])
        if self.gradients.apart:
            return ((out, self.gradients.of_block(block)) for block, out in enumerate(found))
        return iter([(functools.reduce(torch.add, found), self.gradients)])

    def collect(self, block: Block) -> None:
        tokens, top_k = slice(block.row0, block.row1), self.cfg.top_k
        got = self.shared[self.rank].dweights[block.row0 * top_k : block.row1 * top_k].view(-1, top_k)
        self.dweights_TK[tokens] = torch.where(self.ids_TK[tokens] >= 0, got, 0.0)

    def combine(self, block: Block) -> None:
        self._sum(block, self.dx_TD, None)
