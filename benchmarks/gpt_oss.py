"""Time a layer of GPT-OSS-20B's shape: hidden and ffn 2880, 32 experts, top-4, clamped swiglu, biases.

    torchrun --standalone --nproc-per-node=2 benchmarks/gpt_oss.py --json benchmarks/results/h200x2_gpt_oss.json
    torchrun --standalone --nproc-per-node=1 benchmarks/gpt_oss.py --json benchmarks/results/h200x1_gpt_oss.json

In turn: uniep; uniep with plain swiglu and no biases, which shows what these cost; and, on one GPU, transformers' own
experts by its grouped GEMMs ("grouped_mm"), with which uniep's y and dx are compared first.  A value is the slowest
rank's: window the median of `--samples` calls, sustained a mean (timing.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import timing
import uniep
from cases import Case, make_case, make_weights, parse_shape
from moe import DTYPES, add_run_options, of_run, relative_error
from uniep.shapes import Shape

LIMIT = 7.0
TOLERANCE = 0.02  # relative error of bf16 results that round at different places


class Layer:
    """`forward(leaves)` with what it differentiates, and the time of both."""

    def __init__(self, forward: Callable[[Sequence[Tensor]], Tensor], leaves: Sequence[Tensor], dy_TD: Tensor) -> None:
        self.run, self.dy_TD = forward, dy_TD
        self.leaves = [leaf.detach().requires_grad_() for leaf in leaves]

    def forward(self) -> Tensor:
        return self.run(self.leaves)

    def forward_backward(self) -> tuple[Tensor, ...]:
        y_TD = self.forward()
        return y_TD.detach(), *torch.autograd.grad(y_TD, self.leaves, self.dy_TD)


def of_uniep(case: Case, biases: Sequence[Tensor], workspace: uniep.Workspace) -> Layer:
    """biases: b13 and b2, or none."""

    def forward(leaves: Sequence[Tensor]) -> Tensor:
        named = dict(zip(("b13", "b2"), leaves[4:], strict=False))
        return uniep.moe(leaves[0], case.ids_TK, *leaves[1:4], workspace=workspace, **named)

    return Layer(forward, (case.x_TD, case.weights_TK, case.w13_e2FD, case.w2_eDF, *biases), case.dy_TD)


def of_transformers(case: Case, biases: Sequence[Tensor], shape: Shape) -> Layer:
    """Its own experts, with the same values in its layout: (E, D, 2F), gate and up interleaved."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    cfg = GptOssConfig(
        hidden_size=shape.hidden, intermediate_size=shape.ffn, num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k, swiglu_limit=LIMIT,
    )  # fmt: skip
    cfg._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = GptOssExperts(cfg)

    def interleaved(tensor: Tensor) -> Tensor:  # of (E, 2F, ...)
        return tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)

    values = {
        "gate_up_proj": interleaved(case.w13_e2FD).transpose(1, 2).contiguous(),
        "gate_up_proj_bias": interleaved(biases[0]).contiguous(),
        "down_proj": case.w2_eDF.transpose(1, 2).contiguous(),
        "down_proj_bias": biases[1],
    }

    def forward(leaves: Sequence[Tensor]) -> Tensor:
        given = dict(zip(values, leaves[2:], strict=True))
        return torch.func.functional_call(experts, given, (leaves[0], case.ids_TK, leaves[1].to(leaves[0].dtype)))

    return Layer(forward, (case.x_TD, case.weights_TK, *values.values()), case.dy_TD)


def compare(ours: Layer, theirs: Layer) -> dict[str, float]:
    """Relative differences of y and dx.  Raises AssertionError above TOLERANCE."""
    pairs = zip(("y", "dx"), ours.forward_backward(), theirs.forward_backward(), strict=False)
    apart = {name: relative_error(a, b) for name, a, b in pairs}
    assert max(apart.values()) < TOLERANCE, f"uniep and transformers differ: {apart}"
    return apart


def measured(layers: dict[str, Layer], direction: str, load: str, args: argparse.Namespace) -> dict[str, float]:
    """ms of each."""
    calls = {name: layer.forward if direction == "fwd" else layer.forward_backward for name, layer in layers.items()}
    for call in calls.values():
        for _ in range(3):
            call()
    if load == "window":
        return {name: round(statistics.median(ms), 4) for name, ms in timing.in_turn(calls, args.samples).items()}
    names = [*calls, *reversed(calls)]
    times = timing.max_over_ranks([timing.sustained(calls[name], args.sustained_s) for name in names])
    return {name: round((first + last) / 2, 4) for name, first, last in zip(calls, times, times[::-1], strict=False)}


def main(argv: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="2880x2880x32x4", help="a name or DxFxExK (default %(default)s)")
    made.add_argument("--tokens", default="2048,8192", help="per rank (default %(default)s)")
    made.add_argument("--samples", type=int, default=11, help="window calls of each (default %(default)s)")
    made.add_argument("--sustained-s", type=float, default=0.2, help="of one round (default %(default)s)")
    add_run_options(made)
    args = made.parse_args(argv)
    device, _ = timing.start_ranks(args.device, 600)
    rank, ranks, shape = dist.get_rank(), dist.get_world_size(), parse_shape(args.shape)
    tokens, dtype = [int(text) for text in args.tokens.split(",")], DTYPES[args.dtype]
    rows: list[dict[str, Any]] = []
    weights = make_weights(shape, rank, ranks, dtype, device)
    local, draw = shape.num_experts // ranks, torch.Generator().manual_seed(4000 + rank)
    biases = [torch.randn(local, n, generator=draw).to(device, dtype) for n in (2 * shape.ffn, shape.hidden)]
    usual = {"max_rows": shape.sync_free_rows(max(tokens)), "dtype": dtype}
    plain = shape.config(ranks, max(tokens), **usual)
    clamped = shape.config(
        ranks, max(tokens), **usual, bias=True, activation="swiglu_oai", activation_limit=LIMIT
    )  # fmt: skip
    how = {"device": device, "timeout_s": 120}
    with (
        uniep.Workspace(clamped, dist.group.WORLD, **how) as with_biases,
        uniep.Workspace(plain, dist.group.WORLD, **how) as without,
    ):
        for count in tokens:
            case = make_case(shape, count, "balanced", rank, weights)
            layers = {"uniep": of_uniep(case, biases, with_biases), "uniep, swiglu": of_uniep(case, (), without)}
            apart = {}
            if ranks == 1:
                layers["transformers"] = of_transformers(case, biases, shape)
                apart = compare(layers["uniep"], layers["transformers"])
            elif rank == 0:
                print("without transformers, which is compared on one GPU", flush=True)
            for direction in ("fwd", "fwd_bwd"):
                for load in ("window", "sustained"):
                    ms = measured(layers, direction, load, args)
                    rows.append({"tokens": count, "direction": direction, "load": load, "ms": ms, "apart": apart})
                    if rank == 0:
                        print(
                            f"T={count} {direction} {load}:", " | ".join(f"{n} {t}" for n, t in ms.items()), flush=True
                        )
            with_biases.check()
            without.check()
    if rank == 0 and args.json:
        meta = of_run("gpt_oss.py", device, args.commit) | {"shape": args.shape, "samples": args.samples}
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
