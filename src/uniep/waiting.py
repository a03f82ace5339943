"""Bounded waiting in short polls, which handles Ctrl-C, peers that fail meanwhile, and suspended processes."""

from __future__ import annotations

import time

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
