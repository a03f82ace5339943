"""The host's time of a call, beside the device's: what a call of few tokens waits for.

    torchrun --nproc-per-node=2 benchmarks/host.py --json FILE

host: from the call to its return behind a synchronisation, median and 10th percentile of 40, this rank's.
sustained, window: as in timing.py, largest of all ranks.  First line: one launch by the driver alone, one by
`uniep.launch.driver`, recording an event, allocating.  --profile: where Python spends a forward + backward.

thread: that of backward, the calling one, or autograd's own, as by default.  A lone layer hands over to that once for
each call, a model once for each step: so `--layers 8` makes a chain of that many layers, and divides by it.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import itertools
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
from cases import Case, make_case, make_weights, parse_shape
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


class Chain:
    """So many layers, one behind the other, each with its own weights.  y goes from one to the next, without norms."""

    def __init__(self, case: Case, count: int, workspace: uniep.Workspace) -> None:
        self.case, self.workspace = case, workspace
        self.x_TD = case.x_TD.detach().requires_grad_()
        of_layer = case.weights_TK, case.w13_e2FD, case.w2_eDF
        self.layers = [[t.clone().requires_grad_() for t in of_layer] for _ in range(count)]
        self.leaves = [self.x_TD, *(t for layer in self.layers for t in layer)]

    def forward(self) -> torch.Tensor:
        y_TD = self.x_TD
        for layer in self.layers:
            y_TD = uniep.moe(y_TD, self.case.ids_TK, *layer, workspace=self.workspace)
        return y_TD

    def calling(self) -> object:
        return timing.gradients(self.forward(), self.leaves, self.case.dy_TD)

    def own(self) -> object:
        return torch.autograd.grad(self.forward(), self.leaves, self.case.dy_TD)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shapes", default="qwen3-30b", help="a list (default %(default)s)")
    made.add_argument("--tokens", default="64,512,2048", help="a list (default %(default)s)")
    made.add_argument("--modes", default="sync-free,default", help="(default %(default)s)")
    made.add_argument("--layers", default="1,8", help="lengths of chains, a list (default %(default)s)")
    made.add_argument("--profile", action="store_true")
    add_file_options(made)
    args = made.parse_args()
    device, control = timing.start_ranks("cuda", 600)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    machine = of_the_machine(device)
    if rank == 0:
        print(" ".join(f"{name}={value:.2f}" for name, value in machine.items()), flush=True)
    rows: list[dict[str, Any]] = []
    for name, tokens in itertools.product(args.shapes.split(","), map(int, args.tokens.split(","))):
        shape = parse_shape(name)
        case = make_case(shape, tokens, "balanced", rank, make_weights(shape, rank, ranks, torch.bfloat16, device))
        for mode, count in itertools.product(args.modes.split(","), map(int, args.layers.split(","))):
            rows_of_call = 2 * tokens * shape.top_k if mode == "sync-free" else None
            cfg = shape.config(ranks, tokens, max_rows=rows_of_call, dtype=torch.bfloat16)
            with uniep.Workspace(cfg, dist.group.WORLD, device=device, timeout_s=60) as workspace:
                chain = Chain(case, count, workspace)
                calls = (
                    ("fwd", "calling", chain.forward),
                    ("fwd_bwd", "calling", chain.calling),
                    ("fwd_bwd", "own", chain.own),
                )
                for direction, thread, call in calls:
                    for _ in range(5):
                        call()
                    host = host_us(call, control)
                    windows = [] if count > 1 else timing.max_over_ranks([timing.window(call) for _ in range(9)])
                    row = {
                        "shape": name, "tokens": tokens, "mode": mode, "layers": count, "direction": direction,
                        "thread": thread, "host_us": round(statistics.median(host) / count),
                        "host_10_us": round(host[CALLS // 10] / count),
                        "sustained_us": round(1e3 * timing.max_over_ranks([timing.sustained(call, 0.2)])[0] / count),
                        "window_us": round(1e3 * statistics.median(windows)) if windows else None,
                    }  # fmt: skip
                    rows.append(row)
                    if rank == 0:
                        print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)
                if args.profile and count == 1:
                    profile(chain.own)
                workspace.check()
            torch.cuda.empty_cache()
    if rank == 0 and args.json:
        meta = {**of_run("host.py", device, args.commit), **machine}
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
