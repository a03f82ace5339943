"""Draw docs/images/lanes.png: who works when in a call, and what waits for what, to scale.

python docs/images/lanes.py

Times are phases measured on two H200 (qwen3-30b, T=8192, balanced), benchmarks/results/2026-11-28.txt ("qwen3-30b
pdl 0" and 1), where the activation's gradient ran behind its product.  Transfers are drawn where they must lie between
kernels, not measured one by one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from uniep.cli.pictures import BLUE, GREEN, GREY, INK, MUTED, ORANGE, WIDTH, figure_style, title

COLORS = {"plan": GREY, "matrix": BLUE, "vector": GREEN, "wire": ORANGE}
KINDS = ("plan", "tensor cores", "memory-bound", "between GPUs")
LANES = ("copy engine", "kernels", "2nd stream", "NVLink out", "NVLink in")


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
        "kernels", ("", 0.058, "plan"), ("gate_up", 0.673, "matrix"), ("down", 0.416, "matrix"),
        ("sum", 0.096, "vector"),
    ),
    Bar("copy engine", 0.012, 0.11, "wire", "x to peers"),
    Bar("copy engine", 0.735, 0.815, "vector", "tokens kept for backward"),
    Bar("NVLink out", 0.012, 0.11, "wire", ""),
    Bar("NVLink in", 0.012, 0.11, "wire", "tokens"),
    Bar("NVLink out", 0.74, 1.147, "wire", "results of peers"),
    Bar("NVLink in", 0.74, 1.147, "wire", "own results"),
]  # fmt: skip
BACKWARD = [
    *chain(
        "kernels", ("down_grad", 0.388, "matrix"), ("act", 0.189, "vector"), ("gate_up_grad", 0.637, "matrix"),
        ("down_wgrad", 0.385, "matrix"), ("gate_up_wgrad", 0.639, "matrix"),
    ),
    Bar("copy engine", 0.01, 0.12, "wire", "dO to peers"),
    Bar("NVLink out", 0.01, 0.12, "wire", ""),
    Bar("NVLink in", 0.01, 0.12, "wire", "dO"),
    Bar("NVLink out", 0.585, 1.214, "wire", "dX of peers"),
    Bar("NVLink in", 0.585, 1.214, "wire", "own dX"),
    Bar("2nd stream", 1.22, 1.33, "vector", "sum, beside weight gradients"),
]  # fmt: skip
WAITS = {
    "forward": "gate_up begins with local rows; tiles of peers' rows wait for tokens. The sum waits for results.",
    "backward": "down_grad waits for dO. Weight gradients wait for nobody; the sum of dX hides under them.",
}


def draw(axes: Any, bars: list[Bar], name: str) -> None:
    width = max(bar.end for bar in bars) * 1.01
    lanes = [lane for lane in LANES if any(bar.lane == lane for bar in bars)]
    for bar in bars:
        y = len(lanes) - 1 - lanes.index(bar.lane)
        axes.barh(y, bar.end - bar.begin, left=bar.begin, height=0.7, color=COLORS[bar.kind], edgecolor="white")
        inside = len(bar.text) * 0.0155 * width < bar.end - bar.begin
        x, align, color = ((bar.begin + bar.end) / 2, "center", "white") if inside else (bar.end, "left", INK)
        axes.text(x, y, bar.text if inside else f" {bar.text}", ha=align, va="center", color=color, fontsize=11)
    axes.set_yticks(range(len(lanes)), reversed(lanes))
    axes.set_xlim(0, width)
    axes.set_xlabel(f"ms. {WAITS[name]}", loc="left", color=MUTED, fontsize=9)
    axes.set_title(f"{name}, {max(bar.end for bar in bars):.2f} ms", loc="left", fontweight="bold")
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)


OUT = Path(__file__).with_name("lanes.png")


def main(out: Path = OUT) -> None:
    plt = figure_style()
    figure, (above, below) = plt.subplots(2, figsize=(WIDTH, 6.6), layout="constrained")
    draw(above, FORWARD, "forward")
    draw(below, BACKWARD, "backward")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, KINDS, loc="outside lower center", ncols=4, handlelength=1, handleheight=1)
    about = (
        "qwen3-30b's layer, 8192 tokens per GPU; times of kernels with their waits for peers, a whole call takes about "
        "1 % longer than their sum; act: gradient of the activation"
    )
    title(figure, "Who works when, on one of two H200", about)
    figure.savefig(out)
    plt.close(figure)


if __name__ == "__main__":
    main()
