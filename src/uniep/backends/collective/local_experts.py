"""One rank's experts on rows already gathered here; results are not sent: torch operations or the Hopper kernels.

`TorchExperts` runs the tile bodies of the CPU executor, an expert's whole segment at a time.  On the CPU their bits
are those of the `cpu` backend; on a GPU a GEMM is one library call per expert, whose bits are the same within one
architecture and library version.  `KernelExperts` launches the kernels of the `hopper` backend and has its bits.

Suffixes: T tokens of this rank, M received tokens, K slots, D hidden, F ffn, N padded rows, e local experts.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Protocol

import torch
from torch import Tensor

from uniep.backends import torch_tiles as tiles
from uniep.backends.base import MainGrads, Needs
from uniep.config import MoEConfig
from uniep.kernels.arguments import Activation, Rows, Sums, Tokens
from uniep.launch.driver import Bundle
from uniep.layout import group_words
from uniep.limits import why_not
from uniep.numerics import combine_parts, combine_slots
from uniep.routing import RoutingPlan, RowBlocks, row_blocks
from uniep.schedule import Tile
from uniep.taskflow.graph import Block
from uniep.way import Way
from uniep.weights import ExpertWeights


@dataclasses.dataclass(frozen=True)
class Routed:
    """A plan and the routing weight of each of its rows (fp32, 0 for pad rows)."""

    plan: RoutingPlan
    weight_N: Tensor


@dataclasses.dataclass(frozen=True)
class RowGradients:
    """dx (N, D) and d(weight) (N,) by row, None where not needed; experts in the parameters' own layout, unless they
    went to `MainGrads`; biases as in `ExpertGradients`."""

    x_ND: Tensor | None
    weights_N: Tensor | None
    w13: tuple[Tensor, ...] | None
    w2: tuple[Tensor, ...] | None
    biases: tuple[Tensor, ...]


class LocalExperts(Protocol):
    """The layer between dispatch and return."""

    name: str

    def forward(
        self, tokens: Tokens, routed: Routed, experts: ExpertWeights, save: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(results of the rows (N, D), h (N, 2F or F) if `save`)."""
        ...

    def backward(
        self, dy: Tokens, x: Tokens, routed: Routed, experts: ExpertWeights, h_NF: Tensor | None, needs: Needs,
        main_grads: MainGrads | None = None, blocks: int = 1,
    ) -> RowGradients:  # fmt: skip
        """h: None, if it is recomputed."""
        ...

    def add_parts(self, rows_ND: Tensor, row_PK: Tensor, weight_N: Tensor | None) -> Tensor:
        """(P, D): the rows of each combine group, `Parts.row_PK`, added in ascending k."""
        ...

    def combine(self, returns_TKD: Tensor, ids_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
        """(T, D): the fixed-order sum over K."""
        ...


def local_experts(cfg: MoEConfig, rank: int, way: Way, device: torch.device) -> tuple[LocalExperts, str]:
    """The implementation for `device`, and why it is this one."""
    if device.type == "cpu":
        return TorchExperts(cfg, rank, way), "CPU"
    if (error := why_not(cfg, device)) is not None:
        return TorchExperts(cfg, rank, way), str(error)
    return KernelExperts(cfg, rank, way, device), torch.cuda.get_device_name(device)


def _segments(plan: RoutingPlan, width: int) -> list[Block]:
    """One block per expert that has rows: all of them, `width` columns."""
    starts = plan.expert_start_e1.tolist()
    return [
        Block(expert, first, last, 0, width)
        for expert, (first, last) in enumerate(itertools.pairwise(starts))
        if first < last
    ]


def run_own(way: Way, after: str, rows_NX: Tensor, plan: RoutingPlan) -> None:
    """Operators of one's own behind a product, on all of its rows."""
    for op in way.own(after):
        op.apply(rows_NX, plan.row_return_N >= 0)


class TorchExperts:
    """Tile bodies of the CPU executor.  Call it with the tokens' device as torch's default device."""

    name = "torch, one GEMM per expert"

    def __init__(self, cfg: MoEConfig, rank: int, way: Way) -> None:
        self.cfg, self.rank, self.way = cfg, rank, way

    def _rows(self, routed: Routed) -> tiles.Rows:
        """Return slots for rows that stay on this rank: row n goes to slot n."""
        used_N = routed.plan.row_return_N >= 0
        target_N = torch.where(used_N, self.rank, -1)
        return tiles.Rows(
            self.rank, self.cfg, routed.plan, routed.weight_N[:, None], target_N, torch.arange(len(used_N))
        )

    def _shared(self, tokens: Tokens, routed: Routed) -> list[tiles.Shared]:
        """One entry per rank; only this rank's is written."""
        num_rows = routed.plan.num_rows
        results_ND = tokens.local.new_empty(num_rows, self.cfg.hidden)
        dweights_N = torch.empty(num_rows, dtype=torch.float32)
        return [tiles.Shared(tokens.received, results_ND, dweights_N)] * (self.rank + 1)

    def forward(
        self, tokens: Tokens, routed: Routed, experts: ExpertWeights, save: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows, shared, x_TD = self._rows(routed), self._shared(tokens, routed), tokens.local
        nothing = torch.empty(0, self.cfg.top_k)
        bodies = tiles.Forward(rows, shared, x_TD[:0], nothing, nothing, experts, keep=False)  # sends and sums none
        bodies.x_rows = tiles.Gather(x_TD, tokens.received, rows, compact=True)
        for block in _segments(routed.plan, self.cfg.ffn):
            bodies.gate_up(block)
        run_own(self.way, "gate_up", bodies.act_NF, routed.plan)
        for block in _segments(routed.plan, self.cfg.hidden):
            bodies.down(block)
        run_own(self.way, "down", shared[self.rank].returns, routed.plan)
        return shared[self.rank].returns, bodies.h_NF if save else None

    def backward(
        self, dy: Tokens, x: Tokens, routed: Routed, experts: ExpertWeights, h_NF: Tensor | None, needs: Needs,
        main_grads: MainGrads | None = None, blocks: int = 1,
    ) -> RowGradients:  # fmt: skip
        cfg, plan = self.cfg, routed.plan
        rows, shared = self._rows(routed), self._shared(dy, routed)
        x_rows = tiles.Gather(x.local, x.received, rows, compact=True)
        no_ids = torch.empty(0, cfg.top_k)
        apart = self.way.separate_gradient
        none = dy.local[:0]  # to send or to sum
        bodies = tiles.Backward(rows, shared, none, no_ids, experts, h_NF, x_rows, needs, main_grads, blocks, apart)
        biases = needs.biases and cfg.bias
        bodies.dy_rows = tiles.Gather(dy.local, dy.received, rows, compact=True)
        if h_NF is None:
            for block in _segments(plan, cfg.ffn):
                bodies.recompute(block)
        for block in _segments(plan, cfg.ffn):
            bodies.down_grad(block)
        if bodies.raw_NF is not None:
            run_own(self.way, "down_grad", bodies.raw_NF, plan)
        for block in _segments(plan, cfg.ffn):
            if apart:
                bodies.activation_gradient(block)
            if needs.weights:
                bodies.dweight(block)
            if needs.w2 or biases:
                bodies.down_wgrad(Block(block.group, 0, cfg.hidden, 0, cfg.ffn))
        for block in _segments(plan, cfg.hidden):
            if needs.x:
                bodies.gate_up_grad(block)
            if needs.w13 or biases:
                bodies.gate_up_wgrad(Block(block.group, 0, cfg.h_columns, 0, cfg.hidden))
        if needs.x:
            run_own(self.way, "gate_up_grad", shared[self.rank].returns, plan)
        return RowGradients(
            shared[self.rank].returns if needs.x else None,
            shared[self.rank].dweights if needs.weights else None,
            bodies.gradients.w13 if needs.w13 and main_grads is None else None,
            bodies.gradients.w2 if needs.w2 and main_grads is None else None,
            bodies.biases if needs.biases else (),
        )

    def add_parts(self, rows_ND: Tensor, row_PK: Tensor, weight_N: Tensor | None) -> Tensor:
        return combine_parts(rows_ND, row_PK, weight_N).to(self.cfg.dtype)

    def combine(self, returns_TKD: Tensor, ids_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
        return combine_slots(returns_TKD, ids_TK, weights_TK).to(self.cfg.dtype)


class KernelExperts:
    """The Triton kernels of the `hopper` backend.  Every operand is on this rank, and rows are expanded."""

    name = "the Triton kernels of the hopper backend"

    def __init__(self, cfg: MoEConfig, rank: int, way: Way, device: torch.device) -> None:
        from uniep.launch import operands, staged

        self.launch, self.operands = staged, operands
        self.cfg, self.rank, self.way = cfg, rank, way
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._zero = torch.zeros(4, dtype=torch.int32, device=device)
        self.alone = self._alone()

    def _alone(self, **tables: Tensor) -> Any:
        """Kernel arguments for a group without peers.  tables: addresses, for kernels that store through them."""
        return self.operands.Peers.alone(self._zero, **tables)

    def _rows(self, routed: Routed, tile: Tile) -> Any:
        """Tables for kernels with tiles of `tile.rows`; rows of other ranks as compact receive slots."""
        plan, device = routed.plan, routed.weight_N.device
        used_N, source_N = plan.row_return_N >= 0, plan.row_source_N.long()
        block, zero_row = self.cfg.receive_block, plan.recv_count_R.sum()
        slot_N = torch.where(used_N & (source_N < 0), -source_N - 1, 0)
        slot_N = tiles.compact_base(plan, self.rank)[slot_N // block] + slot_N % block
        remote_N = torch.where(used_N, -slot_N - 1, -zero_row - 1)
        starts, num_tiles = plan.expert_start_e1, plan.num_rows // tile.rows
        tiles_e = starts.diff() // tile.rows
        expert_M = torch.repeat_interleave(tiles_e, output_size=num_tiles)
        group_M = group_words(expert_M, tiles_e, tile.group_rows)
        local = starts.shape[0] - 1
        return Bundle(
            Rows(
                source_N=torch.where(used_N & (source_N >= 0), source_N, remote_N).int(),
                return_N=plan.row_return_N,
                weight_N=routed.weight_N,
                start_e1=starts,
                rows_e=plan.counts_RE[:, self.rank * local : (self.rank + 1) * local].sum(0).int(),
                expert_M=expert_M.int(),
                order_M=torch.arange(num_tiles, dtype=torch.int32, device=device),
                group_M=group_M,
                order_group_M=group_M,
                # For kernels that gather, count or send: not used here.
                backward_order_M=None,
                progress_M=None,
                cursor=None,
                send_token_RT=None,
                send_count_R=None,
                totals=torch.tensor([plan.num_rows, num_tiles], dtype=torch.int32, device=device),
            )
        )

    def _expand(self, tokens: Tokens, rows: Any, tile: Tile) -> Tensor:
        """(N, D): every row's input."""
        out_ND = tokens.local.new_empty(rows.fields.source_N.shape[0], self.cfg.hidden)
        self.launch.launch_expand(tokens, rows, self.alone, tile.rows, self.sms, out_ND)
        return out_ND

    def forward(
        self, tokens: Tokens, routed: Routed, experts: ExpertWeights, save: bool
    ) -> tuple[Tensor, Tensor | None]:
        cfg, way, x_TD, num_rows = self.cfg, self.way, tokens.local, routed.plan.num_rows
        h_2NF = x_TD.new_empty(1 + cfg.gated, num_rows, cfg.ffn) if save else None
        act_NF = x_TD.new_empty(num_rows, cfg.ffn)
        out_ND = x_TD.new_empty(num_rows, cfg.hidden)
        if num_rows:  # a descriptor needs memory
            experts, rows = _stacked(experts), self._rows(routed, way.gate_up)
            x_ND = self._expand(tokens, rows, way.gate_up)
            self.launch.launch_gate_up(
                tokens, x_ND, rows, experts, self.alone, cfg, way.gate_up, self.sms, h_2NF, act_NF
            )
            run_own(way, "gate_up", act_NF, routed.plan)
            rows = self._rows(routed, way.down)
            self.launch.launch_down(
                act_NF, rows, experts, self.alone, cfg, way.down, self.sms, out_ND, slots=1, scatter=False
            )
            run_own(way, "down", out_ND, routed.plan)
        return out_ND, h_2NF.view(num_rows, cfg.h_columns) if h_2NF is not None else None

    def backward(
        self, dy: Tokens, x: Tokens, routed: Routed, experts: ExpertWeights, h_NF: Tensor | None, needs: Needs,
        main_grads: MainGrads | None = None, blocks: int = 1,
    ) -> RowGradients:  # fmt: skip
        cfg, tile, plan, dy_TD = self.cfg, self.way.down, routed.plan, dy.local
        num_rows = plan.num_rows
        dx_ND = dy_TD.new_empty(num_rows, cfg.hidden)
        weights_N = torch.empty(num_rows, dtype=torch.float32, device=dy_TD.device)
        if main_grads is None:
            fresh = experts.like(fill=num_rows == 0)
            into = MainGrads(fresh.w13, fresh.w2, accumulate=False)
        else:
            into = main_grads
            if not num_rows:
                into.clear()
        biases = tuple(torch.zeros_like(b) for b in experts.biases) if needs.biases and not into.biases else ()
        if num_rows:
            rows, stacked = self._rows(routed, tile), _stacked(experts)
            dy_ND = self._expand(dy, rows, tile)
            dy_N = _row_addresses(dy_ND)
            x_ND = None
            if h_NF is None:
                h_NF, x_ND = dy_TD.new_empty(num_rows, cfg.h_columns), self._expand(x, rows, tile)
            h_2NF = h_NF.view(1 + cfg.gated, num_rows, cfg.ffn)
            if x_ND is not None:
                first, of_first = self.way.gate_up, self._rows(routed, self.way.gate_up)
                self.launch.launch_gate_up(
                    x, x_ND, of_first, stacked, self.alone, cfg, first, self.sms, h_2NF, None
                )  # fmt: skip
            made = self.operands.activation_memory(h_2NF, experts.b2)
            self.launch.launch_down_gradient(dy_ND, rows, stacked, self.alone, tile, self.sms, made.raw_NF)
            run_own(self.way, "down_grad", made.raw_NF, plan)
            self.launch.launch_activation_gradient(made, rows, cfg, self.sms)
            dh_NH = made.dh_N2F.view(num_rows, -1)
            if needs.weights:
                weights_N = self._dweights(made, dy_N, plan, rows)
            of_blocks = self._blocks(rows, routed, blocks)
            if needs.biases:
                of = rows.fields
                self.launch.launch_bias_gradients(
                    dh_NH, dy_N, routed.weight_N, of.start_e1 if of_blocks is None else of_blocks.begin_S,
                    of.rows_e if of_blocks is None else of_blocks.rows_S, experts, into.biases or biases, self._zero,
                    self.sms, blocks, apart=into.apart,
                )  # fmt: skip
            if needs.x:
                self.launch.launch_gate_up_gradient(
                    dh_NH, rows, stacked, self.alone, cfg, tile, self.sms, dx_ND, slots=1, scatter=False
                )
                run_own(self.way, "gate_up_grad", dx_ND, plan)
            how = {"rows": rows, "blocks": of_blocks, "into": into}
            if needs.w2:
                self._weight_gradients(dy_ND, made.act_NF, 0, into.w2, transposed=False, **how)
            if needs.w13:
                x_ND = self._expand(x, rows, tile) if x_ND is None else x_ND
                halves = [(out,) for out in into.w13] if experts.layout == "split" else [into.w13]
                for half, out in enumerate(halves):
                    self._weight_gradients(x_ND, dh_NH, half * cfg.ffn, out, transposed=True, **how)
        return RowGradients(
            dx_ND if needs.x else None,
            weights_N if needs.weights else None,
            into.w13 if needs.w13 and main_grads is None else None,
            into.w2 if needs.w2 and main_grads is None else None,
            biases,
        )

    def _dweights(self, made: Activation, dy_N: Tensor, plan: RoutingPlan, rows: Any) -> Tensor:
        """d(weight) by row.  The kernel sorts them by source rank and slot, here into one array for all ranks."""
        num_ranks, slots = plan.counts_RE.shape[0], self.cfg.max_tokens_per_rank * self.cfg.top_k
        found = made.groups_NG.new_empty(num_ranks * slots)
        table = found.data_ptr() + torch.arange(num_ranks, device=found.device) * (slots * found.element_size())
        alone = self._alone(dweights_table=table)
        self.launch.launch_dweights(made, dy_N, rows, alone, self.cfg, self.way.down, self.sms)
        return found[plan.row_return_N.clamp(min=0)]

    def _blocks(self, rows: Any, routed: Routed, blocks: int) -> RowBlocks | None:
        """None: all rows are one."""
        if blocks == 1:
            return None
        of, plan = rows.fields, routed.plan
        first, depth = self.rank * of.rows_e.shape[0], self.way.weight_gradient.depth
        counts_Re = plan.counts_RE[:, first : first + of.rows_e.shape[0]]
        return row_blocks(counts_Re, of.start_e1, of.rows_e, plan.num_rows, blocks, depth)

    def _weight_gradients(
        self, a_NH: Tensor, b_NW: Tensor, first_column: int, out: tuple[Tensor, ...], *, rows: Any,
        blocks: RowBlocks | None, into: MainGrads, transposed: bool,
    ) -> None:  # fmt: skip
        """out: one tensor for all experts, or one per expert; see `launch_weight_gradient`."""
        tile, of, local = self.way.weight_gradient, rows.fields, rows.fields.rows_e.shape[0]
        width = (a_NH if transposed else b_NW).shape[1]
        per = local // len(out)  # experts of a tensor
        how = {"transposed": transposed, "accumulate": into.accumulate}
        address_P = None if blocks is None else blocks.addresses_of(a_NH)
        for number, dw in enumerate(out):
            first, last = number * per, (number + 1) * per
            dw_eHW = dw.view(per * (len(dw) if into.apart else 1), -1, width)
            if blocks is None or address_P is None:
                start, count = of.start_e1[first : last + 1], of.rows_e[first:last]
                if first > 0:  # clones are aligned
                    start, count = start.clone(), count.clone()
                self.launch.launch_weight_gradient(
                    a_NH, b_NW, first_column, dw_eHW, start, count, self._zero, tile, self.sms, **how
                )
            else:
                self.launch.launch_block_gradient(
                    address_P, b_NW, first_column, dw_eHW, blocks.of_experts(first, last), self._zero, tile, self.sms,
                    apart=into.apart, **how,
                )  # fmt: skip

    def add_parts(self, rows_ND: Tensor, row_PK: Tensor, weight_N: Tensor | None) -> Tensor:
        from uniep.launch.groups import GroupSums, launch_group_sum

        num_parts, device = len(row_PK), rows_ND.device
        out_PD = rows_ND.new_empty(num_parts, rows_ND.shape[1])
        if num_parts:
            here = torch.full((1,), out_PD.data_ptr(), dtype=torch.int64, device=device)
            number_PK = torch.arange(num_parts, dtype=torch.int32, device=device)[:, None].expand(row_PK.shape)
            sums = GroupSums(rows_ND, weight_N, row_PK.int(), number_PK.contiguous(), num_parts, one_group=True)
            launch_group_sum(sums, self._alone(returns_table=here), self.sms, signal=False)
        return out_PD

    def combine(self, returns_TKD: Tensor, ids_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
        out_TD = torch.empty_like(returns_TKD[:, 0], memory_format=torch.contiguous_format)
        sums, programs = Sums(returns_TKD, ids_TK, weights_TK, out_TD), self.sms * self.way.sum_programs
        self.launch.launch_combine(sums, self.alone, programs, self.way.sum_warps)
        return out_TD


def _row_addresses(rows_ND: Tensor) -> Tensor:
    """(N,) int64."""
    step = rows_ND.shape[1] * rows_ND.element_size()
    return rows_ND.data_ptr() + torch.arange(rows_ND.shape[0], device=rows_ND.device) * step


def _stacked(experts: ExpertWeights) -> ExpertWeights:
    """The kernels walk one tensor; lists are copied into one, and what they cannot read is copied, per call."""
    from uniep.launch.operands import in_reach

    w13, w2 = experts.w13, experts.w2
    layout = experts.layout
    if layout == "list":
        w13, layout = (torch.stack(w13),), "stacked"
    if w2[0].dim() == 2:
        w2 = (torch.stack(w2),)
    alike = len({t.stride() for t in w13}) == 1  # one tensor map reads w1 and w3
    dense = lambda ts: tuple(t if t.stride(-1) == 1 and alike else t.contiguous() for t in ts)  # noqa: E731
    return in_reach(dataclasses.replace(experts, w13=dense(w13), w2=dense(w2), layout=layout))
