"""What a router computes."""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

import torch

from uniep.config import refused_number
from uniep.errors import ConfigError

_MOST = torch.finfo(torch.float32).max


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """What a router computes.  All of it changes results.

    score: "softmax" over all experts, or each expert's "sigmoid".
    renormalize: divide a token's K weights by their sum.  scale: multiply them, afterwards.
    groups, groups_per_token: experts form `groups` contiguous groups; a token's experts are in its groups_per_token
        best groups.  If each group lies on one node, this limits the number of nodes (`max_nodes`).
    group_top: a group's score is the sum of this many highest scores in it; None: K / groups_per_token, at least 1.
    selection_bias: add a bias to the scores, only for the choice; `Router.update_bias` changes it by bias_rate per
        step.
    aux_loss, z_loss: coefficients; 0: none.
    jitter: in training the router sees its inputs times factors in [1 - jitter, 1 + jitter), 0: none.
    capacity_factor: an expert takes at most this many times its mean share of all slots; None, the default: all.
    overflow: what happens to slots beyond the capacity: CapacityError ("raise"), or they are dropped and counted
        ("drop").
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    group_top: int | None = None
    selection_bias: bool = False
    bias_rate: float = 1e-3
    aux_loss: float = 0.0
    z_loss: float = 0.0
    jitter: float = 0.0
    capacity_factor: float | None = None
    overflow: Literal["raise", "drop"] = "raise"
    text: str = dataclasses.field(init=False, repr=False, compare=False)  # for operators, which carry strings

    def __post_init__(self) -> None:
        if self.score not in ("softmax", "sigmoid"):
            raise ConfigError(f"score is {self.score!r}; it must be 'softmax' or 'sigmoid'")
        if self.overflow not in ("raise", "drop"):
            raise ConfigError(f"overflow is {self.overflow!r}; it must be 'raise' or 'drop'")
        for name in ("renormalize", "selection_bias"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} is {value!r}; it must be True or False")
        for name in ("scale", "bias_rate", "aux_loss", "z_loss"):
            if not _is_number(value := getattr(self, name)) or not 0 <= value <= _MOST:
                raise ConfigError(f"{name} is {value!r}; it must be a number from 0 to {_MOST:g}")
        if not _is_number(self.jitter) or not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter is {self.jitter!r}; it must be a number of at least 0 and less than 1")
        if (factor := self.capacity_factor) is not None and not (_is_number(factor) and 0 < factor <= _MOST):
            raise ConfigError(
                f"capacity_factor is {factor!r}; it must be a number above 0, up to {_MOST:g}, or None for no limit"
            )
        for name in ("groups", "groups_per_token", *(() if self.group_top is None else ("group_top",))):
            if reason := refused_number(getattr(self, name), 1):
                raise ConfigError(f"{name} is {reason}")
        if self.groups_per_token > self.groups:
            raise ConfigError(
                f"groups_per_token is {self.groups_per_token} but there are {self.groups} groups; lower it"
            )
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        object.__setattr__(self, "text", json.dumps(fields))

    def check(self, num_experts: int, top_k: int) -> None:
        """Raise ConfigError if it does not fit that many experts."""
        if num_experts % self.groups:
            raise ConfigError(f"groups is {self.groups}; it must divide the {num_experts} experts")
        of_group = num_experts // self.groups
        if top_k > self.groups_per_token * of_group:
            raise ConfigError(
                f"top_k is {top_k}, but groups_per_token={self.groups_per_token} groups of {of_group} experts have "
                f"only {self.groups_per_token * of_group}; raise groups_per_token"
            )
        if (self.group_top or 1) > of_group:
            raise ConfigError(f"group_top is {self.group_top}, but a group has {of_group} experts; lower it")
        if self.renormalize and top_k == 1:
            raise ConfigError(
                "top_k=1 with renormalize=True makes every routing weight 1, so the router never learns; "
                "pass renormalize=False"
            )

    def highest_of_group(self, top_k: int) -> int:
        """How many scores are added to a group's score."""
        return self.group_top or max(1, top_k // self.groups_per_token)

    def max_nodes(self, num_nodes: int) -> int:
        """Largest number of nodes that a token goes to, if experts are split over `num_nodes` nodes in order."""
        if num_nodes < 1 or max(num_nodes, self.groups) % min(num_nodes, self.groups):
            raise ConfigError(f"{num_nodes} nodes and {self.groups} groups: one must divide the other")
        return min(num_nodes, self.groups_per_token * max(1, num_nodes // self.groups))

    @property
    def exchanges(self) -> bool:
        """Whether a call needs numbers from all ranks."""
        return self.aux_loss > 0 or self.z_loss > 0 or self.capacity_factor is not None

    @classmethod
    def parse(cls, text: str) -> RouterConfig:
        """The RouterConfig that `text` encodes."""
        return cls(**json.loads(text))
