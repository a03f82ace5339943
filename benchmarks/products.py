"""Time uniep's six grouped products, one by one on one GPU, next to PyTorch's grouped GEMM on the same rows.

    python benchmarks/products.py --json benchmarks/results/h200_products.json

Rows and experts are those that one of two ranks has.  PyTorch's operands are contiguous rows; uniep gathers x and dO
where they lie, and gate_up applies SwiGLU and stores gate and up, too, so that it does more.  Results are compared
before they are timed.  Median of `window` calls, mean of `sustained` ones; see timing.py.

quack-kernels takes part where it can be imported, on the same rows as PyTorch, tuned by itself.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import timing
import uniep
from cases import Shape, make_case, make_weights, parse_shape
from kernels import grouped_mm
from moe import add_file_options, of_run
from uniep.config import ROW_ALIGN
from uniep.kernels.arguments import ALL_HERE, Addresses, Tokens

try:
    from quack.gemm_interface import gemm as quack_gemm
except ImportError:
    quack_gemm = None

RANKS = 2


def quack(a: Tensor, b: Tensor, start_e1: Tensor) -> Tensor:
    """quack-kernels' grouped GEMM, of operands as those of `grouped_mm`.  start_e1: int32."""
    return quack_gemm(a, b, **{"cu_seqlens_m" if b.dim() == 3 else "cu_seqlens_k": start_e1})


class Products:
    """What the sides compute, by name: (uniep's, PyTorch's, what uniep's leaves behind); quack: quack-kernels'."""

    def __init__(self, shape: Shape, tokens: int, device: torch.device) -> None:
        from uniep.launch import staged as launch

        local = Shape(shape.name, shape.hidden, shape.ffn, shape.num_experts // RANKS, shape.top_k)
        case = make_case(local, tokens, "balanced", 0, make_weights(shape, 0, RANKS, torch.bfloat16, device))
        self.tflop = local.tflop(tokens, "fwd") / 3  # of one with F columns
        cfg = uniep.MoEConfig(
            hidden=local.hidden, ffn=local.ffn, num_experts=local.num_experts, top_k=local.top_k,
            max_tokens_per_rank=tokens,
        )  # fmt: skip
        self.workspace = uniep.Workspace(cfg, None, device=device)
        backend: Any = self.workspace.backend
        way, sms, planner = backend.way, backend.sms, backend.planner
        while True:
            plan = planner.plan(case.ids_TK, case.weights_TK)
            if planner.fits():
                break
        rows, tables, peers, num_rows = plan.rows, plan.bundle, backend.peers(), plan.num_rows
        experts = uniep.weights.ExpertWeights((case.w13_e2FD,), (case.w2_eDF,), "stacked")
        used = planner.routing_plan(plan, tokens)
        end_e = used.expert_start_e1[1:]
        taken_N = torch.zeros(num_rows, dtype=torch.int64, device=device)
        taken_N[: used.num_rows] = used.row_source_N.long()
        pad_N1 = (taken_N < 0)[:, None]
        x_ND, dy_ND = (t[taken_N.clamp(min=0)].masked_fill(pad_N1, 0) for t in (case.x_TD, case.dy_TD))
        receive = backend.arena.views["receive"]

        def new(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        ffn, hidden, e = local.ffn, local.hidden, local.num_experts
        act_NF, dh_NH = (torch.randn_like(new(num_rows, width)).masked_fill(pad_N1, 0) for width in (ffn, 2 * ffn))
        h_2NF, made_NF, raw_NF = new(2, num_rows, ffn), new(num_rows, ffn), new(num_rows, ffn, dtype=torch.float32)
        y_ND, dw13, dw2 = new(num_rows, hidden), new(e, 2 * ffn, hidden), new(e, hidden, ffn)
        address_2N = new(2, num_rows + 2 * ROW_ALIGN, dtype=torch.int64)
        addresses = Addresses(*address_2N)
        x, dy = Tokens(case.x_TD, receive), Tokens(case.dy_TD, receive)
        launch.launch_row_addresses(x, dy, tables, backend.num_ranks, sms, addresses)
        in_place = {"slots": backend.slots, "scatter": False}
        how = rows.start_e1, rows.rows_e, planner.status, way.weight_gradient, sms
        w13, w2 = case.w13_e2FD, case.w2_eDF
        self.of: dict[str, tuple[Callable[[], object], Callable[[], Tensor], Callable[[], Tensor]]] = {
            "x @ W13, SwiGLU": (
                lambda: launch.launch_gate_up(x, None, tables, experts, peers, cfg, way.gate_up, sms, h_2NF, made_NF),
                lambda: grouped_mm(x_ND, w13.mT, end_e),
                lambda: torch.cat([*h_2NF], 1),
            ),
            "a @ W2": (
                lambda: launch.launch_down(act_NF, tables, experts, peers, cfg, way.down, sms, y_ND, **in_place),
                lambda: grouped_mm(act_NF, w2.mT, end_e),
                lambda: y_ND,
            ),
            "dO @ W2": (
                lambda: launch.launch_gathered_down_gradient(
                    dy, tables, experts, peers, way.down, sms, raw_NF, ALL_HERE
                ),
                lambda: grouped_mm(dy_ND, w2, end_e),
                lambda: raw_NF,
            ),
            "dH @ W13": (
                lambda: launch.launch_gate_up_gradient(
                    dh_NH, tables, experts, peers, cfg, way.down, sms, y_ND, **in_place
                ),
                lambda: grouped_mm(dh_NH, w13, end_e),
                lambda: y_ND,
            ),
            "dO^T @ a": (
                lambda: launch.launch_weight_gradient(addresses.dy_N, act_NF, 0, dw2, *how, transposed=False),
                lambda: grouped_mm(dy_ND.t(), act_NF, end_e),
                lambda: dw2,
            ),
            "dH^T @ x": (
                lambda: launch.launch_weight_gradient(
                    addresses.x_N, dh_NH, 0, dw13.view(e, -1, hidden), *how, transposed=True
                ),
                lambda: grouped_mm(dh_NH.t(), x_ND, end_e),
                lambda: dw13,
            ),
        }
        self.num_rows = used.num_rows
        self.quack: dict[str, Callable[[], Tensor]] = {}
        if quack_gemm is not None:
            start_e1 = used.expert_start_e1.int()
            operands = (
                (x_ND, w13.mT), (act_NF, w2.mT), (dy_ND, w2), (dh_NH, w13), (dy_ND.t(), act_NF), (dh_NH.t(), x_ND),
            )  # fmt: skip
            for name, (a, b) in zip(self.of, operands, strict=True):
                self.quack[name] = functools.partial(quack, a, b, start_e1)

    def tflop_of(self, name: str) -> float:
        """Of a product; those of W13 have 2F columns."""
        return self.tflop * (2 if "H" in name or "W13" in name else 1)

    def check(self, name: str) -> None:
        """Raise AssertionError where two sides differ by more than rounding."""
        own, other, left = self.of[name]
        own()
        mine = left()
        for theirs in (other(), *(self.quack[name]() for _ in range(name in self.quack))):
            rows = min(self.num_rows, len(mine))
            largest = theirs[:rows].abs().max().item()
            difference = (mine[:rows].float() - theirs[:rows].float()).abs().max().item()
            assert difference <= 2**-7 * largest, f"{name}: differs by {difference}, values up to {largest}"


def timed(products: Products, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row of the results."""
    products.check(name)
    own, other, _ = products.of[name]
    sides = {"uniep": own, "grouped_mm": other}
    if name in products.quack:
        sides["quack"] = products.quack[name]
    windows = timing.in_turn(sides, args.iters)
    back_to_back = timing.sustained_in_turn(sides, args.sustained_s)
    row: dict[str, Any] = {
        "product": name,
        "tflop": round(products.tflop_of(name), 4),
    }
    for side in sides:
        row[f"{side}_ms"] = round(statistics.median(windows[side]), 4)
        row[f"{side}_sustained_ms"] = round(statistics.median(back_to_back[side]), 4)
    return row


def of_shape(shape: Shape, args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows of all products of a shape, whose memory is free afterwards."""
    products = Products(shape, args.tokens, device)
    for name in products.of:
        yield {"shape": shape.name, **timed(products, name, args)}
    products.workspace.close()


def describe(row: dict[str, Any]) -> str:
    parts = []
    for load in ("", "_sustained"):
        own = row[f"uniep{load}_ms"]
        part = f"{own:.3f} ms, {row['tflop'] / own * 1e3:3.0f} TFLOP/s"
        for side in ("grouped_mm", "quack"):
            if (other := row.get(f"{side}{load}_ms")) is not None:
                part += f", {side} {other:6.3f} ({other / own:.2f}x)"
        parts.append(part)
    return f"{row['shape']:13s} {row['product']:16s} window {parts[0]}; sustained {parts[1]}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--shapes", default="qwen3-30b,dsv2-lite,qwen3-235b,deepseek-v3,mixtral-8x7b")
    arguments.add_argument("--tokens", type=int, default=8192, help="per rank")
    arguments.add_argument("--iters", type=int, default=20, help="window calls of each")
    arguments.add_argument("--sustained-s", type=float, default=0.4, help="of each, in parts, in turn")
    add_file_options(arguments)
    args = arguments.parse_args()
    if quack_gemm is None:
        print("without quack-kernels, which cannot be imported; pip install quack-kernels", file=sys.stderr)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    timing.setup(device, None)
    meta = of_run("products.py", device, args.commit)
    meta |= {"tokens": args.tokens, "experts_of": f"one of {RANKS} ranks"}
    found = []
    for shape in [parse_shape(name) for name in args.shapes.split(",")]:
        for row in of_shape(shape, args, device):
            found.append(row)
            print(describe(row), flush=True)
            if args.json:
                args.json.write_text(json.dumps({"meta": meta, "products": found}, indent=1) + "\n")
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
