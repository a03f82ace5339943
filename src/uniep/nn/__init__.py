"""Layers and functions."""

from uniep.nn.functional import moe, route
from uniep.nn.modules import Experts, MoE
from uniep.nn.record import LayerRecord

__all__ = ["Experts", "LayerRecord", "MoE", "moe", "route"]
