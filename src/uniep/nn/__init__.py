"""Layers and functions."""

from uniep.nn import flops
from uniep.nn.adapters import add_lora, merge_lora
from uniep.nn.digests import DigestLog
from uniep.nn.functional import moe, route
from uniep.nn.invariant import activate, add, add_by_pairs, linear
from uniep.nn.load import Load, LoadMonitor, Waits
from uniep.nn.modules import Experts, MoE, SharedExperts
from uniep.nn.record import LayerRecord
from uniep.nn.replay import RoutingRecord, record_routing, replay_routing
from uniep.nn.router import Router, Routing, choose_experts
from uniep.nn.router_config import RouterConfig
from uniep.nn.router_ops import attach_loss
from uniep.weights import Lora

__all__ = [
    "DigestLog",
    "Experts",
    "LayerRecord",
    "Load",
    "LoadMonitor",
    "Lora",
    "MoE",
    "Router",
    "RouterConfig",
    "Routing",
    "RoutingRecord",
    "SharedExperts",
    "Waits",
    "activate",
    "add",
    "add_by_pairs",
    "add_lora",
    "attach_loss",
    "choose_experts",
    "linear",
    "merge_lora",
    "moe",
    "record_routing",
    "replay_routing",
    "route",
]

flops.register()
