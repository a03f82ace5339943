"""Which worker did what, and when, inside one layer: recorded from the CPU executor, drawn as a timeline."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from uniep.backends.cpu.backend import CpuBackend
from uniep.cli.pictures import INK, WIDTH, figure_style, title
from uniep.nn import Experts
from uniep.taskflow.graph import GATE
from uniep.taskflow.trace import PHASES, Span, lanes_of


@contextlib.contextmanager
def recording(experts: Experts) -> Iterator[list[Span]]:
    """Record the tasks of this one layer, forward and backward, in the yielded list.

    The list stays empty on backends other than cpu.
    """
    backend, spans = experts.workspace.backend, list[Span]()
    if not isinstance(backend, CpuBackend):
        yield spans
        return

    def start(*_: object) -> None:
        backend.trace = spans

    def stop(*_: object) -> None:
        backend.trace = None

    hooks = [
        experts.register_forward_pre_hook(start),
        experts.register_forward_hook(stop),
        experts.register_full_backward_pre_hook(start),
        experts.register_full_backward_hook(stop),
    ]
    try:
        yield spans
    finally:
        for hook in hooks:
            hook.remove()
        stop()


def fastest(steps: Sequence[Sequence[Span]]) -> Sequence[Span]:
    """The recording (all ranks' tasks of one step) that other work of the machine disturbed least."""

    def duration(spans: Sequence[Span]) -> int:
        of_phase = [[s for s in spans if s.phase == phase] for phase in PHASES]
        return sum(max(s.end_ns for s in part) - min(s.start_ns for s in part) for part in of_phase if part)

    return min(steps, key=duration)


@dataclasses.dataclass(frozen=True)
class Kind:
    color: str
    label: str


KINDS = {
    "push": Kind("#e8590c", "push tokens to peers"),
    "push dO": Kind("#e8590c", "push dO to peers"),
    "pull": Kind("#e8590c", "pull tokens from peers"),
    "pull dO": Kind("#e8590c", "pull dO from peers"),
    "keep": Kind("#ffc078", "keep received tokens"),
    "gate_up local": Kind("#91c0f5", "gate and up, local rows"),
    "gate_up": Kind("#2f6fde", "gate and up, with rows from peers"),
    "activation": Kind("#22b8cf", "activation"),
    "down": Kind("#123a8c", "down, results to their ranks"),
    "group_sum": Kind("#087f5b", "sum combine groups"),
    "push_rows": Kind("#f08c00", "push results to their ranks"),
    "recompute": Kind("#5c9dea", "gate and up, made again"),
    "down_grad local": Kind("#91c0f5", "gradient of down, local rows"),
    "down_grad": Kind("#2f6fde", "gradient of down, with rows from peers"),
    "activation_gradient": Kind("#22b8cf", "gradient of the activation"),
    "gate_up_grad": Kind("#123a8c", "gradient of gate and up, results to their ranks"),
    "down_wgrad": Kind("#b197fc", "weight gradient of down"),
    "gate_up_wgrad": Kind("#7048e8", "weight gradients of gate and up"),
    "dweight": Kind("#63e6be", "d(routing weight)"),
    "collect": Kind("#0ca678", "collect d(routing weight)"),
    "combine": Kind("#2b8a3e", "sum slots in order"),
}


_MORE = ("#d6336c", "#868e96", "#a61e4d", "#5c940d")
"""Colours of operators that are not the layer's own."""


def kind_of(span: Span) -> str:
    if span.op in ("push", "pull") and span.phase == "backward":
        return f"{span.op} dO"
    return f"{span.op} local" if span.op in ("gate_up", "down_grad") and not span.remote else span.op


def kinds_of(spans: Iterable[Span]) -> dict[str, Kind]:
    """The kinds that occur: first the layer's own, in the layer's order."""
    found = dict.fromkeys(kind_of(s) for s in spans if s.op != GATE)
    others = {name: Kind(_MORE[i % len(_MORE)], name) for i, name in enumerate(n for n in found if n not in KINDS)}
    return {name: kind for name, kind in {**KINDS, **others}.items() if name in found}


def draw_timeline(spans: Sequence[Span], subtitle: str, path: Path) -> None:
    """One panel per phase, one lane per rank and worker, one bar per task."""
    plt = figure_style()
    spans = [s for s in spans if s.op != GATE]
    lanes = lanes_of(spans)
    kinds = kinds_of(spans)
    figure, panels = plt.subplots(
        len(PHASES), figsize=(WIDTH, 3.2 + 0.5 * len(PHASES) * (len(lanes) + 1.2)), layout="constrained"
    )
    for axes, phase in zip(panels, PHASES, strict=True):
        of_phase = [s for s in spans if s.phase == phase]
        origin = min((s.start_ns for s in of_phase), default=0)
        thin = 0.006 * (max((s.end_ns for s in of_phase), default=0) - origin)
        for span in of_phase:
            color = kinds[kind_of(span)].color
            axes.barh(
                lanes.index((span.rank, span.worker)),
                (span.end_ns - span.start_ns) / 1e6,
                left=(span.start_ns - origin) / 1e6,
                height=0.72,
                color=color,
                edgecolor="white" if span.end_ns - span.start_ns > thin else color,
                linewidth=0.4,
            )
        axes.set_yticks(range(len(lanes)), [f"rank {rank}  {worker.split()[0]}" for rank, worker in lanes])
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("ms")
        axes.margins(x=0.005)
        axes.grid(axis="x", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_title(phase, loc="left", color=INK)
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, color=kind.color) for kind in kinds.values()],
        [kind.label.replace("$", r"\$") for kind in kinds.values()],  # no formulas
        loc="outside lower center", ncols=2, handlelength=1, handleheight=1,
    )  # fmt: skip
    title(figure, "One MoE layer, task by task", subtitle)
    figure.savefig(path)
    plt.close(figure)
