"""How far off the tuner's model is: calibrated on half of the committed measurements, judged on the other half.

    python benchmarks/model.py --calibrate --json benchmarks/results/model.json

A call (card, shape, tokens, ranks) is calibrated on, or held out, with all its directions, routings and
implementations: of the calls of a card with up to 2048 tokens, and of those with more, every second one in the order
of the hash of its name.  The rule was committed before anything was predicted.  `--calibrate` writes the card files
from the calibrated halves alone; without it constants are read.  Both halves are predicted.  So are the points of the
package's tables, over the default of each.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import statistics
import time
import timeit
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from results import Row, card_of, errors, print_summary, window_rows
from uniep.config import MoEConfig
from uniep.schedule import TILES, Schedule, default_schedule, parse_schedule
from uniep.shapes import SHAPES, parse_shape
from uniep.sim import Problem
from uniep.sim.machine import load_machine
from uniep.trials import calibrate
from uniep.tuner.model import Card, Load, card_text, load_card, predict, uncalibrated
from uniep.tuner.space import Points, points, replaced

TUNER = Path(__file__).parent.parent / "src/uniep/tuner"
CARDS, TABLES = TUNER / "cards", TUNER / "tables"
FILES = (
    "h200x2_in_turn", "h200x2_floors_1", "h200x2_floors_2", "h200x2_few_tokens", "h200x2_few_tokens_dsv2",
    "h200x2_tokens_2", "h200x2_4096", "h200x2_zipf", "h200x2_groups", "h200x4_in_turn", "h200x4_parts", "h200x4_floors",
    "h200x4_tokens", "h200x4_zipf", "h200x4_groups", "h100x2_layer",
)  # fmt: skip
"""Of H200s, those with today's host, and older ones of many tokens, where it does not show."""
FEW = 2048
"""Tokens of a rank up to which a call shows the host's time."""

LEFT_OUT = ("uniep-graph", "uniep-shards", "weights_beside", "programs_per_sm")
"""Parts of names of what the model does not describe, or what is gone."""

BEFORE_FEW_ROWS = {f"{name}.{part.name}": getattr(tile, part.name)
                   for name, tile in ((name, getattr(Schedule(), name)) for name in TILES)
                   for part in dataclasses.fields(tile) if part.name != "group_rows"}  # fmt: skip
"""Of all files: tiles did not depend on the rows of an expert."""
BEFORE_PARTS = {"gate_up_parts": 1, "down_sms": Schedule().down_sms, "down_wgrad": "after"}
OLD = {
    "53e79f2": {"overlap": "fused", "activation_gradient": "after", **BEFORE_PARTS},
    **{commit: {"mega_to": 512, **BEFORE_PARTS} for commit in ("81586fa", "6bfcedb", "8cceb16", "f8887aa")},
    **dict.fromkeys(("14c4c29", "3b20c20", "55aa639"), BEFORE_PARTS),
}
"""Defaults of a commit, where they are not today's."""


class Call(Row):
    @property
    def call(self) -> tuple[str, str, int, int]:
        return self.card, self.shape, self.tokens, self.ep


def measured() -> Iterator[Call]:
    """Every row of uniep under the window of one call.  card: its short name."""
    rows = (row for row in window_rows(FILES, Call) if row.impl.startswith("uniep"))
    known = (row for row in rows if not any(part in row.impl for part in LEFT_OUT))
    return (dataclasses.replace(row, card=card_of(row)) for row in known)


def held_out(rows: Sequence[Call]) -> set[tuple[str, str, int, int]]:
    """The calls that nothing is calibrated on."""
    out = set()
    for card in sorted({row.card for row in rows}):
        for few in (True, False):
            calls = {row.call for row in rows if row.card == card and (row.tokens <= FEW) == few}
            by_hash = sorted(calls, key=lambda call: hashlib.sha256(repr(call).encode()).hexdigest())
            out |= set(by_hash[1::2])
    return out


@functools.cache
def load(shape: str, ep: int, tokens: int, routing: str, groups: int | None, exact: bool) -> Load:
    problem = Problem(SHAPES[shape], ep, tokens, {"balanced": "uniform"}.get(routing, routing), combine_groups=groups)
    cfg = dataclasses.replace(problem.cfg, max_rows=None if exact else 2 * tokens * problem.cfg.top_k)
    if routing == "balanced":
        return Load.uniform(cfg, ep)
    return Load.of_ids(cfg, [problem.ids(rank) for rank in range(ep)])


def point(row: Call, cfg: MoEConfig) -> Schedule:
    """What ran."""
    usual = replaced(default_schedule("hopper", cfg, row.ep), BEFORE_FEW_ROWS | OLD.get(row.commit, {}))
    change = "overlap=serial" if row.impl == "uniep-serial" else row.impl.partition("@")[2]
    return parse_schedule(change, usual) if change else usual


def timed(row: Call) -> calibrate.Timed:
    name = row.impl.partition("@")[0]
    groups = int(name.removeprefix("uniep-groups") or row.ep) if name.startswith("uniep-groups") else None
    of_row = load(row.shape, row.ep, row.tokens, row.routing, groups, row.impl == "uniep-default")
    if name == "uniep-compute":
        of_row = dataclasses.replace(of_row, wire=1e-6)
    cfg = Problem(SHAPES[row.shape], row.ep, row.tokens, combine_groups=groups).cfg
    return calibrate.Timed(of_row, point(row, cfg), row.direction, row.ms * 1e3)


def predicted(rows: Sequence[Call], card: Card, out: set[tuple[str, str, int, int]]) -> list[dict[str, Any]]:
    us = calibrate.Calls([timed(row) for row in rows]).predicted(card).tolist()
    return [
        {
            **dataclasses.asdict(row),
            "held_out": row.call in out,
            "predicted_ms": round(of / 1e3, 4),
        }
        for row, of in zip(rows, us, strict=True)
    ]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    made: dict[str, dict[str, float]] = {}
    for card in sorted({row["card"] for row in rows}, reverse=True):
        for part in (False, True):
            for few in (False, True):
                chosen = [
                    r for r in rows if (r["card"], r["held_out"], r["tokens"] <= FEW) == (card, part, few)
                ]  # fmt: skip
                if chosen:
                    size = f"T <= {FEW}, host included" if few else f"T > {FEW}"
                    made[f"{card}, {'held out' if part else 'calibrated on'}, {size}"] = errors(chosen)
    return made


def picks(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of calls with several timed schedules: how much slower the one that the model picks is than the fastest.  Equal
    predictions, most of one way by two names, count as one schedule, whose time is their mean."""
    of_call: dict[tuple[Any, ...], dict[float, list[float]]] = {}
    for row in rows:
        if row["impl"] not in ("uniep-default", "uniep-compute") and "groups" not in row["impl"]:
            key = tuple(row[k] for k in ("file", "shape", "tokens", "routing", "direction"))
            of_call.setdefault(key, {}).setdefault(row["predicted_ms"], []).append(row["ms"])
    times = [{predicted: statistics.mean(ms) for predicted, ms in of.items()} for of in of_call.values() if len(of) > 1]
    lost = [of[min(of)] / min(of.values()) - 1 for of in times]
    return {"calls": len(lost), "within 3 %": sum(x <= 0.03 for x in lost), "worst": max(lost, default=0.0)}


def of_tables(card: Card) -> dict[str, float]:
    """Of the package's tables of a card, whose points were timed in turn with their default: how far the predicted
    ratio of both is from the measured one; and the measured time, over the default's, of the one that the model puts
    first."""
    off, first = [], []
    for path in sorted(TABLES.glob(f"{card.name}-hopper-ep*.json")):
        table = json.loads(path.read_text())
        for entry in table["entries"].values():
            timed_points = [t for t in entry["tried"] if t.get("score")]
            usual = replaced(Schedule(), entry["default"])
            asked = [usual, *(replaced(usual, t["changes"]) for t in timed_points)]
            cfg = parse_shape(entry["shape"]).config(table["ep"], entry["tokens"])
            us = predict(Load.uniform(cfg, table["ep"]), Points.of(asked), card).both.tolist()
            scores = [1.0, *(t["score"] for t in timed_points)]
            off += [abs(of / us[0] / score - 1) for of, score in zip(us[1:], scores[1:], strict=True)]
            first.append(scores[us.index(min(us))])
    return {"calls": len(first), "points": len(off), "median": statistics.median(off),
            "p95": sorted(off)[int(0.95 * len(off))], "first, median": statistics.median(first),
            "first, worst": max(first)}  # fmt: skip


def speed(count: int = 100_000) -> float:
    """Seconds of one core for so many points, the best of five."""
    cfg = Problem(SHAPES["qwen3-30b"], 2, 8192).cfg
    many, of, card = points("hopper", cfg, 2, limit=count), Load.uniform(cfg, 2), load_card("h200")
    assert len(many) == count
    return min(timeit.repeat(lambda: predict(of, many, card), number=1, repeat=5, timer=time.process_time))


ABOUT = """{cards}: constants of the tuner's model, calibrated on half of the committed calls, {rows} rows of
{files}.
By benchmarks/model.py --calibrate; benchmarks/results/model.json has how far off it is on the other half."""


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--calibrate", action="store_true", help="write the card files first")
    made.add_argument("--half", choices=("calibrated", "both"), default="both", help="that is predicted")
    made.add_argument("--rows", action="store_true", help="show every row")
    made.add_argument("--json", type=Path)
    args = made.parse_args()
    torch.set_num_threads(1)
    rows = list(measured())
    out = held_out(rows)
    shown: list[dict[str, Any]] = []
    for name in ("h200", "h100"):
        of_card = [row for row in rows if row.card == name]
        if args.calibrate:
            kept = [row for row in of_card if row.call not in out]
            card = calibrate.fit(uncalibrated(load_machine(f"{name}-node"), name), [timed(row) for row in kept])
            files = ", ".join(sorted({row.file for row in kept}))
            about = ABOUT.format(cards=name.upper(), rows=len(kept), files=files)
            (CARDS / f"{name}.toml").write_text(card_text(card, about))
        wanted = [row for row in of_card if args.half == "both" or row.call not in out]
        shown += predicted(wanted, load_card(name), out)
    for row in shown if args.rows else ():
        print(*(row[k] for k in ("file", "shape", "tokens", "routing", "direction", "impl", "ms", "predicted_ms")),
              "held out" if row["held_out"] else "", f"{row['predicted_ms'] / row['ms'] - 1:+.1%}")  # fmt: skip
    print_summary(summary(shown))
    for part in (False, True):
        title = f"picks, {'held out' if part else 'calibrated on'}"
        print(f"{title}: {picks([r for r in shown if r['held_out'] == part])}")
    tables = of_tables(load_card("h200"))
    print(f"tables of h200: {tables}")
    print(f"100000 points: {speed() * 1e3:.0f} ms")
    if args.json is not None:
        document = {
            "summary": summary(shown),
            "picks": {str(part): picks([r for r in shown if r["held_out"] == part]) for part in (False, True)},
            "tables": tables,
            "rows": shown,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
