"""Expert parallelism from one node to 128, simulated: who wins, and what limits it.

    python benchmarks/scale.py --json benchmarks/results/scale.json --picture docs/images/scale.png

A fixed model (DeepSeek-V3's layer with 1024 experts) on more and more ranks of `h100-cluster`; balanced routing, on the
rank that stands for all, and `natural` routing, all ranks simulated, as far as --natural-to.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from uniep.cli.pictures import MUTED, WIDTH, figure_style, title
from uniep.shapes import parse_shape
from uniep.sim import STRATEGIES, Problem, load_machine, row

SHAPE = "7168x2048x1024x8"
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
NAMES = ("serialized", "deepep", "hierarchical", "taskflow", "uniep")
COLORS = ("#868e96", "#e8590c", "#f2b01e", "#7048e8", "#2f6fde")
GROUPS = (1, 2, 4)
"""combine_groups, in groups per rank."""


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path)
    made.add_argument("--picture", type=Path)
    made.add_argument("--machine", default="h100-cluster")
    made.add_argument("--tokens", type=int, default=4096)
    made.add_argument("--to", type=int, default=SIZES[-1])
    made.add_argument("--natural-to", type=int, default=16)
    args = made.parse_args()
    torch.set_num_threads(1)
    machine, shape = load_machine(args.machine), parse_shape(SHAPE)
    rows: list[dict[str, Any]] = []

    def add(problem: Problem, name: str, **more: Any) -> None:
        rows.append({**row(problem, machine, STRATEGIES[name]), **more})
        r, busy = rows[-1], rows[-1]["busy"]
        print(
            f"EP {r['ep']:5} {r['routing']:9} {r['direction']} {name:13} {more or ''} "
            f"{r['makespan_us'] / 1e3:7.2f} ms, exposed {r['exposed_comm_us'] / 1e3:6.2f}, "
            f"matrix {busy['matrix']:.0%}, link {busy['link']:.0%}",
            flush=True,
        )
        if args.json:
            args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")

    for ep in (size for size in SIZES if size <= args.to):
        for name in NAMES:
            for direction in ("fwd", "bwd"):
                add(Problem(shape, ep, args.tokens, "balanced", direction), name)  # type: ignore[arg-type]
        for per_rank in GROUPS:
            if per_rank * ep <= shape.num_experts:
                problem = Problem(shape, ep, args.tokens, "balanced", "fwd", combine_groups=per_rank * ep)
                add(problem, "uniep", combine_groups=per_rank * ep)
        if ep <= args.natural_to:
            for name in NAMES:
                add(Problem(shape, ep, args.tokens, "natural", "fwd"), name)
    if args.picture:
        draw(rows, about(args.tokens, args.machine), args.picture)


def about(tokens: int, machine: str) -> str:
    return f"hidden 7168, width 2048, 1024 experts, top-8, {tokens} tokens a rank, {machine}"


def draw(rows: list[dict[str, Any]], subtitle: str, path: Path) -> None:
    """Forward and backward: ms over ranks, a line per schedule; and the part of the forward that is exposed."""
    plt = figure_style()
    figure, panels = plt.subplots(1, 3, figsize=(WIDTH, 4.2), layout="constrained")
    for axes, direction, what in zip(
        panels, ("fwd", "bwd", "fwd"), ("makespan_us", "makespan_us", "exposed_comm_us"), strict=True
    ):
        for name, color in zip(NAMES, COLORS, strict=True):
            line = [
                r
                for r in rows
                if (r["schedule"], r["direction"], r["routing"]) == (name, direction, "balanced")
                and "combine_groups" not in r
            ]
            axes.plot(
                [r["ep"] for r in line], [r[what] / 1e3 for r in line], "o-", color=color, markersize=4, label=name
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES[::3], SIZES[::3])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        axes.axvline(8, color=MUTED, linewidth=0.8, linestyle=":")
        axes.set_xlabel("ranks")
        name = {"fwd": "forward", "bwd": "backward"}[direction]
        axes.set_title(f"{name}, ms" if what == "makespan_us" else "exposed, ms", loc="left")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, columnspacing=1)
    title(
        figure,
        "One MoE layer on more and more ranks, simulated",
        f"{subtitle}; exposed: of the forward, rows travel and nothing is computed; dotted: one node",
    )
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
