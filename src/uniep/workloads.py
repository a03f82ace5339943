"""Exactly defined routing workloads, for tests and measurements.

A workload is a pure function of (name, seed, step) and of the shape: the same tokens choose the same
experts whatever the expert-parallel size.  Its tokens lie in `shards` consecutive shards, and a rank of
an EP group owns shards / EP consecutive ones.  Every row holds K distinct experts.

balanced      every expert equally often, to within one; so ranks are balanced too, at each EP size.
hot_experts   one expert in sixteen, drawn by the seed, is chosen 16 times as often.
hot_rank      the same, but the hot experts are neighbours: they live on one rank.
hot_spread    the same number of hot experts, spread evenly over all ranks.
ragged        uniform choice; the shards have very different numbers of tokens, one of them none.
zero_experts  uniform over half of the experts; the other half, whole ranks among them, gets nothing.
moving        hot_rank, with the hot neighbours one shard further at each step.
burst         uniform; an eighth of the tokens at most steps, all of them at every fourth.
"""

from __future__ import annotations

import dataclasses
import zlib

import torch
from torch import Tensor

from uniep.errors import ConfigError

NAMES = ("balanced", "hot_experts", "hot_rank", "hot_spread", "ragged", "zero_experts", "moving", "burst")

HOT = 16.0
"""How much more often a hot expert is chosen."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """ids_TK: (T, K) int64, the tokens of all shards one after the other.  shard_tokens: T of each shard."""

    ids_TK: Tensor
    shard_tokens: tuple[int, ...]

    def split(self, ep_size: int) -> list[Tensor]:
        """The ids of each rank of an EP group.  Raises ConfigError unless ep_size divides the shards."""
        shards = len(self.shard_tokens)
        if ep_size < 1 or shards % ep_size:
            raise ConfigError(f"ep_size={ep_size} does not divide the workload's {shards} shards; pass shards=")
        share = shards // ep_size
        sizes = [sum(self.shard_tokens[rank * share : (rank + 1) * share]) for rank in range(ep_size)]
        return list(self.ids_TK.split(sizes))


def workload(
    name: str, *, tokens: int, num_experts: int, top_k: int, seed: int = 0, step: int = 0, shards: int = 8
) -> Workload:
    """The workload `name` (one of NAMES) with `tokens` tokens in all.  Raises ConfigError for impossible arguments."""
    if name not in NAMES:
        raise ConfigError(f"workload {name!r} is not known; known: {', '.join(NAMES)}")
    if tokens < 0 or shards < 1 or not 1 <= top_k <= num_experts:
        raise ConfigError(
            f"tokens={tokens}, shards={shards}, top_k={top_k}, num_experts={num_experts}: "
            "need tokens >= 0, shards >= 1 and 1 <= top_k <= num_experts"
        )
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{seed}/{step}".encode()))
    if name == "burst" and step % 4:
        tokens = -(-tokens // 8)
    if name == "balanced":
        ids_TK = _balanced(tokens, num_experts, top_k, generator)
    else:
        preference_E = _preference(name, num_experts, top_k, seed, step, shards)
        ids_TK = _draw(tokens, preference_E, top_k, generator)
    return Workload(ids_TK, _ragged(tokens, shards, generator) if name == "ragged" else _even(tokens, shards))


def _balanced(tokens: int, num_experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    """Whole rounds over all experts, and an evenly spaced subset for the rest.

    A subset floor((i E + phase) / r), i < r, puts floor or ceil of L r / E experts into any L neighbours,
    so ranks of every EP size are balanced at once.  Sorted by expert and dealt to the tokens in turn,
    an expert's at most T slots fall on different tokens.
    """
    rounds, rest = divmod(tokens * top_k, num_experts)
    phase = int(torch.randint(num_experts, (), generator=generator))
    extra = (torch.arange(rest) * num_experts + phase) // max(rest, 1)
    experts = torch.cat([torch.arange(num_experts).repeat(rounds), extra]).sort().values
    ids_TK = experts.view(top_k, tokens).T[torch.randperm(tokens, generator=generator)]
    return _shuffle_slots(ids_TK, generator)


def _preference(name: str, num_experts: int, top_k: int, seed: int, step: int, shards: int) -> Tensor:
    """How often each expert is chosen, relative to the others; (E,) fp64."""
    weight_E = torch.ones(num_experts, dtype=torch.float64)
    per_rank = max(1, num_experts // shards)
    hot = max(1, num_experts // 16)
    if name == "hot_experts":
        fixed = torch.Generator().manual_seed(zlib.crc32(f"{name}/{seed}".encode()))
        weight_E[torch.randperm(num_experts, generator=fixed)[:hot]] = HOT
    elif name == "hot_spread":
        weight_E[torch.arange(per_rank) * num_experts // per_rank] = HOT
    elif name in ("hot_rank", "moving"):
        first = (seed + (step if name == "moving" else 0)) % shards * per_rank
        weight_E[(first + torch.arange(per_rank)) % num_experts] = HOT
    elif name == "zero_experts":
        weight_E[max(top_k, num_experts // 2) :] = 0
    return weight_E


def _draw(tokens: int, weight_E: Tensor, top_k: int, generator: torch.Generator) -> Tensor:
    """K distinct experts per row, with chances proportional to `weight_E`."""
    if not tokens:
        return torch.zeros(0, top_k, dtype=torch.int64)
    return torch.multinomial(weight_E.expand(tokens, -1), top_k, replacement=False, generator=generator)


def _shuffle_slots(ids_TK: Tensor, generator: torch.Generator) -> Tensor:
    return ids_TK.gather(1, torch.rand(ids_TK.shape, generator=generator).argsort(1))


def _even(tokens: int, shards: int) -> tuple[int, ...]:
    return tuple(tokens * (s + 1) // shards - tokens * s // shards for s in range(shards))


def _ragged(tokens: int, shards: int, generator: torch.Generator) -> tuple[int, ...]:
    """Shares 0, 1, 2, 4, 8, ... of the tokens, in random order; the largest takes the remainder."""
    shares = [0, *(2**s for s in range(shards - 1))] if shards > 1 else [1]
    sizes = [tokens * share // sum(shares) for share in shares]
    sizes[-1] += tokens - sum(sizes)
    return tuple(sizes[s] for s in torch.randperm(shards, generator=generator).tolist())
