"""The search space: dimensions of `Schedule`, their values, where they mean something, and points as columns.

A point is a Schedule.  Many points are one table of columns (`Points`), so that a model can look at 1e5 of them at once
and only those that are timed become Schedules.  A dimension that another one switches off has one value there, so that
no point comes twice.

Column suffix: N points.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from uniep.backends import registry
from uniep.config import MoEConfig
from uniep.errors import ConfigError
from uniep.schedule import CHOICES, PIPELINED_FROM, Schedule, Tile, default_schedule, is_valid, refuse_other_fields
from uniep.taskflow.graph import ranges


@dataclasses.dataclass(frozen=True)
class Dimension:
    """name: of the field, or of its part, "gemm1.columns"; `also`: fields that take the same value.  values: that are
    tried, by backend; a backend that is left out has none to choose from.  needs: {dimension: values} of which one
    must hold for this one to mean anything.  about: what it does and when it helps.  source: where it comes from."""

    name: str
    values: Mapping[str, tuple[Any, ...]]
    about: str
    source: str
    also: tuple[str, ...] = ()
    needs: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


_TASKS = {"overlap": ("mega",)}
DIMENSIONS = (
    Dimension("overlap", {"cpu": ("fused", "serial"), "hopper": ("fused", "serial", "pipelined", "mega")},
        "what runs beside what; serial is the oracle, fused hides transfers, pipelined pays where rows travel longer "
        "than their product takes, mega where launches count", "UniEP, Comet; mega: HyperParallel-MoE, FlashDMoE"),
    Dimension("transfer", {"hopper": ("push", "copy")},
        "who sends tokens: programs, each token once per rank, or copy engines, every token to every rank; copies pay "
        "where peers want most tokens", "Mega-EP relay, DeepEP"),
    Dimension("tile_order", {"cpu": ("local-first", "natural", "critical-path"), "hopper": ("local-first", "natural")},
        "what a product begins with; local rows need no link", "Comet, HyperParallel-MoE"),
    Dimension("operand", {"hopper": ("gathered", "expanded")},
        "rows read where they lie, or copied first: a faster product, a pass more", "ScatterMoE, SonicMoE",
        needs={"overlap": ("fused", "serial", "pipelined")}),
    Dimension("gemm1.rows", {"cpu": (128, 64), "hopper": (128, 64)},
        "rows of a tile; 64 wastes less where experts have few", "ours", also=("gemm2.rows",)),
    Dimension("gemm1.columns", {"cpu": (256, 128, 64), "hopper": (256, 128), "nccl": (256, 128)},
        "columns of a tile; more read operands less often, fewer fill the last wave", "ours"),
    Dimension("gemm2.columns", {"cpu": (256, 128, 64), "hopper": (256, 128), "nccl": (256, 128)},
        "as gemm1.columns", "ours"),
    Dimension("gemm1.group_rows", {"hopper": (8, 4, 16)},
        "row tiles that share a column of weights in cache", "Triton's grouped order", also=("gemm2.group_rows",)),
    Dimension("gemm1.stages", {"hopper": (4, 3)},
        "loads ahead of a product; more hide latency, and take shared memory", "Triton", also=("gemm2.stages",)),
    Dimension("weight_gradient.columns", {"hopper": (256, 128), "nccl": (256, 128)},
        "columns of a tile of weight gradients", "ours"),
    Dimension("weight_gradient.stages", {"hopper": (3, 4), "nccl": (3, 4)},
        "loads ahead of the product of weight gradients", "ours"),
    Dimension("chunk_tokens", {"cpu": (64, 32, 128), "hopper": (32, 64, 128)},
        "tokens under one arrival signal; fewer start consumers earlier, more cost fewer signals", "Comet, DeepEP"),
    Dimension("push_programs", {"hopper": (16, 8, 24, 32, 48)},
        "programs that push before they compute; more arrive earlier, and are missed by the product", "Comet, UniEP",
        needs={"transfer": ("push",), "overlap": ("fused", "pipelined", "mega")}),
    Dimension("down_sms", {"hopper": (32, 16, 48, 64)},
        "multiprocessors of the second product while the first runs", "UniEP, FlashDMoE",
        needs={"overlap": ("pipelined",)}),
    Dimension("activation_gradient", {"hopper": ("after", "beside")},
        "beside, it reads what the product has just left in L2; with few tokens a pass is faster", "SonicMoE",
        needs={"overlap": ("fused", "pipelined")}),
    Dimension("group_sum", {"hopper": ("after", "beside")},
        "where rows of combine groups are added", "DeepEP, UniEP", needs={"overlap": ("fused",)}),
    Dimension("peer_order", {"cpu": ("natural", "rotated"), "hopper": ("natural", "rotated")},
        "rows in the order in which peers' tokens arrive; no two ranks write to one peer at once", "HyperParallel-MoE",
        needs={"overlap": ("fused", "mega")}),
    Dimension("weight_gradient_order", {"cpu": ("last", "interleaved"), "hopper": ("last", "interleaved")},
        "interleaved, returns are spread over the weight gradients", "HyperParallel-MoE",
        needs={"overlap": ("fused", "mega")}),
    Dimension("activation", {"cpu": ("fused", "separate")},
        "in the product's epilogue, or tiles of its own for vector workers", "HyperParallel-MoE"),
    Dimension("received", {"cpu": ("saved", "again"), "hopper": ("saved", "again"), "nccl": ("saved", "again")},
        "tokens of peers kept for the backward, or sent again: memory for time", "MegaScale-MoE"),
    Dimension("matrix_workers", {"cpu": (1, 2)}, "threads of products", "ours"),
    Dimension("vector_workers", {"cpu": (1, 2)}, "threads of passes and sends", "HyperParallel-MoE"),
)  # fmt: skip
"""Values of a backend begin with what is usual.  Left to the user: free_sms, and the thresholds `*_from` and `mega_to`,
which a Workspace needs for calls of fewer tokens."""

ONLY_MEGA = ("peer_order", "weight_gradient_order")
"""On GPUs they order the lists of one kernel alone; the CPU's executor orders any tasks."""


def dimensions(backend: str, cfg: MoEConfig, keep: Sequence[str] = ("received",)) -> list[Dimension]:
    """Of a backend, for a configuration.  keep: names that are not searched, such as what trades memory for time."""
    chosen = []
    for dimension in DIMENSIONS:
        if backend not in dimension.values or dimension.name in keep:
            continue
        if dimension.name == "group_sum" and cfg.combine_groups is None:
            continue
        if backend == "hopper" and dimension.name in ONLY_MEGA:
            dimension = dataclasses.replace(dimension, needs=_TASKS)
        if backend == "cpu" and dimension.name in ONLY_MEGA:
            dimension = dataclasses.replace(dimension, needs={"overlap": ("fused",)})
        chosen.append(dimension)
    return chosen


def get(schedule: Schedule, name: str) -> Any:
    """ "gemm1.columns" -> its value."""
    outer, _, inner = name.partition(".")
    value = getattr(schedule, outer)
    return getattr(value, inner) if inner else value


def replaced(schedule: Schedule, values: Mapping[str, Any]) -> Schedule:
    """With these fields, or parts of fields, changed."""
    for name, value in values.items():
        outer, _, inner = name.partition(".")
        if inner:
            value = dataclasses.replace(getattr(schedule, outer), **{inner: value})
        schedule = dataclasses.replace(schedule, **{outer: value})
    return schedule


def _names() -> Iterator[str]:
    for field in dataclasses.fields(Schedule):
        if isinstance(field.default, Tile):
            yield from (f"{field.name}.{part.name}" for part in dataclasses.fields(Tile))
        else:
            yield field.name


NAMES = tuple(_names())
"""Every field of a Schedule, and every part of its tiles."""


def differences(schedule: Schedule, usual: Schedule) -> dict[str, Any]:
    """{name: value} where `schedule` is not as `usual`."""
    return {name: get(schedule, name) for name in NAMES if get(schedule, name) != get(usual, name)}


def _code(name: str, value: Any) -> float:
    return float(CHOICES[name].index(value)) if name in CHOICES else float(value)


class Points:
    """columns: {name: (N,) float64}; of a field that names one of several ways, its place in CHOICES.  base: has all
    that no column has."""

    def __init__(self, base: Schedule, columns: Mapping[str, Tensor], count: int) -> None:
        self.base, self.columns, self.count = base, columns, count

    @classmethod
    def of(cls, schedules: Sequence[Schedule]) -> Points:
        columns = {
            name: torch.tensor([_code(name, get(s, name)) for s in schedules], dtype=torch.float64) for name in NAMES
        }
        return cls(schedules[0], columns, len(schedules))

    def __len__(self) -> int:
        return self.count

    def column(self, name: str) -> Tensor:
        """(N,), or a scalar where all points have it alike."""
        if name in self.columns:
            return self.columns[name]
        return torch.tensor(_code(name, get(self.base, name)), dtype=torch.float64)

    def is_in(self, name: str, *values: Any) -> Tensor:
        """(N,) bool, or a scalar."""
        column = self.column(name)
        chosen = column == _code(name, values[0])
        for value in values[1:]:
            chosen = chosen | (column == _code(name, value))
        return chosen

    def schedule(self, index: int) -> Schedule:
        values = {}
        for name, column in self.columns.items():
            number = int(column[index])
            values[name] = CHOICES[name][number] if name in CHOICES else number
        return replaced(self.base, values)


def points(
    backend: str, cfg: MoEConfig, ep_size: int, *, limit: int = 200_000, keep: Sequence[str] = ("received",)
) -> Points:
    """All points of the space, each once; of more than `limit`, as many drawn evenly, the same every time.  Point 0 is
    the backend's default.  Some may still be refused: `refusals` says why."""
    usual = default_schedule(backend, cfg, ep_size)
    chosen = dimensions(backend, cfg, keep)
    values = [_default_first(d.values[backend], get(usual, d.name)) for d in chosen]
    at = {d.name: i for i, d in enumerate(chosen)}
    place_ND = torch.zeros(1, len(chosen), dtype=torch.int64)
    for i, dimension in enumerate(chosen):
        means_N = torch.ones(len(place_ND), dtype=torch.bool)
        for needed, allowed in dimension.needs.items():
            if needed in at:
                means_N &= torch.tensor([value in allowed for value in values[at[needed]]])[place_ND[:, at[needed]]]
            else:
                means_N &= get(usual, needed) in allowed
        copies_N = torch.where(means_N, len(values[i]), 1)
        place_ND = place_ND.repeat_interleave(copies_N, 0)
        place_ND[:, i] = ranges(torch.zeros_like(copies_N), copies_N)
    if len(place_ND) > limit:
        drawn = torch.randperm(len(place_ND) - 1, generator=torch.Generator().manual_seed(0))[: limit - 1] + 1
        place_ND = place_ND[torch.cat([torch.zeros(1, dtype=torch.int64), drawn.sort().values])]
    columns = {}
    for i, dimension in enumerate(chosen):
        coded = torch.tensor([_code(dimension.name, value) for value in values[i]], dtype=torch.float64)
        for name in (dimension.name, *dimension.also):
            columns[name] = coded[place_ND[:, i]]
    made = Points(usual, columns, len(place_ND))
    if backend == "hopper":
        thresholds = {k: v.expand(len(made)) for k, v in _thresholds(made, cfg.max_tokens_per_rank).items()}
        columns |= thresholds
        if any(float(v[0]) != get(usual, k) for k, v in thresholds.items()):  # else both are one point
            columns = {k: torch.cat([v[:1], v]) for k, v in columns.items()}
            for name in thresholds:
                columns[name][0] = get(usual, name)
        made = Points(usual, columns, len(next(iter(columns.values()))))
    return made


def _thresholds(made: Points, tokens: int) -> dict[str, Tensor]:
    """Fields that say from or up to how many tokens something is done, so that it is done with `tokens` where a point
    says it, and only there; with other numbers, as usual."""
    usual = made.base
    pipelined = min(usual.pipelined_from or PIPELINED_FROM, tokens)
    mega_to = torch.where(made.is_in("operand", "gathered"), float(min(usual.mega_to, tokens - 1)), 0.0)
    return {
        "pipelined_from": torch.where(made.is_in("overlap", "pipelined"), float(pipelined), usual.pipelined_from),
        "beside_from": torch.full((), float(min(usual.beside_from, tokens))),
        "mega_to": torch.where(made.is_in("overlap", "mega"), float(usual.mega_to), mega_to),
    }


def settled(schedule: Schedule, usual: Schedule, backend: str, tokens: int) -> Schedule:
    """A point that was put together from values, with thresholds as `points` has them."""
    if backend != "hopper" or schedule == usual:
        return schedule
    made = Points(usual, {name: torch.tensor([_code(name, get(schedule, name))]) for name in NAMES}, 1)
    return replaced(schedule, {name: int(column) for name, column in _thresholds(made, tokens).items()})


def _default_first(values: tuple[Any, ...], usual: Any) -> list[Any]:
    return [usual, *(value for value in values if value != usual)]


def refusals(schedule: Schedule, cfg: MoEConfig, backend: str) -> list[str]:
    """Why `backend` cannot run this point; empty if it can."""
    if reasons := is_valid(schedule, cfg):
        return reasons
    try:
        refuse_other_fields(schedule, backend, registry.schedule_fields(backend))
    except ConfigError as error:
        return [str(error)]
    if backend != "hopper":
        return []
    reasons = []
    if schedule.gemm1.rows != schedule.gemm2.rows:
        reasons.append(
            f"gemm1.rows is {schedule.gemm1.rows} and gemm2.rows {schedule.gemm2.rows}; on GPUs they are one"
        )
    if cfg.receive_block % schedule.chunk_tokens:
        reasons.append(f"chunk_tokens is {schedule.chunk_tokens}; it must divide {cfg.receive_block}")
    if (schedule.operand, schedule.received) == ("expanded", "again"):
        reasons.append("operand='expanded' leaves nothing to be received='again'")
    return reasons
