"""overlap="mega" of the Hopper backend: behind the plan, or the entry of a backward, one kernel for each direction.

The kernels are in `uniep.kernels.mega`; what they may be asked to do, in `uniep.schedule`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from uniep.backends.base import ExpertGradients, Inputs, MainGrads, Needs, aligned
from uniep.backends.hopper.trace import Records, exchanged_ids, lead_host, spans
from uniep.config import COLUMN_GROUP, ROW_ALIGN
from uniep.layout import backward_tiles, forward_tiles
from uniep.weights import ExpertWeights

if TYPE_CHECKING:
    from uniep.backends.hopper.backend import HopperBackend
    from uniep.backends.hopper.planner import DevicePlan
    from uniep.launch.driver import Memory
    from uniep.launch.mega import Lists


def forward(backend: HopperBackend, inputs: Inputs, save: bool) -> tuple[Tensor, list[Tensor]]:
    """One try: rows may not fit what is allocated for them (`Planner.fits`)."""
    from uniep.launch import mega as launch_mega

    cfg, x_TD, way = backend.cfg, inputs.x_TD, backend.way
    copying, tracing = backend._copying, backend.trace is not None
    if tracing:
        lead_host(backend)
    entered_ns = torch.zeros(1, dtype=torch.int64, device=backend.device) if tracing else None
    plan = backend.planner.plan(
        inputs.ids_TK, inputs.weights_TK, send_all=(lambda: backend._send_all(x_TD)) if copying else None,
        entered_ns=entered_ns, operation="forward" if save else "forward without gradients", layer=inputs.layer,
    )  # fmt: skip
    rows, num_rows = plan.rows, plan.num_rows
    lists = _lists(backend, plan, forward_tiles(cfg, way), backward=False)
    backend.mark("plan")
    like: dict[str, Any] = {"dtype": cfg.dtype, "device": backend.device}
    act_NF = torch.empty(num_rows, cfg.ffn, **like)
    h_2NF = torch.empty(2, num_rows, cfg.ffn, **like) if save else None
    receive = backend.arena.views["receive"]
    kept = launch_mega.Kept(backend.room_to_keep(x_TD.shape[0]), *_sent(backend, plan.recv_count_R)) if save else None
    sums = launch_mega.Sums(backend.arena.views["returns"], inputs.ids_TK, torch.empty_like(x_TD))
    records = Records.empty(backend, lists) if tracing else None
    launch_mega.launch_forward(
        x_TD, receive, rows, lists, inputs.experts, backend._peers(), cfg, way, backend.sms, h_2NF, act_NF, kept,
        inputs.weights_TK, sums, **_dispatching(backend), trace=records.buffers if records else None,
    )  # fmt: skip
    backend._join()
    if records is not None and backend.trace is not None:
        backend.traced_ids, backend.traced_from = exchanged_ids(backend), entered_ns
        step = launch_mega.sum_tokens(x_TD.shape[0], backend.sms)
        backend.trace += spans(backend, records, plan, backend.traced_ids, step, keep=save)
    backend.mark("forward")
    return sums.out_TD, [*plan.saved(), h_2NF, kept.kept_MD] if h_2NF is not None and kept is not None else []


def backward(
    backend: HopperBackend, dy_TD: Tensor, inputs: Inputs, saved: list[Tensor], needs: Needs,
    main_grads: MainGrads | None,
) -> ExpertGradients:  # fmt: skip
    """Enter, then one kernel."""
    from uniep.launch import mega as launch_mega
    from uniep.launch import staged as launch

    cfg, device, way = backend.cfg, backend.device, backend.way
    if backend.trace is not None:
        lead_host(backend)
    experts = inputs.experts
    x_TD, dy_TD, ids_TK = map(aligned, (inputs.x_TD, dy_TD, inputs.ids_TK))
    *of_plan, h_2NF, kept = saved
    plan = backend.planner.restore(ids_TK.shape[0], of_plan)
    rows, num_rows = plan.rows, plan.num_rows
    receive = backend.arena.views["receive"]
    address_2N = torch.empty(2, num_rows + 2 * ROW_ALIGN, dtype=torch.int64, device=device)

    def find_rows() -> None:
        if needs.w13 or needs.w2:
            where_x, where_dy = (x_TD, kept), (dy_TD, receive)
            launch.launch_row_addresses(where_x, where_dy, rows, backend.num_ranks, backend.sms, address_2N)

    backend._enter_planned("backward", dy_TD, plan, inputs.layer, find_rows)
    tiles = backward_tiles(cfg, way, w13=needs.w13, w2=needs.w2)
    lists = _lists(backend, plan, tiles, backward=True)
    like: dict[str, Any] = {"dtype": cfg.dtype, "device": device}
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    made = launch_mega.Gradients(
        raw_NF=torch.empty(num_rows, cfg.ffn, **fp32),
        h_2NF=h_2NF,
        dh_N2F=torch.empty(num_rows, 2, cfg.ffn, **like),
        act_NF=torch.empty(num_rows, cfg.ffn, **like),
        groups_NG=torch.empty(num_rows, -(-cfg.ffn // COLUMN_GROUP), **fp32),
        address_2N=address_2N,
        dweights_S=backend.arena.views["dweights"],
        dweights_table=backend._table("dweights"),
        dweights_TK=torch.empty(ids_TK.shape, **fp32) if needs.weights else None,
    )
    dw = _weight_gradients(backend, experts, needs, main_grads)
    sums = launch_mega.Sums(backend.arena.views["returns"], ids_TK, torch.empty_like(dy_TD))
    records = Records.empty(backend, lists) if backend.trace is not None else None
    launch_mega.launch_backward(
        dy_TD, receive, rows, lists, experts, backend._peers(), cfg, way, backend.sms, made, dw, sums,
        accumulate=main_grads is not None and main_grads.accumulate, **_dispatching(backend),
        trace=records.buffers if records else None,
    )  # fmt: skip
    backend._join()
    if records is not None and backend.trace is not None:
        step = launch_mega.sum_tokens(dy_TD.shape[0], backend.sms)
        backend.trace += spans(backend, records, plan, backend.traced_ids, step, needs=needs)
    backend.mark("backward")
    given = main_grads is None
    return ExpertGradients(
        sums.out_TD if needs.x else None,
        made.dweights_TK,
        dw.w13 if given and needs.w13 else None,
        dw.w2 if given and needs.w2 else None,
    )


def _weight_gradients(
    backend: HopperBackend, experts: ExpertWeights, needs: Needs, main_grads: MainGrads | None
) -> ExpertWeights:
    """Memory of dW13 and dW2; where one is not needed, the weight in its place, since nothing is stored there."""
    dw13, dw2 = experts.w13, experts.w2
    if main_grads is not None:
        if needs.w13:
            dw13 = tuple(dw.view(backend.planner.local, -1, backend.cfg.hidden) for dw in main_grads.w13)
        if needs.w2:
            dw2 = main_grads.w2
    else:
        fresh = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
        dw13 = tuple(map(fresh, dw13)) if needs.w13 else dw13
        dw2 = tuple(map(fresh, dw2)) if needs.w2 else dw2
    return ExpertWeights(dw13, dw2, experts.layout)


def _lists(backend: HopperBackend, plan: DevicePlan, tiles: tuple[int, int, int, int], *, backward: bool) -> Lists:
    """The tasks of a direction, made on the device."""
    from uniep.launch import mega as launch_mega

    most = plan.num_rows // backend.way.gate_up.rows
    lists = launch_mega.Lists.empty(most, backend.planner.local, tiles, backend.device, backward=backward)
    launch_mega.launch_lists(
        plan.counts_RE, plan.rows, lists, backend.way, backend.rank, backend.sms, backward=backward
    )
    return lists


def _sent(backend: HopperBackend, recv_count_R: Memory) -> tuple[Memory, int, int]:
    """`Kept.count`, parity and stride: tokens of a source's send list, or, by copies, all of them."""
    if not backend._copying:
        return recv_count_R, 0, 1
    exchange = backend.arena.views["exchange"]
    return exchange, exchange.stride(0), exchange.stride(1)


def _dispatching(backend: HopperBackend) -> dict[str, Any]:
    """Whether tokens are waited for, and how many programs push this rank's."""
    fused = backend._fused
    return {"fused": fused, "push_programs": backend.way.push_programs if fused else 0}
