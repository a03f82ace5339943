"""Bounded waiting in short polls, which handles Ctrl-C, peers that fail meanwhile, and suspended processes."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

SAME_CALLS = "Every rank of the group must make the same calls, idle ranks with T=0"
"""The remedy in every error about ranks that are in different calls."""

LOOK_S = 0.05
"""Longest time between two polls of a wait."""

_COUNTED_S = 2 * LOOK_S


class Patience:
    """How long a wait may still take.

    Between two polls at most 0.1 s count.  More time passes only if this process did not run, for example when all
    ranks of a job are suspended and resumed; then no rank was late.
    """

    def __init__(self, seconds: float) -> None:
        self._left, self._looked = seconds, time.monotonic()

    def over(self) -> bool:
        """Whether the time is up.  Call it at least every LOOK_S."""
        now = time.monotonic()
        self._left -= min(now - self._looked, _COUNTED_S)
        self._looked = now
        return self._left <= 0

    def look(self) -> float:
        """Seconds until the next poll: at most LOOK_S, and not more than is left (but at least 1 ms)."""
        return min(LOOK_S, max(self._left, 1e-3))


def finish(work: Any, timeout_s: float, look: Callable[[], Any] = lambda: None) -> None:
    """Wait for a collective on the CPU; `look()` between the polls may raise.

    Raises TimeoutError when the time is up, and RuntimeError if the collective itself has failed.
    """
    patience = Patience(timeout_s)
    while True:
        try:
            work.wait(datetime.timedelta(seconds=patience.look()))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises if the collective itself failed; a look that ran out of time is no error
                return
        look()
        if patience.over():
            raise TimeoutError(f"nothing came for {timeout_s:g} s")
