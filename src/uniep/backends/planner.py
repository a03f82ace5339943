"""Calls and plans of the Hopper backend: entering a call, the routing plan on the device, what a failure left.

The plan is one call's `RoutingPlan` and the tile tables that kernels walk, made by the kernels of
`kernels/plan.py` without the host.  How many rows to allocate is the host's question; see `Planner.fits`.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import SymInt, Tensor

from uniep.backends.arena import Arena
from uniep.backends.protocol import bad_id_error, decoded, encoded, error_index, error_of
from uniep.config import ROW_ALIGN
from uniep.errors import CapacityError, InputError, PeerTimeoutError, UniEPError, UnsupportedError
from uniep.kernels import sync
from uniep.kernels.call import Part, launch, tensor, unbind
from uniep.kernels.launch import Rows
from uniep.kernels.launch_groups import Lines, launch_parts
from uniep.memory import (
    EXCHANGE_HEADER,
    FIRST_TOKENS,
    hopper_histogram,
    hopper_parts_arrays,
    hopper_plan_arrays,
    hopper_rows,
    kept_block,
    plan_blocks,
    plan_words,
    power_of_2,
    table_tiles,
    with_headroom,
)
from uniep.routing import RoutingPlan

if TYPE_CHECKING:
    from uniep.workspace import Workspace

EXCHANGE_PROGRAMS = 32
TILES_AT_ONCE = 256  # row tiles, of a program
STATUS_WORDS = 16
STAGE_OF_FLAG = {
    "entered": sync.STAGE_ENTRY.value, "finished": sync.STAGE_DISPATCH.value, "returned": sync.STAGE_COMBINE.value,
}  # fmt: skip
STAGES = {
    sync.STAGE_ENTRY.value: "entry of the call",
    sync.STAGE_DISPATCH.value: "arrival of tokens",
    sync.STAGE_COMBINE.value: "return of results",
    sync.STAGE_ROWS.value: "rows of gate and up",
    sync.STAGE_SUM.value: "rows of the down product",
    sync.STAGE_RAW.value: "rows of dO @ W2",
    sync.STAGE_ACTIVATED.value: "rows of the activation's gradient",
}
TIMEOUT, BAD_ID, TOO_MANY_ROWS, REFUSED, OTHER_CALL = (
    c.value for c in (sync.TIMEOUT, sync.BAD_ID, sync.TOO_MANY_ROWS, sync.REFUSED, sync.OTHER_CALL)
)
FORWARD, BACKWARD = sync.IS_FORWARD.value, sync.IS_BACKWARD.value


class HeadLayout(NamedTuple):
    """Of `DevicePlan.head`: its words, and (offset in bytes, shape) of each array in it."""

    words: int
    arrays: dict[str, tuple[int, tuple[int, ...]]]


class DevicePlan:
    """A RoutingPlan on the device, with the tile tables.  All int32 but the routing weights.

    Two allocations, which autograd saves: `head`, what is known before the number of rows is; `rows_3N`, source, return
    slot and routing weight of every row.  lines: with combine groups, which rows are added; one more allocation.
    """

    def __init__(self, layout: HeadLayout, head: Tensor, rows_3N: Tensor, lines: Lines | None = None) -> None:
        self.head, self.rows_3N, self.lines = head, rows_3N, lines
        part = {name: Part(head, offset, torch.int32, shape) for name, (offset, shape) in layout.arrays.items()}
        self.counts_RE, self.recv_count_R = part.pop("counts_RE"), part.pop("recv_count_R")
        source_N, return_N, weight_N = unbind(rows_3N)
        self.rows = Rows(source_N, return_N, weight_N._replace(dtype=torch.float32), **part)

    @property
    def num_rows(self) -> int:
        """Rows allocated: N or more."""
        return self.rows_3N.shape[1]

    def saved(self) -> list[Tensor]:
        return [self.head, self.rows_3N, *([self.lines.flat] if self.lines is not None else [])]


class Planner:
    """One rank's call counter, status and plans.  `tile_rows`: of the tile tables."""

    def __init__(self, workspace: Workspace, arena: Arena, tile_rows: int) -> None:
        self.ws, self.cfg, self.device, self.arena = workspace, workspace.cfg, workspace.device, arena
        self.rank, self.num_ranks, self.tile_rows = workspace.rank, workspace.ep_size, tile_rows
        cfg, slots = self.cfg, self.cfg.max_tokens_per_rank * self.cfg.top_k
        self.local, self.slots = cfg.experts_per_rank(self.num_ranks), slots
        tokens = min(cfg.max_tokens_per_rank, FIRST_TOKENS)
        self.allocate, self.capacity = hopper_rows(cfg, self.num_ranks, tokens)
        self.received = 0  # tokens of one source to have room for; 0: no call has shown yet
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.timeout_ns = int(workspace.timeout_s * 1e9)
        self.calls_made = 0
        self._parts_words = sum(plan_words(hopper_parts_arrays(cfg, self.num_ranks)))
        self._layouts: dict[tuple[int, int], HeadLayout] = {}
        self.call = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=self.device)
        # Pinned memory that kernels write and the host reads without synchronising.
        self._host_status = torch.zeros(8, dtype=torch.int32).pin_memory()
        self._host_totals = torch.zeros(4, dtype=torch.int32).pin_memory()
        self._status_words = (ctypes.c_int32 * 8).from_address(self._host_status.data_ptr())
        self._totals_words = (ctypes.c_int32 * 4).from_address(self._host_totals.data_ptr())
        self.status = torch.zeros(STATUS_WORDS, dtype=torch.int32, device=self.device)
        address = torch.tensor([self._host_status.data_ptr()], dtype=torch.int64)
        self.status[8:10] = address.view(torch.int32).to(self.device)

    def check(self) -> None:
        """Raise what the device recorded.  Reads pinned memory; does not synchronise."""
        code, a, b, c, d = self._status_words[:5]
        if code == 0:
            return
        error: type[UniEPError] = InputError
        if code == TIMEOUT:
            error = PeerTimeoutError
            message = (
                f"rank {self.rank}, call {c}: rank {b} did not come within {self.ws.timeout_s:g} s "
                f"(stage: {STAGES[a]}; expected signal {c}, seen {d}). Every rank must make the same calls; "
                "see that no rank has stopped, or raise timeout_s"
            )
        elif code == TOO_MANY_ROWS:
            error = CapacityError
            message = (
                f"rank {a} was routed {c} rows but max_rows={self.cfg.max_rows} leaves room for {d} with alignment; "
                "raise max_rows, or pass max_rows=None to allocate exactly"
            )
        elif code == BAD_ID:
            message = f"routing ids outside -1 .. {self.cfg.num_experts - 1} came from rank {a}, entry {b}"
        elif code == OTHER_CALL:
            error = UniEPError
            theirs, ours = ("a backward", "a forward") if b == FORWARD else ("something else", "a backward")
            message = (
                f"rank {a} entered {theirs} where rank {self.rank} entered {ours}; every rank must make the same calls "
                "in the same order"
            )
        else:
            message = f"rank {a} refused its inputs; the error it raised says why"
        self.ws.fail(message)
        raise error(message)

    def enter(
        self, ids_TK: Tensor | None, weights_TK: Tensor | None, num_tokens: int, refusal: Tensor | None = None
    ) -> None:
        """Enter the next call: publish ids and weights (None: nothing but the entry), or a refusal, to every peer."""
        from uniep.kernels.plan import exchange_kernel

        self.check()
        self.calls_made += 1
        launch(
            exchange_kernel,
            EXCHANGE_PROGRAMS,
            (
                ids_TK if ids_TK is not None else self.call, weights_TK if weights_TK is not None else self.call,
                refusal if refusal is not None else self.call, num_tokens, self.allocate,
                self.arena.tables["exchange"], self.arena.tables["flags"], self.arena.flag_offset("entered"),
                self.call, self.ticket, self.rank,
            ),
            {
                "K": self.cfg.top_k, "SLOTS": self.slots, "NUM_RANKS": self.num_ranks, "BLOCK": 1024,
                "HAS_IDS": ids_TK is not None, "REFUSE": refusal is not None,
            },
            num_warps=4,
        )  # fmt: skip

    def refuse(self, error: UniEPError) -> None:
        """Enter the call that the peers make, with nothing but the reason why this rank does not."""
        words = torch.zeros(EXCHANGE_HEADER, dtype=torch.int32)
        words[3] = error_index(error)
        text = encoded(str(error), 4 * (EXCHANGE_HEADER - 4) - 1)
        words.view(torch.uint8)[16 : 16 + len(text)] = text
        self.enter(None, None, 0, words.to(self.device))
        self.wait("entered")

    def wait_entered(self, kind: int) -> None:
        """Wait until every rank has entered this call, of this kind."""
        self.wait("entered", kind)

    def wait(self, flag: str, kind: int = -1) -> None:
        """Make the stream wait until `flag` of every other rank has reached this call.

        One program waits, where kernels that come after it would hold all multiprocessors.
        """
        if self.num_ranks == 1:
            return
        from uniep.kernels.plan import barrier_kernel

        args = (
            self.arena.flag_view(flag), self.arena.views["exchange"], self.call, self.status, self.timeout_ns, self.rank
        )  # fmt: skip
        constants = {"SLOTS": self.slots, "NUM_RANKS": self.num_ranks, "STAGE": STAGE_OF_FLAG[flag], "KIND": kind}
        launch(barrier_kernel, 1, args, constants, num_warps=1)

    def restore(self, num_tokens: int, saved: Sequence[Tensor]) -> DevicePlan:
        """The plan that a forward saved."""
        head, rows_3N, *flat = saved
        lines = Lines.of(flat[0], self.cfg, self.num_ranks) if flat else None
        return DevicePlan(self._layout(num_tokens, rows_3N.shape[1]), head, rows_3N, lines)

    def _arrays(self, num_tokens: int | SymInt, tiles: int | SymInt) -> dict[str, Any]:
        return hopper_plan_arrays(self.cfg, self.num_ranks, tiles, num_tokens)

    def _layout(self, num_tokens: int, rows: int) -> HeadLayout:
        key = num_tokens, table_tiles(rows, self.tile_rows)
        if key not in self._layouts:
            if len(self._layouts) > 1000:  # any number of lengths may come
                self._layouts.clear()
            arrays = self._arrays(*key)
            ends = list(itertools.accumulate(plan_words(arrays), initial=0))
            where = {name: (4 * end, shape) for (name, shape), end in zip(arrays.items(), ends, strict=False)}
            self._layouts[key] = HeadLayout(ends[-1], where)
        return self._layouts[key]

    def fake(self, num_tokens: int | SymInt, rows: int | SymInt, like: Tensor) -> list[Tensor]:
        """Shapes of `DevicePlan.saved`."""
        words = sum(plan_words(self._arrays(num_tokens, table_tiles(rows, self.tile_rows))))
        return [
            like.new_empty((words,), dtype=torch.int32),
            like.new_empty((3, rows), dtype=torch.int32),
            *([like.new_empty((self._parts_words,), dtype=torch.int32)] if self.cfg.combine_groups is not None else []),
        ]

    def plan(
        self,
        ids_TK: Tensor,
        weights_TK: Tensor,
        leads: tuple[int, int] = (0, 0),
        send_all: Callable[[], None] | None = None,
        entered_ns: Tensor | None = None,
    ) -> DevicePlan:
        """Enter a call and plan it.  leads: experts whose local tiles run first, in the forward and the backward.

        send_all: queues the sending of all tokens of this rank, whatever their ids, once all peers have entered;
        None: the tokens of the send lists are sent.  entered_ns (1,): takes the device's time at that moment.
        """
        from uniep.kernels.plan import clock_kernel, histogram_kernel, place_kernel, scan_kernel, tiles_kernel

        if self.cfg.max_rows is None and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "this call is being captured in a CUDA graph, but max_rows is None, so that the host has to read the "
                "number of rows; set MoEConfig.max_rows"
            )
        cfg, ranks, num_tokens = self.cfg, self.num_ranks, ids_TK.shape[0]
        slots_p = power_of_2(cfg.top_k)
        block_t, chunks = plan_blocks(cfg, ranks)
        tiles = table_tiles(self.allocate, self.tile_rows)
        most_programs = 8 * self.sms
        int32: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        histogram = torch.empty(hopper_histogram(cfg, ranks), **int32)
        layout = self._layout(num_tokens, self.allocate)
        plan = DevicePlan(layout, torch.empty(layout.words, **int32), torch.empty(3, self.allocate, **int32))
        rows, exchange = plan.rows, self.arena.views["exchange"]
        shape: dict[str, Any] = {
            "K": cfg.top_k, "KP": slots_p, "SLOTS": self.slots, "NUM_RANKS": ranks, "CHUNKS": chunks,
            "BLOCK_T": block_t,
        }  # fmt: skip
        self.enter(ids_TK, weights_TK, num_tokens)
        # One program waits for late ranks, so that others' kernels find multiprocessors meanwhile.
        self.wait_entered(FORWARD)
        if entered_ns is not None:
            launch(clock_kernel, 1, (entered_ns,), {}, num_warps=1)
        if send_all is not None:
            send_all()
        launch(
            histogram_kernel,
            min(ranks * chunks, most_programs),
            (
                exchange, histogram, self.call, self.status, self.rank,
            ),
            {"E": cfg.num_experts, "EP": max(power_of_2(cfg.num_experts), 16), "LOCAL": self.local, **shape},
            num_warps=4,
        )  # fmt: skip
        launch(
            scan_kernel,
            min(cfg.num_experts + 1 + ranks, most_programs),
            (histogram, plan.counts_RE, rows.send_count_R, plan.recv_count_R, self.rank),
            {"E": cfg.num_experts, "NUM_RANKS": ranks, "CHUNKS": chunks},
            num_warps=4,
        )
        launch(
            tiles_kernel,
            min(-(-tiles // TILES_AT_ONCE), 16),
            (
                exchange, plan.counts_RE, rows.send_count_R, plan.recv_count_R, rows.start_e1, rows.rows_e,
                rows.expert_M, rows.order_M, rows.backward_order_M, rows.progress_M, rows.cursor, rows.totals,
                self._host_totals, self.call, self.status, self.rank, *leads,
            ),
            {
                "E": cfg.num_experts, "SLOTS": self.slots, "LOCAL": self.local, "LOCAL_P": power_of_2(self.local),
                "NUM_RANKS": ranks, "BLOCK_M": self.tile_rows, "ALIGN": ROW_ALIGN, "TILES": TILES_AT_ONCE,
                "HOST": cfg.max_rows is None, "DEDUP": send_all is None,
            },
            num_warps=4,
        )  # fmt: skip
        launch(
            place_kernel,
            min(ranks * chunks + self.local, most_programs),
            (
                exchange, histogram, rows.start_e1, rows.rows_e, rows.totals, rows.source_N, rows.return_N,
                rows.weight_N, rows.send_token_RT, self.call, self.rank, num_tokens,
            ),
            {
                "E": cfg.num_experts, "LOCAL": self.local, "BINS": max(power_of_2(self.local), 16), **shape,
                "RECEIVE_BLOCK": cfg.receive_block, "ALIGN": ROW_ALIGN, "DEDUP": send_all is None,
            },
            num_warps=4,
        )  # fmt: skip
        if cfg.combine_groups is not None:
            lines = Lines.of(torch.full((self._parts_words,), -1, **int32), cfg, ranks)
            launch_parts(exchange, rows, lines, self.call, self.rank, ranks, num_tokens, cfg, self.sms)
            plan.lines = lines
        return plan

    def fits(self) -> bool:
        """Whether the rows of this call fitted what was allocated for them, on every rank.

        In the exact mode (max_rows None) the host allocates by the last call, launches, and reads the plan's
        totals from pinned memory while the GPU works; the rare call that needs more is made again.
        """
        if self.cfg.max_rows is not None:
            return True
        give_up = time.monotonic() + self.ws.timeout_s + 5
        while self._totals_words[0] != self.calls_made and self._status_words[0] == 0:
            if time.monotonic() > give_up:
                message = (
                    f"rank {self.rank}, call {self.calls_made}: its plan was not ready after {self.ws.timeout_s:g} s; "
                    "other work holds the GPU, or raise timeout_s"
                )
                self.ws.fail(message)
                raise PeerTimeoutError(message)
        if self._status_words[0] in (BAD_ID, REFUSED):
            self._raise_inputs()
        self.check()
        _, total, fitted, received = self._totals_words[:4]
        self.allocate = with_headroom(max(total, (self.allocate + total) // 2) if fitted else total)
        self.received = max(received, (self.received + received) // 2)
        return bool(fitted)

    def kept_block(self, num_tokens: int, *, copying: bool) -> int:
        """Receive slots of each source that this call keeps: enough for those of the last call, or, at first, as
        this rank has tokens."""
        return kept_block(self.cfg, self.num_ranks, self.received or num_tokens, copying=copying)

    def _raise_inputs(self) -> NoReturn:
        """Some rank's ids are bad, or it refused its inputs: forget the failure, raise the same on every rank."""
        torch.cuda.synchronize(self.device)
        exchange = self.arena.views["exchange"][self.calls_made % 2].cpu()
        self.status[:8] = 0
        self._host_status.zero_()
        torch.cuda.synchronize(self.device)
        for source in range(self.num_ranks):
            header = exchange[source, :EXCHANGE_HEADER]
            if header[2]:
                raise error_of(int(header[3]))(decoded(header[4:].view(torch.uint8)).rstrip("\0"))
            count = int(header[0]) * self.cfg.top_k
            ids_TK = exchange[source, EXCHANGE_HEADER : EXCHANGE_HEADER + count].view(-1, self.cfg.top_k)
            if (error := bad_id_error(ids_TK, source, self.cfg.num_experts)) is not None:
                raise error
        raise AssertionError("the plan reported bad inputs, but no rank's are bad")

    def routing_plan(self, plan: DevicePlan, num_tokens: int) -> RoutingPlan:
        """The public plan, without what lies behind the counts."""
        rows = plan.rows
        num_rows, send_count_R = int(tensor(rows.totals)[0]), tensor(rows.send_count_R)
        listed = torch.arange(num_tokens, device=self.device) < send_count_R[:, None]
        return RoutingPlan(
            counts_RE=tensor(plan.counts_RE),
            expert_start_e1=tensor(rows.start_e1),
            send_count_R=send_count_R,
            send_token_RT=torch.where(listed, tensor(rows.send_token_RT), -1),
            recv_count_R=tensor(plan.recv_count_R),
            row_source_N=plan.rows_3N[0, :num_rows],
            row_return_N=plan.rows_3N[1, :num_rows],
        )
