"""Predict committed measurements with the simulator, and say how far off it is.

    python benchmarks/predict.py --json benchmarks/results/predicted.json

The machine's calibrated keys ([C] in its file) were set on the shapes in CALIBRATED alone, from committed products and
layers; the other shapes are held out.  Every row is a measured layer under a window of one call.  Forward +
backward is predicted as the sum of both.  Results are written row by row; a second run continues, with what was
simulated by the same sources (`SOURCES`) on the same machines.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import uniep
from results import RESULTS, Row, card_of, errors, print_summary, window_rows
from uniep.shapes import SHAPES
from uniep.sim import STRATEGIES, Machine, Problem, load_machine, simulate

CALIBRATED = ("qwen3-30b", "deepseek-v3")
FILES = ("h200x2_layer", "h200x4_layer", "h200x4_groups", "h200x2_tokens", "h200x2_4096", "h200x2_zipf", "h100x2_layer")
IMPLS = {
    "uniep": "uniep-dw2-after", "uniep-serial": "uniep-serial", "uniep@transfer=push": "uniep-push",
    "uniep@transfer=copy": "uniep-copy", "uniep@overlap=pipelined": "uniep-pipelined", "deepep-nowait": "deepep",
    "nccl": "serialized", "uniep-compute": "uniep-copy",
}  # fmt: skip
"""Strategies.  In all FILES, dW2 ran after gate_up_grad, and nothing in parts."""

STAGES_OF = {"c9b6eff": {"uniep": "uniep-copy"}}
"""What `uniep` did by default at a commit, where that is not what it does now."""

BEFORE_WAVES = ("14c4c29", "53e79f2", "6bfcedb", "81586fa", "8cceb16", "c9b6eff")
"""Commits at which row tiles did not go in waves by arrival."""

SOURCES = (
    "activation.py", "config.py", "dimension.py", "layout.py", "routing", "row_operator.py", "schedule.py", "shapes.py",
    "sim", "stages.py", "taskflow", "way.py", "workloads.py",
)  # fmt: skip
"""What decides a simulated time, relative to the package."""

ROUTINGS = {"balanced": "uniform", "zipf": "zipf"}
NO_WIRE = {"link_gbps": 1e5, "worker_link_gbps": 1e5, "link_latency_us": 0.0}
LARGE = 4096
"""Tokens of a rank from which a call is not the host's time."""


class Measured(Row):
    @property
    def key(self) -> str:
        return f"{self.file}/{self.shape}/{self.tokens}/{self.routing}/{self.direction}/{self.impl}"

    @property
    def held_out(self) -> bool:
        return self.shape not in CALIBRATED


def measured(files: Sequence[str]) -> Iterator[Measured]:
    return (row for row in window_rows(files, Measured) if row.impl in IMPLS and row.tokens <= 8192)


def predict(row: Measured, machine: Machine, times: dict[str, float]) -> float:
    """ms.  times: of single directions, kept."""
    strategy, waves = STAGES_OF.get(row.commit, {}).get(row.impl, IMPLS[row.impl]), row.commit not in BEFORE_WAVES
    if row.impl.endswith("-compute"):
        machine = machine.replaced(NO_WIRE)
    total = 0.0
    for direction in ("fwd", "bwd") if row.direction == "fwd_bwd" else ("fwd",):
        key = f"{machine.name}/{row.ep}/{row.shape}/{row.tokens}/{row.routing}/{direction}/{row.impl}/{strategy}"
        key += "/waves" * waves
        if key not in times:
            problem = Problem(SHAPES[row.shape], row.ep, row.tokens, ROUTINGS[row.routing], direction)  # type: ignore[arg-type]
            arranged = STRATEGIES[strategy].arrange(problem, machine)
            if not waves:
                arranged = dataclasses.replace(arranged, way=dataclasses.replace(arranged.way, waves=1))
            times[key] = simulate(problem, machine, arranged).makespan_ns / 1e6
        total += times[key]
    return total


def ranking(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Pairs of one file, shape, tokens, routing and direction that differ by more than 5 %: how many are in order."""
    right = pairs = 0
    for a, b in itertools.combinations(rows, 2):
        same = all(a[k] == b[k] for k in ("file", "shape", "tokens", "routing", "direction"))
        if same and max(a["ms"], b["ms"]) > 1.05 * min(a["ms"], b["ms"]):
            pairs += 1
            right += (a["ms"] < b["ms"]) == (a["predicted_ms"] < b["predicted_ms"])
    return {"pairs": pairs, "right": right}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for title, held_out in (("calibrated on", False), ("held out", True)):
        for size, large in ((f"T >= {LARGE}", True), (f"T < {LARGE}", False)):
            chosen = [r for r in rows if r["held_out"] == held_out and (r["tokens"] >= LARGE) == large]
            if chosen:
                out[f"{title}, {size}"] = {**errors(chosen), **ranking(chosen)}
    for impl in IMPLS:
        if chosen := [r for r in rows if r["impl"] == impl and r["tokens"] >= LARGE]:
            out[f"{impl}, T >= {LARGE}"] = errors(chosen)
    return out


def sources() -> str:
    """Hash of SOURCES."""
    package, made = Path(uniep.__file__).parent, hashlib.sha256()
    for path in (package / name for name in SOURCES):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            made.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return made.hexdigest()[:16]


def kept(path: Path, made_by: dict[str, Any]) -> dict[str, float]:
    """The times of an earlier run that was `made_by` the same; none of any other."""
    document = json.loads(path.read_text()) if path.exists() else {}
    return document["times"] if all(document.get(key) == value for key, value in made_by.items()) else {}


def main(argv: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, default=RESULTS / "predicted.json")
    made.add_argument("--files", default=",".join(FILES))
    made.add_argument("--shapes", default="", help="only these")
    made.add_argument("--set", action="append", default=[], help="KEY=NUMBER of the machines")
    args = made.parse_args(argv)
    torch.set_num_threads(1)
    changes = {key: float(value) for key, _, value in (text.partition("=") for text in args.set)}
    machines = {card: load_machine(f"{card}-node", changes) for card in ("h200", "h100")}
    made_by = {"machines": {m.name: dict(m.values) for m in machines.values()}, "sources": sources()}
    times, rows = kept(args.json, made_by), []
    wanted = [r for r in measured(args.files.split(",")) if not args.shapes or r.shape in args.shapes.split(",")]
    for number, row in enumerate(wanted):
        machine = machines[card_of(row)]
        predicted = predict(row, machine, times)
        rows.append({**dataclasses.asdict(row), "held_out": row.held_out, "predicted_ms": round(predicted, 4)})
        document = {**made_by, "summary": summary(rows), "rows": rows, "times": times}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{number + 1}/{len(wanted)} {row.key}: {row.ms:.3f} -> {predicted:.3f} ({predicted / row.ms - 1:+.1%})",
              flush=True)  # fmt: skip
    print_summary(summary(rows))


if __name__ == "__main__":
    main()
