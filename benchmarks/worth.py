"""What tuning is worth: tuned, default, best fixed strategy and best peer; and the search against a whole grid.

    python benchmarks/worth.py --ep 2 --json benchmarks/results/h200x2_worth.json
    python benchmarks/worth.py --ep 2 --budget-s 360 --search-s 12 --ablate-s 4 --iters 5 --sustained-s 0.03 --json FILE
    python benchmarks/worth.py --ep 1 --grid --shapes qwen3-30b,qwen3-235b --json benchmarks/results/h200x1_grid.json

Without `--grid`, for each shape:

1. What it launches first is compiled by `--at-once` processes (`uniep.trials.compilers`): the default, the serial
   Schedule, backend `nccl`, the named strategies, the points that the search begins with.  Behind `--compile-s` seconds
   no kernel begins.
2. `uniep.trials.search` looks for the fastest Schedule for `--search-s` seconds, compiling included: `points` has all
   that it tried.  With `--ablate-s`, each dimension is then changed alone at that Schedule, back to the default first,
   in so many seconds, compiling included: `ablation` has the times over its time, `dropped` why a point has none.  With
   `--tables`, what was found is kept as `uniep tune` keeps it.  `compared`: the fastest point beside the default, in
   fresh processes, and why it was not kept.  `seconds`: what was spent.

Then `moe.py`, in fresh processes, times the choices beside the default, the named strategies and the peers; one run has
all shapes with the same numbers of tokens.  `tuned` is the choice where the search kept one, else the default.
`left_out`: peers that failed here, as moe.py printed.  With `--only-search` all this is left out, and its kernels.

Nothing is timed while something is compiled, or a sampler is made.  The file is written after each search and each
timed case.  `--budget-s` is for all of it: compiling and searching end after SEARCHING of it, with what runs then;
moe.py is given the rest, and begins no case when its ranks have run for as long.  The exit status is 1 if a shape or a
peer was left out of some rows.  With `--ep 1` and several GPUs, start one of these for each GPU, with its own
CUDA_VISIBLE_DEVICES, --shapes and --json; --tables may be the same folder.

With `--grid`: all points of a declared grid (`GRID`) are compiled, then proved (bits) and timed in turn with the
default.  Written with them: how near the best of the first share of points, in the model's order, comes to the best of
all (null without a card file, from which the model predicts); and the cost of each dimension's other values at the best
point.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from cases import SPANNING, parse_shape
from moe import BY_NAME, add_file_options, commit, of_run
from results import write
from uniep.errors import UniEPError
from uniep.schedule import Schedule, default_schedule
from uniep.shapes import Shape
from uniep.trials.compilers import Compilers, usual_number
from uniep.trials.fleet import DroppedError, Fleet
from uniep.trials.search import (
    SAMPLERS,
    Record,
    Sampler,
    compared_entry,
    entry,
    sampler_here,
    sampler_of,
    search,
    serial,
)
from uniep.trials.trial import Job, slowest
from uniep.tuner import strategies, tables
from uniep.tuner.model import Card, Load, find_card, predict
from uniep.tuner.space import SEARCHED, Points, get, neighbours, points, refusals

GRID = (
    "gate_up.columns", "down.columns", "gate_up.group_rows", "gate_up.stages", "weight_gradient.programs_per_sm",
    "activation_gradient",
)  # fmt: skip
"""Dimensions that mean something at every EP size, with the values that the search tries; 144 points on GPUs."""
TIED = {name for d in SEARCHED for name in d.decides}
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


class Beside:
    """Times points in turn with one that stays.  Ranks that a fault has ended start anew."""

    def __init__(
        self, ranks: Fleet, compilers: Compilers, stays: Schedule, candidate_s: float, pairs: int = PAIRS
    ) -> None:
        self.ranks, self.compilers, self.stays, self.candidate_s = ranks, compilers, stays, candidate_s
        self.pairs = pairs
        self.starts, self.bits = -1, []

    def times(
        self, schedules: Sequence[Schedule], until: float = math.inf, together: int = 0
    ) -> Iterator[tuple[str, list[tuple[float, float]]]]:
        """("timed" or why not, us of both, in pairs) of each; none begins behind `until`.  together: how many are
        compiled together; 0: as many as keep all compilers busy."""
        together = together or self.compilers.batch or 1
        for first in range(0, len(schedules), together):
            if time.monotonic() > until:
                return
            batch = schedules[first : first + together]
            errors = self.compilers.ahead(self.ranks, batch, self.candidate_s, until, finish=True)
            for schedule, error in zip(batch, errors, strict=True):
                if time.monotonic() > until:
                    return
                yield self._time(schedule) if error is None else (str(error), [])

    def _time(self, schedule: Schedule) -> tuple[str, list[tuple[float, float]]]:
        try:
            if not self.ranks.alive or self.ranks.starts != self.starts:
                self.bits = self._ask("prove", self.stays)
                self._ask("take")
                self.starts = self.ranks.starts
            same = self._ask("prove", schedule) == self.bits
            return ("timed", slowest(self._ask("time", self.pairs))) if same else ("other bits", [])
        except DroppedError as error:
            return str(error), []

    def _ask(self, method: str, *args: Any) -> list[Any]:
        return self.ranks.ask(method, *args, timeout_s=self.candidate_s)


# ------------------------------------------------------------------------------------------------- tuned or not

SEARCHING, ONLY_SEARCHING = 0.7, 0.9
"""Share of --budget-s for compiling and searching, before moe.py, and without it: the last search ends behind it."""


def left(end: float, most: float = math.inf) -> float:
    """Seconds until `end` (`time.monotonic()`), 0 behind it; at most `most`."""
    return max(min(end - time.monotonic(), most), 0.0)


@dataclasses.dataclass(frozen=True)
class Case:
    shape: Shape
    tokens: int
    job: Job

    @property
    def key(self) -> dict[str, Any]:
        return {"shape": self.shape.name, "tokens": self.tokens}

    def sampler(self, args: argparse.Namespace) -> Sampler:
        card = card_of(args)
        here, _ = sampler_here(card, tables.card_name(torch.device(args.device)))
        return sampler_of(here if args.sampler == "auto" else args.sampler, self.job, card)

    def first(self, sampler: Callable[[], Sampler], names: Sequence[str]) -> Iterator[tuple[Job, list[Schedule]]]:
        """What moe.py and the search launch first; the sampler is asked for last.  names: of strategies; without any,
        moe.py launches nothing else."""
        job = self.job
        usual = default_schedule(job.backend, job.cfg, job.ep_size)
        there = [name for name in names if job.backend in strategies.STRATEGIES[name].points]
        named = [strategies.point(name, job.backend, job.cfg, job.ep_size) for name in there]
        nccl = dataclasses.replace(job, backend="nccl", cfg=dataclasses.replace(job.cfg, max_rows=None))
        yield job, list(dict.fromkeys([usual, serial(usual), *named]))
        if names:
            yield nccl, [default_schedule("nccl", nccl.cfg, job.ep_size)]
        yield job, [*sampler().first]


def compile_first(
    wanted: Iterable[tuple[Job, Sequence[Schedule]]], ranks: Fleet, compilers: Compilers, candidate_s: float,
    until: float,
) -> None:  # fmt: skip
    """What cannot be compiled is told, and left to who wants its time."""
    for job, schedules in wanted:
        try:
            ranks.becomes(job, timeout_s=candidate_s)
        except DroppedError as error:
            print(f"{job.backend}: not compiled first: {error}", flush=True)
            continue
        errors = compilers.ahead(ranks, schedules, candidate_s, until, finish=True)
        for schedule, reason in zip(schedules, errors, strict=True):
            if reason is not None:
                print(f"{job.backend}, {schedule.name}: not compiled first: {reason}", flush=True)


def searched(case: Case, ranks: Fleet, compilers: Compilers, args: argparse.Namespace, stop: float) -> dict[str, Any]:
    """The choice, what was tried, and what each dimension costs there."""
    job, card, candidate_s = case.job, card_of(args), left(stop, args.candidate_s)
    began, compiled_s = time.monotonic(), compilers.seconds
    usual = default_schedule(job.backend, job.cfg, job.ep_size)
    with ThreadPoolExecutor(1) as aside:  # seconds of this process, beside compiling: nothing is timed yet
        made_aside = aside.submit(case.sampler, args)
        if compilers.most:
            until = began + left(stop, args.compile_s)
            compile_first(case.first(made_aside.result, args.strategies), ranks, compilers, candidate_s, until)
    sampler = made_aside.result()
    ranks.becomes(job, timeout_s=candidate_s)
    for schedule in (usual, serial(usual)):  # before the search knows its time
        ranks.ask("prove", schedule, timeout_s=left(stop, args.candidate_s))
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Record(Path(folder) / "x.sqlite", {})) as record:
        options: Any = {"fleet": ranks, "compilers": compilers, "card": card, "finish": True}
        options["candidate_s"] = left(stop, args.candidate_s)
        found = search(job, sampler, record, left(stop, args.search_s), **options)
    if args.tables and found.tried:
        key = tables.Key.of(job.cfg, job.ep_size, job.backend, tables.card_name(torch.device(args.device)))
        tables.store(args.tables / key.file, key, entry(found, job, args.commit or commit()))
    changes = tables.as_changes(found.choice, job.cfg, job.ep_size, job.backend)
    counts = {status: sum(t.status == status for t in found.tried) for status in {t.status for t in found.tried}}
    made = {**case.key, "changes": changes, "tried": counts}
    if found.compared is not None:
        made["compared"] = compared_entry(found.compared, usual)
    made["points"] = [{"changes": t.changes, "status": t.status, "score": t.score} for t in found.tried]
    if args.ablate_s:
        made["ablation"], made["dropped"] = ablation(job, found.choice, ranks, compilers, args, stop)
    compiled_s = compilers.seconds - compiled_s
    of_timing = time.monotonic() - began - compiled_s
    return {**made, "seconds": {"compiling": round(compiled_s, 1), "timing": round(of_timing, 1)}}


def ablation(
    job: Job, best: Schedule, ranks: Fleet, compilers: Compilers, args: argparse.Namespace, stop: float = math.inf
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, str]]]:
    """Of points with one dimension changed, those with the default's value first: {dimension: {value: time over the
    best's}}, most expensive first, and {dimension: {value: why it has no time}}.  For `--ablate-s` seconds, or until
    `stop`; the point that is timed at their end is the last."""
    usual, until = default_schedule(job.backend, job.cfg, job.ep_size), time.monotonic() + left(stop, args.ablate_s)
    near = sorted(neighbours(best, job.backend, job.cfg, job.ep_size), key=lambda step: step[1] != get(usual, step[0]))
    costs: dict[str, dict[str, float]] = {}
    dropped: dict[str, dict[str, str]] = {}
    beside = Beside(ranks, compilers, best, left(stop, args.candidate_s))
    times = beside.times([schedule for _, _, schedule in near], until)
    for (name, value, _), (status, pairs) in zip(near, times, strict=False):
        if pairs:
            costs.setdefault(name, {})[str(value)] = round(statistics.median(b / a for a, b in pairs), 4)
        else:
            print(f"dropped {name}={value}: {status}", flush=True)
            dropped.setdefault(name, {})[str(value)] = status
    return most_first(costs), dropped


def most_first(costs: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return dict(sorted(costs.items(), key=lambda item: -max(item[1].values())))


def implementation(changes: dict[str, Any]) -> str:
    """moe.py's name of a choice."""
    return "uniep@" + "+".join(f"{name}={value}" for name, value in changes.items()) if changes else "uniep"


def fixed(args: argparse.Namespace) -> dict[str, str]:
    """{strategy: moe.py's name of it}."""
    backend = "hopper" if args.device == "cuda" else "cpu"
    return {name: impl for name in args.strategies for impl in strategies.implementations(name, backend)[0]}


def of_peers(args: argparse.Namespace) -> list[str]:
    return args.peers.split(",") if args.peers else []


def timed(
    searches: Sequence[dict[str, Any]], args: argparse.Namespace, end: float, told: Callable[[list[dict]], None]
) -> None:
    """Rows of moe.py: the choices beside all others.  told: is given all that there are, whenever there are more."""
    of_shape: dict[str, list[int]] = {}
    for of in searches:
        of_shape.setdefault(of["shape"], []).append(of["tokens"])
    runs: dict[tuple[int, ...], list[str]] = {}
    for shape, counts in of_shape.items():
        runs.setdefault(tuple(counts), []).append(shape)
    rows: list[dict] = []
    for tokens, shapes in runs.items():
        if not (seconds := left(end)):
            print(f"no time for moe.py with {','.join(shapes)}; raise --budget-s", flush=True)
            continue
        before = rows
        for known in of_moe(shapes, tokens, searches, args, seconds):
            rows = before + known
            told(rows)


def of_moe(
    shapes: Sequence[str], tokens: Sequence[int], searches: Sequence[dict[str, Any]], args: argparse.Namespace,
    budget_s: float,
) -> Iterator[list[dict]]:  # fmt: skip
    """All rows of one moe.py, again whenever there are more."""
    impls = ",".join(dict.fromkeys(["uniep", *fixed(args).values(), *of_peers(args)]))
    with tempfile.TemporaryDirectory() as folder:
        file, also = Path(folder) / "rows.json", Path(folder) / "points.json"
        also.write_text(
            json.dumps({f"{of['shape']}/{of['tokens']}": [implementation(of["changes"])] for of in searches})
        )
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ep}",
            str(Path(__file__).with_name("moe.py")), "--shape", ",".join(shapes),
            "--tokens", ",".join(map(str, tokens)), "--impl", impls, "--points", str(also), "--load", args.load,
            "--directions", args.directions, "--iters", str(args.iters), "--device", args.device,
            "--sustained-s", str(args.sustained_s), "--budget-s", str(budget_s), "--json", str(file),
            "--commit", args.commit or commit(), *(["--deepep", args.deepep] if args.deepep else []),
            *(["--liger", args.liger] if args.liger else []), *([] if args.check else ["--no-check"]),
            *(["--dtype", "fp32"] if args.device == "cpu" else []),
        ]  # fmt: skip
        # `uniep` is the default here, whatever tables there are.
        process = subprocess.Popen(command, stdout=sys.stderr, env={**os.environ, "UNIEP_TUNE": "off"})
        try:
            code, count = None, 0
            while code is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=1)
                rows = json.loads(file.read_text())["rows"] if file.exists() else []
                if len(rows) > count:
                    count = len(rows)
                    yield rows
        finally:
            process.terminate()
    if code:
        sys.exit(f"moe.py ended with {code}; what it timed before is kept")


def compared(
    searches: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for each case, direction and load: default, tuned, and the best strategy and peer."""
    named, peers = fixed(args), of_peers(args)
    for of_case in searches:
        tuned = implementation(of_case["changes"])
        key = of_case["shape"], of_case["tokens"]
        of_both: dict[tuple[str, str], dict[str, float]] = {}
        for r in rows:
            if (r["shape"], r["tokens"]) == key:
                of_both.setdefault((r["direction"], r["load"]), {})[r["impl"]] = r["ms"]
        for (direction, load), of in of_both.items():
            if "uniep" not in of or tuned not in of:
                continue
            strategies_ms = {name: of[impl] for name, impl in named.items() if impl in of}
            theirs = {name: of[name] for name in peers if name in of}
            row = {"shape": key[0], "tokens": key[1], "direction": direction, "load": load}
            row |= {"default": of["uniep"], "tuned": of[tuned]}
            for name, times in (("strategy", strategies_ms), ("peer", theirs)):
                best = min(times, key=times.__getitem__, default=None)
                row |= {name: best, f"{name}_ms": times[best] if best else None}
            yield row | {"left_out": [name for name in peers if name not in of]}


def compilers_of(args: argparse.Namespace) -> Compilers:
    return Compilers(args.at_once if args.device == "cuda" else 0)


def worth(cases: Sequence[tuple[Shape, int]], results: dict[str, Any], args: argparse.Namespace) -> None:
    """Fills `results`, and writes it whenever something is known."""
    began, results["searches"] = time.monotonic(), []

    def written() -> None:
        if args.json:
            write(args.json, results)

    def told(rows: list[dict]) -> None:
        known, results["rows"] = results["rows"], list(compared(results["searches"], rows, args))
        for row in results["rows"]:
            if row not in known:
                print(json.dumps(row), flush=True)
        written()

    stop = began + (ONLY_SEARCHING if args.only_search else SEARCHING) * args.budget_s
    end = began + args.budget_s
    made = [Case(shape, tokens, job_of(shape, tokens, args)) for shape, tokens in cases]
    with Fleet(made[0].job, end) as ranks, compilers_of(args) as compilers:
        for case in made:
            if not left(stop):
                print(f"no time to search {case.shape.name} T={case.tokens}; raise --budget-s", flush=True)
                continue
            try:
                found = searched(case, ranks, compilers, args, stop)
            except UniEPError as error:
                print(f"{case.shape.name} T={case.tokens} is left out: {error}", flush=True)
                continue
            results["searches"].append(found)
            said = {key: value for key, value in found.items() if key != "points"}
            print(f"[{time.monotonic() - began:6.1f} s] {json.dumps(said)}", flush=True)
            written()
    if not args.only_search:
        timed(results["searches"], args, end, told)


def left_out(cases: Sequence[tuple[Shape, int]], results: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """What is missing, in words: cases without a search or all of their loads and directions, and peers."""
    rows, of_searches = results["rows"], {(of["shape"], of["tokens"]) for of in results["searches"]}
    if args.only_search:
        missing = [f"{shape.name} T={tokens}" for shape, tokens in cases if (shape.name, tokens) not in of_searches]
        return [f"not searched, as printed above: {', '.join(missing)}"] if missing else []
    count = len(args.load.split(",")) * len(args.directions.split(","))
    of = Counter((row["shape"], row["tokens"]) for row in rows)
    short = [f"{shape.name} T={tokens}" for shape, tokens in cases if of[shape.name, tokens] < count]
    peers = sorted({name for row in rows for name in row["left_out"]})
    said = [f"not timed, or not all of it, as printed above: {', '.join(short)}"] if short else []
    return said + ([f"left out of some rows, as moe.py printed: {', '.join(peers)}"] if peers else [])


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
    with Fleet(job) as ranks, compilers_of(args) as compilers:
        beside = Beside(ranks, compilers, usual, args.candidate_s)
        times = beside.times(every, together=len(every))
        for number, (schedule, us, (status, pairs)) in enumerate(zip(every, predicted, times, strict=True)):
            row = {"changes": tables.as_changes(schedule, job.cfg, args.ep, job.backend), "predicted_us": us}
            row["status"] = status
            if pairs:
                row["us"] = round(statistics.median(b for _, b in pairs), 1)
                row["score"] = round(statistics.median(b / a for a, b in pairs), 4)
            rows.append(row)
            if (number + 1) % 16 == 0 or number + 1 == len(every):
                print(f"[{time.monotonic() - began:6.1f} s] {shape.name}: {number + 1} of {len(every)}", flush=True)
        seconds = {"compiling": round(compilers.seconds, 1)}
        seconds["timing"] = round(time.monotonic() - began - compilers.seconds, 1)
    return {"shape": shape.name, "tokens": tokens, "points": rows, **judged(rows), "seconds": seconds}


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
        "costs": most_first(costs),
    }  # fmt: skip


NAMED = [name for name in strategies.STRATEGIES if name != "uniep"]
NEEDS = {"deepep": "deepep", "deepep-nowait": "deepep", "liger-cute": "liger"}
"""Options that peers need."""


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parsed and checked arguments; a bad one ends the program before anything is searched."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shapes", default=",".join(SPANNING), help="names, or DxFxExK (default %(default)s)")
    made.add_argument("--tokens", default="8192", help="per rank (default %(default)s)")
    made.add_argument("--ep", type=int, default=1, help="ranks (default %(default)s)")
    made.add_argument("--grid", action="store_true", help="time every point of the declared grid")
    made.add_argument("--budget-s", type=float, default=float("inf"), help="of all of it (default %(default)s)")
    made.add_argument(
        "--search-s", type=float, default=120, help="of each search, with compiling (default %(default)s)"
    )
    made.add_argument("--ablate-s", type=float, default=0, help="of each ablation, likewise (default: none)")
    made.add_argument("--candidate-s", type=float, default=60, help="longest answer of a point (default %(default)s)")
    made.add_argument("--sampler", choices=SAMPLERS, default="auto", help="as of uniep tune (default %(default)s)")
    made.add_argument("--tables", metavar="DIR", type=Path, help="keep what was found in tables of this folder")
    made.add_argument("--only-search", action="store_true", help="without moe.py")
    made.add_argument("--at-once", type=int, help="--compilers of uniep tune, 0: none (default: as there)")
    made.add_argument("--compile-s", type=float, default=90, help="before each search (default %(default)s)")
    made.add_argument("--strategies", default=",".join(NAMED), help="named ones to time (default %(default)s)")
    made.add_argument("--load", default="window,sustained", help="of moe.py (default %(default)s)")
    made.add_argument("--directions", default="fwd,fwd_bwd", help="of moe.py (default %(default)s)")
    made.add_argument("--iters", type=int, default=11, help="samples of moe.py (default %(default)s)")
    made.add_argument("--sustained-s", type=float, default=0.1, help="length of a sustained one (default %(default)s)")
    made.add_argument("--no-check", dest="check", action="store_false", help="moe.py compares nothing with fp32")
    made.add_argument("--peers", default="", help="implementations of moe.py, such as deepep-nowait,nccl,peer-compute")
    made.add_argument("--deepep", metavar="DIR", help="folder that holds an importable deep_ep")
    made.add_argument("--liger", metavar="DIR", help="folder that holds an importable liger_cute_kernels")
    made.add_argument("--card", help="that the model assumes (default: this machine's)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add_file_options(made)
    args = made.parse_args(argv)
    args.at_once = usual_number() if args.at_once is None else args.at_once
    args.strategies = [] if args.only_search else list(filter(None, args.strategies.split(",")))
    if unknown := [name for name in args.strategies if name not in NAMED]:
        made.error(f"--strategies {','.join(unknown)!r} is unknown; use one or more of {', '.join(NAMED)}")
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
    cases = list(itertools.product(shapes, tokens))
    if not args.grid:
        worth(cases, results, args)
        if missing := left_out(cases, results, args):
            sys.exit("\n".join(missing))
        return
    for shape, count in cases:
        found = whole_grid(shape, count, args)
        said = {key: found[key] for key in ("best", "best_score", "timings_allowed", "reached", "costs", "seconds")}
        print(f"{shape.name} T={count}: {json.dumps(said)}", flush=True)
        results["rows"].append(found)
        if args.json:
            write(args.json, results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that ranks end, too
    main()
