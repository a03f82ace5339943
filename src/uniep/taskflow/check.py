"""What must hold before a taskflow may run: every output tile once, enough producers, nothing that blocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from uniep.errors import ConfigError
from uniep.taskflow.graph import Block, Event, Task, TaskGraph

_SHOWN = 8


def check(graph: TaskGraph) -> None:
    """Raises ConfigError that lists the tiles or the blocked tasks concerned.

    Checked: each output is covered exactly once; each wait has as many producers as it counts (a wait for 0
    passes); workers that claim tasks in order, one per class and rank, reach the end.  More workers of a class
    can only run ahead of that, so one is the hardest case.
    """
    _check_outputs(graph)
    produced = graph.producers()
    short = [
        f"{task} waits for {count} of {event}, which is signalled {produced.get(event, 0)} times"
        for task in graph.tasks
        for event, count in task.waits
        if produced.get(event, 0) < count
    ]
    if short:
        raise ConfigError(f"the taskflow has waits without enough producers: {_listed(short)}")
    if blocked := _run(graph.tasks, in_order=True):
        reason = "a cycle" if _run(graph.tasks, in_order=False) else "an order of tasks that blocks"
        raise ConfigError(f"the taskflow has {reason}; blocked: {_listed(map(str, blocked))}")


def _check_outputs(graph: TaskGraph) -> None:
    tiles: dict[tuple[str, int], list[Block]] = defaultdict(list)
    for task in graph.tasks:
        tiles[task.op, task.rank].append(task.block)
    for (op, rank), expected in graph.outputs.items():
        found: dict[int, list[Block]] = defaultdict(list)
        for block in tiles.get((op, rank), ()):
            found[block.group].append(block)
        for whole in expected:
            if reason := _not_exact(whole, found.pop(whole.group, [])):
                raise ConfigError(f"{op} on rank {rank}: {reason} of {whole}")
        if found:
            raise ConfigError(f"{op} on rank {rank} has tiles of unknown outputs: {_listed(map(str, found))}")


def _not_exact(whole: Block, tiles: list[Block]) -> str | None:
    """Why `tiles` do not cover `whole` exactly once; tiles form bands of equal rows."""
    twice = [b for b, n in Counter(tiles).items() if n > 1]
    if twice:
        return f"tiles appear more than once, {_listed(map(str, twice))},"
    bands: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for b in tiles:
        bands[b.row0, b.row1].append((b.column0, b.column1))
    if not _is_partition(bands, whole.row0, whole.row1):
        return f"row tiles {_listed(map(str, sorted(bands)))} leave a gap or overlap"
    for rows, columns in bands.items():
        if not _is_partition(columns, whole.column0, whole.column1):
            return f"in rows {rows}, column tiles {_listed(map(str, sorted(columns)))} leave a gap or overlap"
    return None


def _is_partition(spans: Iterable[tuple[int, int]], start: int, stop: int) -> bool:
    for first, last in sorted(spans):
        if first != start or last <= first:
            return False
        start = last
    return start == stop


def _run(tasks: Iterable[Task], in_order: bool) -> list[Task]:
    """Run `tasks` without doing anything; the tasks that stay blocked (in order: the heads of the queues)."""
    queues: dict[object, list[Task]] = defaultdict(list)
    for number, task in enumerate(tasks):
        queues[(task.rank, task.worker) if in_order else number].append(task)
    for queue in queues.values():
        queue.reverse()
    seen: dict[Event, int] = defaultdict(int)
    waiting: dict[Event, list[object]] = defaultdict(list)  # queues to look at again when the event is signalled
    ready = list(queues)
    while ready:
        key = ready.pop()
        queue = queues[key]
        while queue:
            missing = next((event for event, count in queue[-1].waits if seen[event] < count), None)
            if missing is not None:
                waiting[missing].append(key)
                break
            for event in queue.pop().signals:
                seen[event] += 1
                ready += waiting.pop(event, [])
    return [queue[-1] for queue in queues.values() if queue]


def _listed(items: Iterable[str]) -> str:
    shown = list(items)
    return "; ".join(shown[:_SHOWN]) + (f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
