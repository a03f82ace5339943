"""Style of the demo's pictures, and the loss curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INK = "#1f2430"
MUTED = "#7a8194"
BLUE = "#2f6fde"
ORANGE = "#e8590c"


def figure_style() -> Any:
    """matplotlib.pyplot, drawing to files only, in the project's style.  Imported on demand: it takes a second."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 10,
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": MUTED,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "xtick.color": INK,
            "ytick.color": INK,
            "savefig.dpi": 160,
        }
    )
    return plt


def _smooth(values: Sequence[float], reach: int) -> list[float]:
    """Mean of the values up to `reach` steps away; fewer, on both sides alike, near the steep start."""
    out = []
    for i in range(len(values)):
        near = values[i - min(reach, i) : i + min(reach, i) + 1]
        out.append(sum(near) / len(near))
    return out


def draw_loss(history: Sequence[float], held_out: float, subtitle: str, path: Path) -> None:
    """Training loss per step and smoothed, and the final loss on held-out files."""
    plt = figure_style()
    figure, axes = plt.subplots(figsize=(8.5, 4.8), layout="constrained")
    steps, last = range(1, len(history) + 1), len(history)
    axes.axhline(math.log(256), color=MUTED, linewidth=1, linestyle=(0, (2, 3)))
    axes.text(last, math.log(256) - 0.05, "uniform guess, ln 256", color=MUTED, ha="right", va="top", fontsize=9)
    axes.plot(steps, history, color=BLUE, alpha=0.3, linewidth=1, label="training, each step")
    axes.plot(steps, _smooth(history, 8), color=BLUE, linewidth=2.2, label="training, mean of 17 steps")
    axes.plot([last], [held_out], "o", color=ORANGE, markersize=7, label=f"held-out files at the end: {held_out:.2f}")
    axes.set(xlabel="optimizer step", ylabel="cross entropy (nats per byte)")
    axes.set_xlim(0, last * 1.02)
    axes.grid(axis="y", color="#e8eaf0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.86))
    figure.suptitle("A byte-level MoE transformer learns Python", x=0.01, ha="left", fontweight="bold", fontsize=13)
    axes.set_title(subtitle, loc="left", color=MUTED, fontsize=9)
    figure.savefig(path)
    plt.close(figure)
