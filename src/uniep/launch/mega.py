"""Launchers of the kernels that run a whole direction: the lists of its tasks, then all tasks.  They allocate nothing.

Suffixes: N padded rows, M row tiles, D hidden, F ffn, e local experts, T tokens, K slots.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from uniep.config import MoEConfig
from uniep.kernels import mega
from uniep.kernels.arguments import (
    Activation,
    Addresses,
    Biases,
    Direction,
    Dispatch,
    Kept,
    Lists,
    Order,
    Rows,
    Sums,
    Tokens,
)
from uniep.kernels.lists import COUNTERS, list_kernel
from uniep.launch.driver import Block, Bundle, Memory, launch, temporary
from uniep.launch.operands import (
    GEMM_PUSH_ROWS,
    Peers,
    down,
    gate_up_gradient,
    h_blocks,
    is_crowded,
    layer_shape,
    options,
    rows_block,
    stored_columns,
    tile_shape,
    w2_block,
    w13_block,
)
from uniep.layout import list_words, power_of_2
from uniep.schedule import Tile
from uniep.way import Way
from uniep.weights import ExpertWeights

SUMS_PER_PROGRAM = 4  # claims of tokens to add


@dataclasses.dataclass(frozen=True)
class TaskLists:
    """The tasks of one direction, as the device writes them.

    tiles: columns of tiles of the first and the returning product; tiles of an expert's dW2 and dW13 (0: not needed).
    """

    lists: Lists
    tiles: tuple[int, int, int, int]

    def recorded(self, matrix: Tensor, vector: Tensor) -> TaskLists:
        """The same, with rows for records."""
        return TaskLists(self.lists._replace(matrix_records=matrix, vector_records=vector), self.tiles)

    @classmethod
    def empty(
        cls, most: int, local: int, tiles: tuple[int, int, int, int], device: torch.device, *, backward: bool,
        order: Tensor | None = None,
    ) -> TaskLists:  # fmt: skip
        """For at most `most` row tiles.  order: places of stretches on the device; None: closed forms."""
        words = list_words(most, local, tiles, backward=backward)
        matrix, vector = (temporary(n, dtype=torch.int64, device=device) for n in words)
        counters = temporary(COUNTERS.value + 2 * most + 2 * local, dtype=torch.int32, device=device)
        return cls(Lists(matrix, vector, counters, order=order), tiles)


def launch_lists(
    counts_RE: Memory, rows: Bundle[Rows], tasks: TaskLists, way: Way, rank: int, multiprocessors: int, *,
    backward: bool,
) -> None:  # fmt: skip
    """The tasks of a direction in the order of the way, and its counters at zero."""
    ranks, experts = counts_RE.shape
    local = experts // ranks
    first = way.down if backward else way.gate_up
    launch(
        list_kernel,
        multiprocessors * 4,
        (counts_RE, rows, tasks.lists, rank),
        {
            "E": experts, "LOCAL_P": power_of_2(local), "NUM_RANKS": ranks, "BLOCK_M": first.rows,
            "GROUP0": first.group_rows, "GROUP1": way.down.group_rows,
            **{f"TILES{op}": count for op, count in enumerate(tasks.tiles)},
            "TILES_P": power_of_2(max(tasks.tiles[:2])),
            "HOW": Order(local, way.chunk_experts, way.interleaved, way.local_first == "all", way.rotated),
            "BACKWARD": backward,
        },
        num_warps=1,  # sums without barriers
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Made:
    """What a forward makes on its way.  h (2, N, F) and kept: None where nothing is saved."""

    act_NF: Tensor
    h_2NF: Tensor | None
    kept: Room | None


@dataclasses.dataclass(frozen=True)
class Room:
    """For received tokens, as many of each source.  count: tokens that each source has sent (int32), `stride`
    words apart, those of odd calls `parity` words behind those of even ones."""

    kept_MD: Tensor
    count: Memory
    parity: int
    stride: int


@dataclasses.dataclass(frozen=True)
class Gradients:
    """What a backward makes on its way.

    dw: memory of dW13 and dW2, not touched where there is no task for them;
    accumulate: they are added to what is there.
    """

    through: Activation
    addresses: Addresses
    dw: ExpertWeights
    accumulate: bool


def num_programs(multiprocessors: int) -> int:
    """Of one kernel: all multiprocessors but one.  Its programs wait for peers, who may be in a kernel of another
    Workspace, which must find room here; one program of it is enough."""
    return max(multiprocessors - 1, 1)


def sum_tokens(num_tokens: int, multiprocessors: int) -> int:
    """Tokens that a program adds before it claims others."""
    return max(1, min(32, -(-num_tokens // (multiprocessors * SUMS_PER_PROGRAM))))


def mega_options(tiles: tuple[Tile, ...]) -> dict[str, Any]:
    """Launch options of a kernel that multiplies tiles of several shapes."""
    return {**options(tiles[0]), "num_stages": min(tile.stages for tile in tiles)}


def sum_columns(hidden: int) -> int:
    """Columns that are added at once, by preference without a mask, which takes registers."""
    return 1024 if hidden % 2048 and hidden > 1024 else min(power_of_2(hidden), 2048)


def launch_forward(
    x: Tokens, rows: Bundle[Rows], tasks: TaskLists, experts: ExpertWeights, peers: Peers, cfg: MoEConfig,
    way: Way, multiprocessors: int, made: Made, sums: Sums, dispatch: Dispatch,
) -> None:  # fmt: skip
    """A forward behind its plan."""
    tile, down_tile, half = way.gate_up, way.down, way.gate_up.columns // 2
    num_tokens, layer, others = x.local.shape[0], layer_shape(cfg), max(peers.num_ranks - 1, 1)
    w13_desc, up_first = w13_block(experts, 1, 1 + cfg.gated, half, tile.depth)
    gate_desc, up_desc = h_blocks(made.h_2NF, tile.rows, half)
    kept, parity, stride, block = Kept(None, None), 0, 0, 0
    if (room := made.kept) is not None:
        kept, parity, stride = Kept(room.kept_MD, room.count), room.parity, room.stride
        block = room.kept_MD.shape[0] // others
    launch(
        mega.forward_kernel,
        num_programs(multiprocessors),
        (
            x, rows, peers.wire, tasks.lists, kept, sums, *peers.waiting, peers.returned_offset, num_tokens,
            dispatch.push_programs, sum_tokens(num_tokens, multiprocessors), parity, stride, block,
            w13_desc, gate_desc, up_desc, rows_block(made.act_NF, tile.rows, half),
            rows_block(made.act_NF, down_tile.rows, down_tile.depth),
            w2_block(experts, 1, down_tile.columns, down_tile.depth), Biases(experts.b13, experts.b2),
        ),
        {
            "LAYER": layer, "TILE": tile_shape(tile), "DOWN_TILE": tile_shape(down_tile),
            "DOWN": down(cfg, slots=layer.SLOTS, scatter=True, checked=True),
            "SENDING": peers.sending(cfg.hidden, GEMM_PUSH_ROWS),
            "WAY": Direction(
                dispatch.fused, 32 * tile.warps, sum_columns(cfg.hidden), UP_FIRST=up_first,
                KEPT=way.chunk_tokens,
            ),
        },
        **mega_options((tile, down_tile)),
    )  # fmt: skip


def launch_backward(
    dy: Tokens, rows: Bundle[Rows], tasks: TaskLists, experts: ExpertWeights, peers: Peers, cfg: MoEConfig,
    way: Way, multiprocessors: int, made: Gradients, sums: Sums, dispatch: Dispatch,
) -> None:  # fmt: skip
    """A backward behind its entry."""
    tile, weight_tile = way.down, way.weight_gradient
    through, dw, num_tokens, layer = made.through, made.dw, dy.local.shape[0], layer_shape(cfg)
    dh_NH = through.dh_N2F.view(-1, cfg.h_columns)
    columns = sum_columns(cfg.hidden)
    values = 4096 if is_crowded(cfg) or cfg.hidden % columns else 8192  # at once; masks of sums take registers, too
    w13_desc, up_first = w13_block(experts, 1, 1, tile.depth, tile.columns)
    launch(
        mega.backward_kernel,
        num_programs(multiprocessors),
        (
            dy, rows, peers.wire, tasks.lists, through, made.addresses, sums, *peers.waiting,
            peers.returned_offset, num_tokens, dispatch.push_programs, sum_tokens(num_tokens, multiprocessors),
            w2_block(experts, 1, tile.depth, tile.columns),
            rows_block(through.raw_NF, tile.rows, stored_columns(tile, through.raw_NF)),
            rows_block(dh_NH, tile.rows, tile.depth), w13_desc,
            rows_block(through.act_NF, weight_tile.depth, weight_tile.columns),
            rows_block(dh_NH, weight_tile.depth, weight_tile.columns),
            Block(
                dw.w2[0], tuple(dw.w2[0].shape), dw.w2[0].stride(),
                (1, weight_tile.rows, stored_columns(weight_tile, dw.w2[0])),
            ),
            _half_block(dw, 0, weight_tile), _half_block(dw, 1, weight_tile) if cfg.gated else None,
        ),
        {
            "LAYER": layer, "TILE": tile_shape(tile), "WEIGHT_TILE": tile_shape(weight_tile),
            "RETURNING": gate_up_gradient(cfg, up_first=up_first, slots=layer.SLOTS, scatter=True, checked=True),
            "SENDING": peers.sending(cfg.hidden, GEMM_PUSH_ROWS),
            "WAY": Direction(
                dispatch.fused, 32 * tile.warps, columns,
                MIXED=way.chunk_experts > 0 or way.critical_path,
                ITEM_ROWS=min(max(values // tile.columns, 1), tile.rows), ACCUMULATE=made.accumulate,
            ),
        },
        **mega_options((tile, weight_tile)),
    )  # fmt: skip


def _half_block(dw: ExpertWeights, half: int, tile: Tile) -> Block:
    """Blocks of the gate or the up part (e, F, D) of dW13, in which transposed tiles are stored."""
    part, whole = dw.halves(0)[half], dw.w13[0]
    block = 1, stored_columns(tile, whole), tile.rows
    return Block(part, (whole.shape[0], *part.shape), (whole.stride(0), part.stride(0), 1), block)
