"""The order of a device's list under tile_order="critical-path": list scheduling of stretches, whatever the routing.

A stretch is all tiles of one operator and one local expert; of the first product and of the one that returns rows,
tiles with rows of this rank only are a stretch of their own ("own"), the others another one ("late").  The device alone
knows how many tiles they have, but their order needs no counts: one in which each comes behind those that it reads is
right for every routing (docs/taskflow.md).  It is the static scheduler's (`scheduler.assign`) for balanced routing:

    push ... push ─► first, late ─┐drain┌─► return, late ─► send ─► ...      one chain of sends: the wire
                     first, own  ─┘     └─► return, own
                                        └─► weight gradients

All programs together are one worker, to which a stretch is work / programs.  Paths to the end go through the chain of
sends, so that what the wire has still to carry counts as a path.  Behind a stretch, its last tiles are under way
(drain): what reads them is a tile's time later.  A return waits for the sends of the last two experts before it, so
that none stands at a wire that is full.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from uniep.config import MoEConfig
from uniep.dimension import Measured
from uniep.layout import power_of_2
from uniep.schedule import Tile
from uniep.taskflow.graph import Block, Event, Task, TaskGraph, Worker, from_tasks
from uniep.taskflow.scheduler import assign
from uniep.way import Way, travel_us

STRETCH = {"gate_up": 0, "down_grad": 0, "down": 1, "gate_up_grad": 1, "down_wgrad": 2, "gate_up_wgrad": 3}
"""Operator of a table of each operator of a graph."""

_AHEAD = 2  # experts whose rows may be on the wire while those of another are made


def bucket(num_tokens: int) -> int:
    """Number of the bucket of calls with so many tokens of this rank: up to 2 ** number."""
    return power_of_2(num_tokens).bit_length() - 1


def positions(cfg: MoEConfig, way: Way, *, backward: bool) -> Tensor:
    """(4, 2, e) int32: place of the stretches of each operator (`STRETCH`), own and late, of each local expert, in the
    order of the matrix list.  Weight gradients have one stretch, with one place in both rows.  For balanced routing of
    2 ** bucket tokens of each rank; the same on every rank.  Do not change it."""
    way = dataclasses.replace(way, num_tokens=1 << bucket(way.num_tokens))
    return _positions(cfg, way, way.given[2], backward)


@functools.lru_cache(maxsize=256)
def _positions(cfg: MoEConfig, way: Way, measured: Measured, backward: bool) -> Tensor:
    graph, cost_N = problem(cfg, way, measured, backward=backward)
    workers = {"matrix_workers": 1, "vector_workers": graph.num_tasks, "critical_path": True}
    made = assign(graph, dataclasses.replace(way, **workers), cost_N)  # type: ignore[arg-type]
    local = cfg.experts_per_rank(way.ep_size)
    places = torch.zeros(4, 2, local, dtype=torch.int32)
    for place, index in enumerate(made.order(0, "matrix").tolist()):
        op = STRETCH[graph.ops[int(graph.op_N[index])]]
        expert, half = graph.block_N5[index, :2].tolist()
        places[op, slice(None) if op > 1 else half, expert] = place
    return places


@dataclasses.dataclass(frozen=True)
class _Work:
    """Expected work of a stretch.  us: of all programs.  tile_us: of one tile."""

    us: float
    tile_us: float


def problem(cfg: MoEConfig, way: Way, measured: Measured, *, backward: bool) -> tuple[TaskGraph, Tensor]:
    """(stretches as tasks of one matrix worker, cost in ns).  A task's block: group: expert, row0: 1 if late."""
    return _Problem(cfg, way, measured, backward).made()


class _Problem:
    def __init__(self, cfg: MoEConfig, way: Way, measured: Measured, backward: bool) -> None:
        self.cfg, self.way, self.measured, self.backward = cfg, way, measured, backward
        self.local = cfg.experts_per_rank(way.ep_size)
        self.tasks: list[Task] = []
        self.cost: list[int] = []

    def made(self) -> tuple[TaskGraph, Tensor]:
        first_name, return_name = ("down_grad", "gate_up_grad") if self.backward else ("gate_up", "down")
        first = [self._product(half, returns=False) for half in (0, 1)]
        returning = [self._product(half, returns=True) for half in (0, 1)]
        wired, experts = self.way.ep_size > 1, range(self.local)
        arrived = self._pushes(max(work.us for work in (*first, *returning))) if wired else []
        for half in (0, 1):
            for e in experts:
                self._add(first_name, "matrix", e, half, first[half].us, arrived if half else [])
                self._add("drain", "vector", e, half, first[half].tile_us, [(first_name, e, half)])
        for half in (1, 0):
            for e in experts:
                made = [("drain", e, h) for h in ((0, 1) if self.backward else (half,))]
                sends = wired and half == 1
                before = [("send", e - _AHEAD, 0)] if sends and e >= _AHEAD else []
                self._add(return_name, "matrix", e, half, returning[half].us, made + before)
                if sends:
                    before = [("send", e - 1, 0)] if e else []
                    self._add("send", "vector", e, 0, self._send_us(), [(return_name, e, 1), *before])
        if self.backward:
            for name, halves in (("down_wgrad", 1), ("gate_up_wgrad", 2)):
                for e in experts:
                    self._add(name, "matrix", e, 0, self._weights_us(halves), [("drain", e, h) for h in (0, 1)])
        return from_tasks(1, self.tasks), torch.tensor(self.cost, dtype=torch.int64)

    def _add(self, op: str, worker: Worker, e: int, half: int, us: float, after: list[tuple[str, int, int]]) -> None:
        waits = tuple((self._event(*task), 1) for task in after)
        block = Block(e, half, half + 1, 0, 1)
        self.tasks.append(Task(op, worker, 0, block, waits, (self._event(op, e, half),)))
        self.cost.append(max(round(us * 1e3), 1))

    def _event(self, op: str, e: int, half: int) -> Event:
        return Event(0, op, 2 * e + half)

    def _pushes(self, most_us: float) -> list[tuple[str, int, int]]:
        """Tokens on their way, in parts that last no longer than a stretch, since paths that differ by less than the
        longest task count as equal; returns the last part."""
        cfg, way = self.cfg, self.way
        us = travel_us(cfg, way.ep_size, way.num_tokens, way.copies, self.measured)[self.backward]
        parts = max(1, math.ceil(us / max(most_us, 1.0)))
        for part in range(parts):
            self._add("push", "vector", part, 0, us / parts, [("push", part - 1, 0)] if part else [])
        return [("push", parts - 1, 0)]

    @functools.cached_property
    def _tiles(self) -> tuple[float, float]:
        """Row tiles of an expert with rows of this rank only, where the first of these lies anywhere in a tile, and
        others."""
        rows = self.way.gate_up.rows
        every = math.ceil(self.rows / rows)
        own = every if self.way.ep_size == 1 else max(self.rows / self.way.ep_size / rows - 0.5, 0.0)
        return own, every - own

    @functools.cached_property
    def rows(self) -> float:
        """Of an expert, from all ranks."""
        return max(self.way.num_tokens * self.way.ep_size * self.cfg.top_k / self.cfg.num_experts, 1.0)

    @property
    def programs(self) -> int:
        return max(self.way.sms - 1, 1)

    def _product(self, half: int, *, returns: bool) -> _Work:
        """Tiles of one expert: of gate and up, which are two products, and down, or of their gradients."""
        cfg, measured, tiles, tile = self.cfg, self.measured, self._tiles[half], self._tile(returns)
        both = returns == self.backward  # gate and up; down has half as much
        depth = (2 * cfg.ffn if both else cfg.hidden) if self.backward else (cfg.ffn if returns else cfg.hidden)
        flop, weight = 2 * cfg.hidden * cfg.ffn * (1 + both), cfg.hidden * cfg.ffn * (1 + both) * cfg.dtype.itemsize
        compute = tiles * tile.rows * flop / (measured.sm_flop_per_us * self.programs)
        memory = min(tiles, 1.0) * weight / measured.memory_bytes_per_us
        tile_us = 2 * tile.rows * tile.columns * depth / measured.sm_flop_per_us
        if self.backward and not returns:  # the activation's gradient: dO W2 in fp32, gate, up; dh, the activation
            memory += tiles * tile.rows * cfg.ffn * (4 + 5 * cfg.dtype.itemsize) / measured.memory_bytes_per_us
        return _Work(max(compute, memory), tile_us if tiles else 0.0)

    def _tile(self, returns: bool) -> Tile:
        return self.way.down if returns or self.backward else self.way.gate_up

    def _weights_us(self, halves: int) -> float:
        cfg, measured = self.cfg, self.measured
        compute = 2 * self.rows * cfg.hidden * cfg.ffn * halves / (measured.sm_flop_per_us * self.programs)
        return max(compute, cfg.hidden * cfg.ffn * halves * cfg.dtype.itemsize / measured.memory_bytes_per_us)

    def _send_us(self) -> float:
        """Rows of one expert that return to other ranks."""
        away = self.rows * (1 - 1 / self.way.ep_size)
        return away * self.cfg.hidden * self.cfg.dtype.itemsize / self.measured.copy_bytes_per_us
