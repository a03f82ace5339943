"""The host's time of a call, beside the device's: what a call of few tokens waits for.

    torchrun --nproc-per-node=2 benchmarks/host.py --json FILE

host: from the call to its return behind a synchronisation, median and 10th percentile of 40, this rank's.
sustained, window: as in timing.py, largest of all ranks.  First line: one launch by the driver alone, one by
`uniep.launch.driver`, recording an event, allocating.  --profile: where Python spends a forward + backward.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import json
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import timing
import uniep
from cases import make_case, make_weights, parse_shape
from layers import UniEPLayer
from moe import add_file_options, of_run
from uniep.kernels.entry import clock_kernel
from uniep.launch import driver

CALLS = 40


def microseconds(call: Callable[[], object], count: int = 500) -> float:
    """Of one call, the least of five means."""
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - start) / count * 1e6)
    torch.cuda.synchronize()
    return min(found)


def of_the_machine(device: torch.device) -> dict[str, float]:
    """What launches, events and allocations cost here, us."""
    word = torch.zeros(1, dtype=torch.int64, device=device)

    def ours() -> None:
        driver.launch(clock_kernel, 1, (word,), {}, num_warps=1)

    before = set(driver._known)
    ours()
    known: Any = driver._known[(set(driver._known) - before).pop()]
    ours()
    given = ctypes.byref(known.config), known.function, known.parameters, None
    event = torch.cuda.Event()
    return {
        "launch_us": microseconds(lambda: known.launch(*given)), "our_launch_us": microseconds(ours),
        "event_us": microseconds(event.record), "empty_us": microseconds(lambda: torch.empty(1000, device=device)),
    }  # fmt: skip


def host_us(call: Callable[[], object], control: dist.ProcessGroup) -> list[float]:
    found = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        dist.barrier(control)
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return sorted(found)


def profile(call: Callable[[], object]) -> None:
    with torch.autograd.set_multithreading_enabled(False), cProfile.Profile() as found:
        for _ in range(200):
            call()
    if dist.get_rank() == 0:
        pstats.Stats(found).sort_stats("tottime").print_stats(25)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shapes", default="qwen3-30b", help="a list (default %(default)s)")
    made.add_argument("--tokens", default="64,512,2048", help="a list (default %(default)s)")
    made.add_argument("--modes", default="sync-free,default", help="(default %(default)s)")
    made.add_argument("--profile", action="store_true")
    add_file_options(made)
    args = made.parse_args()
    device, control = timing.start_ranks("cuda", 600)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    machine = of_the_machine(device)
    if rank == 0:
        print(" ".join(f"{name}={value:.2f}" for name, value in machine.items()), flush=True)
    rows: list[dict[str, Any]] = []
    for name in args.shapes.split(","):
        shape = parse_shape(name)
        weights = make_weights(shape, rank, ranks, torch.bfloat16, device)
        for tokens in map(int, args.tokens.split(",")):
            case = make_case(shape, tokens, "balanced", rank, weights)
            for mode in args.modes.split(","):
                cfg = uniep.MoEConfig(
                    hidden=shape.hidden, ffn=shape.ffn, num_experts=shape.num_experts, top_k=shape.top_k,
                    max_tokens_per_rank=tokens, max_rows=2 * tokens * shape.top_k if mode == "sync-free" else None,
                )  # fmt: skip
                with uniep.Workspace(cfg, dist.group.WORLD, device=device, timeout_s=60) as workspace:
                    layer = UniEPLayer(workspace)
                    layer.prepare(case, True)
                    directions = {"fwd": layer.forward, "fwd_bwd": layer.forward_backward}
                    for direction, run in directions.items():

                        def call(run: Any = run, case: Any = case) -> object:
                            return run(case)

                        for _ in range(5):
                            call()
                        host = host_us(call, control)
                        row = {
                            "shape": name, "tokens": tokens, "mode": mode, "direction": direction,
                            "host_us": round(statistics.median(host)), "host_10_us": round(host[CALLS // 10]),
                            "sustained_us": round(1e3 * timing.max_over_ranks([timing.sustained(call, 0.2)])[0]),
                            "window_us": round(
                                1e3 * statistics.median(timing.max_over_ranks([timing.window(call) for _ in range(9)]))
                            ),
                        }  # fmt: skip
                        rows.append(row)
                        if rank == 0:
                            print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)
                    if args.profile:
                        profile(call)
                    layer.check()
                torch.cuda.empty_cache()
    if rank == 0 and args.json:
        meta = {**of_run("host.py", device, args.commit), **machine}
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
