"""The backends by name, each imported on demand: "hopper" needs Triton."""

from __future__ import annotations

import importlib
from types import ModuleType

from uniep.backends.base import Backend
from uniep.membership import Membership
from uniep.schedule import Schedule

_CLASSES = {
    "cpu": ("uniep.backends.cpu.backend", "CpuBackend"),
    "hopper": ("uniep.backends.hopper.backend", "HopperBackend"),
    "nccl": ("uniep.backends.collective.backend", "CollectiveBackend"),
}
NAMES = tuple(_CLASSES)


def _module(name: str) -> ModuleType:
    return importlib.import_module(_CLASSES[name][0])


def make(name: str, member: Membership, schedule: Schedule | None) -> Backend:
    """The backend `name`, one of NAMES, for this member of a group.  schedule: None for its default."""
    made: Backend = getattr(_module(name), _CLASSES[name][1])(member, schedule)
    return made


def schedule_fields(name: str) -> tuple[str, ...]:
    """Fields of a Schedule that mean something to the backend `name`."""
    known: tuple[str, ...] = _module(name).SCHEDULE_FIELDS
    return known
