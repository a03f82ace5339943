"""The stages of ways with one kernel for each direction, behind the plan, or the entry of a backward.

The kernels are in `uniep.kernels.mega`; what they may be asked to do, in `uniep.schedule`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from uniep.backends.hopper import staged
from uniep.backends.hopper.link import Link
from uniep.backends.hopper.trace import Records, exchanged_ids, lead_host, spans
from uniep.kernels.arguments import Sums
from uniep.launch.driver import result_like
from uniep.layout import backward_tiles, forward_tiles
from uniep.stages import Stage

if TYPE_CHECKING:
    from uniep.backends.hopper.planner import DevicePlan
    from uniep.launch.driver import Memory
    from uniep.launch.mega import TaskLists


class Forward(staged.Forward):
    """Traced, if somebody listens to `Link.trace`."""

    def enter(self, stage: Stage) -> None:
        link = self.link
        self.order = link.order_of(backward=False)
        if link.tracing:
            lead_host(link)
            self.entered_ns = torch.zeros(1, dtype=torch.int64, device=link.device)
        super().enter(stage)
        if link.tracing:
            link.planner.clock(self.entered_ns)

    def lists(self, stage: Stage) -> None:
        self.tasks = _lists(
            self.link, self.planned, forward_tiles(self.link.cfg, self.link.way), self.order, backward=False
        )

    def forward(self, stage: Stage) -> None:
        from uniep.launch import mega as launch

        link, inputs, plan = self.link, self.inputs, self.planned
        self.make_h()
        room = None
        if self.save:
            self.kept = link.room_to_keep(len(inputs.x_TD))
            room = launch.Room(self.kept, *_sent(link, plan.recv_count_R))
        self.out_TD = result_like(inputs.x_TD)
        sums = Sums(link.arena.views["returns"], inputs.ids_TK, self.output_weights, self.out_TD)
        records, tasks = _recorded(link, self.tasks)
        launch.launch_forward(
            self.sent, plan.bundle, tasks, inputs.experts, self.peers, link.cfg, link.way, link.sms,
            launch.Made(self.act_NF, self.h_2NF, room), sums, link.dispatching(),
        )  # fmt: skip
        if records is not None and link.trace is not None:
            link.join()
            link.traced_ids, link.traced_from = exchanged_ids(link), self.entered_ns
            step = launch.sum_tokens(len(inputs.x_TD), link.sms)
            link.trace += spans(link, records, plan, link.traced_ids, step, keep=self.save)


class Backward(staged.Backward):
    """Likewise."""

    def enter(self, stage: Stage) -> None:
        self.order = self.link.order_of(backward=True)
        if self.link.tracing:
            lead_host(self.link)
        super().enter(stage)

    def lists(self, stage: Stage) -> None:
        tiles = backward_tiles(self.link.cfg, self.link.way, w13=self.needs.w13, w2=self.needs.w2)
        self.tasks = _lists(self.link, self.planned, tiles, self.order, backward=True)

    def backward(self, stage: Stage) -> None:
        from uniep.launch import mega as launch
        from uniep.launch.operands import activation_memory

        link, experts, needs, views = self.link, self.inputs.experts, self.needs, self.link.arena.views
        self.through = activation_memory(self.h_2NF, experts.b2)
        memory = self.gradient_memory
        w13 = tuple(dw.view(link.planner.local, -1, link.cfg.hidden) for dw in memory.w13)
        # Where one is not needed, the weight in its place, since nothing is stored there.
        dw = dataclasses.replace(experts, w13=w13 or experts.w13, w2=memory.w2 or experts.w2)
        self.make_sums()
        made = launch.Gradients(self.through, self.addresses, dw, self.accumulate)
        sums = Sums(views["returns"], self.inputs.ids_TK, None, self.out_TD, views["dweights"], self.dweights_TK)
        records, tasks = _recorded(link, self.tasks)
        launch.launch_backward(
            self.sent, self.planned.bundle, tasks, experts, self.peers, link.cfg, link.way, link.sms, made, sums,
            link.dispatching(),
        )  # fmt: skip
        if records is not None and link.trace is not None:
            link.join()
            step = launch.sum_tokens(len(self.out_TD), link.sms)
            link.trace += spans(link, records, self.planned, link.traced_ids, step, needs=needs)


def _recorded(link: Link, lists: TaskLists) -> tuple[Records | None, TaskLists]:
    """Where tasks are recorded, if somebody listens, and the lists with it."""
    records = Records.empty(link, lists) if link.trace is not None else None
    return records, lists.recorded(*records.buffers) if records is not None else lists


def _lists(
    link: Link, plan: DevicePlan, tiles: tuple[int, int, int, int], order: Tensor | None, *, backward: bool
) -> TaskLists:
    """The tasks of a direction, made on the device."""
    from uniep.launch import mega as launch_mega

    way = link.way
    most = plan.num_rows // way.gate_up.rows
    local, device = link.planner.local, link.device
    lists = launch_mega.TaskLists.empty(most, local, tiles, device, backward=backward, order=order)
    launch_mega.launch_lists(plan.counts_RE, plan.bundle, lists, way, link.rank, link.sms, backward=backward)
    return lists


def _sent(link: Link, recv_count_R: Memory) -> tuple[Memory, int, int]:
    """`Kept.count`, parity and stride: tokens of a source's send list, or, by copies, all of them."""
    if not link.copying:
        return recv_count_R, 0, 1
    exchange = link.arena.views["exchange"]
    return exchange, exchange.stride(0), exchange.stride(1)
