"""Time training by low-rank factors next to training experts whole: forward + backward of one layer, and its memory.

    torchrun --standalone --nproc-per-node=1 benchmarks/lora.py --json benchmarks/results/h200x1_lora.json

Variants: "whole"; "lora-R", factors of rank R on the `hopper` backend, and "lora-R-nccl".  Before anything is timed,
results of factors are compared: with those of the serial schedule bit by bit, with those of `nccl` by their norm.  All
variants take turns.  ms: median of `window` calls, see timing.py.  peak_mib: of one call, beyond its inputs.
--stages: milliseconds of each stage, too, of one call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import timing
import uniep
from cases import Case, make_case, make_weights, parse_shape
from moe import add_file_options, of_run

NAMES = ("y", "dx", "dweights", "dA13", "dB13", "dA2", "dB2")


def step(case: Case, workspace: uniep.Workspace, factors: list[Tensor] | None) -> Callable[[], list[Tensor]]:
    """Forward + backward: (y, gradients of x, of routing weights, of the experts or their factors)."""
    x, weights = (t.detach().requires_grad_() for t in (case.x_TD, case.weights_TK))
    experts = [t.detach().requires_grad_(factors is None) for t in (case.w13_e2FD, case.w2_eDF)]
    trained = experts if factors is None else [t.detach().requires_grad_() for t in factors]
    lora = None if factors is None else uniep.nn.Lora((trained[0], trained[1]), (trained[2], trained[3]), 2.0)

    def call() -> list[Tensor]:
        y = uniep.moe(x, case.ids_TK, weights, *experts, workspace=workspace, lora=lora)
        return [y.detach(), *timing.gradients(y, [x, weights, *trained], case.dy_TD)]

    return call


def make_factors(cfg: uniep.MoEConfig, local: int, r: int, rank: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(3000 + rank)
    shapes = (local, r, cfg.hidden), (local, cfg.h_columns, r), (local, r, cfg.ffn), (local, cfg.hidden, r)
    return [(torch.randn(s, device=device, generator=generator) * s[2] ** -0.5).to(cfg.dtype) for s in shapes]


def compare(name: str, ours: list[Tensor], serial: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference from `nccl`, by its norm.  Raises AssertionError for one that is no rounding."""
    wrong = [n for n, a, b in zip(NAMES, ours, serial, strict=True) if not torch.equal(a, b)]
    assert not wrong, f"{name}: {wrong} differ from the serial schedule"
    most = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(ours, theirs, strict=True))
    assert most < 0.02, f"{name} differs from nccl by {most:.3g}"
    return most


def peak_mib(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def stages_ms(call: Callable[[], object], workspace: uniep.Workspace) -> dict[str, float]:
    """Of one call; what a stage does on another stream counts where it is waited for."""
    backend: Any = workspace.backend
    start = timing.aligned()
    backend.phases = [("", start)]
    call()
    torch.cuda.synchronize()
    marks, backend.phases = backend.phases, None
    of_stage: dict[str, float] = {}
    for (_, before), (name, event) in itertools.pairwise(marks):
        of_stage[name] = round(of_stage.get(name, 0) + before.elapsed_time(event), 4)
    return of_stage


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shapes", default="qwen3-30b", help="a list (default %(default)s)")
    made.add_argument("--tokens", type=int, default=8192, help="of a rank (default %(default)s)")
    made.add_argument("--ranks", default="16,64", help="of factors, a list (default %(default)s)")
    made.add_argument("--rounds", type=int, default=15)
    made.add_argument("--stages", action="store_true")
    add_file_options(made)
    args = made.parse_args()
    device, _ = timing.start_ranks("cuda", 600)
    rank, size = dist.get_rank(), dist.get_world_size()
    rows: list[dict[str, Any]] = []
    for name in args.shapes.split(","):
        shape = parse_shape(name)
        weights = make_weights(shape, rank, size, torch.bfloat16, device)
        case = make_case(shape, args.tokens, "balanced", rank, weights)
        cfg = uniep.MoEConfig(
            hidden=shape.hidden, ffn=shape.ffn, num_experts=shape.num_experts, top_k=shape.top_k,
            max_tokens_per_rank=args.tokens,
        )  # fmt: skip
        group, how = dist.group.WORLD, {"device": device, "timeout_s": 60}
        with (
            uniep.Workspace(cfg, group, **how) as ours,
            uniep.Workspace(cfg, group, backend="nccl", **how) as nccl,
        ):
            calls, spaces = {"whole": step(case, ours, None)}, {"whole": ours}
            for r in map(int, args.ranks.split(",")):
                factors = make_factors(cfg, case.num_local, r, rank, device)
                of_backend = {f"lora-{r}": ours, f"lora-{r}-nccl": nccl}
                calls |= {variant: step(case, space, factors) for variant, space in of_backend.items()}
                spaces |= of_backend
                with uniep.Workspace(cfg, group, schedule=uniep.Schedule(overlap="serial"), **how) as plain:
                    serial = step(case, plain, factors)()
                for _ in range(3):  # the third is a record of the second
                    off = compare(f"lora-{r}", calls[f"lora-{r}"](), serial, calls[f"lora-{r}-nccl"]())
                if rank == 0:
                    print(f"{name}, r {r}: bits of serial; off from nccl by {off:.2g}", flush=True)
                del serial
            for call in calls.values():
                for _ in range(4):
                    call()
            times = timing.in_turn(calls, args.rounds)
            for variant, call in calls.items():
                ms = times[variant]
                row = {
                    "shape": name, "tokens": args.tokens, "impl": variant, "ms": round(statistics.median(ms), 4),
                    "ms_min": round(min(ms), 4), "ms_max": round(max(ms), 4), "peak_mib": round(peak_mib(call), 1),
                }  # fmt: skip
                rows.append(row)
                if rank == 0:
                    print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)
                if args.stages and spaces[variant] is ours:
                    row["stages"] = stages_ms(call, ours)
                    if rank == 0:
                        print(f"  {row['stages']}", flush=True)
            ours.check()
        torch.cuda.empty_cache()
    if rank == 0 and args.json:
        meta = of_run("lora.py", device, args.commit)
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
