"""uniep: deterministic expert-parallel Mixture-of-Experts layers whose communication hides under compute."""

from uniep import nn
from uniep.config import MoEConfig
from uniep.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    DTypeError,
    InputError,
    PeerTimeoutError,
    UniEPError,
    UnsupportedError,
)
from uniep.memory import plan_memory
from uniep.nn.functional import moe, route
from uniep.nn.load import report
from uniep.nn.ops import SAVE_OPS
from uniep.routing import RoutingPlan
from uniep.row_operator import RowOperator
from uniep.schedule import Schedule, Tile
from uniep.version import __version__
from uniep.workspace import Workspace

__all__ = [
    "SAVE_OPS",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "DTypeError",
    "InputError",
    "MoEConfig",
    "PeerTimeoutError",
    "RoutingPlan",
    "RowOperator",
    "Schedule",
    "Tile",
    "UniEPError",
    "UnsupportedError",
    "Workspace",
    "__version__",
    "moe",
    "nn",
    "plan_memory",
    "report",
    "route",
]
