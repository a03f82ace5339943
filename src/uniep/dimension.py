"""What a dimension of a `Schedule` is.  Each is declared in `uniep.schedule`, next to its field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from uniep.config import MAX_INDEX, MoEConfig, refused_number


class Measured(NamedTuple):
    """The measured values behind defaults and ways: from 2x H200 (docs/log.md), used for every GPU until it is tuned.

    sms: multiprocessors of a GPU.
    worth_copying: if a peer needs at least this share of the tokens, copy engines send all of them (simulated, EP 4 and
        8: at a share of 0.31 pushes are as fast as copies, which need no programs, but keep more tokens).
    flop_per_wire_byte: operations of a grouped GEMM while NVLink sends one byte (726 TFLOP/s, 350 GB/s).
    worth_pipelining: time of results on the wire divided by time of the down product; from this ratio on, results
        should start during gate_up.
    pipelined_from: tokens; with fewer, sharing the multiprocessors costs more than it hides.
    half_row_tiles: rows of an expert, on average; up to so many, row tiles have 64 rows.
    few_tokens: up to so many tokens of a rank are pushed. Copies took 0.96 to 1.07 of that time (512).
    push_bytes_per_us: all pushing programs of a rank together, beside a GEMM.  copy_bytes_per_us: one copy engine.
    push_latency_us: until the first tokens arrive.  copy_lead_us: from the entry of all ranks to the first tile.
    weight_gradient_time: of dW2, by operation, relative to gate_up_grad.
    sm_flop_per_us: operations of one multiprocessor in a grouped GEMM.  memory_bytes_per_us: passes over memory.
    """

    sms: int = 132
    worth_copying: float = 0.35
    flop_per_wire_byte: float = 2074
    worth_pipelining: float = 1.7
    pipelined_from: int = 4096
    half_row_tiles: int = 48
    few_tokens: int = 512
    push_bytes_per_us: float = 150_000
    push_latency_us: float = 30
    copy_bytes_per_us: float = 350_000
    copy_lead_us: float = 30
    weight_gradient_time: float = 1.18
    sm_flop_per_us: float = 5.5e6
    memory_bytes_per_us: float = 3_800_000


MEASURED = Measured()


class Setting(NamedTuple):
    """Where a Schedule is to run: the layer, the ranks, the backend (None: what holds on all), the machine."""

    cfg: MoEConfig
    ep_size: int = 1
    backend: str | None = None
    measured: Measured = MEASURED


CPU, GPU, MEGA, COLLECTIVE = "cpu", "hopper", "hopper, mega", "nccl"
"""Where a value has an effect: a backend, or the hopper backend if each call is one kernel per direction."""

Scope = Literal["local", "wire"]
Condition = Callable[["Dimension", Any, Setting], str]
"""(dimension, Schedule, setting) -> why the dimension cannot have its value there; "" if it can."""


def _always(d: Dimension, schedule: Any, at: Setting) -> str:
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dimension:
    """One choice that a Schedule makes.

    name: the field, or "gate_up.columns", a field of a Tile.
    domain: all its values; for a number, those worth trying, ascending.
    default: the value in `Schedule()`.  usual: what backends start from instead, or a function of (dimension, setting).
    backends: those on which it has an effect.  only: values that have an effect on fewer backends.
    scope: "local", it may depend on a rank's T, which its peers do not know; "wire", it is the same on all ranks.
    condition: see `Condition`.  least, most: limits of a number.  unit: unit of a number, after a space.
    doc: what it does.  helps: when.  source: where it comes from.
    shown: values that appear in a Schedule's `name`, and as which text.
    """

    name: str
    domain: tuple[Any, ...]
    default: Any
    doc: str
    helps: str
    source: str
    backends: tuple[str, ...]
    scope: Scope = "local"
    only: Mapping[Any, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    condition: Condition = _always
    usual: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    least: int = 1
    most: int = MAX_INDEX
    unit: str = ""
    shown: Mapping[Any, str] = dataclasses.field(default_factory=dict)

    def of(self, schedule: Any) -> Any:
        """Its value in `schedule`."""
        outer, _, inner = self.name.partition(".")
        value = getattr(schedule, outer)
        return getattr(value, inner) if inner else value

    def put(self, schedule: Any, value: Any) -> Any:
        """`schedule` with this value."""
        outer, _, inner = self.name.partition(".")
        new = dataclasses.replace(getattr(schedule, outer), **{inner: value}) if inner else value
        return dataclasses.replace(schedule, **{outer: new})

    def values(self, schedule: Any, backend: str) -> tuple[Any, ...]:
        """The values that have an effect on a backend; () if none does."""
        places = {backend} | ({MEGA} if backend == GPU and schedule.overlap == "mega" else set())
        if places.isdisjoint(self.backends):
            return ()
        return tuple(value for value in self.domain if not places.isdisjoint(self.only.get(value, self.backends)))

    def start(self, at: Setting) -> Any:
        """What the backend starts from."""
        usual = self.usual.get(at.backend or "", self.default)
        return usual(self, at) if callable(usual) else usual

    def refused(self, value: Any) -> str:
        """Why this is not a value of the dimension; "" if it is one."""
        if not isinstance(self.default, int):
            if isinstance(value, str) and value in self.domain:
                return ""
            return f"{self.name} is {value!r}; use {listed(self.domain)}"
        reason = refused_number(value, self.least, self.most).replace(";", f"{self.unit};", 1)
        return reason and f"{self.name} is {reason}"


def listed(values: tuple[Any, ...], word: str = "or") -> str:
    shown = [repr(value) for value in values]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} {word} {shown[-1]}"


def dimension(default: Any, domain: tuple[int, ...] = (), **about: Any) -> Any:
    """The dataclass field of a dimension.  domain: only for numbers; other domains are the values of the type."""
    return dataclasses.field(default=default, metadata={"domain": domain, "about": about})


def in_domain(why: str = "") -> Condition:
    def condition(d: Dimension, schedule: Any, at: Setting) -> str:
        value = d.of(schedule)
        return "" if value in d.domain else f"{d.name} is {value}; it must be {listed(d.domain)}{why}"

    return condition


def first_of(*conditions: Condition) -> Condition:
    def condition(d: Dimension, schedule: Any, at: Setting) -> str:
        return next(filter(None, (one(d, schedule, at) for one in conditions)), "")

    return condition
