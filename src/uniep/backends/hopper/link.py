"""What a rank of the Hopper backend has to do with the others: streams, copies, signals, the dispatch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from uniep.backends.hopper.arena import Arena
from uniep.dimension import GPU, MEASURED
from uniep.errors import ConfigError
from uniep.kernels.arguments import ALL_HERE, Dispatch, Wire
from uniep.launch.driver import Bundle, copy, follow, result
from uniep.layout import hopper_arrays, kept_shape, pack
from uniep.memory import plan_memory
from uniep.routing.plan import recv_base
from uniep.schedule import Schedule, refuse_invalid
from uniep.stages import Stage
from uniep.way import Ways

if TYPE_CHECKING:
    from uniep.backends.hopper.planner import DevicePlan
    from uniep.launch.operands import Peers
    from uniep.membership import Membership
    from uniep.taskflow.trace import Span


class Link:
    """One rank and its peers.  schedule None: `default_schedule`.

    ways: of calls, by the tokens of this rank.  way: of the call under way, or of the last one.
    phases: (name, event) of each phase's end, where somebody listens.  trace, traced_ids, traced_from: see
    `HopperBackend`.  stay_local: no token or row crosses the wire, to measure the rest.
    orders: of tile_order="critical-path", tables by (backward, bucket of tokens), see `order_of`.
    """

    def __init__(self, member: Membership, schedule: Schedule | None) -> None:
        cfg, device = member.cfg, member.device
        from uniep.backends.hopper.planner import Planner  # needs Triton

        self.cfg, self.device = cfg, device
        self.rank, self.num_ranks = member.rank, member.ep_size
        measured = MEASURED._replace(sms=torch.cuda.get_device_properties(device).multi_processor_count)
        self.ways = Ways(cfg, self.num_ranks, schedule, GPU, measured, member.operators)
        self.schedule = self.ways.schedule
        refuse_invalid(self.schedule, cfg, self.num_ranks, GPU, measured)
        self.way = self.ways[cfg.max_tokens_per_rank]
        self.slots = cfg.max_tokens_per_rank * cfg.top_k
        layout = pack(hopper_arrays(cfg, self.num_ranks, self.way))
        describe = functools.partial(plan_memory, cfg, self.num_ranks, copies=member.copies, schedule=self.schedule)
        self.arena = Arena(layout, member, describe)
        self.sms = self.way.sms
        self.planner = Planner(member, self.arena, self.way, self.sms)
        self.push_ticket, self.return_ticket = torch.zeros(2, 4, dtype=torch.int32, device=device).unbind()
        self._lasting = [  # memory of the stream that is current now
            self.arena.memories[self.rank], *self.arena.tables.values(), self.planner.call, self.planner.ticket,
            self.planner.status, self.push_ticket, self.return_ticket,
        ]  # fmt: skip
        self.side, self.copies = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._stream = torch.cuda.current_stream(device)  # of the last call
        self._forked: set[torch.cuda.Stream] = set()
        self._point = torch.cuda.Event()  # of a stream that another is to wait for
        self._order = self.planner.order
        self.phases: list[tuple[str, torch.cuda.Event]] | None = None
        self.trace: list[Span] | None = None
        self.traced_ids: list[Tensor] = []
        self.traced_from: Tensor | None = None
        self.stay_local = False
        self._known_peers: dict[tuple[bool, int, bool], Peers] = {}
        self.orders: dict[tuple[bool, int], Tensor] = {}

    def lasting(self) -> list[Tensor]:
        """Memory that calls use and that stays until the Workspace is closed."""
        tables = [t for peers in self._known_peers.values() for t in peers.wire.fields if t is not None]
        return [*self.arena.memories, *self.planner.lasting(), *self._lasting, *tables]

    def mark(self, name: str) -> None:
        """A phase boundary for the benchmark; free when nobody listens."""
        if self.phases is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.phases.append((name, event))

    def fork(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` go on from here, beside this call's own."""
        self._follow(stream, self._stream)
        self._forked.add(stream)

    def join(self) -> None:
        """Wait for what was forked."""
        while self._forked:
            self._follow(self._stream, self._forked.pop())

    def _follow(self, later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
        follow(later, earlier, self._point)

    @property
    def tracing(self) -> bool:
        """Whether somebody listens to the tasks of one kernel."""
        return self.trace is not None and self.way.mega

    @property
    def fused(self) -> bool:
        return self.way.waits and not self.stay_local

    @property
    def copying(self) -> bool:
        return self.way.copies and not self.stay_local

    def peers(self) -> Peers:
        """What kernels need of the other ranks."""
        chunk = self.way.chunk_tokens if self.way.transfer != "copy" else 0
        key = self.stay_local, chunk, self.way.pulls
        if (known := self._known_peers.get(key)) is not None:
            return known
        from uniep.launch.operands import Peers

        arena, planner = self.arena, self.planner
        wire = Wire(
            status=planner.status,
            call=planner.call,
            arrived=arena.flag_view("arrived"),
            finished=arena.flag_view("finished"),
            returned=arena.flag_view("returned"),
            receive_table=arena.tables["receive"],
            returns_table=self.table("returns"),
            dweights_table=self.table("dweights"),
            flag_table=arena.tables["flags"],
            push_ticket=self.push_ticket,
            return_ticket=self.return_ticket,
            tokens_table=arena.tables.get("tokens"),
        )
        made = self._known_peers[key] = Peers(
            rank=self.rank,
            num_ranks=self.num_ranks,
            wire=Bundle(wire),
            timeout_ns=planner.timeout_ns,
            arrived_offset=arena.flag_offset("arrived"),
            finished_offset=arena.flag_offset("finished"),
            returned_offset=arena.flag_offset("returned") + self.rank,
            chunk=chunk,
            receive_block=self.cfg.receive_block,
            pull=self.way.pulls,
        )
        return made

    def table(self, name: str) -> Tensor:
        """Addresses of an array at every rank; of this rank's own when measuring without communication."""
        table = self.arena.tables[name]
        return table[self.rank].repeat(self.num_ranks) if self.stay_local else table

    def publish(self, x_TD: Tensor) -> None:
        """Copy tokens to where peers fetch them, if they do; before this rank enters the call."""
        if self.way.pulls and not self.stay_local:
            from uniep.launch.staged import launch_publish

            launch_publish(x_TD, self.arena.views["tokens"], self.planner.status, self.sms)

    def send(self, x_TD: Tensor, first: int = 1, last: int | None = None) -> None:
        """Queue copies of all tokens to the ranks `first` to `last` - 1 behind this one (None: to all), each with the
        peer's `finished` flag behind it.  The first begins here, all others behind it."""
        num_tokens = x_TD.shape[0]
        if first == 1:
            self.fork(self.copies)
        for step in range(first, last or self.num_ranks):
            peer = (self.rank + step) % self.num_ranks
            if num_tokens:
                slot = recv_base(self.cfg, self.rank, peer)
                copy(self.arena.everywhere["receive"][peer][slot:], x_TD, self.copies)
            flag = self.arena.flag_offset("finished") + self.rank
            copy(self.arena.everywhere["flags"][peer][flag:], self.planner.call, self.copies)

    def walk(self, stages: Sequence[Stage], call: Any) -> None:
        """Carry out stages, each by the method of `call` with its name, or by `own`.  What runs on another stream is a
        phase that ends where this one waits for it."""
        elsewhere: list[str] = []
        for stage in stages:
            if stage.after and stage.stream == "side":
                self.fork(self.side)
            elif stage.after:
                self._join_phases(elsewhere)
            if self.side not in self._forked and any(
                (s.beside or s.name) == stage.name and s.stream == "side" for s in stages
            ):
                self.fork(self.side)
            perform = call.own if stage.own else getattr(call, stage.name)
            if stage.stream == "call":
                perform(stage)
                self.mark(stage.name)
                continue
            elsewhere.append(stage.name)
            with torch.cuda.stream(self.side) if stage.stream == "side" else contextlib.nullcontext():
                perform(stage)
        self._join_phases(elsewhere)

    def _join_phases(self, elsewhere: list[str]) -> None:
        self.join()
        while elsewhere:
            self.mark(elsewhere.pop(0))

    def order_of(self, *, backward: bool) -> Tensor | None:
        """The place of each stretch in the list of the call under way, on the device; None: closed forms.  Calls of
        up to twice as many tokens share one, which the first of them makes (50 ms)."""
        if not (self.way.critical_path and self.way.mega):
            return None
        from uniep.taskflow.stretches import bucket, positions

        key = backward, bucket(self.way.num_tokens)
        if key not in self.orders:
            if torch.cuda.is_current_stream_capturing():
                raise ConfigError(
                    f"tile_order='critical-path' has no order yet for a {'backward' if backward else 'forward'} of "
                    f"{self.way.num_tokens} tokens, and a captured call cannot make one; run one such call before the "
                    "capture"
                )
            self.orders[key] = positions(self.cfg, self.way, backward=backward).to(self.device)
            self._lasting.append(self.orders[key])
        return self.orders[key]

    def dispatching(self, push_rounds: int = 0) -> Dispatch:
        """What a kernel is told that gathers rows: whether to wait for them, and how they are pushed or pulled."""
        return Dispatch(True, self.way.push_programs, push_rounds) if self.fused else ALL_HERE

    def dispatch(self, x_TD: Tensor, plan: DevicePlan) -> None:
        """Push the tokens of the send lists, or pull, unless copies are under way, and wait until all have arrived."""
        from uniep.launch.staged import launch_push_tokens

        way = self.way
        if not self.copying:
            launch_push_tokens(x_TD, plan.bundle, self.peers(), self.sms * way.pass_programs, way.pass_warps)
        self.planner.wait("finished")

    def kept_shape(self, num_tokens: int) -> tuple[int, int]:
        """Of `room_to_keep`."""
        block = self.planner.kept_block(num_tokens, copying=self.copying)
        return kept_shape(self.cfg, self.num_ranks, self.way, block)

    def room_to_keep(self, num_tokens: int) -> Tensor:
        """Memory for received tokens, for the weight gradient: as many of each source as are expected; or none."""
        return result(*self.kept_shape(num_tokens), dtype=self.cfg.dtype, device=self.device)

    def keep(self, num_tokens: int) -> Tensor:
        """A copy of received tokens for the weight gradient, made beside the GEMM that follows; or nothing."""
        kept = self.room_to_keep(num_tokens)
        if len(kept):
            self.fork(self.copies)
            self.copy_received(kept, self.copies)
        return kept

    def copy_received(self, kept: Tensor, stream: torch.cuda.Stream) -> None:
        others, slots = self.num_ranks - 1, self.cfg.receive_block
        receive, block = self.arena.views["receive"], len(kept) // others
        if block == slots:
            copy(kept, receive[:-1], stream)
            return
        for source in range(others):
            copy(kept[source * block :], receive[source * slots : source * slots + block], stream)
