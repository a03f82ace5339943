"""Launchers: what each GEMM and row kernel takes, from tensors and a Tile.

kernels/arguments.py has the bundles that they take, launch/operands.py makes them.

Suffixes: N padded rows, M row tiles, e local experts, D hidden, F ffn, T tokens, K slots.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from uniep.config import ROW_TILES, MoEConfig
from uniep.kernels.arguments import (
    ALL_HERE,
    Activation,
    Addresses,
    Dispatch,
    LowRank,
    Product,
    RowPart,
    Rows,
    Segments,
    Sums,
    TileShape,
    Tokens,
)
from uniep.kernels.biases import bias_gradient_kernel
from uniep.kernels.gemm import gate_up_kernel, gathered_product_kernel, product_kernel
from uniep.kernels.gradients import (
    activation_gradient_kernel,
    block_gradient_kernel,
    claimed_activation_gradient_kernel,
    weight_gradient_kernel,
)
from uniep.kernels.low_rank import shrink_kernel
from uniep.kernels.own import row_operator_kernel
from uniep.kernels.transfer import (
    combine_kernel,
    dweights_kernel,
    expand_kernel,
    publish_kernel,
    push_rows_kernel,
    push_tokens_kernel,
    row_addresses_kernel,
    used_dweights_kernel,
)
from uniep.launch.driver import Block, Bundle, Memory, launch
from uniep.launch.operands import (
    GEMM_PUSH_ROWS,
    PUSH_ROWS,
    Peers,
    down,
    gate_up_gradient,
    h_blocks,
    is_crowded,
    layer_shape,
    low_blocks,
    options,
    rows_block,
    stored_columns,
    tile_shape,
    w2_block,
    w13_block,
)
from uniep.layout import power_of_2
from uniep.routing.blocks import RowBlocks
from uniep.schedule import MOST_VALUES, Tile
from uniep.weights import ExpertWeights

EXPAND_WARPS = 24  # of a multiprocessor
SHRINK_PROGRAMS = 2  # of a multiprocessor
BESIDE_PROGRAMS = 6  # of a multiprocessor, for what runs beside a product; most come when it ends (docs/log.md)


@dataclasses.dataclass(frozen=True)
class Beside:
    """A launch, of several, of a product that runs beside the one that makes its rows.

    programs: of all launches together.  tiles_before: tiles of a row tile there, where launches claim what is done.
    part: of the row tiles, where each launch is behind its part there.
    """

    programs: int
    tiles_before: int = 0
    part: RowPart | None = None


def launch_expand(
    tokens: Tokens, rows: Bundle[Rows], peers: Peers, tile_rows: int, multiprocessors: int, out_ND: Tensor,
    dispatch: Dispatch = ALL_HERE,
) -> None:  # fmt: skip
    """out (N, D): every row's input, contiguous."""
    width = out_ND.shape[1]
    warps = 8 if dispatch.fused else 4  # few registers, to fit beside a GEMM
    launch(
        expand_kernel,
        multiprocessors * EXPAND_WARPS // warps,
        (tokens, out_ND, rows, peers.wire, *peers.waiting, tokens.local.shape[0], dispatch.push_programs),
        {
            "D": width, "BLOCK_D": min(power_of_2(width), 1024), "ROWS": 8, "BLOCK_M": tile_rows,
            "SENDING": peers.sending(width, PUSH_ROWS), "FUSED": dispatch.fused,
        },
        num_warps=warps,
    )  # fmt: skip


def launch_gate_up(
    tokens: Tokens, given: Memory | None, rows: Bundle[Rows], experts: ExpertWeights, peers: Peers, cfg: MoEConfig,
    tile: Tile, multiprocessors: int, h_2NF: Tensor | None, act_NF: Tensor | None, dispatch: Dispatch = ALL_HERE, *,
    low: LowRank | None = None,
) -> None:  # fmt: skip
    """act (N, F) and h (2, N, F) of every row, each unless None; act times its weight where the config says so.

    given: the rows' inputs (N, D), or the int64 address of each; None: gathered among tokens.  Tiles are counted in
    rows.progress_M.  low: with B13.
    """
    half = tile.columns // 2
    w13_desc, up_first = w13_block(experts, 1, 1 + cfg.gated, half, tile.depth)
    gate_desc, up_desc = h_blocks(h_2NF, tile.rows, half)
    address_N = given if given is not None and given.dtype == torch.int64 else None
    rows_desc = None if given is None or address_N is not None else rows_block(given, tile.rows, tile.depth)
    act_desc = None if act_NF is None else rows_block(act_NF, tile.rows, half)
    launch(
        gate_up_kernel,
        multiprocessors * tile.programs_per_sm,
        (
            tokens, rows, peers.wire, *peers.waiting, tokens.local.shape[0], dispatch.push_programs,
            dispatch.push_rounds, address_N, rows_desc, w13_desc, gate_desc, up_desc, act_desc, experts.b13,
            *low_blocks(low, tile, 1, 1 + cfg.gated, half, -1),
        ),
        {
            "LAYER": layer_shape(cfg), "TILE": tile_shape(tile),
            "SENDING": peers.sending(cfg.hidden, GEMM_PUSH_ROWS), "FUSED": dispatch.fused, "UP_FIRST": up_first,
            "COUNT_TILES": dispatch.count_tiles, "PART": dispatch.part,
        },
        **options(tile),
    )  # fmt: skip


def launch_down(
    act_NF: Tensor, rows: Bundle[Rows], experts: ExpertWeights, peers: Peers, cfg: MoEConfig, tile: Tile,
    multiprocessors: int, out_ND: Tensor, *, slots: int, scatter: bool, beside: Beside | None = None,
    low: LowRank | None = None,
) -> None:  # fmt: skip
    """out (N, D) = act @ W2^T + b2.  scatter: each row into its slot at the source rank; out gives the dtype.  low:
    with B2."""
    b_desc, product = w2_block(experts, 1, tile.columns, tile.depth), down(cfg, slots=slots, scatter=scatter)
    blocks = low_blocks(low, tile, 1, tile.columns, -1)
    _launch_product(act_NF, b_desc, blocks, out_ND, product, rows, peers, tile, multiprocessors, beside, experts.b2)


def launch_down_gradient(
    dy_ND: Tensor, rows: Bundle[Rows], experts: ExpertWeights, peers: Peers, tile: Tile, multiprocessors: int,
    raw_NF: Tensor,
) -> None:  # fmt: skip
    """raw (N, F) fp32 = dy @ W2."""
    b_desc = w2_block(experts, 1, 1, tile.depth, tile.columns)
    product = Product(dy_ND.shape[1], raw_NF.shape[1], 1, False, False, 1, False)
    _launch_product(dy_ND, b_desc, (None, None), raw_NF, product, rows, peers, tile, multiprocessors)


def launch_gathered_down_gradient(
    dy: Tokens, rows: Bundle[Rows], experts: ExpertWeights, peers: Peers, tile: Tile, multiprocessors: int,
    raw_NF: Tensor, dispatch: Dispatch, progress_M: Memory | None = None, low: LowRank | None = None,
) -> None:  # fmt: skip
    """The same with dO gathered where it lies.

    progress_M: zero; counts finished tiles for what the next launch runs beside this one.  low: with A2.
    """
    num_tokens, width = dy.local.shape
    launch(
        gathered_product_kernel,
        multiprocessors * tile.programs_per_sm,
        (
            dy, rows, peers.wire, *peers.waiting, num_tokens, dispatch.push_programs, dispatch.push_rounds, progress_M,
            w2_block(experts, 1, tile.depth, tile.columns), *low_blocks(low, tile, 1, -1, tile.columns),
            rows_block(raw_NF, tile.rows, stored_columns(tile, raw_NF)),
        ),
        {
            "D": width, "WIDTH": raw_NF.shape[1], "TILE": tile_shape(tile),
            "SENDING": peers.sending(width, GEMM_PUSH_ROWS), "FUSED": dispatch.fused,
        },
        **options(tile),
    )  # fmt: skip


def launch_gate_up_gradient(
    dh_NH: Tensor, rows: Bundle[Rows], experts: ExpertWeights, peers: Peers, cfg: MoEConfig, tile: Tile,
    multiprocessors: int, out_ND: Tensor, *, slots: int, scatter: bool, low: LowRank | None = None,
) -> None:  # fmt: skip
    """out (N, D) = dh (N, 2F) @ W13.  scatter: as for `launch_down`.  low: with A13."""
    b_desc, up_first = w13_block(experts, 1, 1, tile.depth, tile.columns)
    product = gate_up_gradient(cfg, up_first=up_first, slots=slots, scatter=scatter)
    blocks = low_blocks(low, tile, 1, -1, tile.columns)
    _launch_product(dh_NH, b_desc, blocks, out_ND, product, rows, peers, tile, multiprocessors)


def _launch_product(
    a: Tensor, b_desc: Block, low: tuple[Block | None, Block | None], out: Tensor, product: Product, rows: Bundle[Rows],
    peers: Peers, tile: Tile, multiprocessors: int, beside: Beside | None = None, bias: Tensor | None = None,
) -> None:  # fmt: skip
    programs = multiprocessors * tile.programs_per_sm
    beside = beside or Beside(programs)
    launch(
        product_kernel,
        programs,
        (
            rows, peers.wire, peers.returned_offset, beside.programs, peers.timeout_ns, peers.rank,
            rows_block(a, tile.rows, tile.depth), b_desc, *low,
            rows_block(out, tile.rows, stored_columns(tile, out)), bias,
        ),
        {
            "PRODUCT": product, "TILE": tile_shape(tile), "NUM_RANKS": peers.num_ranks,
            "TILES_BEFORE": beside.tiles_before, "PART": beside.part,
        },
        **options(tile),
    )  # fmt: skip


def launch_shrink(
    tokens: Tokens, rows_NX: Tensor | None, rows: Bundle[Rows], order: Memory, factor: Tensor, scale: float,
    peers: Peers, tile_rows: int, multiprocessors: int, out_NR: Tensor, dispatch: Dispatch = ALL_HERE, *,
    transposed: bool,
) -> None:  # fmt: skip
    """out (N, R) = cast(scale * (rows @ A^T)) for a factor A (e, r, X) if transposed, else of rows @ B, B (e, X, r).

    rows_NX: None: tokens, gathered where they lie.  order: of row tiles.  tile_rows: of the rows' tables.
    """
    depth, columns = 64, out_NR.shape[1]
    block = (1, columns, depth) if transposed else (1, depth, columns)
    num_tokens, width = tokens.local.shape
    launch(
        shrink_kernel,
        multiprocessors * SHRINK_PROGRAMS,
        (
            tokens, rows, peers.wire, *peers.waiting, num_tokens, dispatch.push_programs, order,
            None if rows_NX is None else rows_block(rows_NX, tile_rows, depth),
            Block(factor, tuple(factor.shape), factor.stride(), block), rows_block(out_NR, tile_rows, columns),
        ),
        {
            "DEPTH": factor.shape[2 if transposed else 1], "B": "transposed" if transposed else "plain",
            "SCALE": scale, "TILE": TileShape(tile_rows, columns, depth, 1),
            "SENDING": peers.sending(width, PUSH_ROWS), "FUSED": dispatch.fused,
        },
        num_warps=4, num_stages=4, enable_fp_fusion=False,
    )  # fmt: skip


def factor_tile(rank: int) -> Tile:
    """Of the gradients of a factor.  rank: padded."""
    return Tile(rows=128, columns=rank, depth=64, warps=4, stages=4, programs_per_sm=SHRINK_PROGRAMS)


def launch_activation_gradient(made: Activation, rows: Bundle[Rows], cfg: MoEConfig, multiprocessors: int) -> None:
    """dh (N, 2, F), or (N, 1, F) without a gate, the activation that dW2 contracts (N, F), and the column-group sums of
    d(weight) (N, G)."""
    launch(
        activation_gradient_kernel,
        multiprocessors * 8,  # 32 warps: memory-bound
        (made, rows),
        {
            "F": cfg.ffn, "ROWS": 16, "COLUMNS": 256, "ACTIVATION": cfg.activation, "LIMIT": cfg.activation_limit,
            "WEIGHTED": cfg.weight_at == "activation",
        },
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def launch_claimed_activation_gradient(
    made: Activation, rows: Bundle[Rows], peers: Peers, cfg: MoEConfig, tile: Tile, multiprocessors: int,
    progress_M: Memory, cursor: Memory,
) -> None:  # fmt: skip
    """The same, beside the `launch_gathered_down_gradient` right before it.  cursor: zero."""
    plain = cfg.activation == "swiglu" and cfg.activation_limit is None
    registers = {} if plain else {"maxnreg": 96}  # left to itself, ptxas spills to use fewer
    launch(
        claimed_activation_gradient_kernel,
        multiprocessors * BESIDE_PROGRAMS,
        (made, rows, progress_M, cursor, peers.wire.fields.status, peers.timeout_ns, peers.rank),
        {
            "F": cfg.ffn, "ROWS": 4 if is_crowded(cfg) else 8,
            "COLUMNS": 256, "ACTIVATION": cfg.activation, "LIMIT": cfg.activation_limit,
            "WEIGHTED": cfg.weight_at == "activation", "BLOCK_M": tile.rows, "ITEM_ROWS": 32,
            "TILES": -(-cfg.ffn // tile.columns),
        },
        num_warps=4, enable_fp_fusion=False,
        **registers,
    )  # fmt: skip


def launch_dweights(
    made: Activation, dy_N: Memory, rows: Bundle[Rows], peers: Peers, cfg: MoEConfig, tile: Tile, multiprocessors: int
) -> None:
    """d(weight) of every row, into its slot of the array whose address `dweights_table` has for the source rank.

    dy: address of each row of dO, where there is a b2.  tile: of the rows' tables.
    """
    biased, slots = made.b2 is not None, cfg.max_tokens_per_rank * cfg.top_k
    launch(
        dweights_kernel,
        multiprocessors * 2,
        (made.groups_NG, dy_N if biased else None, made.b2, rows, peers.wire),
        {"GROUPS": made.groups_NG.shape[1], "SLOTS": slots, "D": cfg.hidden, "BLOCK_M": tile.rows},
        num_warps=4, **({"enable_fp_fusion": False} if biased else {}),
    )  # fmt: skip


def launch_bias_gradients(
    dh_NH: Tensor, dy_N: Memory, weight_N: Memory, start: Memory, count: Memory, experts: ExpertWeights,
    out: tuple[Tensor, ...], status: Tensor, multiprocessors: int, blocks: int = 1, *, apart: bool = False,
) -> None:  # fmt: skip
    """out (db13, db2): sums over each expert's rows of dh, and of w * dO, at addresses dy; none without biases.

    start, count: of Rows, or of `blocks` blocks of each expert (S,).  apart: not added; blocks come first in out."""
    of_dy = weight_N, dy_N, experts.b2
    for grad, values in zip(out, (dh_NH, None), strict=False):
        launch(
            bias_gradient_kernel,
            multiprocessors * 8,
            (start, count, values, *(of_dy if values is None else (None,) * 3), status, grad),
            {
                "LOCAL": grad.shape[-2], "BLOCKS": blocks, "APART": apart, "WIDTH": grad.shape[-1], "COLUMNS": 128,
            },
            num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip


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
    x: Tokens, dy: Tokens, rows: Bundle[Rows], num_ranks: int, multiprocessors: int, addresses: Addresses
) -> None:
    """Addresses of every row of x and dy.

    Received of dy: the receive buffer; of x: as many of its slots for each source, without the zero row.
    """
    others = max(num_ranks - 1, 1)
    launch(
        row_addresses_kernel,
        multiprocessors,
        (rows, x, dy, addresses, x.received.shape[0] // others),
        {
            "WIDTH": x.local.shape[1],
            "BLOCK": 512,
            "NUM_RANKS": num_ranks,
            "RECEIVE_BLOCK": max((dy.received.shape[0] - 1) // others, 1),
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
    b_desc = rows_block(b_NW, tile.depth, tile.columns)
    launch(
        weight_gradient_kernel,
        multiprocessors * tile.programs_per_sm,
        (
            b_desc, None if gathered else rows_block(a, tile.depth, tile.rows), a if gathered else None,
            _gradient_block(dw, tile, transposed), start, count, status, first_column,
        ),
        {
            "LOCAL": local, "HEIGHT": height, "WIDTH": width, "TILE": tile_shape(tile, tile.group_rows),
            "TRANSPOSED": transposed, "ACCUMULATE": accumulate,
        },
        **options(tile),
    )  # fmt: skip


def launch_block_gradient(
    address_P: Tensor, b_NW: Tensor, first_column: int, dw: Tensor, blocks: RowBlocks, status: Tensor, tile: Tile,
    multiprocessors: int, *, transposed: bool, accumulate: bool = False, apart: bool = False,
) -> None:  # fmt: skip
    """As `launch_weight_gradient`, by blocks of source ranks.  address: of rows of a, see `RowBlocks.addresses_of`.

    apart: blocks are not added; dw: (blocks * e, H, W), or (blocks * e, W, H), blocks first."""
    tile = tile if apart else _with_a_sum(tile)
    results, height, width = (dw.shape[0], dw.shape[2], dw.shape[1]) if transposed else dw.shape
    launch(
        block_gradient_kernel,
        multiprocessors * tile.programs_per_sm,
        (
            b_NW, Segments(blocks.start_S, blocks.row_P, address_P),
            _gradient_block(dw, tile, transposed), status, first_column,
        ),
        {
            "LOCAL": results // blocks.number if apart else results, "BLOCKS": blocks.number, "APART": apart,
            "HEIGHT": height, "WIDTH": width, "STRIDE": b_NW.shape[1], "TILE": tile_shape(tile, tile.group_rows),
            "TRANSPOSED": transposed, "ACCUMULATE": accumulate,
        },
        **options(tile),
    )  # fmt: skip


def _with_a_sum(tile: Tile) -> Tile:
    """So much narrower that a thread's registers have room for a sum beside its accumulator; as many bytes of loads in
    flight."""
    columns, stages = tile.columns, tile.stages
    while 2 * tile.rows * columns > 32 * tile.warps * MOST_VALUES:
        columns, stages = columns // 2, stages + 1
    return dataclasses.replace(tile, columns=columns, stages=stages)


def _gradient_block(dw: Tensor, tile: Tile, transposed: bool) -> Block:
    """Blocks in which tiles are stored."""
    columns = stored_columns(tile, dw)
    block = (1, columns, tile.rows) if transposed else (1, tile.rows, columns)
    return Block(dw, (dw.shape[0], dw.shape[1], dw.shape[2]), dw.stride(), block)


def launch_combine(sums: Sums, peers: Peers, programs: int, warps: int) -> None:
    """The fixed-order sum of the return slots."""
    (num_tokens, width), top_k = sums.out_TD.shape, sums.ids_TK.shape[1]
    launch(
        combine_kernel,
        programs,
        (sums, peers.wire, num_tokens),
        {"D": width, "K": top_k, "BLOCK_D": min(power_of_2(width), 1024)},
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def launch_publish(x_TD: Tensor, out_TD: Tensor, status: Tensor, multiprocessors: int) -> None:
    """out[:T] = x, for peers to fetch."""
    num_tokens, width = x_TD.shape
    launch(
        publish_kernel,
        multiprocessors * 4,  # 32 warps: memory-bound
        (x_TD, out_TD, status, num_tokens),
        {"D": width, "BLOCK_D": min(power_of_2(width), 1024), "ROWS": 8},
        num_warps=8,
    )


def launch_row_operator(body: Any, values_NX: Tensor, rows: Bundle[Rows], multiprocessors: int) -> None:
    """values (N, X) in place by an operator of one's own, over valid rows."""
    columns = power_of_2(values_NX.shape[1])
    at_once = min(max(2048 // columns, 1), ROW_TILES[0])
    launch(
        row_operator_kernel,
        multiprocessors * 8,
        (values_NX, rows),
        {"WIDTH": values_NX.shape[1], "COLUMNS": columns, "ROWS": at_once, "BODY": body},
        num_warps=8 if columns > 4096 else 4, enable_fp_fusion=False,
    )  # fmt: skip


def launch_push_tokens(x_TD: Tensor, rows: Bundle[Rows], peers: Peers, programs: int, warps: int) -> None:
    """All tokens into the receive buffers of their peers, or this rank's: the dispatch of the serial schedule, and
    x's second one in a backward."""
    num_tokens, width = x_TD.shape
    launch(
        push_tokens_kernel,
        programs,
        (x_TD, rows, peers.wire, peers.arrived_offset, peers.finished_offset, num_tokens, peers.rank),
        {"SENDING": peers.sending(width, PUSH_ROWS)},
        num_warps=warps,
    )


def launch_push_rows(
    out_ND: Tensor, rows: Bundle[Rows], peers: Peers, slots: int, programs: int, warps: int
) -> None:  # fmt: skip
    """Finished rows into their return slots: the combine of the serial schedule, and of rows behind operators of one's
    own."""
    width = out_ND.shape[1]
    launch(
        push_rows_kernel,
        programs,
        (out_ND, rows, peers.wire, peers.returned_offset),
        {
            "SLOTS": slots, "WIDTH": width, "BLOCK_D": min(power_of_2(width), 1024), "ROWS": 8,
            "NUM_RANKS": peers.num_ranks,
        },
        num_warps=warps,
    )  # fmt: skip
