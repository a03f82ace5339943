"""A picture of uniep's speedup over the best peer of the same run, for each shape.

python benchmarks/plot.py benchmarks/results/h200x2_layer.json --out docs/images/speedup.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from results import DIRECTIONS, Timing, best_peer, load

COLORS = {"fwd": "#2f6fde", "fwd_bwd": "#c9651b"}
INK, GRID = "#22262e", "#e3e6eb"


def bound(timing: Timing) -> float | None:
    """Speedup that the peers would have if they hid all communication: best peer over peer-compute."""
    best = best_peer(timing.ms)
    return timing.ms[best] / timing.ms["peer-compute"] if best and "peer-compute" in timing.ms else None


def draw(timings: list[Timing], out: Path) -> None:
    """One bar per shape and direction, one panel per machine; `timings` are of one token count, routing and load."""
    machines = list(dict.fromkeys(timing.machine for timing in timings))
    widest = max(len({t.shape for t in timings if t.machine == machine}) for machine in machines)
    with plt.rc_context({"font.size": 11, "axes.edgecolor": GRID, "text.color": INK, "axes.labelcolor": INK}):
        size = (1.7 + 1.75 * widest, 4.8 * len(machines))
        figure, panels = plt.subplots(len(machines), figsize=size, dpi=160, squeeze=False)
        for axes, machine in zip(panels[:, 0], machines, strict=True):
            _panel(axes, [timing for timing in timings if timing.machine == machine])
        sources = {f"commit {t.meta['commit']}, {t.meta['date'][:10]}": None for t in timings}
        figure.text(0.995, 0.005, "; ".join(sources), ha="right", color="#9aa1ac", fontsize=8)
        figure.tight_layout()
        figure.savefig(out)
        plt.close(figure)


def _panel(axes: Any, timings: list[Timing]) -> None:
    shapes = list(dict.fromkeys(timing.shape for timing in timings))
    directions = [d for d in DIRECTIONS if any(timing.direction == d for timing in timings)]
    width = 0.76 / len(directions)
    top = 1.0
    for number, direction in enumerate(directions):
        label: str | None = DIRECTIONS[direction]
        for timing in timings:
            if timing.direction != direction or timing.speedup is None:
                continue
            x = shapes.index(timing.shape) + (number - (len(directions) - 1) / 2) * width
            axes.bar(x, timing.speedup, width * 0.92, color=COLORS[direction], label=label, zorder=2)
            label = None
            _annotate(axes, x, timing, width)
            top = max(top, timing.speedup, bound(timing) or 0)
    axes.axhline(1, color=INK, linewidth=1.2, zorder=3)
    if any(bound(timing) for timing in timings):
        axes.plot([], [], color=INK, linewidth=2, linestyle=(0, (2, 1)), label="peers with all communication hidden")
    axes.set_xticks(range(len(shapes)), shapes)
    axes.set_ylim(0, top * 1.25)
    axes.set_ylabel("speedup over the best peer")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.grid(axis="y", color=GRID, zorder=0)
    axes.tick_params(length=0, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="upper right", fontsize=9.5)
    first = timings[0]
    axes.set_title("uniep: one expert-parallel MoE layer", loc="left", fontsize=14, fontweight="bold", pad=28)
    detail = f"{first.machine}, {first.tokens} tokens per GPU, {first.routing} routing, load: {first.load}"
    axes.text(0, 1.03, detail, transform=axes.transAxes, color="#6b7280", fontsize=10)


def _annotate(axes: Any, x: float, timing: Timing, width: float) -> None:
    """Speedup over the bar, the two times inside it, and the peers' bound across it."""
    best = best_peer(timing.ms)
    assert timing.speedup is not None and best is not None
    text = {"ha": "center", "va": "bottom", "zorder": 4}
    limit = bound(timing)
    above = limit if limit and 0 < limit - timing.speedup < 0.1 else timing.speedup
    axes.text(x, above + 0.015, f"{timing.speedup:.2f}x", fontsize=10, fontweight="bold", **text)
    peer = best.replace("-", "\n")
    inside = f"uniep\n{timing.ms['uniep']:.2f} ms\n\n{peer}\n{timing.ms[best]:.2f} ms"
    axes.text(x, 0.04, inside, fontsize=8, color="white", **text)
    if limit:
        half = width * 0.46
        axes.hlines(limit, x - half, x + half, color=INK, linewidth=2, linestyle=(0, (2, 1)), zorder=3)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("speedup.png"))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--routing", default="balanced")
    parser.add_argument("--load", default="window")
    args = parser.parse_args(argv)
    wanted = (args.tokens, args.routing, args.load)
    timings = [timing for timing in load(args.files) if (timing.tokens, timing.routing, timing.load) == wanted]
    if not any(timing.speedup for timing in timings):
        raise SystemExit(f"no file has uniep and a peer at tokens={wanted[0]}, routing={wanted[1]}, load={wanted[2]}")
    draw(timings, args.out)
    print(args.out)


if __name__ == "__main__":
    main()
