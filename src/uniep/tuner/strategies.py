"""Strategies of other systems, and uniep's own, as points of the space, as far as its dimensions express them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from uniep.config import MoEConfig
from uniep.errors import ConfigError
from uniep.schedule import Schedule, default_schedule
from uniep.tuner.space import replaced


@dataclasses.dataclass(frozen=True)
class Strategy:
    """points: {backend: values that differ from its default}; backends that cannot express it are left out.  missing:
    what the original does and no dimension expresses."""

    name: str
    about: str
    source: str
    points: Mapping[str, Mapping[str, Any]]
    missing: str = ""


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("serial-all-to-all", "collectives of tokens and rows between the products", "Megatron-LM",
                 {"nccl": {}, "cpu": {"overlap": "serial", "tile_order": "natural"}}),
        Strategy("all-gather", "every token to every rank, then the products", "Megatron-LM",
                 {"hopper": {"overlap": "serial", "tile_order": "natural", "transfer": "copy"}},
                 "rows come back one by one; a reduce-scatter of sums would round elsewhere"),
        Strategy("deepep-like", "each token once per rank, pushed by programs, then the products", "DeepEP",
                 {"hopper": {"overlap": "serial", "tile_order": "natural", "transfer": "push"},
                  "cpu": {"overlap": "serial", "tile_order": "natural"}},
                 "rows added before they return: that is MoEConfig.combine_groups, which rounds elsewhere"),
        Strategy("comet-like", "tokens in chunks under the first product, local tiles first", "Comet",
                 {"hopper": {"overlap": "fused", "transfer": "push", "tile_order": "local-first"},
                  "cpu": {"overlap": "fused", "tile_order": "local-first", "chunk_tokens": 32}},
                 "the number of sending programs per layer is fixed for a call, as push_programs"),
        Strategy("mega-ep-relay", "each token once per rank, copied there for its other experts", "Mega-EP",
                 {"hopper": {"overlap": "fused", "transfer": "push", "operand": "expanded"},
                  "cpu": {"tile_order": "natural", "chunk_tokens": 32}},
                 "workers that only relay: programs that have pushed copy rows; CPUs read them in place"),
        Strategy("uniep", "the backend's default: transfers beside both products", "UniEP",
                 {"hopper": {}, "cpu": {}}),
        Strategy("taskflow", "one kernel of tile tasks; rows in the order in which peers' tokens arrive",
                 "HyperParallel-MoE",
                 {"hopper": {"overlap": "mega", "tile_order": "natural", "peer_order": "rotated", "transfer": "push",
                             "send_order": "expert"},
                  "cpu": {"tile_order": "natural", "peer_order": "rotated", "activation": "separate",
                          "send_order": "expert"}},
                 "vector workers of their own on GPUs"),
    )
}  # fmt: skip


def implementations(text: str, backend: str) -> tuple[list[str], list[str]]:
    """(names of benchmarks/moe.py for named strategies, comma-separated, or "all"; those that are left out, and why).

    Raises ConfigError for an unknown name.
    """
    names = list(STRATEGIES) if text == "all" else [name for name in text.split(",") if name]
    made, left_out = [], []
    for name in names:
        strategy = _named(name)
        if "nccl" in strategy.points:
            made.append("uniep-nccl")
        elif backend in strategy.points:
            changes = "+".join(f"{field}={value}" for field, value in strategy.points[backend].items())
            made.append(f"uniep@{changes}" if changes else "uniep")
        else:
            left_out.append(f"{name}: {strategy.missing}" if not strategy.points else f"{name}: not on {backend}")
    return list(dict.fromkeys(made)), left_out


def _named(name: str) -> Strategy:
    if name not in STRATEGIES:
        raise ConfigError(f"strategy {name!r} is unknown; use one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def point(name: str, backend: str, cfg: MoEConfig, ep_size: int) -> Schedule:
    """The Schedule of a named strategy.  Raises ConfigError if the backend cannot express it."""
    strategy = _named(name)
    if backend not in strategy.points:
        there = ", ".join(strategy.points) or "no backend yet"
        why = f": {strategy.missing}" if not strategy.points else ""
        raise ConfigError(f"strategy {name!r} is not available on backend {backend!r}, only on {there}{why}")
    return replaced(default_schedule(backend, cfg, ep_size), strategy.points[backend])
