"""Result files: what moe.py, worth.py, table.py, plot.py, predict.py and model.py share.

A file is {"meta": {card, gpus, ep, torch, triton, commit, command, date, ...}, "checks": {...}, "rows": [...]},
a row {shape, tokens, routing, load, direction, impl, ms, ms_min, ms_max, tflops}, on GPUs with peak_mib (memory of
one call beyond its inputs, without memory that a Workspace or DeepEP owns), of a backward with saved_mib (what its
forward leaves for it, without y), and with phases if they were asked for.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

RESULTS = Path(__file__).parent / "results"

PEERS = ("nccl", "deepep", "deepep-nowait", "liger-cute")
NAMES = {"deepep-nowait": "DeepEP", "deepep": "DeepEP with its CPU wait"}
"""What tables and pictures call an implementation, where it is not its own name."""
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
        return machine_of(self.meta)


def machine_of(meta: dict[str, Any]) -> str:
    """ "2x H200": of a file's meta."""
    return f"{meta['gpus']}x {meta['card'].removeprefix('NVIDIA ')}"


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


def of_worth(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """(meta, searches, rows) of a file of worth.py.  Raises SystemExit for one without a timed case."""
    content = json.loads(path.read_text())
    if not content["rows"]:
        raise SystemExit(f"{path} has no timed case: moe.py failed, or had no time; raise --budget-s of worth.py")
    return content["meta"], content.get("searches", []), content["rows"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a committed file under a window of one call.  file: its name; card: as its meta says."""

    file: str
    card: str
    ep: int
    commit: str
    shape: str
    tokens: int
    routing: str
    direction: str
    impl: str
    ms: float
    ms_min: float
    ms_max: float


def write(path: Path, content: dict[str, Any]) -> None:
    """A results file, as a whole or not at all: whoever reads it meanwhile, and a run that is killed, has the one
    before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


R = TypeVar("R", bound=Row)


def window_rows(names: Iterable[str], kind: type[R]) -> Iterator[R]:
    """The rows of committed files, each as a `kind`, in the files' order."""
    for name in names:
        document = json.loads((RESULTS / f"{name}.json").read_text())
        meta = document["meta"]
        for row in document["rows"]:
            if row["load"] == "window":
                of_row = (row[k] for k in ("shape", "tokens", "routing", "direction", "impl", "ms", "ms_min", "ms_max"))
                yield kind(name, meta["card"], meta["ep"], meta["commit"], *of_row)


def card_of(row: Row) -> str:
    """The card's short name: "h100" or "h200"."""
    return "h100" if "H100" in row.card else "h200"


def errors(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How far predicted_ms is off ms, relative, and the spread of the measurements; {} of no rows."""
    off = sorted(abs(row["predicted_ms"] / row["ms"] - 1) for row in rows)
    if not off:
        return {}
    spread = [(row["ms_max"] - row["ms_min"]) / 2 / row["ms"] for row in rows]
    return {
        "rows": len(off),
        "median": statistics.median(off),
        "p95": off[min(len(off) - 1, int(0.95 * len(off)))],
        "median_spread_of_files": statistics.median(spread),
    }


def print_summary(summary: dict[str, dict[str, Any]]) -> None:
    """A line for each part of the rows."""
    for title, values in summary.items():
        print(
            f"{title}: " + ", ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        )
