"""The taskflow: tile tasks, the events between them, and the worker class that runs each.

A task is one tile of one operator.  It waits for events, runs, and signals events.  An event is complete when it has
been signalled `count` times; tasks wait until their events are complete.  Bodies never wait: waits and signals belong
to the loop that runs them.  An event lives on one rank, and only tasks of that rank wait for it.

A graph is a few arrays, because a call can have a million tasks; `Task` is one task as an object.

Shape suffixes: N tasks, V events, G groups, P pairs (group, item).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from uniep.errors import ConfigError

Worker = Literal["matrix", "vector"]
WORKERS: tuple[Worker, ...] = ("matrix", "vector")

GATE = "gate"
"""Name of the tasks that separate stages under overlap="serial"; they have no body."""

SHARED_STAGES = ("arrived", "returned", "weights returned")
"""Stages whose events peers signal; all others stay inside one rank."""


class Event(NamedTuple):
    """Identity of an event: the rank that owns it, the stage that signals it, its number in the stage.

    "arrived": number = source rank * chunks + chunk of the send list.  "returned", "weights returned": number =
    chunk of the owner's tokens.  Local stages: number = row tile, tile, expert, or 0.
    """

    rank: int
    stage: str
    number: int

    def __str__(self) -> str:
        return f"{self.stage}[{self.number}] on rank {self.rank}"


class Block(NamedTuple):
    """A rectangle of one output.  group: the output: an expert, a peer, or 0."""

    group: int
    row0: int
    row1: int
    column0: int
    column1: int


Wait = tuple[Event, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One tile of `op` on `rank`.  waits: events, and how many signals complete each."""

    op: str
    worker: Worker
    rank: int
    block: Block
    waits: tuple[Wait, ...] = ()
    signals: tuple[Event, ...] = ()

    def __str__(self) -> str:
        b = self.block
        return f"{self.op}({b.group}, rows {b.row0}:{b.row1}, columns {b.column0}:{b.column1}) on rank {self.rank}"


@dataclasses.dataclass(frozen=True, eq=False)
class Lists:
    """A list of numbers per group: those of group g are item_P[start_G1[g] : start_G1[g + 1]]."""

    start_G1: Tensor
    item_P: Tensor

    @classmethod
    def of(cls, group_P: Tensor, item_P: Tensor, num_groups: int, num_items: int) -> Lists:
        """Made from pairs in any order; each pair is kept once, every list ascending."""
        span = max(num_items, 1)
        key_P = torch.unique(group_P * span + item_P)
        return cls(running_start(torch.bincount(key_P // span, minlength=num_groups)), key_P % span)

    def __len__(self) -> int:
        return len(self.start_G1) - 1

    @functools.cached_property
    def groups(self) -> Tensor:
        """(P,): the group of each item."""
        return torch.arange(len(self)).repeat_interleave(self.start_G1.diff())

    def take(self, group_g: Tensor) -> Lists:
        """The lists of these groups."""
        count_g = self.start_G1[group_g + 1] - self.start_G1[group_g]
        return Lists(running_start(count_g), self.item_P[ranges(self.start_G1[group_g], count_g)])

    def inverse(self, num_items: int) -> Lists:
        """The inverse: per item, the groups that contain it."""
        return Lists.of(self.item_P, self.groups, num_items, len(self))

    def lists(self) -> list[list[int]]:
        item, start = self.item_P.tolist(), self.start_G1.tolist()
        return [item[a:b] for a, b in itertools.pairwise(start)]


@dataclasses.dataclass(frozen=True, eq=False)
class Relation:
    """The events of each task.  Tasks of one group share them, as the columns of a row tile do: a million tasks would
    otherwise have tens of millions of pairs."""

    group_N: Tensor
    events: Lists

    @classmethod
    def of(cls, task_P: Tensor, event_P: Tensor, num_tasks: int, num_events: int) -> Relation:
        """Made from (task, event) pairs; every task is its own group."""
        return cls(torch.arange(num_tasks), Lists.of(task_P, event_P, num_tasks, num_events))

    @functools.cached_property
    def tasks(self) -> Lists:
        """The tasks of each group."""
        count_G = torch.bincount(self.group_N, minlength=len(self.events))
        return Lists(running_start(count_G), torch.argsort(self.group_N, stable=True))

    def reordered(self, order_N: Tensor) -> Relation:
        """With tasks in another order: the new task i is the old order_N[i]."""
        return Relation(self.group_N[order_N], self.events)

    def of_tasks(self, task_n: Tensor) -> Lists:
        return self.events.take(self.group_N[task_n])

    def first_task(self, event: int) -> int:
        """The first task that has this event."""
        groups = self.events.groups[self.events.item_P == event]
        return int(self.tasks.take(groups).item_P.min())

    def among(self, wanted_V: Tensor) -> Relation:
        """Without the events of which wanted_V is False."""
        kept_P, lists = wanted_V[self.events.item_P], self.events
        count_G = torch.bincount(lists.groups[kept_P], minlength=len(lists))
        return Relation(self.group_N, Lists(running_start(count_G), lists.item_P[kept_P]))

    def count(self, num_events: int) -> Tensor:
        """(V,): how many tasks have each event."""
        size_G = torch.bincount(self.group_N, minlength=len(self.events))
        count_V = torch.zeros(num_events, dtype=torch.int64)
        return count_V.index_add_(0, self.events.item_P, size_G[self.events.groups])


def running_start(count_N: Tensor) -> Tensor:
    """(N+1,): where each of N consecutive groups starts, and where the last ends."""
    return torch.cat([count_N.new_zeros(1), torch.cumsum(count_N, 0)])


def ranges(first_N: Tensor, count_N: Tensor) -> Tensor:
    """first_N[0] .. first_N[0] + count_N[0] - 1, then those of the next, and so on."""
    base_N = first_N - (torch.cumsum(count_N, 0) - count_N)
    return base_N.repeat_interleave(count_N) + torch.arange(int(count_N.sum()))


def lexsort(*keys: Tensor) -> Tensor:
    """Indices that sort by the last key, then the one before it, and so on."""
    order = torch.argsort(keys[0], stable=True)
    for key in keys[1:]:
        order = order[torch.argsort(key[order], stable=True)]
    return order


@dataclasses.dataclass(frozen=True, eq=False)
class TaskGraph:
    """The tasks of all ranks for one call, each rank's in the order of its Schedule.

    ops, workers: of op_N, names and classes of workers.  block_N5: see `Block`.  work_N3: floating point operations,
    bytes of memory, bytes to peers.  stages, event_V3: identity of each event (rank, index into stages, number).
    count_V: signals that complete it.  waits, signals: what workers do.  reads, writes: the reason: a task needs all
    writes of each event it reads, and an event counts all its writers.  `check` proves that waits and signals ensure
    this.  outputs: what each (op, rank) must cover exactly once, one rectangle per group.
    """

    ep_size: int
    ops: tuple[str, ...]
    workers: tuple[Worker, ...]
    op_N: Tensor
    rank_N: Tensor
    block_N5: Tensor
    work_N3: Tensor
    stages: tuple[str, ...]
    event_V3: Tensor
    count_V: Tensor
    waits: Relation
    signals: Relation
    reads: Relation
    writes: Relation
    outputs: dict[tuple[str, int], tuple[Block, ...]]

    @property
    def num_tasks(self) -> int:
        return len(self.op_N)

    @property
    def num_events(self) -> int:
        return len(self.count_V)

    @functools.cached_property
    def classes(self) -> Tensor:
        """Index into WORKERS of each task."""
        of_op = [WORKERS.index(w) for w in self.workers]
        return torch.tensor(of_op, dtype=torch.int64)[self.op_N]

    @functools.cached_property
    def remote(self) -> Tensor:
        """(N,): whether a task reads what peers send."""
        return self.has_any(self.reads, self._shared())

    @functools.cached_property
    def waits_for_peers(self) -> Tensor:
        """(N,): whether a task waits for peers, itself or by the gate before it."""
        direct_N = self.has_any(self.waits, self._shared())
        gates_V = torch.zeros(self.num_events, dtype=torch.bool)
        gates_V[self.signals.of_tasks(torch.nonzero(direct_N & (self.op_N == self._gate())).flatten()).item_P] = True
        return direct_N | self.has_any(self.waits, gates_V)

    def _gate(self) -> int:
        return self.ops.index(GATE) if GATE in self.ops else -1

    def _shared(self) -> Tensor:
        """(V,): whether peers signal an event."""
        shared = [self.stages.index(stage) for stage in SHARED_STAGES if stage in self.stages]
        return torch.isin(self.event_V3[:, 1], torch.tensor(shared, dtype=torch.int64))

    @staticmethod
    def has_any(relation: Relation, event_V: Tensor) -> Tensor:
        """(N,): whether a task has one of these events."""
        lists = relation.events
        any_G = torch.zeros(len(lists), dtype=torch.bool)
        any_G[lists.groups[event_V[lists.item_P]]] = True
        return any_G[relation.group_N]

    def indices(self, rank: int, worker: Worker | None = None) -> Tensor:
        """Tasks of a rank, or of one class of its workers, in the order of the Schedule."""
        chosen_N = self.rank_N == rank
        if worker is not None:
            chosen_N = chosen_N & (self.classes == WORKERS.index(worker))
        return torch.nonzero(chosen_N).flatten()

    def event(self, index: int) -> Event:
        rank, stage, number = self.event_V3[index].tolist()
        return Event(rank, self.stages[stage], number)

    def index_of(self, event: Event) -> int:
        """Index of an event that this graph has."""
        stage = self.stages.index(event.stage)
        wanted_3 = torch.tensor([event.rank, stage, event.number])
        return int(torch.nonzero((self.event_V3 == wanted_3).all(1)))

    def some(self, index_n: Tensor) -> list[Task]:
        """These tasks as objects."""
        waits, signals = self.waits.of_tasks(index_n), self.signals.of_tasks(index_n)
        used, place = torch.unique(torch.cat([waits.item_P, signals.item_P]), return_inverse=True)
        event = [Event(rank, self.stages[stage], number) for rank, stage, number in self.event_V3[used].tolist()]
        count = self.count_V[used].tolist()
        of_wait = Lists(waits.start_G1, place[: len(waits.item_P)]).lists()
        of_signal = Lists(signals.start_G1, place[len(waits.item_P) :]).lists()
        columns = (t[index_n].tolist() for t in (self.op_N, self.rank_N, self.block_N5))
        return [
            Task(
                self.ops[op],
                self.workers[op],
                rank,
                Block(*block),
                tuple((event[v], count[v]) for v in waited),
                tuple(event[v] for v in signalled),
            )
            for op, rank, block, waited, signalled in zip(*columns, of_wait, of_signal, strict=True)
        ]

    def task(self, index: int) -> Task:
        return self.some(torch.tensor([index]))[0]

    @functools.cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks as objects: only for graphs that are small enough to inspect task by task."""
        return tuple(self.some(torch.arange(self.num_tasks)))

    def queue(self, rank: int, worker: Worker) -> tuple[Task, ...]:
        return tuple(self.some(self.indices(rank, worker)))

    def descriptors(self, index_n: Tensor) -> Tensor:
        """(n, 6) int32: op, group, row0, row1, column0, column1 of these tasks, for a device.

        index_n: `indices(rank, worker)`, or the order of an `Assignment`.  op is an index into `ops`.
        docs/taskflow.md says how a device derives the same list from a plan.
        """
        return torch.cat([self.op_N[index_n, None], self.block_N5[index_n]], 1).to(torch.int32)


def from_tasks(
    ep_size: int, tasks: Sequence[Task], outputs: dict[tuple[str, int], tuple[Block, ...]] | None = None
) -> TaskGraph:
    """A graph of hand-made tasks; they read the events that they wait for, and write those that they signal.

    Raises ConfigError where two waits for one event count differently.
    """
    signalled: dict[Event, int] = defaultdict(int)
    for event in (e for t in tasks for e in t.signals):
        signalled[event] += 1
    waited: dict[Event, int] = {}
    for event, count in (w for t in tasks for w in t.waits):
        if waited.setdefault(event, count) != count:
            raise ConfigError(f"tasks wait for {waited[event]} and for {count} of {event}; an event has one count")
    events = sorted(signalled.keys() | waited.keys())
    index = {event: i for i, event in enumerate(events)}
    ops = dict.fromkeys((t.op, t.worker) for t in tasks)
    stages = list(dict.fromkeys(e.stage for e in events))

    def relation(of_task: Iterable[Iterable[Event]]) -> Relation:
        pairs = [(i, index[e]) for i, of in enumerate(of_task) for e in of]
        table = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
        return Relation.of(table[:, 0], table[:, 1], len(tasks), len(events))

    waits, signals = relation([e for e, _ in t.waits] for t in tasks), relation(t.signals for t in tasks)
    of_op = list(ops)
    return TaskGraph(
        ep_size,
        tuple(op for op, _ in of_op),
        tuple(worker for _, worker in of_op),
        torch.tensor([of_op.index((t.op, t.worker)) for t in tasks], dtype=torch.int64),
        torch.tensor([t.rank for t in tasks], dtype=torch.int64),
        torch.tensor([t.block for t in tasks], dtype=torch.int64).view(-1, 5),
        torch.zeros(len(tasks), 3, dtype=torch.int64),
        tuple(stages),
        torch.tensor([(e.rank, stages.index(e.stage), e.number) for e in events], dtype=torch.int64).view(-1, 3),
        torch.tensor([waited.get(e, signalled[e]) for e in events], dtype=torch.int64),
        waits,
        signals,
        waits,
        signals,
        outputs or {},
    )
