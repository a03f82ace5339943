"""Threads that compute with one intra-op thread each: the number of threads changes bits on the CPU.

torch.set_num_threads sets the number for the calling thread and for all threads that have not computed yet.  So it is
called once for each thread here, when a Workspace is made, and the number for other threads is restored at once.
Calls do not change the settings of the process or of its threads.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from uniep.waiting import LOOK_S

_T = TypeVar("_T")
_Job = Callable[[], None]
_pinning = threading.Lock()


class PinnedThreads:
    """`count` threads.  They end with this object."""

    def __init__(self, count: int) -> None:
        self._jobs: list[queue.SimpleQueue[tuple[_Job, _Job] | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes the caller
        with _pinning:
            for jobs in self._jobs:
                found: queue.SimpleQueue[int] = queue.SimpleQueue()
                threading.Thread(target=_serve, args=(jobs, found), daemon=True).start()
                restoring = threading.Thread(target=torch.set_num_threads, args=(found.get(),))
                restoring.start()
                restoring.join()
        weakref.finalize(self, _end, self._jobs)

    def run(self, jobs: Sequence[_Job], stop: Callable[[BaseException], Any] = lambda interrupt: None) -> None:
        """Run each job in a thread of its own; jobs must not raise.  Returns, or raises an interrupt, when all have
        ended.

        stop: called with an interrupt of the calling thread, to end the jobs early.
        """
        running = set(range(len(jobs)))
        for number, job in enumerate(jobs):
            self._jobs[number].put((job, lambda number=number: self._end_of(running, number)))  # type: ignore[misc]
        try:
            self._wait(running)
        except BaseException as interrupt:
            stop(interrupt)
            self._wait(running)
            raise

    def call(self, function: Callable[[], _T]) -> _T:
        """Call `function` in one of the threads, without autograd; returns or raises what it does."""
        results: list[_T] = []
        errors: list[BaseException] = []

        def job() -> None:
            try:
                with torch.no_grad():
                    results.append(function())
            except BaseException as error:
                errors.append(error)

        self.run([job])
        try:
            if errors:
                raise errors[0]
            return results[0]
        finally:
            errors.clear()  # its traceback refers to this frame

    def _end_of(self, running: set[int], number: int) -> None:
        running.discard(number)
        self._ended.put(None)

    def _wait(self, running: set[int]) -> None:
        while running:
            with contextlib.suppress(queue.Empty):
                self._ended.get(timeout=LOOK_S)


def _serve(jobs: queue.SimpleQueue, found: queue.SimpleQueue) -> None:
    found.put(_pin())
    while (entry := jobs.get()) is not None:
        job, ended = entry
        try:
            job()
        finally:
            del entry, job  # they hold a call's tensors
            ended()
            del ended


def _pin() -> int:
    """Use one intra-op thread in this thread from now on.  Returns the number that other threads had."""
    before = torch.get_num_threads()  # also initialises this thread, which would undo what is set before
    torch.set_num_threads(1)
    return before


def _end(all_jobs: Sequence[queue.SimpleQueue]) -> None:
    for jobs in all_jobs:
        jobs.put(None)
