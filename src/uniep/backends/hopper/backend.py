"""The Hopper backend: Triton kernels over torch symmetric memory, one node, peer access over NVLink.

One call: plan (ids exchanged by one-sided stores); gate_up, whose tiles wait for their tokens, which copy engines or
its own first programs send; the down product, whose epilogue stores each row into its slot at the source rank (with
combine groups rows stay, and their sums travel), after gate_up or beside it; the fixed-order sum.  The serial schedule
runs the same tile bodies with every stage waiting for the one before; it is the oracle.  docs/kernels.md has the whole
picture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import SymInt, Tensor

from uniep.backends.base import MAIN_GRAD, ExpertGradients, Inputs, LayerTag, MainGrads, Needs, aligned
from uniep.backends.hopper import mega as hopper_mega
from uniep.backends.hopper.arena import WAY_OUT, Arena
from uniep.config import COLUMN_GROUP, ROW_ALIGN, MoEConfig
from uniep.errors import ClosedError, ConfigError, UniEPError, UnsupportedError
from uniep.kernels.arguments import Activation, Addresses, Dispatch, Sums, Tokens, Wire
from uniep.launch.driver import Bundle, copy, unbind
from uniep.layout import hopper_arrays, kept_shape, pack
from uniep.limits import group_limit, why_not
from uniep.memory import plan_memory
from uniep.routing import RoutingPlan
from uniep.routing.plan import recv_base
from uniep.schedule import Schedule, Tile, default_schedule, refuse_other_fields
from uniep.weights import ExpertWeights

if TYPE_CHECKING:
    from uniep.backends.hopper.planner import DevicePlan
    from uniep.launch.groups import GroupSums, LineTables
    from uniep.launch.staged import Peers
    from uniep.taskflow.trace import Span
    from uniep.workspace import Workspace

_T = TypeVar("_T")

PUSH_BYTES_PER_US = 150_000  # all pushing programs of a rank, beside a GEMM (2x H200)
COPY_BYTES_PER_US = 350_000  # a copy engine
COPY_LEAD_US = 30  # from the entry of all ranks to the first tile
PUSH_LATENCY_US = 30
SM_FLOP_PER_US = 5.5e6  # one SM in a grouped GEMM
SCHEDULE_FIELDS = (
    "overlap", "transfer", "tile_order", "operand", "gemm1", "gemm2", "weight_gradient", "chunk_tokens",
    "push_programs", "down_sms", "pipelined_from", "received", "group_sum", "activation_gradient",
    "beside_from", "mega_to", "free_sms",
)  # fmt: skip


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
                raise ClosedError(f"this Workspace is closed ({planner.ws.cause}); make a new one")
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

    trace: with overlap="mega", set to a list to have `Span`s appended; calls then wait for the GPU, and a backward is
    taken for that of the last forward.  Times count from when all ranks had entered that forward (traced_from, by this
    GPU's clock: those of other GPUs differ); its ids are traced_ids.
    """

    name = "hopper"

    def __init__(self, workspace: Workspace, schedule: Schedule | None) -> None:
        cfg, device = workspace.cfg, workspace.device
        _check_support(cfg, workspace.ep_size, device)
        from uniep.backends.hopper.planner import Planner  # needs Triton, whose absence has its message above

        self.cfg, self.device = cfg, device
        self.rank, self.num_ranks = workspace.rank, workspace.ep_size
        self.schedule = schedule or default_schedule(self.name, cfg, self.num_ranks)
        refuse_other_fields(self.schedule, self.name, SCHEDULE_FIELDS)
        rows = self.schedule.gemm1.rows
        if rows != self.schedule.gemm2.rows:
            raise ConfigError(
                f"gemm1.rows is {rows} and gemm2.rows {self.schedule.gemm2.rows}; on GPUs both walk one tile table"
            )
        if (self.schedule.operand, self.schedule.received) == ("expanded", "again"):
            raise ConfigError("operand='expanded' keeps every row's input, so that nothing can be received='again'")
        self.slots = cfg.max_tokens_per_rank * cfg.top_k
        chunk = self.schedule.chunk_tokens
        if cfg.receive_block % chunk:
            raise ConfigError(
                f"chunk_tokens is {chunk}; on GPUs it must divide {cfg.receive_block}, the receive slots per peer"
            )
        layout = pack(hopper_arrays(cfg, self.num_ranks, self.schedule))
        describe = functools.partial(plan_memory, cfg, self.num_ranks, schedule=self.schedule)
        self.arena = Arena(layout, workspace, describe)
        self.planner = Planner(workspace, self.arena, rows, self.schedule.free_sms)
        self.sms = self.planner.sms
        self.push_ticket, self.return_ticket = torch.zeros(2, 4, dtype=torch.int32, device=device).unbind()
        self._lasting = [  # memory of the stream that is current now
            self.arena.memories[self.rank], *self.arena.tables.values(), self.planner.call, self.planner.ticket,
            self.planner.status, self.push_ticket, self.return_ticket,
        ]  # fmt: skip
        self._check_push()
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

    def _check_push(self) -> None:
        """Somebody must be left to compute, and while tokens are pushed."""
        s = self.schedule
        if self.sms < 2:
            raise ConfigError(
                f"free_sms is {s.free_sms}, but this GPU has {self.sms + s.free_sms} multiprocessors; lower it"
            )
        programs = (self.sms - self._down_sms(self.cfg.max_tokens_per_rank)) * min(
            s.gemm1.programs_per_sm, s.gemm2.programs_per_sm
        )
        if self.num_ranks > 1 and s.transfer == "push" and s.push_programs >= programs:
            raise ConfigError(
                f"push_programs is {s.push_programs}, but kernels that push have {programs} programs here; lower it"
            )

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
            usual = self.schedule  # for few tokens, then for more, then for many
            more = dataclasses.replace(usual, mega_to=0)
            many = dataclasses.replace(more, pipelined_from=0, beside_from=0)
            planner = self.planner
            room = planner.allocate, planner.received  # these calls need none
            try:
                for self.schedule in dict.fromkeys((usual, more, many)):
                    self.forward(inputs, save=False)
                    _, saved = self.forward(inputs, save=True)
                    self.backward(x_TD, inputs, saved, Needs())
            finally:
                self.schedule, (planner.allocate, planner.received) = usual, room
        torch.cuda.synchronize(self.device)

    def fake_saved(self, num_tokens: int | SymInt, x_TD: Tensor, new_size: Callable[[], SymInt]) -> list[Tensor]:
        exact, schedule = self.cfg.max_rows is None, self.schedule
        rows = new_size() if exact else self.planner.capacity
        if schedule.operand == "expanded":
            kept = rows, self.cfg.hidden
        elif exact and self.num_ranks > 1 and schedule.received == "saved":
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
            if self.cfg.combine_groups is None
            else f"sums of {self.cfg.combine_groups} groups, made {self.schedule.group_sum} the down product",
        }

    def close(self) -> None:
        """Drop the arena; its memory is free when all streams that calls came on have gone past them."""
        with self._order.turn:  # after the call that another thread is in
            if self.arena is not None:
                self.planner.leave(self.planner.ws.cause)
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
    def forward(self, inputs: Inputs, save: bool) -> tuple[Tensor, list[Tensor]]:
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
        if self.schedule.is_mega(inputs.x_TD.shape[0]):
            return hopper_mega.forward(self, inputs, save)
        from uniep.launch import groups as launch_groups
        from uniep.launch import staged as launch

        cfg, device, x_TD, schedule = self.cfg, self.device, inputs.x_TD, self.schedule
        num_tokens, x = x_TD.shape[0], Tokens(x_TD, self.arena.views["receive"])
        send_all = functools.partial(self._send_all, x_TD) if self._copying else None
        plan = self.planner.plan(
            inputs.ids_TK, inputs.weights_TK, self._leads(num_tokens), send_all,
            operation="forward" if save else "forward without gradients", layer=inputs.layer,
        )  # fmt: skip
        self.mark("plan")
        num_rows, peers = plan.num_rows, self._peers()
        act_NF = torch.empty(num_rows, cfg.ffn, dtype=cfg.dtype, device=device)
        h_2NF = torch.empty(2, num_rows, cfg.ffn, dtype=cfg.dtype, device=device) if save else None
        self._dispatch(x_TD, plan, peers)
        x_ND = self._expand(x_TD, plan, peers) if schedule.operand == "expanded" else None
        down_sms = self._down_sms(num_tokens)
        pipelined = down_sms > 0
        results_ND, weighted = self._results(plan), cfg.weight_at == "output"
        if pipelined:
            self._fork(self.side)
        launch.launch_gate_up(
            x, x_ND, plan.bundle, inputs.experts, peers, cfg, schedule.gemm1, self.sms - down_sms, h_2NF, act_NF,
            self._dispatching(num_tokens, schedule.gemm1, x_ND), count_tiles=pipelined,
        )  # fmt: skip
        self.mark("gate_up")
        kept = x_ND if x_ND is not None or not save else self._keep(num_tokens)
        if pipelined:
            # On SMs of its own until gate_up is done, then on all.
            tiles_before = -(-cfg.ffn // (schedule.gemm1.columns // 2))
            beside = launch.Beside(tiles_before, self.sms * schedule.gemm2.programs_per_sm)
            down = functools.partial(self._return_rows, launch.launch_down, act_NF, plan, peers, inputs.experts)
            with torch.cuda.stream(self.side):
                down(down_sms, results_ND, beside=beside)
            down(self.sms - down_sms, results_ND, beside=beside)
            self._join()
        elif plan.lines is not None and schedule.group_sum == "beside":
            sums = self._group_sums(results_ND, plan.lines, plan, weighted=weighted)
            self._down_and_sums(act_NF, plan.lines, plan, peers, inputs.experts, sums)
        else:
            self._return_rows(launch.launch_down, act_NF, plan, peers, inputs.experts, self.sms, results_ND)
        y_TD = torch.empty_like(x_TD)
        if plan.lines is not None and schedule.group_sum == "after":
            sums = self._group_sums(results_ND, plan.lines, plan, weighted=weighted)
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
        return kept_shape(self.cfg, self.num_ranks, self.schedule, block)

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
        gathered = self.schedule.operand == "gathered" and self.schedule.received == "saved"
        if gathered and self.num_ranks > 1 and self.planner.received > len(saved[-1]) // (self.num_ranks - 1):
            saved[-1] = self.room_to_keep(num_tokens)
            self._copy_received(saved[-1], self._stream)
        return result

    # ---------------------------------------------------------------- backward

    @_collective
    def backward(
        self, dy_TD: Tensor, inputs: Inputs, saved: list[Tensor], needs: Needs, main_grads: MainGrads | None = None
    ) -> ExpertGradients:
        if self.schedule.is_mega(dy_TD.shape[0]):
            return hopper_mega.backward(self, dy_TD, inputs, saved, needs, main_grads)
        from uniep.launch import groups as launch_groups
        from uniep.launch import staged as launch

        cfg, device, experts = self.cfg, self.device, inputs.experts
        x_TD, dy_TD, ids_TK = map(aligned, (inputs.x_TD, dy_TD, inputs.ids_TK))
        *of_plan, h_2NF, kept = saved
        plan = self.planner.restore(ids_TK.shape[0], of_plan)
        num_rows, peers, receive = plan.num_rows, self._peers(), self.arena.views["receive"]
        address_2N = torch.empty(2, num_rows + 2 * ROW_ALIGN, dtype=torch.int64, device=device)
        addresses = Addresses(*unbind(address_2N))
        x = Tokens(x_TD, receive[:-1] if self.schedule.received == "again" else kept)

        claims = None
        if self.schedule.is_beside(dy_TD.shape[0]):
            claims = torch.empty(2, -(-plan.rows.expert_M.shape[0] // 4) * 4, dtype=torch.int32, device=device)

        def meanwhile() -> None:
            if claims is not None:
                claims.zero_()
            if needs.w13 or needs.w2:
                dy = Tokens(dy_TD, receive)
                launch.launch_row_addresses(x, dy, plan.bundle, self.num_ranks, self.sms, addresses)

        self._enter_planned("backward", dy_TD, plan, inputs.layer, meanwhile)
        self._dispatch(dy_TD, plan, peers)
        through = self._through_activation(dy_TD, h_2NF, plan, peers, experts, claims)
        launch.launch_dweights(through.groups_NG, plan.bundle, peers, self.slots, self.sms)

        # Results travel, as d(weight) did, whether this rank needs its own or not: its peers may.
        dh_NH = through.dh_N2F.view(num_rows, 2 * cfg.ffn)
        results_ND = self._results(plan)  # kept until the other stream has joined
        self._return_rows(launch.launch_gate_up_gradient, dh_NH, plan, peers, experts, self.sms, results_ND)
        dx_TD = torch.empty_like(dy_TD)
        dweights_TK = torch.empty(ids_TK.shape, dtype=torch.float32, device=device) if needs.weights else None
        self._fork(self.side)  # the sums are memory-bound, what is beside them not
        with torch.cuda.stream(self.side):
            if plan.lines is not None:
                sums = self._group_sums(results_ND, plan.lines, plan, weighted=False)
                launch_groups.launch_group_sum(sums, peers, self.sms, signal=True)
            self.planner.wait("returned")
            self._combine(ids_TK, None, plan, peers, dx_TD)
            if dweights_TK is not None:
                launch.launch_used_dweights(
                    self.arena.views["dweights"], ids_TK, self.planner.status, self.sms, dweights_TK
                )
        dw13, dw2 = self._weight_gradients(
            addresses, x, through.act_NF, dh_NH, experts, plan, needs, main_grads, inputs.layer
        )
        self._join()
        self.mark("combine")
        if main_grads is not None:
            dw13 = dw2 = None
        return ExpertGradients(dx_TD if needs.x else None, dweights_TK, dw13, dw2)

    def _through_activation(
        self, dy_TD: Tensor, h_2NF: Tensor, plan: DevicePlan, peers: Peers, experts: ExpertWeights,
        claims: Tensor | None,
    ) -> Activation:  # fmt: skip
        """dO back through W2 and the activation.  claims: zero, two rows of a word or more for each row tile, to do
        both at once; or None."""
        from uniep.launch import staged as launch

        cfg, rows, schedule, num_rows = self.cfg, plan.bundle, self.schedule, plan.num_rows
        num_tokens, tile = dy_TD.shape[0], schedule.gemm2
        like: dict[str, Any] = {"dtype": cfg.dtype, "device": self.device}
        gate_NF, up_NF = unbind(h_2NF)
        made = Activation(
            torch.empty(num_rows, cfg.ffn, dtype=torch.float32, device=self.device),
            gate_NF,
            up_NF,
            dh_N2F=torch.empty(num_rows, 2, cfg.ffn, **like),
            act_NF=torch.empty(num_rows, cfg.ffn, **like),
            groups_NG=torch.empty(num_rows, -(-cfg.ffn // COLUMN_GROUP), dtype=torch.float32, device=self.device),
        )
        progress_M, cursor = unbind(claims) if claims is not None else (None, None)
        launch.launch_gathered_down_gradient(
            Tokens(dy_TD, self.arena.views["receive"]), rows, experts, peers, tile, self.sms, made.raw_NF,
            self._dispatching(num_tokens, tile), progress_M,
        )  # fmt: skip
        if progress_M is not None and cursor is not None:
            launch.launch_claimed_activation_gradient(made, rows, peers, cfg, tile, self.sms, progress_M, cursor)
        else:
            self.mark("down_gradient")
            launch.launch_activation_gradient(made, rows, cfg, self.sms)
        self.mark("activation_gradient")
        return made

    def _weight_gradients(
        self, addresses: Addresses, x: Tokens, act_NF: Tensor, dh_NH: Tensor, experts: ExpertWeights,
        plan: DevicePlan, needs: Needs, main_grads: MainGrads | None, layer: LayerTag,
    ) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:  # fmt: skip
        """(dw13, dw2) in the layout of `experts`: new tensors, or `main_grads`.
        x: tokens (T, D) and where the received ones are, or will be."""
        from uniep.launch import staged as launch

        rows, local, ffn = plan.rows, self.planner.local, self.cfg.ffn
        how = rows.start_e1, rows.rows_e, self.planner.status, self.schedule.weight_gradient, self.sms
        accumulate = main_grads is not None and main_grads.accumulate
        fresh = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
        dw13 = dw2 = None
        if needs.w2:
            dw2 = main_grads.w2 if main_grads else (fresh(experts.w2[0]),)
            launch.launch_weight_gradient(
                addresses.dy_N, act_NF, 0, dw2[0], *how, transposed=False, accumulate=accumulate
            )
            self.mark("weight_gradient")
        if self.schedule.received == "again":
            self._dispatch_again(x.local, plan, layer)
        if needs.w13:
            dw13 = main_grads.w13 if main_grads else tuple(fresh(w) for w in experts.w13)
            x_N = x.received if self.schedule.operand == "expanded" else addresses.x_N
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

    def _down_sms(self, num_tokens: int) -> int:
        """Multiprocessors of the down product beside gate_up; 0: it runs after it."""
        s = self.schedule
        return min(s.down_sms, self.sms // 2) if s.overlap == "pipelined" and num_tokens >= s.pipelined_from else 0

    @property
    def _fused(self) -> bool:
        return self.num_ranks > 1 and self.schedule.overlap != "serial" and not self._stay_local

    @property
    def _copying(self) -> bool:
        return self.num_ranks > 1 and self.schedule.transfer == "copy" and not self._stay_local

    def _peers(self) -> Peers:
        """What kernels need of the other ranks."""
        chunk = self.schedule.chunk_tokens if self.schedule.transfer == "push" else 0
        if (known := self._known_peers.get((self._stay_local, chunk))) is not None:
            return known
        from uniep.launch.staged import Peers

        arena, planner = self.arena, self.planner
        wire = Wire(
            status=planner.status,
            call=planner.call,
            arrived=arena.flag_view("arrived"),
            finished=arena.flag_view("finished"),
            returned=arena.flag_view("returned"),
            receive_table=arena.tables["receive"],
            returns_table=self._table("returns"),
            dweights_table=self._table("dweights"),
            flag_table=arena.tables["flags"],
            push_ticket=self.push_ticket,
            return_ticket=self.return_ticket,
        )
        made = self._known_peers[self._stay_local, chunk] = Peers(
            rank=self.rank,
            num_ranks=self.num_ranks,
            wire=Bundle(wire),
            timeout_ns=planner.timeout_ns,
            arrived_offset=arena.flag_offset("arrived"),
            finished_offset=arena.flag_offset("finished"),
            returned_offset=arena.flag_offset("returned") + self.rank,
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
            launch_push_tokens(x_TD, plan.bundle, peers, self.sms)
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
        pushing = 2 * self.schedule.push_programs if self._fused and not self._copying else 0
        tokens, tile_rows = Tokens(x_TD, self.arena.views["receive"]), self.schedule.gemm1.rows
        launch_expand(tokens, plan.bundle, peers, tile_rows, self.sms, rows_ND, Dispatch(self._fused, pushing))
        self.mark("expand")
        return rows_ND

    def _results(self, plan: DevicePlan) -> Tensor:
        """Memory for the rows (N, D) of a product that are to be added by groups, or pushed later; else any as wide."""
        if plan.lines is None and self.schedule.overlap != "serial":
            return self.arena.views["receive"]
        return torch.empty(plan.num_rows, self.cfg.hidden, dtype=self.cfg.dtype, device=self.device)

    def _return_rows(
        self, product: Callable[..., None], a: Tensor, plan: DevicePlan, peers: Peers, experts: ExpertWeights,
        sms: int, out_ND: Tensor, **how: Any,
    ) -> None:  # fmt: skip
        """a @ B (N, D) by `product` on `sms`, delivered into the return slots of the rows' source ranks, or, where
        groups of rows are to be added first, into `out`."""
        from uniep.launch.staged import launch_push_rows

        serial, tile = self.schedule.overlap == "serial", self.schedule.gemm2
        scatter = not serial and plan.lines is None
        product(a, plan.bundle, experts, peers, self.cfg, tile, sms, out_ND, slots=self.slots, scatter=scatter, **how)
        self.mark("return")
        if serial and plan.lines is None:
            launch_push_rows(out_ND, plan.bundle, peers, self.slots, self.sms)
            self.mark("push_rows")

    def _group_sums(self, results_ND: Tensor, lines: LineTables, plan: DevicePlan, *, weighted: bool) -> GroupSums:
        """What combine groups add to what.  weighted: rows by their routing weight."""
        from uniep.launch.groups import GroupSums

        weight_N = plan.rows.weight_N if weighted else None
        one_group = self.cfg.combine_groups == self.num_ranks
        return GroupSums(results_ND, weight_N, lines.row_LK, lines.slot_LK, lines.used_TW.numel(), one_group)

    def _down_and_sums(
        self, act_NF: Tensor, lines: LineTables, plan: DevicePlan, peers: Peers, experts: ExpertWeights, sums: GroupSums
    ) -> None:
        """The down product, its rows added by groups beside it as their tiles are done."""
        from uniep.launch import groups as launch_groups

        tile, rows = self.schedule.gemm2, plan.rows
        order_M = torch.empty(rows.order_M.shape, dtype=torch.int32, device=self.device)
        launch_groups.launch_return_order(plan.counts_RE, rows, self.rank, tile.rows, order_M)
        launch_groups.launch_counted_down(act_NF, plan.bundle, order_M, experts, tile, self.sms, sums.rows_ND)
        launch_groups.launch_claimed_sum(sums, rows, lines, peers, tile, self.sms)
        self.mark("group_sum")

    def _combine(
        self, ids_TK: Tensor, weights_TK: Tensor | None, plan: DevicePlan, peers: Peers, out_TD: Tensor
    ) -> None:
        """The fixed-order sum of what has returned: rows by slot, or, with combine groups, sums that are weighted."""
        from uniep.launch.staged import launch_combine

        if plan.lines is not None:
            ids_TK, weights_TK = plan.lines.used_TW[: out_TD.shape[0]], None
        launch_combine(Sums(self.arena.views["returns"], ids_TK, weights_TK, out_TD), peers, self.sms)

    def _dispatching(self, num_tokens: int, tile: Tile, expanded: Tensor | None = None) -> Dispatch:
        """What a kernel is told that gathers rows: whether to wait for them, and how this rank's are pushed."""
        waits = self._fused and expanded is None
        if not waits or self._copying:
            return Dispatch(waits)
        return Dispatch(True, self.schedule.push_programs, self._push_rounds(num_tokens, tile))

    def _push_us(self, num_tokens: int) -> float:
        """How long pushing this rank's tokens takes beside a GEMM, for balanced routing."""
        cfg = self.cfg
        wanted = cfg.wanted(self.num_ranks)
        sent_bytes = (self.num_ranks - 1) * num_tokens * wanted * cfg.hidden * cfg.dtype.itemsize
        return sent_bytes / PUSH_BYTES_PER_US

    def _push_rounds(self, num_tokens: int, tile: Tile) -> int:
        """Turns of the tile loop that a push lasts, so that pushing programs get that many tiles fewer."""
        tile_us = 2 * tile.rows * tile.columns * self.cfg.hidden / SM_FLOP_PER_US
        return math.ceil(self._push_us(num_tokens) / tile_us)

    def _leads(self, num_tokens: int) -> tuple[int, int]:
        """Experts whose local tiles run first, in the forward and the backward: as many as last until the other
        ranks' tokens are here.  Copies of x travel while the forward is planned."""
        cfg = self.cfg
        if self.schedule.tile_order == "natural" or self.num_ranks == 1:
            return 0, 0
        if self._copying:
            travel_us = (self.num_ranks - 1) * num_tokens * cfg.hidden * cfg.dtype.itemsize / COPY_BYTES_PER_US
            forward_us, backward_us = travel_us - COPY_LEAD_US, travel_us
        else:
            forward_us = backward_us = self._push_us(num_tokens) + PUSH_LATENCY_US
        flop = 2 * max(num_tokens * cfg.top_k / cfg.num_experts, 1) * cfg.ffn * cfg.hidden  # of an expert's local rows
        expert_us = flop / (SM_FLOP_PER_US * self.sms)
        forward, backward = math.ceil(forward_us / (2 * expert_us)), math.ceil(backward_us / expert_us)
        return max(forward, 0), max(backward, 0)

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
