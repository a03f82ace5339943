"""The Hopper backend: Triton kernels over torch symmetric memory, one node, peer access over NVLink.

One call: plan (ids exchanged by one-sided stores) -> push tokens (side stream) beside gate_up -> down, whose
epilogue stores each row into its slot at the source rank -> fixed-order sum.  The serial schedule runs the
same tile bodies with every stage waiting for the one before; it is the oracle.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import SymInt, Tensor

from uniep.backends.base import ExpertGradients, Inputs, Needs
from uniep.config import COLUMN_GROUP, ROW_ALIGN, MoEConfig, align_rows, max_padded_rows
from uniep.errors import (
    CapacityError,
    ConfigError,
    InputError,
    PeerTimeoutError,
    UniEPError,
    UnsupportedError,
)
from uniep.memory import Field, pack, packed_bytes
from uniep.routing import RoutingPlan, find_bad_id
from uniep.taskflow.schedule import Schedule, Tile
from uniep.weights import ExpertWeights

if TYPE_CHECKING:
    from uniep.workspace import Workspace

HEADER = 64
EXCHANGE_PROGRAMS = 32
STATUS_WORDS = 16
PUSH_BYTES_PER_US = 150_000  # all pushing programs of a rank, beside a GEMM (2x H200)
PUSH_LATENCY_US = 30
SM_FLOP_PER_US = 5.5e6  # one SM in a grouped GEMM
MAX_TOP_K = 128
MAX_STRIDE_BYTES = 2**40  # of a Hopper tensor map
STAGES = {1: "entry of the call", 2: "arrival of tokens", 3: "return of results"}


def shared_arrays(cfg: MoEConfig, ep_size: int, chunk: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Every array that peers write into."""
    slots = cfg.max_tokens_per_rank * cfg.top_k
    return {
        "receive": ((cfg.receive_slots(ep_size) + 1, cfg.hidden), cfg.dtype),
        "returns": ((slots, cfg.hidden), cfg.dtype),
        "dweights": ((slots,), torch.float32),
        "exchange": ((2, ep_size, HEADER + 2 * slots), torch.int32),
        "flags": ((3 * ep_size + cfg.receive_slots(ep_size) // chunk,), torch.int32),
    }


class Arena:
    """This rank's symmetric memory, and the addresses of every rank's arrays as device tables."""

    def __init__(self, layout: dict[str, Field], workspace: Workspace) -> None:
        size, device = packed_bytes(layout), workspace.device
        if workspace.group is None or workspace.ep_size == 1:
            self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
            bases = [self.memory.data_ptr()]
        else:
            import torch.distributed as dist
            import torch.distributed._symmetric_memory as symmetric

            self.memory = symmetric.empty(size, dtype=torch.uint8, device=device)
            self.memory.zero_()
            handle = symmetric.rendezvous(self.memory, workspace.group)
            bases = [int(p) for p in handle.buffer_ptrs]
            torch.cuda.synchronize(device)
            dist.barrier(workspace.group, device_ids=[device.index])
        self.views: dict[str, Tensor] = {}
        self.tables: dict[str, Tensor] = {}
        for name, field in layout.items():
            flat = self.memory[field.offset : field.offset + field.bytes]
            self.views[name] = flat.view(field.dtype).view(field.shape)
            addresses = [base + field.offset for base in bases]
            self.tables[name] = torch.tensor(addresses, dtype=torch.int64, device=device)


class DevicePlan:
    """A RoutingPlan on the device, with the tile tables that the kernels walk.  All int32 but row_weight.

    Three allocations: `head`, what is known before the number of rows is; `rows_2N`, source and return
    slot of every row; `weight_N`, routing weights.  The rest are views.
    """

    @staticmethod
    def sections(backend: HopperBackend, num_tokens: int | SymInt) -> dict[str, tuple[Any, ...]]:
        """Arrays of `head`, each padded to 16 bytes."""
        ranks = backend.num_ranks
        return {
            "counts_RE": (ranks, backend.cfg.num_experts),
            "start_e1": (backend.local + 1,),
            "rows_e": (backend.local,),
            "send_count_R": (ranks,),
            "recv_count_R": (ranks,),
            "send_token_RT": (ranks, num_tokens),
            "expert_M": (backend.most_tiles,),
            "order_M": (backend.most_tiles,),
            "totals": (4,),  # padded rows, row tiles
        }

    def __init__(self, backend: HopperBackend, num_tokens: int, saved: Sequence[Tensor] = ()) -> None:
        sections = self.sections(backend, num_tokens)
        sizes = [-(-math.prod(shape) // 4) * 4 for shape in sections.values()]
        self.head = saved[0] if saved else torch.empty(sum(sizes), dtype=torch.int32, device=backend.device)
        parts = self.head.split(sizes)
        views = {n: p[: math.prod(s)].view(s) for (n, s), p in zip(sections.items(), parts, strict=True)}
        self.counts_RE, self.start_e1, self.rows_e = views["counts_RE"], views["start_e1"], views["rows_e"]
        self.send_count_R, self.recv_count_R, self.send_token_RT = (
            views["send_count_R"],
            views["recv_count_R"],
            views["send_token_RT"],
        )
        self.expert_M, self.order_M, self.totals = views["expert_M"], views["order_M"], views["totals"]
        if saved:
            self.set_rows(saved[1], saved[2])

    def set_rows(self, rows_2N: Tensor, weight_N: Tensor) -> None:
        self.rows_2N, self.weight_N = rows_2N, weight_N
        self.source_N, self.return_N = rows_2N.unbind()

    @property
    def num_rows(self) -> int:
        """Rows allocated (in the exact mode: N)."""
        return self.weight_N.shape[0]

    def tensors(self) -> list[Tensor]:
        return [self.head, self.rows_2N, self.weight_N]


class HopperBackend:
    """See the module docstring.  `schedule` None: `default_schedule` of the shape."""

    name = "hopper"

    def __init__(self, workspace: Workspace, schedule: Schedule | None) -> None:
        cfg, device = workspace.cfg, workspace.device
        _check_support(cfg, workspace.ep_size, device)
        self.ws, self.cfg, self.device = workspace, cfg, device
        self.rank, self.num_ranks = workspace.rank, workspace.ep_size
        self.local = cfg.experts_per_rank(self.num_ranks)
        self.schedule = schedule if schedule is not None else Schedule(push_programs=32, chunk_tokens=32)
        if self.schedule.gemm1.rows != self.schedule.gemm2.rows:
            raise ConfigError(
                f"gemm1.rows is {self.schedule.gemm1.rows} and gemm2.rows {self.schedule.gemm2.rows}; on GPUs both walk one tile table"
            )
        self.slots = cfg.max_tokens_per_rank * cfg.top_k
        most_rows = (
            self.num_ranks * self.slots if cfg.max_rows is None else min(cfg.max_rows, self.num_ranks * self.slots)
        )
        self.capacity = max_padded_rows(most_rows, self.local)
        balanced = self.local * align_rows(-(-self.slots // self.local))
        self.guess = min(_with_headroom(balanced), self.capacity)
        self.most_tiles = self.capacity // self.schedule.gemm1.rows
        self.layout = pack(shared_arrays(cfg, self.num_ranks, self.schedule.chunk_tokens))
        self.arena = Arena(self.layout, workspace)
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.timeout_ns = int(workspace.timeout_s * 1e9)
        self.call = torch.zeros(1, dtype=torch.int32, device=device)
        self.tickets = torch.zeros(8, dtype=torch.int32, device=device)
        self.host_status = torch.zeros(8, dtype=torch.int32).pin_memory()
        self.host_totals = torch.zeros(2 + self.num_ranks, dtype=torch.int32).pin_memory()
        self.status = torch.zeros(STATUS_WORDS, dtype=torch.int32, device=device)
        self.status[8:10] = torch.tensor([self.host_status.data_ptr()], dtype=torch.int64).view(torch.int32).to(device)
        self.calls_made = 0
        self._status_words = (ctypes.c_int32 * 8).from_address(self.host_status.data_ptr())
        self._totals_words = (ctypes.c_int32 * (2 + self.num_ranks)).from_address(self.host_totals.data_ptr())
        self.phases: list[tuple[str, torch.cuda.Event]] | None = None
        self.side = torch.cuda.Stream(device)
        self._stay_local = False

    # ---------------------------------------------------------------- flags

    def _flags(self, name: str) -> int:
        """Offset of a flag array in words."""
        ranks = self.num_ranks
        return {"entered": 0, "finished": ranks, "returned": 2 * ranks, "arrived": 3 * ranks}[name]

    def _flag_view(self, name: str) -> Tensor:
        return self.arena.views["flags"][self._flags(name) :]

    # ---------------------------------------------------------------- errors

    def check(self) -> None:
        """Raise what the device recorded.  Reads pinned memory; does not synchronise."""
        code = self._status_words[0]
        if code == 0:
            return
        _, a, b, c, d = self._status_words[:5]
        if code == 1:
            message = (
                f"rank {self.rank}, call {c}: rank {b} did not come within {self.ws.timeout_s:g} s "
                f"(stage: {STAGES.get(a, a)}; expected signal {c}, seen {d}). Every rank must make the same calls; "
                "see that no rank has stopped, or raise timeout_s"
            )
            self.ws.fail(message)
            raise PeerTimeoutError(message)
        if code == 2:
            message = f"routing ids outside -1 .. {self.cfg.num_experts - 1} came from rank {a}, entry {b}"
            self.ws.fail(message)
            raise InputError(message)
        message = (
            f"rank {a} was routed {c} rows but max_rows={self.cfg.max_rows} leaves room for {d} with alignment; raise max_rows, "
            "or pass max_rows=None to allocate exactly"
        )
        self.ws.fail(message)
        raise CapacityError(message)

    def refuse(self, error: UniEPError) -> None:
        raise error

    def prepare(self) -> None:
        """Compile every kernel by an empty forward and backward.  Collective."""
        cfg = self.cfg
        like: dict[str, Any] = {"dtype": cfg.dtype, "device": self.device}
        experts = ExpertWeights(
            (torch.zeros(self.local, 2 * cfg.ffn, cfg.hidden, **like),),
            (torch.zeros(self.local, cfg.hidden, cfg.ffn, **like),),
            "stacked",
        )
        x_TD = torch.zeros(0, cfg.hidden, **like)
        ids_TK = torch.zeros(0, cfg.top_k, dtype=torch.int64, device=self.device)
        inputs = Inputs(x_TD, ids_TK, torch.zeros(ids_TK.shape, device=self.device), experts)
        self.forward(inputs, save=False)
        _, saved = self.forward(inputs, save=True)
        self.backward(x_TD, inputs, saved, Needs())
        torch.cuda.synchronize(self.device)

    def fake_saved(self, num_tokens: int | SymInt, x_TD: Tensor, new_size: Callable[[], SymInt]) -> list[Tensor]:
        """Shapes of what forward saves."""
        rows = self.capacity if self.cfg.max_rows is not None else new_size()
        sizes = [-(-math.prod(shape) // 4) * 4 for shape in DevicePlan.sections(self, num_tokens).values()]
        kept = rows if self.schedule.operand == "expanded" else self.cfg.receive_slots(self.num_ranks) + 1
        return [
            x_TD.new_empty((sum(sizes),), dtype=torch.int32),
            x_TD.new_empty((2, rows), dtype=torch.int32),
            x_TD.new_empty((rows,), dtype=torch.float32),
            x_TD.new_empty((rows, 2, self.cfg.ffn)),
            x_TD.new_empty((kept, self.cfg.hidden)),
        ]

    def report(self) -> dict[str, str]:
        """What is active."""
        return {
            "backend": f"hopper: rank {self.rank} of {self.num_ranks} on {torch.cuda.get_device_name(self.device)}",
            "schedule": self.schedule.name,
            "rows": "allocated exactly, one host read per call"
            if self.cfg.max_rows is None
            else f"max_rows={self.cfg.max_rows}, no host read",
        }

    def close(self) -> None:
        """Drop the arena; calls in flight keep what they use alive through the CUDA stream order."""
        self.arena = None  # type: ignore[assignment]

    def mark(self, name: str) -> None:
        """A phase boundary for the benchmark; free when nobody listens."""
        if self.phases is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.phases.append((name, event))

    # ---------------------------------------------------------------- plan

    def _enter(self, ids_TK: Tensor | None, weights_TK: Tensor | None, num_tokens: int, capacity: int = 0) -> None:
        from uniep.kernels.plan import exchange_kernel

        self.check()
        self.calls_made += 1
        dummy = self.call
        exchange_kernel[(EXCHANGE_PROGRAMS,)](
            ids_TK if ids_TK is not None else dummy,
            weights_TK if weights_TK is not None else dummy,
            num_tokens,
            capacity,
            self.arena.tables["exchange"],
            self.arena.tables["flags"],
            self._flags("entered"),
            self.call,
            self.tickets[0:],
            self.rank,
            K=self.cfg.top_k,
            SLOTS=self.slots,
            NUM_RANKS=self.num_ranks,
            BLOCK=1024,
            HAS_IDS=ids_TK is not None,
            num_warps=4,
        )

    def _plan(self, ids_TK: Tensor, weights_TK: Tensor) -> DevicePlan:
        from uniep.kernels.plan import histogram_kernel, place_kernel, scan_kernel, tiles_kernel

        cfg, ranks, device = self.cfg, self.num_ranks, self.device
        num_tokens = ids_TK.shape[0]
        slots_p = _power_of_2(cfg.top_k)
        block_t = max(128 // slots_p, 1)
        blocks = -(-cfg.max_tokens_per_rank // block_t)
        total = blocks * ranks
        int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
        histogram = torch.empty(cfg.num_experts + 1 + ranks, total, **int32)
        plan = DevicePlan(self, num_tokens)

        rows = self.capacity if cfg.max_rows is not None else self.guess
        self._enter(ids_TK, weights_TK, num_tokens, rows)
        shape = {
            "K": cfg.top_k,
            "KP": slots_p,
            "SLOTS": self.slots,
            "NUM_RANKS": ranks,
            "BLOCKS": blocks,
            "BLOCK_T": block_t,
        }
        histogram_kernel[(total,)](
            self.arena.views["exchange"],
            self._flag_view("entered"),
            histogram,
            self.call,
            self.status,
            self.timeout_ns,
            self.rank,
            E=cfg.num_experts,
            EP=max(_power_of_2(cfg.num_experts), 16),
            LOCAL=self.local,
            **shape,
            num_warps=4,
        )
        scan_kernel[(cfg.num_experts + 1 + ranks,)](
            histogram, plan.counts_RE, plan.send_count_R, plan.recv_count_R, self.rank,
            E=cfg.num_experts, NUM_RANKS=ranks, BLOCKS=blocks, BLOCKS_P=_power_of_2(blocks), num_warps=4,
        )  # fmt: skip
        tiles_kernel[(1,)](
            self.arena.views["exchange"], plan.counts_RE, plan.send_count_R, plan.start_e1, plan.rows_e, plan.expert_M,
            plan.order_M, plan.totals, self.host_totals, self.call, self.status, self.rank, self._lead(num_tokens),
            E=cfg.num_experts, SLOTS=self.slots, LOCAL=self.local, LOCAL_P=_power_of_2(self.local), NUM_RANKS=ranks,
            BLOCK_M=self.schedule.gemm1.rows, ALIGN=ROW_ALIGN,
            HOST=cfg.max_rows is None, num_warps=4,
        )  # fmt: skip
        plan.set_rows(torch.empty(2, rows, **int32), torch.empty(rows, dtype=torch.float32, device=device))
        place_kernel[(total + self.local,)](
            self.arena.views["exchange"], histogram, plan.start_e1, plan.counts_RE, plan.totals, plan.source_N, plan.return_N,
            plan.weight_N, plan.send_token_RT, self.call, self.rank, num_tokens, E=cfg.num_experts, LOCAL=self.local, **shape,
            RECEIVE_BLOCK=cfg.receive_block, ALIGN=ROW_ALIGN, num_warps=8,
        )  # fmt: skip
        self.mark("plan")
        return plan

    def _fits(self) -> bool:
        """Whether the rows of this call fitted what was allocated for them, on every rank.

        In the exact mode (max_rows None) the host allocates by the last call, launches, and reads the plan's
        totals from pinned memory while the GPU works; the rare call that needs more is made again.
        """
        if self.cfg.max_rows is not None:
            return True
        give_up = time.monotonic() + self.ws.timeout_s + 5
        while self._totals_words[0] != self.calls_made and self._status_words[0] == 0:
            if time.monotonic() > give_up:
                break
        if self._status_words[0] == 2:
            self._raise_bad_id()
        self.check()
        total = self._totals_words[1]
        self.guess = _with_headroom(max(total, (self.guess + total) // 2) if self._totals_words[2] else total)
        return bool(self._totals_words[2])

    def _raise_bad_id(self) -> None:
        """Find the first bad id (every rank holds all ids), forget the failure, raise the same on every rank."""
        torch.cuda.synchronize(self.device)
        exchange = self.arena.views["exchange"][self.calls_made % 2]
        self.status[:8] = 0
        self.host_status.zero_()
        torch.cuda.synchronize(self.device)
        for source in range(self.num_ranks):
            count = int(exchange[source, 0]) * self.cfg.top_k
            ids_TK = exchange[source, HEADER : HEADER + count].view(-1, self.cfg.top_k)
            if (bad := find_bad_id(ids_TK, self.cfg.num_experts)) is not None:
                token, slot, value = bad
                raise InputError(
                    f"rank {source}: ids[{token}, {slot}] is {value}; ids must be -1 (unused) or 0 .. {self.cfg.num_experts - 1}"
                )

    def route(self, ids_TK: Tensor) -> RoutingPlan:
        weights_TK = torch.zeros(ids_TK.shape, dtype=torch.float32, device=ids_TK.device)
        plan = self._plan(ids_TK, weights_TK)
        while not self._fits():
            plan = self._plan(ids_TK, weights_TK)
        rows = int(plan.totals[0])
        listed = torch.arange(ids_TK.shape[0], device=self.device) < plan.send_count_R[:, None]
        return RoutingPlan(
            counts_RE=plan.counts_RE,
            expert_start_e1=plan.start_e1,
            send_count_R=plan.send_count_R,
            send_token_RT=torch.where(listed, plan.send_token_RT, -1),
            recv_count_R=plan.recv_count_R,
            row_source_N=plan.source_N[:rows],
            row_return_N=plan.return_N[:rows],
        )

    # ---------------------------------------------------------------- stages

    def _push_args(self, x_TD: Tensor, plan: DevicePlan) -> tuple[Any, ...]:
        """Arguments of kernels that wait for rows and, fused, push tokens first."""
        return (
            self._flag_view("arrived"), self._flag_view("finished"), self.call, self.status, self.timeout_ns, self.rank,
            plan.send_token_RT, plan.send_count_R, self.arena.tables["receive"], self.arena.tables["flags"],
            self._flags("arrived"), self._flags("finished"), self.tickets[1:], x_TD.shape[0],
        )  # fmt: skip

    def _push_constants(self, rows: int) -> dict[str, Any]:
        return {
            "NUM_RANKS": self.num_ranks, "CHUNK": self.schedule.chunk_tokens, "RECEIVE_BLOCK": self.cfg.receive_block,
            "PUSH_D": min(_power_of_2(self.cfg.hidden), 1024), "PUSH_ROWS": rows,
        }  # fmt: skip

    def _push_us(self, num_tokens: int) -> float:
        """How long pushing this rank's tokens takes beside a GEMM, for balanced routing."""
        cfg = self.cfg
        misses = (1 - 1 / self.num_ranks) ** cfg.top_k
        sent_bytes = (self.num_ranks - 1) * num_tokens * (1 - misses) * cfg.hidden * cfg.dtype.itemsize
        return sent_bytes / PUSH_BYTES_PER_US

    def _push_rounds(self, num_tokens: int, tile: Tile) -> int:
        """Turns of the tile loop that a push lasts, so that pushing programs get that many tiles fewer."""
        tile_us = 2 * tile.rows * tile.columns * self.cfg.hidden / SM_FLOP_PER_US
        return math.ceil(self._push_us(num_tokens) / tile_us)

    def _lead(self, num_tokens: int) -> int:
        """Experts whose local tiles run first: as many as last until the other ranks' tokens are here."""
        if self.schedule.tile_order == "natural":
            return 0
        rows_per_expert = num_tokens * self.cfg.top_k / self.cfg.num_experts
        flop = 4 * max(rows_per_expert, 1) * self.cfg.ffn * self.cfg.hidden
        return math.ceil((self._push_us(num_tokens) + PUSH_LATENCY_US) / (flop / (SM_FLOP_PER_US * self.sms)))

    @property
    def _fused(self) -> bool:
        return self.num_ranks > 1 and self.schedule.overlap == "fused" and not self._stay_local

    def _dispatch(self, x_TD: Tensor, plan: DevicePlan) -> None:
        """Serial schedule: push all tokens, wait until all have arrived."""
        from uniep.kernels.plan import barrier_kernel
        from uniep.kernels.transfer import push_tokens_kernel

        if self.num_ranks == 1 or self._fused or self._stay_local:
            return
        push_tokens_kernel[(self.sms,)](
            x_TD, plan.send_token_RT, plan.send_count_R, self.arena.tables["receive"], self.arena.tables["flags"],
            self._flags("arrived"), self._flags("finished"), self.call, self.tickets[1:], x_TD.shape[0], self.rank,
            D=self.cfg.hidden, BLOCK_D=min(_power_of_2(self.cfg.hidden), 1024), ROWS=16, CHUNK=self.schedule.chunk_tokens,
            BLOCK_SLOTS=self.cfg.receive_block, NUM_RANKS=self.num_ranks, num_warps=8,
        )  # fmt: skip
        barrier_kernel[(1,)](
            self._flag_view("finished"), self.call, self.status, self.timeout_ns, NUM_RANKS=self.num_ranks, STAGE=2, num_warps=1,
        )  # fmt: skip
        self.mark("dispatch")

    def _expand(self, x_TD: Tensor, receive: Tensor, plan: DevicePlan, rows_ND: Tensor, *, fused: bool) -> None:
        """Every row's input, contiguous; `fused`: push this rank's tokens meanwhile and wait for the others'."""
        from uniep.kernels.transfer import expand_kernel

        warps = 8 if fused else 4  # few registers, to fit beside a GEMM
        expand_kernel[(self.sms * 24 // warps,)](
            x_TD, receive, rows_ND, plan.source_N, plan.order_M, plan.totals, *self._push_args(x_TD, plan),
            2 * self.schedule.push_programs if fused else 0, D=self.cfg.hidden, BLOCK_D=min(_power_of_2(self.cfg.hidden), 1024),
            ROWS=2 * warps, BLOCK_M=self.schedule.gemm1.rows, **self._push_constants(16), FUSED=fused, num_warps=warps,
        )  # fmt: skip

    def _gate_up(self, inputs: Inputs, plan: DevicePlan, rows_ND: Tensor | None, h_N2F: Tensor, act_NF: Tensor) -> None:
        """h and act of every row, gathered (and, fused, dispatched meanwhile) or from the expanded rows."""
        from uniep.kernels.gemm import gate_up_kernel

        tile, rows, ffn, x_TD = self.schedule.gemm1, plan.num_rows, self.cfg.ffn, inputs.x_TD
        half, save, gathered = tile.columns // 2, h_N2F.shape[0] > 0, rows_ND is None
        fused = gathered and self._fused
        w13_desc, up_first = w13_descriptor(inputs.experts, [1, 2, half, tile.depth])
        act_desc = _descriptor(act_NF, (rows, ffn), (ffn, 1), [tile.rows, half])
        h_desc = _descriptor(h_N2F, (rows, 2, ffn), (2 * ffn, ffn, 1), [tile.rows, 1, half]) if save else act_desc
        rows_desc = act_desc if rows_ND is None else _rows_descriptor(rows_ND, [tile.rows, tile.depth])
        gate_up_kernel[(self.sms * tile.programs_per_sm,)](
            x_TD, self.arena.views["receive"], rows_desc, plan.source_N, plan.weight_N, plan.order_M, plan.expert_M, plan.totals,
            *self._push_args(x_TD, plan), self.schedule.push_programs if fused else 0,
            self._push_rounds(x_TD.shape[0], tile) if fused else 0, w13_desc, h_desc, act_desc, D=self.cfg.hidden, F=ffn,
            BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, GROUP_M=tile.group_rows, **self._push_constants(32),
            GATHERED=gathered, FUSED=fused, SAVE_H=save, WEIGHTED=self.cfg.weight_at == "activation", UP_FIRST=up_first,
            **_launch(tile),
        )  # fmt: skip
        self.mark("gate_up")

    def _product(
        self,
        a: Tensor,
        b_desc: Any,
        out: Tensor,
        plan: DevicePlan,
        *,
        parts: int,
        transposed: bool,
        up_first: bool,
        scatter: bool,
    ) -> None:
        """out (N, width) = a (N, parts * depth) @ B; `scatter`: into the return slots instead, `out` gives dtype and width."""
        from uniep.kernels.gemm import product_kernel

        tile, width = self.schedule.gemm2, out.shape[1]
        columns = tile.columns // 4 if out.dtype == torch.float32 else tile.columns // 2
        product_kernel[(self.sms * tile.programs_per_sm,)](
            _rows_descriptor(a, [tile.rows, tile.depth]), b_desc, _rows_descriptor(out, [tile.rows, columns]), plan.expert_M,
            plan.totals, plan.return_N, *self._return_tables(), self.tickets[2:], DEPTH=a.shape[1] // parts, WIDTH=width,
            SLOTS=self.slots, HALVES=parts, TRANSPOSED=transposed, UP_FIRST=up_first, BLOCK_M=tile.rows, BLOCK_N=tile.columns,
            BLOCK_K=tile.depth, GROUP_M=tile.group_rows, NUM_RANKS=self.num_ranks, SCATTER=scatter, **_launch(tile),
        )  # fmt: skip

    def _return_tables(self) -> tuple[Any, ...]:
        return self._table("returns"), self.arena.tables["flags"], self._flags("returned") + self.rank, self.call

    def _return_rows(
        self, a: Tensor, b_desc: Any, plan: DevicePlan, *, parts: int, transposed: bool, up_first: bool = False
    ) -> None:
        """a @ B (N, D), delivered into the return slots of the rows' source ranks."""
        from uniep.kernels.transfer import push_rows_kernel

        width, serial = self.cfg.hidden, self.schedule.overlap == "serial"
        out_ND = torch.empty(plan.num_rows if serial else 1, width, dtype=self.cfg.dtype, device=self.device)
        self._product(
            a, b_desc, out_ND, plan, parts=parts, transposed=transposed, up_first=up_first, scatter=not serial
        )
        self.mark("return")
        if serial:
            push_rows_kernel[(self.sms,)](
                out_ND, plan.return_N, plan.totals, *self._return_tables(), self.tickets[3:], SLOTS=self.slots, WIDTH=width,
                BLOCK_D=min(_power_of_2(width), 1024), ROWS=8, NUM_RANKS=self.num_ranks, num_warps=8,
            )  # fmt: skip
            self.mark("push_rows")

    def _combine(self, ids_TK: Tensor, weights_TK: Tensor | None, out_TD: Tensor) -> None:
        """The fixed-order sum of this rank's return slots."""
        from uniep.kernels.transfer import combine_kernel

        cfg, num_tokens = self.cfg, ids_TK.shape[0]
        block = min(_power_of_2(cfg.hidden), 2048)
        combine_kernel[(self.sms * 8,)](
            self.arena.views["returns"], ids_TK, weights_TK if weights_TK is not None else self.call, out_TD, num_tokens,
            self._flag_view("returned"), self.call, self.status, self.timeout_ns, D=cfg.hidden, K=cfg.top_k, BLOCK_D=block,
            NUM_RANKS=self.num_ranks, WEIGHTED=weights_TK is not None, WAIT=True, num_warps=max(block // 256, 1),
            enable_fp_fusion=False,
        )  # fmt: skip

    # ---------------------------------------------------------------- forward

    def forward(self, inputs: Inputs, save: bool) -> tuple[Tensor, list[Tensor]]:
        while True:
            result = self._forward(inputs, save)
            if self._fits():
                return result

    def _forward(self, inputs: Inputs, save: bool) -> tuple[Tensor, list[Tensor]]:
        cfg, tile = self.cfg, self.schedule.gemm2
        plan = self._plan(inputs.ids_TK, inputs.weights_TK)
        rows, receive = plan.num_rows, self.arena.views["receive"]
        act_NF = torch.empty(rows, cfg.ffn, dtype=cfg.dtype, device=self.device)
        h_N2F = torch.empty(rows if save else 0, 2, cfg.ffn, dtype=cfg.dtype, device=self.device)
        self._dispatch(inputs.x_TD, plan)
        kept = None
        if self.schedule.operand == "expanded":
            kept = torch.empty(rows, cfg.hidden, dtype=cfg.dtype, device=self.device)
            self._expand(inputs.x_TD, receive, plan, kept, fused=self._fused)
            self.mark("expand")
        self._gate_up(inputs, plan, kept, h_N2F, act_NF)
        if save and kept is None:
            kept = self._keep(receive)
        self._return_rows(
            act_NF, w2_descriptor(inputs.experts, [1, tile.columns, tile.depth]), plan, parts=1, transposed=True
        )
        y_TD = torch.empty_like(inputs.x_TD)
        self._combine(inputs.ids_TK, inputs.weights_TK if cfg.weight_at == "output" else None, y_TD)
        self.mark("combine")
        torch.cuda.current_stream(self.device).wait_stream(self.side)
        return y_TD, ([*plan.tensors(), h_N2F, kept] if save and kept is not None else [])

    def _keep(self, receive: Tensor) -> Tensor:
        """A copy of the receive buffer for the weight gradient, made beside the GEMM that follows."""
        kept = torch.empty_like(receive)
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side):
            kept.copy_(receive)
        return kept

    # ---------------------------------------------------------------- without communication

    def _table(self, name: str) -> Tensor:
        """Addresses of an array at every rank; of this rank's own when measuring without communication."""
        table = self.arena.tables[name]
        return table[self.rank].repeat(self.num_ranks) if self._stay_local else table

    @contextlib.contextmanager
    def _without_communication(self) -> Iterator[None]:
        self._stay_local = True
        try:
            yield
        finally:
            self._stay_local = False

    def compute_only(self, inputs: Inputs, save: bool) -> tuple[Tensor, list[Tensor]]:
        """The forward's kernels with no token or row crossing the wire: a bound to measure against, not a result."""
        with self._without_communication():
            return self.forward(inputs, save)

    def compute_only_backward(
        self, dy_TD: Tensor, inputs: Inputs, saved: list[Tensor], needs: Needs
    ) -> ExpertGradients:
        """The backward's kernels likewise."""
        with self._without_communication():
            return self.backward(dy_TD, inputs, saved, needs)

    # ---------------------------------------------------------------- backward

    def backward(self, dy_TD: Tensor, inputs: Inputs, saved: list[Tensor], needs: Needs) -> ExpertGradients:
        from uniep.kernels.plan import barrier_kernel

        cfg, device, experts, tile = self.cfg, self.device, inputs.experts, self.schedule.gemm2
        plan = DevicePlan(self, inputs.x_TD.shape[0], saved[:3])
        h_N2F, kept = saved[3], saved[4]
        rows = plan.num_rows

        self._enter(None, None, dy_TD.shape[0])
        barrier_kernel[(1,)](
            self._flag_view("entered"), self.call, self.status, self.timeout_ns, NUM_RANKS=self.num_ranks, STAGE=1, num_warps=1,
        )  # fmt: skip
        self._dispatch(dy_TD, plan)
        dy_ND = torch.empty(rows, cfg.hidden, dtype=cfg.dtype, device=device)
        self._expand(dy_TD, self.arena.views["receive"], plan, dy_ND, fused=self._fused)
        self.mark("expand")
        raw_NF = torch.empty(rows, cfg.ffn, dtype=torch.float32, device=device)
        w2_desc = w2_descriptor(experts, [1, 1, tile.depth, tile.columns])
        self._product(dy_ND, w2_desc, raw_NF, plan, parts=1, transposed=False, up_first=False, scatter=False)
        self.mark("down_gradient")
        dh_N2F, act_NF, groups_NG = self._activation_gradient(raw_NF, h_N2F, plan)
        del raw_NF
        if needs.weights:
            self._send_dweights(groups_NG, plan)
        # Memory-bound work runs beside the GEMMs: rows for dW13 beside dgrad1, whose results cross the wire,
        # the sum of dX beside the weight gradients.
        current = torch.cuda.current_stream(device)
        expanded = self.schedule.operand == "expanded"
        x_ND = kept if expanded else torch.empty(rows, cfg.hidden, dtype=cfg.dtype, device=device)
        self.side.wait_stream(current)
        if needs.w13 and not expanded:
            with torch.cuda.stream(self.side):
                self._expand(inputs.x_TD, kept, plan, x_ND, fused=False)
        x_ready = self.side.record_event()
        # Results travel whether this rank's x needs its gradient or not: its peers' may.
        w13_desc, up_first = w13_descriptor(experts, [1, 1, tile.depth, tile.columns])
        dh_NH = dh_N2F.view(rows, 2 * cfg.ffn)
        self._return_rows(dh_NH, w13_desc, plan, parts=2, transposed=False, up_first=up_first)
        dx_TD = torch.empty_like(dy_TD)
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            self._combine(inputs.ids_TK, None, dx_TD)
        dw13: tuple[Tensor, ...] | None = None
        dw2: tuple[Tensor, ...] | None = None
        if needs.w2:
            dw2 = (torch.empty_like(experts.w2[0], memory_format=torch.contiguous_format),)
            self._weight_gradient(dy_ND, 0, act_NF, dw2[0], plan)
        if needs.w13:
            current.wait_event(x_ready)
            dw13 = self._weight_gradient_w13(dh_NH, x_ND, experts, plan)
        current.wait_stream(self.side)
        self.mark("combine")
        dweights_TK = None
        if needs.weights:
            got = self.arena.views["dweights"][: inputs.ids_TK.numel()].view(inputs.ids_TK.shape)
            dweights_TK = torch.where(inputs.ids_TK >= 0, got, 0.0)
        return ExpertGradients(dx_TD if needs.x else None, dweights_TK, dw13, dw2)

    def _activation_gradient(self, raw_NF: Tensor, h_N2F: Tensor, plan: DevicePlan) -> tuple[Tensor, Tensor, Tensor]:
        """(dh (N, 2, F), the activation that dW2 contracts (N, F), column-group sums of d(weight))."""
        from uniep.kernels.gemm import activation_gradient_kernel

        rows, ffn = raw_NF.shape
        dh_N2F, act_NF = torch.empty_like(h_N2F), torch.empty(rows, ffn, dtype=self.cfg.dtype, device=self.device)
        groups_NG = torch.empty(rows, -(-ffn // COLUMN_GROUP), dtype=torch.float32, device=self.device)
        activation_gradient_kernel[(self.sms * 4,)](
            raw_NF, h_N2F, plan.weight_N, plan.totals, dh_N2F, act_NF, groups_NG, F=ffn, ROWS=16, COLUMNS=256,
            WEIGHTED=self.cfg.weight_at == "activation", num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        self.mark("activation_gradient")
        return dh_N2F, act_NF, groups_NG

    def _send_dweights(self, groups_NG: Tensor, plan: DevicePlan) -> None:
        from uniep.kernels.transfer import dweights_kernel

        dweights_kernel[(self.sms * 2,)](
            groups_NG, plan.return_N, plan.totals, self._table("dweights"), GROUPS=groups_NG.shape[1], SLOTS=self.slots, ROWS=128,
            num_warps=4,
        )  # fmt: skip
        self.mark("dweights")

    def _weight_gradient(self, a_NH: Tensor, first_column: int, b_NW: Tensor, dw_eHW: Tensor, plan: DevicePlan) -> None:
        """dW[e] = a[rows of e, first_column :]^T @ b[rows of e].  dw_eHW: (e, H, W)."""
        from uniep.kernels.gemm import weight_gradient_kernel

        tile, (_, height, width) = self.schedule.weight_gradient, dw_eHW.shape
        weight_gradient_kernel[(self.sms * tile.programs_per_sm,)](
            _rows_descriptor(a_NH, [tile.depth, tile.rows]), _rows_descriptor(b_NW, [tile.depth, tile.columns]),
            _descriptor(dw_eHW, dw_eHW.shape, dw_eHW.stride(), [1, tile.rows, tile.columns // 2]),
            plan.start_e1, plan.rows_e, first_column, LOCAL=self.local, HEIGHT=height, WIDTH=width, BLOCK_M=tile.rows,
            BLOCK_N=tile.columns, BLOCK_K=tile.depth, GROUP_M=tile.group_rows, **_launch(tile),
        )  # fmt: skip
        self.mark("weight_gradient")

    def _weight_gradient_w13(
        self, dh_NH: Tensor, x_ND: Tensor, experts: ExpertWeights, plan: DevicePlan
    ) -> tuple[Tensor, ...]:
        grads, ffn = experts.like(), self.cfg.ffn
        if experts.layout == "split":
            for part, dw_eFD in enumerate(grads.w13):
                self._weight_gradient(dh_NH, part * ffn, x_ND, dw_eFD, plan)
        else:
            self._weight_gradient(dh_NH, 0, x_ND, grads.w13[0].view(self.local, 2 * ffn, -1), plan)
        return grads.w13


# -------------------------------------------------------------------- helpers


def _launch(tile: Tile) -> dict[str, Any]:
    """Launch options of a GEMM kernel.  Fusion off: results may not depend on what a compiler contracts."""
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _descriptor(base: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(base, list(shape), list(strides), block)


def _rows_descriptor(matrix: Tensor, block: list[int]) -> Any:
    """Descriptor of a contiguous matrix."""
    rows, columns = matrix.shape
    return _descriptor(matrix, (rows, columns), (columns, 1), block)


def _with_headroom(rows: int) -> int:
    """Rows to allocate where `rows` were needed: 1/32 more, and never none (descriptors need memory)."""
    return align_rows(rows + rows // 32 + 1)


def w13_descriptor(experts: ExpertWeights, block: list[int]) -> tuple[Any, bool]:
    """(descriptor (e, 2, F, D), whether its first half is the up projection).

    A pair (w1, w3) is one 4-dimensional tensor whose second stride is the distance between the two.
    """
    gate, up = experts.halves(0)
    f, d = gate.shape
    e = experts.w13[0].shape[0]
    distance = up.data_ptr() - gate.data_ptr()
    if abs(distance) >= MAX_STRIDE_BYTES or distance % 16:
        raise UnsupportedError(
            f"w1 and w3 lie {abs(distance)} bytes apart; a tensor-map stride must be a multiple of 16 below {MAX_STRIDE_BYTES}; "
            "allocate them together, or as one w13 (e, 2F, D)"
        )
    first = gate if distance > 0 else up
    strides = (experts.w13[0].stride(0), abs(distance) // gate.element_size(), gate.stride(0), 1)
    return _descriptor(first, (e, 2, f, d), strides, block), distance < 0


def w2_descriptor(experts: ExpertWeights, block: list[int]) -> Any:
    """Descriptor (e, D, F), or (e, 1, D, F) for a 4-dimensional block."""
    w2 = experts.w2[0]
    e, d, f = w2.shape
    if len(block) == 4:
        return _descriptor(w2, (e, 1, d, f), (w2.stride(0), w2.stride(0), w2.stride(1), 1), block)
    return _descriptor(w2, (e, d, f), (w2.stride(0), w2.stride(1), 1), block)


def _check_support(cfg: MoEConfig, ep_size: int, device: torch.device) -> None:
    """Raise for what this backend cannot run, with the way out."""
    way_out = "use backend='nccl' (collectives, any GPU)"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        raise UnsupportedError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; the hopper backend needs 9.0; {way_out}"
        )
    try:
        import triton
    except ImportError as error:
        raise UnsupportedError(
            "the hopper backend needs triton >= 3.6; install the one that your torch names"
        ) from error
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not (3, 6) <= version < (3, 10):
        raise UnsupportedError(
            f"triton is {triton.__version__}; the hopper backend is tested with 3.6 <= triton < 3.10; {way_out}"
        )
    if cfg.dtype == torch.float32:
        raise ConfigError("dtype is torch.float32; the hopper backend computes in bfloat16 or float16 (never TF32)")
    for name, value in (("hidden", cfg.hidden), ("ffn", cfg.ffn)):
        if value % 8:
            raise ConfigError(
                f"{name} is {value}; on GPUs it must be a multiple of 8 (16-byte rows); pad it to {-(-value // 8) * 8}"
            )
    if cfg.top_k > MAX_TOP_K:
        raise ConfigError(f"top_k is {cfg.top_k}; the hopper backend's limit is {MAX_TOP_K}")
    if ep_size & (ep_size - 1):
        raise ConfigError(f"the EP group has {ep_size} ranks; the hopper backend needs a power of two; {way_out}")
    if ep_size * cfg.max_tokens_per_rank * cfg.top_k >= 2**31:
        raise ConfigError(
            f"ep_size * max_tokens_per_rank * top_k is {ep_size * cfg.max_tokens_per_rank * cfg.top_k}; the limit is 2^31 - 1; split the batch"
        )
