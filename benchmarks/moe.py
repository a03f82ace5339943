"""Time uniep and its peers on one expert-parallel MoE layer, interleaved in one process per GPU.

    torchrun --standalone --nproc-per-node=2 benchmarks/moe.py --json benchmarks/results/h200x2_forward.json

Every implementation gets the same inputs and weights.  Before timing, outputs and gradients are compared
with fp32 on a small case, and with each other at full size.  An implementation that fails is reported and
left out; the others go on.  Each measured value is the slowest rank's; a row is the median of samples, taken in turn
with all others'.  Results are written after every case.

Shapes are names or DxFxExK (hidden, ffn, experts, top-k), e.g. 2048x768x128x8.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import triton
from torch import Tensor

import timing
import uniep
from cases import ROUTINGS, Case, Shape, make_case, make_weights, parse_shape
from layers import UniEPCheckpoint, UniEPCompute, UniEPGraph, UniEPLayer, Workspaces, parse_groups
from peers import DeepEp, DeepEpLayer, Layer, Liger, LigerLayer, NcclLayer, PeerCompute
from results import best_peer, write
from uniep.reference import composition
from uniep.schedule import parse_schedule

DEFAULT_SHAPES = "qwen3-30b,dsv2-lite,qwen3-235b,deepseek-v3,mixtral-8x7b"
IMPLS = (
    "uniep", "uniep-default", "uniep-serial", "uniep-nccl", "uniep-compute", "uniep-groups",
    "nccl", "deepep", "deepep-nowait", "liger-cute", "peer-compute",
)  # fmt: skip
BY_NAME = (*IMPLS, "uniep-checkpoint", "uniep-graph", "uniep-shards")
OUTPUTS = ("y", "dx", "dweights", "dw13", "dw2")
TOLERANCE = 1e-2
PIECE = 2**26  # elements that are compared at once
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Result = TypeVar("Result")


class DeviceLostError(Exception):
    """A device no longer answers; nothing more can be measured in these processes."""


class Bench:
    """One run: the process group, the options, and the results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.started = args, time.perf_counter()
        self.device, self.control = timing.start_ranks(args.device, args.timeout_s)
        assert dist.group.WORLD is not None
        self.group: dist.ProcessGroup = dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.dtype = DTYPES[args.dtype]
        self.backward = "fwd_bwd" in args.directions
        self.deepep: DeepEp | None = None
        self.liger: Liger | None = None
        self.results: dict[str, Any] = {"meta": self.meta(), "checks": {}, "rows": []}

    def meta(self) -> dict[str, Any]:
        return {
            **of_run("moe.py", self.device, self.args.commit),
            "dtype": self.args.dtype,
            "weight_at": self.args.weight_at,
            "iters": self.args.iters,
        }

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.started:6.1f} s] {text}", flush=True)

    def write(self) -> None:
        if self.rank == 0 and self.args.json:
            write(self.args.json, self.results)

    def attempt(self, what: str, call: Callable[[], Result]) -> Result | None:
        """`call()`, or None on every rank (and the reason printed) if it fails on any."""
        error, lost, result = "", False, None
        try:
            result = call()
            timing.synchronize()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            if "active drivers" in error and not torch.cuda.is_available():  # Triton's words
                error = "it needs a GPU"
            try:
                timing.synchronize()
            except Exception:
                lost = True
        errors: list[tuple[str, bool]] = [("", False)] * self.ranks
        dist.all_gather_object(errors, (error, lost), group=self.control)
        if any(is_lost for _, is_lost in errors):
            raise DeviceLostError(
                f"{what}: " + "; ".join(f"rank {r}: {text}" for r, (text, _) in enumerate(errors) if text)
            )
        for rank, (text, _) in enumerate(errors):
            if text:
                self.say(f"  {what} left out, rank {rank}: {text[:500]}")
                return None
        return result

    # ------------------------------------------------------------------------------------------ inputs

    def weights(self, shape: Shape) -> tuple[Tensor, Tensor]:
        return make_weights(shape, self.rank, self.ranks, self.dtype, self.device)

    def most_rows(self, case: Case) -> int:
        """Routed rows of the busiest rank."""
        target = case.ids_TK // case.num_local
        counts = [float((target == rank).sum()) for rank in range(self.ranks)]
        total = torch.tensor(counts, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return int(total.max())

    # ---------------------------------------------------------------------------------- implementations

    @contextlib.contextmanager
    def layers(self, shape: Shape, tokens: int, most_rows: int, impls: list[str]) -> Iterator[dict[str, Layer]]:
        """Every implementation that can be made for this shape."""
        cfg = uniep.MoEConfig(
            hidden=shape.hidden,
            ffn=shape.ffn,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            max_tokens_per_rank=tokens,
            dtype=self.dtype,
            weight_at=self.args.weight_at,
        )
        worst = self.ranks * tokens * min(shape.top_k, shape.num_experts // self.ranks)
        max_rows = min(worst, max(most_rows, int(self.args.max_rows_factor * tokens * shape.top_k)))
        workspaces = Workspaces(cfg, max_rows, self.group, self.device, self.args.timeout_s)

        def make(impl: str) -> Layer:
            if impl == "nccl":
                return NcclLayer(self.group)
            if impl == "peer-compute":
                return PeerCompute(self.group)
            if impl.startswith("deepep"):
                assert self.deepep is not None
                return DeepEpLayer(self.deepep, wait=impl == "deepep")
            if impl == "liger-cute":
                assert self.liger is not None
                return LigerLayer(self.liger, self.group)
            kinds = {"uniep-compute": UniEPCompute, "uniep-checkpoint": UniEPCheckpoint, "uniep-graph": UniEPGraph}
            return kinds.get(impl, UniEPLayer)(workspaces.get(impl))

        made = {impl: self.attempt(impl, lambda impl=impl: make(impl)) for impl in impls}
        try:
            yield {impl: layer for impl, layer in made.items() if layer is not None}
        finally:
            made.clear()
            workspaces.close()

    def compare(
        self, layers: dict[str, Layer], case: Case, label: str, wanted: tuple[Tensor, ...] | None = None
    ) -> None:
        """Prepare every layer, and drop those whose outputs differ from `wanted`; without it, from `nccl`'s."""
        source, checks = "fp32", {}
        for impl in sorted(layers, key=lambda name: name != "nccl"):
            layer = layers[impl]

            def outputs(layer: Layer = layer) -> tuple[Tensor, ...]:
                layer.prepare(case, self.backward)
                got = layer.forward_backward(case) if self.backward else layer.forward(case)[:1]
                layer.check()
                return layer.joined(got)

            got = self.attempt(f"{label} {impl}", outputs)
            if got is None:
                del layers[impl]
            elif layer.compared and wanted is None:
                source, wanted = impl, got
            elif layer.compared and wanted is not None:
                errors = timing.max_over_ranks([relative_error(a, b) for a, b in zip(got, wanted, strict=False)])
                checks[impl] = {name: float(f"{error:.2e}") for name, error in zip(OUTPUTS, errors, strict=False)}
                if not max(errors) < TOLERANCE:
                    self.say(f"  {label} {impl} left out: relative errors to {source} {checks[impl]}")
                    del layers[impl]
        self.results["checks"][label] = {"against": source, **checks}
        worst = ", ".join(f"{impl} {max(errors.values()):.1e}" for impl, errors in checks.items())
        self.say(f"{label}: largest relative error to {source}: {worst}")

    def check_small(self, impls: list[str]) -> list[str]:
        """The implementations that equal plain fp32 on a small case with uneven routing (bounds are not compared)."""
        shape, tokens = self.small()
        weights = self.weights(shape)
        case = make_case(shape, tokens, "zipf", self.rank, weights)
        compared = [impl for impl in impls if not impl.endswith("-compute")]
        with self.layers(shape, tokens, self.most_rows(case), compared) as layers:
            self.compare(layers, case, "small", self.fp32(case))
            return [impl for impl in impls if impl in layers or impl not in compared]

    def small(self) -> tuple[Shape, int]:
        """The shape and the tokens of the small case."""
        if self.device.type == "cuda":
            return Shape("small", 512, 256, 8 * self.ranks, 4), 203
        return Shape("small", 64, 32, 4 * self.ranks, 2), 13

    def fp32(self, case: Case) -> tuple[Tensor, ...]:
        """This rank's part of the layer's outputs and gradients, computed in fp32 on the tokens of all ranks."""
        wanted = (case.x_TD, case.weights_TK, case.w13_e2FD, case.w2_eDF)
        leaves = [everyone(t, self.group).float().requires_grad_() for t in wanted]
        x_TD, weights_TK, w13, w2 = leaves
        y_TD = composition(x_TD, everyone(case.ids_TK, self.group), weights_TK, w13, w2)
        grads = torch.autograd.grad(y_TD, leaves, everyone(case.dy_TD, self.group).float())
        return tuple(t.detach().chunk(self.ranks)[self.rank] for t in (y_TD, *grads))

    # ------------------------------------------------------------------------------------------ timing

    def time(self, layers: dict[str, Layer], case: Case, direction: str, load: str) -> dict[str, list[float]]:
        """{impl: milliseconds}, the slowest rank's: samples of all in turn, each time in the opposite order.  Before a
        sample comes an untimed call, before the first one some more."""
        taken: dict[str, list[float]] = {impl: [] for impl in layers}
        for turn in range(self.args.iters):
            for impl in list(taken)[:: 1 if turn % 2 == 0 else -1]:
                call = self.call(layers[impl], case, direction)

                def measure(impl: str = impl, call: Callable[[], object] = call, turn: int = turn) -> float:
                    for _ in range(1 if turn else 4):
                        call()
                    ms = timing.sustained(call, self.args.sustained_s) if load == "sustained" else timing.window(call)
                    layers[impl].check()
                    return ms

                ms = self.attempt(f"{impl} {direction}", measure)
                if ms is None:
                    del taken[impl]
                else:
                    taken[impl].append(ms)
        return {impl: timing.max_over_ranks(times) for impl, times in taken.items()}

    @staticmethod
    def call(layer: Layer, case: Case, direction: str) -> Callable[[], object]:
        return lambda: layer.forward(case) if direction == "fwd" else layer.forward_backward(case)

    def phases(self, layer: Layer, case: Case, direction: str) -> dict[str, float]:
        """Median milliseconds of each phase that the layer reports, this rank's; one that comes again has a number."""
        taken: dict[str, list[float]] = {}
        call = self.call(layer, case, direction)
        try:
            for _ in range(8):
                layer.phases = []
                before = timing.aligned()
                call()
                timing.synchronize()
                times: Counter[str] = Counter()
                for name, event in layer.phases or ():
                    times[name] += 1
                    label = name if times[name] == 1 else f"{name} {times[name]}"
                    taken.setdefault(label, []).append(before.elapsed_time(event))
                    before = event
        finally:
            layer.phases = None
        return {name: statistics.median(times) for name, times in taken.items()}

    def memory(self, layer: Layer, case: Case, direction: str) -> dict[str, float]:
        """MiB on the device beyond what was there before, this rank's: the most of one call, and what a forward saves
        for its backward; {} on CPU and of captured calls."""
        if self.device.type != "cuda" or isinstance(layer, UniEPGraph):  # a graph keeps its memory
            return {}
        timing.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.call(layer, case, direction)()
        timing.synchronize()
        found = {"peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}
        if direction == "fwd_bwd":
            y_TD, saved = layer.forward(case)
            timing.synchronize()
            found["saved_mib"] = (torch.cuda.memory_allocated() - before - y_TD.nbytes) / 2**20
            del y_TD, saved
        return found

    def run_case(self, layers: dict[str, Layer], case: Case, key: dict[str, Any], shape: Shape) -> None:
        """Time one (shape, tokens, routing, load, direction) and record a row per implementation."""
        direction, rows = key["direction"], []
        for impl, times in self.time(layers, case, direction, key["load"]).items():
            ms = statistics.median(times)
            row = {**key, "impl": impl, "ms": ms, "ms_min": min(times), "ms_max": max(times)}
            row = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
            row["tflops"] = round(shape.tflop(key["tokens"], direction) / ms * 1e3, 1)
            layer = layers[impl]
            memory = self.attempt(f"{impl} memory", lambda layer=layer: self.memory(layer, case, direction))
            if memory:
                most = timing.max_over_ranks(list(memory.values()))
                row |= {name: round(mib, 1) for name, mib in zip(memory, most, strict=True)}
            if self.args.phases:
                parts = self.attempt(f"{impl} phases", lambda layer=layer: self.phases(layer, case, direction))
                if parts:
                    slowest = timing.max_over_ranks(list(parts.values()))
                    row["phases"] = {name: round(value, 4) for name, value in zip(parts, slowest, strict=True)}
                    self.say(f"  {impl}: " + ", ".join(f"{name} {value:.3f}" for name, value in row["phases"].items()))
            rows.append(row)
        self.results["rows"] += rows
        self.write()
        self.say(describe(key, rows))

    def late(self) -> bool:
        return timing.any_rank(time.perf_counter() - self.started > self.args.budget_s)

    def run(self) -> None:
        args = self.args
        shapes = [parse_shape(name) for name in args.shapes.split(",")]
        impls = [name for name in args.impl.split(",") if args.deepep or not name.startswith("deepep")]
        impls = [name for name in impls if args.liger or name != "liger-cute"]
        self.say(f"{self.results['meta']}")
        if any(name.startswith("deepep") for name in impls):
            hidden = max(shape.hidden for shape in shapes)
            self.deepep = self.attempt("deepep", lambda: DeepEp(args.deepep, self.group, hidden))
            if self.deepep is None:
                impls = [name for name in impls if not name.startswith("deepep")]
        if "liger-cute" in impls:
            small, few = self.small()
            tokens = max(few, *(int(text) for text in args.tokens.split(",")))
            given = args.liger, {"ep": self.group}, self.device, tokens, [small, *shapes]
            self.liger = self.attempt("liger-cute", lambda: Liger(*given))
            impls = [name for name in impls if self.liger is not None or name != "liger-cute"]
        if args.check:
            impls = self.check_small(impls)
        for shape in shapes:
            if shape.num_experts % self.ranks:
                self.say(f"{shape.name} left out: {shape.num_experts} experts do not divide over {self.ranks} ranks")
                continue
            weights = None
            for tokens in (int(text) for text in args.tokens.split(",")):
                if self.late():
                    self.say(f"stopped after the budget of {args.budget_s:.0f} s")
                    return
                weights = weights or self.weights(shape)
                self.run_tokens(shape, tokens, weights, impls)
                self.free()

    def run_tokens(self, shape: Shape, tokens: int, weights: tuple[Tensor, Tensor], impls: list[str]) -> None:
        args = self.args
        cases = {routing: make_case(shape, tokens, routing, self.rank, weights) for routing in args.routing.split(",")}
        most_rows = max(self.most_rows(case) for case in cases.values())
        impls = list(dict.fromkeys([*impls, *args.points.get(f"{shape.name}/{tokens}", ())]))
        with self.layers(shape, tokens, most_rows, impls) as layers:
            for routing, case in cases.items():
                self.compare(layers, case, f"{shape.name} T={tokens} {routing}")
                if self.deepep is not None:
                    self.results["meta"]["deepep"] = {
                        f"D={d} T={t}": dict(zip(("sms", "dispatch_chunk", "combine_chunk"), choice, strict=True))
                        for (d, t), choice in self.deepep.choices.items()
                    }
                for load in args.load.split(","):
                    for direction in args.directions.split(","):
                        if not self.late():
                            key = {"shape": shape.name, "tokens": tokens, "routing": routing}
                            self.run_case(layers, case, {**key, "load": load, "direction": direction}, shape)

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        for peer in (self.deepep, self.liger):
            if peer is not None:
                peer.close()
        dist.barrier(self.control)
        dist.destroy_process_group()


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted|; infinite where `got` is not finite.  In pieces, as gradients are large."""
    pieces = 1 + wanted.numel() // PIECE
    difference = size = 0.0
    for part, exact in zip(got.flatten().chunk(pieces), wanted.flatten().chunk(pieces), strict=True):
        difference += float((part.float() - exact.float()).square().sum())
        size += float(exact.float().square().sum())
    return (difference / max(size, 1e-30)) ** 0.5 if math.isfinite(difference) else float("inf")


def describe(key: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """One progress line: every time, and uniep's speedup over the best peer."""
    line = f"{key['shape']} T={key['tokens']} {key['routing']} {key['direction']} {key['load']}: "
    line += " | ".join(f"{row['impl']} {row['ms']:.3f}" for row in rows)
    ms = {row["impl"]: row["ms"] for row in rows}
    best = best_peer(ms)
    if best and "uniep" in ms:
        line += f" => {ms[best] / ms['uniep']:.3f}x of {best}"
    if "uniep" in ms and "uniep-compute" in ms:
        line += f", {ms['uniep'] / ms['uniep-compute']:.3f} of own compute"
    return line


def everyone(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks, one after the other."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def add_file_options(made: argparse.ArgumentParser) -> None:
    """What every benchmark takes: --json, --commit."""
    made.add_argument("--json", metavar="FILE", type=Path, help="results file")
    made.add_argument("--commit", help="recorded in the results where there is no git checkout")


def add_run_options(made: argparse.ArgumentParser) -> None:
    """What most benchmarks of layers take: --dtype and --device, too."""
    made.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add_file_options(made)


def of_run(script: str, device: torch.device, told: str | None, ranks: int | None = None) -> dict[str, Any]:
    """What every result file says of its run.  told: the commit where there is no checkout.  ranks: this group's."""
    ranks = ranks or dist.get_world_size()
    return {
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "gpus": ranks, "ep": ranks,
        "torch": torch.__version__, "triton": triton.__version__, "commit": told or commit(),
        "command": shlex.join([f"benchmarks/{script}", *sys.argv[1:]]), "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }  # fmt: skip


def commit() -> str:
    """This checkout's commit, with "+" if files differ from it; UNIEP_COMMIT where there is no checkout."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        head = git("rev-parse", "--short=10", "HEAD")
        return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("UNIEP_COMMIT", "unknown")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}  ({self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    made = Parser(prog="moe.py", description=__doc__, formatter_class=raw)
    made.add_argument("--shape", "--shapes", dest="shapes", default=DEFAULT_SHAPES, help="a list (default %(default)s)")
    made.add_argument("--tokens", default="8192", help="tokens per rank, a list (default %(default)s)")
    made.add_argument("--routing", default="balanced", help="balanced, zipf (default %(default)s)")
    made.add_argument("--directions", default="fwd,fwd_bwd", help="(default %(default)s)")
    made.add_argument("--load", default="window", help="window, sustained (default %(default)s)")
    made.add_argument("--impl", default=",".join(IMPLS), help="(default: all that are there)")
    made.add_argument(
        "--points", metavar="FILE", type=Path, help="JSON, {SHAPE/TOKENS: [IMPL, ...]}: also these, in that case"
    )
    made.add_argument("--iters", type=int, default=11, help="samples of an implementation (default %(default)s)")
    made.add_argument(
        "--sustained-s", type=float, default=0.1, help="length of one sample under sustained load (default %(default)s)"
    )
    made.add_argument(
        "--budget-s", type=float, default=float("inf"), help="start no further case after this many seconds"
    )
    made.add_argument(
        "--deepep", metavar="DIR", help="folder that holds an importable deep_ep; without it DeepEP is left out"
    )
    made.add_argument(
        "--liger",
        metavar="DIR",
        help="folder that holds an importable liger_cute_kernels; without it liger-cute is left out",
    )
    made.add_argument("--phases", action="store_true", help="also take every layer's phase breakdown")
    made.add_argument(
        "--max-rows-factor",
        type=float,
        default=2.0,
        help="sync-free: max_rows over the mean rows per rank (default %(default)s)",
    )
    made.add_argument("--weight-at", choices=("output", "activation"), default="output")
    made.add_argument("--no-check", dest="check", action="store_false", help="skip the comparison with fp32")
    made.add_argument("--timeout-s", type=float, default=120, help="longest wait for a peer (default %(default)s)")
    add_run_options(made)
    return made


def options(argv: list[str] | None) -> argparse.Namespace:
    """Parsed and checked arguments; a bad one ends the program before any process waits for another."""
    made = parser()
    args = made.parse_args(argv)
    try:
        for name in args.shapes.split(","):
            parse_shape(name)
        args.points = json.loads(args.points.read_text()) if args.points else {}
        for name in itertools.chain(args.impl.split(","), *args.points.values()):
            base, _, fields = name.partition("@")
            if fields and (base == "uniep" or parse_groups(base, 1)):
                parse_schedule(fields, uniep.Schedule())
            elif name not in BY_NAME and not parse_groups(name, 1):
                raise ValueError(
                    f"implementation {name!r} is unknown; use {', '.join(BY_NAME)}, uniep-groupsN or uniep@FIELD=VALUE"
                )
        for option, known in (
            ("routing", ROUTINGS),
            ("directions", ("fwd", "fwd_bwd")),
            ("load", ("window", "sustained")),
        ):
            for value in getattr(args, option).split(","):
                if value not in known:
                    raise ValueError(f"--{option} {value!r} is unknown; use {', '.join(known)}")
    except (ValueError, OSError) as error:
        made.error(str(error))
    return args


def main(argv: list[str] | None = None) -> None:
    bench = Bench(options(argv))
    try:
        bench.run()
    except DeviceLostError as lost:
        # Peers may hang on this device: leave at once; what was measured is in the file.
        print(f"rank {bench.rank}: stopped, {lost}", flush=True)
        bench.write()
        os._exit(1)
    bench.say("done")
    bench.close()


if __name__ == "__main__":
    main()
