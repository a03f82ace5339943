"""What tuning is worth: tuned, default, best fixed strategy and best peer; and the search against a whole grid.

    python benchmarks/worth.py --ep 2 --json benchmarks/results/h200x2_worth.json
    python benchmarks/worth.py --ep 1 --grid --shapes qwen3-30b,qwen3-235b --json benchmarks/results/h200x1_grid.json

Without `--grid`: `uniep.trials.search` looks for the fastest Schedule of each shape for `--budget-s` seconds; then, in
fresh processes, `moe.py` times the choice beside the default, the named strategies and the peers, both loads.  `tuned`
is the choice where the search kept one, else the default.  `left_out`: peers that failed here, as moe.py printed; then
the exit status is 1.

With `--grid`: every point of a declared grid (`GRID`) is proved (bits) and timed in turn with the default.  Written
with them: how near the best of the first share of points, in the model's order, comes to the best of all (null without
a card file, from which the model predicts); and the cost of each dimension's other values at the best point.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cases import SPANNING, parse_shape
from moe import BY_NAME, add_file_options, commit, of_run
from uniep.schedule import Schedule, default_schedule
from uniep.shapes import Shape
from uniep.trials.fleet import DroppedError, Fleet
from uniep.trials.search import Record, sampler_of, search
from uniep.trials.trial import Job, slowest
from uniep.tuner import tables
from uniep.tuner.model import Card, Load, find_card, predict
from uniep.tuner.space import SEARCHED, Points, points, refusals
from uniep.tuner.strategies import STRATEGIES, implementations

GRID = (
    "gate_up.columns", "down.columns", "gate_up.group_rows", "gate_up.stages", "weight_gradient.columns",
    "weight_gradient.stages", "activation_gradient",
)  # fmt: skip
"""Dimensions that mean something at every EP size, with the values that the search tries; 192 points on GPUs."""
TIED = {name for d in SEARCHED for name in d.also}
SHARE = 0.15
"""Of the grid's points, that the search may time."""
PAIRS = 5


def job_of(shape: Shape, tokens: int, args: argparse.Namespace) -> Job:
    cuda = args.device == "cuda"
    rows = shape.sync_free_rows(tokens) if cuda else None
    cfg = shape.config(args.ep, tokens, max_rows=rows, dtype=torch.bfloat16 if cuda else torch.float32)
    return Job(cfg, args.ep, "hopper" if cuda else "cpu", args.device, tokens)


def card_of(args: argparse.Namespace) -> Card | None:
    return find_card(args.card, tables.card_name(torch.device(args.device)))


# ------------------------------------------------------------------------------------------------- tuned or not


def searched(job: Job, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The choice, and what it took."""
    card = card_of(args)
    record = Record(Path(folder) / f"{time.monotonic_ns()}.sqlite", {})
    try:
        found = search(job, sampler_of("optuna", job, card), record, args.budget_s, card=card)
    finally:
        record.close()
    changes = tables.as_changes(found.choice, job.cfg, job.ep_size, job.backend)
    counts = {status: sum(t.status == status for t in found.tried) for status in {t.status for t in found.tried}}
    return {"changes": changes, "gain": found.gain, "spread": found.spread, "tried": counts}


def timed(shape: str, tokens: int, changes: dict[str, Any], args: argparse.Namespace, folder: str) -> list[dict]:
    """Rows of moe.py: the choice beside all others."""
    backend = "hopper" if args.device == "cuda" else "cpu"
    named = {name: impl for name in STRATEGIES for impl in implementations(name, backend)[0] if impl != "uniep"}
    tuned = "uniep@" + "+".join(f"{name}={value}" for name, value in changes.items()) if changes else "uniep"
    peers = args.peers.split(",") if args.peers else []
    impls, file = list(dict.fromkeys(["uniep", tuned, *named.values(), *peers])), Path(folder) / "rows.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ep}",
        str(Path(__file__).with_name("moe.py")), "--shape", shape, "--tokens", str(tokens), "--impl", ",".join(impls),
        "--load", "window,sustained", "--iters", str(args.iters), "--device", args.device, "--json", str(file),
        "--commit", args.commit or commit(), *(["--deepep", args.deepep] if args.deepep else []),
        *(["--liger", args.liger] if args.liger else []),
        *(["--dtype", "fp32"] if args.device == "cpu" else []),
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=sys.stderr)
    rows = json.loads(file.read_text())["rows"]
    made = []
    for direction, load in itertools.product(("fwd", "fwd_bwd"), ("window", "sustained")):
        of = {r["impl"]: r["ms"] for r in rows if (r["direction"], r["load"]) == (direction, load)}
        strategies = {name: of[impl] for name, impl in named.items() if impl in of and impl != tuned}
        theirs = {name: of[name] for name in peers if name in of}
        row = {"direction": direction, "load": load, "default": of["uniep"], "tuned": of[tuned]}
        for name, times in (("strategy", strategies), ("peer", theirs)):
            best = min(times, key=times.__getitem__, default=None)
            row |= {name: best, f"{name}_ms": times[best] if best else None}
        row["left_out"] = [name for name in peers if name not in of]
        made.append(row)
    return made


def worth(shape: Shape, tokens: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        found = searched(job_of(shape, tokens, args), args, folder)
        for row in timed(shape.name, tokens, found["changes"], args, folder):
            yield {"shape": shape.name, "tokens": tokens, **row, **found}


# ------------------------------------------------------------------------------------------------------ a grid


def grid(job: Job) -> list[Schedule]:
    """All points of GRID that can run, the default first."""
    space = points(job.backend, job.cfg, job.ep_size, keep=[d.name for d in SEARCHED if d.name not in GRID])
    every = map(space.schedule, range(len(space)))
    return [point for point in every if not refusals(point, job.cfg, job.ep_size, job.backend)]


def whole_grid(shape: Shape, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    job = job_of(shape, tokens, args)
    every, usual = grid(job), default_schedule(job.backend, job.cfg, job.ep_size)
    card, load = card_of(args), Load.uniform(job.cfg, job.ep_size, tokens)
    predicted = predict(load, Points.of(every), card).both.tolist() if card else [None] * len(every)
    if card is None:
        print("no card file of this machine: no model, so nothing is `reached`; give --card, or uniep tune --calibrate")
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with Fleet(job) as ranks:
        want = ranks.ask("prove", usual, timeout_s=args.candidate_s)
        ranks.ask("take", timeout_s=args.candidate_s)
        for number, (schedule, us) in enumerate(zip(every, predicted, strict=True)):
            row = {"changes": tables.as_changes(schedule, job.cfg, args.ep, job.backend), "predicted_us": us}
            try:
                if not ranks.alive:  # a fault ended them
                    ranks.ask("prove", usual, timeout_s=args.candidate_s)
                    ranks.ask("take", timeout_s=args.candidate_s)
                same = ranks.ask("prove", schedule, timeout_s=args.candidate_s) == want
                pairs = slowest(ranks.ask("time", PAIRS, timeout_s=args.candidate_s)) if same else []
                row["status"] = "timed" if same else "other bits"
            except DroppedError as error:
                pairs, row["status"] = [], str(error)
            if pairs:
                row["us"] = round(statistics.median(b for _, b in pairs), 1)
                row["score"] = round(statistics.median(b / a for a, b in pairs), 4)
            rows.append(row)
            if (number + 1) % 16 == 0 or number + 1 == len(every):
                print(f"[{time.monotonic() - began:6.1f} s] {shape.name}: {number + 1} of {len(every)}", flush=True)
    return {"shape": shape.name, "tokens": tokens, "points": rows, **judged(rows)}


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """reached: the best of all over the best of the first SHARE in the model's order; None without predictions.  costs:
    of each dimension's other values at the best point, as times over its time."""
    timed_ones = [row for row in rows if "score" in row]
    best = min(timed_ones, key=lambda row: row["score"])
    allowed = max(1, int(SHARE * len(rows)))
    reached = None
    if best["predicted_us"] is not None:
        first = sorted(timed_ones, key=lambda row: row["predicted_us"])[:allowed]
        reached = round(best["score"] / min(row["score"] for row in first), 4)
    costs: dict[str, dict[str, float]] = {}
    for row in timed_ones:
        names = [n for n in {*row["changes"], *best["changes"]} if row["changes"].get(n) != best["changes"].get(n)]
        names = [n for n in names if n not in TIED]
        if len(names) == 1:
            value = row["changes"].get(names[0], "default")
            costs.setdefault(names[0], {})[str(value)] = round(row["score"] / best["score"], 4)
    return {
        "best": best["changes"], "best_score": best["score"], "timings_allowed": allowed, "reached": reached,
        "costs": dict(sorted(costs.items(), key=lambda item: -max(item[1].values()))),
    }  # fmt: skip


NEEDS = {"deepep": "deepep", "deepep-nowait": "deepep", "liger-cute": "liger"}
"""Options that peers need."""


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parsed and checked arguments; a bad one ends the program before anything is searched."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shapes", default=",".join(SPANNING), help="names, or DxFxExK (default %(default)s)")
    made.add_argument("--tokens", default="8192", help="per rank (default %(default)s)")
    made.add_argument("--ep", type=int, default=1, help="ranks (default %(default)s)")
    made.add_argument("--grid", action="store_true", help="time every point of the declared grid")
    made.add_argument("--budget-s", type=float, default=120, help="of each search (default %(default)s)")
    made.add_argument("--candidate-s", type=float, default=60, help="longest answer of a point (default %(default)s)")
    made.add_argument("--iters", type=int, default=12, help="window calls of moe.py (default %(default)s)")
    made.add_argument("--peers", default="", help="implementations of moe.py, such as deepep-nowait,nccl,peer-compute")
    made.add_argument("--deepep", metavar="DIR", help="folder that holds an importable deep_ep")
    made.add_argument("--liger", metavar="DIR", help="folder that holds an importable liger_cute_kernels")
    made.add_argument("--card", help="that the model assumes (default: this machine's)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add_file_options(made)
    args = made.parse_args(argv)
    for peer in filter(None, args.peers.split(",")):
        if peer not in BY_NAME:
            made.error(f"--peers {peer!r} is unknown; use one or more of {', '.join(BY_NAME)}")
        if peer in NEEDS and not getattr(args, NEEDS[peer]):
            made.error(f"--peers {peer} needs --{NEEDS[peer]} DIR")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = options(argv)
    shapes, tokens = [*map(parse_shape, args.shapes.split(","))], [int(text) for text in args.tokens.split(",")]
    results: dict[str, Any] = {"meta": of_run("worth.py", torch.device(args.device), args.commit, args.ep), "rows": []}
    left_out: set[str] = set()
    for shape, count in itertools.product(shapes, tokens):
        if args.grid:
            found = [whole_grid(shape, count, args)]
            said = {key: found[0][key] for key in ("best", "best_score", "timings_allowed", "reached", "costs")}
            print(f"{shape.name} T={count}: {json.dumps(said)}", flush=True)
        else:
            found = []
            for row in worth(shape, count, args):
                found.append(row)
                left_out.update(row["left_out"])
                print(json.dumps(row), flush=True)
        results["rows"] += found
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    if left_out:
        sys.exit(f"left out of some rows, as moe.py printed: {', '.join(sorted(left_out))}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
