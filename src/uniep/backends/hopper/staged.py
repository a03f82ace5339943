"""What stages launch on a Hopper GPU: a method for each, and the memory that they hand on.  Their order is in
`uniep.stages`.  The serial way has every stage wait for the one before; it is the oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from uniep.backends.base import ExpertGradients, Inputs, LayerTag, MainGrads, Needs
from uniep.backends.hopper.link import Link
from uniep.config import ROW_ALIGN
from uniep.kernels.arguments import ALL_HERE, Activation, Addresses, Dispatch, LowRank, RowPart, Sums, Tokens
from uniep.launch.driver import fill, release, result, result_like, temporary, tensor, unbind
from uniep.layout import padded_rank
from uniep.routing import RowBlocks, row_blocks
from uniep.row_operator import PLACES
from uniep.stages import Direction, Flags, Stage, stages

if TYPE_CHECKING:
    from uniep.backends.hopper.planner import DevicePlan
    from uniep.launch.driver import Memory
    from uniep.schedule import Tile


class _Call:
    """A call under way.  sent: tokens that travel to the ranks of their experts."""

    direction: Direction
    planned: DevicePlan
    act_NF: Tensor
    through: Activation

    def __init__(self, link: Link, inputs: Inputs, sent_TD: Tensor) -> None:
        self.link, self.inputs, self.sent = link, inputs, Tokens(sent_TD, link.arena.views["receive"])
        self.results_ND, self.out_TD = link.arena.views["receive"], sent_TD
        self.peers = link.peers()
        self.low: dict[str, LowRank] = {}  # of products, by the weight they multiply by

    def run(self, flags: Flags) -> None:
        link = self.link
        link.walk(stages(link.cfg, link.way, self.direction, flags._replace(wire=not link.stay_local)), self)

    def send(self, stage: Stage) -> None:
        """In a forward to one peer, which keeps the wire busy until the plan is launched."""
        self.link.send(self.sent.local, last=2 if self.direction == "forward" else None)

    def send_others(self, stage: Stage) -> None:
        self.link.send(self.sent.local, first=2)

    def dispatch(self, stage: Stage) -> None:
        self.link.dispatch(self.sent.local, self.planned)

    def return_rows(self, stage: Stage, product: Callable[..., None], a: Tensor, **how: Any) -> None:
        """a @ B (N, D) by `product`, delivered into the return slots of the rows' source ranks, or into `results` where
        groups of rows are to be added first, or rows are pushed later."""
        self._make_results(stage)
        link, scatter = self.link, self.link.way.returns == "epilogue"
        product(
            a, self.planned.bundle, self.inputs.experts, self.peers, link.cfg, link.way.down, stage.sms,
            self.results_ND, slots=link.slots, scatter=scatter, **how,
        )  # fmt: skip

    def shrink(
        self, stage: Stage, weight: Literal["w13", "w2"], rows_NX: Tensor | None, *, up: bool, wait: bool = False,
        save: bool = False,
    ) -> Tensor:  # fmt: skip
        """(N, R): rows times a factor beside `weight` and the scale, A if up, else B.  rows_NX: None: of what is sent,
        gathered.  wait: for that.  save: a backward will use it."""
        from uniep.launch.staged import launch_shrink

        link, lora = self.link, self.inputs.experts.lora
        assert lora is not None
        a, b = getattr(lora, weight)
        make = result if save else temporary
        shape = self.planned.num_rows, padded_rank(a.shape[1])
        low_NR = make(*shape, dtype=link.cfg.dtype, device=link.device)
        dispatch, rows = link.dispatching() if wait else ALL_HERE, self.planned.rows
        order = rows.order_M if up else rows.backward_order_M
        launch_shrink(
            self.sent, rows_NX, self.planned.bundle, order, a if up else b, lora.scale, self.peers,
            link.way.gate_up.rows, stage.sms, low_NR, dispatch, transposed=up,
        )  # fmt: skip
        self.low[weight] = LowRank(low_NR, b if up else a)
        return low_NR

    def _make_results(self, stage: Stage) -> None:
        """With a scatter any memory as wide serves."""
        link = self.link
        if "results" in dict(stage.buffers):
            shape = self.planned.num_rows, link.cfg.hidden
            self.results_ND = temporary(*shape, dtype=link.cfg.dtype, device=link.device)

    def own(self, stage: Stage) -> None:
        """An operator of one's own."""
        from uniep.launch.staged import launch_row_operator

        op = stage.own
        assert op is not None
        rows_NX = self.through.raw_NF if op.after == "down_grad" else getattr(self, PLACES[op.after].memory)
        if op.body is not None:
            launch_row_operator(op.body, rows_NX, self.planned.bundle, stage.sms)
        else:
            op.apply(rows_NX, self.valid)

    @functools.cached_property
    def valid(self) -> Tensor:
        """(N,) bool: which rows belong to a token, of all that are allocated: none where not all fit."""
        return_N, totals = tensor(self.planned.rows.return_N), tensor(self.planned.rows.totals)
        return (return_N >= 0) & (torch.arange(len(return_N), device=return_N.device) < totals[0])

    def push_rows(self, stage: Stage) -> None:
        from uniep.launch.staged import launch_push_rows

        way = self.link.way
        programs = stage.sms * way.pass_programs
        launch_push_rows(
            self.results_ND, self.planned.bundle, self.peers, self.link.slots, programs, way.pass_warps
        )  # fmt: skip

    def sum_groups(self, stage: Stage, *, weighted: bool) -> None:
        """What combine groups add, behind the product, or beside it as its tiles are done.  weighted: rows by their
        routing weight."""
        from uniep.launch import groups as launch

        link, rows, tile, beside = self.link, self.planned.rows, self.link.way.down, len(stage.operators) > 1
        lines = self.planned.lines
        assert lines is not None
        if beside:
            self._make_results(stage)
            order_M, group_M = unbind(temporary(2, *rows.order_M.shape, dtype=torch.int32, device=link.device))
            launch.launch_return_order(self.planned.counts_RE, rows, link.rank, tile, order_M, group_M)
            launch.launch_counted_down(
                self.act_NF, self.planned.bundle, order_M, group_M, self.inputs.experts, link.cfg, tile, stage.sms,
                self.results_ND,
            )  # fmt: skip
        weight_N = rows.weight_N if weighted else None
        one_group = link.cfg.combine_groups == link.num_ranks
        sums = launch.GroupSums(
            self.results_ND, weight_N, lines.row_LK, lines.slot_LK, lines.used_TW.numel(), one_group
        )
        if beside:
            launch.launch_claimed_sum(sums, rows, lines, self.peers, tile, stage.sms)
        else:
            launch.launch_group_sum(sums, self.peers, stage.sms, signal=True)

    def sum_slots(self, stage: Stage, weights_TK: Tensor | None) -> None:
        """The fixed-order sum of what has returned: rows by slot, or, with combine groups, sums that are weighted."""
        from uniep.launch.staged import launch_combine

        ids_TK = self.inputs.ids_TK
        if self.planned.lines is not None:
            ids_TK, weights_TK = self.planned.lines.used_TW[: self.out_TD.shape[0]], None
        self.link.planner.wait("returned", exposed=stage.stream == "call")
        way, sums = self.link.way, Sums(self.link.arena.views["returns"], ids_TK, weights_TK, self.out_TD)
        launch_combine(sums, self.peers, stage.sms * way.sum_programs, way.sum_warps)


class Forward(_Call):
    """One try: rows may not fit what is allocated for them (`Planner.fits`)."""

    direction = "forward"

    def __init__(self, link: Link, inputs: Inputs, save: bool) -> None:
        super().__init__(link, inputs, inputs.x_TD)
        self.save = save
        self.output_weights = inputs.weights_TK if link.cfg.weight_at == "output" else None
        self.like: dict[str, Any] = {"dtype": link.cfg.dtype, "device": link.device}
        self.h_2NF: Tensor | None = None  # unless a backward recomputes it
        self.x_ND: Tensor | None = None
        self.kept: Tensor | None = None  # received tokens, or, expanded, every row's input
        self.u13_NR: Tensor | None = None

    def made(self) -> tuple[Tensor, list[Tensor]]:
        self.run(Flags(save=self.save))
        if not self.save:
            return self.out_TD, []
        cfg, h_2NF = self.link.cfg, self.h_2NF
        if h_2NF is None:
            h_2NF = result(1 + cfg.gated, 0, cfg.ffn, **self.like)
        assert self.kept is not None
        u13 = [] if self.u13_NR is None else [self.u13_NR]
        return self.out_TD, [*self.planned.saved(), *u13, h_2NF, self.kept]

    def enter(self, stage: Stage) -> None:
        inputs, operation = self.inputs, "forward" if self.save else "forward without gradients"
        self.link.publish(inputs.x_TD)
        enter = self.link.planner.enter_new
        self.planned = enter(inputs.ids_TK, inputs.weights_TK, operation, inputs.layer, self.link.copying)

    def plan(self, stage: Stage) -> None:
        link, way, tokens = self.link, self.link.way, self.out_TD.shape[0]
        how = link.copying, way.sends_by_expert, way.leads_in_turn
        link.planner.make(self.planned, tokens, way.leads, way.waves, *how)

    def expand(self, stage: Stage) -> None:
        """(N, D): every row's input, contiguous; fused: this rank's tokens are pushed meanwhile."""
        from uniep.launch.staged import launch_expand

        link, rows = self.link, self.planned.bundle
        self.make_h()
        self.kept = self.x_ND = result(self.planned.num_rows, link.cfg.hidden, **self.like)
        dispatch = Dispatch(link.fused, 2 * link.way.push_programs if link.fused else 0)
        launch_expand(self.sent, rows, self.peers, link.way.gate_up.rows, stage.sms, self.x_ND, dispatch)

    def gate_up_shrink(self, stage: Stage) -> None:
        self.u13_NR = self.shrink(stage, "w13", self.x_ND, up=True, wait=self.x_ND is None, save=self.save)

    def down_shrink(self, stage: Stage) -> None:
        self.shrink(stage, "w2", self.act_NF, up=True)

    def make_h(self) -> None:
        cfg, rows = self.link.cfg, self.planned.num_rows
        self.act_NF = temporary(rows, cfg.ffn, **self.like)
        if self.save and not self.link.way.recomputes:
            self.h_2NF = result(1 + cfg.gated, rows, cfg.ffn, **self.like)

    def gate_up(self, stage: Stage) -> None:
        from uniep.launch.staged import launch_gate_up

        link, way = self.link, self.link.way
        is_first = stage.part is None or stage.part[0] == 0
        if self.x_ND is None and is_first:
            self.make_h()
        gathers = self.x_ND is None and "w13" not in self.low
        dispatch = ALL_HERE
        if gathers:  # the first part pushes all
            dispatch = link.dispatching(way.push_rounds[0]) if is_first else Dispatch(link.fused)
        counts = way.down_sms > 0 and stage.part is None
        launch_gate_up(
            self.sent, self.x_ND, self.planned.bundle, self.inputs.experts, self.peers, link.cfg, way.gate_up,
            stage.sms, self.h_2NF, self.act_NF,
            dispatch._replace(count_tiles=counts, part=self.part_of(stage)), low=self.low.get("w13"),
        )  # fmt: skip

    def part_of(self, stage: Stage) -> RowPart | None:
        """Of gate_up's row tiles, if there are parts."""
        return stage.part and RowPart(*stage.part)

    def keep(self, stage: Stage) -> None:
        self.kept = self.link.keep(self.out_TD.shape[0])

    def down(self, stage: Stage) -> None:
        """Beside gate_up, in two launches that share a cursor: one until that is done, then both; or a launch for each
        part of gate_up, beside the next part, the last one behind it."""
        from uniep.launch.staged import Beside, launch_down

        way, beside, each = self.link.way, None, self.link.way.down.programs_per_sm
        if stage.shares_cursor:
            beside = Beside(way.sms * each, -(-self.link.cfg.ffn // (way.gate_up.columns // 2)))
        elif stage.part:
            beside = Beside((way.sms + (way.gate_up_parts - 1) * way.down_sms) * each, part=self.part_of(stage))
        self.return_rows(stage, launch_down, self.act_NF, beside=beside, low=self.low.get("w2"))

    def group_sum(self, stage: Stage) -> None:
        self.sum_groups(stage, weighted=self.output_weights is not None)

    def combine(self, stage: Stage) -> None:
        self.out_TD = result_like(self.sent.local)
        self.sum_slots(stage, self.output_weights)


class Backward(_Call):
    direction = "backward"

    def __init__(
        self, link: Link, dy_TD: Tensor, inputs: Inputs, saved: list[Tensor], needs: Needs,
        main_grads: MainGrads | None, blocks: int,
    ) -> None:  # fmt: skip
        super().__init__(link, inputs, dy_TD)
        self.needs, self.main_grads, self.num_blocks = needs, main_grads, blocks
        self.accumulate = main_grads is not None and main_grads.accumulate
        *of_plan, self.h_2NF, kept = saved
        if "w13" in link.way.lora:
            *of_plan, self.u13_NR = of_plan
        self.planned = link.planner.restore(dy_TD.shape[0], of_plan)
        self.x = Tokens(inputs.x_TD, self.sent.received[:-1] if link.way.again else kept)
        self.dw13: tuple[Tensor, ...] | None = None
        self.dw2: tuple[Tensor, ...] | None = None
        self.dweights_TK: Tensor | None = None
        self.biases: tuple[Tensor, ...] = ()
        self.progress_M: Memory | None = None
        self.cursor: Memory | None = None

    def made(self) -> ExpertGradients:
        needs = self.needs
        self.run(Flags(**vars(needs), main_grad=self.main_grads is not None, blocks=self.num_blocks))
        dx_TD = self.out_TD if needs.x else None
        return ExpertGradients(dx_TD, self.dweights_TK, self.dw13, self.dw2, self.biases)

    def enter(self, stage: Stage) -> None:
        from uniep.launch.staged import launch_row_addresses

        link, num_rows = self.link, self.planned.num_rows
        address_2N = temporary(2, num_rows + 2 * ROW_ALIGN, dtype=torch.int64, device=link.device)
        self.addresses = Addresses(*unbind(address_2N))
        claims = None
        if link.way.gradient_beside:
            tiles = -(-self.planned.rows.expert_M.shape[0] // 4) * 4
            claims = temporary(2, tiles, dtype=torch.int32, device=link.device)
            self.progress_M, self.cursor = unbind(claims)
        self._enter_planned("backward", self.sent.local)
        if claims is not None:
            fill(claims, 0)
        if "row_addresses_kernel" in stage.kernels:
            launch_row_addresses(self.x, self.sent, self.planned.bundle, link.num_ranks, link.sms, self.addresses)
        link.planner.wait_entered(link.copying)

    def _enter_planned(self, operation: str, sent_TD: Tensor) -> None:
        """Enter a call that knows its plan."""
        self.link.publish(sent_TD)
        layer = LayerTag(self.inputs.layer.number)
        self.link.planner.enter(None, None, sent_TD.shape[0], operation, layer, self.planned.forward)

    def down_grad_shrink(self, stage: Stage) -> None:
        self.v2_NR = self.shrink(stage, "w2", None, up=False, wait=True)

    def recompute(self, stage: Stage) -> None:
        """h, of the tokens that the forward kept or `dispatch_again` has brought, and of u13, which it kept."""
        from uniep.launch.staged import launch_gate_up

        link, cfg, rows = self.link, self.link.cfg, self.planned.num_rows
        like: dict[str, Any] = {"dtype": cfg.dtype, "device": link.device}
        self.h_2NF = temporary(1 + cfg.gated, rows, cfg.ffn, briefly=not link.way.mega, **like)
        x_N = self.x.received if link.way.expanded else self.addresses.x_N
        lora = self.inputs.experts.lora
        low = LowRank(self.u13_NR, lora.w13[1]) if lora is not None and lora.w13 is not None else None
        launch_gate_up(
            self.x, x_N, self.planned.bundle, self.inputs.experts, self.peers, cfg, link.way.gate_up, stage.sms,
            self.h_2NF, None, low=low,
        )  # fmt: skip

    def down_grad(self, stage: Stage) -> None:
        """dO back through W2."""
        from uniep.launch.operands import activation_memory
        from uniep.launch.staged import launch_gathered_down_gradient

        link, experts = self.link, self.inputs.experts
        dispatch = ALL_HERE if "w2" in self.low else link.dispatching(link.way.push_rounds[1])
        self.through = activation_memory(self.h_2NF, experts.b2)
        del self.h_2NF  # through has it, until it is released
        launch_gathered_down_gradient(
            self.sent, self.planned.bundle, experts, self.peers, link.way.down, stage.sms, self.through.raw_NF,
            dispatch, self.progress_M, self.low.get("w2"),
        )  # fmt: skip

    def activation_gradient(self, stage: Stage) -> None:
        """Behind its product, or beside it as its tiles are done."""
        from uniep.launch import staged as launch

        cfg, tile, rows = self.link.cfg, self.link.way.down, self.planned.bundle
        if self.progress_M is not None and self.cursor is not None:
            launch.launch_claimed_activation_gradient(
                self.through, rows, self.peers, cfg, tile, stage.sms, self.progress_M, self.cursor
            )
        else:
            launch.launch_activation_gradient(self.through, rows, cfg, stage.sms)
        self.through = self.through._replace(raw_NF=None, gate_NF=None, up_NF=None)
        release()

    def dweight(self, stage: Stage) -> None:
        from uniep.launch.staged import launch_dweights

        tile, dy_N = self.link.way.down, self.addresses.dy_N
        launch_dweights(self.through, dy_N, self.planned.bundle, self.peers, self.link.cfg, tile, stage.sms)
        self.make_sums()  # on this stream, for another

    @property
    def dh(self) -> Tensor:
        """(N, 2F or F)."""
        return self.through.dh_N2F.view(-1, self.link.cfg.h_columns)

    def gate_up_grad_shrink(self, stage: Stage) -> None:
        self.v13_NR = self.shrink(stage, "w13", self.dh, up=False)

    def gate_up_grad(self, stage: Stage) -> None:
        """Results travel, as d(weight) did, whether this rank needs its own or not: its peers may."""
        from uniep.launch.staged import launch_gate_up_gradient

        self.return_rows(stage, launch_gate_up_gradient, self.dh, low=self.low.get("w13"))

    def make_sums(self) -> None:
        ids_TK = self.inputs.ids_TK
        self.out_TD = result_like(self.sent.local)
        if self.needs.weights:
            self.dweights_TK = result(*ids_TK.shape, dtype=torch.float32, device=self.link.device)

    def group_sum(self, stage: Stage) -> None:
        self.sum_groups(stage, weighted=False)

    def combine(self, stage: Stage) -> None:
        from uniep.launch.staged import launch_used_dweights

        self.sum_slots(stage, None)
        if self.dweights_TK is not None:
            dweights, status = self.link.arena.views["dweights"], self.link.planner.status
            launch_used_dweights(dweights, self.inputs.ids_TK, status, stage.sms, self.dweights_TK)

    def bias_gradient(self, stage: Stage) -> None:
        from uniep.launch.staged import launch_bias_gradients

        memory, rows, blocks = self.gradient_memory, self.planned.rows, self.blocks
        if not memory.biases:
            self.biases = tuple(map(result_like, self.inputs.experts.biases))
        launch_bias_gradients(
            self.dh, self.addresses.dy_N, rows.weight_N, rows.start_e1 if blocks is None else blocks.begin_S,
            rows.rows_e if blocks is None else blocks.rows_S, self.inputs.experts, memory.biases or self.biases,
            self.link.planner.status, stage.sms, self.num_blocks, apart=memory.apart,
        )  # fmt: skip

    @functools.cached_property
    def gradient_memory(self) -> MainGrads:
        """Of the gradients of experts, where they are needed: what was given, or new."""
        if self.main_grads is not None:
            return self.main_grads
        (first, second), needs = self.inputs.experts.trained, self.needs
        self.dw13 = tuple(map(result_like, first)) if needs.w13 else None
        self.dw2 = tuple(map(result_like, second)) if needs.w2 else None
        return MainGrads(self.dw13 or (), self.dw2 or (), accumulate=False)

    @functools.cached_property
    def blocks(self) -> RowBlocks | None:
        """Of source ranks; None: all rows are one."""
        link, rows = self.link, self.planned.rows
        if self.num_blocks == 1:
            return None
        first, last = (rank * link.planner.local for rank in (link.rank, link.rank + 1))
        counts_Re = tensor(self.planned.counts_RE)[:, first:last]
        depth = max(link.way.weight_gradient.depth, 64)  # 64: of the gradients of factors
        return row_blocks(
            counts_Re, tensor(rows.start_e1), tensor(rows.rows_e), self.planned.num_rows, self.num_blocks, depth
        )

    def down_wgrad(self, stage: Stage) -> None:
        act_NF, dy_N, into = self.through.act_NF, self.addresses.dy_N, self.gradient_memory.w2
        if self.link.way.lora:
            u2_NR = self.shrink(stage, "w2", act_NF, up=True)
            self._factor_gradients(stage, act_NF, self.v2_NR, dy_N, u2_NR, into)
        else:
            tile, (dw,) = self.link.way.weight_gradient, into
            self._weight_gradient(stage, dy_N, act_NF, 0, dw.view(-1, *dw.shape[-2:]), tile, transposed=False)

    def dispatch_again(self, stage: Stage) -> None:
        """All tokens, once more: when nobody reads dO any more, or before it comes, and then kept."""
        link, receive_MD = self.link, self.sent.received
        self._enter_planned("dispatch", self.x.local)
        link.planner.wait_entered(link.copying)
        if link.copying:
            link.send(self.x.local)
        link.dispatch(self.x.local, self.planned)
        if link.way.recomputes:
            kept = temporary(len(receive_MD) - 1, link.cfg.hidden, dtype=link.cfg.dtype, device=link.device)
            link.copy_received(kept, torch.cuda.current_stream(link.device))
            self.x = Tokens(self.x.local, kept)
            link.join()  # flags that copies carry are the number of this call, and the next entry changes it

    def gate_up_wgrad(self, stage: Stage) -> None:
        link, way = self.link, self.link.way
        given, into = self.x.received if way.expanded else self.addresses.x_N, self.gradient_memory.w13
        if way.lora:
            self._factor_gradients(stage, given, self.v13_NR, self.dh, self.u13_NR, into)
            return
        for part, dw in enumerate(into):  # w1 and w3, or both in one
            columns = link.cfg.h_columns // len(into)
            dw_eHD = dw.view(-1, columns, link.cfg.hidden)
            self._weight_gradient(
                stage, given, self.dh, part * columns, dw_eHD, way.weight_gradient, transposed=True
            )  # fmt: skip

    def _factor_gradients(
        self, stage: Stage, given: Memory, v_NR: Tensor, d_out: Memory, u_NR: Tensor, into: tuple[Tensor, ...]
    ) -> None:
        """dA (e, r, X), dB (e, Y, r) of out (N, Y) = given (N, X) @ (W + scale B A)^T: v^T given, d_out^T u.

        v: scale * (d_out @ B).  u: scale * (given @ A^T).
        """
        from uniep.launch.staged import factor_tile

        for a, b_NR, dw, transposed in ((given, v_NR, into[0], True), (d_out, u_NR, into[1], False)):
            dw_eHW = dw.view(-1, *dw.shape[-2:])
            self._weight_gradient(stage, a, b_NR, 0, dw_eHW, factor_tile(b_NR.shape[1]), transposed=transposed)

    def _weight_gradient(
        self, stage: Stage, a_N: Memory, b_NX: Tensor, column: int, dw: Tensor, tile: Tile, *, transposed: bool
    ) -> None:
        from uniep.launch.staged import launch_block_gradient, launch_weight_gradient

        memory, rows, status = self.gradient_memory, self.planned.rows, self.link.planner.status
        if self.blocks is None:
            launch_weight_gradient(
                a_N, b_NX, column, dw, rows.start_e1, rows.rows_e, status, tile, stage.sms, transposed=transposed,
                accumulate=memory.accumulate,
            )  # fmt: skip
        else:
            launch_block_gradient(
                self.blocks.addresses_of(tensor(a_N)), b_NX, column, dw, self.blocks, status, tile, stage.sms,
                transposed=transposed, accumulate=memory.accumulate, apart=memory.apart,
            )  # fmt: skip
