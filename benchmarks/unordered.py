"""What equal bits cost: down and combine in uniep's fixed order, against adding rows where they come, by atomics.

    python benchmarks/unordered.py --json benchmarks/results/h200x1_unordered.json

One GPU, rows and experts of one of two ranks.  Three ways from the activation to y, with the same loop over k and the
same tiles: "fixed order", uniep's (rows into return slots, then the sum over k ascending in fp32); "atomics, fp32" (w
y_k added to y in fp32 as tiles end, y filled with zeros before and rounded after); "atomics, bf16" (added in the
layer's dtype, so that each addition rounds).  Each is compared with the first, and with itself: `repeats_differ` is the
share of elements of y that two calls do not have alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

import timing
import uniep
from cases import Shape, make_case, make_weights, parse_shape
from moe import add_file_options, of_run, relative_error
from uniep.kernels.arguments import Rows, Sums
from uniep.kernels.gemm import halves, product_of_rows, tile_of_step
from uniep.kernels.rows import num_row_tiles
from uniep.launch import operands, staged
from uniep.launch.driver import launch
from uniep.weights import ExpertWeights

RANKS = 2


@triton.jit
def unordered_kernel(rows: Rows, a_desc, b_desc, out_ptr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """out (T, WIDTH) += w * (a @ W2^T) of each row, at its token, in the order in which tiles end."""
    NUM_N: tl.constexpr = (WIDTH + TILE.N - 1) // TILE.N
    HALF: tl.constexpr = TILE.N // 2
    num_m = num_row_tiles(rows)
    for step in tl.range(tl.program_id(0), num_m * NUM_N, tl.num_programs(0), flatten=True):
        m, expert, n = tile_of_step(step, num_m, None, rows.group_M, NUM_N)
        acc = product_of_rows(None, a_desc, b_desc, m, expert, n, DEPTH, 0, "transposed", False, TILE)
        row = m * TILE.M + tl.arange(0, TILE.M)
        token = tl.load(rows.source_N + row)
        weight = tl.load(rows.weight_N + row)[:, None]
        base = out_ptr + tl.maximum(token, 0).to(tl.int64)[:, None] * WIDTH
        left, right = halves(acc, TILE.M, TILE.N)
        column = n * TILE.N + tl.arange(0, HALF)
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        used = (token >= 0)[:, None]
        mask = used & (column < WIDTH)[None, :]
        tl.atomic_add(base + column[None, :], (left * weight).to(dtype), mask=mask, sem="relaxed")
        column += HALF
        mask = used & (column < WIDTH)[None, :]
        tl.atomic_add(base + column[None, :], (right * weight).to(dtype), mask=mask, sem="relaxed")


class Layer:
    """One rank's plan, and random activations."""

    def __init__(self, shape: Shape, tokens: int, device: torch.device) -> None:
        local = Shape(shape.name, shape.hidden, shape.ffn, shape.num_experts // RANKS, shape.top_k)
        self.case = make_case(local, tokens, "balanced", 0, make_weights(shape, 0, RANKS, torch.bfloat16, device))
        self.experts = ExpertWeights((self.case.w13_e2FD,), (self.case.w2_eDF,), "stacked")
        self.workspace = uniep.Workspace(local.config(1, tokens, max_rows=tokens * shape.top_k), None, device=device)
        self.backend: Any = self.workspace.backend
        self.plan = self.backend.planner.plan(self.case.ids_TK, self.case.weights_TK)
        self.act_NF = torch.randn(self.plan.num_rows, local.ffn, device=device).to(torch.bfloat16)

    def ways(self) -> dict[str, Callable[[], Tensor]]:
        """By name; each returns y (T, D)."""
        backend, case = self.backend, self.case
        tile, sms, peers, rows = backend.way.down, backend.sms, backend.peers(), self.plan.bundle
        fewer = dataclasses.replace(tile, stages=3)  # atomics take the shared memory of a stage
        out_TD, sums_TD = torch.empty_like(case.x_TD), torch.empty(case.x_TD.shape, device=backend.device)

        def fixed() -> Tensor:
            staged.launch_down(
                self.act_NF,
                rows,
                self.experts,
                peers,
                backend.cfg,
                tile,
                sms,
                out_TD,
                slots=backend.slots,
                scatter=True,
            )
            returns = backend.arena.views["returns"]
            sums, way = Sums(returns, case.ids_TK, case.weights_TK, out_TD), backend.way
            staged.launch_combine(sums, peers, sms * way.sum_programs, way.sum_warps)
            return out_TD

        def unordered(into: Tensor) -> None:
            blocks = (
                operands.rows_block(self.act_NF, tile.rows, tile.depth),
                operands.w2_block(self.experts, 1, tile.columns, tile.depth),
            )
            constants = {"DEPTH": self.act_NF.shape[1], "WIDTH": into.shape[1], "TILE": operands.tile_shape(tile)}
            launch(unordered_kernel, sms, (rows, *blocks, into), constants, **operands.options(fewer))

        def in_fp32() -> Tensor:
            sums_TD.zero_()
            unordered(sums_TD)
            return sums_TD.to(out_TD.dtype)

        def in_bf16() -> Tensor:
            out_TD.zero_()
            unordered(out_TD)
            return out_TD

        return {"fixed order": fixed, "atomics, fp32": in_fp32, "atomics, bf16": in_bf16}


def of_shape(name: str, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    layer = Layer(parse_shape(name), args.tokens, device)
    made = layer.ways()
    want = made["fixed order"]().clone()
    taken, back_to_back = timing.in_turn(made, args.iters), timing.sustained_in_turn(made, args.sustained_s)
    rows = []
    for way, call in made.items():
        one, two = call().clone(), call().clone()
        rows.append({
            "shape": name, "tokens": args.tokens, "way": way, "ms": round(statistics.median(taken[way]), 4),
            "sustained_ms": round(statistics.median(back_to_back[way]), 4),
            "error": relative_error(one, want), "repeats_differ": float((one != two).float().mean()),
        })  # fmt: skip
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    layer.workspace.close()
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shapes", default="qwen3-30b,dsv2-lite,qwen3-235b,deepseek-v3", help="(default %(default)s)")
    made.add_argument("--tokens", type=int, default=8192, help="(default %(default)s)")
    made.add_argument("--iters", type=int, default=20, help="window calls of each (default %(default)s)")
    made.add_argument("--sustained-s", type=float, default=0.4, help="of each, in parts, in turn")
    add_file_options(made)
    args = made.parse_args(argv)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    timing.setup(device, None)
    rows = [row for name in args.shapes.split(",") for row in of_shape(name, args, device)]
    if args.json:
        meta = of_run("unordered.py", device, args.commit)
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
