"""The Hopper backend: Triton kernels over torch symmetric memory, one node, peer access over NVLink.

One call: plan (ids exchanged by one-sided stores); gate_up, whose tiles wait for their tokens, which copy engines or
its own first programs send; the down product, whose epilogue stores each row into its slot at the source rank (with
combine groups rows stay, and their sums travel), after gate_up or beside it; the fixed-order sum.  The serial schedule
runs the same tile bodies with every stage waiting for the one before; it is the oracle.  docs/kernels.md has the whole
picture.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import SymInt, Tensor

from uniep.backends.base import MAIN_GRAD, ExpertGradients, Inputs, LayerTag, MainGrads, Needs, aligned
from uniep.backends.hopper import mega as hopper_mega
from uniep.backends.hopper.arena import WAY_OUT, Arena
from uniep.config import COLUMN_GROUP, ROW_ALIGN, MoEConfig
from uniep.dimension import GPU, MEASURED
from uniep.errors import ClosedError, UniEPError, UnsupportedError
from uniep.launch.driver import copy, unbind
from uniep.layout import hopper_arrays, kept_shape, pack
from uniep.limits import group_limit, why_not
from uniep.memory import plan_memory
from uniep.routing import RoutingPlan
from uniep.routing.plan import recv_base
from uniep.schedule import Schedule, refuse_invalid
from uniep.way import Way, Ways
from uniep.weights import ExpertWeights

if TYPE_CHECKING:
    from uniep.backends.hopper.planner import DevicePlan
    from uniep.launch.groups import Lines, Sums
    from uniep.launch.staged import Peers
    from uniep.membership import Membership
    from uniep.taskflow.trace import Span

_T = TypeVar("_T")


def _collective(method: Callable[..., _T]) -> Callable[..., _T]:
    """A call: threads take turns, on the Workspace's device, behind the call before, whichever stream that was on.

    What it starts on other streams is joined at its end, after an exception, too: memory goes back to the allocator.
    An exception inside ends the call on all ranks.
    """

    @functools.wraps(method)
    def call(self: HopperBackend, *args: Any, **kwargs: Any) -> _T:
        elsewhere = self.device.type == "cuda" and torch.cuda.current_device() != self.device.index
        order, planner = self._order, self.planner
        with order.turn, torch.cuda.device(self.device) if elsewhere else contextlib.nullcontext():
            if self.arena is None:
                raise ClosedError(f"this Workspace is closed ({planner.member.cause}); make a new one")
            current = torch.cuda.current_stream(self.device)
            order.begin(current)
            if current != self._stream:
                for memory in self._lasting:
                    memory.record_stream(current)
                self._stream = current
            try:
                result = method(self, *args, **kwargs)
                planner.is_inside = False
                return result
            except BaseException as cause:
                planner.give_up(cause)
                raise
            finally:
                self._join()
                order.end(current)

    return call


class HopperBackend:
    """See the module docstring.  schedule None: `default_schedule`.

    ways: of calls, by the tokens of this rank.  way: of the call under way, or of the last one.

    trace: with overlap="mega", set to a list to have `Span`s appended; calls then wait for the GPU, and a backward is
    taken for that of the last forward.  Times count from when all ranks had entered that forward (traced_from, by this
    GPU's clock: those of other GPUs differ); its ids are traced_ids.
    """

    name = "hopper"

    def __init__(self, member: Membership, schedule: Schedule | None) -> None:
        cfg, device = member.cfg, member.device
        _check_support(cfg, member.ep_size, device)
        from uniep.backends.hopper.planner import Planner  # needs Triton, whose absence has its message above

        self.cfg, self.device = cfg, device
        self.rank, self.num_ranks = member.rank, member.ep_size
        measured = MEASURED._replace(sms=torch.cuda.get_device_properties(device).multi_processor_count)
        self.ways = Ways(cfg, self.num_ranks, schedule, GPU, measured)
        self.schedule = self.ways.schedule
        refuse_invalid(self.schedule, cfg, self.num_ranks, GPU, measured)
        self.way = self.ways[cfg.max_tokens_per_rank]
        self.slots = cfg.max_tokens_per_rank * cfg.top_k
        layout = pack(hopper_arrays(cfg, self.num_ranks, self.way))
        describe = functools.partial(plan_memory, cfg, self.num_ranks, schedule=self.schedule)
        self.arena = Arena(layout, member, describe)
        self.sms = self.way.sms
        self.planner = Planner(member, self.arena, self.way.gate_up.rows, self.sms)
        self.push_ticket, self.return_ticket = torch.zeros(2, 4, dtype=torch.int32, device=device).unbind()
        self._lasting = [  # memory of the stream that is current now
            self.arena.memories[self.rank], *self.arena.tables.values(), self.planner.call, self.planner.ticket,
            self.planner.status, self.push_ticket, self.return_ticket,
        ]  # fmt: skip
        self.side, self.copies = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._stream = torch.cuda.current_stream(device)  # of the last call
        self._forked: set[torch.cuda.Stream] = set()
        self._point = torch.cuda.Event()  # of a stream that another is to wait for
        self._order = self.planner.order
        self.phases: list[tuple[str, torch.cuda.Event]] | None = None
        self.trace: list[Span] | None = None
        self.traced_ids: list[Tensor] = []
        self.traced_from: Tensor | None = None
        self._stay_local = False
        self._known_peers: dict[tuple[bool, int], Peers] = {}

    # ---------------------------------------------------------------- what every backend has

    @_collective
    def route(self, ids_TK: Tensor) -> RoutingPlan:
        weights_TK = torch.zeros(ids_TK.shape, dtype=torch.float32, device=ids_TK.device)
        while True:
            plan = self.planner.plan(ids_TK, weights_TK, operation="route")
            if self.planner.fits():
                return self.planner.routing_plan(plan, ids_TK.shape[0])

    @_collective
    def refuse(self, error: UniEPError) -> None:
        if self.num_ranks > 1:
            self.planner.refuse(type(error)(f"rank {self.rank}: {error}"))

    def check(self) -> None:
        self.planner.check_all()

    def prepare(self) -> None:
        """Compile what calls of this schedule launch, by empty forwards and backwards.  Collective.

        For int64 ids, stacked w13 and all gradients; other calls compile some kernels at their first time.
        """
        cfg, local = self.cfg, self.planner.local
        like: dict[str, Any] = {"dtype": cfg.dtype, "device": self.device}
        w13, w2 = torch.zeros(local, 2 * cfg.ffn, cfg.hidden, **like), torch.zeros(local, cfg.hidden, cfg.ffn, **like)
        x_TD = torch.zeros(0, cfg.hidden, **like)
        ids_TK = torch.zeros(0, cfg.top_k, dtype=torch.int64, device=self.device)
        weights_TK = torch.zeros(ids_TK.shape, dtype=torch.float32, device=self.device)
        inputs = Inputs(x_TD, ids_TK, weights_TK, ExpertWeights((w13,), (w2,), "stacked"))
        with self._order.turn:
            planner = self.planner
            room = planner.allocate, planner.received  # these calls need none
            try:
                for way in self.ways.kinds():
                    self.forward(inputs, save=False, way=way)
                    _, saved = self.forward(inputs, save=True, way=way)
                    self.backward(x_TD, inputs, saved, Needs(), way=way)
            finally:
                planner.allocate, planner.received = room
        torch.cuda.synchronize(self.device)

    def fake_saved(self, num_tokens: int | SymInt, x_TD: Tensor, new_size: Callable[[], SymInt]) -> list[Tensor]:
        exact, way = self.cfg.max_rows is None, self.way
        rows = new_size() if exact else self.planner.capacity
        if way.expanded:
            kept = rows, self.cfg.hidden
        elif exact and self.num_ranks > 1 and not way.again:
            kept = new_size(), self.cfg.hidden
        else:
            kept = self._kept_shape(0)
        h = 2, rows, self.cfg.ffn
        return [*self.planner.fake(num_tokens, rows, x_TD), x_TD.new_empty(h), x_TD.new_empty(kept)]

    def report(self) -> dict[str, str]:
        return {
            "backend": f"hopper: rank {self.rank} of {self.num_ranks} on {torch.cuda.get_device_name(self.device)}",
            "schedule": self.schedule.name
            if self.schedule.mega_to == 0
            else f"{self.schedule.name}; one kernel each way for calls of up to {self.schedule.mega_to} tokens",
            "rows": "allocated by the last call's need, read back beside the GPU's work"
            if self.cfg.max_rows is None
            else f"max_rows={self.cfg.max_rows}, no host read",
            "main_grad": MAIN_GRAD,
            "multiprocessors": f"{self.sms}, {self.schedule.free_sms} left free",
            "combine": "one sum over a token's slots"
            if not self.way.grouped
            else f"sums of {self.cfg.combine_groups} groups, made {self.schedule.group_sum} the down product",
        }

    def close(self) -> None:
        """Drop the arena; its memory is free when all streams that calls came on have gone past them."""
        with self._order.turn:  # after the call that another thread is in
            if self.arena is not None:
                self.planner.leave(self.planner.member.cause)
            self.arena = None  # type: ignore[assignment]
            self._known_peers.clear()
            self._lasting.clear()

    def mark(self, name: str) -> None:
        """A phase boundary for the benchmark; free when nobody listens."""
        if self.phases is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.phases.append((name, event))

    # ---------------------------------------------------------------- forward

    @_collective
    def forward(self, inputs: Inputs, save: bool, way: Way | None = None) -> tuple[Tensor, list[Tensor]]:
        """way: None for that of so many tokens."""
        self.way = way or self.ways[inputs.x_TD.shape[0]]
        try:
            _check_experts(inputs.experts)
        except UniEPError as error:
            self.refuse(error)
            raise
        x_TD, ids_TK, weights_TK = map(aligned, (inputs.x_TD, inputs.ids_TK, inputs.weights_TK))
        inputs = Inputs(x_TD, ids_TK, weights_TK, inputs.experts, inputs.layer)
        while True:
            result = self._forward(inputs, save)
            if self.planner.fits():
                return self._with_all_received(result, x_TD.shape[0]) if save else result
            del result

    def _forward(self, inputs: Inputs, save: bool) -> tuple[Tensor, list[Tensor]]:
        if self.way.mega:
            return hopper_mega.forward(self, inputs, save)
        from uniep.launch import groups as launch_groups
        from uniep.launch import staged as launch

        cfg, device, x_TD, way = self.cfg, self.device, inputs.x_TD, self.way
        num_tokens, receive = x_TD.shape[0], self.arena.views["receive"]
        send_all = functools.partial(self._send_all, x_TD) if self._copying else None
        plan = self.planner.plan(
            inputs.ids_TK, inputs.weights_TK, way.leads, send_all,
            operation="forward" if save else "forward without gradients", layer=inputs.layer,
        )  # fmt: skip
        self.mark("plan")
        rows, num_rows, peers = plan.rows, plan.num_rows, self._peers()
        act_NF = torch.empty(num_rows, cfg.ffn, dtype=cfg.dtype, device=device)
        h_2NF = torch.empty(2, num_rows, cfg.ffn, dtype=cfg.dtype, device=device) if save else None
        self._dispatch(x_TD, plan, peers)
        x_ND = self._expand(x_TD, plan, peers) if way.expanded else None
        down_sms = way.down_sms
        pipelined = down_sms > 0
        results_ND, weighted = self._results(plan), cfg.weight_at == "output"
        if pipelined:
            self._fork(self.side)
        launch.launch_gate_up(
            x_TD, receive, x_ND, rows, inputs.experts, peers, cfg, way.gate_up, self.sms - down_sms, h_2NF, act_NF,
            count_tiles=pipelined, **self._dispatching(way.push_rounds[0], x_ND),
        )  # fmt: skip
        self.mark("gate_up")
        kept = x_ND if x_ND is not None or not save else self._keep(num_tokens)
        if pipelined:
            # On SMs of its own until gate_up is done, then on all.
            tiles_before = -(-cfg.ffn // (way.gate_up.columns // 2))
            beside = launch.Beside(tiles_before, self.sms * way.down.programs_per_sm)
            down = functools.partial(self._return_rows, launch.launch_down, act_NF, plan, peers, inputs.experts)
            with torch.cuda.stream(self.side):
                down(down_sms, results_ND, beside=beside)
            down(self.sms - down_sms, results_ND, beside=beside)
            self._join()
        elif plan.lines is not None and way.returns == "sums beside":
            sums = self._sums(results_ND, plan.lines, plan, weighted=weighted)
            self._down_and_sums(act_NF, plan.lines, plan, peers, inputs.experts, sums)
        else:
            self._return_rows(launch.launch_down, act_NF, plan, peers, inputs.experts, self.sms, results_ND)
        y_TD = torch.empty_like(x_TD)
        if plan.lines is not None and way.returns == "sums after":
            sums = self._sums(results_ND, plan.lines, plan, weighted=weighted)
            launch_groups.launch_group_sum(sums, peers, self.sms, signal=True)
            self.mark("group_sum")
        self.planner.wait("returned")
        self._combine(inputs.ids_TK, inputs.weights_TK if weighted else None, plan, peers, y_TD)
        self._join()
        self.mark("combine")
        return y_TD, ([*plan.saved(), h_2NF, kept] if h_2NF is not None and kept is not None else [])

    def _kept_shape(self, num_tokens: int) -> tuple[int, int]:
        """Of `room_to_keep`."""
        block = self.planner.kept_block(num_tokens, copying=self._copying)
        return kept_shape(self.cfg, self.num_ranks, self.way, block)

    def room_to_keep(self, num_tokens: int) -> Tensor:
        """Memory for received tokens, for the weight gradient: as many of each source as are expected; or none."""
        return torch.empty(self._kept_shape(num_tokens), dtype=self.cfg.dtype, device=self.device)

    def _keep(self, num_tokens: int) -> Tensor:
        """A copy of received tokens for the weight gradient, made beside the GEMM that follows; or nothing."""
        kept = self.room_to_keep(num_tokens)
        if len(kept):
            self._fork(self.copies)
            self._copy_received(kept, self.copies)
        return kept

    def _copy_received(self, kept: Tensor, stream: torch.cuda.Stream) -> None:
        others, slots = self.num_ranks - 1, self.cfg.receive_block
        receive, block = self.arena.views["receive"], len(kept) // others
        if block == slots:
            copy(kept, receive[:-1], stream)
            return
        for source in range(others):
            copy(kept[source * block :], receive[source * slots : source * slots + block], stream)

    def _with_all_received(self, result: tuple[Tensor, list[Tensor]], num_tokens: int) -> tuple[Tensor, list[Tensor]]:
        """The rare call in which a source has sent more tokens than there was room for keeps them now: they lie in the
        receive buffer until this rank enters another call."""
        saved = result[1]
        gathered = not self.way.expanded and not self.way.again
        if gathered and self.num_ranks > 1 and self.planner.received > len(saved[-1]) // (self.num_ranks - 1):
            saved[-1] = self.room_to_keep(num_tokens)
            self._copy_received(saved[-1], self._stream)
        return result

    # ---------------------------------------------------------------- backward

    @_collective
    def backward(
        self, dy_TD: Tensor, inputs: Inputs, saved: list[Tensor], needs: Needs, main_grads: MainGrads | None = None,
        way: Way | None = None,
    ) -> ExpertGradients:  # fmt: skip
        self.way = way = way or self.ways[dy_TD.shape[0]]
        if way.mega:
            return hopper_mega.backward(self, dy_TD, inputs, saved, needs, main_grads)
        from uniep.launch import groups as launch_groups
        from uniep.launch import staged as launch

        cfg, device, experts = self.cfg, self.device, inputs.experts
        x_TD, dy_TD, ids_TK = map(aligned, (inputs.x_TD, dy_TD, inputs.ids_TK))
        *of_plan, h_2NF, kept = saved
        plan = self.planner.restore(ids_TK.shape[0], of_plan)
        rows, num_rows, peers = plan.rows, plan.num_rows, self._peers()
        receive = self.arena.views["receive"]
        address_2N = torch.empty(2, num_rows + 2 * ROW_ALIGN, dtype=torch.int64, device=device)
        where_x = x_TD, receive[:-1] if way.again else kept

        claims = None
        if way.gradient_beside:
            claims = torch.empty(2, -(-rows.expert_M.shape[0] // 4) * 4, dtype=torch.int32, device=device)

        def meanwhile() -> None:
            if claims is not None:
                claims.zero_()
            if needs.w13 or needs.w2:
                launch.launch_row_addresses(where_x, (dy_TD, receive), rows, self.num_ranks, self.sms, address_2N)

        self._enter_planned("backward", dy_TD, plan, inputs.layer, meanwhile)
        self._dispatch(dy_TD, plan, peers)
        dh_N2F, act_NF, groups_NG = self._through_activation(dy_TD, h_2NF, plan, peers, experts, claims)
        launch.launch_dweights(groups_NG, rows, self._table("dweights"), self.planner.status, self.slots, self.sms)

        # Results travel, as d(weight) did, whether this rank needs its own or not: its peers may.
        dh_NH = dh_N2F.view(num_rows, 2 * cfg.ffn)
        results_ND = self._results(plan)  # kept until the other stream has joined
        self._return_rows(launch.launch_gate_up_gradient, dh_NH, plan, peers, experts, self.sms, results_ND)
        dx_TD = torch.empty_like(dy_TD)
        dweights_TK = torch.empty(ids_TK.shape, dtype=torch.float32, device=device) if needs.weights else None
        self._fork(self.side)  # the sums are memory-bound, what is beside them not
        with torch.cuda.stream(self.side):
            if plan.lines is not None:
                sums = self._sums(results_ND, plan.lines, plan, weighted=False)
                launch_groups.launch_group_sum(sums, peers, self.sms, signal=True)
            self.planner.wait("returned")
            self._combine(ids_TK, None, plan, peers, dx_TD)
            if dweights_TK is not None:
                launch.launch_used_dweights(
                    self.arena.views["dweights"], ids_TK, self.planner.status, self.sms, dweights_TK
                )
        dw13, dw2 = self._weight_gradients(
            address_2N, where_x, act_NF, dh_NH, experts, plan, needs, main_grads, inputs.layer
        )
        self._join()
        self.mark("combine")
        if main_grads is not None:
            dw13 = dw2 = None
        return ExpertGradients(dx_TD if needs.x else None, dweights_TK, dw13, dw2)

    def _through_activation(
        self, dy_TD: Tensor, h_2NF: Tensor, plan: DevicePlan, peers: Peers, experts: ExpertWeights,
        claims: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """dO back through W2 and the activation: dh (N, 2, F), the activation that dW2 contracts (N, F), and sums for
        d(weight) (N, G).  claims: zero, two rows of a word or more for each row tile, to do both at once; or None."""
        from uniep.launch import staged as launch

        cfg, rows, num_rows, tile = self.cfg, plan.rows, plan.num_rows, self.way.down
        like: dict[str, Any] = {"dtype": cfg.dtype, "device": self.device}
        raw_NF = torch.empty(num_rows, cfg.ffn, dtype=torch.float32, device=self.device)
        dh_N2F, act_NF = torch.empty(num_rows, 2, cfg.ffn, **like), torch.empty(num_rows, cfg.ffn, **like)
        groups_NG = torch.empty(num_rows, -(-cfg.ffn // COLUMN_GROUP), dtype=torch.float32, device=self.device)
        made = dh_N2F, act_NF, groups_NG
        progress_M, cursor = unbind(claims) if claims is not None else (None, None)
        launch.launch_gathered_down_gradient(
            dy_TD, self.arena.views["receive"], rows, experts, peers, tile, self.sms, raw_NF,
            progress_M=progress_M, **self._dispatching(self.way.push_rounds[1]),
        )  # fmt: skip
        if progress_M is not None and cursor is not None:
            launch.launch_claimed_activation_gradient(
                raw_NF, h_2NF, rows, peers, cfg, tile, self.sms, progress_M, cursor, *made
            )
        else:
            self.mark("down_gradient")
            launch.launch_activation_gradient(raw_NF, h_2NF, rows, cfg, self.sms, *made)
        self.mark("activation_gradient")
        return made

    def _weight_gradients(
        self, address_2N: Tensor, x: tuple[Tensor, Tensor], act_NF: Tensor, dh_NH: Tensor, experts: ExpertWeights,
        plan: DevicePlan, needs: Needs, main_grads: MainGrads | None, layer: LayerTag,
    ) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:  # fmt: skip
        """(dw13, dw2) in the layout of `experts`: new tensors, or `main_grads`.  address_2N: of the rows of x and dO.
        x: tokens (T, D) and where the received ones are, or will be."""
        from uniep.launch import staged as launch

        rows, local, ffn = plan.rows, self.planner.local, self.cfg.ffn
        how = rows.start_e1, rows.rows_e, self.planner.status, self.way.weight_gradient, self.sms
        accumulate = main_grads is not None and main_grads.accumulate
        fresh = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
        dw13 = dw2 = None
        x_address_N, dy_address_N = unbind(address_2N)
        if needs.w2:
            dw2 = main_grads.w2 if main_grads else (fresh(experts.w2[0]),)
            launch.launch_weight_gradient(
                dy_address_N, act_NF, 0, dw2[0], *how, transposed=False, accumulate=accumulate
            )
            self.mark("weight_gradient")
        if self.way.again:
            self._dispatch_again(x[0], plan, layer)
        if needs.w13:
            dw13 = main_grads.w13 if main_grads else tuple(fresh(w) for w in experts.w13)
            x_N = x[1] if self.way.expanded else x_address_N
            for part, dw in enumerate(dw13):  # w1 and w3, or both in one
                dw_eHD = dw.view(local, -1, self.cfg.hidden)
                launch.launch_weight_gradient(
                    x_N, dh_NH, part * ffn, dw_eHD, *how, transposed=True, accumulate=accumulate
                )
                self.mark("weight_gradient")
        return dw13, dw2

    # ---------------------------------------------------------------- stages of both passes

    def _fork(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` go on from here, beside this call's own."""
        self._follow(stream, self._stream)
        self._forked.add(stream)

    def _join(self) -> None:
        """Wait for what was forked."""
        while self._forked:
            self._follow(self._stream, self._forked.pop())

    def _follow(self, later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
        """`wait_stream`, without a new event."""
        self._point.record(earlier)
        later.wait_event(self._point)

    @property
    def _fused(self) -> bool:
        return self.way.waits and not self._stay_local

    @property
    def _copying(self) -> bool:
        return self.way.copies and not self._stay_local

    def _peers(self) -> Peers:
        """What kernels need of the other ranks."""
        chunk = self.way.chunk_tokens if self.way.transfer == "push" else 0
        if (known := self._known_peers.get((self._stay_local, chunk))) is not None:
            return known
        from uniep.launch.staged import Peers

        arena, planner = self.arena, self.planner
        made = self._known_peers[self._stay_local, chunk] = Peers(
            rank=self.rank,
            num_ranks=self.num_ranks,
            call=planner.call,
            status=planner.status,
            timeout_ns=planner.timeout_ns,
            arrived=arena.flag_view("arrived"),
            finished=arena.flag_view("finished"),
            returned=arena.flag_view("returned"),
            receive_table=arena.tables["receive"],
            returns_table=self._table("returns"),
            flag_table=arena.tables["flags"],
            arrived_offset=arena.flag_offset("arrived"),
            finished_offset=arena.flag_offset("finished"),
            returned_offset=arena.flag_offset("returned") + self.rank,
            push_ticket=self.push_ticket,
            return_ticket=self.return_ticket,
            chunk=chunk,
            receive_block=self.cfg.receive_block,
        )
        return made

    def _send_all(self, x_TD: Tensor) -> None:
        """Queue copies of all tokens to every peer, each with the peer's `finished` flag behind it."""
        num_tokens = x_TD.shape[0]
        self._fork(self.copies)
        for step in range(1, self.num_ranks):
            peer = (self.rank + step) % self.num_ranks
            if num_tokens:
                first = recv_base(self.cfg, self.rank, peer)
                copy(self.arena.everywhere["receive"][peer][first:], x_TD, self.copies)
            flag = self.arena.flag_offset("finished") + self.rank
            copy(self.arena.everywhere["flags"][peer][flag:], self.planner.call, self.copies)

    def _enter_planned(
        self,
        operation: str,
        sent_TD: Tensor,
        plan: DevicePlan,
        layer: LayerTag,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Enter a call that knows its plan, and queue the copies of what it sends.  meanwhile: until all entered."""
        self.planner.enter(None, None, sent_TD.shape[0], operation, LayerTag(layer.number), plan.forward)
        meanwhile()
        self.planner.wait_entered(copies=self._copying)
        if self._copying:
            self._send_all(sent_TD)

    def _dispatch(self, x_TD: Tensor, plan: DevicePlan, peers: Peers) -> None:
        """Serial schedule: push all tokens (unless copies are under way), wait until all have arrived."""
        if self.num_ranks == 1 or self._fused or self._stay_local:
            return
        self._finish_dispatch(x_TD, plan, peers)

    def _finish_dispatch(self, x_TD: Tensor, plan: DevicePlan, peers: Peers) -> None:
        """Push the tokens of the send lists, unless copies are under way, and wait until all have arrived."""
        from uniep.launch.staged import launch_push_tokens

        if not self._copying:
            launch_push_tokens(x_TD, plan.rows, peers, self.sms)
        self.planner.wait("finished")
        self.mark("dispatch")

    def _dispatch_again(self, x_TD: Tensor, plan: DevicePlan, layer: LayerTag) -> None:
        """In the backward, when nobody reads dO any more: all tokens, once more."""
        if self.num_ranks == 1 or self._stay_local:
            return
        self._join()  # what reads the number of this call
        self._enter_planned("dispatch", x_TD, plan, layer)
        self._finish_dispatch(x_TD, plan, self._peers())

    def _expand(self, x_TD: Tensor, plan: DevicePlan, peers: Peers) -> Tensor:
        """(N, D): every row's input, contiguous; fused: this rank's tokens are pushed meanwhile."""
        from uniep.launch.staged import launch_expand

        rows_ND = torch.empty(plan.num_rows, self.cfg.hidden, dtype=self.cfg.dtype, device=self.device)
        pushing = 2 * self.way.push_programs if self._fused else 0
        launch_expand(
            x_TD, self.arena.views["receive"], plan.rows, peers, self.way.gate_up.rows, self.sms, rows_ND,
            fused=self._fused, push_programs=pushing,
        )  # fmt: skip
        self.mark("expand")
        return rows_ND

    def _results(self, plan: DevicePlan) -> Tensor:
        """Memory for the rows (N, D) of a product that are to be added by groups, or pushed later; else any as wide."""
        if self.way.returns == "epilogue":
            return self.arena.views["receive"]
        return torch.empty(plan.num_rows, self.cfg.hidden, dtype=self.cfg.dtype, device=self.device)

    def _return_rows(
        self, product: Callable[..., None], a: Tensor, plan: DevicePlan, peers: Peers, experts: ExpertWeights,
        sms: int, out_ND: Tensor, **how: Any,
    ) -> None:  # fmt: skip
        """a @ B (N, D) by `product` on `sms`, delivered into the return slots of the rows' source ranks, or, where
        groups of rows are to be added first, into `out`."""
        from uniep.launch.staged import launch_push_rows

        returns, tile = self.way.returns, self.way.down
        product(a, plan.rows, experts, peers, tile, sms, out_ND, slots=self.slots, scatter=returns == "epilogue", **how)
        self.mark("return")
        if returns == "pass":
            launch_push_rows(out_ND, plan.rows, peers, self.slots, self.sms)
            self.mark("push_rows")

    def _sums(self, results_ND: Tensor, lines: Lines, plan: DevicePlan, *, weighted: bool) -> Sums:
        """What combine groups add to what.  weighted: rows by their routing weight."""
        from uniep.launch.groups import Sums

        weight_N = plan.rows.weight_N if weighted else None
        one_group = self.cfg.combine_groups == self.num_ranks
        return Sums(results_ND, weight_N, lines.row_LK, lines.slot_LK, lines.used_TW.numel(), one_group)

    def _down_and_sums(
        self, act_NF: Tensor, lines: Lines, plan: DevicePlan, peers: Peers, experts: ExpertWeights, sums: Sums
    ) -> None:
        """The down product, its rows added by groups beside it as their tiles are done."""
        from uniep.launch import groups as launch_groups

        tile, rows = self.way.down, plan.rows
        order_M = torch.empty(rows.order_M.shape, dtype=torch.int32, device=self.device)
        launch_groups.launch_return_order(plan.counts_RE, rows, self.rank, tile.rows, order_M)
        launch_groups.launch_counted_down(act_NF, rows, order_M, experts, tile, self.sms, sums.rows_ND)
        launch_groups.launch_claimed_sum(sums, rows, lines, peers, tile, self.sms)
        self.mark("group_sum")

    def _combine(
        self, ids_TK: Tensor, weights_TK: Tensor | None, plan: DevicePlan, peers: Peers, out_TD: Tensor
    ) -> None:
        """The fixed-order sum of what has returned: rows by slot, or, with combine groups, sums that are weighted."""
        from uniep.launch.staged import launch_combine

        if plan.lines is not None:
            ids_TK, weights_TK = plan.lines.used_TW[: out_TD.shape[0]], None
        launch_combine(self.arena.views["returns"], ids_TK, weights_TK, peers, self.sms, out_TD)

    def _dispatching(self, push_rounds: int, expanded: Tensor | None = None) -> dict[str, Any]:
        """What a kernel is told that gathers rows: whether to wait for them, and how this rank's are pushed."""
        if not self._fused or expanded is not None:
            return {"fused": False, "push_programs": 0, "push_rounds": 0}
        return {"fused": True, "push_programs": self.way.push_programs, "push_rounds": push_rounds}

    # ---------------------------------------------------------------- without communication

    def _table(self, name: str) -> Tensor:
        """Addresses of an array at every rank; of this rank's own when measuring without communication."""
        table = self.arena.tables[name]
        return table[self.rank].repeat(self.num_ranks) if self._stay_local else table

    @contextlib.contextmanager
    def _without_communication(self) -> Iterator[None]:
        with self._order.turn:
            self._stay_local = True
            try:
                yield
            finally:
                self._stay_local = False

    def compute_only(self, inputs: Inputs, save: bool) -> tuple[Tensor, list[Tensor]]:
        """The forward's kernels with no token or row crossing the wire: a bound to measure against, not a result."""
        with self._without_communication():
            return self.forward(inputs, save)

    def compute_only_backward(
        self, dy_TD: Tensor, inputs: Inputs, saved: list[Tensor], needs: Needs
    ) -> ExpertGradients:
        """The backward's kernels likewise."""
        with self._without_communication():
            return self.backward(dy_TD, inputs, saved, needs)


def _check_experts(experts: ExpertWeights) -> None:
    """Raise UnsupportedError for weights that block loads cannot read."""
    from uniep.launch.staged import w13_block

    if experts.layout == "list" or experts.w2[0].dim() != 3:
        raise UnsupportedError(
            "the hopper backend takes w13 and w2 as stacked tensors, or w13 as a pair (w1, w3), not as lists of "
            "experts; allocate the experts as views of one tensor and pass that"
        )
    for name, tensors in (("w13", experts.w13), ("w2", experts.w2)):
        for t in tensors:
            places = [t.data_ptr(), *(t.element_size() * stride for stride in t.stride()[:-1])]
            if t.stride(-1) != 1 or any(place % 16 for place in places):
                raise UnsupportedError(
                    f"{name} has strides {t.stride()} at address {t.data_ptr():#x}; rows must be consecutive values "
                    f"that begin at multiples of 16 bytes; pass a contiguous, aligned {name}"
                )
    w13_block(experts, 1, 2, 8, 8)  # of w1 and w3, the distance


def _check_support(cfg: MoEConfig, ep_size: int, device: torch.device) -> None:
    """Raise for what this backend cannot run, with the way out."""
    if (error := why_not(cfg, device) or group_limit(ep_size)) is not None:
        raise type(error)(f"{error}; or {WAY_OUT}")
