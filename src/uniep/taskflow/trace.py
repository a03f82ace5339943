"""Traces: which worker did what, and when, as one record per task on any executor; and statistics of the records.

A record says when a worker took a task from its queue, when the task could start, and when it ended.  So the time of a
worker splits into *busy*; *waiting* for tasks of its own rank; *exposed communication*, waiting for data from peers, or
for a stage that waits for such data; and *idle*: no task left, or none taken yet.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from uniep.errors import InputError
from uniep.taskflow.graph import GATE, WORKERS, Block, TaskGraph

PHASES = ("forward", "backward")


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One task in one call (ns, one clock for all ranks, or one origin).

    worker: its class, and its number in the class: "matrix 0".  remote: reads data from peers.  for_peers: waits for
    peers, itself or through the gate of its stage.
    claimed_ns: taken from the queue; start_ns: nothing left to wait for; end_ns: finished.
    """

    phase: str
    rank: int
    worker: str
    op: str
    block: Block
    remote: bool
    for_peers: bool
    claimed_ns: int
    start_ns: int
    end_ns: int


def device_spans(graph: TaskGraph, list_n: Tensor, record_n5: Tensor, phase: str) -> list[Span]:
    """The records of a device's programs: int64 rows of (task, program, claimed, start, end).

    list_n: the tasks of one class on one rank, in the order in which programs claim them; task: an index into it.
    Times: nanoseconds from one origin for all ranks.
    Raises InputError for a record of no task, or one that ends before it begins.
    """
    rows = record_n5.tolist()
    for row in rows:
        if not 0 <= row[0] < len(list_n) or not row[2] <= row[3] <= row[4]:
            raise InputError(
                f"record {row} is not a task of this list; it must be (task below {len(list_n)}, program, "
                "claimed <= start <= end)"
            )
    tasks = graph.some(list_n)
    remote, for_peers = graph.remote[list_n].tolist(), graph.waits_for_peers[list_n].tolist()
    return [
        Span(
            phase, tasks[at].rank, f"{tasks[at].worker} {program}", tasks[at].op, tasks[at].block, remote[at],
            for_peers[at], claimed, start, end,
        )
        for at, program, claimed, start, end in rows
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shares:
    """How the workers of one class spent one phase, on all ranks: parts that sum to 1."""

    phase: str
    worker: str
    busy: float
    waiting: float
    exposed: float
    idle: float


def phases_of(spans: Iterable[Span]) -> list[str]:
    found = dict.fromkeys(s.phase for s in spans)
    return sorted(found, key=lambda phase: PHASES.index(phase) if phase in PHASES else len(PHASES))


def window(spans: Iterable[Span]) -> tuple[int, int]:
    """(first claim, last end) of all ranks."""
    spans = list(spans)
    return min(s.claimed_ns for s in spans), max(s.end_ns for s in spans)


def shares(spans: Sequence[Span]) -> list[Shares]:
    """Shares per phase and class of workers, of the time from the first claim on any rank to the last end."""
    out = []
    for phase in phases_of(spans):
        of_phase = [s for s in spans if s.phase == phase]
        first, last = window(of_phase)
        for worker in WORKERS:
            chosen = [s for s in of_phase if s.worker.split()[0] == worker]
            total = max(last - first, 1) * len({(s.rank, s.worker) for s in chosen})
            if not chosen:
                continue
            busy = sum(s.end_ns - s.start_ns for s in chosen) / total
            waits = [sum(s.start_ns - s.claimed_ns for s in chosen if s.for_peers == peers) for peers in (False, True)]
            waiting, exposed = (w / total for w in waits)
            out.append(Shares(phase, worker, busy, waiting, exposed, max(1 - busy - waiting - exposed, 0.0)))
    return out


def lanes_of(spans: Sequence[Span]) -> list[tuple[int, str]]:
    """Rank and worker of each lane of a picture: by rank, class and number, 2 before 10."""

    def place(lane: tuple[int, str]) -> tuple[int, str, int]:
        kind, _, number = lane[1].partition(" ")
        return lane[0], kind, int(number or 0)

    return sorted({(s.rank, s.worker) for s in spans}, key=place)


def trace_events(spans: Sequence[Span], origin: int | None = None, first: int = 0) -> list[dict[str, Any]]:
    """Records in the trace event format of Perfetto and chrome://tracing: a process per rank, a thread per worker.

    origin: ns of time 0; default, the first claim.  first: process number of rank 0.
    """
    lanes = lanes_of(spans)
    threads = {lane: number for number, lane in enumerate(lanes)}
    events: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in lanes}):
        events.append(
            {"ph": "M", "name": "process_name", "pid": first + rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        )
    for (rank, worker), tid in threads.items():
        events.append({"ph": "M", "name": "thread_name", "pid": first + rank, "tid": tid, "args": {"name": worker}})
    zero = min((s.claimed_ns for s in spans), default=0) if origin is None else origin

    def event(span: Span, name: str, kind: str, start: int, end: int) -> dict[str, Any]:
        b = span.block
        where = {"group": b.group, "rows": f"{b.row0}:{b.row1}", "columns": f"{b.column0}:{b.column1}"}
        args = {"phase": span.phase, "op": span.op, **where}
        return {
            "ph": "X", "name": name, "cat": kind, "pid": first + span.rank, "tid": threads[span.rank, span.worker],
            "ts": (start - zero) / 1e3, "dur": (end - start) / 1e3, "args": args,
        }  # fmt: skip

    for span in sorted(spans, key=lambda s: (s.rank, s.worker, s.claimed_ns)):
        if span.start_ns > span.claimed_ns:
            what = "exposed communication" if span.for_peers else "waiting"
            events.append(event(span, what, what, span.claimed_ns, span.start_ns))
        if span.op != GATE:
            events.append(event(span, span.op, span.worker.split()[0], span.start_ns, span.end_ns))
    return events


def write_trace(spans: Sequence[Span], about: Mapping[str, str], path: Path) -> None:
    """about: a description of the run, stored with the events."""
    other = {**about, "shares": [dataclasses.asdict(s) for s in shares(spans)]}
    document = {"traceEvents": trace_events(spans), "displayTimeUnit": "ms", "otherData": other}
    path.write_text(json.dumps(document, indent=None, separators=(",", ":")))


_FIRST_PROCESS = 1 << 30
"""Process number of rank 0 in a merged trace: above those of the operating system."""


def merge_profile(profile: Path, spans: Sequence[Span], path: Path) -> None:
    """torch.profiler's trace (`export_chrome_trace`) of this process with the tasks of layers that ran meanwhile.

    spans: recorded by the CPU backend, on the clock of `time.perf_counter_ns`.
    """
    document = json.loads(profile.read_text())
    since_epoch = time.time_ns() - time.perf_counter_ns()
    origin = int(document.get("baseTimeNanoseconds", 0)) - since_epoch
    document["traceEvents"] += trace_events(spans, origin, _FIRST_PROCESS)
    path.write_text(json.dumps(document, separators=(",", ":")))
