"""Launchers: what each GEMM and row kernel takes, from tensors and a Tile.  They allocate nothing.

`Rows` are the tables of one rank's routed rows.  `Peers` is what fused kernels need of the other ranks; `alone`
serves kernels whose rows are all here.

Suffixes: N padded rows, M row tiles, e local experts, D hidden, F ffn, T tokens, K slots.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from uniep.config import MoEConfig
from uniep.errors import UnsupportedError
from uniep.kernels.gemm import gate_up_kernel, gathered_product_kernel, product_kernel
from uniep.kernels.gradients import (
    activation_gradient_kernel,
    claimed_activation_gradient_kernel,
    weight_gradient_kernel,
)
from uniep.kernels.transfer import (
    combine_kernel,
    dweights_kernel,
    expand_kernel,
    push_rows_kernel,
    push_tokens_kernel,
    row_addresses_kernel,
    used_dweights_kernel,
)
from uniep.launch.driver import Block, Memory, launch, unbind
from uniep.layout import power_of_2
from uniep.schedule import Tile
from uniep.weights import ExpertWeights

MAX_STRIDE_BYTES = 2**40  # of a Hopper tensor map


class Rows(NamedTuple):
    """Tables of the rows; all int32 but weight_N (fp32).

    start_e1, rows_e: first row and number of rows of each expert.  expert_M: expert of each row tile.
    order_M, backward_order_M: the row tiles as kernels that wait for rows walk them.
    progress_M, cursor: zero; counted up by kernels that run beside each other.
    send_token_RT, send_count_R: what this rank sends to each.  totals: (2 or more,), padded rows and row tiles.
    """

    source_N: Memory
    return_N: Memory
    weight_N: Memory
    start_e1: Memory
    rows_e: Memory
    expert_M: Memory
    order_M: Memory
    backward_order_M: Memory
    progress_M: Memory
    cursor: Memory
    send_token_RT: Memory
    send_count_R: Memory
    totals: Memory


@dataclasses.dataclass(frozen=True)
class Peers:
    """Flags, address tables and the push of tokens; see kernels/sync.py and kernels/transfer.py."""

    rank: int
    num_ranks: int
    call: Tensor
    status: Tensor
    timeout_ns: int
    arrived: Tensor
    finished: Tensor
    returned: Tensor
    receive_table: Tensor
    returns_table: Tensor
    flag_table: Tensor
    arrived_offset: int
    finished_offset: int
    returned_offset: int
    push_ticket: Tensor
    return_ticket: Tensor
    chunk: int  # 0: copy engines send, see kernels/rows.py
    receive_block: int

    @classmethod
    def alone(cls, zero: Tensor) -> Peers:
        """No peers.  zero: an int32 zero on the device; nothing writes it."""
        return cls(
            rank=0, num_ranks=1, call=zero, status=zero, timeout_ns=0, arrived=zero, finished=zero, returned=zero,
            receive_table=zero, returns_table=zero, flag_table=zero, arrived_offset=0, finished_offset=0,
            returned_offset=0, push_ticket=zero, return_ticket=zero, chunk=1, receive_block=1,
        )  # fmt: skip

    def arguments(self, num_tokens: int, rows: Rows) -> tuple[Any, ...]:
        """Of kernels that wait for rows and, fused, push tokens first."""
        return (
            self.arrived, self.finished, self.call, self.status, self.timeout_ns, self.rank, rows.send_token_RT,
            rows.send_count_R, self.receive_table, self.flag_table, self.arrived_offset, self.finished_offset,
            self.push_ticket, num_tokens,
        )  # fmt: skip

    def constants(self, width: int, rows: int) -> dict[str, Any]:
        """rows: tokens that a pushing program moves at once."""
        return {
            "NUM_RANKS": self.num_ranks, "CHUNK": self.chunk, "RECEIVE_BLOCK": self.receive_block,
            "PUSH_D": min(power_of_2(width), 1024), "PUSH_ROWS": rows,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Beside:
    """A product that runs beside the one that makes its rows, in several launches.

    tiles_before: tiles of a row tile there.  programs: of all launches together.
    """

    tiles_before: int
    programs: int


def options(tile: Tile) -> dict[str, Any]:
    """Launch options of a GEMM kernel.  Fusion off: results may not depend on what a compiler contracts."""
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}


def stored_columns(tile: Tile, out: Tensor) -> int:
    """Of each block in which a kernel stores a tile into `out`: see `store_tile`."""
    return tile.columns // (4 if out.dtype == torch.float32 else 2)


def rows_block(matrix: Memory, rows: int, columns: int) -> Block:
    """Blocks of a contiguous matrix."""
    shape = matrix.shape
    return Block(matrix, (shape[0], shape[1]), (shape[1], 1), (rows, columns))


def w13_block(experts: ExpertWeights, *block: int) -> tuple[Block, bool]:
    """(blocks of (e, 2, F, D), whether its first half is the up projection).

    A pair (w1, w3) is one 4-dimensional tensor whose second stride is the distance between the two.
    """
    if experts.layout == "stacked":  # (e, 2F, D) or (e, 2, F, D)
        w13 = experts.w13[0]
        f, row = w13.shape[-2], w13.stride(-2)
        if w13.dim() == 3:
            f //= 2
        half = f * row if w13.dim() == 3 else w13.stride(1)
        return Block(w13, (w13.shape[0], 2, f, w13.shape[-1]), (w13.stride(0), half, row, 1), block), False
    gate, up = experts.w13
    if gate.stride() != up.stride():
        raise UnsupportedError(
            f"w1 and w3 have strides {gate.stride()} and {up.stride()}; one tensor map reads both: allocate them "
            "alike, or as one w13 (e, 2F, D)"
        )
    e, f, d = gate.shape
    distance = up.data_ptr() - gate.data_ptr()
    if abs(distance) >= MAX_STRIDE_BYTES or distance % 16:
        raise UnsupportedError(
            f"w1 and w3 lie {abs(distance)} bytes apart; a tensor-map stride must be a multiple of 16 below "
            f"{MAX_STRIDE_BYTES}; allocate them together, or as one w13 (e, 2F, D)"
        )
    first = gate if distance > 0 else up
    strides = (gate.stride(0), abs(distance) // gate.element_size(), gate.stride(1), 1)
    return Block(first, (e, 2, f, d), strides, block), distance < 0


def w2_block(experts: ExpertWeights, *block: int) -> Block:
    """Blocks of (e, D, F), or of (e, 1, D, F) for a 4-dimensional block."""
    w2 = experts.w2[0]
    e, d, f = w2.shape
    if len(block) == 4:
        return Block(w2, (e, 1, d, f), (w2.stride(0), w2.stride(0), w2.stride(1), 1), block)
    return Block(w2, (e, d, f), (w2.stride(0), w2.stride(1), 1), block)


def launch_expand(
    x_TD: Tensor, receive_MD: Tensor, rows: Rows, peers: Peers, tile_rows: int, multiprocessors: int, out_ND: Tensor,
    *, fused: bool = False, push_programs: int = 0,
) -> None:  # fmt: skip
    """out (N, D): every row's input, contiguous.  fused: rows are waited for, and `push_programs` programs push this
    rank's tokens meanwhile."""
    width = out_ND.shape[1]
    warps = 8 if fused else 4  # few registers, to fit beside a GEMM
    launch(
        expand_kernel,
        multiprocessors * 24 // warps,
        (
            x_TD, receive_MD, out_ND, rows.source_N, rows.order_M, rows.totals, *peers.arguments(x_TD.shape[0], rows),
            push_programs,
        ),
        {
            "D": width, "BLOCK_D": min(power_of_2(width), 1024), "ROWS": 8, "BLOCK_M": tile_rows,
            **peers.constants(width, 16), "FUSED": fused,
        },
        num_warps=warps,
    )  # fmt: skip


def launch_gate_up(
    x_TD: Tensor, receive_MD: Tensor, rows_ND: Tensor | None, rows: Rows, experts: ExpertWeights, peers: Peers,
    cfg: MoEConfig, tile: Tile, multiprocessors: int, h_2NF: Tensor | None, act_NF: Tensor, *, fused: bool = False,
    push_programs: int = 0, push_rounds: int = 0, count_tiles: bool = False,
) -> None:  # fmt: skip
    """act (N, F) and, unless None, h (2, N, F) of every row; act times its weight where the config says so.

    rows_ND: the rows' inputs; None: gathered where they lie, and if `fused` waited for, while `push_programs`
    programs push this rank's tokens.  count_tiles: in rows.progress_M.
    """
    ffn, half = cfg.ffn, tile.columns // 2
    w13_desc, up_first = w13_block(experts, 1, 2, half, tile.depth)
    act_desc = rows_block(act_NF, tile.rows, half)
    rows_desc = act_desc if rows_ND is None else rows_block(rows_ND, tile.rows, tile.depth)
    gate_desc = up_desc = act_desc
    if h_2NF is not None:
        gate_desc, up_desc = (rows_block(h_NF, tile.rows, half) for h_NF in unbind(h_2NF))
    launch(
        gate_up_kernel,
        multiprocessors * tile.programs_per_sm,
        (
            x_TD, receive_MD, rows_desc, rows.source_N, rows.weight_N, rows.order_M, rows.expert_M, rows.totals,
            *peers.arguments(x_TD.shape[0], rows), push_programs, push_rounds, rows.progress_M, w13_desc, gate_desc,
            up_desc, act_desc,
        ),
        {
            "D": cfg.hidden, "F": ffn, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth,
            "GROUP_M": tile.group_rows, **peers.constants(cfg.hidden, 32), "GATHERED": rows_ND is None,
            "FUSED": fused, "SAVE_H": h_2NF is not None, "ACTIVATION": cfg.activation,
            "WEIGHTED": cfg.weight_at == "activation", "UP_FIRST": up_first, "COUNT_TILES": count_tiles,
        },
        **options(tile),
    )  # fmt: skip


def launch_down(
    act_NF: Tensor, rows: Rows, experts: ExpertWeights, peers: Peers, tile: Tile, multiprocessors: int, out_ND: Tensor,
    *, slots: int, scatter: bool, beside: Beside | None = None,
) -> None:  # fmt: skip
    """out (N, D) = act @ W2^T.  scatter: each row into its slot at the source rank; out gives dtype and width."""
    b_desc = w2_block(experts, 1, tile.columns, tile.depth)
    _product(
        act_NF, b_desc, out_ND, rows, peers, tile, multiprocessors, halves=1, transposed=True, up_first=False,
        slots=slots, scatter=scatter, beside=beside,
    )  # fmt: skip


def launch_down_gradient(
    dy_ND: Tensor, rows: Rows, experts: ExpertWeights, peers: Peers, tile: Tile, multiprocessors: int, raw_NF: Tensor
) -> None:
    """raw (N, F) fp32 = dy @ W2."""
    b_desc = w2_block(experts, 1, 1, tile.depth, tile.columns)
    _product(
        dy_ND, b_desc, raw_NF, rows, peers, tile, multiprocessors, halves=1, transposed=False, up_first=False, slots=1,
        scatter=False,
    )  # fmt: skip


def launch_gathered_down_gradient(
    dy_TD: Tensor, receive_MD: Tensor, rows: Rows, experts: ExpertWeights, peers: Peers, tile: Tile,
    multiprocessors: int, raw_NF: Tensor, *, fused: bool, push_programs: int, push_rounds: int,
    progress_M: Memory | None = None,
) -> None:  # fmt: skip
    """The same with dO gathered where it lies; if `fused` waited for, while `push_programs` push this rank's.

    progress_M: zero; counts finished tiles for what the next launch runs beside this one.
    """
    width = dy_TD.shape[1]
    launch(
        gathered_product_kernel,
        multiprocessors * tile.programs_per_sm,
        (
            dy_TD, receive_MD, rows.source_N, rows.backward_order_M, rows.expert_M, rows.totals,
            *peers.arguments(dy_TD.shape[0], rows), push_programs, push_rounds,
            progress_M if progress_M is not None else rows.progress_M,
            w2_block(experts, 1, tile.depth, tile.columns), rows_block(raw_NF, tile.rows, stored_columns(tile, raw_NF)),
        ),
        {
            "D": width, "WIDTH": raw_NF.shape[1], "BLOCK_M": tile.rows, "BLOCK_N": tile.columns,
            "BLOCK_K": tile.depth, "GROUP_M": tile.group_rows, **peers.constants(width, 32), "FUSED": fused,
            "COUNT_TILES": progress_M is not None,
        },
        **options(tile),
    )  # fmt: skip


def launch_gate_up_gradient(
    dh_NH: Tensor, rows: Rows, experts: ExpertWeights, peers: Peers, tile: Tile, multiprocessors: int, out_ND: Tensor,
    *, slots: int, scatter: bool,
) -> None:  # fmt: skip
    """out (N, D) = dh (N, 2F) @ W13.  scatter: as for `launch_down`."""
    b_desc, up_first = w13_block(experts, 1, 1, tile.depth, tile.columns)
    _product(
        dh_NH, b_desc, out_ND, rows, peers, tile, multiprocessors, halves=2, transposed=False, up_first=up_first,
        slots=slots, scatter=scatter,
    )  # fmt: skip


def _product(
    a: Tensor, b_desc: Any, out: Tensor, rows: Rows, peers: Peers, tile: Tile, multiprocessors: int, *, halves: int,
    transposed: bool, up_first: bool, slots: int, scatter: bool, beside: Beside | None = None,
) -> None:  # fmt: skip
    programs = multiprocessors * tile.programs_per_sm
    launch(
        product_kernel,
        programs,
        (
            rows_block(a, tile.rows, tile.depth), b_desc, rows_block(out, tile.rows, stored_columns(tile, out)),
            rows.expert_M, rows.totals, rows.return_N, peers.returns_table, peers.flag_table,
            peers.returned_offset, peers.call, peers.return_ticket, beside.programs if beside else programs,
            rows.order_M, rows.progress_M, rows.cursor, peers.status, peers.timeout_ns, peers.rank,
        ),
        {
            "DEPTH": a.shape[1] // halves, "WIDTH": out.shape[1], "SLOTS": slots, "HALVES": halves,
            "TRANSPOSED": transposed, "UP_FIRST": up_first, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns,
            "BLOCK_K": tile.depth, "GROUP_M": tile.group_rows, "NUM_RANKS": peers.num_ranks, "SCATTER": scatter,
            "TILES_BEFORE": beside.tiles_before if beside else 0,
        },
        **options(tile),
    )  # fmt: skip


def launch_activation_gradient(
    raw_NF: Tensor, h_2NF: Tensor, rows: Rows, cfg: MoEConfig, multiprocessors: int, dh_N2F: Tensor, act_NF: Tensor,
    groups_NG: Tensor,
) -> None:  # fmt: skip
    """dh (N, 2, F), the activation that dW2 contracts (N, F), and the column-group sums of d(weight) (N, G)."""
    launch(
        activation_gradient_kernel,
        multiprocessors * 8,
        (raw_NF, *unbind(h_2NF), rows.weight_N, rows.totals, dh_N2F, act_NF, groups_NG),
        {
            "F": raw_NF.shape[1], "ROWS": 16, "COLUMNS": 256, "ACTIVATION": cfg.activation,
            "WEIGHTED": cfg.weight_at == "activation",
        },
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def launch_claimed_activation_gradient(
    raw_NF: Tensor, h_2NF: Tensor, rows: Rows, peers: Peers, cfg: MoEConfig, tile: Tile, multiprocessors: int,
    progress_M: Memory, cursor: Memory, dh_N2F: Tensor, act_NF: Tensor, groups_NG: Tensor,
) -> None:  # fmt: skip
    """The same, beside the `launch_gathered_down_gradient` right before it.  cursor: zero."""
    launch(
        claimed_activation_gradient_kernel,
        multiprocessors * 6,
        (
            raw_NF, *unbind(h_2NF), rows.weight_N, rows.totals, dh_N2F, act_NF, groups_NG, rows.backward_order_M,
            progress_M, cursor, peers.status, peers.timeout_ns, peers.rank,
        ),
        {
            "F": raw_NF.shape[1], "ROWS": 8, "COLUMNS": 256, "ACTIVATION": cfg.activation,
            "WEIGHTED": cfg.weight_at == "activation", "BLOCK_M": tile.rows, "ITEM_ROWS": 32,
            "TILES": -(-raw_NF.shape[1] // tile.columns),
        },
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def launch_dweights(
    groups_NG: Tensor, rows: Rows, dweights_table: Tensor, status: Tensor, slots: int, multiprocessors: int
) -> None:
    """d(weight) of every row, into its slot of the array whose address `dweights_table` has for the source rank."""
    launch(
        dweights_kernel,
        multiprocessors * 2,
        (groups_NG, rows.return_N, rows.totals, dweights_table, status),
        {"GROUPS": groups_NG.shape[1], "SLOTS": slots, "ROWS": 128},
        num_warps=4,
    )


def launch_used_dweights(
    dweights_S: Tensor, ids_TK: Tensor, status: Tensor, multiprocessors: int, out_TK: Tensor
) -> None:
    """d(weight) of this rank's slots, out of the array that all ranks have stored into."""
    launch(
        used_dweights_kernel,
        multiprocessors,
        (dweights_S, ids_TK, status, out_TK, ids_TK.numel()),
        {"BLOCK": 512},
        num_warps=4,
    )


def launch_row_addresses(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], rows: Rows, num_ranks: int, multiprocessors: int,
    address_2N: Tensor,
) -> None:  # fmt: skip
    """Addresses of every row of a and b, each (local (T, D), received (M, D)); address_2N: int64.

    Received of b: the receive buffer; of a: as many of its slots for each source, without the zero row.
    """
    of_a, of_b = unbind(address_2N)
    others = max(num_ranks - 1, 1)
    launch(
        row_addresses_kernel,
        multiprocessors,
        (rows.source_N, rows.totals, *a, of_a, *b, of_b, a[1].shape[0] // others),
        {
            "WIDTH": a[0].shape[1],
            "BLOCK": 512,
            "NUM_RANKS": num_ranks,
            "RECEIVE_BLOCK": max((b[1].shape[0] - 1) // others, 1),
        },
        num_warps=4,
    )


def launch_weight_gradient(
    a: Memory, b_NW: Tensor, first_column: int, dw: Tensor, start: Memory, count: Memory, status: Tensor, tile: Tile,
    multiprocessors: int, *, transposed: bool, accumulate: bool = False,
) -> None:  # fmt: skip
    """dW[e] = a[rows of e]^T @ b[rows of e, first_column :].  dw: (e, H, W), or (e, W, H) if transposed, of b's dtype
    or fp32; accumulate: dW is added to it.

    a: rows (N, H), or the int64 address of each (N + 2 * ROW_ALIGN,).  start, count: of Rows, or a part.
    """
    gathered = a.dtype == torch.int64
    local, height, width = (dw.shape[0], dw.shape[2], dw.shape[1]) if transposed else dw.shape
    columns = stored_columns(tile, dw)
    b_desc = rows_block(b_NW, tile.depth, tile.columns)
    out_desc = Block(
        dw,
        (dw.shape[0], dw.shape[1], dw.shape[2]),
        dw.stride(),
        (1, columns, tile.rows) if transposed else (1, tile.rows, columns),
    )
    launch(
        weight_gradient_kernel,
        multiprocessors * tile.programs_per_sm,
        (
            b_desc if gathered else rows_block(a, tile.depth, tile.rows), a, b_desc, out_desc, start, count,
            status, first_column,
        ),
        {
            "LOCAL": local, "HEIGHT": height, "WIDTH": width, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns,
            "BLOCK_K": tile.depth, "GROUP_M": tile.group_rows, "GATHERED": gathered, "TRANSPOSED": transposed,
            "ACCUMULATE": accumulate,
        },
        **options(tile),
    )  # fmt: skip


def launch_combine(
    returns_SD: Tensor, ids_TK: Tensor, weights_TK: Tensor | None, peers: Peers, multiprocessors: int, out_TD: Tensor
) -> None:
    """The fixed-order sum of the return slots."""
    top_k, width = ids_TK.shape[1], out_TD.shape[1]
    block = min(power_of_2(width), 1024)
    launch(
        combine_kernel,
        multiprocessors * 16,
        (
            returns_SD, ids_TK, weights_TK if weights_TK is not None else peers.status, out_TD, out_TD.shape[0],
            peers.status,
        ),
        {"D": width, "K": top_k, "BLOCK_D": block, "WEIGHTED": weights_TK is not None},
        num_warps=max(block // 256, 1), enable_fp_fusion=False,
    )  # fmt: skip


def launch_push_tokens(x_TD: Tensor, rows: Rows, peers: Peers, multiprocessors: int) -> None:
    """All tokens into the receive buffers of their peers: the dispatch of the serial schedule."""
    width = x_TD.shape[1]
    launch(
        push_tokens_kernel,
        multiprocessors,
        (
            x_TD, rows.send_token_RT, rows.send_count_R, peers.receive_table, peers.flag_table, peers.arrived_offset,
            peers.finished_offset, peers.call, peers.push_ticket, peers.status, x_TD.shape[0], peers.rank,
        ),
        {
            "D": width, "BLOCK_D": min(power_of_2(width), 1024), "ROWS": 16, "CHUNK": peers.chunk,
            "BLOCK_SLOTS": peers.receive_block, "NUM_RANKS": peers.num_ranks,
        },
        num_warps=8,
    )  # fmt: skip


def launch_push_rows(out_ND: Tensor, rows: Rows, peers: Peers, slots: int, multiprocessors: int) -> None:
    """Finished rows into their return slots: the combine of the serial schedule."""
    width = out_ND.shape[1]
    launch(
        push_rows_kernel,
        multiprocessors,
        (
            out_ND, rows.return_N, rows.totals, peers.returns_table, peers.flag_table, peers.returned_offset,
            peers.call, peers.return_ticket, peers.status,
        ),
        {
            "SLOTS": slots, "WIDTH": width, "BLOCK_D": min(power_of_2(width), 1024), "ROWS": 8,
            "NUM_RANKS": peers.num_ranks,
        },
        num_warps=8,
    )  # fmt: skip
