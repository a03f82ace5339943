"""The style of all pictures, and the loss curve.

Pictures are 8 inches wide at 200 dots an inch, 1600 pixels, with text of 11 points and more: 7 pixels high where a page
shows them 400 wide.  They are opaque, so that they look the same on a dark page.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INK = "#1f2430"
MUTED = "#5f6778"
GRID = "#e3e6eb"
BLUE = "#2f6fde"
ORANGE = "#d9480f"
GREEN = "#2b8a3e"
GREY = "#8b95a5"
WIDTH = 8.0
"""Inches."""

REACH = 8
"""Steps on either side that the smoothed loss takes in."""


def figure_style() -> Any:
    """matplotlib.pyplot, drawing to files only, in the project's style.  Imported on demand: it takes a second."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 12,
            "figure.facecolor": "white",
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": MUTED,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "xtick.color": INK,
            "ytick.color": INK,
            "grid.color": GRID,
            "legend.frameon": False,
            "legend.fontsize": 11,
            "savefig.dpi": 200,
        }
    )
    return plt


def title(figure: Any, text: str, subtitle: str) -> None:
    """A bold line, and below it what was measured on what, in lines that fit."""
    lines = textwrap.wrap(subtitle, 95)
    height = figure.get_size_inches()[1]
    figure.suptitle(text + "\n" * len(lines), x=0.01, ha="left", fontweight="bold", fontsize=14)
    figure.text(0.01, 1 - 0.36 / height, "\n".join(lines), va="top", color=MUTED, fontsize=10)


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
    figure, axes = plt.subplots(figsize=(WIDTH, 5.0), layout="constrained")
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
    axes.grid(axis="y", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=2, handlelength=1.5, columnspacing=1.5)
    title(figure, "A byte-level MoE transformer learns Python", subtitle)
    figure.savefig(path)
    plt.close(figure)
