"""Train one small MoE model in transformers with its own experts and with uniep's: the same losses, at what speed?

    torchrun --standalone --nproc-per-node=2 benchmarks/hf.py --json benchmarks/results/h200x2_hf.json
    torchrun --standalone --nproc-per-node=1 benchmarks/hf.py --json benchmarks/results/h200x1_hf.json

The model has the layers of Qwen3-30B-A3B (hidden 2048, 128 experts of width 768, top-8), but fewer of them and a small
vocabulary.  Weights are random, the same in each run, and so are the tokens: a walk that the model can learn.  On one
GPU transformers' own experts are its grouped GEMMs ("grouped_mm"), on several its expert parallelism ("all_to_all").

Runs take turns of `--turn` steps, so that they share what the machine does meanwhile.  A step is forward, backward and
AdamW, timed on the device; tokens/s are all ranks' tokens over the slowest rank's median step, behind `--warm-up`.
Losses are rank 0's, compared by their largest difference: transformers adds experts in bf16, uniep in fp32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import timing
from cases import Shape, parse_shape
from moe import DTYPES, add_run_options, of_run
from uniep.integrations import hf

NOISE = 0.1  # share of tokens that are drawn anew


def config(args: argparse.Namespace, shape: Shape) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=args.vocabulary, hidden_size=shape.hidden, intermediate_size=3 * shape.ffn,
        moe_intermediate_size=shape.ffn, num_experts=shape.num_experts, num_experts_per_tok=shape.top_k,
        num_hidden_layers=args.layers, head_dim=shape.hidden // args.heads, num_attention_heads=args.heads,
        num_key_value_heads=max(args.heads // 4, 1), norm_topk_prob=True, use_cache=False,
    )  # fmt: skip


def tokens(args: argparse.Namespace, rank: int, step: int) -> Tensor:
    """(batch, length) int64: each token three times the one before plus one, or drawn anew."""
    draw = torch.Generator().manual_seed(rank * 1_000_003 + step)
    shape = args.batch, args.length
    fresh, anew = torch.randint(args.vocabulary, shape, generator=draw), torch.rand(shape, generator=draw) < NOISE
    for place in range(1, args.length):
        follows = (3 * fresh[:, place - 1] + 1) % args.vocabulary
        fresh[:, place] = torch.where(anew[:, place], fresh[:, place], follows)
    return fresh


class Run:
    """One way of running the experts: its model and optimizer, its losses and times."""

    def __init__(self, name: str, folder: str, args: argparse.Namespace, device: torch.device) -> None:
        self.name, self.device = name, device
        self.losses: list[Tensor] = []
        self.events: list[tuple[Any, Any]] = []
        dtype, ranks = DTYPES[args.dtype], dist.get_world_size()
        if ranks > 1:
            how = {"distributed_config": DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation=name)}
        else:
            how = {"experts_implementation": name}
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **how).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=ranks == 1)

    def step(self, ids: Tensor) -> None:
        start = timing.record_event()
        loss = self.model(input_ids=ids, labels=ids).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.events.append((start, timing.record_event()))
        self.losses.append(loss.detach())

    def times(self) -> list[float]:
        timing.synchronize()
        return timing.max_over_ranks([start.elapsed_time(end) for start, end in self.events])


def trained(args: argparse.Namespace, device: torch.device, folder: str) -> dict[str, Run]:
    rank = dist.get_rank()
    own = "all_to_all" if dist.get_world_size() > 1 else "grouped_mm"
    runs = {name: Run(name, folder, args, device) for name in (own, "uniep")}
    hf.status(runs["uniep"].model).require_all()
    started = time.monotonic()
    for first in range(0, args.steps, args.turn):
        for run in runs.values():
            for step in range(first, min(first + args.turn, args.steps)):
                run.step(tokens(args, rank, step).to(device))
            timing.synchronize()
        if rank == 0:
            done = min(first + args.turn, args.steps)
            losses = ", ".join(f"{name} {run.losses[-1]:.4f}" for name, run in runs.items())
            print(f"[{time.monotonic() - started:5.1f} s] step {done} of {args.steps}: loss {losses}", flush=True)
    return runs


def main(argv: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="2048x768x128x8", help="of MoE layers, name or DxFxExK (default %(default)s)")
    made.add_argument("--layers", type=int, default=4, help="(default %(default)s)")
    made.add_argument("--heads", type=int, default=16, help="of attention (default %(default)s)")
    made.add_argument("--vocabulary", type=int, default=8192, help="(default %(default)s)")
    made.add_argument("--batch", type=int, default=4, help="sequences per rank and step (default %(default)s)")
    made.add_argument("--length", type=int, default=2048, help="of a sequence, in tokens (default %(default)s)")
    made.add_argument("--steps", type=int, default=200, help="(default %(default)s)")
    made.add_argument("--turn", type=int, default=20, help="steps of a run before the other's (default %(default)s)")
    made.add_argument("--warm-up", type=int, default=10, help="steps that are not timed (default %(default)s)")
    add_run_options(made)
    args = made.parse_args(argv)
    if args.steps <= args.warm_up:
        made.error(f"--steps {args.steps} leaves none to time; more than --warm-up {args.warm_up} are needed")
    shape = parse_shape(args.shape)
    device, _ = timing.start_ranks(args.device, 600)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    registration = hf.register(max_tokens_per_rank=args.batch * args.length)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        if rank == 0:
            torch.manual_seed(0)
            with device:  # a processor draws 2.5e9 numbers for a minute
                made_here = Qwen3MoeForCausalLM(config(args, shape)).to(DTYPES[args.dtype])
            made_here.save_pretrained(own)
            del made_here
        dist.barrier()
        runs = trained(args, device, folder[0])
        dist.barrier()
    rows = []
    for name, run in runs.items():
        ms = statistics.median(run.times()[args.warm_up :])
        losses = [round(float(loss), 6) for loss in run.losses]
        per_s = args.batch * args.length * ranks / ms * 1e3
        rows.append({"experts": name, "step_ms": round(ms, 3), "tokens_per_s": round(per_s), "losses": losses})
    theirs, ours = (row["losses"] for row in rows)
    apart = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    if rank == 0:
        for row in rows:
            print(f"{row['experts']}: {row['step_ms']} ms a step, {row['tokens_per_s']} tokens/s, loss "
                  f"{row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}")  # fmt: skip
        print(f"speedup {rows[0]['step_ms'] / rows[1]['step_ms']:.3f}; losses differ by at most {apart:.2g}")
        if args.json:
            wanted = ("shape", "layers", "heads", "vocabulary", "batch", "length", "steps", "turn", "warm_up", "dtype")
            meta = of_run("hf.py", device, args.commit) | {"transformers": transformers.__version__}
            meta |= {name: getattr(args, name) for name in wanted}
            args.json.write_text(json.dumps({"meta": meta, "rows": rows, "apart": apart}, indent=1) + "\n")
    registration.free()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
