"""Lower the layer to tile tasks: the same tasks on every executor, in the order of a Schedule.

Forward, per rank: push (each token once per peer) -> gemm1 + SwiGLU tiles over gathered rows -> gemm2 tiles whose
epilogue writes rows into the return slots of the token's rank -> combine.  Backward mirrors it: push of dO ->
dgrad2 + dSwiGLU -> dgrad1 with the same epilogue -> weight gradients, which hide the returns -> sums.

"fused": a tile waits for the chunks its rows came in, and for the row tiles it reads.  "serial": one gate per
stage waits for all of the stage before.  Every rank lowers all ranks, since a wait counts peers' signals.

**Source**: one taskflow for communication and computation with events, HyperParallel-MoE (arXiv 2605.23764);
deterministic token order under any overlap and local-first tiles, UniEP (arXiv 2604.19241); send lists ours.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from uniep.config import MoEConfig
from uniep.routing import Parts, RoutingPlan
from uniep.taskflow.graph import SHARED_STAGES, Block, Event, Task, TaskGraph, Wait, Worker
from uniep.taskflow.schedule import Schedule, Tile, num_chunks

Stage = list[Task]


def lower_forward(
    plans: Sequence[RoutingPlan],
    tokens: Sequence[int],
    cfg: MoEConfig,
    schedule: Schedule,
    *,
    keep: bool,
    parts: Sequence[Parts] | None = None,
) -> TaskGraph:
    """plans, tokens: RoutingPlan and T of every rank.  keep: also copy received tokens out, for backward.

    parts: of every rank, with combine groups: rows are then added before they return."""
    ranks = [_Rank(rank, plan, cfg, schedule) for rank, plan in enumerate(plans)]
    stages = []
    for r in ranks:
        gemm1 = r.gemm("gemm1", schedule.gemm1, cfg.ffn, r.arrivals(schedule.gemm1))
        done = r.rows_done("gemm1", schedule.gemm1, cfg.ffn, schedule.gemm2)
        gemm2 = r.returning("gemm2", done, parts)
        stages.append([r.push(), r.keep() if keep else [], r.local_first(gemm1), *gemm2])
    combine = _sums("combine", ("returned",), stages, tokens, schedule)
    ops = ("push", "gemm1", "gemm2", "combine", *(("keep",) if keep else ()))
    return _graph([[*s, c] for s, c in zip(stages, combine, strict=True)], ranks, tokens, ops, parts)


def lower_dispatch(plans: Sequence[RoutingPlan], cfg: MoEConfig, schedule: Schedule) -> TaskGraph:
    """Dispatch alone: push tokens and copy the received ones out."""
    ranks = [_Rank(rank, plan, cfg, schedule) for rank, plan in enumerate(plans)]
    return _graph([[r.push(), r.keep()] for r in ranks], ranks, [0] * len(ranks), ("push", "keep"))


def lower_backward(
    plans: Sequence[RoutingPlan],
    tokens: Sequence[int],
    cfg: MoEConfig,
    schedule: Schedule,
    *,
    x: bool = True,
    weights: bool = True,
    w13: bool = True,
    w2: bool = True,
    parts: Sequence[Parts] | None = None,
) -> TaskGraph:
    """The flags say which gradients are needed; tasks of others do not exist.  parts: as for `lower_forward`."""
    ranks = [_Rank(rank, plan, cfg, schedule) for rank, plan in enumerate(plans)]
    stages = []
    for r in ranks:
        dgrad2 = r.local_first(r.gemm("dgrad2", schedule.gemm1, cfg.ffn, r.arrivals(schedule.gemm1)))
        done = r.rows_done("dgrad2", schedule.gemm1, cfg.ffn, schedule.gemm2)
        dweight: Stage = []
        dgrad1: list[Stage] = []
        if weights:
            signals = r.returns("weights returned", schedule.gemm2)
            dweight = r.gemm("dweight", schedule.gemm2, 0, done, signals, "vector")
        if x:
            dgrad1 = r.returning("dgrad1", done, parts)
        wgrad2 = r.wgrad("wgrad2", cfg.hidden, cfg.ffn, schedule.gemm2) if w2 else []
        wgrad1 = r.wgrad("wgrad1", 2 * cfg.ffn, cfg.hidden, schedule.gemm1) if w13 else []
        stages.append([r.push(), dgrad2, dweight, *dgrad1, wgrad2, wgrad1])
    sums = [_sums("collect", ("weights returned",), stages, tokens, schedule) if weights else [[] for _ in ranks]]
    sums.append(_sums("combine", ("returned",), stages, tokens, schedule) if x else [[] for _ in ranks])
    needed = {"dweight": weights, "collect": weights, "dgrad1": x, "combine": x, "wgrad2": w2, "wgrad1": w13}
    ops = ("push", "dgrad2", *(op for op, wanted in needed.items() if wanted))
    return _graph(
        [[*s, *tail] for s, *tail in zip(stages, *sums, strict=True)], ranks, tokens, ops, parts if x else None
    )


def _spans(start: int, stop: int, step: int) -> Iterable[tuple[int, int]]:
    return ((i, min(i + step, stop)) for i in range(start, stop, step))


def _count(extent: int, step: int) -> int:
    return -(-extent // step)


class _Rank:
    """Lowers one rank's share."""

    def __init__(self, rank: int, plan: RoutingPlan, cfg: MoEConfig, schedule: Schedule) -> None:
        self.rank, self.cfg, self.schedule = rank, cfg, schedule
        self.chunks = num_chunks(cfg, schedule)
        self.send_count: list[int] = plan.send_count_R.tolist()
        self.recv_count: list[int] = plan.recv_count_R.tolist()
        self.start: list[int] = plan.expert_start_e1.tolist()
        self.source_N, self.return_N = plan.row_source_N.long(), plan.row_return_N.long()
        self.ep_size = len(self.send_count)

    def push(self) -> Stage:
        """Send lists in chunks, the next rank's first, so that no peer is everybody's first target."""
        tasks, chunk = [], self.schedule.chunk_tokens
        for step in range(1, self.ep_size):
            peer = (self.rank + step) % self.ep_size
            for first, last in _spans(0, self.send_count[peer], chunk):
                arrived = Event(peer, "arrived", self.rank * self.chunks + first // chunk)
                block = Block(peer, first, last, 0, self.cfg.hidden)
                tasks.append(Task("push", "vector", self.rank, block, (), (arrived,)))
        return tasks

    def keep(self) -> Stage:
        """Copy what came from each peer out of the receive buffer."""
        tasks, chunk = [], self.schedule.chunk_tokens
        for peer, count in enumerate(self.recv_count):
            if count:
                base = peer * self.chunks
                waits = tuple((Event(self.rank, "arrived", base + i), 1) for i in range(_count(count, chunk)))
                tasks.append(Task("keep", "vector", self.rank, Block(peer, 0, count, 0, self.cfg.hidden), waits))
        return tasks

    def gemm(
        self,
        op: str,
        tile: Tile,
        columns: int,
        waits: list[tuple[Wait, ...]],
        signals: list[tuple[Event, ...]] | None = None,
        worker: Worker = "matrix",
    ) -> Stage:
        """Tiles over all rows.  waits, signals: per row tile (None: an event of this rank).  columns=0: row results."""
        tasks = []
        for expert in range(len(self.start) - 1):
            for row0, row1 in _spans(self.start[expert], self.start[expert + 1], tile.rows):
                index = row0 // tile.rows
                done = signals[index] if signals is not None else (Event(self.rank, op, index),)
                for column0, column1 in _spans(0, columns, tile.columns) if columns else ((0, 1),):
                    block = Block(expert, row0, row1, column0, column1)
                    tasks.append(Task(op, worker, self.rank, block, waits[index], done))
        return tasks

    def arrivals(self, tile: Tile) -> list[tuple[Wait, ...]]:
        """Per row tile: the chunks its remote rows come in."""
        slot_N = -self.source_N - 1
        row_N = torch.nonzero((slot_N >= 0) & (self.return_N >= 0)).flatten()
        block_N = slot_N[row_N] // self.cfg.receive_block
        peer_N = block_N + (block_N >= self.rank)
        chunk_N = slot_N[row_N] % self.cfg.receive_block // self.schedule.chunk_tokens
        found = self._by_tile(row_N // tile.rows, peer_N * self.chunks + chunk_N, tile)
        return [tuple((Event(self.rank, "arrived", key), 1) for key in keys) for keys in found]

    def _by_tile(self, tile_N: Tensor, key_N: Tensor, tile: Tile) -> list[list[int]]:
        """The distinct keys of each row tile, ascending."""
        span = self.ep_size * self.chunks
        found: list[list[int]] = [[] for _ in range(self.start[-1] // tile.rows)]
        for value in torch.unique(tile_N * span + key_N).tolist():
            found[value // span].append(value % span)
        return found

    def rows_done(self, op: str, tile: Tile, columns: int, reader: Tile) -> list[tuple[Wait, ...]]:
        """Per row tile of `reader`: the row tiles of `op` that it reads, complete."""
        count = _count(columns, tile.columns)
        return [
            tuple((Event(self.rank, op, index), count) for index in range(row0 // tile.rows, _count(row1, tile.rows)))
            for row0, row1 in _spans(0, self.start[-1], reader.rows)
        ]

    def returns(self, stage: str, tile: Tile) -> list[tuple[Event, ...]]:
        """Per row tile: `stage` of each chunk of tokens that its rows return to."""
        row_N = torch.nonzero(self.return_N >= 0).flatten()
        slots = self.cfg.max_tokens_per_rank * self.cfg.top_k
        source_N = self.return_N[row_N] // slots
        chunk_N = self.return_N[row_N] % slots // self.cfg.top_k // self.schedule.chunk_tokens
        found = self._by_tile(row_N // tile.rows, source_N * self.chunks + chunk_N, tile)
        return [tuple(Event(key // self.chunks, stage, key % self.chunks) for key in keys) for keys in found]

    def returning(self, op: str, waits: list[tuple[Wait, ...]], parts: Sequence[Parts] | None) -> list[Stage]:
        """The GEMM whose rows return to their tokens: from its epilogue, or, with combine groups, added by part."""
        tile, hidden = self.schedule.gemm2, self.cfg.hidden
        if parts is None:
            return [self.gemm(op, tile, hidden, waits, self.returns("returned", tile))]
        return [self.gemm(op, tile, hidden, waits), self.group_sums(op, parts[self.rank])]

    def group_sums(self, op: str, parts: Parts) -> Stage:
        """A task for the parts of each chunk of a source's tokens, once the row tiles of `op` with their rows are
        complete; peers' parts first, since they travel."""
        tile, tasks, first = self.schedule.gemm2, [], 0
        count = _count(self.cfg.hidden, tile.columns)
        key_P = parts.source_P * self.chunks + parts.token_P // self.schedule.chunk_tokens
        for key, size in zip(*(t.tolist() for t in torch.unique_consecutive(key_P, return_counts=True)), strict=True):
            row_PK = parts.row_PK[first : first + size]
            waits = tuple(
                (Event(self.rank, op, i), count) for i in torch.unique(row_PK[row_PK >= 0] // tile.rows).tolist()
            )
            source, chunk = divmod(key, self.chunks)
            block = Block(source, first, first + size, 0, 1)
            tasks.append(Task("group_sum", "vector", self.rank, block, waits, (Event(source, "returned", chunk),)))
            first += size
        return sorted(tasks, key=lambda t: (t.block.group - self.rank - 1) % self.ep_size)

    def wgrad(self, op: str, rows: int, columns: int, tile: Tile) -> Stage:
        """Tiles over the outputs of each expert that has rows; the contraction is never split."""
        tasks, reads = [], self.schedule.gemm1
        count = _count(self.cfg.ffn, reads.columns)
        for expert, (start, stop) in enumerate(zip(self.start, self.start[1:], strict=False)):
            if start == stop:
                continue
            indices = range(start // reads.rows, stop // reads.rows)
            waits = tuple((Event(self.rank, "dgrad2", index), count) for index in indices)
            for row0, row1 in _spans(0, rows, tile.rows):
                for column0, column1 in _spans(0, columns, tile.columns):
                    tasks.append(Task(op, "matrix", self.rank, Block(expert, row0, row1, column0, column1), waits))
        return tasks

    def outputs(self, tokens: int) -> dict[str, tuple[Block, ...]]:
        """What each op must produce, from the problem alone."""
        hidden, ffn = self.cfg.hidden, self.cfg.ffn
        segments = [(e, a, b) for e, (a, b) in enumerate(zip(self.start, self.start[1:], strict=False)) if a < b]
        rows = {columns: tuple(Block(e, a, b, 0, columns) for e, a, b in segments) for columns in (1, ffn, hidden)}
        own = (Block(0, 0, tokens, 0, 1),) if tokens else ()
        return {
            "push": tuple(Block(peer, 0, n, 0, hidden) for peer, n in enumerate(self.send_count) if n),
            "keep": tuple(Block(peer, 0, n, 0, hidden) for peer, n in enumerate(self.recv_count) if n),
            "gemm1": rows[ffn],
            "gemm2": rows[hidden],
            "dgrad2": rows[ffn],
            "dweight": rows[1],
            "dgrad1": rows[hidden],
            "wgrad2": tuple(Block(e, 0, hidden, 0, ffn) for e, _, _ in segments),
            "wgrad1": tuple(Block(e, 0, 2 * ffn, 0, hidden) for e, _, _ in segments),
            "combine": own,
            "collect": own,
        }

    def local_first(self, tasks: Stage) -> Stage:
        """Tiles that wait for nothing first, each class in expert order (which keeps weights in cache)."""
        return sorted(tasks, key=lambda t: bool(t.waits)) if self.schedule.tile_order == "local-first" else tasks


def _sums(
    op: str, stages: tuple[str, ...], ranks: list[list[Stage]], tokens: Sequence[int], schedule: Schedule
) -> list[Stage]:
    """Per rank: one task per chunk of its tokens, waiting for all that return to it."""
    total = Counter(e for rank in ranks for stage in rank for t in stage for e in t.signals if e.stage in stages)
    chunk = schedule.chunk_tokens
    return [
        [
            Task(
                op,
                "vector",
                rank,
                Block(0, first, last, 0, 1),
                tuple(
                    (Event(rank, stage, first // chunk), total[Event(rank, stage, first // chunk)]) for stage in stages
                ),
            )
            for first, last in _spans(0, count, chunk)
        ]
        for rank, count in enumerate(tokens)
    ]


def _graph(
    stages: list[list[Stage]],
    ranks: list[_Rank],
    tokens: Sequence[int],
    ops: Sequence[str],
    parts: Sequence[Parts] | None = None,
) -> TaskGraph:
    outputs = {}
    for r in ranks:
        expected = r.outputs(tokens[r.rank])
        outputs.update({(op, r.rank): expected[op] for op in ops})
        if parts is not None:
            last = torch.cumsum(torch.bincount(parts[r.rank].source_P, minlength=r.ep_size), 0).tolist()
            spans = zip([0, *last], last, strict=False)
            outputs["group_sum", r.rank] = tuple(Block(s, a, b, 0, 1) for s, (a, b) in enumerate(spans) if a < b)
    if ranks[0].schedule.overlap == "serial":
        stages = [_serial(of_rank) for of_rank in stages]
    return TaskGraph(len(ranks), tuple(t for of_rank in stages for stage in of_rank for t in stage), outputs)


def _serial(stages: list[Stage]) -> list[Stage]:
    """A gate before every stage waits for the whole stage before it and for all that peers send the stage."""
    out: list[Stage] = []
    before: tuple[Wait, ...] = ()
    for number, stage in enumerate(s for s in stages if s):
        rank = stage[0].rank
        inbound = {wait for task in stage for wait in task.waits if wait[0].stage in SHARED_STAGES}
        gate, done = Event(rank, "gate", number), Event(rank, "stage", number)
        out.append([Task("gate", "vector", rank, Block(number, 0, 0, 0, 0), (*before, *sorted(inbound)), (gate,))])
        out.append([dataclasses.replace(t, waits=((gate, 1),), signals=(*t.signals, done)) for t in stage])
        before = ((done, len(stage)),)
    return out
