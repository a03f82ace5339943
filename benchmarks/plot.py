"""Pictures of committed results, in one style (uniep.cli.pictures).

python benchmarks/plot.py                                                      all of docs/images that are drawn
python benchmarks/plot.py speedup memory                                       some of them
python benchmarks/plot.py speedup --files benchmarks/results/h200x2_zipf.json --routing zipf --out zipf.png

Three pictures are recordings, which need a run and not a file: loss and timeline (`uniep demo`), trace (`uniep trace`,
its page in a browser).
"""

from __future__ import annotations

import argparse
import itertools
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from results import DIRECTIONS, NAMES, RESULTS, Timing, best_peer, load, machine_of, of_worth
from uniep.cli.pictures import BLUE, GREEN, GREY, INK, ORANGE, WIDTH, figure_style, title

WORTH = RESULTS / "h200x2_worth.json"
IMAGES = RESULTS.parents[1] / "docs" / "images"
LOADS = {"window": ("window: one call, idle GPU", BLUE), "sustained": ("sustained: calls back to back", ORANGE)}
LAYERS = {
    "uniep": ("uniep", BLUE),
    "uniep-default": ("uniep, without max_rows", "#91c0f5"),
    "nccl": ("nccl", GREY),
    "deepep-nowait": ("DeepEP", ORANGE),
}
"""Implementation -> its name in the picture of memory, colour."""
SAVING = {"uniep": "all saved", "uniep@preactivation=recomputed": "h recomputed", "uniep-checkpoint": "checkpointed"}
"""Implementation -> what a backward has of its forward, from most memory to least."""


def about(timings: Sequence[Timing]) -> str:
    """Card, tokens, routing and where it was measured."""
    commits = ", ".join(dict.fromkeys(f"commit {t.meta['commit']}, {t.meta['date'][:10]}" for t in timings))
    first = timings[0]
    return f"{first.machine}, {first.tokens} tokens per GPU, {first.routing} routing; {commits}"


def speedup(timings: Sequence[Timing], out: Path) -> None:
    """How much faster uniep is than the best peer of the same run: a panel for each direction, bars for each load."""
    plt = figure_style()
    directions = [d for d in DIRECTIONS if any(t.direction == d for t in timings)]
    loads = [name for name in LOADS if any(t.load == name for t in timings)]
    shapes = list(dict.fromkeys(t.shape for t in timings))
    figure, panels = plt.subplots(
        len(directions), figsize=(WIDTH, 1 + 2.4 * len(directions)), layout="constrained", squeeze=False, sharey=True
    )
    peers = dict.fromkeys(NAMES.get(best, best) for t in timings if (best := best_peer(t.ms)))
    for axes, direction in zip(panels[:, 0], directions, strict=True):
        for number, name in enumerate(loads):
            label, color = LOADS[name]
            width = 0.8 / len(loads)
            for t in timings:
                if (t.direction, t.load) != (direction, name) or t.speedup is None:
                    continue
                x, percent = shapes.index(t.shape) + (number - (len(loads) - 1) / 2) * width, 100 * (t.speedup - 1)
                axes.bar(x, percent, width * 0.92, color=color, label=label, zorder=2)
                label = "_"
                axes.text(x, max(percent, 0) + 0.6, f"{percent:+.0f}", ha="center", fontweight="bold", fontsize=11)
        axes.axhline(0, color=INK, linewidth=1.2, zorder=3)
        axes.set_xticks(range(len(shapes)), shapes)
        axes.set_ylabel("% faster")
        axes.margins(y=0.15)
        axes.grid(axis="y", zorder=0)
        axes.tick_params(length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_title(DIRECTIONS[direction], loc="left")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    title(figure, f"One MoE layer: uniep beside {', '.join(peers)}", about(timings))
    figure.savefig(out)
    plt.close(figure)


def memory(
    rows: Sequence[dict[str, Any]], timings: Sequence[Timing], recomputed: Sequence[dict[str, Any]],
    of_recomputed: Sequence[Timing], out: Path,
) -> None:  # fmt: skip
    """Peak of one forward and backward beyond inputs and what is shared, GiB; below, of `recomputed`, the time of both
    over what is saved between them."""
    plt = figure_style()
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    panels = list(dict.fromkeys(row["shape"] for row in recomputed))
    figure, parts = plt.subplot_mosaic([["peak"] * len(panels), panels], figsize=(WIDTH, 7.2), layout="constrained")
    axes = parts["peak"]
    width = 0.84 / len(LAYERS)
    for number, (impl, (label, color)) in enumerate(LAYERS.items()):
        found = {row["shape"]: row["peak_mib"] / 1024 for row in rows if row["impl"] == impl}
        for shape, value in found.items():
            x = shapes.index(shape) + (number - (len(LAYERS) - 1) / 2) * width
            axes.bar(x, value, width * 0.92, color=color, label=label, zorder=2)
            label = "_"
            axes.text(x, value + 0.1, f"{value:.1f}", ha="center", fontsize=10)
    axes.set_xticks(range(len(shapes)), shapes)
    axes.set_ylabel("GiB")
    axes.grid(axis="y", zorder=0)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    axes.legend(loc="upper left", ncols=2)
    axes.set_title("Peak beyond inputs and shared buffers", loc="left")
    for shape in panels:
        _time_over_saved(parts[shape], [row for row in recomputed if row["shape"] == shape])
    parts[panels[0]].set_ylabel("forward + backward, ms")
    title(figure, "Memory of one forward and backward", f"{about(timings)}. Below: {about(of_recomputed)}")
    figure.savefig(out)
    plt.close(figure)


def _time_over_saved(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """A line through what a forward of one shape may save."""
    found = {row["impl"]: row for row in rows}
    points = [(found[impl]["saved_mib"], found[impl]["ms"]) for impl in SAVING]
    axes.plot(*zip(*points, strict=True), "o-", color=BLUE, zorder=2)
    for (mib, ms), name in zip(points, SAVING.values(), strict=True):
        text, most = f"{name}\n{mib:,.0f} MiB, {ms / points[0][1]:.2f}x", points[0][0]
        side, above = ("right", -26) if mib > most / 2 else ("left", 7)
        axes.annotate(text, (mib, ms), (0, above), textcoords="offset points", fontsize=9, ha=side)
    axes.set(xlabel="MiB saved between them", xlim=(-0.05 * points[0][0], None))
    axes.margins(y=0.35)
    axes.grid(zorder=0)
    axes.set_title(rows[0]["shape"], loc="left")


def worth(rows: Sequence[dict[str, Any]], machine: str, commit: str, out: Path) -> None:
    """Of a file of worth.py: times over the default's, a row for each shape, a panel for each direction and load."""
    plt = figure_style()
    directions = [d for d in DIRECTIONS if any(row["direction"] == d for row in rows)]
    loads = [name for name in LOADS if any(row["load"] == name for row in rows)]
    cases = list(dict.fromkeys((row["shape"], row["tokens"]) for row in rows))[::-1]
    counts = list(dict.fromkeys(tokens for _, tokens in cases))
    size = (WIDTH, 1.6 + len(directions) * (0.7 + 0.3 * len(cases)))
    figure, panels = plt.subplots(
        len(directions), len(loads), figsize=size, layout="constrained", squeeze=False, sharey=True, sharex=True
    )
    kinds = (("peer_ms", "best peer", GREY), ("strategy_ms", "best fixed strategy", ORANGE), ("tuned", "tuned", BLUE))
    for axes, (direction, load_name) in zip(panels.flat, itertools.product(directions, loads), strict=True):
        axes.axvline(1, color=INK, linewidth=1.2, label="default", zorder=1)
        here = [row for row in rows if (row["direction"], row["load"]) == (direction, load_name)]
        for key, label, color in kinds:
            there = [row for row in here if row[key]]
            places = [cases.index((row["shape"], row["tokens"])) for row in there]
            axes.plot([row[key] / row["default"] for row in there], places, "o", color=color, label=label, zorder=2)
        names = [shape if len(counts) == 1 else f"{shape}, {tokens}" for shape, tokens in cases]
        axes.set_yticks(range(len(cases)), names)
        axes.set_title(f"{DIRECTIONS[direction]}, {load_name}", loc="left", fontsize=12)
        axes.grid(zorder=0)
        axes.tick_params(length=0)
    for axes in panels[-1]:
        axes.set_xlabel("time over the default's")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    told = f"{counts[0]} tokens per GPU" if len(counts) == 1 else "tokens per GPU behind the shape"
    title(figure, "What tuning is worth", f"{machine}, {told}; {commit}")
    figure.savefig(out)
    plt.close(figure)


def prediction(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Simulated over measured ms; a point on the line is exact."""
    plt = figure_style()
    figure, axes = plt.subplots(figsize=(WIDTH, 5.0), layout="constrained")
    for held_out, label, color in ((False, "calibrated on", GREY), (True, "held out", BLUE)):
        part = [row for row in rows if bool(row["held_out"]) == held_out]
        measured, predicted = [row["ms"] for row in part], [row["predicted_ms"] for row in part]
        axes.plot(measured, predicted, "o", markersize=5, alpha=0.7, color=color, label=f"{label}: {len(part)} rows")
    ends = [0.8 * min(row["ms"] for row in rows), 1.25 * max(row["ms"] for row in rows)]
    axes.plot(ends, ends, color=INK, linewidth=1)
    axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color=GREEN, alpha=0.15, label="10 %")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="simulated, ms")
    ticks = [t for t in (0.2, 0.5, 1, 2, 5, 10, 20, 50) if ends[0] <= t <= ends[1]]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.grid()
    axes.legend(loc="upper left")
    machines = ", ".join(dict.fromkeys(row["card"].removeprefix("NVIDIA ") for row in rows))
    title(figure, "The simulator beside the cards", f"{len(rows)} rows of {machines}, EP 2 and 4; docs/simulator.md")
    figure.savefig(out)
    plt.close(figure)


def _speedup(args: argparse.Namespace, out: Path) -> None:
    files = args.files or [RESULTS / "h200x2_floors_2.json"]
    timings = [t for t in load(files) if (t.tokens, t.routing) == (args.tokens, args.routing)]
    if not any(t.speedup for t in timings):
        raise SystemExit(f"no file has uniep and a peer at tokens={args.tokens}, routing={args.routing}")
    speedup(timings, out)


def _memory(args: argparse.Namespace, out: Path) -> None:
    found: list[Any] = []
    for path in (RESULTS / "h200x2_both.json", RESULTS / "h200x1_recompute.json"):
        rows = json.loads(path.read_text())["rows"]
        found += [[r for r in rows if r["direction"] == "fwd_bwd" and r["load"] == "window"], load([path])]
    memory(*found, out)


def _worth(args: argparse.Namespace, out: Path) -> None:
    (file,) = args.files or [WORTH]
    meta, _, rows = of_worth(file)
    worth(rows, machine_of(meta), f"commit {meta['commit']}, {meta['date'][:10]}", out)


def _prediction(args: argparse.Namespace, out: Path) -> None:
    prediction(json.loads((RESULTS / "predicted.json").read_text())["rows"], out)


def _train(args: argparse.Namespace, out: Path) -> None:
    import train

    train.draw(json.loads((RESULTS / "h200x2_train.json").read_text()), out)


def _scale(args: argparse.Namespace, out: Path) -> None:
    import scale

    rows = json.loads((RESULTS / "scale.json").read_text())["rows"]
    scale.draw(rows, scale.about(rows[0]["tokens"], rows[0]["machine"]), out)


def _script(name: str) -> Callable[[argparse.Namespace, Path], None]:
    def draw(args: argparse.Namespace, out: Path) -> None:
        runpy.run_path(str(IMAGES / f"{name}.py"))["main"](out)

    return draw


def _command(*words: str) -> Callable[[argparse.Namespace, Path], None]:
    """A picture that a command of uniep draws."""

    def draw(args: argparse.Namespace, out: Path) -> None:
        from uniep.cli.main import app

        app([*words, "--picture", str(out)], standalone_mode=False)

    return draw


DRAWN: dict[str, Callable[[argparse.Namespace, Path], None]] = {
    "speedup": _speedup,
    "memory": _memory,
    "worth": _worth,
    "prediction": _prediction,
    "train": _train,
    "scale": _scale,
    "lanes": _script("lanes"),
    "taskflow": _script("taskflow"),
    "simulated": _command(
        "simulate", "--machine", "ascend-a3", "--shape", "hyperparallel-a3", "--ep", "8", "--direction", "bwd"
    ),
    "explained": _command("explain", "--ep", "4", "--tokens", "8192", "--results", str(RESULTS / "h200x4_floors.json")),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"pictures, of {', '.join(DRAWN)} (default: all)")
    parser.add_argument("--files", nargs="+", type=Path, help="result files of moe.py, for speedup; of worth.py")
    parser.add_argument("--out", type=Path, help="file for one picture (default: docs/images/NAME.png)")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--routing", default="balanced")
    args = parser.parse_args(argv)
    names = args.names or [name for name in DRAWN if name != "worth" or WORTH.is_file()]
    if unknown := [name for name in names if name not in DRAWN]:
        parser.error(f"{', '.join(unknown)}: no such picture; use {', '.join(DRAWN)}")
    if args.out and len(names) > 1:
        parser.error("--out is for one picture; name it")
    sys.path.insert(0, str(Path(__file__).parent))
    for name in names:
        out = args.out or IMAGES / f"{name}.png"
        DRAWN[name](args, out)
        print(out)


if __name__ == "__main__":
    main()
