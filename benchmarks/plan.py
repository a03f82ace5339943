"""Time the plan of a call on the device: one GPU plays rank 0 of 2, 4 and 8 ranks, whose entries are there beforehand.

    python benchmarks/plan.py --json benchmarks/results/h200x1_plan.json

`plan_us`: from the moment that all ranks have entered to the end of the plan's last kernel.  `entry_us`: the kernels of
the entry before it, without any wait.  Each kernel's own time is the profiler's; they overlap a little.  The plan is
compared with `routing.build_plan` before it is timed.  Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
from torch import Tensor

from cases import parse_shape
from moe import add_file_options, of_run
from played import enter_peers, rank_0
from uniep.backends.hopper.backend import HopperBackend
from uniep.kernels.entry import clock_kernel
from uniep.launch.driver import launch
from uniep.routing import build_plan
from uniep.schedule import default_schedule, parse_schedule

FIELDS = "counts_RE", "expert_start_e1", "send_count_R", "recv_count_R", "row_source_N", "row_return_N"


def make(backend: HopperBackend, ids: Tensor, weights: Tensor, clocks: Tensor | None = None) -> Any:
    """A plan, in the default way.  clocks (3,): the device's time before the entry, after it, and at the end."""
    planner, way = backend.planner, backend.way

    def clock(number: int) -> None:
        if clocks is not None:
            launch(clock_kernel, 1, (clocks[2 * number :],), {}, num_warps=1)  # 16 bytes apart

    clock(0)
    plan = planner.enter_new(ids, weights, "route", copies=way.copies)
    clock(1)
    planner.make(plan, len(ids), *orders(way), copies=way.copies)
    clock(2)
    return plan


def orders(way: Any) -> tuple[Any, ...]:
    return way.leads, way.waves


def check(backend: HopperBackend, ids: list[Tensor], weights: list[Tensor]) -> None:
    """The device's plan equals the host's."""
    while True:
        planner = backend.planner
        plan = planner.plan(ids[0], weights[0], backend.way.leads, operation="route")
        if planner.fits():
            break
    got = planner.routing_plan(plan, len(ids[0]))
    want = build_plan([i.cpu() for i in ids], 0, backend.cfg, align=planner.tile_rows)
    for name in FIELDS:
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name


def kernels_us(backend: HopperBackend, ids: Tensor, weights: Tensor, repeats: int) -> dict[str, float]:
    """Each kernel's own time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            make(backend, ids, weights)
        torch.cuda.synchronize()
    return {
        event.key.removesuffix("_kernel"): round(event.device_time, 2)
        for event in profiled.key_averages()
        if event.key.endswith("_kernel")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b", type=parse_shape)
    parser.add_argument("--tokens", default="512,8192")
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--schedule", default="", help="what differs from the default, such as arrival_waves=8")
    add_file_options(parser)
    args = parser.parse_args()
    rows = []
    for ranks in map(int, args.ranks.split(",")):
        for tokens in map(int, args.tokens.split(",")):
            cfg = args.shape.config(ranks, tokens, max_rows=tokens * ranks * args.shape.top_k)
            backend = rank_0(cfg, ranks, parse_schedule(args.schedule, default_schedule("hopper", cfg, ranks)))
            backend.way = backend.ways[tokens]
            generator = torch.Generator("cuda").manual_seed(1)
            scores = [torch.rand(tokens, cfg.num_experts, device="cuda", generator=generator) for _ in range(ranks)]
            ids = [s.topk(cfg.top_k, 1).indices for s in scores]
            weights = [torch.rand(i.shape, device="cuda", generator=generator) for i in ids]
            enter_peers(backend, ids, weights, "route")
            check(backend, ids, weights)
            clocks = torch.zeros(args.repeats + 5, 6, dtype=torch.int64, device="cuda")
            for repeat in range(args.repeats + 5):
                torch.cuda._sleep(2_000_000)  # so that everything is launched before it begins
                make(backend, ids[0], weights[0], clocks[repeat])
                torch.cuda.synchronize()
            before, entered, end = clocks[5:, ::2].cpu().unbind(1)
            row = {
                "shape": args.shape.name, "ranks": ranks, "tokens": tokens,
                "entry_us": statistics.median(((entered - before) / 1e3).tolist()),
                "plan_us": statistics.median(((end - entered) / 1e3).tolist()),
                "plan_us_min": float((end - entered).min()) / 1e3,
            }  # fmt: skip
            try:
                row["kernels_us"] = kernels_us(backend, ids[0], weights[0], args.repeats)
            except RuntimeError as error:
                row["kernels_us"] = str(error)
            rows.append(row)
            print(json.dumps(row))
            backend.close()
            del backend
            torch.cuda.empty_cache()
    meta = of_run("plan.py", torch.device("cuda"), args.commit, 1) | {"emulated": True}
    meta |= {name: getattr(args, name) for name in ("repeats", "schedule")}
    if args.json:
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
