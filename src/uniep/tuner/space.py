"""The search space: which dimensions of `Schedule` are searched, with which values, and points as columns.

A point is a Schedule.  Many points are one table of columns (`Points`), so that a model can evaluate 1e5 of them at
once, and only the timed ones become Schedules.  A dimension and its values are declared with its field
(`uniep.schedule.DIMENSIONS`).  This module says which values are tried, and which other dimensions switch it off: then
it has one value, so that no point appears twice.

Column suffix: N points.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from uniep.config import MoEConfig
from uniep.dimension import Measured
from uniep.schedule import DIMENSION, DIMENSIONS, FEW_ROWS, Schedule, default_schedule, is_valid
from uniep.way import resolve

PIPELINED_FROM = Measured().pipelined_from


Needs = Mapping[str, tuple[Any, ...]]
Setup = tuple[str, MoEConfig, int]
"""Backend, layer and ranks."""


def _all(values: tuple[Any, ...], setup: Setup) -> tuple[Any, ...]:
    return values


def _without_shards(values: tuple[Any, ...], setup: Setup) -> tuple[Any, ...]:
    """dW2 by blocks stays behind."""
    return values[:1] if setup[1].gradient_shards > 1 else values


def _orders(values: tuple[str, ...], setup: Setup) -> tuple[str, ...]:
    """On one rank all tiles are local, so that local ones first is the natural order."""
    return tuple(v for v in values if v != "natural") if setup[2] == 1 else values


def _distinct_waves(values: tuple[int, ...], setup: Setup) -> tuple[int, ...]:
    """0, and the numbers of waves that differ from what 0 chooses for a full call, and from each other."""
    backend, cfg, ep_size = setup
    usual, found = default_schedule(backend, cfg, ep_size), dict[int, int]()
    acting = {name: allowed[0] for name, allowed in _WAVES.items()}
    for value in values:
        schedule = replaced(usual, {**acting, "arrival_waves": value})
        waves = resolve(cfg, ep_size, cfg.max_tokens_per_rank, schedule, backend=backend).waves
        found.setdefault(waves, value)
    return tuple(found.values())


@dataclasses.dataclass(frozen=True)
class Searched:
    """name: of the dimension; `also`: dimensions that take the same value; `sets`: {value: {dimension: its value}}, for
    all values the same ones.  values: the values to try, by backend; a backend that is not listed has no choice.
    needs: alternatives, {dimension: values} each; this dimension has an effect only if all dimensions of one of them
    have one of these values.  only: {value: {dimension: values}}, which this value needs as well.  distinct: of the
    values, those that differ in a setup."""

    name: str
    values: Mapping[str, tuple[Any, ...]]
    also: tuple[str, ...] = ()
    sets: Mapping[Any, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    needs: tuple[Needs, ...] = ({},)
    only: Mapping[Any, Needs] = dataclasses.field(default_factory=dict)
    distinct: Callable[[tuple[Any, ...], Setup], tuple[Any, ...]] = _all

    def allowed(self, value: Any, holds: Callable[[str, tuple[Any, ...]], Any]) -> Any:
        """Whether `value` has an effect.  holds(name, values): whether that dimension has one of the values, a bool or
        (N,) bool; so is the result."""

        def every(needs: Needs) -> Any:
            return functools.reduce(operator.and_, (holds(name, values) for name, values in needs.items()), True)

        return functools.reduce(operator.or_, map(every, self.needs)) & every(self.only.get(value, {}))

    def others(self, value: Any) -> dict[str, Any]:
        """The other dimensions that this value decides."""
        return {**dict.fromkeys(self.also, value), **self.sets.get(value, {})}

    @property
    def decides(self) -> tuple[str, ...]:
        """The names of these."""
        return tuple(self.others(next(iter(self.sets), None)))


_MEGA, _NOT_SERIAL = {"overlap": ("mega",)}, {"overlap": ("fused", "pipelined", "mega")}
_STAGED = {"overlap": ("fused", "serial", "pipelined")}
_ORDERS, _LISTS = ("local-first", "natural", "critical-path"), {"transfer": ("push", "pull")}
_SERIAL, _FUSED = {"overlap": ("serial",)}, {"overlap": ("fused", "pipelined")}
_WAVES = {**_FUSED, "transfer": ("copy",), "tile_order": ("local-first",), "operand": ("gathered",)}
_GPUS = ("hopper", "nccl")
_WEIGHT_TILES = {
    tile.programs_per_sm: {
        f"weight_gradient.{part}": getattr(tile, part) for part in ("columns", "depth", "warps", "stages")
    }
    for tile in (Schedule().weight_gradient, *FEW_ROWS.values())
}
SEARCHED = (
    Searched("overlap", {"cpu": ("fused", "serial"), "hopper": ("fused", "serial", "pipelined", "mega")}),
    Searched("transfer", {"hopper": ("push", "copy", "pull")}),
    Searched("send_order", {"cpu": ("token", "expert")}),
    Searched("send_order", {"hopper": ("token", "expert")}, needs=(_LISTS,)),
    Searched("tile_order", {"cpu": _ORDERS}, distinct=_orders),
    Searched("tile_order", {"hopper": _ORDERS}, only={"critical-path": _MEGA}, distinct=_orders),
    Searched("operand", {"hopper": ("gathered", "expanded")}, needs=(_STAGED,)),
    Searched("arrival_waves", {"hopper": (0, 1, 2, 4, 8)}, needs=(_WAVES,), distinct=_distinct_waves),
    Searched("received", dict.fromkeys(("cpu", "hopper", "nccl"), ("saved", "again"))),
    Searched("preactivation", dict.fromkeys(("cpu", "hopper", "nccl"), ("saved", "recomputed"))),
    Searched("gate_up.rows", {"cpu": (128, 64), "hopper": (128, 64)}, also=("down.rows",)),
    Searched("gate_up.columns", {"cpu": (256, 128, 64), "hopper": (256, 128), "nccl": (256, 128)}),
    Searched("down.columns", {"cpu": (256, 128, 64), "hopper": (256, 128), "nccl": (256, 128)}),
    Searched("gate_up.group_rows", {"hopper": (16, 8, 4)}, also=("down.group_rows",)),
    Searched("gate_up.stages", {"hopper": (4, 3)}, also=("down.stages",)),
    Searched("weight_gradient.programs_per_sm", dict.fromkeys(_GPUS, tuple(_WEIGHT_TILES)), sets=_WEIGHT_TILES),
    Searched("chunk_tokens", {"cpu": (64, 32, 128)}),
    Searched("chunk_tokens", {"hopper": (32, 128)}, needs=(_LISTS,)),
    Searched("push_programs", {"hopper": (8, 16, 32)}, needs=({**_LISTS, **_NOT_SERIAL},)),
    Searched("sum_programs", {"hopper": (16, 8)}, needs=(_STAGED,)),
    Searched("pass_programs", {"hopper": (1, 2)}, needs=(_SERIAL, {**_FUSED, **_LISTS, "received": ("again",)})),
    Searched("gate_up_parts", {"hopper": (1, 2, 4)}, needs=({"overlap": ("pipelined",)},)),
    Searched(
        "down_sms",
        {"hopper": (32, 0)},
        needs=({"overlap": ("pipelined",)},),
        only={32: {"gate_up_parts": (1,)}, 0: {"gate_up_parts": (2, 4)}},
    ),
    Searched("activation_gradient", {"hopper": ("after", "beside")}, needs=(_FUSED,)),
    Searched("down_wgrad", {"hopper": ("after", "beside")}, needs=(_FUSED,), distinct=_without_shards),
    Searched("group_sum", {"hopper": ("after", "beside")}, needs=({"overlap": ("fused",)},)),
    Searched("peer_order", {"cpu": ("natural", "rotated")}, needs=({"overlap": ("fused",)},)),
    Searched("peer_order", {"hopper": ("natural", "rotated")}, needs=(_MEGA,)),
    Searched("weight_gradient_order", {"cpu": ("last", "interleaved")}, needs=({"overlap": ("fused",)},)),
    Searched(
        "weight_gradient_order", {"hopper": ("last", "interleaved")}, needs=({**_MEGA, "tile_order": _ORDERS[:2]},)
    ),
    Searched("activation", {"cpu": ("fused", "separate")}),
    Searched("matrix_workers", {"cpu": (1, 2)}),
    Searched("vector_workers", {"cpu": (1, 2)}),
)
"""Left to the user: free_sms, and the thresholds `*_from` and `mega_to`, which a Workspace needs for calls of fewer
tokens.  Not searched yet, though declared: of products of rows depth, warps and programs_per_sm; of weight gradients
rows, and other tiles than the usual ones; chunk-major; warps of sums and passes.  A dimension is behind those that it
needs."""


OF_PEERS = ("transfer", "send_order", "arrival_waves", "chunk_tokens", "push_programs", "peer_order")
"""Dimensions without effect on one rank."""

OF_MEMORY = ("received", "preactivation")
"""Dimensions that trade memory for time."""


def dimensions(backend: str, cfg: MoEConfig, ep_size: int, keep: Sequence[str] = OF_MEMORY) -> list[Searched]:
    """The searched dimensions of a backend for a configuration, with the values that differ there.  keep: names that
    are not searched, such as those that trade memory for time."""
    left_out = {*keep, *(OF_PEERS if ep_size == 1 else ()), *(("group_sum",) if cfg.combine_groups is None else ())}
    return [
        dataclasses.replace(d, values={backend: d.distinct(d.values[backend], (backend, cfg, ep_size))})
        for d in SEARCHED
        if backend in d.values and d.name not in left_out
    ]


def get(schedule: Schedule, name: str) -> Any:
    """ "gate_up.columns" -> its value."""
    return DIMENSION[name].of(schedule)


def replaced(schedule: Schedule, values: Mapping[str, Any]) -> Schedule:
    """`schedule` with these dimensions changed."""
    for name, value in values.items():
        schedule = DIMENSION[name].put(schedule, value)
    return schedule


NAMES = tuple(d.name for d in DIMENSIONS)


def differences(schedule: Schedule, usual: Schedule) -> dict[str, Any]:
    """{name: value} where `schedule` differs from `usual`."""
    return {name: get(schedule, name) for name in NAMES if get(schedule, name) != get(usual, name)}


def _is_way(name: str) -> bool:
    """Whether the dimension names one of several ways, which columns count."""
    return isinstance(DIMENSION[name].default, str)


def _code(name: str, value: Any) -> float:
    return float(DIMENSION[name].domain.index(value)) if _is_way(name) else float(value)


class Points:
    """columns: {name: (N,) float64}; for a dimension that names one of several ways, its place in the domain.
    base: gives the values of dimensions without a column."""

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

    def parts(self, count: int) -> Iterator[Points]:
        """So many at a time."""
        for first in range(0, len(self), count):
            columns = {name: column[first : first + count] for name, column in self.columns.items()}
            yield Points(self.base, columns, min(count, len(self) - first))

    def column(self, name: str) -> Tensor:
        """(N,), or a scalar if it is the same for all points."""
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
            values[name] = DIMENSION[name].domain[number] if _is_way(name) else number
        return replaced(self.base, values)


def points(
    backend: str, cfg: MoEConfig, ep_size: int, *, limit: int = 1_200_000, keep: Sequence[str] = OF_MEMORY
) -> Points:
    """All points of the space, each once; if there are more than `limit`, a uniform sample, the same every time.  Point
    0 is the backend's default.  Some may still be refused: `refusals` says why."""
    usual = default_schedule(backend, cfg, ep_size)
    chosen = dimensions(backend, cfg, ep_size, keep)
    values = [_default_first(d.values[backend], get(usual, d.name)) for d in chosen]
    at = {d.name: i for i, d in enumerate(chosen)}
    place_ND = torch.zeros(1, len(chosen), dtype=torch.int8)

    def holds(name: str, allowed: tuple[Any, ...]) -> Any:
        if name not in at:
            return get(usual, name) in allowed
        return torch.tensor([value in allowed for value in values[at[name]]])[place_ND[:, at[name]].int()]

    for i, dimension in enumerate(chosen):
        means_NV = torch.ones(len(place_ND), len(values[i]), dtype=torch.bool)
        for place, value in list(enumerate(values[i]))[1:]:  # the usual one, where none has an effect
            means_NV[:, place] = dimension.allowed(value, holds)
        point_N, place_N = means_NV.nonzero(as_tuple=True)
        place_ND = place_ND[point_N]
        place_ND[:, i] = place_N
    if len(place_ND) > limit:
        drawn = torch.randperm(len(place_ND) - 1, generator=torch.Generator().manual_seed(0))[: limit - 1] + 1
        place_ND = place_ND[torch.cat([torch.zeros(1, dtype=torch.int64), drawn.sort().values])]
    columns = {}
    for i, dimension in enumerate(chosen):
        decided = [{dimension.name: value, **dimension.others(value)} for value in values[i]]
        for name in decided[0]:
            coded = torch.tensor([_code(name, of[name]) for of in decided], dtype=torch.float64)
            columns[name] = coded[place_ND[:, i].int()]
    made = Points(usual, columns, len(place_ND))
    if backend != "hopper":
        return made
    return Points(usual, columns | _thresholds(made, cfg.max_tokens_per_rank), len(made))


def _thresholds(made: Points, tokens: int) -> dict[str, Tensor]:
    """Values for the fields that are thresholds in tokens.  With `tokens` tokens, a point that chooses the feature gets
    it and others do not; with other numbers of tokens, the usual thresholds apply."""
    usual = made.base
    features = {
        "pipelined_from": (
            made.is_in("overlap", "pipelined") | made.is_in("down_wgrad", "beside"),
            usual.pipelined_from or PIPELINED_FROM,
        ),
        "beside_from": (made.is_in("activation_gradient", "beside"), usual.beside_from),
    }
    return {
        name: torch.where(chosen, float(min(least, tokens)), get(usual, name)).expand(len(made))
        for name, (chosen, least) in features.items()
    }


def point(values: Mapping[str, Any], backend: str, cfg: MoEConfig, ep_size: int) -> Schedule:
    """The point with these values of searched dimensions, the usual ones of others, and the thresholds that `points`
    uses.  A dimension without effect there keeps its usual value, so that a point has one name."""
    usual, chosen = default_schedule(backend, cfg, ep_size), dimensions(backend, cfg, ep_size)
    kept: dict[str, Any] = {}
    for d in chosen:
        value = values.get(d.name, get(usual, d.name))
        means = d.allowed(value, lambda name, allowed: kept.get(name, get(usual, name)) in allowed)
        kept[d.name] = value if means else get(usual, d.name)
    made = replaced(usual, kept | {name: value for d in chosen for name, value in d.others(kept[d.name]).items()})
    if backend != "hopper" or made == usual:
        return made
    alone = Points(usual, {name: torch.tensor([_code(name, get(made, name))]) for name in NAMES}, 1)
    thresholds = _thresholds(alone, cfg.max_tokens_per_rank)
    return replaced(made, {name: int(column) for name, column in thresholds.items()})


def neighbours(schedule: Schedule, backend: str, cfg: MoEConfig, ep_size: int) -> Iterator[tuple[str, Any, Schedule]]:
    """(dimension, value, point): every point that can run with one searched dimension changed, the usual value first;
    each point once."""
    usual, chosen = default_schedule(backend, cfg, ep_size), dimensions(backend, cfg, ep_size)
    values = {d.name: get(schedule, d.name) for d in chosen}
    seen = {schedule, point(values, backend, cfg, ep_size)}
    for d in chosen:
        for value in _default_first(d.values[backend], get(usual, d.name)):
            made = point({**values, d.name: value}, backend, cfg, ep_size)
            if made not in seen and not refusals(made, cfg, ep_size, backend):
                seen.add(made)
                yield d.name, value, made


def _default_first(values: tuple[Any, ...], usual: Any) -> list[Any]:
    return [usual, *(value for value in values if value != usual)]


def refusals(schedule: Schedule, cfg: MoEConfig, ep_size: int, backend: str) -> list[str]:
    """Why `backend` cannot run this point; empty if it can."""
    return is_valid(schedule, cfg, ep_size, backend)
