"""The CPU executor: the taskflow in real processes, with one-sided writes and event counters in shared memory.

Every call, forward, backward or route, begins with `_enter`: each rank clears its counters of the call's parity,
writes ids, weights and a header into every peer, says "entered call n" and waits for all others.  That orders all
reuse of shared memory: a rank is at most one call ahead, and what belongs to one call exists twice.  No collective
runs on the data path.

Counters have one writer each (a column per worker thread); readers sum.  CPython stores and loads an aligned int64
of a memoryview as one access; a lock taken and released around it is the memory fence.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import hashlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import SymInt, Tensor

from uniep.backends.base import ExpertGradients, Inputs, Needs
from uniep.backends.cpu_tiles import Backward, Dispatch, Forward, Gather, Rows, Shared
from uniep.backends.shm import map_segments
from uniep.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    DTypeError,
    InputError,
    PeerTimeoutError,
    UniEPError,
    UnsupportedError,
)
from uniep.memory import HEADER_INTS, TEXT_BYTES, pack, packed_bytes, shared_arrays
from uniep.numerics import one_thread
from uniep.routing import RoutingPlan, build_plan, find_bad_id
from uniep.taskflow.check import check
from uniep.taskflow.graph import SHARED_STAGES, Event, Task, TaskGraph
from uniep.taskflow.lower import lower_backward, lower_dispatch, lower_forward, num_chunks
from uniep.taskflow.schedule import Schedule

if TYPE_CHECKING:
    from uniep.workspace import Workspace


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """One intra-op thread and ordinary tensors: plans outlive a call, and worker threads know no inference mode."""
    with one_thread(), torch.inference_mode(False), torch.no_grad():
        yield


_OPERATIONS = ("route", "forward", "forward without gradients", "backward", "dispatch", "refuse")
_ERRORS: tuple[type[UniEPError], ...] = (
    UniEPError,
    InputError,
    DTypeError,
    ConfigError,
    CapacityError,
    UnsupportedError,
    ClosedError,
    PeerTimeoutError,
)
_ROUTINGS_KEPT = 16


@dataclasses.dataclass(frozen=True)
class TraceEntry:
    """When a worker ran a task, in time.perf_counter_ns of this host, and how long it had waited for it."""

    rank: int
    worker: str
    task: Task
    start_ns: int
    end_ns: int
    waited_ns: int


@dataclasses.dataclass
class _Header:
    """What a rank says about itself when it enters a call.  Integers, in this order, in exchange_header."""

    call: int
    operation: int
    tokens: int = 0
    error: int = -1  # index into _ERRORS of why this rank refuses
    text_bytes: int = 0
    digest: int = 0  # of x
    fingerprint: int = 0  # backward: of the forward it belongs to
    forwards: int = 0  # forwards that this rank has entered
    needs: int = 0  # backward: bits, dx and d(weight) wanted


@dataclasses.dataclass
class _Call:
    """One call's routing and weights, as every rank knows them."""

    number: int
    routing: _Routing
    weights: list[Tensor]
    headers: list[_Header]
    fingerprint: int


class _Routing:
    """Plans of all ranks for one set of ids, and the checked graphs made from them."""

    def __init__(self, ids: list[Tensor], cfg: Any) -> None:
        self.tokens = [t.shape[0] for t in ids]
        self.plans = [build_plan(ids, rank, cfg) for rank in range(len(ids))]
        self._graphs: dict[Any, TaskGraph] = {}

    def graph(self, key: Any, lower: Callable[[], TaskGraph]) -> TaskGraph:
        if key not in self._graphs:
            graph = lower()
            check(graph)
            self._graphs[key] = graph
        return self._graphs[key]


class CpuBackend:
    """Executes calls of one Workspace with threads of this process and memory shared with its peers.

    trace: set to a list to have `TraceEntry`s appended.
    """

    name = "cpu"

    def __init__(self, workspace: Workspace, schedule: Schedule | None) -> None:
        self.cfg, self.rank, self.ep_size = workspace.cfg, workspace.rank, workspace.ep_size
        self.timeout_s = workspace.timeout_s
        self.schedule = schedule if schedule is not None else Schedule()
        self.trace: list[TraceEntry] | None = None
        self._workspace = weakref.ref(workspace)
        self._workers = self.schedule.matrix_workers + self.schedule.vector_workers
        self._columns = self.ep_size * self._workers
        chunks = num_chunks(self.cfg, self.schedule)
        self._event_base = {
            "arrived": 0,
            "returned": self.ep_size * chunks,
            "weights returned": (self.ep_size + 1) * chunks,
        }
        self._num_events = (self.ep_size + 2) * chunks
        arrays = shared_arrays(self.cfg, self.ep_size)
        arrays["flags"] = ((2, self._num_events, self._columns), torch.int64)
        self._layout = pack(arrays)
        self._segments = map_segments(self._layout, workspace.group, self.rank)
        self._tensors = [{name: s.tensor(name) for name in self._layout} for s in self._segments]
        self._shared = [Shared(t["receive"], t["returns"], t["dweights"]) for t in self._tensors]
        self._call = 0
        self._forwards = 0
        self._fence = threading.Lock()
        self._routings: collections.OrderedDict[bytes, _Routing] = collections.OrderedDict()

    # --- the interface of Backend ---

    @_plain()
    def route(self, ids_TK: Tensor) -> RoutingPlan:
        call = self._enter("route", ids_TK, torch.zeros(ids_TK.shape))
        plan = call.routing.plans[self.rank]
        return RoutingPlan.from_tensors([t.clone() for t in plan.tensors()])

    @_plain()
    def forward(self, inputs: Inputs, save: bool) -> tuple[Tensor, list[Tensor]]:
        operation = "forward" if save else "forward without gradients"
        call = self._enter(operation, inputs.ids_TK, inputs.weights_TK, inputs.x_TD)
        keep = save and self.schedule.received == "saved"
        routing = call.routing
        graph = routing.graph(
            ("forward", keep), lambda: lower_forward(routing.plans, routing.tokens, self.cfg, self.schedule, keep=keep)
        )
        bodies = Forward(
            self._rows(call), self._shared, inputs.x_TD, inputs.ids_TK, inputs.weights_TK, inputs.experts, keep
        )
        self._run(call.number, operation, graph, bodies)
        if not save:
            return bodies.y_TD, []
        return bodies.y_TD, [bodies.received_MD, bodies.h_NF, torch.tensor([call.fingerprint])]

    @_plain()
    def backward(self, dy_TD: Tensor, inputs: Inputs, saved: list[Tensor], needs: Needs) -> ExpertGradients:
        received_MD, h_NF, fingerprint_1 = saved
        fingerprint = int(fingerprint_1)
        again = self.schedule.received == "again"
        if again:
            received_MD = self._dispatch_again(inputs, fingerprint)
        call = self._enter("backward", inputs.ids_TK, inputs.weights_TK, inputs.x_TD, fingerprint, needs)
        routing = call.routing
        # dx and d(weight) come from all ranks, so they are computed if any rank wants them.
        need_x, need_weights = (any(h.needs & bit for h in call.headers) for bit in (1, 2))
        flags = {"x": need_x, "weights": need_weights, "w13": needs.w13, "w2": needs.w2}
        graph = routing.graph(
            ("backward", *flags.values()),
            lambda: lower_backward(routing.plans, routing.tokens, self.cfg, self.schedule, **flags),
        )
        rows = self._rows(call)
        x_rows = Gather(inputs.x_TD, received_MD, rows, compact=True)
        bodies = Backward(rows, self._shared, dy_TD, inputs.ids_TK, inputs.experts, h_NF, x_rows)
        self._run(call.number, "backward", graph, bodies)
        return ExpertGradients(
            bodies.dx_TD if needs.x else None,
            bodies.dweights_TK if needs.weights else None,
            bodies.gradients.w13 if needs.w13 else None,
            bodies.gradients.w2 if needs.w2 else None,
        )

    def refuse(self, error: UniEPError) -> None:
        if self.ep_size > 1:
            named = type(error)(f"rank {self.rank}: {error}")
            self._enter("refuse", *self._nothing(), error=named)

    def fake_saved(self, num_tokens: int | SymInt, x_TD: Tensor, new_size: Callable[[], SymInt]) -> list[Tensor]:
        received = new_size() if self.schedule.received == "saved" and self.ep_size > 1 else 0
        return [
            x_TD.new_empty(received, self.cfg.hidden),
            x_TD.new_empty(new_size(), 2 * self.cfg.ffn),
            x_TD.new_empty(1, dtype=torch.int64),
        ]

    def prepare(self) -> None:
        """Nothing to compile; one call makes sure that all ranks are there."""
        self._enter("route", *self._nothing())

    def check(self) -> None:
        """Errors are raised by the call they belong to; nothing is deferred."""

    def report(self) -> dict[str, str]:
        s = self.schedule
        return {
            "backend": f"cpu: {self.ep_size} processes, one-sided writes in shared memory",
            "schedule": s.name,
            "workers": f"{s.matrix_workers} matrix, {s.vector_workers} vector threads per rank",
            "gemm1": f"{s.gemm1.rows} x {s.gemm1.columns} tiles",
            "gemm2": f"{s.gemm2.rows} x {s.gemm2.columns} tiles",
            "received": "a compact copy is saved for backward"
            if s.received == "saved"
            else "dispatched again in backward",
            "shared memory": f"{packed_bytes(self._layout)} bytes per rank",
            "main_grad": "not active: the CPU backend returns gradients",
        }

    def close(self) -> None:
        self._segments, self._tensors, self._shared = [], [], []
        self._routings.clear()

    # --- entering a call ---

    def _nothing(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(0, self.cfg.top_k, dtype=torch.int32), torch.zeros(0, self.cfg.top_k)

    def _enter(
        self,
        operation: str,
        ids_TK: Tensor,
        weights_TK: Tensor,
        x_TD: Tensor | None = None,
        fingerprint: int = 0,
        needs: Needs | None = None,
        error: UniEPError | None = None,
    ) -> _Call:
        """Exchange ids, weights and headers; return when every rank has entered.

        Raises on every rank, before any row moves and with the Workspace still usable: the error of the first
        rank that refuses; UniEPError if ranks are in different operations; CapacityError.
        """
        if error is None and (bad := find_bad_id(ids_TK, self.cfg.num_experts)) is not None:
            row, slot, value = bad
            error = InputError(
                f"rank {self.rank}, row {row}, slot {slot}: expert id {value} is not in 0..{self.cfg.num_experts - 1}; "
                "use -1 for an unused slot"
            )
            ids_TK, weights_TK = self._nothing()
        self._call += 1
        number, parity = self._call, self._call % 2
        text = str(error).encode()[:TEXT_BYTES] if error is not None else b""
        mine = _Header(
            number,
            _OPERATIONS.index(operation),
            ids_TK.shape[0],
            _error_index(error),
            len(text),
            _digest(x_TD) if x_TD is not None else 0,
            fingerprint,
            self._forwards + operation.startswith("forward"),
            (needs.x + 2 * needs.weights) if needs is not None else 0,
        )
        self._tensors[self.rank]["flags"][parity].zero_()
        for segment, tensors in zip(self._segments, self._tensors, strict=True):
            first = segment.word("exchange_header") + (parity * self.ep_size + self.rank) * HEADER_INTS // 2
            for offset, value in enumerate(dataclasses.astuple(mine)):
                segment.words[first + offset] = value
            for name, tensor in (("exchange_ids", ids_TK), ("exchange_weights", weights_TK)):
                tensors[name][parity, self.rank, : tensor.numel()] = tensor.reshape(-1)
            if text:
                tensors["exchange_text"][parity, self.rank, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        with self._fence:
            pass
        for segment in self._segments:
            segment.words[segment.word("entered") + self.rank] = number
        self._await_entered(number, operation)
        return self._read(number, operation, fingerprint)

    def _await_entered(self, number: int, operation: str) -> None:
        words, first = self._segments[self.rank].words, self._segments[self.rank].word("entered")
        for peer in range(self.ep_size):

            def arrived(index: int = first + peer) -> bool:
                return words[index] >= number

            def late(index: int = first + peer, peer: int = peer) -> PeerTimeoutError:
                return PeerTimeoutError(
                    f"rank {self.rank} waited {self.timeout_s:g} s in call {number} ({operation}), stage enter, for "
                    f"rank {peer}: expected call {number}, seen call {words[index]}; rank {self.rank} is ahead. Every "
                    "rank of the group must make the same calls, idle ranks with T=0"
                )

            try:
                self._raise_if_peer_failed()
                self._poll(arrived, late)
            except BaseException as cause:
                self._give_up(cause)
                raise

    def _read(self, number: int, operation: str, fingerprint: int) -> _Call:
        """All ranks' headers, ids and weights of the call; raises what `_enter` promises."""
        parity, segment, tensors = number % 2, self._segments[self.rank], self._tensors[self.rank]
        headers = []
        for peer in range(self.ep_size):
            first = segment.word("exchange_header") + (parity * self.ep_size + peer) * HEADER_INTS // 2
            count = len(dataclasses.fields(_Header))
            headers.append(_Header(*segment.words[first : first + count]))
        for peer, header in enumerate(headers):
            if header.error >= 0:
                text = bytes(tensors["exchange_text"][parity, peer, : header.text_bytes].tolist()).decode(
                    errors="replace"
                )
                raise _ERRORS[header.error](text)
        if any(h.operation != headers[0].operation for h in headers):
            forwards = [h.forwards for h in headers]
            ahead = ""
            if max(forwards) > min(forwards):
                first = forwards.index(max(forwards))
                ahead = f"rank {first} is ahead: it is in forward {max(forwards)}, others have made {min(forwards)}. "
            listed = ", ".join(f"rank {r}: {_OPERATIONS[h.operation]}" for r, h in enumerate(headers))
            raise UniEPError(
                f"ranks are in different operations in call {number} ({listed}). {ahead}Every rank must make the same "
                "calls, with or without gradients alike, idle ranks with T=0"
            )
        self._forwards = headers[self.rank].forwards
        top_k = self.cfg.top_k
        ids = [
            tensors["exchange_ids"][parity, r, : h.tokens * top_k].clone().view(-1, top_k)
            for r, h in enumerate(headers)
        ]
        weights = [
            tensors["exchange_weights"][parity, r, : h.tokens * top_k].clone().view(-1, top_k)
            for r, h in enumerate(headers)
        ]
        key = b"".join(len(t).to_bytes(4, "little") + _raw(t) for t in ids)
        call = _Call(
            number,
            self._routing(key, ids),
            weights,
            headers,
            _digest(*ids, *weights, torch.tensor([h.digest for h in headers])),
        )
        if operation in ("backward", "dispatch") and any(h.fingerprint != call.fingerprint for h in headers):
            raise UniEPError(
                f"call {number}: ranks run the backward of different forwards, or their inputs changed in between; "
                "every rank must run its backwards in the same order"
            )
        self._check_capacity(call.routing)
        return call

    def _routing(self, key: bytes, ids: list[Tensor]) -> _Routing:
        if key not in self._routings:
            self._routings[key] = _Routing(ids, self.cfg)
            if len(self._routings) > _ROUTINGS_KEPT:
                self._routings.popitem(last=False)
        self._routings.move_to_end(key)
        return self._routings[key]

    def _check_capacity(self, routing: _Routing) -> None:
        if self.cfg.max_rows is None:
            return
        rows = routing.plans[0].counts_RE.sum(0).view(self.ep_size, -1).sum(1).tolist()
        for rank, needed in enumerate(rows):
            if needed > self.cfg.max_rows:
                raise CapacityError(
                    f"rank {rank} needs {needed} rows but max_rows is {self.cfg.max_rows}; raise max_rows in "
                    "MoEConfig, or pass None to allocate exactly"
                )

    def _rows(self, call: _Call) -> Rows:
        return Rows.make(self.rank, self.cfg, call.routing.plans[self.rank], call.weights)

    def _dispatch_again(self, inputs: Inputs, fingerprint: int) -> Tensor:
        """The received tokens of a forward once more, compact."""
        call = self._enter("dispatch", inputs.ids_TK, inputs.weights_TK, inputs.x_TD, fingerprint)
        graph = call.routing.graph("dispatch", lambda: lower_dispatch(call.routing.plans, self.cfg, self.schedule))
        bodies = Dispatch(self._rows(call), self._shared, inputs.x_TD, inputs.ids_TK, keep=True)
        self._run(call.number, "dispatch", graph, bodies)
        return bodies.received_MD

    # --- running a taskflow ---

    def _run(self, number: int, operation: str, graph: TaskGraph, bodies: object) -> None:
        _Run(self, number, operation, graph, bodies).run()

    def _poll(self, ready: Callable[[], bool], late: Callable[[], PeerTimeoutError] | None) -> None:
        """Return when `ready`; raise `late()` after the timeout, or at once if a peer gave up."""
        deadline, pause = time.monotonic() + self.timeout_s, 0.0
        while not ready():
            if late is not None:
                self._raise_if_peer_failed()
                if time.monotonic() > deadline:
                    raise late()
            time.sleep(pause)
            pause = min(pause + 1e-5, 1e-3)
        with self._fence:
            pass

    def _raise_if_peer_failed(self) -> None:
        for peer, segment in enumerate(self._segments):
            length = segment.words[segment.word("failed")]
            if length and peer != self.rank:
                text = bytes(self._tensors[peer]["failed"][1:].view(torch.uint8)[:length].tolist()).decode(
                    errors="replace"
                )
                raise PeerTimeoutError(
                    f"rank {self.rank} cannot go on in call {self._call}: rank {peer} failed with {text}"
                )

    def _give_up(self, cause: BaseException) -> None:
        """Tell peers that this rank will not arrive, and close the Workspace."""
        text = f"{type(cause).__name__}: {cause}"
        raw = text.encode()[: TEXT_BYTES - 8]
        segment, failed = self._segments[self.rank], self._tensors[self.rank]["failed"]
        failed[1:].view(torch.uint8)[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
        with self._fence:
            pass
        segment.words[segment.word("failed")] = len(raw)
        if (workspace := self._workspace()) is not None:
            workspace.fail(text)


class _StoppedError(Exception):
    """Another worker of this rank failed."""


class _Run:
    """One graph on one rank: workers claim tasks of their class in order, wait, run, signal."""

    def __init__(self, backend: CpuBackend, number: int, operation: str, graph: TaskGraph, bodies: object) -> None:
        self.backend, self.number, self.operation, self.graph, self.bodies = backend, number, operation, graph, bodies
        self.parity = number % 2
        self.local: dict[Event, int] = collections.defaultdict(int)
        self.local_lock = threading.Lock()
        self.errors: list[BaseException] = []

    def run(self) -> None:
        backend, column = self.backend, self.backend.rank * self.backend._workers
        threads: list[threading.Thread] = []
        for worker, count in (("matrix", backend.schedule.matrix_workers), ("vector", backend.schedule.vector_workers)):
            queue, cursor = self.graph.queue(backend.rank, worker), itertools.count()  # type: ignore[arg-type]
            for index in range(count):
                args = (f"{worker} {index}", queue, cursor, column + len(threads))
                threads.append(threading.Thread(target=self._work, args=args, daemon=True))
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as interrupt:  # KeyboardInterrupt: stop the workers before memory is closed
            self.errors.append(interrupt)
            for thread in threads:
                thread.join()
        if self.errors:
            backend._give_up(self.errors[0])
            raise self.errors[0]

    def _work(self, name: str, queue: tuple[Task, ...], cursor: itertools.count, column: int) -> None:
        torch.set_num_threads(1)  # a setting of each thread
        try:
            with torch.no_grad():
                while (index := next(cursor)) < len(queue):
                    self._step(name, queue[index], column)
        except _StoppedError:
            pass
        except BaseException as error:
            self.errors.append(error)

    def _step(self, name: str, task: Task, column: int) -> None:
        trace = self.backend.trace
        claimed = time.perf_counter_ns() if trace is not None else 0
        for event, count in task.waits:
            self._wait(task, event, count)
        started = time.perf_counter_ns() if trace is not None else 0
        if task.op != "gate":
            getattr(self.bodies, task.op)(task.block)
        if trace is not None and task.op != "gate":
            trace.append(TraceEntry(task.rank, name, task, started, time.perf_counter_ns(), started - claimed))
        for event in task.signals:
            self._signal(event, column)

    def _first_word(self, event: Event) -> int:
        """Index of the event's first column in its owner's words."""
        backend = self.backend
        index = backend._event_base[event.stage] + event.number
        base = backend._segments[event.rank].word("flags")
        return base + (self.parity * backend._num_events + index) * backend._columns

    def _signal(self, event: Event, column: int) -> None:
        if event.stage in SHARED_STAGES:
            words, index = self.backend._segments[event.rank].words, self._first_word(event) + column
            with self.backend._fence:
                pass
            words[index] += 1
        else:
            with self.local_lock:
                self.local[event] += 1

    def _seen(self, event: Event) -> list[int]:
        first = self._first_word(event)
        return list(self.backend._segments[event.rank].words[first : first + self.backend._columns])

    def _wait(self, task: Task, event: Event, count: int) -> None:
        shared = event.stage in SHARED_STAGES

        def ready() -> bool:
            if self.errors:
                raise _StoppedError
            return (sum(self._seen(event)) if shared else self.local.get(event, 0)) >= count

        # Own tasks need no limit of their own: they stop when one that waits for a peer does.
        self.backend._poll(ready, (lambda: self._late(task, event)) if shared else None)

    def _late(self, task: Task, event: Event) -> PeerTimeoutError:
        """Which peers are behind: what their tasks must signal against what they have."""
        backend, seen = self.backend, self._seen(event)
        expected = collections.Counter(t.rank for t in self.graph.tasks for e in t.signals if e == event)
        behind = []
        for peer, wanted in sorted(expected.items()):
            got = sum(seen[peer * backend._workers : (peer + 1) * backend._workers])
            if got < wanted:
                behind.append(f"rank {peer}: expected {wanted}, seen {got}")
        return PeerTimeoutError(
            f"rank {backend.rank} waited {backend.timeout_s:g} s in call {self.number} ({self.operation}), stage "
            f"{event.stage}, for {'; '.join(behind)}; blocked: {task}"
        )


def _error_index(error: UniEPError | None) -> int:
    if error is None:
        return -1
    return next((i for i, kind in enumerate(_ERRORS) if type(error) is kind), 0)


def _raw(tensor: Tensor) -> bytes:
    """The bytes of a contiguous tensor (numpy is not a dependency)."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _digest(*tensors: Tensor) -> int:
    """64 bits that name the contents of `tensors`."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        state.update(repr(tensor.shape).encode() + _raw(tensor.contiguous()))
    return int.from_bytes(state.digest(), "little", signed=True)
