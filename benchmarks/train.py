"""Train a GPT-like MoE language model under several schedules and backends: the same bits, at what speed?

    torchrun --standalone --nproc-per-node=2 benchmarks/train.py --json benchmarks/results/h200x2_train.json

Every run trains the same model from the same start on the same text, the sources of Python's standard library:

    fused   the default schedule of the device's own backend
    serial  the same tiles with every stage waiting for the one before: the reference
    nccl    ordinary collectives of the process group

Losses of all steps, and all parameters after the last one, are compared bit for bit with those of `serial`.
A step is timed from a synchronised start to a synchronised end; its time is the slowest rank's, and
tokens/s come from the median over the steps after the first WARM_UP.  The exit status is 1 if a bit differs,
or if a run that should be compared has made no step.  Results are written after every run, and a picture
of them beside them.

Dense layers are fp32 with TF32 products on GPUs, experts bf16, AdamW fp32: see uniep.cli.model.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton

import timing
import uniep
from moe import commit
from uniep.cli import launch
from uniep.cli.bits import digest
from uniep.cli.launch import World
from uniep.cli.model import NUM_SHARDS, ModelConfig, Trainer
from uniep.cli.pictures import BLUE, MUTED, ORANGE, WIDTH, figure_style, title
from uniep.cli.text import Text
from uniep.memory import plan_memory
from uniep.schedule import Schedule, default_schedule
from uniep.workspace import choose_backend

RUNS = ("fused", "serial", "nccl")
REFERENCE = "serial"
WARM_UP = 10
COLORS = {"fused": BLUE, "serial": MUTED, "nccl": ORANGE}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run: what executes the MoE layers.  Speed only."""

    name: str
    backend: str
    schedule: Schedule

    @classmethod
    def named(cls, name: str, device: torch.device, cfg: uniep.MoEConfig, ep_size: int) -> Run:
        backend = choose_backend("nccl" if name == "nccl" else "auto", device)
        schedule = default_schedule(backend, cfg, ep_size)
        if name == "serial":
            schedule = dataclasses.replace(schedule, overlap="serial", tile_order="natural")
        return cls(name, backend, schedule)


class Bench:
    """All runs, and the results so far."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        self.args, self.world, self.started = args, world, time.perf_counter()
        self.cfg = ModelConfig(
            layers=args.layers,
            heads=args.heads,
            context=args.context,
            sequences_per_shard=args.sequences,
            hidden=args.hidden,
            ffn=args.ffn,
            num_experts=args.experts,
            top_k=args.top_k,
        )
        self.group = world.first(world.size)
        self.text = Text()
        self.cuda = world.device.type == "cuda"
        timing.setup(world.device, world.control)
        if self.cuda:
            torch.set_float32_matmul_precision("high")  # fp32 products without TF32 would be most of a step
        self.results: dict[str, Any] = {"meta": self.meta(), "runs": [], "equal": {}}

    @property
    def tokens(self) -> int:
        """Of one step, over all ranks."""
        return NUM_SHARDS * self.cfg.tokens_per_shard

    def meta(self) -> dict[str, Any]:
        return {
            "card": torch.cuda.get_device_name() if self.cuda else "CPU",
            "gpus": self.world.size,
            "ep": self.world.size,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": self.args.commit or commit(),
            "command": command(sys.argv[1:]),
            "date": time.strftime("%Y-%m-%d %H:%M:%S"),
            "steps": self.args.steps,
            "tokens_per_step": self.tokens,
            "learning_rate": self.args.learning_rate,
            "dense_products": "tf32" if self.cuda else "fp32",
            "model": {**dataclasses.asdict(self.cfg), "dtype": str(self.cfg.dtype).removeprefix("torch.")},
        }

    def say(self, text: str) -> None:
        self.world.console.print(f"[{time.perf_counter() - self.started:6.1f} s] {text}", markup=False)

    def late(self) -> bool:
        return time.perf_counter() - self.started > self.args.budget_s

    def write(self) -> None:
        if self.world.rank == 0 and self.args.json:
            self.args.json.parent.mkdir(parents=True, exist_ok=True)
            self.args.json.write_text(json.dumps(self.results, indent=1) + "\n")

    def run(self) -> bool:
        """Train everything, compare, draw.  Returns whether all runs were compared and are equal."""
        for name in self.args.runs:
            if timing.any_rank(self.late()):
                self.say(f"{name} left out: the budget of {self.args.budget_s:g} s is spent")
                continue
            run = Run.named(name, self.world.device, self.cfg.moe(self.world.size), self.world.size)
            self.results["runs"].append(self.train(run))
            self.results["equal"] = {other: not why for other, why in differences(self.results["runs"]).items()}
            self.write()
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()
        same = self.verdict()
        if self.world.rank == 0 and self.args.json and self.results["runs"]:
            try:
                draw(self.results, self.args.json.with_suffix(".png"))
            except ModuleNotFoundError as missing:
                self.say(f"no picture: {missing}; --draw {self.args.json.name} makes it elsewhere")
        return same

    def train(self, run: Run) -> dict[str, Any]:
        """One run from the start.  Returns its record, the same on every rank."""
        args, world = self.args, self.world
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        moe = self.cfg.moe(world.size)
        with uniep.Workspace(
            moe, self.group, device=world.device, backend=run.backend, schedule=run.schedule, timeout_s=args.timeout_s
        ) as workspace:
            trainer = Trainer(self.cfg, workspace, args.learning_rate)
            millions = round(trainer.num_parameters / 1e6, 1)
            self.results["meta"]["model"]["parameters_millions"] = millions
            self.say(f"{run.name}: {millions} M parameters, backend {run.backend}, schedule {run.schedule.name}")
            workspace.prepare()
            self.say(f"{run.name}: ready")
            losses, times = self.steps(run, trainer)
            workspace.check()
            parameters = hashlib.sha256("".join(digest(p) for p in trainer.model.parameters()).encode()).hexdigest()
            record: dict[str, Any] = {
                "run": run.name,
                "backend": run.backend,
                "schedule": dataclasses.asdict(run.schedule),
                "steps": len(losses),
                **speed(times, self.tokens),
            }
            if self.cuda:
                peak = torch.cuda.max_memory_allocated() / 2**20
                record["peak_mib"] = round(timing.max_over_ranks([peak])[0], 1)
        plan = plan_memory(moe, world.size, backend=run.backend, schedule=run.schedule)
        record["shared_mib"] = round(plan.total_bytes("shared") / 2**20, 2)  # outside PyTorch's allocator
        record["losses"] = [round(loss, 6) for loss in losses]
        record["losses_hex"] = [loss.hex() for loss in losses]
        record["parameters_sha256"] = world.gather(parameters)
        self.say(f"{run.name}: {describe(record)}")
        return record

    def steps(self, run: Run, trainer: Trainer) -> tuple[list[float], list[float]]:
        """(loss, seconds of the slowest rank) of every step, until the budget is spent."""
        args, cfg = self.args, self.cfg
        losses: list[float] = []
        times: list[float] = []
        for step in range(args.steps):
            batch = self.text.batch(step, NUM_SHARDS, cfg.sequences_per_shard, cfg.context)
            for parameters in trainer.optimizer.param_groups:
                parameters["lr"] = args.learning_rate * rate(step, args.steps)
            timing.synchronize()
            start = time.perf_counter()
            loss = trainer.step(batch)
            timing.synchronize()
            # Every rank gets the same answer, so that all leave in the same step.
            seconds, late = timing.max_over_ranks([time.perf_counter() - start, float(self.late())])
            losses.append(float(loss))
            times.append(seconds)
            if step % max(1, args.steps // 10) == 0 or step == args.steps - 1 or late:
                self.say(
                    f"{run.name}: step {step + 1:>4} of {args.steps}  loss {losses[-1]:.4f}  "
                    f"{self.tokens / seconds:,.0f} tokens/s"
                )
            if late:
                self.say(f"{run.name}: stopped, the budget of {args.budget_s:g} s is spent")
                break
        return losses, times

    def verdict(self) -> bool:
        """Say how the runs compare.  The same answer on every rank."""
        say, runs, names = self.say, self.results["runs"], self.args.runs
        wrong = differences(runs)
        done = {run["run"]: run["steps"] for run in runs}
        against = reference(runs)["run"] if runs else REFERENCE
        for name, why in wrong.items():
            equal = f"identical, every bit of {min(done[name], done[against])} steps"
            say(f"{name} and {against}: " + (f"NOT identical, {why}" if why else equal))
        missing = [name for name in names if name not in done]
        if missing:
            say(f"not compared: {', '.join(missing)}")
        tokens_per_s = {run["run"]: run["tokens_per_s"] for run in runs}
        if fused := tokens_per_s.pop("fused", None):
            for name, value in tokens_per_s.items():
                say(f"tokens/s of fused over {name}: {fused / value:.3f}x")
        broken = [run["run"] for run in runs if not all(map(math.isfinite, run["losses"]))]
        if broken:
            say(f"the loss is not finite in {', '.join(broken)}; lower --learning-rate")
        return not timing.any_rank(bool(any(wrong.values()) or missing or broken))


def rate(step: int, steps: int) -> float:
    """Learning rate as a share of its peak: a short warm-up, then a cosine down to a tenth."""
    return min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def speed(times: Sequence[float], tokens: int) -> dict[str, float]:
    """Median, fastest and slowest step after the warm-up; after half of the steps, if they are few."""
    steady = times[min(WARM_UP, len(times) // 2) :]
    median = statistics.median(steady)
    return {
        "tokens_per_s": round(tokens / median, 1),
        "step_ms": round(median * 1e3, 3),
        "step_ms_min": round(min(steady) * 1e3, 3),
        "step_ms_max": round(max(steady) * 1e3, 3),
    }


def describe(record: dict[str, Any]) -> str:
    losses = record["losses"]
    memory = (
        f", peak {record['peak_mib']:,.0f} MiB + {record['shared_mib']:,.0f} shared" if "peak_mib" in record else ""
    )
    return (
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {record['steps']} steps, {record['tokens_per_s']:,.0f} tokens/s, "
        f"{record['step_ms']:.2f} ms per step ({record['step_ms_min']:.2f} to {record['step_ms_max']:.2f}){memory}"
    )


def reference(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run that the others are compared with: `serial`, or the first where there is none."""
    return next((run for run in runs if run["run"] == REFERENCE), runs[0])


def differences(runs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """For each run but the reference: where its bits first differ, or "".

    Of runs that the budget has cut at different steps, the steps that both have are compared.
    """
    found: dict[str, str] = {}
    for run in runs:
        base = reference(runs)
        if run is base:
            continue
        pairs = list(zip(run["losses_hex"], base["losses_hex"], strict=False))
        step = next((step for step, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        why = ""
        if step is not None:
            mine, theirs = pairs[step]
            why = f"first in the loss of step {step + 1}: {mine} and {theirs}"
        elif run["steps"] == base["steps"] and run["parameters_sha256"] != base["parameters_sha256"]:
            why = "losses are, but not the parameters after the last step"
        found[run["run"]] = why
    return found


def command(argv: Sequence[str]) -> str:
    """The command line without this machine's folders."""

    def local(argument: str) -> str:
        name, equals, value = argument.rpartition("=")
        return name + equals + (Path(value).name if Path(value).is_absolute() else value)

    return shlex.join(["benchmarks/train.py", *map(local, argv)])


def draw(results: dict[str, Any], out: Path) -> None:
    """The loss of every run in one plot, and tokens/s beside it."""
    plt = figure_style()
    meta, runs = results["meta"], results["runs"]
    model = meta["model"]
    figure, (curve, bars) = plt.subplots(
        2, figsize=(WIDTH, 6.4), layout="constrained", gridspec_kw={"height_ratios": (3, 1)}
    )
    against = reference(runs)["run"]
    for number, run in enumerate(sorted(runs, key=lambda run: run["run"] != against)):
        # The reference is a wide line; those that equal it are dashes on top of it, side by side.
        style: Any = {"linewidth": 1.6, "linestyle": (4 * number, (4, 4))}
        if number == 0:
            style = {"linewidth": 5, "alpha": 0.45}
        note = {True: f", equal to {against} in every bit", False: f", NOT equal to {against}"}
        label = run["run"] + note.get(results["equal"].get(run["run"]), "")
        curve.plot(range(1, run["steps"] + 1), run["losses"], color=COLORS[run["run"]], label=label, **style)
    curve.set(xlabel="optimizer step", ylabel="cross entropy (nats per byte)")
    curve.grid(axis="y", linewidth=0.8)
    curve.legend()
    for number, run in enumerate(runs):
        bars.barh(run["run"], run["tokens_per_s"], 0.6, color=COLORS[run["run"]])
        bars.text(run["tokens_per_s"], number, f"{run['tokens_per_s']:,.0f} ", ha="right", va="center", color="white")
    bars.invert_yaxis()
    bars.set_xlabel("tokens/s")
    bars.xaxis.set_major_formatter(lambda value, _: f"{value / 1e3:g}k")
    experts = f"{model['num_experts']} {model['dtype']} experts, top-{model['top_k']}"
    what = f"{model['parameters_millions']:g} M parameters, {model['layers']} layers, {experts}"
    machine = f"{meta['gpus']}x {meta['card'].removeprefix('NVIDIA ')}, EP={meta['ep']}"
    source = f"commit {meta['commit']}, {meta['date'][:10]}"
    title(
        figure,
        f"Training a MoE transformer on {machine}",
        f"{what}; {meta['tokens_per_step']:,} tokens per step; {source}",
    )
    figure.savefig(out)
    plt.close(figure)


def options(argv: list[str] | None) -> argparse.Namespace:
    """Parsed and checked arguments; a bad one ends the program before any process waits for another."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog="train.py", description=__doc__, formatter_class=raw)
    made.add_argument("--json", type=Path, help="results file, rewritten after every run; the picture lies beside it")
    made.add_argument("--runs", default=",".join(RUNS), help="(default %(default)s)")
    made.add_argument("--steps", type=int, default=200, help="optimizer steps of each run (default %(default)s)")
    made.add_argument("--learning-rate", type=float, default=6e-4, help="its peak (default %(default)s)")
    sizes = {
        "layers": 8, "heads": 8, "context": 512, "sequences": 16, "hidden": 1024, "ffn": 512, "experts": 32, "top-k": 4,
    }  # fmt: skip
    for name, size in sizes.items():
        what = {"sequences": f"of one of the {NUM_SHARDS} shards of a batch "}.get(name, "")
        made.add_argument(f"--{name}", type=int, default=size, help=f"{what}(default %(default)s)")
    made.add_argument("--budget-s", type=float, default=float("inf"), help="stop after the step that passes this time")
    made.add_argument("--timeout-s", type=float, default=120, help="longest wait for a peer (default %(default)s)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--commit", help="recorded in the results where there is no git checkout")
    made.add_argument("--draw", type=Path, metavar="FILE", help="only draw the picture of a results file")
    args = made.parse_args(argv)
    args.runs = args.runs.split(",")
    if unknown := [name for name in args.runs if name not in RUNS]:
        made.error(f"--runs {unknown[0]!r} is unknown; use {', '.join(RUNS)}")
    if args.steps < 1:
        made.error(f"--steps is {args.steps}; it must be at least 1")
    if args.hidden % args.heads:
        made.error(f"--hidden {args.hidden} is not a multiple of --heads {args.heads}")
    if args.draw is None and not launch.under_torchrun():
        made.error("start it with torchrun --standalone --nproc-per-node=2 benchmarks/train.py ...")
    return args


def main(argv: list[str] | None = None) -> int:
    args = options(argv)
    if args.draw is not None:
        draw(json.loads(args.draw.read_text()), args.draw.with_suffix(".png"))
        return 0
    if os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE"):  # one machine, whose name may not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with launch.ranks() as world:
        if NUM_SHARDS % world.size:
            world.console.print(f"{world.size} ranks cannot share {NUM_SHARDS} shards evenly; use 1, 2 or 4")
            return 1
        if args.device == "cpu":
            world = dataclasses.replace(world, device=torch.device("cpu"))
        return 0 if Bench(args, world).run() else 1


if __name__ == "__main__":
    sys.exit(main())
