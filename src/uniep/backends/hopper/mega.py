"""overlap="mega" of the Hopper backend: behind the plan, or the entry of a backward, one kernel for each direction.

The kernels are in `uniep.kernels.mega`; what they may be asked to do, in `taskflow.schedule.is_valid`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from uniep.backends.base import ExpertGradients, Inputs, MainGrads, Needs, aligned
from uniep.backends.hopper.trace import Records, exchanged_ids, lead_host, spans
from uniep.config import COLUMN_GROUP, ROW_ALIGN
from uniep.kernels.arguments import Activation, Addresses, Dispatch, Sums, Tokens
from uniep.launch.driver import unbind
from uniep.layout import backward_tiles, forward_tiles
from uniep.weights import ExpertWeights

if TYPE_CHECKING:
    from uniep.backends.hopper.backend import HopperBackend
    from uniep.backends.hopper.planner import DevicePlan
    from uniep.launch.driver import Memory
    from uniep.launch.mega import TaskLists


def forward(backend: HopperBackend, inputs: Inputs, save: bool) -> tuple[Tensor, list[Tensor]]:
    """One try: rows may not fit what is allocated for them (`Planner.fits`)."""
    from uniep.launch import mega as launch_mega

    cfg, x_TD, schedule = backend.cfg, inputs.x_TD, backend.schedule
    copying, tracing = backend._copying, backend.trace is not None
    if tracing:
        lead_host(backend)
    entered_ns = torch.zeros(1, dtype=torch.int64, device=backend.device) if tracing else None
    plan = backend.planner.plan(
        inputs.ids_TK, inputs.weights_TK, send_all=(lambda: backend._send_all(x_TD)) if copying else None,
        entered_ns=entered_ns, operation="forward" if save else "forward without gradients", layer=inputs.layer,
    )  # fmt: skip
    num_rows = plan.num_rows
    lists = _lists(backend, plan, forward_tiles(cfg, schedule), backward=False)
    backend.mark("plan")
    like: dict[str, Any] = {"dtype": cfg.dtype, "device": backend.device}
    act_NF = torch.empty(num_rows, cfg.ffn, **like)
    h_2NF = torch.empty(2, num_rows, cfg.ffn, **like) if save else None
    x = Tokens(x_TD, backend.arena.views["receive"])
    kept = launch_mega.Room(backend.room_to_keep(x_TD.shape[0]), *_sent(backend, plan.recv_count_R)) if save else None
    made = launch_mega.Made(act_NF, h_2NF, kept)
    weights_TK = inputs.weights_TK if cfg.weight_at == "output" else None
    sums = Sums(backend.arena.views["returns"], inputs.ids_TK, weights_TK, torch.empty_like(x_TD))
    records = Records.empty(backend, lists) if tracing else None
    if records is not None:
        lists = lists.recorded(*records.buffers)
    launch_mega.launch_forward(
        x, plan.bundle, lists, inputs.experts, backend._peers(), cfg, schedule, backend.sms, made, sums,
        _dispatch(backend),
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

    cfg, device, schedule = backend.cfg, backend.device, backend.schedule
    if backend.trace is not None:
        lead_host(backend)
    experts = inputs.experts
    x_TD, dy_TD, ids_TK = map(aligned, (inputs.x_TD, dy_TD, inputs.ids_TK))
    *of_plan, h_2NF, kept = saved
    plan = backend.planner.restore(ids_TK.shape[0], of_plan)
    num_rows, dy = plan.num_rows, Tokens(dy_TD, backend.arena.views["receive"])
    addresses = Addresses(*unbind(torch.empty(2, num_rows + 2 * ROW_ALIGN, dtype=torch.int64, device=device)))

    def find_rows() -> None:
        if needs.w13 or needs.w2:
            launch.launch_row_addresses(Tokens(x_TD, kept), dy, plan.bundle, backend.num_ranks, backend.sms, addresses)

    backend._enter_planned("backward", dy_TD, plan, inputs.layer, find_rows)
    tiles = backward_tiles(cfg, schedule, w13=needs.w13, w2=needs.w2)
    lists = _lists(backend, plan, tiles, backward=True)
    like: dict[str, Any] = {"dtype": cfg.dtype, "device": device}
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    gate_NF, up_NF = unbind(h_2NF)
    through = Activation(
        torch.empty(num_rows, cfg.ffn, **fp32),
        gate_NF,
        up_NF,
        dh_N2F=torch.empty(num_rows, 2, cfg.ffn, **like),
        act_NF=torch.empty(num_rows, cfg.ffn, **like),
        groups_NG=torch.empty(num_rows, -(-cfg.ffn // COLUMN_GROUP), **fp32),
    )
    dw = _weight_gradients(backend, experts, needs, main_grads)
    accumulate = main_grads is not None and main_grads.accumulate
    made = launch_mega.Gradients(through, addresses, dw, accumulate)
    views = backend.arena.views
    dweights_TK = torch.empty(ids_TK.shape, **fp32) if needs.weights else None
    sums = Sums(views["returns"], ids_TK, None, torch.empty_like(dy_TD), views["dweights"], dweights_TK)
    records = Records.empty(backend, lists) if backend.trace is not None else None
    if records is not None:
        lists = lists.recorded(*records.buffers)
    launch_mega.launch_backward(
        dy, plan.bundle, lists, experts, backend._peers(), cfg, schedule, backend.sms, made, sums,
        _dispatch(backend),
    )  # fmt: skip
    backend._join()
    if records is not None and backend.trace is not None:
        step = launch_mega.sum_tokens(dy_TD.shape[0], backend.sms)
        backend.trace += spans(backend, records, plan, backend.traced_ids, step, needs=needs)
    backend.mark("backward")
    given = main_grads is None
    return ExpertGradients(
        sums.out_TD if needs.x else None,
        dweights_TK,
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


def _lists(backend: HopperBackend, plan: DevicePlan, tiles: tuple[int, int, int, int], *, backward: bool) -> TaskLists:
    """The tasks of a direction, made on the device."""
    from uniep.launch import mega as launch_mega

    schedule = backend.schedule
    most = plan.num_rows // schedule.gemm1.rows
    lists = launch_mega.TaskLists.empty(most, backend.planner.local, tiles, backend.device, backward=backward)
    launch_mega.launch_lists(plan.counts_RE, plan.bundle, lists, schedule, backend.rank, backend.sms, backward=backward)
    return lists


def _sent(backend: HopperBackend, recv_count_R: Memory) -> tuple[Memory, int, int]:
    """`Kept.count`, parity and stride: tokens of a source's send list, or, by copies, all of them."""
    if not backend._copying:
        return recv_count_R, 0, 1
    exchange = backend.arena.views["exchange"]
    return exchange, exchange.stride(0), exchange.stride(1)


def _dispatch(backend: HopperBackend) -> Dispatch:
    fused = backend._fused
    return Dispatch(fused, backend.schedule.push_programs if fused else 0)
