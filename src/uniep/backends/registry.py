"""The backends by name, each imported on demand: "hopper" needs Triton."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from uniep.backends.base import Backend
from uniep.schedule import Schedule

if TYPE_CHECKING:
    from uniep.workspace import Workspace

_CLASSES = {
    "cpu": ("uniep.backends.cpu.backend", "CpuBackend"),
    "hopper": ("uniep.backends.hopper.backend", "HopperBackend"),
    "nccl": ("uniep.backends.collective.backend", "CollectiveBackend"),
}
NAMES = tuple(_CLASSES)


def _module(name: str) -> ModuleType:
    return importlib.import_module(_CLASSES[name][0])


def make(name: str, workspace: Workspace, schedule: Schedule | None) -> Backend:
    """The backend `name`, one of NAMES, of a Workspace.  schedule: None for its default."""
    made: Backend = getattr(_module(name), _CLASSES[name][1])(workspace, schedule)
    return made


def schedule_fields(name: str) -> tuple[str, ...]:
    """Fields of a Schedule that mean something to the backend `name`."""
    known: tuple[str, ...] = _module(name).SCHEDULE_FIELDS
    return known
