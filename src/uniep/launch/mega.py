"""Launchers of the kernels that run a whole direction: the lists of its tasks, then all tasks.  They allocate nothing.

Suffixes: N padded rows, M row tiles, D hidden, F ffn, e local experts, T tokens, K slots.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from uniep.config import MoEConfig
from uniep.kernels import lists as tasks
from uniep.kernels import mega
from uniep.launch.driver import Block, Memory, launch, unbind
from uniep.launch.staged import Peers, Rows, options, rows_block, stored_columns, w2_block, w13_block
from uniep.layout import list_words, power_of_2
from uniep.schedule import Tile
from uniep.way import Way
from uniep.weights import ExpertWeights

COUNTERS = tasks.COUNTERS.value
SUMS_PER_PROGRAM = 4  # claims of tokens to add


@dataclasses.dataclass(frozen=True)
class Lists:
    """The tasks of one direction, as the device writes them: int64 words, see kernels/lists.py.

    tiles: columns of tiles of the first and the returning product; tiles of an expert's dW2 and dW13 (0: not needed).
    counters: int32.
    """

    matrix: Tensor
    vector: Tensor
    counters: Tensor
    tiles: tuple[int, int, int, int]

    @classmethod
    def empty(
        cls, most: int, local: int, tiles: tuple[int, int, int, int], device: torch.device, *, backward: bool
    ) -> Lists:
        """For at most `most` row tiles."""
        words = list_words(most, local, tiles, backward=backward)
        matrix, vector = (torch.empty(n, dtype=torch.int64, device=device) for n in words)
        return cls(matrix, vector, torch.empty(COUNTERS + 2 * most + local, dtype=torch.int32, device=device), tiles)


def launch_lists(
    counts_RE: Memory, rows: Rows, lists: Lists, way: Way, rank: int, multiprocessors: int, *, backward: bool
) -> None:
    """The tasks of a direction in the order of the way, and its counters at zero."""
    ranks, experts = counts_RE.shape
    local = experts // ranks
    first = way.down if backward else way.gate_up
    launch(
        tasks.list_kernel,
        multiprocessors * 4,
        (
            counts_RE, rows.start_e1, rows.rows_e, rows.expert_M, rows.totals, lists.matrix, lists.vector,
            lists.counters, rank,
        ),
        {
            "E": experts, "LOCAL": local, "LOCAL_P": power_of_2(local), "NUM_RANKS": ranks, "BLOCK_M": first.rows,
            "GROUP0": first.group_rows, "GROUP1": way.down.group_rows,
            **{f"TILES{op}": count for op, count in enumerate(lists.tiles)},
            "TILES_P": power_of_2(max(lists.tiles[:2])),
            "CHUNK_EXPERTS": way.chunk_experts,
            "INTERLEAVED": way.interleaved,
            "LOCAL_FIRST": way.local_first == "all", "ROTATED": way.rotated,
            "BACKWARD": backward,
        },
        num_warps=1,  # sums without barriers
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sums:
    """What a direction adds at its end.  returns_SD: what has returned; out_TD: sums of `ids_TK`'s slots."""

    returns_SD: Tensor
    ids_TK: Tensor
    out_TD: Tensor


@dataclasses.dataclass(frozen=True)
class Gradients:
    """What a backward makes on its way, and the rows that it reads.

    raw: dO @ W2, fp32.  dh (N, 2, F), act (N, F), groups (N, G) fp32: of the activation gradient.  address_2N: of the
    rows of x and dO.  dweights_S: what other ranks store, at the addresses in dweights_table; dweights_TK: this
    rank's own or None.
    """

    raw_NF: Tensor
    h_2NF: Tensor
    dh_N2F: Tensor
    act_NF: Tensor
    groups_NG: Tensor
    address_2N: Tensor
    dweights_S: Tensor
    dweights_table: Tensor
    dweights_TK: Tensor | None


@dataclasses.dataclass(frozen=True)
class Kept:
    """Received tokens, room for as many of each source.  count: tokens that each source has sent (int32), `stride`
    words apart, those of odd calls `parity` words behind those of even ones."""

    kept_MD: Tensor
    count: Memory
    parity: int
    stride: int


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


def launch_forward(
    x_TD: Tensor, receive_MD: Tensor, rows: Rows, lists: Lists, experts: ExpertWeights, peers: Peers, cfg: MoEConfig,
    way: Way, multiprocessors: int, h_2NF: Tensor | None, act_NF: Tensor, kept: Kept | None,
    weights_TK: Tensor, sums: Sums, *, fused: bool, push_programs: int, trace: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """A forward behind its plan.  h and kept: None where nothing is saved.  trace: int64 rows of 5, a task each."""
    tile1, tile2, half = way.gate_up, way.down, way.gate_up.columns // 2
    hidden, ffn = cfg.hidden, cfg.ffn
    w13_desc, up_first = w13_block(experts, 1, 2, half, tile1.depth)
    made_desc = rows_block(act_NF, tile1.rows, half)
    gate_desc = up_desc = made_desc
    if h_2NF is not None:
        gate_desc, up_desc = (rows_block(h_NF, tile1.rows, half) for h_NF in unbind(h_2NF))
    keep = kept or Kept(x_TD, peers.status, 0, 0)
    launch(
        mega.forward_kernel,
        num_programs(multiprocessors),
        (
            x_TD, receive_MD, rows.source_N, rows.weight_N, rows.return_N, rows.expert_M, rows.totals, lists.matrix,
            lists.counters, peers.arrived, peers.finished, peers.returned, peers.call, peers.status, peers.timeout_ns,
            peers.rank, rows.send_token_RT, rows.send_count_R, peers.receive_table, peers.returns_table,
            peers.flag_table, peers.arrived_offset, peers.finished_offset, peers.returned_offset, x_TD.shape[0],
            push_programs, sum_tokens(x_TD.shape[0], multiprocessors), keep.kept_MD, keep.count, keep.parity,
            keep.stride, keep.kept_MD.shape[0] // max(peers.num_ranks - 1, 1), sums.returns_SD, sums.ids_TK, weights_TK,
            sums.out_TD, *(trace or (lists.matrix, lists.matrix)), w13_desc, gate_desc, up_desc, made_desc,
            rows_block(act_NF, tile2.rows, tile2.depth), w2_block(experts, 1, tile2.columns, tile2.depth),
        ),
        {
            "D": hidden, "F": ffn, "K": cfg.top_k, "BLOCK_M": tile1.rows, "BLOCK_N1": tile1.columns,
            "BLOCK_K1": tile1.depth, "BLOCK_N2": tile2.columns, "BLOCK_K2": tile2.depth,
            "BLOCK_D": min(power_of_2(hidden), 2048), "SLOTS": cfg.max_tokens_per_rank * cfg.top_k,
            "KEPT": way.chunk_tokens, **peers.constants(hidden, 32),
            "FUSED": fused, "SAVE": kept is not None, "ACTIVATION": cfg.activation,
            "WEIGHTED": cfg.weight_at == "activation", "UP_FIRST": up_first, "THREADS": 32 * tile1.warps,
            "TRACE": trace is not None,
        },
        **mega_options((tile1, tile2)),
    )  # fmt: skip


def launch_backward(
    dy_TD: Tensor, receive_MD: Tensor, rows: Rows, lists: Lists, experts: ExpertWeights, peers: Peers, cfg: MoEConfig,
    way: Way, multiprocessors: int, made: Gradients, dw: ExpertWeights, sums: Sums, *, accumulate: bool,
    fused: bool, push_programs: int, trace: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """A backward behind its entry.  dw: memory of dW13 and dW2 (not touched where `lists` has no task for them)."""
    tile, weight_tile = way.down, way.weight_gradient
    hidden, ffn = cfg.hidden, cfg.ffn
    num_rows = made.act_NF.shape[0]
    dh_NH = made.dh_N2F.view(num_rows, 2 * ffn)
    w13_desc, up_first = w13_block(experts, 1, 1, tile.depth, tile.columns)
    x_address_N, dy_address_N = unbind(made.address_2N)
    dweights = made.dweights_TK
    launch(
        mega.backward_kernel,
        num_programs(multiprocessors),
        (
            dy_TD, receive_MD, rows.source_N, rows.weight_N, rows.return_N, rows.expert_M, rows.start_e1, rows.rows_e,
            rows.totals, lists.matrix, lists.vector, lists.counters, peers.arrived, peers.finished, peers.returned,
            peers.call, peers.status, peers.timeout_ns, peers.rank, rows.send_token_RT, rows.send_count_R,
            peers.receive_table, peers.returns_table, made.dweights_table, peers.flag_table, peers.arrived_offset,
            peers.finished_offset, peers.returned_offset, dy_TD.shape[0], push_programs,
            sum_tokens(dy_TD.shape[0], multiprocessors), made.raw_NF, *unbind(made.h_2NF), made.dh_N2F, made.act_NF,
            made.groups_NG, x_address_N, dy_address_N, sums.returns_SD, made.dweights_S, sums.ids_TK, sums.out_TD,
            made.dweights_S if dweights is None else dweights, *(trace or (lists.matrix, lists.matrix)),
            w2_block(experts, 1, tile.depth, tile.columns),
            rows_block(made.raw_NF, tile.rows, stored_columns(tile, made.raw_NF)),
            rows_block(dh_NH, tile.rows, tile.depth), w13_desc,
            rows_block(made.act_NF, weight_tile.depth, weight_tile.columns),
            rows_block(dh_NH, weight_tile.depth, weight_tile.columns),
            Block(
                dw.w2[0], tuple(dw.w2[0].shape), dw.w2[0].stride(),
                (1, weight_tile.rows, stored_columns(weight_tile, dw.w2[0])),
            ),
            *(_half_block(dw, half, weight_tile) for half in (0, 1)),
        ),
        {
            "D": hidden, "F": ffn, "K": cfg.top_k, "KP": power_of_2(cfg.top_k), "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns, "BLOCK_K": tile.depth, "WEIGHT_M": weight_tile.rows,
            "WEIGHT_N": weight_tile.columns, "WEIGHT_K": weight_tile.depth,
            "ITEM_ROWS": min(max(8192 // tile.columns, 1), tile.rows), "BLOCK_D": min(power_of_2(hidden), 2048),
            "SLOTS": cfg.max_tokens_per_rank * cfg.top_k, **peers.constants(hidden, 32),
            "CHUNK_EXPERTS": way.chunk_experts, "FUSED": fused, "ACTIVATION": cfg.activation,
            "WEIGHTED": cfg.weight_at == "activation", "UP_FIRST": up_first, "ACCUMULATE": accumulate,
            "COLLECTS": dweights is not None, "THREADS": 32 * tile.warps, "TRACE": trace is not None,
        },
        **mega_options((tile, weight_tile)),
    )  # fmt: skip


def _half_block(dw: ExpertWeights, half: int, tile: Tile) -> Block:
    """Blocks of the gate or the up part (e, F, D) of dW13, in which transposed tiles are stored."""
    part, whole = dw.halves(0)[half], dw.w13[0]
    block = 1, stored_columns(tile, whole), tile.rows
    return Block(part, (whole.shape[0], *part.shape), (whole.stride(0), part.stride(0), 1), block)
