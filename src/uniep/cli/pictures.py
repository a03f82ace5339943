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

REACH = 8
"""Steps on either side that the smoothed loss takes in."""


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
    """Mean of the values up to `reach` steps away; fewer near the ends, at the steep start on both sides alike."""
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
    axes.plot(steps, history, color=BLUE, alpha=0.3, linewidth=1, label="training, each step")
    mean = f"training, mean of up to {2 * REACH + 1} steps"
    axes.plot(steps, _smooth(history, REACH), color=BLUE, linewidth=2.2, label=mean)
    axes.plot([last], [held_out], "o", color=ORANGE, markersize=7, label=f"held-out files: {held_out:.2f}")
    guess = "uniform guess, ln 256"
    axes.axhline(math.log(256), color=MUTED, linewidth=1, linestyle=(0, (2, 3)), label=guess)
    axes.set(xlabel="optimizer step", ylabel="cross entropy (nats per byte)")
    axes.set_xlim(0, last * 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#e8eaf0", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(frameon=False, loc="outside lower center", ncols=4, fontsize=9, handlelength=1.5, columnspacing=1.5)
    figure.suptitle("A byte-level MoE transformer learns Python", x=0.01, ha="left", fontweight="bold", fontsize=13)
    axes.set_title(subtitle, loc="left", color=MUTED, fontsize=9)
    figure.savefig(path)
    plt.close(figure)
