"""Points compiled in parallel, before ranks time them.

A new tile compiles for seconds on one core; timing it takes a fraction of one.  So more fleets run one call of each
point that comes next, at the same time, and Triton keeps the kernels on disk, where the ranks that time find them.
Nothing is timed meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import logging
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch
import torch.distributed as dist

from uniep.memory import plan_memory
from uniep.schedule import Schedule
from uniep.trials.fleet import DroppedError, Fleet
from uniep.trials.trial import Job, Trial

log = logging.getLogger("uniep")

PROCESS = 2**30
"""Bytes of a GPU that a process takes before it allocates any itself."""

USABLE = 0.95
"""Of a GPU's memory."""


def needed(job: Job, workspaces: int = 1) -> float:
    """Bytes of a rank beside those of its process: weights, and what a call takes, with what an allocator wastes."""
    plan = plan_memory(job.cfg, job.ep_size, backend=job.backend)
    weights = job.cfg.experts_per_rank(job.ep_size) * (job.cfg.h_columns + job.cfg.ffn) * job.cfg.hidden
    shared = workspaces * plan.total_bytes("shared")
    return 1.15 * (weights * job.cfg.dtype.itemsize + shared + plan.peak_bytes())


MOST = 16
"""Fleets, if not told otherwise: a search learns nothing from a batch until all of it is compiled."""


def usual_number(ep_size: int) -> int:
    """Fleets of so many ranks, a core for each."""
    return min(len(os.sched_getaffinity(0)) // ep_size, MOST)


@dataclasses.dataclass(frozen=True)
class _Compiling(Job):
    def made(self, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> Compiler:  # type: ignore[override]
        return Compiler(rank, group, device)


class Compiler:
    """One rank.  Between two points it keeps no memory of its device."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.rank, self.group, self.device = rank, group, device

    def compile(self, job: Job, schedule: Schedule) -> None:
        """Launch what the trial of this point launches.  Collective."""
        with contextlib.closing(Trial(job, self.rank, self.group, self.device)) as trial:
            trial.first(schedule)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        del trial
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class Compilers:
    """Fleets that start when they are first needed, and stay for the next points and layers.

    job: one of those that will come; all have as many ranks, on the same devices.  most: number of fleets; 0: nothing
    is compiled.  memory: bytes of each device; default: those of its GPU.  seconds: spent in `compile` so far.
    """

    def __init__(self, job: Job, most: int, memory: float | None = None) -> None:
        self.job, self.most, self.seconds = _Compiling(**vars(job)), most, 0.0
        if memory is None and most and job.device == "cuda":
            memory = torch.cuda.get_device_properties(0).total_memory
        self.memory = memory
        self.fleets: list[Fleet] = []

    def at_once(self, job: Job) -> int:
        """Fleets that fit beside the ranks that time, which have two Workspaces, and beside fleets that do nothing."""
        if self.memory is None:
            return self.most
        room, each = USABLE * self.memory - needed(job, 2) - PROCESS, needed(job)
        fit = min(room // (each + PROCESS), (room - PROCESS * len(self.fleets)) // each)
        return max(min(self.most, int(fit)), 0)

    def compile(
        self, wanted: Sequence[tuple[Job, Schedule]], candidate_s: float, until: float = math.inf, finish: bool = False
    ) -> list[DroppedError | None]:
        """For each point, why its ranks died or did not answer; None for all others, whatever else they raised: where
        they are timed it is raised again.

        candidate_s: longest time of a point.  until: `time.monotonic()` behind which none begins; those that run then
        are given up, unless they may `finish`.
        """
        dropped: list[DroppedError | None] = [None] * len(wanted)
        count = min([len(wanted), *(self.at_once(job) for job, _ in wanted)])
        if not count:
            return dropped
        began, queue = time.monotonic(), collections.deque(enumerate(wanted))
        self.fleets += [Fleet(self.job) for _ in range(count - len(self.fleets))]
        with ThreadPoolExecutor(count) as pool:
            working = {
                pool.submit(_work, fleet, queue, dropped, candidate_s, until, finish): fleet
                for fleet in self.fleets[:count]
            }
            try:
                wait(working)
            except BaseException:
                queue.clear()
                while not all(future.done() for future in working):
                    self._stop()
                    time.sleep(0.1)
                raise
        if broken := [fleet for future, fleet in working.items() if not future.result()]:
            self.fleets = [fleet for fleet in self.fleets if fleet not in broken]
            self.most = len(self.fleets)
        seconds = time.monotonic() - began
        self.seconds += seconds
        log.info("compiled %d points in %.1f s, %d at a time", len(wanted) - len(queue), seconds, count)
        return dropped

    def _stop(self) -> None:
        for fleet in self.fleets:
            fleet.stop()

    def end(self) -> None:
        self._stop()
        for fleet in self.fleets:
            fleet.end()
        self.fleets = []

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _work(
    fleet: Fleet, queue: collections.deque[tuple[int, tuple[Job, Schedule]]], dropped: list[DroppedError | None],
    candidate_s: float, until: float, finish: bool,
) -> bool:  # fmt: skip
    """Compile points of the queue, until there are no more.  -> whether the fleet is of use: False if it cannot
    start."""
    while queue and time.monotonic() < until:
        fleet.until = until
        try:
            if not fleet.alive:
                fleet.start()
        except DroppedError as error:
            if time.monotonic() >= fleet.until:
                return True
            log.warning("%d ranks that were to compile cannot start: %s", fleet.job.ep_size, error)
            return False
        try:
            number, point = queue.popleft()
        except IndexError:
            return True
        if finish:
            fleet.until = math.inf
        try:
            fleet.ask("compile", *point, timeout_s=candidate_s)
        except DroppedError as error:
            if error.died or (error.reason == "timeout" and time.monotonic() < fleet.until):
                dropped[number] = error
    return True
