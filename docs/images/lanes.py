"""Draw docs/images/lanes.png: who works when in a call, to scale.

python docs/images/lanes.py

Times are phases measured on two H200 (qwen3-30b, T=8192, balanced), benchmarks/results/2026-11-28.txt ("qwen3-30b
pdl 0" and 1), where the activation's gradient ran behind its product.  Transfers are drawn where they must lie between
kernels, not measured one by one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

INK, GRID = "#22262e", "#e3e6eb"
COLORS = {"plan": "#8b95a5", "matrix": "#2f6fde", "vector": "#2b9a66", "wire": "#c9651b"}
LANES = ("copy engine", "multiprocessors", "second stream", "NVLink out", "NVLink in")


class Bar(NamedTuple):
    lane: str
    begin: float  # ms
    end: float
    kind: str
    text: str


def chain(lane: str, *parts: tuple[str, float, str]) -> list[Bar]:
    """Bars one behind the other: (text, ms, kind)."""
    bars, at = [], 0.0
    for text, ms, kind in parts:
        bars.append(Bar(lane, at, at + ms, kind, text))
        at += ms
    return bars


FORWARD = [
    *chain(
        "multiprocessors", ("plan", 0.058, "plan"), ("gate_up: gathers rows, GEMM, SwiGLU", 0.673, "matrix"),
        ("down: rows to their ranks", 0.416, "matrix"), ("combine", 0.096, "vector"),
    ),
    Bar("copy engine", 0.012, 0.11, "wire", "x to peers"),
    Bar("copy engine", 0.735, 0.815, "vector", "receive kept for gate_up_wgrad"),
    Bar("NVLink out", 0.012, 0.11, "wire", ""),
    Bar("NVLink in", 0.012, 0.11, "wire", "tokens"),
    Bar("NVLink out", 0.74, 1.147, "wire", "results of other ranks' rows"),
    Bar("NVLink in", 0.74, 1.147, "wire", "results of own tokens"),
]  # fmt: skip
BACKWARD = [
    *chain(
        "multiprocessors", ("down_grad: gathers dO", 0.388, "matrix"), ("dSwiGLU", 0.189, "vector"),
        ("gate_up_grad: rows to their ranks", 0.637, "matrix"), ("down_wgrad: gathers dO", 0.385, "matrix"),
        ("gate_up_wgrad: gathers x", 0.639, "matrix"),
    ),
    Bar("copy engine", 0.01, 0.12, "wire", "dO to peers"),
    Bar("NVLink out", 0.01, 0.12, "wire", ""),
    Bar("NVLink in", 0.01, 0.12, "wire", "dO"),
    Bar("NVLink out", 0.585, 1.214, "wire", "dX of other ranks' rows"),
    Bar("NVLink in", 0.585, 1.214, "wire", "dX of own tokens"),
    Bar("second stream", 1.22, 1.33, "vector", "combine"),
]  # fmt: skip


def draw(axes: Any, bars: list[Bar], title: str) -> None:
    width = max(bar.end for bar in bars) * 1.02
    for bar in bars:
        y = len(LANES) - 1 - LANES.index(bar.lane)
        axes.barh(y, bar.end - bar.begin, left=bar.begin, height=0.62, color=COLORS[bar.kind], edgecolor="white")
        inside = len(bar.text) * 0.0071 * width < bar.end - bar.begin
        x, align, color = ((bar.begin + bar.end) / 2, "center", "white") if inside else (bar.end + 0.008, "left", INK)
        axes.text(x, y, bar.text, ha=align, va="center", color=color, fontsize=8.5)
    axes.set_yticks(range(len(LANES)), reversed(LANES))
    axes.set_xlim(0, width)
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def main() -> None:
    with plt.rc_context({"font.size": 9.5, "axes.edgecolor": GRID, "text.color": INK, "axes.labelcolor": INK}):
        figure, (above, below) = plt.subplots(2, figsize=(11, 5.6), dpi=150)
        draw(above, FORWARD, "Forward of one rank (2x H200)")
        draw(below, BACKWARD, "Backward of one rank (2x H200)")
        handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
        names = ("plan", "tensor cores", "memory-bound", "between GPUs")
        figure.legend(handles, names, loc="upper right", ncols=4, frameon=False, fontsize=8.5)
        figure.tight_layout()
        figure.savefig(Path(__file__).with_name("lanes.png"))


if __name__ == "__main__":
    main()
