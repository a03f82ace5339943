"""overlap="mega" of the Hopper backend: behind the plan, or the entry of a backward, one kernel for each direction.

The kernels are in `uniep.kernels.mega`; what they may be asked to do, in `uniep.schedule`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from uniep.backends.base import ExpertGradients, Inputs, MainGrads, Needs
from uniep.backends.hopper.link import Link
from uniep.backends.hopper.trace import Records, exchanged_ids, lead_host, spans
from uniep.config import ROW_ALIGN
from uniep.kernels.arguments import Addresses, Sums, Tokens
from uniep.launch.driver import result, result_like, temporary, unbind
from uniep.layout import backward_tiles, forward_tiles
from uniep.weights import ExpertWeights

if TYPE_CHECKING:
    from uniep.backends.hopper.planner import DevicePlan
    from uniep.launch.driver import Memory
    from uniep.launch.mega import TaskLists


def forward(link: Link, inputs: Inputs, save: bool) -> tuple[Tensor, list[Tensor]]:
    """One try: rows may not fit what is allocated for them (`Planner.fits`)."""
    from uniep.launch import mega as launch_mega

    cfg, x_TD, way = link.cfg, inputs.x_TD, link.way
    copying, tracing, order = link.copying, link.trace is not None, link.order_of(backward=False)
    if tracing:
        lead_host(link)
    entered_ns = torch.zeros(1, dtype=torch.int64, device=link.device) if tracing else None
    plan = link.planner.plan(
        inputs.ids_TK, inputs.weights_TK, send_all=(lambda: link.send_all(x_TD)) if copying else None,
        entered_ns=entered_ns, operation="forward" if save else "forward without gradients", layer=inputs.layer,
    )  # fmt: skip
    num_rows = plan.num_rows
    lists = _lists(link, plan, forward_tiles(cfg, way), order, backward=False)
    link.mark("plan")
    like: dict[str, Any] = {"dtype": cfg.dtype, "device": link.device}
    act_NF = temporary(num_rows, cfg.ffn, **like)
    h_2NF = result(1 + cfg.gated, num_rows, cfg.ffn, **like) if save else None
    x = Tokens(x_TD, link.arena.views["receive"])
    kept = launch_mega.Room(link.room_to_keep(x_TD.shape[0]), *_sent(link, plan.recv_count_R)) if save else None
    made = launch_mega.Made(act_NF, h_2NF, kept)
    weights_TK = inputs.weights_TK if cfg.weight_at == "output" else None
    sums = Sums(link.arena.views["returns"], inputs.ids_TK, weights_TK, result(*x_TD.shape, **like))
    records = Records.empty(link, lists) if tracing else None
    if records is not None:
        lists = lists.recorded(*records.buffers)
    launch_mega.launch_forward(
        x, plan.bundle, lists, inputs.experts, link.peers(), cfg, way, link.sms, made, sums,
        link.dispatching(),
    )  # fmt: skip
    link.join()
    if records is not None and link.trace is not None:
        link.traced_ids, link.traced_from = exchanged_ids(link), entered_ns
        step = launch_mega.sum_tokens(x_TD.shape[0], link.sms)
        link.trace += spans(link, records, plan, link.traced_ids, step, keep=save)
    link.mark("forward")
    return sums.out_TD, [*plan.saved(), h_2NF, kept.kept_MD] if h_2NF is not None and kept is not None else []


def backward(
    link: Link, dy_TD: Tensor, inputs: Inputs, saved: list[Tensor], needs: Needs,
    main_grads: MainGrads | None,
) -> ExpertGradients:  # fmt: skip
    """Enter, then one kernel."""
    from uniep.launch import mega as launch_mega
    from uniep.launch import staged as launch

    cfg, device, way, order = link.cfg, link.device, link.way, link.order_of(backward=True)
    if link.trace is not None:
        lead_host(link)
    experts, x_TD, ids_TK = inputs.experts, inputs.x_TD, inputs.ids_TK
    *of_plan, h_2NF, kept = saved
    plan = link.planner.restore(ids_TK.shape[0], of_plan)
    num_rows, dy = plan.num_rows, Tokens(dy_TD, link.arena.views["receive"])
    addresses = Addresses(*unbind(temporary(2, num_rows + 2 * ROW_ALIGN, dtype=torch.int64, device=device)))

    def find_rows() -> None:
        if needs.w13 or needs.w2 or cfg.bias:
            launch.launch_row_addresses(Tokens(x_TD, kept), dy, plan.bundle, link.num_ranks, link.sms, addresses)

    link.enter_planned("backward", dy_TD, plan, inputs.layer, find_rows)
    tiles = backward_tiles(cfg, way, w13=needs.w13, w2=needs.w2)
    lists = _lists(link, plan, tiles, order, backward=True)
    through = launch.activation_memory(h_2NF, experts.b2)
    dw = _weight_gradients(link, experts, needs, main_grads)
    accumulate = main_grads is not None and main_grads.accumulate
    made = launch_mega.Gradients(through, addresses, dw, accumulate)
    views = link.arena.views
    dweights_TK = result(*ids_TK.shape, dtype=torch.float32, device=device) if needs.weights else None
    dx_TD = result(*dy_TD.shape, dtype=cfg.dtype, device=device)
    sums = Sums(views["returns"], ids_TK, None, dx_TD, views["dweights"], dweights_TK)
    records = Records.empty(link, lists) if link.trace is not None else None
    if records is not None:
        lists = lists.recorded(*records.buffers)
    launch_mega.launch_backward(
        dy, plan.bundle, lists, experts, link.peers(), cfg, way, link.sms, made, sums,
        link.dispatching(),
    )  # fmt: skip
    biases: tuple[Tensor, ...] = ()
    if needs.biases:
        status = link.planner.status
        biases = launch.launch_bias_gradients(through, addresses.dy_N, plan.bundle, experts, status, link.sms)
    link.join()
    if records is not None and link.trace is not None:
        step = launch_mega.sum_tokens(dy_TD.shape[0], link.sms)
        link.trace += spans(link, records, plan, link.traced_ids, step, needs=needs)
    link.mark("backward")
    given = main_grads is None
    return ExpertGradients(
        sums.out_TD if needs.x else None,
        dweights_TK,
        dw.w13 if given and needs.w13 else None,
        dw.w2 if given and needs.w2 else None,
        biases,
    )


def _weight_gradients(link: Link, experts: ExpertWeights, needs: Needs, main_grads: MainGrads | None) -> ExpertWeights:
    """Memory of dW13 and dW2; where one is not needed, the weight in its place, since nothing is stored there."""
    dw13, dw2 = experts.w13, experts.w2
    if main_grads is not None:
        if needs.w13:
            dw13 = tuple(dw.view(link.planner.local, -1, link.cfg.hidden) for dw in main_grads.w13)
        if needs.w2:
            dw2 = main_grads.w2
    else:
        dw13 = tuple(map(result_like, dw13)) if needs.w13 else dw13
        dw2 = tuple(map(result_like, dw2)) if needs.w2 else dw2
    return dataclasses.replace(experts, w13=dw13, w2=dw2)


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
