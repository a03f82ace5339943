"""Checks before a taskflow runs: every element is written once, every read is ordered, nothing blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from uniep.errors import ConfigError
from uniep.taskflow.graph import WORKERS, Block, Lists, Relation, TaskGraph, lexsort

_SHOWN = 8


def check(graph: TaskGraph, queues: Sequence[Sequence[int]] | None = None) -> None:
    """Raises ConfigError that lists the tiles or the blocked tasks concerned.

    Checked: each output is covered exactly once.  Each event is signalled as often as it counts, by all its writers.
    All writers of what a task reads come before it along events.  Workers that take the tasks of their `queues` in
    order reach the end.  None: one worker per class and rank, in the order of the graph; more workers that claim from
    the same order can only be further ahead, so one is the hardest case.
    """
    _check_outputs(graph)
    _check_counts(graph)
    _check_reads(graph)
    if queues is None:
        queues = [graph.indices(rank, worker).tolist() for rank in range(graph.ep_size) for worker in WORKERS]
    taken = torch.tensor([t for queue in queues for t in queue], dtype=torch.int64)
    often_N = torch.bincount(taken, minlength=graph.num_tasks)
    if bool((often_N != 1).any()):
        index = int(torch.nonzero(often_N != 1)[0])
        raise ConfigError(f"{graph.task(index)} is in the workers' queues {int(often_N[index])} times")
    if stuck := blocked(graph, queues):
        every = blocked(graph, [[i] for i in range(graph.num_tasks)])
        reason, listed = ("a cycle", every) if every else ("an order of tasks that blocks", stuck)
        shown = map(str, graph.some(torch.tensor(listed[: _SHOWN + 1])))
        raise ConfigError(f"the taskflow has {reason}; blocked: {_listed(shown, len(listed))}")


def blocked(graph: TaskGraph, queues: Sequence[Sequence[int]]) -> list[int]:
    """Take the tasks of every queue in order without running them.  Returns the tasks at which queues block, if any."""
    flow = Flow(graph)
    queue_of, place = [0] * graph.num_tasks, [0] * len(queues)
    for number, queue in enumerate(queues):
        for index in queue:
            queue_of[index] = number
    ready = [number for number, queue in enumerate(queues) if queue]
    while ready:
        number = ready.pop()
        queue, at = queues[number], place[number]
        while at < len(queue) and flow.may_start(queue[at]):
            place[number] = at = at + 1
            for group in flow.finish(queue[at - 1]):
                for index in group:
                    other = queue_of[index]
                    if other != number and place[other] < len(queues[other]) and queues[other][place[other]] == index:
                        ready.append(other)
    return sorted(queue[at] for queue, at in zip(queues, place, strict=True) if at < len(queue))


class Flow:
    """The events of a graph while its tasks run, one after another."""

    def __init__(self, graph: TaskGraph) -> None:
        waits, signals = graph.waits, graph.signals
        self._wait_group, self._signal_group = waits.group_N.tolist(), signals.group_N.tolist()
        self._waiting_for = waits.events.start_G1.diff().tolist()
        self._unfinished = signals.tasks.start_G1.diff().tolist()
        self._signalled = signals.events.lists()
        self._signallers = torch.bincount(signals.events.item_P, minlength=graph.num_events).tolist()
        self._waiters = waits.events.inverse(graph.num_events).lists()
        self._members = waits.tasks.lists()

    def may_start(self, index: int) -> bool:
        return not self._waiting_for[self._wait_group[index]]

    def finish(self, index: int) -> list[list[int]]:
        """The tasks that may start now, by group."""
        return [group for event in self.completes(index) for group in self.complete(event)]

    def completes(self, index: int) -> Sequence[int]:
        """The events that are complete once this task is over: all groups that signal them are."""
        group = self._signal_group[index]
        left = self._unfinished[group] = self._unfinished[group] - 1
        if left:
            return ()
        done: list[int] = []
        for event in self._signalled[group]:
            left = self._signallers[event] = self._signallers[event] - 1
            if not left:
                done.append(event)
        return done

    def complete(self, event: int) -> list[list[int]]:
        """The tasks that may start now that this event is complete, by group."""
        opened: list[list[int]] = []
        for waiter in self._waiters[event]:
            self._waiting_for[waiter] -= 1
            if self._waiting_for[waiter] == 0:
                opened.append(self._members[waiter])
        return opened


# --- every element once ---


def _check_outputs(graph: TaskGraph) -> None:
    """Tiles form bands of equal rows; the bands of an output partition its rows, the tiles of a band its columns."""
    names = {name: graph.ops.index(name) for name in graph.ops}
    known = [(rank, names[op]) for op, rank in graph.outputs if op in names]
    whole = torch.tensor(
        [(rank, names.get(op, -1), *block) for (op, rank), blocks in graph.outputs.items() for block in blocks],
        dtype=torch.int64,
    ).view(-1, 7)
    op_N = torch.tensor([names[name] for name in graph.ops], dtype=torch.int64)[graph.op_N]
    ops, groups = len(names) + 1, max([0, *(int(t.max()) for t in (whole[:, 2], graph.block_N5[:, 0]) if len(t))]) + 1

    def key(rank: Tensor, op: Tensor, group: Tensor) -> Tensor:
        return (rank * ops + op + 1) * groups + group

    expected = torch.tensor([rank * ops + op + 1 for rank, op in known], dtype=torch.int64)
    tile = torch.nonzero(torch.isin(graph.rank_N * ops + op_N + 1, expected)).flatten()
    key_n = key(graph.rank_N[tile], op_N[tile], graph.block_N5[tile, 0])
    order = lexsort(*(graph.block_N5[tile, i] for i in (3, 2, 1)), key_n)
    tile, key_n = tile[order], key_n[order]
    whole_key, by_key = torch.sort(key(whole[:, 0], whole[:, 1], whole[:, 2]))
    whole = whole[by_key]
    at = torch.searchsorted(whole_key, key_n).clamp(max=max(len(whole) - 1, 0))
    if bool((bad := whole_key[at] != key_n if len(whole) else torch.ones_like(key_n, dtype=torch.bool)).any()):
        task = graph.task(int(tile[torch.nonzero(bad)[0]]))
        raise ConfigError(f"{task.op} on rank {task.rank} has tiles of unknown outputs: {task}")
    absent = torch.nonzero(~torch.isin(whole_key, key_n)).flatten()
    if len(absent):
        rank, op, *block = whole[absent[0]].tolist()
        name = next((name for name, index in names.items() if index == op), "an operator without tasks")
        raise ConfigError(f"{name} on rank {rank}: no tile covers {Block(*block)}")
    if not len(tile):
        return
    _, row0, row1, column0, column1 = graph.block_N5[tile].unbind(1)
    _, _, _, top, bottom, left, right = whole[at].unbind(1)
    same = key_n[1:] == key_n[:-1]
    band = same & (row0[1:] == row0[:-1]) & (row1[1:] == row1[:-1])
    follows = torch.where(band, column0[1:] == column1[:-1], column1[:-1] == right[:-1])
    follows &= band | (column0[1:] == left[1:])
    follows &= band | torch.where(same, row0[1:] == row1[:-1], (row0[1:] == top[1:]) & (row1[:-1] == bottom[:-1]))
    ok = (row0 < row1) & (column0 < column1)
    ok[1:] &= follows
    ok[0] &= (row0[0] == top[0]) & (column0[0] == left[0])
    ok[-1] &= (row1[-1] == bottom[-1]) & (column1[-1] == right[-1])
    if not bool(ok.all()):
        first = int(torch.nonzero(~ok)[0])
        task, before = graph.task(int(tile[first])), graph.task(int(tile[max(first - 1, 0)]))
        twice = first > 0 and task.block == before.block and task.op == before.op and task.rank == before.rank
        how = "appears more than once" if twice else f"and {before} leave a gap or overlap"
        owner = f"{task.op} on rank {task.rank}"
        raise ConfigError(f"{owner}: {task} {how} in {Block(*whole[at[first], 2:].tolist())}")


# --- every read covered ---


def _check_counts(graph: TaskGraph) -> None:
    awaited_V = graph.waits.count(graph.num_events) > 0
    signalled_V = graph.signals.count(graph.num_events)
    wrong = torch.nonzero(awaited_V & ((signalled_V != graph.count_V) | (signalled_V == 0))).flatten()
    if len(wrong):
        listed = [
            f"{graph.task(graph.waits.first_task(event))} waits for {int(graph.count_V[event])} of "
            f"{graph.event(event)}, which is signalled {int(signalled_V[event])} times"
            for event in wrong[:_SHOWN].tolist()
        ]
        raise ConfigError(f"the taskflow has waits without their producers: {_listed(listed, len(wrong))}")


def _check_reads(graph: TaskGraph) -> None:
    """Check that the writers of everything a task reads come before it.  Either they are all the signallers of an event
    that it waits for, or they come before one of those."""
    awaited_V = graph.waits.count(graph.num_events) > 0
    for task, event in _without(graph.writes.among(awaited_V), graph.signals, graph):
        raise ConfigError(
            f"the taskflow has a write without its signal: {graph.task(task)} does not signal {graph.event(event)}"
        )
    by_waits: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for task, event in _without(graph.reads, graph.waits, graph):
        by_waits[int(graph.waits.group_N[task])].append((task, event))
    if not by_waits:
        return
    signallers, writers = (relation.events.inverse(graph.num_events) for relation in (graph.signals, graph.writes))
    for group, reads in by_waits.items():
        groups = torch.unique(writers.take(torch.tensor([event for _, event in reads])).item_P)
        needed_n = graph.writes.tasks.take(groups).item_P
        before_N = _before(graph, graph.waits.events.take(torch.tensor([group])).item_P, signallers, needed_n)
        if bool(before_N[needed_n].all()):
            continue
        late = Relation(graph.writes.group_N[~before_N], graph.writes.events).count(graph.num_events)
        for task, event in reads:
            if late[event]:
                writers = graph.writes.tasks.take(graph.writes.events.groups[graph.writes.events.item_P == event])
                writer = int(writers.item_P[~before_N[writers.item_P]].min())
                raise ConfigError(
                    f"the taskflow has a read that nothing orders: {graph.task(task)} reads {graph.event(event)}, but "
                    f"does not wait for {graph.task(writer)}"
                )


def _without(needed: Relation, given: Relation, graph: TaskGraph) -> list[tuple[int, int]]:
    """(task, event) pairs of `needed` that are not in `given`, one task for all of the same groups."""
    if needed.group_N is given.group_N and needed.events is given.events:
        return []
    both = needed.group_N * len(given.events) + given.group_N
    joint, group_N = torch.unique(both, return_inverse=True)
    task_J = torch.full_like(joint, graph.num_tasks).scatter_reduce_(0, group_N, torch.arange(graph.num_tasks), "amin")
    wanted = needed.events.take(joint // max(len(given.events), 1))
    there = given.events.take(joint % max(len(given.events), 1))
    keys = [lists.groups * graph.num_events + lists.item_P for lists in (wanted, there)]
    missing = ~torch.isin(*keys)
    return list(zip(task_J[wanted.groups[missing]].tolist(), wanted.item_P[missing].tolist(), strict=True))


def _before(graph: TaskGraph, events: Tensor, signallers: Lists, needed_n: Tensor) -> Tensor:
    """(N,): the tasks that have ended once all these events are complete, or as many as include all needed ones.

    signallers: the groups of `graph.signals` that signal each event.
    """
    over_N = torch.zeros(graph.num_tasks, dtype=torch.bool)
    seen_V = torch.zeros(graph.num_events, dtype=torch.bool)
    while len(events) and not bool(over_N[needed_n].all()):
        seen_V[events] = True
        tasks = graph.signals.tasks.take(torch.unique(signallers.take(events).item_P)).item_P
        over_N[tasks] = True
        events = torch.unique(graph.waits.events.take(torch.unique(graph.waits.group_N[tasks])).item_P)
        events = events[~seen_V[events]]
    return over_N


def _listed(items: Iterable[str], total: int) -> str:
    shown = list(items)[:_SHOWN]
    return "; ".join(shown) + (f"; and {total - len(shown)} more" if total > len(shown) else "")
