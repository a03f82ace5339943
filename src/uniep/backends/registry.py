"""The backends by name, each imported on demand, because "hopper" needs Triton."""

from __future__ import annotations

import importlib

from uniep.backends.base import Backend
from uniep.membership import Membership
from uniep.schedule import Schedule

_CLASSES = {
    "cpu": ("uniep.backends.cpu.backend", "CpuBackend"),
    "hopper": ("uniep.backends.hopper.backend", "HopperBackend"),
    "nccl": ("uniep.backends.collective.backend", "CollectiveBackend"),
}
NAMES = tuple(_CLASSES)


def make(name: str, member: Membership, schedule: Schedule | None) -> Backend:
    """The backend `name`, one of NAMES, for this member of a group.  schedule: None for its default."""
    module, kind = _CLASSES[name]
    made: Backend = getattr(importlib.import_module(module), kind)(member, schedule)
    return made
