"""The identity of a layer: its number, the draw it was initialised from, and whether its experts are still its own.

A `LayerRecord` identifies a layer in this process.  Operators carry it as a small tensor, `key`: an input of compiled
graphs whose value has no guard, so that blocks share one graph.  Across ranks a layer is identified by the number of
the Workspace's forward in which it first ran: all ranks count forwards alike, whatever else they make or copy.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from uniep.backends.base import LayerTag
from uniep.nn.bits import bits_digest
from uniep.nn.wrappers import refuse_wrappers
from uniep.weights import ExpertWeights
from uniep.workspace import Workspace

_names = itertools.count(1)
_by_name: weakref.WeakValueDictionary[int, LayerRecord] = weakref.WeakValueDictionary()
_of_parameters = WeakIdKeyDictionary()

_SAMPLES = 8  # rows and columns of a matrix that are sampled: at least this many, at most twice as many


class LayerRecord:
    """One layer, for `uniep.moe(..., layer=)`.  Make it where the layer is made and keep it there; `Experts` has one.

    module: the `Experts` that it belongs to; its wrappers are checked.
    A deep copy or an unpickled copy is another layer.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        name = next(_names)
        with _disable_current_modes(), torch.inference_mode(False):
            self.key = torch.tensor(name, device="cpu")
        self.draw = 0  # the draw that initialised the experts, if it came from torch's generator
        self._module = None if module is None else weakref.ref(module)
        self._numbers: dict[str, int] = {}  # by Workspace
        self._before: Tensor | None = None  # digest of the experts at the last look
        self._calls = self._looks = 0  # since they were made or loaded
        self._approved: tuple | None = None
        _by_name[name] = self

    def made(self, experts: ExpertWeights | None, dtype: torch.dtype, rank: int, draw: int = 0) -> None:
        """The experts have new values.  None: they are not whole here, so the next call looks at them."""
        self.draw, self._calls, self._looks = draw, 0, 0
        self._before = None if experts is None else digest(experts, dtype, rank)

    def number(self, workspace: Workspace) -> int:
        """`LayerTag.number` of a layer that has been called."""
        return self._numbers.get(workspace.key, 0)

    def enter(self, workspace: Workspace, experts: ExpertWeights) -> LayerTag:
        """The layer's tag for a forward.  In calls 1, 2, 4, 8 ... it takes digests of the experts.

        Raises ConfigError if the module is wrapped as if other ranks had copies of its experts.
        """
        number = self._numbers.get(workspace.key) or workspace.forwards + 1
        if workspace.ep_size == 1:
            return LayerTag(number)
        call = self._calls + 1
        looks = call & self._calls == 0
        self._check_wrappers(workspace, looks)
        if not looks or _is_capturing(experts.w13[0]):
            return LayerTag(number, draw=self.draw)
        now = digest(experts, workspace.cfg.dtype, workspace.rank)
        before = self._before
        if before is None or before.device != now.device:  # not known; a layer's is no other rank's
            before = now if self._module is None or self._looks else torch.full_like(now, -1 - workspace.rank)
        return LayerTag(number, torch.stack([before, now, torch.full_like(now, self._looks)]), self.draw)

    def done(self, workspace: Workspace, tag: LayerTag) -> None:
        """The forward of `tag` has run, on all ranks."""
        self._numbers.setdefault(workspace.key, tag.number)
        self._calls += 1
        if tag.digests is not None:
            self._before = tag.digests[1]
            self._looks += 1

    def _check_wrappers(self, workspace: Workspace, looks: bool) -> None:
        module = None if self._module is None else self._module()
        if module is None or workspace.group is None:
            return
        ddp = DistributedDataParallel._active_ddp_module
        seen = id(ddp), getattr(module, "_is_fsdp_managed_module", False), type(module.w13)
        if looks or seen != self._approved:
            refuse_wrappers(module, workspace.group, workspace.cfg.num_experts, ddp)
            self._approved = seen

    def belongs_to(self, module: nn.Module) -> None:
        """Set the module of a copied record, which is not the original's."""
        if self._module is None:
            self._module = weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerRecord:
        new = LayerRecord()
        new.draw, new._before, new._calls, new._looks = self.draw, self._before, self._calls, self._looks
        return new

    def __reduce__(self) -> tuple:
        return LayerRecord, ()


def recorded_modules() -> list[nn.Module]:
    """The living modules that have a record."""
    found = (None if record._module is None else record._module() for record in list(_by_name.values()))
    return [module for module in found if module is not None]


def find_record(key: Tensor | None, w13: Tensor, workspace: Workspace) -> LayerRecord | None:
    """The record of a call: that of `key`, or else that of the parameter w13; None: not known.

    After calls of unknown layers, a new parameter may have been in one of them as a plain tensor, on this rank only.
    So it stays unknown, instead of getting a number that differs from other ranks' numbers.
    """
    if key is not None:
        return _by_name.get(int(key))
    if type(w13) is not nn.Parameter:
        return None
    record = _of_parameters.get(w13)
    if workspace.unnamed and (record is None or not record.number(workspace)):
        return None
    if record is None:
        record = _of_parameters[w13] = LayerRecord()
    return record


@torch.no_grad()
def digest(experts: ExpertWeights, dtype: torch.dtype, rank: int, beside: Sequence[Tensor] = ()) -> Tensor:
    """() int64: digest of some values of every expert, in `dtype`.  With NaN it equals no other rank's digest.
    beside: more of their matrices.

    Exact: the same values give the same number everywhere.
    """
    first = experts.w13[0]
    total = torch.zeros((), dtype=torch.int64, device=first.device)
    finite = torch.ones((), dtype=torch.bool, device=first.device)
    for t in (*experts.w13, *experts.w2, *beside):
        rows, columns = (max(1, size // _SAMPLES) for size in t.shape[-2:])
        sample = t.detach()[..., ::rows, ::columns].to(dtype).contiguous()
        total = total * 1_000_003 + bits_digest(sample)
        finite &= sample.isfinite().all()
    return torch.where(finite, total, -1 - rank)


def _is_capturing(t: Tensor) -> bool:
    return t.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
