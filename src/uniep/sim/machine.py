"""Machines: speeds of a die, its links and its host's launches, as plain numbers from a TOML file.

Only `Machine` turns work into time: `speeds` for the static scheduler and analytic models, `costs` (in `costs`) for the
simulator.  Every key is a number with a unit and a range.  A file with a missing or unknown key is refused, naming the
key.

A key that depends on the size of the group may be given per EP size, `all_to_all_gbps_ep8` next to `all_to_all_gbps`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from uniep.errors import ConfigError
from uniep.taskflow.scheduler import Speeds


class Key(NamedTuple):
    """unit; lowest and highest value; whole: an integer; default: for optional keys; per_ep: may be given per EP
    size."""

    unit: str
    low: float
    high: float
    about: str
    whole: bool = False
    default: float | None = None
    per_ep: bool = False


KEYS = {
    "matrix_workers": Key("workers", 1, 4096, "matrix units of a die that take tasks: cubes, or multiprocessors", True),
    "vector_workers": Key("workers", 0, 4096, "vector units of a die; 0: matrix workers run vector tasks, too", True),
    "matrix_tflops": Key("TFLOP/s", 0.001, 1e5, "achieved in grouped GEMMs by all matrix workers of a die together"),
    "boost_ms": Key("ms", 0, 1e6, "time of products at that rate until the card reaches its power limit"),
    "sustained_share": Key("", 0.1, 1, "share of that rate at the power limit"),
    "tile_us": Key("us", 0, 1000, "overhead of a matrix task: filling its pipeline, storing its tile"),
    "framework_tile_us": Key("us", 0, 1000, "as tile_us, in the products of frameworks"),
    "gather_us": Key("us", 0, 1000, "extra time of a tile that gathers its rows"),
    "store_gbps": Key("GB/s", 0.01, 1e5, "rate of a worker's stores beyond one result in the layer's dtype"),
    "hbm_gbps": Key("GB/s", 0.1, 1e6, "memory of a die, peak"),
    "hbm_efficiency": Key("", 0.01, 1, "share of hbm_gbps that passes over memory achieve"),
    "l2_gbps": Key("GB/s", 0.1, 1e6, "last-level cache of a die, reads of all workers together"),
    "worker_gbps": Key("GB/s", 0.01, 1e5, "most that one worker moves through memory"),
    "link_gbps": Key("GB/s", 0.01, 1e5, "links of a die to others of its node, one way"),
    "link_efficiency": Key("", 0.01, 1, "share of link_gbps that one-sided stores achieve"),
    "link_latency_us": Key("us", 0, 1e4, "until a peer of the node sees a store"),
    "worker_link_gbps": Key("GB/s", 0.01, 1e5, "most that one worker stores to peers"),
    "ranks_per_node": Key("ranks", 1, 65536, "dies that links connect", True),
    "network_gbps": Key("GB/s", 0.01, 1e5, "network of a die to other nodes, one way"),
    "network_efficiency": Key("", 0.01, 1, "share of network_gbps that transfers achieve"),
    "network_latency_us": Key("us", 0, 1e4, "until a rank of another node sees a store"),
    "all_to_all_gbps": Key("GB/s", 0.01, 1e5, "bytes of a rank to others of its node in a collective", per_ep=True),
    "plan_us": Key("us", 0, 1e5, "time in the forward before anything is sent: planning who needs what", per_ep=True),
    "matrix_launch_us": Key("us", 0, 1e5, "gap between a kernel and the GEMM after it"),
    "vector_launch_us": Key("us", 0, 1e5, "gap between a kernel and the elementwise kernel after it"),
    "collective_launch_us": Key("us", 0, 1e5, "gap between a kernel and the collective after it"),
    "task_us": Key("us", 0, 1000, "taking a task from a queue made beforehand"),
    "dynamic_task_us": Key("us", 0, 1000, "deciding at run time which task is next"),
    "matrix_poll_us": Key("us", 0, 1e5, "polling interval of a waiting matrix worker; on average it loses half of it"),
    "vector_poll_us": Key("us", 0, 1e5, "as matrix_poll_us, for a vector worker"),
    "backward_residual_us": Key(
        "us", 0, 1e6, "backward time, on all vector workers, that no operator accounts for", default=0, per_ep=True
    ),
}  # fmt: skip
_PER_EP = re.compile(r"(\w+)_ep(\d+)")


@dataclasses.dataclass(frozen=True)
class Machine:
    """name: of the file.  values: every key of KEYS, and keys per EP size."""

    name: str
    values: Mapping[str, float]

    def __getattr__(self, key: str) -> float:
        if key in KEYS:
            return self.values[key]
        raise AttributeError(f"a machine has no {key!r}; its keys: {', '.join(KEYS)}")

    def of(self, key: str, ep_size: int) -> float:
        """The value of a key that may be given per EP size."""
        return self.values.get(f"{key}_ep{ep_size}", self.values[key])

    def replaced(self, changes: Mapping[str, object]) -> Machine:
        """A copy with other values, checked like those of a file.  A key also replaces its values per EP size."""
        kept = {key: value for key, value in self.values.items() if _base(key) not in changes or key in changes}
        return checked(self.name, {**kept, **changes})

    def per_node(self, ep_size: int) -> int:
        """Ranks of a group per node, the same number on each; the whole group if it fits on one node."""
        most = int(self.ranks_per_node)
        return ep_size if ep_size <= most else math.gcd(ep_size, most)

    @property
    def separate_vector(self) -> bool:
        """Whether vector workers are separate units, which then also send all rows."""
        return self.vector_workers > 0

    @property
    def hbm(self) -> float:
        """Bytes per ns that passes over memory achieve."""
        return self.hbm_gbps * self.hbm_efficiency

    @property
    def speeds(self) -> Speeds:
        """Speeds of one worker, for the static scheduler: its own speed, or its share when all of its class are
        busy."""
        return Speeds(
            flops=self.matrix_tflops * 1e3 / self.matrix_workers,
            memory=min(self.worker_gbps, self.hbm / (self.vector_workers or self.matrix_workers)),
            peer=min(self.worker_link_gbps, self.link_gbps * self.link_efficiency),
            task_ns=round(self.task_us * 1e3),
        )


def _base(key: str) -> str:
    """all_to_all_gbps_ep8 -> all_to_all_gbps, where that may be given per EP size."""
    match = _PER_EP.fullmatch(key)
    return match[1] if match and match[1] in KEYS and KEYS[match[1]].per_ep else key


def checked(name: str, values: Mapping[str, object]) -> Machine:
    """Raises ConfigError that names every bad key with its unit and its range."""
    bad = []
    for key, value in values.items():
        base = _base(key)
        if base not in KEYS:
            near = difflib.get_close_matches(base, KEYS, 1)
            bad.append(f"{key} is not a key; " + (f"did you mean {near[0]}?" if near else f"keys: {', '.join(KEYS)}"))
            continue
        known, kind = KEYS[base], int if KEYS[base].whole else (int, float)
        wanted = f"{'a whole number' if known.whole else 'a number'} of {known.low:g} to {known.high:g} {known.unit}"
        if isinstance(value, bool) or not isinstance(value, kind):
            bad.append(f"{key} is {value!r}; it must be {wanted.rstrip()} ({known.about})")
        elif not known.low <= value <= known.high:  # type: ignore[operator]  # a number; false for nan
            bad.append(f"{key} is {value:g}; it must be {wanted.rstrip()} ({known.about})")  # type: ignore[str-bytes-safe]
    for key, known in KEYS.items():
        if key not in values and known.default is None:
            bad.append(
                f"{key} is missing; give {known.low:g} to {known.high:g} {known.unit}".rstrip() + f" ({known.about})"
            )
    if bad:
        raise ConfigError(f"machine {name}: " + "; ".join(bad))
    defaults = {key: known.default for key, known in KEYS.items() if known.default is not None}
    return Machine(name, {**defaults, **values})  # type: ignore[dict-item]  # numbers, as checked


def machines() -> list[str]:
    """Names of the machines of the package."""
    folder = resources.files("uniep.sim") / "machines"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_machine(name: str, changes: Mapping[str, object] | None = None) -> Machine:
    """A machine of the package by name, or your own by the path of its file; changes: values to replace.

    Raises ConfigError for a file that does not exist, is not TOML or has bad keys.
    """
    path = Path(name)
    if name in machines():
        text = (resources.files("uniep.sim") / "machines" / f"{name}.toml").read_text()
    elif path.suffix == ".toml" or path.exists():
        try:
            text, name = path.read_text(), path.stem
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"machine file {path}: {error}; name a TOML file, or one of {_listed()}") from None
    else:
        raise ConfigError(f"machine {name!r} is unknown; use {_listed()}, or the path of a TOML file")
    try:
        made = checked(name, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"machine {name}: not TOML: {error}") from None
    return made.replaced(changes) if changes else made


def _listed() -> str:
    return ", ".join(machines())


def parse_changes(texts: Sequence[str]) -> dict[str, object]:
    """["link_gbps=78"] -> {"link_gbps": 78.0}.  Raises ConfigError."""
    changes: dict[str, object] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        whole = _base(key) in KEYS and KEYS[_base(key)].whole
        try:
            changes[key] = int(value) if whole else float(value)
        except ValueError:
            raise ConfigError(f"--set {text!r} is not KEY=NUMBER; keys: {', '.join(KEYS)}") from None
        if not sign:
            raise ConfigError(f"--set {text!r} is not KEY=NUMBER")
    return changes
