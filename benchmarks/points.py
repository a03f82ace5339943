"""Time points of the search space beside the default: forward and backward, one call at a time and back to back.

    python benchmarks/points.py --shapes qwen3-30b,olmoe --tokens 64,512 --points before,gate_up.rows=64+down.rows=64

A point is DIMENSION=VALUE+DIMENSION=VALUE..., as it differs from the default; "before" is the tiles that did not depend
on the rows of an expert.  All points of a case are compiled together, by one process for each core; each has to have
the bits of the default, and is then timed in turn with it, in lock step on all ranks.  A row has the medians: us of the
default, and the point's time over it, in both loads.  The first point, "", is the default itself: so much do rows
differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch

import worth
from cases import SPANNING, parse_shape
from model import BEFORE_FEW_ROWS
from moe import add_file_options, of_run
from results import write
from uniep.errors import UniEPError
from uniep.schedule import Schedule, default_schedule, parse_schedule
from uniep.trials.compilers import Compilers, usual_number
from uniep.trials.fleet import Fleet
from uniep.trials.trial import Job, slowest
from uniep.tuner.space import refusals, replaced

SUSTAINED = 5, 20
"""Pairs, and calls back to back of each side of one."""


def schedule_of(point: str, usual: Schedule) -> Schedule:
    return replaced(usual, BEFORE_FEW_ROWS) if point == "before" else parse_schedule(point, usual)


def timed(job: Job, points: list[str], ranks: Fleet, compilers: Compilers, args: Any) -> list[dict[str, Any]]:
    """A row for the default and each point; without times, why it has none."""
    usual = default_schedule(job.backend, job.cfg, job.ep_size)
    given = {point: schedule_of(point, usual) for point in ("", *points)}
    refused = {point: refusals(s, job.cfg, job.ep_size, job.backend) for point, s in given.items()}
    rows: list[dict[str, Any]] = [{"point": point, "status": "; ".join(why)} for point, why in refused.items()]
    able = [row for row in rows if not refused[row["point"]]]
    ranks.becomes(job, timeout_s=args.candidate_s)
    beside = worth.Beside(ranks, compilers, usual, args.candidate_s, args.pairs)
    times = beside.times([given[row["point"]] for row in able], together=len(able))
    for row, (status, pairs) in zip(able, times, strict=True):
        row["status"] = status
        if pairs:
            row |= _medians("window", pairs)
            row |= _medians("sustained", slowest(ranks.ask("time", *SUSTAINED, timeout_s=args.candidate_s)))
    return rows


def _medians(load: str, pairs: list[tuple[float, float]]) -> dict[str, float]:
    default, point = (statistics.median(us) for us in zip(*pairs, strict=True))
    return {f"{load}_default_us": round(default, 1), f"{load}_ratio": round(point / default, 4)}


def options() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--shapes", default=",".join(SPANNING), help="names, or DxFxExK (default %(default)s)")
    arguments.add_argument("--tokens", default="64,512,2048", help="per rank, a list (default %(default)s)")
    arguments.add_argument("--points", default="before", help="a list (default %(default)s)")
    arguments.add_argument("--ep", type=int, default=1, help="ranks (default %(default)s)")
    arguments.add_argument("--pairs", type=int, default=9, help="of one call each (default %(default)s)")
    arguments.add_argument("--candidate-s", type=float, default=60, help="longest answer (default %(default)s)")
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_file_options(arguments)
    return arguments.parse_args()


def main() -> None:
    args, began = options(), time.monotonic()
    device = torch.device(args.device)
    meta = of_run("points.py", device, args.commit, args.ep) | {"pairs": args.pairs}
    results: dict[str, Any] = {"meta": meta, "rows": []}
    cases = [(parse_shape(name), int(t)) for name in args.shapes.split(",") for t in args.tokens.split(",")]
    jobs = [worth.job_of(shape, tokens, args) for shape, tokens in cases]
    with Fleet(jobs[0]) as ranks, Compilers(usual_number() if args.device == "cuda" else 0) as compilers:
        for (shape, tokens), job in zip(cases, jobs, strict=True):
            try:
                rows = timed(job, args.points.split(","), ranks, compilers, args)
            except UniEPError as error:
                print(f"{shape.name} T={tokens} is left out: {error}", flush=True)
                continue
            results["rows"] += [{"shape": shape.name, "tokens": tokens, **row} for row in rows]
            for row in rows:
                print(f"[{time.monotonic() - began:6.1f} s] {shape.name} T={tokens} {json.dumps(row)}", flush=True)
            if args.json:
                write(args.json, results)
    sys.exit(len({(row["shape"], row["tokens"]) for row in results["rows"]}) != len(cases))


if __name__ == "__main__":
    main()
