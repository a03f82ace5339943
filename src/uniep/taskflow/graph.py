"""The taskflow: tile tasks, the events between them, and the worker class that runs each.

A task is one tile of one operation.  It waits for event counters to reach a value, runs, and adds one to
each counter it signals.  Bodies never wait: waits and signals belong to the loop that runs them.  A counter
lives on one rank, and only tasks of that rank wait for it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Literal, NamedTuple

Worker = Literal["matrix", "vector"]

SHARED_STAGES = ("arrived", "returned", "weights returned")
"""Stages whose counters peers signal; all others stay inside one rank."""


class Event(NamedTuple):
    """Identity of a counter: the rank that owns it, the stage that signals it, which one of the stage.

    "arrived": number = source rank * chunks + chunk of the send list.  "returned", "weights returned": number =
    chunk of the owner's tokens.  Local stages: number = row tile, expert, or 0.
    """

    rank: int
    stage: str
    number: int

    def __str__(self) -> str:
        return f"{self.stage}[{self.number}] on rank {self.rank}"


class Block(NamedTuple):
    """A rectangle of one output.  group: the expert, the peer, or 0: which output it is part of."""

    group: int
    row0: int
    row1: int
    column0: int
    column1: int


Wait = tuple[Event, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One tile of `op` on `rank`."""

    op: str
    worker: Worker
    rank: int
    block: Block
    waits: tuple[Wait, ...] = ()
    signals: tuple[Event, ...] = ()

    def __str__(self) -> str:
        b = self.block
        return f"{self.op}({b.group}, rows {b.row0}:{b.row1}, columns {b.column0}:{b.column1}) on rank {self.rank}"


@dataclasses.dataclass(frozen=True)
class TaskGraph:
    """The tasks of all ranks for one call, each rank's in the order in which its workers claim them.

    outputs: what each (op, rank) must cover exactly once, one rectangle per group.
    """

    ep_size: int
    tasks: tuple[Task, ...]
    outputs: dict[tuple[str, int], tuple[Block, ...]]

    def queue(self, rank: int, worker: Worker) -> tuple[Task, ...]:
        return tuple(t for t in self.tasks if t.rank == rank and t.worker == worker)

    def producers(self) -> dict[Event, int]:
        """How often each event is signalled."""
        total: dict[Event, int] = defaultdict(int)
        for task in self.tasks:
            for event in task.signals:
                total[event] += 1
        return total
