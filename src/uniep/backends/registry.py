"""The backends by name, each imported on demand: "hopper" needs Triton."""

from __future__ import annotations

import importlib
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


def make(name: str, workspace: Workspace, schedule: Schedule | None) -> Backend:
    """The backend `name`, one of NAMES, of a Workspace.  schedule: None for its default."""
    module, kind = _CLASSES[name]
    made: Backend = getattr(importlib.import_module(module), kind)(workspace, schedule)
    return made
