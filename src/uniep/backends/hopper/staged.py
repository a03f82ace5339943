"""The ways of the Hopper backend that are made of stages: plan, gate_up, the down product, sums, and back.

The serial way has every stage wait for the one before; it is the oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from uniep.backends.base import ExpertGradients, Inputs, LayerTag, MainGrads, Needs
from uniep.backends.hopper.link import Link
from uniep.config import ROW_ALIGN
from uniep.kernels.arguments import ALL_HERE, Activation, Addresses, Dispatch, Sums, Tokens
from uniep.launch.driver import Memory, fill, release, result, result_like, temporary, tensor, unbind
from uniep.routing import RowBlock, row_block
from uniep.weights import ExpertWeights

if TYPE_CHECKING:
    from uniep.backends.hopper.planner import DevicePlan
    from uniep.launch.groups import GroupSums, LineTables
    from uniep.launch.staged import Peers


def forward(link: Link, inputs: Inputs, save: bool) -> tuple[Tensor, list[Tensor]]:
    """One try: rows may not fit what is allocated for them (`Planner.fits`)."""
    from uniep.launch import groups as launch_groups
    from uniep.launch import staged as launch

    cfg, device, x_TD, way = link.cfg, link.device, inputs.x_TD, link.way
    num_tokens, x = x_TD.shape[0], Tokens(x_TD, link.arena.views["receive"])
    send_all = functools.partial(link.send_all, x_TD) if link.copying else None
    plan = link.planner.plan(
        inputs.ids_TK, inputs.weights_TK, way.leads, send_all,
        operation="forward" if save else "forward without gradients", layer=inputs.layer,
    )  # fmt: skip
    link.mark("plan")
    num_rows, peers = plan.num_rows, link.peers()
    act_NF = temporary(num_rows, cfg.ffn, dtype=cfg.dtype, device=device)
    h_2NF = result(1 + cfg.gated, num_rows, cfg.ffn, dtype=cfg.dtype, device=device) if save else None
    link.dispatch(x_TD, plan, peers)
    x_ND = _expand(link, x_TD, plan, peers) if way.expanded else None
    down_sms = way.down_sms
    pipelined = down_sms > 0
    results_ND, weighted = _results(link, plan), cfg.weight_at == "output"
    if pipelined:
        link.fork(link.side)
    launch.launch_gate_up(
        x, x_ND, plan.bundle, inputs.experts, peers, cfg, way.gate_up, link.sms - down_sms, h_2NF, act_NF,
        link.dispatching(way.push_rounds[0]) if x_ND is None else ALL_HERE, count_tiles=pipelined,
    )  # fmt: skip
    link.mark("gate_up")
    kept = x_ND if x_ND is not None or not save else link.keep(num_tokens)
    if pipelined:
        # On SMs of its own until gate_up is done, then on all.
        tiles_before = -(-cfg.ffn // (way.gate_up.columns // 2))
        beside = launch.Beside(tiles_before, link.sms * way.down.programs_per_sm)
        down = functools.partial(_return_rows, link, launch.launch_down, act_NF, plan, peers, inputs.experts)
        with torch.cuda.stream(link.side):
            down(down_sms, results_ND, beside=beside)
        down(link.sms - down_sms, results_ND, beside=beside)
        link.join()
    elif plan.lines is not None and way.returns == "sums beside":
        sums = _group_sums(link, results_ND, plan.lines, plan, weighted=weighted)
        _down_and_sums(link, act_NF, plan.lines, plan, peers, inputs.experts, sums)
    else:
        _return_rows(link, launch.launch_down, act_NF, plan, peers, inputs.experts, link.sms, results_ND)
    y_TD = result_like(x_TD)
    if plan.lines is not None and way.returns == "sums after":
        sums = _group_sums(link, results_ND, plan.lines, plan, weighted=weighted)
        launch_groups.launch_group_sum(sums, peers, link.sms, signal=True)
        link.mark("group_sum")
    link.planner.wait("returned")
    _combine(link, inputs.ids_TK, inputs.weights_TK if weighted else None, plan, peers, y_TD)
    link.join()
    link.mark("combine")
    return y_TD, ([*plan.saved(), h_2NF, kept] if h_2NF is not None and kept is not None else [])


def backward(
    link: Link, dy_TD: Tensor, inputs: Inputs, saved: list[Tensor], needs: Needs, main_grads: MainGrads | None
) -> ExpertGradients:
    from uniep.launch import groups as launch_groups
    from uniep.launch import staged as launch

    cfg, device, experts, way = link.cfg, link.device, inputs.experts, link.way
    x_TD, ids_TK = inputs.x_TD, inputs.ids_TK
    *of_plan, h_2NF, kept = saved
    plan = link.planner.restore(ids_TK.shape[0], of_plan)
    num_rows, peers, receive = plan.num_rows, link.peers(), link.arena.views["receive"]
    address_2N = temporary(2, num_rows + 2 * ROW_ALIGN, dtype=torch.int64, device=device)
    addresses = Addresses(*unbind(address_2N))
    x = Tokens(x_TD, receive[:-1] if way.again else kept)

    claims = None
    if way.gradient_beside:
        claims = temporary(2, -(-plan.rows.expert_M.shape[0] // 4) * 4, dtype=torch.int32, device=device)

    def meanwhile() -> None:
        if claims is not None:
            fill(claims, 0)
        if needs.w13 or needs.w2 or cfg.bias:
            dy = Tokens(dy_TD, receive)
            launch.launch_row_addresses(x, dy, plan.bundle, link.num_ranks, link.sms, addresses)

    link.enter_planned("backward", dy_TD, plan, inputs.layer, meanwhile)
    link.dispatch(dy_TD, plan, peers)
    through = _through_activation(link, dy_TD, h_2NF, plan, peers, experts, claims)
    release()
    launch.launch_dweights(through, addresses.dy_N, plan.bundle, peers, cfg, way.down, link.sms)

    # Results travel, as d(weight) did, whether this rank needs its own or not: its peers may.
    dh_NH = through.dh_N2F.view(num_rows, cfg.h_columns)
    results_ND = _results(link, plan)  # kept until the other stream has joined
    _return_rows(link, launch.launch_gate_up_gradient, dh_NH, plan, peers, experts, link.sms, results_ND)
    dx_TD = result_like(dy_TD)
    dweights_TK = result(*ids_TK.shape, dtype=torch.float32, device=device) if needs.weights else None
    link.fork(link.side)  # the sums are memory-bound, what is beside them not
    with torch.cuda.stream(link.side):
        if plan.lines is not None:
            sums = _group_sums(link, results_ND, plan.lines, plan, weighted=False)
            launch_groups.launch_group_sum(sums, peers, link.sms, signal=True)
        link.planner.wait("returned")
        _combine(link, ids_TK, None, plan, peers, dx_TD)
        if dweights_TK is not None:
            launch.launch_used_dweights(
                link.arena.views["dweights"], ids_TK, link.planner.status, link.sms, dweights_TK
            )
    biases: tuple[Tensor, ...] = ()
    if needs.biases:  # while dO is here
        biases = launch.launch_bias_gradients(
            through, addresses.dy_N, plan.bundle, experts, link.planner.status, link.sms
        )
    dw13, dw2 = _weight_gradients(
        link, addresses, x, through.act_NF, dh_NH, experts, plan, needs, main_grads, inputs.layer
    )
    link.join()
    link.mark("combine")
    if main_grads is not None:
        dw13 = dw2 = None
    return ExpertGradients(dx_TD if needs.x else None, dweights_TK, dw13, dw2, biases)


def _through_activation(
    link: Link, dy_TD: Tensor, h_2NF: Tensor, plan: DevicePlan, peers: Peers, experts: ExpertWeights,
    claims: Tensor | None,
) -> Activation:  # fmt: skip
    """dO back through W2 and the activation.  claims: zero, two rows of a word or more for each row tile, to do
    both at once; or None."""
    from uniep.launch import staged as launch

    cfg, rows, tile, made = link.cfg, plan.bundle, link.way.down, launch.activation_memory(h_2NF, experts.b2)
    progress_M, cursor = unbind(claims) if claims is not None else (None, None)
    launch.launch_gathered_down_gradient(
        Tokens(dy_TD, link.arena.views["receive"]), rows, experts, peers, tile, link.sms, made.raw_NF,
        link.dispatching(link.way.push_rounds[1]), progress_M,
    )  # fmt: skip
    if progress_M is not None and cursor is not None:
        launch.launch_claimed_activation_gradient(made, rows, peers, cfg, tile, link.sms, progress_M, cursor)
    else:
        link.mark("down_gradient")
        launch.launch_activation_gradient(made, rows, cfg, link.sms)
    link.mark("activation_gradient")
    return made._replace(raw_NF=None)


def _weight_gradients(
    link: Link, addresses: Addresses, x: Tokens, act_NF: Tensor, dh_NH: Tensor, experts: ExpertWeights,
    plan: DevicePlan, needs: Needs, main_grads: MainGrads | None, layer: LayerTag,
) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:  # fmt: skip
    """(dw13, dw2) in the layout of `experts`: new tensors, or `main_grads`.
    x: tokens (T, D) and where the received ones are, or will be."""
    from uniep.launch import staged as launch

    local, ffn = link.planner.local, link.cfg.ffn
    how = link.planner.status, link.way.weight_gradient, link.sms
    into = main_grads
    if into is None:
        w13 = tuple(map(result_like, experts.w13)) if needs.w13 else ()
        into = MainGrads(w13, (result_like(experts.w2[0]),) if needs.w2 else (), accumulate=False)
    targets = list(into.of_blocks())
    blocks = _row_blocks(link, plan, len(targets))
    if needs.w2:
        for rows, of in zip(blocks, targets, strict=True):
            launch.launch_weight_gradient(
                _addresses(link, rows, addresses.dy_N), rows.of(act_NF), 0, of.w2[0], rows.start_e1, rows.rows_e,
                *how, transposed=False, accumulate=of.accumulate,
            )  # fmt: skip
        link.mark("weight_gradient")
    if link.way.again:
        link.dispatch_again(x.local, plan, layer)
    if needs.w13:
        for rows, of in zip(blocks, targets, strict=True):
            x_N = rows.of(x.received) if link.way.expanded else _addresses(link, rows, addresses.x_N)
            dh_of_NH = rows.of(dh_NH)
            for part, dw in enumerate(of.w13):  # w1 and w3, or both in one
                dw_eHD = dw.view(local, -1, link.cfg.hidden)
                launch.launch_weight_gradient(
                    x_N, dh_of_NH, part * ffn, dw_eHD, rows.start_e1, rows.rows_e, *how, transposed=True,
                    accumulate=of.accumulate,
                )  # fmt: skip
                link.mark("weight_gradient")
    return into.w13 or None, into.w2 or None


def _row_blocks(link: Link, plan: DevicePlan, blocks: int) -> Sequence[RowBlock]:
    """The rows of each block of source ranks, ascending."""
    rows = plan.rows
    if blocks == 1:
        return [RowBlock(rows.start_e1, rows.rows_e)]
    first = link.rank * link.planner.local
    counts_Re = tensor(plan.counts_RE)[:, first : first + link.planner.local]
    of_call = counts_Re, tensor(rows.start_e1), tensor(rows.rows_e), plan.num_rows
    return [row_block(*of_call, number, blocks) for number in range(blocks)]


def _addresses(link: Link, rows: RowBlock, address_N: Memory) -> Memory:
    """Of the block's rows."""
    if rows.row_N is None:
        return address_N
    zeros = link.arena.views["receive"][-1].data_ptr()
    return rows.addresses_of(tensor(address_N), zeros)


def _expand(link: Link, x_TD: Tensor, plan: DevicePlan, peers: Peers) -> Tensor:
    """(N, D): every row's input, contiguous; fused: this rank's tokens are pushed meanwhile."""
    from uniep.launch.staged import launch_expand

    rows_ND = result(plan.num_rows, link.cfg.hidden, dtype=link.cfg.dtype, device=link.device)
    pushing = 2 * link.way.push_programs if link.fused else 0
    tokens, tile_rows = Tokens(x_TD, link.arena.views["receive"]), link.way.gate_up.rows
    launch_expand(tokens, plan.bundle, peers, tile_rows, link.sms, rows_ND, Dispatch(link.fused, pushing))
    link.mark("expand")
    return rows_ND


def _results(link: Link, plan: DevicePlan) -> Tensor:
    """Memory for the rows (N, D) of a product that are to be added by groups, or pushed later; else any as wide."""
    if link.way.returns == "epilogue":
        return link.arena.views["receive"]
    return temporary(plan.num_rows, link.cfg.hidden, dtype=link.cfg.dtype, device=link.device)


def _return_rows(
    link: Link, product: Callable[..., None], a: Tensor, plan: DevicePlan, peers: Peers, experts: ExpertWeights,
    sms: int, out_ND: Tensor, **how: Any,
) -> None:  # fmt: skip
    """a @ B (N, D) by `product` on `sms`, delivered into the return slots of the rows' source ranks, or, where
    groups of rows are to be added first, into `out`."""
    from uniep.launch.staged import launch_push_rows

    returns, tile = link.way.returns, link.way.down
    scatter = returns == "epilogue"
    product(a, plan.bundle, experts, peers, link.cfg, tile, sms, out_ND, slots=link.slots, scatter=scatter, **how)
    link.mark("return")
    if returns == "pass":
        launch_push_rows(out_ND, plan.bundle, peers, link.slots, link.sms)
        link.mark("push_rows")


def _group_sums(link: Link, results_ND: Tensor, lines: LineTables, plan: DevicePlan, *, weighted: bool) -> GroupSums:
    """What combine groups add to what.  weighted: rows by their routing weight."""
    from uniep.launch.groups import GroupSums

    weight_N = plan.rows.weight_N if weighted else None
    one_group = link.cfg.combine_groups == link.num_ranks
    return GroupSums(results_ND, weight_N, lines.row_LK, lines.slot_LK, lines.used_TW.numel(), one_group)


def _down_and_sums(
    link: Link,
    act_NF: Tensor,
    lines: LineTables,
    plan: DevicePlan,
    peers: Peers,
    experts: ExpertWeights,
    sums: GroupSums,
) -> None:
    """The down product, its rows added by groups beside it as their tiles are done."""
    from uniep.launch import groups as launch_groups

    tile, rows = link.way.down, plan.rows
    order_M = temporary(*rows.order_M.shape, dtype=torch.int32, device=link.device)
    launch_groups.launch_return_order(plan.counts_RE, rows, link.rank, tile.rows, order_M)
    launch_groups.launch_counted_down(act_NF, plan.bundle, order_M, experts, link.cfg, tile, link.sms, sums.rows_ND)
    launch_groups.launch_claimed_sum(sums, rows, lines, peers, tile, link.sms)
    link.mark("group_sum")


def _combine(
    link: Link, ids_TK: Tensor, weights_TK: Tensor | None, plan: DevicePlan, peers: Peers, out_TD: Tensor
) -> None:
    """The fixed-order sum of what has returned: rows by slot, or, with combine groups, sums that are weighted."""
    from uniep.launch.staged import launch_combine

    if plan.lines is not None:
        ids_TK, weights_TK = plan.lines.used_TW[: out_TD.shape[0]], None
    launch_combine(Sums(link.arena.views["returns"], ids_TK, weights_TK, out_TD), peers, link.sms)
