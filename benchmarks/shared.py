"""Time shared experts behind the routed ones and beside them (`MoE(shared_beside=True)`): how much of them hides.

    torchrun --standalone --nproc-per-node=2 benchmarks/shared.py --json benchmarks/results/h200x2_shared.json

Four calls in turn, in the same processes: the layer without shared experts ("routed"), these alone ("shared"), one
behind the other ("after"), and beside each other ("beside").  hidden: after - beside, and its share of shared.  Results
and all gradients of after and beside are compared bit by bit before they are timed.  A value is the slowest rank's, the
median of window calls (timing.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import timing
import uniep
from cases import parse_shape
from moe import DTYPES, add_run_options, of_run


def layers(cfg: uniep.MoEConfig, workspace: uniep.Workspace, ffn: int) -> dict[str, torch.nn.Module]:
    """By name; all with the same values."""
    made = {
        "routed": uniep.nn.MoE(cfg, workspace=workspace, seed=0),
        "after": uniep.nn.MoE(cfg, workspace=workspace, seed=0, shared_ffn=ffn),
        "beside": uniep.nn.MoE(cfg, workspace=workspace, seed=0, shared_ffn=ffn, shared_beside=True),
    }
    return {**made, "shared": made["after"].shared}


def call_of(layer: torch.nn.Module, x_TD: Tensor, dy_TD: Tensor, backward: bool) -> Callable[[], list[Tensor]]:
    """y, and with `backward` the gradients of x and the layer's parameters."""
    leaves = [x_TD.detach().requires_grad_(), *layer.parameters()]

    def call() -> list[Tensor]:
        y_TD = layer(leaves[0])
        return [y_TD.detach(), *(torch.autograd.grad(y_TD, leaves, dy_TD) if backward else ())]

    return call


def compare(after: list[Tensor], beside: list[Tensor], label: str) -> None:
    same = len(after) == len(beside) and all(map(torch.equal, after, beside))
    assert not timing.any_rank(not same), f"{label}: beside differs from after"


def main(argv: list[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="deepseek-v3", help="a name, or DxFxExK (default %(default)s)")
    made.add_argument("--shared-ffn", type=int, default=2048, help="width of the shared experts (default %(default)s)")
    made.add_argument("--tokens", default="1024,4096,8192", help="per rank (default %(default)s)")
    made.add_argument("--samples", type=int, default=11, help="calls of each (default %(default)s)")
    add_run_options(made)
    args = made.parse_args(argv)
    device, _ = timing.start_ranks(args.device, 600)
    rank, ranks, shape = dist.get_rank(), dist.get_world_size(), parse_shape(args.shape)
    tokens = [int(text) for text in args.tokens.split(",")]
    rows: list[dict[str, Any]] = []
    meta = of_run("shared.py", device, args.commit)
    cfg = shape.config(ranks, max(tokens), dtype=DTYPES[args.dtype])
    with uniep.Workspace(cfg, dist.group.WORLD, device=device, timeout_s=120) as workspace:
        every = layers(cfg, workspace, args.shared_ffn)
        for count in tokens:
            draw = torch.Generator().manual_seed(rank)
            pair = (torch.randn(count, cfg.hidden, generator=draw).to(device, cfg.dtype) for _ in range(2))
            x_TD, dy_TD = pair
            for direction in ("fwd", "fwd_bwd"):
                backward = direction == "fwd_bwd"
                calls = {name: call_of(layer, x_TD, dy_TD, backward) for name, layer in every.items()}
                for _ in range(3):
                    compare(calls["after"](), calls["beside"](), f"T={count} {direction}")
                ms = {name: statistics.median(times) for name, times in timing.in_turn(calls, args.samples).items()}
                hidden = ms["after"] - ms["beside"]
                row = {"shape": shape.name, "shared_ffn": args.shared_ffn, "tokens": count, "direction": direction}
                rows.append(row | {f"{name}_ms": round(value, 4) for name, value in ms.items()})
                rows[-1] |= {"hidden_ms": round(hidden, 4), "hidden_share": round(hidden / ms["shared"], 3)}
                if rank == 0:
                    print("bits equal;", " ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
                    if args.json:
                        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
        workspace.check()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
