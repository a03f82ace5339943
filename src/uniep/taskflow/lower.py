"""Compile operators to tile tasks: the same tasks on every executor, in the order given by a Way.

Forward, per rank: push (each token once per peer) -> gate_up + activation tiles over gathered rows -> down tiles whose
epilogue writes rows into the return slots of the token's rank -> combine.  Backward mirrors it: push of dO ->
down_grad + the activation's gradient -> gate_up_grad with the same epilogue -> weight gradients, which hide the
returns -> sums.

"fused": a tile waits for the events that it reads.  "serial": one gate per stage waits for all of the stage before.
Every rank lowers all ranks, since a wait counts peers' signals.

**Source**: one taskflow for communication and computation with events, HyperParallel-MoE (arXiv 2605.23764);
deterministic token order under any overlap and local-first tiles, UniEP (arXiv 2604.19241); send lists ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from uniep.config import MoEConfig
from uniep.errors import ConfigError
from uniep.routing import RoutingPlan, build_parts
from uniep.stages import ALL, Flags
from uniep.taskflow.graph import GATE, SHARED_STAGES, Block, Lists, Relation, TaskGraph, Worker, lexsort
from uniep.taskflow.layer import backward_operators, forward_operators
from uniep.taskflow.operators import Access, Operator, Operators
from uniep.taskflow.order import places
from uniep.taskflow.site import Site
from uniep.way import Way


def lower_forward(
    plans: Sequence[RoutingPlan], tokens: Sequence[int], cfg: MoEConfig, way: Way, *, keep: bool
) -> TaskGraph:
    """plans, tokens: RoutingPlan and T of every rank.  keep: also copy received tokens out, for backward."""
    operators = forward_operators(way, keep=keep)
    return compile_graph(operators, sites(plans, tokens, cfg, way))


def lower_backward(
    plans: Sequence[RoutingPlan], tokens: Sequence[int], cfg: MoEConfig, way: Way, flags: Flags = ALL
) -> TaskGraph:
    """flags: which gradients are needed; the others have no tasks."""
    return compile_graph(backward_operators(way, flags), sites(plans, tokens, cfg, way))


def sites(plans: Sequence[RoutingPlan], tokens: Sequence[int], cfg: MoEConfig, way: Way) -> list[Site]:
    """Every rank's share of a call.  Raises ConfigError if plans do not return each routed slot exactly once."""
    slots = cfg.max_tokens_per_rank * cfg.top_k
    back_P = torch.cat([p.row_return_N[p.row_return_N >= 0] for p in plans]).long()
    routed = plans[0].counts_RE.sum(1).long()
    found = torch.unique(back_P)
    if len(found) != len(back_P) or not torch.equal(torch.bincount(found // slots, minlength=len(plans)), routed):
        raise ConfigError(
            f"the plans return {len(back_P)} rows to {len(found)} slots of {int(routed.sum())} routed ones"
        )
    chunk = found % slots // cfg.top_k // way.chunk_tokens
    return [
        Site(
            rank, len(plans), cfg, way, plan, tokens[rank], torch.unique(chunk[found // slots == rank]),
            build_parts(plan, rank, cfg) if way.grouped else None,
        )
        for rank, plan in enumerate(plans)
    ]  # fmt: skip


def compile_graph(operators: Operators, of_rank: Sequence[Site]) -> TaskGraph:
    """Split every operator on every rank, connect what its tiles read and write, and put tasks in order.

    Raises ConfigError for a tile that reads what nothing writes.
    """
    made = _Compiled(operators, of_rank)
    for number, op in enumerate(operators):
        for site in of_rank:
            made.lower(number, op, site)
    if of_rank[0].way.gates:
        made.gate_stages()
    else:
        made.waits, made.signals = made.reads, made.writes
    return made.graph()


class _Pairs:
    """A relation under construction: the group of each task, and pairs of a group and the key of an event."""

    def __init__(self) -> None:
        self.num_groups = 0
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []  # as they were added
        self.firsts: list[int] = []

    def add(self, group_n: Tensor, group_P: Tensor, key_P: Tensor) -> None:
        """Add the next tasks.  Their groups count from 0."""
        self.parts.append((group_n, group_P, key_P))
        self.firsts.append(self.num_groups)
        self.num_groups += max((int(t.max()) for t in (group_n, group_P) if t.numel()), default=-1) + 1

    def keys(self) -> Tensor:
        return torch.cat([key_P for _, _, key_P in self.parts])

    def relation(self, key_V: Tensor) -> Relation:
        """The relation to the events of these keys, ascending; other events, and groups without tasks, are left out."""
        group_N, group_P = (
            torch.cat([part[i] + first for part, first in zip(self.parts, self.firsts, strict=True)]) for i in (0, 1)
        )
        key_P, has_tasks_G = self.keys(), torch.bincount(group_N, minlength=self.num_groups) > 0
        known_P = torch.isin(key_P, key_V) & has_tasks_G[group_P]
        place_P = torch.searchsorted(key_V, key_P[known_P])
        return Relation(group_N, Lists.of(group_P[known_P], place_P, self.num_groups, len(key_V)))


class _Part(NamedTuple):
    """Consecutive tasks: those of one operator on one rank."""

    rank: int
    op: int
    tiles: int


class _Compiled:
    """A graph under construction: tasks in the order in which operators are split, each event as one number."""

    _LIMIT = 1 << 40  # numbers of one stage's events on one rank

    def __init__(self, operators: Operators, of_rank: Sequence[Site]) -> None:
        self.operators, self.ranks = operators, len(of_rank)
        self.names = [*(op.name for op in operators), GATE]
        self.workers: list[Worker] = [*(op.worker for op in operators), "vector"]
        accesses = [access for op in operators for access in (*op.writes, *op.reads)]
        self.stages = list(dict.fromkeys([*(a.stage for a in accesses), "stage", GATE]))
        self.parts: list[_Part] = []
        self.block, self.work, self.place = list[Tensor](), list[Tensor](), list[Tensor]()
        self.reads, self.writes, self.waits, self.signals = (_Pairs() for _ in range(4))
        self.outputs: dict[tuple[str, int], tuple[Block, ...]] = {}

    def key(self, stage: str, rank: Tensor | int, number: Tensor | int) -> Tensor:
        place = torch.as_tensor(rank) + self.stages.index(stage) * self.ranks
        return place * self._LIMIT + torch.as_tensor(number)

    def lower(self, number: int, op: Operator, site: Site) -> None:
        block_n5 = op.split(site)
        count = len(block_n5)
        read, written = (self._accessed(accesses, site, block_n5) for accesses in (op.reads, op.writes))
        self.reads.add(*read)
        self.writes.add(*written)
        work_n3 = torch.stack([torch.as_tensor(w).expand(count) for w in op.work(site, block_n5)], 1)
        self._add(site.rank, number, block_n5, work_n3, places(self.operators, op, site, block_n5))
        self.outputs[op.name, site.rank] = op.covers(site)

    def _accessed(self, accesses: Sequence[Access], site: Site, block_n5: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(group_n, group_P, key_P) of all these accesses together."""
        group_n, group_P, key_P = (torch.zeros(k, dtype=torch.int64) for k in (len(block_n5), 0, 0))
        for number, access in enumerate(accesses):
            pairs = access.pairs(site, block_n5)
            key = self.key(access.stage, pairs.rank_P, pairs.number_P)
            if number == 0:
                group_n, group_P, key_P = pairs.group_n, pairs.group_P, key
                continue
            groups = int(max(t.max() for t in (pairs.group_n, pairs.group_P) if len(t))) + 1 if len(block_n5) else 1
            both_G, group_n = torch.unique(group_n * groups + pairs.group_n, return_inverse=True)
            before, here = (
                Lists.of(group, torch.arange(len(group)), limit, len(group)).take(chosen)
                for group, limit, chosen in (
                    (group_P, int(both_G.max()) // groups + 1 if len(both_G) else 0, both_G // groups),
                    (pairs.group_P, groups, both_G % groups),
                )
            )
            group_P = torch.cat([before.groups, here.groups])
            key_P = torch.cat([key_P[before.item_P], key[here.item_P]])
        return group_n, group_P, key_P

    def _from_peers(self, key_P: Tensor) -> Tensor:
        shared = [self.stages.index(stage) for stage in SHARED_STAGES if stage in self.stages]
        return torch.isin(key_P // self._LIMIT // self.ranks, torch.tensor(shared, dtype=torch.int64))

    def _add(self, rank: int, op: int, block_n5: Tensor, work_n3: Tensor, place_n3: Tensor) -> None:
        self.parts.append(_Part(rank, op, len(block_n5)))
        self.block.append(block_n5)
        self.work.append(work_n3)
        self.place.append(place_n3)

    def gate_stages(self) -> None:
        """A gate before every stage waits for the whole previous stage and for everything that peers send to the
        stage."""
        number = [0] * self.ranks
        gates = []
        for part, (_, _, read_P), (group_n, group_P, key_P) in zip(
            list(self.parts), self.reads.parts, self.writes.parts, strict=True
        ):
            stage = number[part.rank]
            opened, done = (self.key(name, part.rank, stage)[None] for name in (GATE, "stage"))
            groups = torch.unique(group_n)
            self.waits.add(torch.zeros_like(group_n), torch.zeros_like(group_n[:1]), opened[: part.tiles])
            self.signals.add(group_n, torch.cat([group_P, groups]), torch.cat([key_P, done.expand(len(groups))]))
            if part.tiles:
                before = [self.key("stage", part.rank, stage - 1)[None]] * (stage > 0)
                inbound = torch.unique(read_P[self._from_peers(read_P)])
                gates.append((part, stage, torch.cat([inbound, *before]), opened))
                number[part.rank] += 1
        for part, stage, awaited, opened in gates:
            one, nothing = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
            self.waits.add(one, torch.zeros_like(awaited), awaited)
            self.signals.add(one, one, opened)
            self.reads.add(one, nothing, nothing)
            self.writes.add(one, nothing, nothing)
            block_15 = torch.tensor([[stage, 0, 0, 0, 0]])
            # A gate comes before its stage, which begins with the operator.
            self._add(part.rank, len(self.names) - 1, block_15, one.expand(1, 3), torch.tensor([[part.op, -1, 0]]))

    def graph(self) -> TaskGraph:
        rank_N, op_N = (
            torch.tensor([(p.rank, p.op)[i] for p in self.parts], dtype=torch.int64).repeat_interleave(
                torch.tensor([p.tiles for p in self.parts], dtype=torch.int64)
            )
            for i in (0, 1)
        )
        block_N5, work_N3, place_N3 = torch.cat(self.block), torch.cat(self.work), torch.cat(self.place)
        awaited_V = torch.unique(self.waits.keys())
        key_V = torch.unique(torch.cat([awaited_V, self.reads.keys()]))
        order_N = lexsort(place_N3[:, 2], op_N, place_N3[:, 1], place_N3[:, 0], rank_N)
        reads, writes = (pairs.relation(key_V).reordered(order_N) for pairs in (self.reads, self.writes))
        waits, signals = reads, writes
        if self.waits is not self.reads:
            waits, signals = (pairs.relation(key_V).reordered(order_N) for pairs in (self.waits, self.signals))
            signals = signals.among(torch.isin(key_V, awaited_V))
        written_V, signalled_V = (relation.count(len(key_V)) for relation in (writes, signals))
        place_V = key_V // self._LIMIT
        graph = TaskGraph(
            ep_size=self.ranks,
            ops=tuple(self.names),
            workers=tuple(self.workers),
            op_N=op_N[order_N],
            rank_N=rank_N[order_N],
            block_N5=block_N5[order_N],
            work_N3=work_N3[order_N],
            stages=tuple(self.stages),
            event_V3=torch.stack([place_V % self.ranks, place_V // self.ranks, key_V % self._LIMIT], 1),
            count_V=torch.where(written_V > 0, written_V, signalled_V),
            waits=waits,
            signals=signals,
            reads=reads,
            writes=writes,
            outputs=self.outputs,
        )
        read_V = reads.count(len(key_V))
        if bool((missing_V := (read_V > 0) & (written_V == 0)).any()):
            event = int(torch.nonzero(missing_V)[0])
            reader = graph.task(graph.reads.first_task(event))
            raise ConfigError(f"{reader} reads {graph.event(event)}, which nothing writes")
        return graph
