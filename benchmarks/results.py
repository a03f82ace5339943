"""Reading result files: what table.py and plot.py share.

A file is {"meta": {card, gpus, ep, torch, triton, commit, command, date, ...}, "checks": {...}, "rows": [...]},
a row {shape, tokens, routing, load, direction, impl, ms, ms_min, ms_max, tflops}, on GPUs with peak_mib (memory of
one call beyond its inputs, without memory that a Workspace or DeepEP owns), and with phases if they were asked for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PEERS = ("nccl", "deepep", "deepep-nowait")
DIRECTIONS = {"fwd": "forward", "fwd_bwd": "forward + backward"}


@dataclasses.dataclass(frozen=True)
class Timing:
    """One case of one file: everything but the implementation.  ms: implementation -> milliseconds."""

    meta: dict[str, Any]
    shape: str
    tokens: int
    routing: str
    load: str
    direction: str
    ms: dict[str, float]

    @property
    def speedup(self) -> float | None:
        """uniep over the best peer of the same case; None if one of them is missing."""
        best = best_peer(self.ms)
        return self.ms[best] / self.ms["uniep"] if best and "uniep" in self.ms else None

    @property
    def machine(self) -> str:
        return f"{self.meta['gpus']}x {self.meta['card'].removeprefix('NVIDIA ')}"


def best_peer(ms: dict[str, float]) -> str | None:
    """The fastest peer's name, if there is a peer."""
    there = [impl for impl in PEERS if impl in ms]
    return min(there, key=lambda impl: ms[impl]) if there else None


def load(paths: Iterable[str | Path]) -> list[Timing]:
    """The cases of all files, in the files' order."""
    timings: list[Timing] = []
    for path in paths:
        content = json.loads(Path(path).read_text())
        of_case: dict[tuple, dict[str, float]] = {}
        for row in content["rows"]:
            key = row["shape"], row["tokens"], row["routing"], row["load"], row["direction"]
            of_case.setdefault(key, {})[row["impl"]] = row["ms"]
        timings += [Timing(content["meta"], *key, ms) for key, ms in of_case.items()]
    return timings
