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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import SymInt, Tensor

from uniep.backends.base import (
    MAIN_GRAD,
    ExpertGradients,
    Inputs,
    LayerTag,
    MainGrads,
    Needs,
    aligned,
    kept_for_backward,
)
from uniep.backends.hopper.arena import WAY_OUT
from uniep.backends.hopper.link import Link
from uniep.backends.hopper.mega import Backward, Forward
from uniep.backends.hopper.recorded import RecordedCalls, layout_of
from uniep.backends.hopper.saved import extent, trimmed, whole
from uniep.config import MoEConfig
from uniep.errors import ClosedError, UniEPError, UnsupportedError
from uniep.limits import group_limit, why_not
from uniep.routing import RoutingPlan
from uniep.schedule import Schedule
from uniep.way import Way
from uniep.weights import ExpertWeights

if TYPE_CHECKING:
    from uniep.membership import Membership

_T = TypeVar("_T")


def _collective(method: Callable[..., _T]) -> Callable[..., _T]:
    """A call: threads take turns, on the Workspace's device, ordered after the previous call, on any stream.

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
                self.join()
                order.end(current)

    return call


class HopperBackend(Link):
    """See the module docstring, and `Link`.

    trace: with overlap="mega", set to a list to have `Span`s appended; calls then wait for the GPU, and a backward is
    taken for that of the last forward.  Times count from when all ranks had entered that forward (traced_from, by this
    GPU's clock: those of other GPUs differ); its ids are traced_ids.
    """

    name = "hopper"

    def __init__(self, member: Membership, schedule: Schedule | None) -> None:
        _check_support(member.cfg, member.ep_size, member.device)
        super().__init__(member, schedule)
        self.recorded = RecordedCalls(self)

    # ---------------------------------------------------------------- what every backend has

    @_collective
    def route(self, ids_TK: Tensor) -> RoutingPlan:
        weights_TK = torch.zeros(ids_TK.shape, dtype=torch.float32, device=ids_TK.device)
        while True:
            by_expert = self.way.sends_by_expert
            plan = self.planner.plan(ids_TK, weights_TK, operation="route", by_expert=by_expert)
            if self.planner.fits():
                return self.planner.routing_plan(plan, ids_TK.shape[0])

    @_collective
    def refuse(self, error: UniEPError) -> None:
        if self.num_ranks > 1:
            self.planner.refuse(type(error)(f"rank {self.rank}: {error}"))

    def look(self) -> None:
        """Nothing: the device waits, and the host does not know."""

    def waited(self) -> Tensor:
        return self.planner.waited

    def check(self) -> None:
        self.planner.check_all()

    def way_of(self, tokens: int, lora: tuple[str, ...] = ()) -> Way:
        return self.ways.with_lora(lora)[tokens]

    def prepare(self) -> None:
        """Compile what calls of this schedule launch, by empty forwards and backwards.  Collective.

        For int64 ids, stacked w13 and all gradients; other calls compile some kernels at their first time.
        """
        inputs = self._no_tokens(
            ExpertWeights.zeros(self.cfg, self.planner.local, dtype=self.cfg.dtype, device=self.device)
        )
        with self._order.turn:
            planner = self.planner
            room = planner.allocate, planner.received  # these calls need none
            try:
                for way in self.ways.kinds():
                    self.forward(inputs, save=False, way=way)
                    _, saved = self.forward(inputs, save=True, way=way)
                    self.backward(inputs.x_TD, inputs, saved, Needs(), blocks=planner.member.blocks, way=way)
            finally:
                planner.allocate, planner.received = room
        torch.cuda.synchronize(self.device)

    def _no_tokens(self, experts: ExpertWeights) -> Inputs:
        """Of an empty call, with int64 ids."""
        x_TD = torch.empty(0, self.cfg.hidden, dtype=self.cfg.dtype, device=self.device)
        ids_TK = torch.empty(0, self.cfg.top_k, dtype=torch.int64, device=self.device)
        return Inputs(x_TD, ids_TK, torch.empty(ids_TK.shape, dtype=torch.float32, device=self.device), experts)

    def fake_saved(self, num_tokens: int | SymInt, x_TD: Tensor, new_size: Callable[[], SymInt]) -> list[Tensor]:
        exact, way = self.cfg.max_rows is None, self.way
        rows = new_size() if exact else self.planner.capacity
        if way.expanded:
            kept = rows, self.cfg.hidden
        elif exact and self.num_ranks > 1 and not way.again:
            kept = new_size(), self.cfg.hidden
        else:
            kept = self.kept_shape(0)
        h = 1 + self.cfg.gated, 0 if way.recomputes else rows, self.cfg.ffn
        of_call = [torch.empty_like(extent(0, 0, 0))] if exact else []
        return [*of_call, *self.planner.fake(num_tokens, rows, x_TD), x_TD.new_empty(h), x_TD.new_empty(kept)]

    def report(self) -> dict[str, str]:
        return {
            "backend": f"hopper: rank {self.rank} of {self.num_ranks} on {torch.cuda.get_device_name(self.device)}",
            "schedule": self.schedule.name
            if self.schedule.mega_to == 0
            else f"{self.schedule.name}; one kernel each way for calls of up to {self.schedule.mega_to} tokens",
            "rows": "allocated by the last call's need, read back beside the GPU's work"
            if self.cfg.max_rows is None
            else f"max_rows={self.cfg.max_rows}, no host read",
            **kept_for_backward(self.schedule),
            "main_grad": MAIN_GRAD,
            "waits": "measured: entries, and tokens and results where no product runs; traces have those in kernels",
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
            self.recorded.known.clear()
            self._lasting.clear()

    @_collective
    def forward(self, inputs: Inputs, save: bool, way: Way | None = None) -> tuple[Tensor, list[Tensor]]:
        """way: None for that of so many tokens."""
        self.way = way or self.way_of(inputs.x_TD.shape[0], inputs.experts.adapted)
        try:
            _check_experts(inputs.experts)
        except UniEPError as error:
            self.refuse(error)
            raise
        experts, layer = _readable(inputs.experts), inputs.layer
        x_TD, ids_TK, weights_TK = given = tuple(map(aligned, (inputs.x_TD, inputs.ids_TK, inputs.weights_TK)))
        inputs = Inputs(x_TD, ids_TK, weights_TK, experts, layer)
        num_tokens, planner = x_TD.shape[0], self.planner

        def perform() -> list[Any]:
            y_TD, saved = Forward(self, inputs, save).made()
            return [y_TD, *saved]

        while True:
            rows = planner.allocate, planner.received
            key = save, num_tokens, rows, ids_TK.dtype, self.stay_local, *layout_of(experts)
            result = (
                self.recorded.call(key, (*given, *experts.tensors, *experts.factors), layer, True, perform)
                if way is None and num_tokens and not self.way.computes_in_torch("forward")
                else perform()
            )
            if planner.fits():
                y_TD, *saved = result
                return y_TD, self._with_extent(self._with_all_received(saved, num_tokens)) if save else saved
            del result

    def _with_extent(self, saved: list[Tensor]) -> list[Tensor]:
        if self.cfg.max_rows is not None:
            return saved
        return [extent(*self.planner.extent, self._sources_kept()), *saved]

    def _sources_kept(self) -> int:
        """How many ranks' tokens a forward keeps for its backward, a block of each."""
        return 0 if self.way.expanded or self.way.again else self.num_ranks - 1

    def trimmed(self, saved: list[Tensor]) -> list[Tensor]:
        return trimmed(saved, self.planner.tile_rows) if self.cfg.max_rows is None else saved

    def _with_all_received(self, saved: list[Tensor], num_tokens: int) -> list[Tensor]:
        """The rare call in which a source has sent more tokens than there was room for keeps them now: they lie in the
        receive buffer until this rank enters another call."""
        sources = self._sources_kept()
        if sources and self.planner.received > len(saved[-1]) // sources:
            saved[-1] = self.room_to_keep(num_tokens)
            self.copy_received(saved[-1], self._stream)
        return saved

    @_collective
    def backward(
        self, dy_TD: Tensor, inputs: Inputs, saved: list[Tensor], needs: Needs, main_grads: MainGrads | None = None,
        blocks: int = 1, way: Way | None = None,
    ) -> ExpertGradients:  # fmt: skip
        self.way = way or self.way_of(dy_TD.shape[0], inputs.experts.adapted)
        experts, layer, num_tokens = _readable(inputs.experts), inputs.layer, dy_TD.shape[0]
        dy_TD, x_TD, ids_TK = map(aligned, (dy_TD, inputs.x_TD, inputs.ids_TK))
        inputs = Inputs(x_TD, ids_TK, inputs.weights_TK, experts, layer)
        saved = whole(saved, self.planner.tile_rows) if self.cfg.max_rows is None else saved

        def perform() -> list[Any]:
            got = Backward(self, dy_TD, inputs, saved, needs, main_grads, blocks).made()
            return [got.x, got.weights, *(got.w13 or ()), *(got.w2 or ()), *got.biases]

        into = main_grads.tensors if main_grads is not None else ()
        rows, kept = saved[2].shape[-1], len(saved[-1])
        accumulate = main_grads is not None and main_grads.accumulate
        by_launches = not self.way.computes_in_torch("backward") and blocks == 1  # whose rows torch operations find
        key = needs, num_tokens, rows, kept, ids_TK.dtype, len(into), accumulate, self.stay_local, *layout_of(experts)
        given = dy_TD, x_TD, ids_TK, *saved, *experts.tensors, *experts.factors, *into
        dx_TD, dweights_TK, *of_experts = (
            self.recorded.call(key, given, LayerTag(layer.number), False, perform)
            if way is None and num_tokens and not self.way.again and by_launches
            else perform()
        )
        split = len(experts.trained[0]) if needs.w13 and main_grads is None else 0
        fresh = needs.biases and (main_grads is None or not main_grads.biases)
        last = len(of_experts) - len(experts.biases) * fresh
        dw13, dw2, biases = tuple(of_experts[:split]), tuple(of_experts[split:last]), tuple(of_experts[last:])
        return ExpertGradients(dx_TD, dweights_TK, dw13 or None, dw2 or None, biases)

    # ---------------------------------------------------------------- without communication

    @contextlib.contextmanager
    def _without_communication(self) -> Iterator[None]:
        with self._order.turn:
            self.stay_local = True
            try:
                yield
            finally:
                self.stay_local = False

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


def _readable(experts: ExpertWeights) -> ExpertWeights:
    """w1 and w3 in reach of each other, and factors of LoRA contiguous and aligned, as block loads need them."""
    from uniep.launch.operands import in_reach

    experts = in_reach(experts)
    if experts.lora is None:
        return experts
    return dataclasses.replace(experts, lora=experts.lora.each(lambda factor: aligned(factor.contiguous())))


def _check_experts(experts: ExpertWeights) -> None:
    """Raise UnsupportedError for weights that block loads cannot read."""
    from uniep.launch.operands import w13_block

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
    w13_block(experts, 1, 1 + experts.gated, 8, 8)  # of w1 and w3, strides and distance


def _check_support(cfg: MoEConfig, ep_size: int, device: torch.device) -> None:
    """Raise for what this backend cannot run, with the way out."""
    if (error := why_not(cfg, device) or group_limit(ep_size)) is not None:
        raise type(error)(f"{error}; or {WAY_OUT}")
