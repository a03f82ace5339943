"""Kernels compiled in parallel, before ranks time the points that launch them.

A new tile compiles for seconds on one core; timing it takes a fraction of one.  So ranks list what the next points
launch, without launching it, and processes that need no GPU compile it into Triton's cache on disk, where the ranks
find it.  Nothing is timed meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import math
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch
import torch.distributed as dist

from uniep.launch.ahead import Kernel, Target
from uniep.schedule import Schedule
from uniep.trials.fleet import DroppedError, Fleet

log = logging.getLogger("uniep")

MOST = 32
"""Compilers, if not told otherwise: a sampler learns nothing from a batch before all of it is compiled."""


REFUSED = "refused", "out of memory"
"""What ranks say of a point that cannot run, before they launch anything."""

LATE = "late"
"""What is said of a point whose kernels would not be compiled in time."""


def usual_number() -> int:
    return min(len(os.sched_getaffinity(0)), MOST)


def arch_here() -> int:
    """Of this machine's GPUs; 90 stands for Hopper, and is that of a machine without one."""
    major, minor = torch.cuda.get_device_capability(0) if torch.cuda.is_available() else (9, 0)
    return 10 * major + minor


@dataclasses.dataclass(frozen=True)
class _Process:
    """In place of a Job: no device.  arch: for which kernels are compiled."""

    arch: int
    ep_size: int = 1
    device: str = "cpu"
    timeout_s: float = 60.0

    def made(self, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> Compiler:
        return Compiler(self.arch)


class Compiler:
    """In a process of its own."""

    def __init__(self, arch: int) -> None:
        import triton

        triton.runtime.driver.set_active(Target(arch))

    def compile(self, kernel: Kernel) -> None:
        """And what launches it, which Triton 3.6 compiles as well, for each kind of arguments."""
        from triton.backends.nvidia import driver

        compiled = kernel.compile()
        with contextlib.suppress(Exception):  # it needs none, or no driver is here
            driver.CudaLauncher(compiled.src, compiled.metadata)


class Compilers:
    """Up to `most` processes, which start when they are first needed, and stay for the next points and layers.

    most: 0: nothing is compiled beforehand.  seconds: spent in `ahead` and `compile` so far.  took: by each kernel.
    """

    def __init__(self, most: int) -> None:
        self.most, self.process, self.seconds = most, _Process(arch_here()), 0.0
        self.fleets: list[Fleet] = []
        self.known: dict[Kernel, DroppedError | None] = {}
        self.took: list[float] = []

    @property
    def batch(self) -> int:
        """Number of points that keep all busy; 0: none."""
        return -(-self.most // 2)

    def ahead(
        self, ranks: Fleet, schedules: Sequence[Schedule], candidate_s: float, until: float = math.inf,
        finish: bool = False,
    ) -> list[DroppedError | None]:  # fmt: skip
        """Compiles what calls of the ranks' job launch.  -> for each Schedule LATE, or why it cannot run; None if
        nothing shows that.  candidate_s to finish: as in `compile`; a list takes as long as a kernel at most.  A fault
        of the ranks ends the lists: what is not compiled here compiles where it is timed."""
        began, refused = time.monotonic(), dict[int, DroppedError]()
        lists: list[list[Kernel]] = [[] for _ in schedules]
        for number, schedule in enumerate(schedules):
            left = until - time.monotonic()
            if not self.most or left <= 0:
                break
            try:
                lists[number] = _listed(ranks, schedule, candidate_s if finish else min(candidate_s, left))
            except DroppedError as error:
                if error.reason not in REFUSED:
                    log.warning("ranks cannot list what %s launches: %s", schedule.name, error)
                    break
                refused[number] = error
        self.seconds += time.monotonic() - began
        dropped = self.compile(lists, candidate_s, until, finish)
        return [refused.get(number, error) for number, error in enumerate(dropped)]

    def compile(
        self, lists: Sequence[Sequence[Kernel]], candidate_s: float, until: float = math.inf, finish: bool = False
    ) -> list[DroppedError | None]:
        """Compiles kernels of several points, each once.  -> for each point that one has killed its compiler or did not
        end, or LATE; None for all others: what Triton says of a kernel comes again where it is launched.

        candidate_s: longest time of a kernel.  until: `time.monotonic()` by which points are wanted: those whose new
        kernels are not expected by then are LATE.  No kernel begins behind it; those under way are given up then,
        unless they may `finish`.
        """
        began, new, late = time.monotonic(), dict[Kernel, None](), set[int]()
        for number, kernels in enumerate(lists):
            more = new | dict.fromkeys(k for k in kernels if k not in self.known)
            if began + self._expected_s(len(more)) <= until or len(more) == len(new):
                new = more
            else:
                late.add(number)
        if count := min(self.most, len(new)):
            self._compile([*new], count, candidate_s, until, finish)
        self.seconds += time.monotonic() - began
        no = DroppedError(LATE, "its kernels would not be compiled in time")
        found = [next((e for k in kernels if (e := self.known.get(k)) is not None), None) for kernels in lists]
        return [error or (no if number in late else None) for number, error in enumerate(found)]

    def _expected_s(self, count: int) -> float:
        """How long so many kernels compile, by those before them; nothing is expected of the first ones."""
        return math.ceil(count / self.most) * statistics.fmean(self.took) if self.most and self.took else 0.0

    def _compile(self, kernels: list[Kernel], count: int, candidate_s: float, until: float, finish: bool) -> None:
        began, queue = time.monotonic(), collections.deque(kernels)
        self.fleets += [Fleet(self.process) for _ in range(count - len(self.fleets))]
        with ThreadPoolExecutor(count) as pool:
            working = {
                pool.submit(self._work, fleet, queue, candidate_s, until, finish): fleet
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
            self.most -= len(broken)
        seconds = time.monotonic() - began
        log.info("compiled %d kernels in %.1f s by %d processes", len(kernels) - len(queue), seconds, count)

    def _work(
        self, fleet: Fleet, queue: collections.deque[Kernel], candidate_s: float, until: float, finish: bool
    ) -> bool:
        """Compile kernels of the queue.  -> False if the process cannot start."""
        while queue and time.monotonic() < until:
            fleet.until = until
            try:
                if not fleet.alive:
                    fleet.start()
            except DroppedError as error:
                if time.monotonic() >= fleet.until:
                    return True
                log.warning("a process that was to compile cannot start: %s", error)
                return False
            try:
                kernel = queue.popleft()
            except IndexError:
                return True
            if finish:
                fleet.until = math.inf
            found, began = None, time.monotonic()
            try:
                fleet.ask("compile", kernel, timeout_s=candidate_s)
                self.took.append(time.monotonic() - began)
            except DroppedError as error:
                if error.reason == "timeout" and time.monotonic() >= fleet.until:
                    return True
                if error.died or error.reason == "timeout":
                    found = DroppedError(error.reason, f"while {kernel.name} was compiled: {error.text}")
            self.known[kernel] = found
        return True

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


def _listed(ranks: Fleet, schedule: Schedule, timeout_s: float) -> list[Kernel]:
    """What the ranks' calls of this Schedule launch, on any of them."""
    of_rank = ranks.ask("kernels", schedule, timeout_s=timeout_s)
    return list(dict.fromkeys(itertools.chain.from_iterable(of_rank)))
