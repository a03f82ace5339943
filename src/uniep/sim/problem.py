"""The simulated problem: shape, ranks, tokens, routing and direction, and the compiler's sites made from them.

Balanced routing is symmetric: with ranks counted from itself, every rank sees the same.  So one rank stands for all
(`folded`): while it sends to the rank p steps ahead, the rank p steps behind sends the same to it.  Ranks are pairs
(node, index in the node), and steps are taken in both.  Skewed routing needs all ranks.

Shape suffixes: as in `taskflow.site`; P pairs (group, event).
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Literal

import torch
from torch import Tensor

from uniep.config import MoEConfig
from uniep.errors import ConfigError
from uniep.routing import build_parts, build_plan
from uniep.shapes import Scope, Shape
from uniep.taskflow.operators import Access, Operators, Pairs, sent
from uniep.taskflow.site import Site
from uniep.way import Way
from uniep.workloads import workload

Direction = Literal["fwd", "bwd"]
ROUTINGS = ("balanced", "natural", "zipf", "uniform")
"""balanced: every expert is chosen equally often, by every rank.  natural: expert popularity is log-normal (an estimate
of what load-balanced routers do: the busiest of 64 experts gets about twice the mean).  zipf: the n-th most popular
expert in proportion to 1/n, in that order of experts which benchmarks measure.  uniform: every token
chooses random experts (what benchmarks call balanced)."""

NATURAL_SIGMA = 0.3


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of one layer.  tokens: per rank.  scope: None: that of the shape."""

    shape: Shape
    ep: int
    tokens: int
    routing: str = "balanced"
    direction: Direction = "fwd"
    scope: Scope | None = None
    combine_groups: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS:
            raise ConfigError(f"routing {self.routing!r} is unknown; use {', '.join(ROUTINGS)}")
        if self.direction not in ("fwd", "bwd"):
            raise ConfigError(f"direction {self.direction!r} is unknown; use fwd or bwd")
        self.cfg.check_group(self.ep)

    @property
    def cfg(self) -> MoEConfig:
        return self.shape.config(self.ep, self.tokens, combine_groups=self.combine_groups)

    @property
    def covers(self) -> Scope:
        return self.scope or self.shape.scope

    @property
    def symmetric(self) -> bool:
        """Whether one rank stands for all."""
        return self.routing == "balanced"

    def ids(self, rank: int, node: int | None = None) -> Tensor:
        """ids (T, K) of one rank.  node: ranks per node; balanced routing is symmetric there too; None: all."""
        experts, top_k = self.cfg.num_experts, self.cfg.top_k
        if self.routing == "balanced":
            base_TK, own = _balanced(self.tokens, experts, top_k, self.seed), self.cfg.experts_per_rank(self.ep)
            node = node or self.ep
            target, nodes = base_TK // own, self.ep // node
            target = (target // node + rank // node) % nodes * node + (target + rank) % node
            return target * own + base_TK % own
        fixed = torch.Generator().manual_seed(3 + self.seed)  # 3: that of benchmarks/cases.py
        drawn = torch.Generator().manual_seed(zlib.crc32(f"{self.routing}/{self.seed}/{rank}".encode()))
        log_E = torch.zeros(experts)
        if self.routing == "natural":
            log_E = torch.randn(experts, generator=fixed) * NATURAL_SIGMA
        elif self.routing == "zipf":
            log_E = -torch.log1p(torch.randperm(experts, generator=fixed).float())
        uniform_TE = torch.rand(self.tokens, experts, generator=drawn).clamp(1e-6, 1 - 1e-6)
        return (log_E - torch.log(-torch.log(uniform_TE))).topk(top_k, dim=1).indices

    def sites(self, way: Way, node: int | None = None) -> list[Site]:
        """Sites of all ranks, or of the one that stands for all."""
        cfg, ids = self.cfg, [self.ids(rank, node) for rank in range(self.ep)]
        return [self.site(rank, ids, cfg, way) for rank in range(1 if self.symmetric else self.ep)]

    def site(self, rank: int, ids: list[Tensor], cfg: MoEConfig, way: Way) -> Site:
        plan = build_plan(ids, rank, cfg, align=way.align)
        chunks = torch.arange(-(-self.tokens // way.chunk_tokens))
        parts = build_parts(plan, rank, cfg) if way.grouped else None
        return Site(rank, self.ep, cfg, way, plan, self.tokens, chunks, parts)


@functools.lru_cache(maxsize=4)
def _balanced(tokens: int, experts: int, top_k: int, seed: int) -> Tensor:
    """(T, K): every expert equally often, to within one; otherwise random sets of K distinct experts.

    Starts from an even assignment.  Then random pairs of tokens repeatedly swap one expert, if both stay distinct.
    """
    ids_TK = workload("balanced", tokens=tokens, num_experts=experts, top_k=top_k, seed=seed, shards=1).ids_TK
    generator = torch.Generator().manual_seed(seed)
    half = tokens // 2
    for _ in range(_EXCHANGES * top_k):
        pair = torch.randperm(tokens, generator=generator)[: 2 * half].view(2, half)
        slot = torch.randint(top_k, (2, half), generator=generator)
        mine, other = ids_TK[pair[0], slot[0]], ids_TK[pair[1], slot[1]]
        clash = (ids_TK[pair[0]] == other[:, None]).any(1) | (ids_TK[pair[1]] == mine[:, None]).any(1)
        ids_TK[pair[0], slot[0]], ids_TK[pair[1], slot[1]] = (
            torch.where(clash, mine, other), torch.where(clash, other, mine),
        )  # fmt: skip
    return ids_TK


_EXCHANGES = 4
"""Swaps per slot and token; with this many, tokens need as many ranks as with uniform routing."""


def folded(operators: Operators, node: int) -> Operators:
    """The operators of rank 0 that stand for those of all ranks: what it writes to peers, peers write to it.

    node: ranks of a node.
    """
    return Operators(
        [
            dataclasses.replace(op, writes=tuple(Access(a.stage, _folded(a, node)) for a in op.writes))
            for op in operators
        ]
    )


def _folded(access: Access, node: int):  # type: ignore[no-untyped-def]
    def pairs(site: Site, tiles: Tensor) -> Pairs:
        made = access.pairs(site, tiles)
        number_P = made.number_P
        if access.pairs in FROM_SOURCE:
            number_P = opposite(made.rank_P, site.ep_size, node) * site.chunks + number_P % site.chunks
        return made._replace(rank_P=torch.zeros_like(made.rank_P), number_P=number_P)

    return pairs


def opposite(rank: Tensor, ep_size: int, node: int) -> Tensor:
    """The rank whose distance to rank 0 equals the distance from rank 0 to `rank`, in nodes and in indices of a
    node."""
    return (-(rank // node)) % (ep_size // node) * node + (-(rank % node)) % node


def to_peer(site: Site, tiles: Tensor) -> Pairs:
    """One event at the tile's peer, for each source."""
    index = torch.arange(len(tiles))
    return Pairs(index, index, tiles[:, 0], torch.full_like(index, site.rank * site.chunks))


FROM_SOURCE = (sent, to_peer)
"""Accesses whose event numbers contain the source rank."""
