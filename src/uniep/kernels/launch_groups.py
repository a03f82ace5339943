"""Launchers of the kernels that add rows by combine groups.  They allocate nothing.

Suffixes: L lines (R ranks of T_max tokens), K slots, W return slots of a token, N padded rows, D hidden, T tokens.
"""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from uniep.config import MoEConfig
from uniep.kernels.call import launch
from uniep.kernels.groups import group_sum_kernel, parts_kernel
from uniep.kernels.launch import Peers, Rows
from uniep.memory import hopper_parts_arrays, plan_words, power_of_2


@dataclasses.dataclass(frozen=True)
class Lines:
    """Which rows are added: views of one int32 tensor, which a backward needs again.

    row_LK, slot_LK: see kernels/groups.py.  used_TW: 0 for return slots in use, -1 for others; T the most tokens of a call.
    """

    flat: Tensor
    row_LK: Tensor
    slot_LK: Tensor
    used_TW: Tensor

    @classmethod
    def of(cls, flat: Tensor, cfg: MoEConfig, ep_size: int) -> Lines:
        """The views of a tensor with the words of `hopper_parts_arrays`."""
        arrays = hopper_parts_arrays(cfg, ep_size)
        parts = flat.split(plan_words(arrays))
        return cls(
            flat, *(part[: math.prod(shape)].view(shape) for part, shape in zip(parts, arrays.values(), strict=True))
        )


def launch_parts(
    exchange: Tensor, rows: Rows, lines: Lines, call: Tensor, rank: int, num_ranks: int, num_tokens: int,
    cfg: MoEConfig, multiprocessors: int,
) -> None:  # fmt: skip
    """Fill the tables of lines, whose rows are all -1 before.  exchange: every rank's ids, as the plan reads them."""
    top_k = power_of_2(cfg.top_k)
    launch(
        parts_kernel,
        multiprocessors * 2,
        (
            exchange, rows.return_N, rows.totals, lines.row_LK, lines.slot_LK, lines.used_TW, call, rank, num_tokens,
        ),
        {
            "LOCAL": cfg.experts_per_rank(num_ranks), "GROUP": cfg.experts_per_group, "K": cfg.top_k, "KP": top_k,
            "W": cfg.return_slots, "WP": power_of_2(cfg.return_slots), "SLOTS": cfg.max_tokens_per_rank * cfg.top_k,
            "NUM_RANKS": num_ranks, "ROWS": max(min(1024 // top_k, 128), 8),
        },
        num_warps=4,
    )  # fmt: skip


def launch_group_sum(
    rows_ND: Tensor, weight_N: Tensor | None, row_LK: Tensor, slot_LK: Tensor, peers: Peers, slots: int,
    multiprocessors: int, *, one_group: bool, signal: bool,
) -> None:  # fmt: skip
    """The sums of all lines into their return slots; the lines of the next rank first.  signal: `returned`, behind.

    slots: return slots of a rank.  one_group: no line has rows of two groups.
    """
    width, num_lines = rows_ND.shape[1], row_LK.shape[0]
    first_line = (peers.rank + 1) % peers.num_ranks * (num_lines // peers.num_ranks)
    block = min(power_of_2(width), 1024)
    launch(
        group_sum_kernel,
        multiprocessors * 6,
        (
            rows_ND, weight_N if weight_N is not None else rows_ND, row_LK, slot_LK, peers.returns_table,
            peers.flag_table, peers.returned_offset, peers.call, peers.return_ticket, peers.status, num_lines, first_line,
        ),
        {
            "D": width, "K": row_LK.shape[1], "SLOTS": slots, "NUM_RANKS": peers.num_ranks, "BLOCK_L": 4,
            "BLOCK_D": block, "WEIGHTED": weight_N is not None, "ONE_GROUP": one_group, "SIGNAL": signal,
        },
        num_warps=max(block // 256, 1), enable_fp_fusion=False,
    )  # fmt: skip
