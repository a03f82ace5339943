"""Time the orders of overlap="mega" beside each other: list scheduling against the closed forms, and what a task costs.

    torchrun --standalone --nproc-per-node=2 benchmarks/critical.py --json benchmarks/results/h200x2_critical.json
    python benchmarks/critical.py --simulate h200-node --measured benchmarks/results/h200x2_critical.json

Every order has a Workspace of its own in the same processes, for the largest T, and the same weights, inputs and
kernels.  Outputs and gradients are compared bit by bit before they are timed.  A window sample is one call of each
order in turn, from another one on each time; sustained: two rounds in opposite order.  A value is the slowest rank's;
window: the median, sustained: the mean.  "stages" is the schedule that the backend uses by default for many tokens, in
several kernels.

Dispatch, in ns: from the clocks that programs record at each task, in kernels that are compiled with it (first shape,
local-first and critical-path, rank 0).  between: from the end of a task to the program's next claim, median.  ready:
from the claim to the start, of the tenth of an operator's tasks that waits least, for which nothing was to be waited
for.  waits: mean.  empty: a kernel whose tasks are nothing but a claim and a word of the list.

--simulate: no GPU; what the simulator says of the same rows, beside those of --measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

import timing
import uniep
from cases import ROUTINGS, Case, make_case, make_weights, parse_shape
from moe import DTYPES, add_run_options, commit, of_run
from uniep.backends.base import Inputs, Needs
from uniep.kernels.claims import claim, claimed
from uniep.schedule import Schedule, default_schedule
from uniep.shapes import Shape
from uniep.sim import STRATEGIES, Problem, load_machine, row
from uniep.weights import ExpertWeights

ORDERS = ("local-first", "natural", "chunk-major", "critical-path")
STRATEGY = {
    "stages": "uniep",
    "local-first": "uniep-mega",
    **{order: f"uniep-mega-{order}" for order in ORDERS[1:]},
}
TRACED = ("local-first", "critical-path")
OUTPUTS = ("y", "dx", "dweights", "dw13", "dw2")


def schedules(cfg: uniep.MoEConfig, ranks: int, device: torch.device, args: argparse.Namespace) -> dict[str, Schedule]:
    """By name.  All of one kernel have the same tiles, so that they differ in their lists alone."""
    cuda = device.type == "cuda"
    usual = default_schedule("hopper" if cuda else "cpu", cfg, ranks)
    changes: dict[str, Any] = {"overlap": "mega", "transfer": args.transfer} if cuda else {}
    made = {"stages": usual if cuda else dataclasses.replace(usual, overlap="serial")}
    for order in ORDERS:
        own = {"chunk_experts": args.chunk_experts} if order == "chunk-major" else {}
        made[order] = dataclasses.replace(usual, tile_order=order, **changes, **own)
    return {name: made[name] for name in args.orders.split(",")}


class Side:
    """One order: its Workspace, and its calls."""

    def __init__(self, workspace: uniep.Workspace) -> None:
        self.workspace = workspace

    def take(self, case: Case) -> None:
        wanted = (case.x_TD, case.weights_TK, case.w13_e2FD, case.w2_eDF)
        self.case, self.leaves = case, [t.detach().requires_grad_() for t in wanted]

    def forward(self) -> Tensor:
        x_TD, weights_TK, w13, w2 = self.leaves
        return uniep.moe(x_TD, self.case.ids_TK, weights_TK, w13, w2, workspace=self.workspace)

    def forward_backward(self) -> tuple[Tensor, ...]:
        y_TD = self.forward()
        return y_TD.detach(), *timing.gradients(y_TD, self.leaves, self.case.dy_TD)

    def call(self, direction: str) -> Callable[[], object]:
        return self.forward if direction == "fwd" else self.forward_backward


class Bench:
    """One run: ranks, options, results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.started = args, time.perf_counter()
        self.device, _ = timing.start_ranks(args.device, args.timeout_s)
        assert dist.group.WORLD is not None
        self.group: dist.ProcessGroup = dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.results: dict[str, Any] = {"meta": self.meta(), "rows": [], "dispatch": []}

    @property
    def cuda(self) -> bool:
        return bool(self.args.device == "cuda")

    def meta(self) -> dict[str, Any]:
        return {
            **of_run("critical.py", self.device, self.args.commit),
            "dtype": self.args.dtype,
            "transfer": self.args.transfer,
            "chunk_experts": self.args.chunk_experts,
            "samples": self.args.samples,
        }

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.started:6.1f} s] {text}", flush=True)

    def write(self) -> None:
        if self.rank == 0 and self.args.json:
            path = self.args.json
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.results, indent=1) + "\n")

    def late(self) -> bool:
        return timing.any_rank(time.perf_counter() - self.started > self.args.budget_s)

    def run(self) -> None:
        self.say(f"{self.results['meta']}")
        if self.cuda and self.rank == 0:
            self.results["empty_task_ns"] = empty_tasks(self.device)
            self.say(f"an empty task: {self.results['empty_task_ns']} ns")
        for number, shape in enumerate(map(parse_shape, self.args.shapes.split(","))):
            if not self.late():
                self.run_shape(shape, TRACED if self.cuda and number == 0 else ())
        self.write()

    def run_shape(self, shape: Shape, traced: Sequence[str]) -> None:
        tokens = [int(text) for text in self.args.tokens.split(",")]
        cfg = shape.config(
            self.ranks, max(tokens), max_rows=shape.sync_free_rows(max(tokens)), dtype=DTYPES[self.args.dtype]
        )
        weights = make_weights(shape, self.rank, self.ranks, cfg.dtype, self.device)
        sides = {
            name: Side(uniep.Workspace(
                cfg, self.group, device=self.device, schedule=schedule, timeout_s=self.args.timeout_s
            ))
            for name, schedule in schedules(cfg, self.ranks, self.device, self.args).items()
        }  # fmt: skip
        for count in tokens:
            case = make_case(shape, count, self.args.routing, self.rank, weights)
            for side in sides.values():
                side.take(case)
            self.compare(sides, f"{shape.name} T={count}")
            for direction, load in itertools.product(self.args.directions.split(","), self.args.load.split(",")):
                if not self.late():
                    self.record(sides, shape, count, direction, load)
        for count in [int(text) for text in self.args.dispatch_tokens.split(",") if text]:
            case = make_case(shape, count, self.args.routing, self.rank, weights)
            for name in filter(sides.get, traced):
                if not self.late():
                    sides[name].take(case)
                    self.dispatch(sides[name], {"shape": shape.name, "tokens": count, "order": name})
        for side in sides.values():
            side.workspace.close()

    def compare(self, sides: dict[str, Side], label: str) -> None:
        """Raises AssertionError where one bit differs between orders."""
        wanted: tuple[Tensor, ...] = ()
        for name, side in sides.items():
            got = side.forward_backward()
            side.workspace.check()
            wanted = wanted or got
            for what, mine, theirs in zip(OUTPUTS, got, wanted, strict=True):
                same = torch.equal(mine, theirs)
                assert not timing.any_rank(not same), f"{label}: {what} of {name} differs from {next(iter(sides))}'s"
        self.say(f"{label}: every bit equal for {', '.join(sides)}")

    def record(self, sides: dict[str, Side], shape: Shape, tokens: int, direction: str, load: str) -> None:
        calls = {name: side.call(direction) for name, side in sides.items()}
        taken: dict[str, list[float]] = defaultdict(list)
        for call in calls.values():
            call()
        for name in self.turns(list(sides), load):
            if load == "window":
                taken[name].append(timing.window(calls[name]))
            else:
                taken[name].append(timing.sustained(calls[name], self.args.sustained_s))
        found = []
        for name, side in sides.items():
            side.workspace.check()
            times = timing.max_over_ranks(taken[name])
            ms = statistics.median(times) if load == "window" else statistics.mean(times)
            found.append({
                "shape": shape.name, "tokens": tokens, "routing": self.args.routing, "direction": direction,
                "load": load, "order": name, "ms": round(ms, 4), "ms_min": round(min(times), 4),
                "ms_max": round(max(times), 4),
            })  # fmt: skip
        self.results["rows"] += found
        self.write()
        times_of = " | ".join(f"{r['order']} {r['ms']:.4f}" for r in found)
        self.say(f"{shape.name} T={tokens} {direction} {load}: {times_of}")

    def turns(self, names: list[str], load: str) -> Iterator[str]:
        """Each name once a round: from another one on, or, of two rounds, in opposite order."""
        if load == "sustained":
            yield from (*names, *reversed(names))
            return
        for turn in range(self.args.samples):
            first = turn % len(names)
            yield from (*names[first:], *names[:first])

    def dispatch(self, side: Side, key: dict[str, Any]) -> None:
        """What a task costs beyond its work, on rank 0, from the records of two calls, of which the second counts."""
        backend: Any = side.workspace.backend
        experts = ExpertWeights.parse(side.case.w13_e2FD, side.case.w2_eDF, side.workspace.cfg, self.ranks)
        inputs = Inputs(side.case.x_TD, side.case.ids_TK, side.case.weights_TK, experts)
        spans: list[Any] = []
        try:
            for _ in range(2):
                backend.trace = []
                _, saved = backend.forward(inputs, save=True)
                backend.backward(side.case.dy_TD, inputs, saved, Needs())
                spans = backend.trace
        finally:
            backend.trace = None
        side.workspace.check()
        for phase in ("forward", "backward"):
            found = {**key, "direction": "fwd" if phase == "forward" else "bwd"}
            found |= task_costs([s for s in spans if s.phase == phase])
            self.results["dispatch"].append(found)
            self.say(f"dispatch {found}")
        self.write()

    def close(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


def task_costs(spans: Sequence[Any]) -> dict[str, Any]:
    """ns of records of one phase and rank: between tasks of a program, and from a claim to the start, by operator."""
    of_program: dict[str, list[Any]] = defaultdict(list)
    of_op: dict[str, list[int]] = defaultdict(list)
    for span in spans:
        of_program[span.worker.rpartition(" ")[2]].append(span)
        of_op[span.op].append(span.start_ns - span.claimed_ns)
    between = []
    for tasks in of_program.values():
        tasks.sort(key=lambda s: s.claimed_ns)
        between += [later.claimed_ns - earlier.end_ns for earlier, later in itertools.pairwise(tasks)]
    return {
        "tasks": len(spans),
        "between_ns": round(statistics.median(between)) if between else None,
        "ops": {
            op: {
                "tasks": len(waits), "ready_ns": round(sorted(waits)[len(waits) // 10]),
                "waits_ns": round(statistics.mean(waits)),
            }
            for op, waits in of_op.items()
        },
    }  # fmt: skip


@triton.jit
def empty_kernel(counter_ptr, list_ptr, seen_ptr, total, THREADS: tl.constexpr):
    """Programs claim places of a list, and read the word there."""
    seen = tl.full((), 0, tl.int64)
    place = tl.atomic_add(counter_ptr, 1, sem="relaxed")
    while place < total:
        answer = claim(counter_ptr, THREADS)
        seen += tl.load(list_ptr + place)
        place = claimed(answer, THREADS)
    tl.store(seen_ptr + tl.program_id(0), seen)


def empty_tasks(device: torch.device, places: int = 100_000, programs: int = 131) -> dict[str, float]:
    """ns that a program takes for a task without work: alone, and beside `programs` in all, together."""
    words, found = torch.ones(places, dtype=torch.int64, device=device), {}
    for name, count in (("alone", 1), ("together", programs)):
        times = []
        for _ in range(5):
            counter, seen = torch.zeros(1, dtype=torch.int32, device=device), words.new_zeros(count)
            start = timing.record_event()
            empty_kernel[(count,)](counter, words, seen, places, THREADS=256, num_warps=8)
            end = timing.record_event()
            timing.wait_event(end)
            assert int(seen.sum()) == places, f"{int(seen.sum())} of {places} tasks were taken"
            times.append(start.elapsed_time(end) * 1e6 * count / places)
        found[name] = round(statistics.median(times), 1)
    return found


# ------------------------------------------------------------------------------------------------ without a GPU


def simulated(args: argparse.Namespace) -> None:
    """Print, and write, what the simulator says of the rows, and what of them was measured."""
    machine, measured = load_machine(args.simulate), {}
    if args.measured:
        for r in json.loads(Path(args.measured).read_text())["rows"]:
            if r["load"] == "window":
                measured[r["shape"], r["tokens"], r["direction"], r["order"]] = r["ms"]
    orders, rows = args.orders.split(","), []
    for shape, text in itertools.product(map(parse_shape, args.shapes.split(",")), args.tokens.split(",")):
        us = {
            (order, way): row(Problem(shape, args.ep, int(text), direction=way), machine, STRATEGIES[STRATEGY[order]])
            for order in orders
            for way in ("fwd", "bwd")
        }  # fmt: skip
        for direction in args.directions.split(","):
            line = f"{shape.name} T={text} {direction}:"
            for order in orders:
                ways = ("fwd", "bwd") if direction == "fwd_bwd" else ("fwd",)
                predicted = sum(us[order, way]["makespan_us"] for way in ways) / 1e3
                found = measured.get((shape.name, int(text), direction, order))
                rows.append({
                    "shape": shape.name, "tokens": int(text), "direction": direction, "order": order,
                    "predicted_ms": round(predicted, 4), "measured_ms": found,
                    "exposed_comm_us": round(sum(us[order, way]["exposed_comm_us"] for way in ways), 1),
                })  # fmt: skip
                line += f" {order} {predicted:.3f}" + (f" ({found:.3f})" if found else "") + " |"
            print(line.rstrip(" |"), flush=True)
    if args.json:
        meta = {"machine": machine.name, "ep": args.ep, "commit": args.commit or commit(), "measured": args.measured,
                "command": shlex.join(["benchmarks/critical.py", *sys.argv[1:]])}  # fmt: skip
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


def options(argv: list[str] | None) -> argparse.Namespace:
    """Parsed and checked arguments; a bad one ends the program before any process waits for another."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog="critical.py", description=__doc__, formatter_class=raw)
    made.add_argument("--shapes", default="qwen3-30b,dsv2-lite", help="names, or DxFxExK (default %(default)s)")
    made.add_argument("--tokens", default="512,1024,2048,4096,8192", help="per rank (default %(default)s)")
    made.add_argument("--routing", choices=ROUTINGS, default="balanced")
    made.add_argument("--directions", default="fwd,fwd_bwd", help="(default %(default)s)")
    made.add_argument("--load", default="window,sustained", help="(default %(default)s)")
    made.add_argument("--orders", default=",".join(STRATEGY), help="(default %(default)s)")
    made.add_argument("--transfer", choices=("push", "copy"), default="push", help="of one kernel (%(default)s)")
    made.add_argument("--chunk-experts", type=int, default=4, help="of chunk-major (default %(default)s)")
    made.add_argument("--samples", type=int, default=11, help="window calls of each order (default %(default)s)")
    made.add_argument("--sustained-s", type=float, default=0.03, help="of one round (default %(default)s)")
    made.add_argument("--dispatch-tokens", default="512,2048", help="T with task records; '' for none")
    made.add_argument("--budget-s", type=float, default=float("inf"), help="begin nothing more after so many seconds")
    made.add_argument("--timeout-s", type=float, default=120, help="longest wait for a peer (default %(default)s)")
    add_run_options(made)
    made.add_argument("--simulate", metavar="MACHINE", help="predict the rows; needs no GPU and no torchrun")
    made.add_argument("--measured", metavar="FILE", help="results to print beside predicted ones")
    made.add_argument("--ep", type=int, default=2, help="ranks, with --simulate (default %(default)s)")
    args = made.parse_args(argv)
    known = {"orders": STRATEGY, "directions": ("fwd", "fwd_bwd"), "load": ("window", "sustained")}
    for option, values in known.items():
        for value in getattr(args, option).split(","):
            if value not in values:
                made.error(f"--{option} {value!r} is unknown; use one or more of {', '.join(values)}")
    for option in ("tokens", "dispatch_tokens"):
        for value in filter(None, getattr(args, option).split(",")):
            if not value.isdecimal() or int(value) < 1:
                made.error(f"--{option.replace('_', '-')} {value!r} is not a number of tokens")
    try:
        for name in args.shapes.split(","):
            parse_shape(name)
    except ValueError as error:
        made.error(str(error))
    if not args.simulate and "RANK" not in os.environ:
        made.error("start it with torchrun --standalone --nproc-per-node=2, or give --simulate MACHINE")
    return args


def main(argv: list[str] | None = None) -> None:
    args = options(argv)
    if args.simulate:
        simulated(args)
        return
    bench = Bench(args)
    bench.run()
    bench.say("done")
    bench.close()


if __name__ == "__main__":
    main()
