"""Plans of the Hopper backend: the routing plan on the device, and whether the rows of a call fit.

The plan is one call's `RoutingPlan` and the tile tables that kernels walk, made by the kernels of
`kernels/plan.py` without the host.  How many rows to allocate is the host's question; see `Planner.fits`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import SymInt, Tensor

from uniep.backends.base import UNKNOWN_LAYER, LayerTag
from uniep.backends.hopper.arena import Arena
from uniep.backends.hopper.calls import GAVE_UP, Calls
from uniep.config import ROW_ALIGN, align_rows
from uniep.errors import PeerTimeoutError
from uniep.kernels.arguments import PlanShape, Rows
from uniep.launch.driver import Bundle, Memory, Part, fill, launch, listed, result, temporary, tensor, unbind
from uniep.launch.groups import LineTables, launch_parts
from uniep.layout import (
    FIRST_TOKENS,
    TILE_TABLES,
    hopper_histogram,
    hopper_parts_arrays,
    hopper_plan_arrays,
    hopper_rows,
    kept_block,
    plan_blocks,
    plan_words,
    power_of_2,
    row_tables,
    tile_tables,
    with_headroom,
)
from uniep.routing import RoutingPlan
from uniep.way import Way

if TYPE_CHECKING:
    from uniep.membership import Membership

TILES_AT_ONCE = 256  # row tiles, of a program


class HeadLayout(NamedTuple):
    """Of `DevicePlan.head`: its words, and (offset in bytes, shape) of each array in it."""

    words: int
    arrays: dict[str, tuple[int, tuple[int, ...]]]


class PlanConstants(NamedTuple):
    """Of the plan's kernels.  counts: shape of the histogram."""

    counts: tuple[int, int]
    histogram: dict[str, Any]
    scan: dict[str, Any]
    tiles: dict[str, Any]
    place: dict[str, Any]


class DevicePlan:
    """A RoutingPlan on the device, with the tile tables.  All int32 but the routing weights.  forward: its call.

    Three allocations, which autograd saves: `head`, whose size depends on the number of tokens alone; tables of row
    tiles and of rows, see `layout`.  lines: with combine groups, which rows are added; one more allocation.
    """

    def __init__(
        self, layout: HeadLayout, head: Tensor, tiles_AM: Tensor, rows_BN: Tensor, lines: LineTables | None = None
    ) -> None:
        self.head, self.tiles_AM, self.rows_BN, self.lines = head, tiles_AM, rows_BN, lines
        first, int32 = head.data_ptr(), torch.int32
        part = {name: Part(head, first + offset, int32, shape) for name, (offset, shape) in layout.arrays.items()}
        self.counts_RE, self.recv_count_R = part.pop("counts_RE"), part["recv_count_R"]
        self.forward: Memory = part.pop("forward")
        source_N, return_N, weight_N, *fetched = unbind(rows_BN)
        part |= zip(TILE_TABLES, unbind(tiles_AM), strict=True)
        part |= zip(["recv_token_N"][: len(fetched)], fetched, strict=True)
        self.rows = Rows(source_N, return_N, weight_N._replace(dtype=torch.float32), **part)
        self.bundle = Bundle(self.rows)

    @property
    def num_rows(self) -> int:
        """Rows allocated: N or more."""
        return self.rows_BN.shape[1]

    def saved(self) -> list[Tensor]:
        return [self.head, self.tiles_AM, self.rows_BN, *([self.lines.flat] if self.lines is not None else [])]


def enough(room: int, needed: int) -> int:
    """Room for the next call, after one for which `room` was there: the same while it is neither too little nor an
    eighth too much, so that calls are alike; then halfway to what was needed."""
    if needed <= room <= needed + needed // 8:
        return room
    return max(needed, align_rows((room + needed) // 2))


def _num_waves(ranks: int) -> int:
    """Into how many groups segments are sorted, a power of two: by leading experts 3, by arrival `Way.waves` and one,
    but no more than there are ranks."""
    return min(max(ranks, 4), 16)


class Planner(Calls):
    """One rank's calls and plans.  way: of a call with the most tokens.  sms: multiprocessors to use."""

    def __init__(self, member: Membership, arena: Arena, way: Way, sms: int) -> None:
        super().__init__(member, arena)
        cfg, self.tile_rows, self.pull = self.cfg, way.gate_up.rows, way.pulls
        self.group_rows = way.gate_up.group_rows, way.down.group_rows
        self.local = cfg.experts_per_rank(self.num_ranks)
        tokens = min(cfg.max_tokens_per_rank, FIRST_TOKENS)
        self.allocate, self.capacity = hopper_rows(cfg, self.num_ranks, tokens)
        self.received = 0  # tokens of one source to have room for; 0: no call has shown yet
        self.extent = 0, 0  # rows of the last call, and most tokens of one source, where the host reads them
        self.sms = sms
        self._parts_words = sum(plan_words(hopper_parts_arrays(cfg, self.num_ranks)))
        self._layouts: dict[int, HeadLayout] = {}
        elements = power_of_2(self.local) * self.num_ranks * _num_waves(self.num_ranks)
        self._tiles_warps = min(max(elements // 512, 4), 16)
        self._constants = {
            (dedup, by_expert): self._plan_constants(dedup, by_expert)
            for dedup, by_expert in ((False, False), (True, False), (True, True))
        }

    def _plan_constants(self, dedup: bool, by_expert: bool) -> PlanConstants:
        """dedup: the tokens of the send lists are sent, not all.  by_expert: the order of these lists."""
        cfg, ranks, local = self.cfg, self.num_ranks, self.local
        block_t, chunks = plan_blocks(cfg, ranks)
        of_rows: dict[str, Any] = {"E": cfg.num_experts, "NUM_RANKS": ranks}
        bins = (max(power_of_2(number), 16) for number in (cfg.num_experts, local))
        shape = PlanShape(
            cfg.num_experts, next(bins), local, next(bins), cfg.top_k, power_of_2(cfg.top_k), self.slots, ranks, chunks,
            block_t,
        )  # fmt: skip
        return PlanConstants(
            hopper_histogram(cfg, ranks, by_expert),
            {"PLAN": shape, "BY_EXPERT": by_expert},
            of_rows | {"CHUNKS": chunks},
            of_rows | {
                "SLOTS": self.slots, "LOCAL": local, "LOCAL_P": power_of_2(local), "BLOCK_M": self.tile_rows,
                "ALIGN": ROW_ALIGN, "TILES": TILES_AT_ONCE, "HOST": cfg.max_rows is None, "DEDUP": dedup,
                "WAVES": _num_waves(ranks),
            },
            {"RECEIVE_BLOCK": cfg.receive_block, "ALIGN": ROW_ALIGN, "DEDUP": dedup, "PLAN": shape},
        )  # fmt: skip

    def restore(self, num_tokens: int, saved: Sequence[Tensor]) -> DevicePlan:
        """The plan that a forward saved."""
        head, tiles_AM, rows_BN, *flat = saved
        lines = LineTables.of(flat[0], self.cfg, self.num_ranks) if flat else None
        return DevicePlan(self._layout(num_tokens), head, tiles_AM, rows_BN, lines)

    def _layout(self, num_tokens: int) -> HeadLayout:
        if num_tokens not in self._layouts:
            if len(self._layouts) > 1000:  # any number of lengths may come
                self._layouts.clear()
            arrays = hopper_plan_arrays(self.cfg, self.num_ranks, num_tokens)
            ends = list(itertools.accumulate(plan_words(arrays), initial=0))
            where = {name: (4 * end, shape) for (name, shape), end in zip(arrays.items(), ends, strict=False)}
            self._layouts[num_tokens] = HeadLayout(ends[-1], where)
        return self._layouts[num_tokens]

    def fake(self, num_tokens: int | SymInt, rows: int | SymInt, like: Tensor) -> list[Tensor]:
        """Shapes of `DevicePlan.saved`."""
        words = sum(plan_words(hopper_plan_arrays(self.cfg, self.num_ranks, num_tokens)))
        lines = [(self._parts_words,)] if self.cfg.combine_groups is not None else []
        shapes = [(words,), *self._tables(rows), *lines]
        return [like.new_empty(shape, dtype=torch.int32) for shape in shapes]

    def _tables(self, rows: int | SymInt) -> tuple[Any, Any]:
        return tile_tables(rows, self.tile_rows), row_tables(rows, self.pull)

    def plan(
        self, ids_TK: Tensor, weights_TK: Tensor, leads: tuple[int, int] = (0, 0), operation: str = "forward",
        waves: int = 1, by_expert: bool = False, in_turn: bool = False,
    ) -> DevicePlan:  # fmt: skip
        """Enter a call and plan it; the tokens of the send lists are sent.  leads to in_turn: as in `make`."""
        plan = self.enter_new(ids_TK, weights_TK, operation)
        self.make(plan, ids_TK.shape[0], leads, waves, by_expert=by_expert, in_turn=in_turn)
        return plan

    def enter_new(
        self, ids_TK: Tensor, weights_TK: Tensor, operation: str, layer: LayerTag = UNKNOWN_LAYER, copies: bool = False
    ) -> DevicePlan:  # fmt: skip
        """Enter a call whose plan `make` makes.  copies: copy engines send all tokens behind it."""
        num_tokens = ids_TK.shape[0]
        int32: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        layout = self._layout(num_tokens)
        tiles, rows = self._tables(self.allocate)
        plan = DevicePlan(layout, result(layout.words, **int32), result(*tiles, **int32), result(*rows, **int32))
        self.enter(ids_TK, weights_TK, num_tokens, operation, layer, plan.forward)
        self.wait_entered(copies)
        return plan

    def clock(self, entered_ns: Tensor) -> None:
        """entered (1,): takes the device's time at this moment."""
        from uniep.kernels.entry import clock_kernel

        launch(clock_kernel, 1, (entered_ns,), {}, num_warps=1)

    def make(
        self, plan: DevicePlan, num_tokens: int, leads: tuple[int, int] = (0, 0), waves: int = 1, copies: bool = False,
        by_expert: bool = False, in_turn: bool = False,
    ) -> None:  # fmt: skip
        """leads: experts whose local tiles run first, in the forward and the backward.  waves: of tiles by arrival; 1:
        none.  copies: all tokens are sent, whatever their ids; else those of the send lists.  by_expert: the order of
        these lists, else ascending.  in_turn: the forward's other tiles of leading experts are not last."""
        from uniep.kernels.plan import histogram_kernel, place_kernel, scan_kernel, tiles_kernel

        cfg, ranks = self.cfg, self.num_ranks
        constants = self._constants[not copies, by_expert]
        lines_of_counts, columns = constants.counts
        tiles = -(-plan.num_rows // self.tile_rows)
        most_programs = 8 * self.sms
        int32: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        histogram = temporary(*constants.counts, **int32)
        first_RE = temporary(ranks, cfg.num_experts, **int32) if by_expert else None
        rows, exchange = plan.rows, self.arena.views["exchange"]
        launch(
            histogram_kernel,
            min(columns, most_programs),
            (exchange, histogram, self.call, self.status, self.rank),
            constants.histogram,
            num_warps=4,
            # Left to itself, ptxas spills to use fewer.
            maxnreg=min((96 if by_expert else 64) * max(power_of_2(cfg.num_experts) // 512, 1), 255),
        )  # fmt: skip
        launch(
            scan_kernel,
            min(lines_of_counts, most_programs),
            (histogram, plan.counts_RE, rows.send_count_R, plan.recv_count_R, first_RE, self.rank),
            constants.scan,
            num_warps=4,
        )
        launch(
            tiles_kernel,
            min(-(-tiles // TILES_AT_ONCE), 16),
            (
                exchange, plan.counts_RE, plan.bundle, self._host_totals, self.call, self.status, self.rank, *leads,
                waves, *self.group_rows,
            ),
            constants.tiles | {"IN_TURN": in_turn},
            num_warps=self._tiles_warps,
            **({"maxnreg": 128} if self._tiles_warps == 8 else {}),  # left to itself, ptxas spills to use 64
        )  # fmt: skip
        launch(
            place_kernel,
            min(columns + self.local, most_programs),
            (exchange, histogram, first_RE, plan.bundle, self.call, self.rank, num_tokens),
            constants.place,
            num_warps=4, maxnreg=96,  # left to itself, ptxas spills to use fewer
        )  # fmt: skip
        if cfg.combine_groups is not None:
            lines = LineTables.of(result(self._parts_words, **int32), cfg, ranks)
            fill(lines.flat, -1)
            launch_parts(exchange, rows, lines, self.call, self.rank, ranks, num_tokens, cfg, self.sms)
            plan.lines = lines

    def fits(self) -> bool:
        """Whether the rows of this call fitted what was allocated for them, on every rank.

        In the exact mode (max_rows None) the host allocates by the last call, launches, and reads the plan's
        totals from pinned memory while the GPU works; the rare call that needs more is made again.
        """
        if self.cfg.max_rows is not None or listed() is not None:
            return True
        give_up = time.monotonic() + self.member.timeout_s + 5
        while self._totals_words[0] != self.calls_made and self._words[0] == 0:
            if time.monotonic() > give_up:
                message = (
                    f"rank {self.rank}, call {self.calls_made}: its plan was not ready after "
                    f"{self.member.timeout_s:g} s; other work may hold the GPU; otherwise raise timeout_s"
                )
                self.fail(message, GAVE_UP)
                raise PeerTimeoutError(message)
        self._acquire()
        if self.can_agree():
            self.raise_agreed()
        self.check()
        self.is_inside = False  # all that peers need is on its way
        self.judge_digests(0)
        _, total, fitted, received = self._totals_words[:4]
        self.extent = total, received
        self.allocate = enough(self.allocate, with_headroom(total))
        self.received = enough(self.received, received)
        return bool(fitted)

    def kept_block(self, num_tokens: int, *, copying: bool) -> int:
        """Receive slots of each source that this call keeps: enough for those of the last call, or, at first, as
        this rank has tokens."""
        return kept_block(self.cfg, self.num_ranks, self.received or num_tokens, copying=copying)

    def routing_plan(self, plan: DevicePlan, num_tokens: int) -> RoutingPlan:
        """The public plan, without what lies behind the counts."""
        rows = plan.rows
        num_rows, send_count_R = int(tensor(rows.totals)[0]), tensor(rows.send_count_R)
        is_listed = torch.arange(num_tokens, device=self.device) < send_count_R[:, None]
        return RoutingPlan(
            counts_RE=tensor(plan.counts_RE),
            expert_start_e1=tensor(rows.start_e1),
            send_count_R=send_count_R,
            send_token_RT=torch.where(is_listed, tensor(rows.send_token_RT), -1),
            recv_count_R=tensor(plan.recv_count_R),
            row_source_N=plan.rows_BN[0, :num_rows],
            row_return_N=plan.rows_BN[1, :num_rows],
        )
