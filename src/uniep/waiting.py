"""Bounded waiting, in short looks: for Ctrl-C, for peers that fail meanwhile, and for processes that were suspended."""

from __future__ import annotations

import time

SAME_CALLS = "Every rank of the group must make the same calls, idle ranks with T=0"
"""The remedy of every error about ranks that are in different calls."""

LOOK_S = 0.05
"""The longest that a wait may go without looking up."""

_COUNTED_S = 2 * LOOK_S


class Patience:
    """How long a wait may still take.

    Between two looks at most 0.1 s count: more has passed only if this process did not run, as when all ranks of a job
    are suspended and go on later, and then nobody was late.
    """

    def __init__(self, seconds: float) -> None:
        self._left, self._looked = seconds, time.monotonic()

    def over(self) -> bool:
        """Whether the time is up.  To be asked at least every LOOK_S."""
        now = time.monotonic()
        self._left -= min(now - self._looked, _COUNTED_S)
        self._looked = now
        return self._left <= 0

    def look(self) -> float:
        """Seconds until the next look: at most LOOK_S, and no more than are left (but 1 ms)."""
        return min(LOOK_S, max(self._left, 1e-3))
