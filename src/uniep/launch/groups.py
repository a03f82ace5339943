"""Launchers of the kernels that add rows by combine groups.  They allocate nothing.

Suffixes: L lines (R ranks of T_max tokens), K slots, W return slots of a token, N padded rows, D hidden, T tokens.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from torch import Tensor

from uniep.config import MoEConfig
from uniep.kernels.arguments import GroupRows, Lines, Rows
from uniep.kernels.groups import (
    claimed_sum_kernel,
    counted_product_kernel,
    group_sum_kernel,
    parts_kernel,
    return_order_kernel,
)
from uniep.launch.driver import Bundle, Memory, launch
from uniep.launch.operands import Peers, down, options, rows_block, stored_columns, tile_shape, w2_block
from uniep.launch.staged import BESIDE_PROGRAMS
from uniep.layout import hopper_parts_arrays, plan_words, power_of_2
from uniep.schedule import Tile
from uniep.weights import ExpertWeights

LINES_AT_ONCE = 4  # of a program


@dataclasses.dataclass(frozen=True)
class LineTables:
    """Which rows are added: views of one int32 tensor, which a backward needs again.

    row_LK, slot_LK: see kernels/groups.py.  used_TW: 0 for return slots in use, -1 for others; T the most
    tokens of a call.  cursor: of sums beside the product.
    """

    flat: Tensor
    row_LK: Tensor
    slot_LK: Tensor
    used_TW: Tensor
    cursor: Tensor

    @classmethod
    def of(cls, flat: Tensor, cfg: MoEConfig, ep_size: int) -> LineTables:
        """The views of a tensor with the words of `hopper_parts_arrays`."""
        arrays = hopper_parts_arrays(cfg, ep_size)
        parts = flat.split(plan_words(arrays))
        return cls(
            flat, *(part[: math.prod(shape)].view(shape) for part, shape in zip(parts, arrays.values(), strict=True))
        )


def launch_parts(
    exchange: Tensor, rows: Rows, lines: LineTables, call: Tensor, rank: int, num_ranks: int, num_tokens: int,
    cfg: MoEConfig, multiprocessors: int,
) -> None:  # fmt: skip
    """Fill the tables of lines, whose rows are all -1 before.  exchange: every rank's ids, as the plan reads them."""
    top_k = power_of_2(cfg.top_k)
    launch(
        parts_kernel,
        multiprocessors * 2,
        (
            exchange, rows.return_N, rows.totals, lines.row_LK, lines.slot_LK, lines.used_TW, lines.cursor, call,
            rank, num_tokens,
        ),
        {
            "LOCAL": cfg.experts_per_rank(num_ranks), "GROUP": cfg.experts_per_group, "K": cfg.top_k, "KP": top_k,
            "W": cfg.return_slots, "WP": power_of_2(cfg.return_slots), "SLOTS": cfg.max_tokens_per_rank * cfg.top_k,
            "NUM_RANKS": num_ranks, "ROWS": max(min(1024 // top_k, 128), 8),
        },
        num_warps=4,
    )  # fmt: skip


class GroupSums(NamedTuple):
    """What is added, and where to: rows (N, D), with their routing weights or None; tables of lines; return slots.

    one_group: no line has rows of two groups.
    """

    rows_ND: Tensor
    weight_N: Memory | None
    row_LK: Tensor
    slot_LK: Tensor
    slots: int
    one_group: bool

    def arguments(self, peers: Peers) -> tuple[Any, ...]:
        """The lines of the next rank come first."""
        num_lines = self.row_LK.shape[0]
        first_line = (peers.rank + 1) % peers.num_ranks * (num_lines // peers.num_ranks)
        given = GroupRows(self.rows_ND, self.weight_N, self.row_LK, self.slot_LK)
        return given, peers.wire, peers.returned_offset, num_lines, first_line

    def constants(self, peers: Peers) -> dict[str, Any]:
        width, top_k = self.rows_ND.shape[1], self.row_LK.shape[1]
        lines = Lines(width, top_k, self.slots, LINES_AT_ONCE, self._block, self.one_group)
        return {"LINES": lines, "NUM_RANKS": peers.num_ranks}

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": max(self._block // 256, 1), "enable_fp_fusion": False}

    @property
    def _block(self) -> int:
        return min(power_of_2(self.rows_ND.shape[1]), 1024)


def launch_group_sum(sums: GroupSums, peers: Peers, multiprocessors: int, *, signal: bool) -> None:
    """The sums of all lines into their return slots; then, if `signal`, the `returned` flags."""
    constants = {**sums.constants(peers), "SIGNAL": signal}
    launch(group_sum_kernel, multiprocessors * BESIDE_PROGRAMS, sums.arguments(peers), constants, **sums.options)


def launch_return_order(counts_RE: Memory, rows: Rows, rank: int, tile: Tile, order_M: Memory, group_M: Memory) -> None:
    """order (M,): the row tiles by source rank, the next rank's first.  group (M,): as of Rows."""
    (num_ranks, experts), local = counts_RE.shape, rows.rows_e.shape[0]
    launch(
        return_order_kernel,
        1,
        (counts_RE, rows.start_e1, rows.totals, order_M, group_M, rank, tile.group_rows),
        {
            "E": experts, "LOCAL": local, "LOCAL_P": power_of_2(local), "NUM_RANKS": num_ranks, "BLOCK_M": tile.rows,
        },
        num_warps=4, maxnreg=96,  # left to itself, ptxas spills to use fewer
    )  # fmt: skip


def launch_counted_down(
    act_NF: Tensor, rows: Bundle[Rows], order_M: Memory, group_M: Memory, experts: ExpertWeights, cfg: MoEConfig,
    tile: Tile, multiprocessors: int, out_ND: Tensor,
) -> None:  # fmt: skip
    """out (N, D) = act @ W2^T + b2 in the order of `order`, counting finished tiles for sums that run beside, next."""
    launch(
        counted_product_kernel,
        multiprocessors * tile.programs_per_sm,
        (
            rows, order_M, group_M, rows_block(act_NF, tile.rows, tile.depth),
            w2_block(experts, 1, tile.columns, tile.depth), rows_block(out_ND, tile.rows, stored_columns(tile, out_ND)),
            experts.b2,
        ),
        {
            "DEPTH": act_NF.shape[1], "WIDTH": out_ND.shape[1], "TILE": tile_shape(tile),
            "WEIGHTED": down(cfg, slots=1, scatter=False).WEIGHTED,
        },
        **options(tile),
    )  # fmt: skip


def launch_claimed_sum(
    sums: GroupSums, rows: Rows, lines: LineTables, peers: Peers, tile: Tile, multiprocessors: int
) -> None:  # fmt: skip
    """The sums of all lines, beside the `launch_counted_down` right before it."""
    top_k = power_of_2(sums.row_LK.shape[1])
    launch(
        claimed_sum_kernel,
        multiprocessors * BESIDE_PROGRAMS,
        (*sums.arguments(peers), rows.progress_M, lines.cursor, peers.timeout_ns, peers.rank),
        {
            **sums.constants(peers), "KP": top_k, "BLOCK_M": tile.rows,
            "TILES": -(-sums.rows_ND.shape[1] // tile.columns), "ITEM_L": max(4 * LINES_AT_ONCE, 64 // top_k),
        },
        **sums.options, maxnreg=96 if sums.one_group else 128,  # left to itself, ptxas spills to use fewer
    )  # fmt: skip
