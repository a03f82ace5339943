"""Layers and functions."""

from uniep.nn.functional import moe, route
from uniep.nn.modules import Experts, MoE

__all__ = ["Experts", "MoE", "moe", "route"]
