"""Which tensor of which training step has other bits than in another run: `DigestLog` writes, `uniep diff` compares.

Each rank writes a line of JSON for each step into a file of its own, RANK.jsonl: for every tensor its digest, and where
the part that this rank holds lies in the whole.  The digest of a whole tensor is a sum over its elements, so that parts
add up however many ranks hold them: runs at other EP and FSDP sizes are compared tensor by tensor, without
communication.  Experts are compared one by one, by their global ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import uniep.version
from uniep.errors import ConfigError
from uniep.meeting import has_process_group
from uniep.nn.bits import part_digests
from uniep.nn.modules import Experts, local_part
from uniep.nn.wrappers import unwrapped

Entry = list[Any]
"""[what it is, offset of this rank's part, digest]; offset None: each rank has a value of its own."""


class DigestLog:
    """Writes digests of a training run into `folder`, a file for each rank.

        with DigestLog("run-a") as log:
            for step, batch in enumerate(batches):
                loss = model.loss(batch)
                loss.backward()
                log.write(step, model, loss=loss)  # parameters and gradients, as they are now
                optimizer.step()

    group: the ranks of the run; default all.
    Then `uniep diff run-a run-b` names the first tensor that differs.  A digest costs one pass over the tensor, in
    int64, and every `write` one wait of the host.  Files of an earlier run are overwritten.

    DTensors and the parameters of `uniep.nn.Experts` are parts of whole tensors; other tensors are taken for copies,
    which must be equal on all ranks that have one of that name.
    Raises ConfigError if the folder cannot be written.
    """

    def __init__(self, folder: str | Path, *, group: dist.ProcessGroup | None = None) -> None:
        joined = has_process_group()
        self.rank, self.ranks = (dist.get_rank(group), dist.get_world_size(group)) if joined else (0, 1)
        path = Path(folder) / f"{self.rank}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; give DigestLog a folder that can be written") from None
        self._outputs: list[tuple[str, Entry, Tensor]] = []
        self._line({"uniep": uniep.version.__version__, "torch": torch.__version__, "ranks": self.ranks})

    def write(
        self, step: int, model: nn.Module | None = None, *, optimizer: Any = None, **values: Tensor | float
    ) -> None:
        """Write one step: parameters and buffers, `values`, watched outputs, gradients (or main_grads) from the last
        parameter to the first, states of the optimizer, in this order.

        values: tensors or numbers of this rank by name, for example the loss.  Runs with other numbers of ranks are
        compared in those that are equal on all ranks.
        """
        found: list[tuple[str, Entry, Tensor]] = []
        named = list(_named(model)) if model is not None else []
        for name, tensor, experts in named:
            found += self._of("parameter" if isinstance(tensor, nn.Parameter) else "buffer", name, tensor, experts)
        for name, value in values.items():
            found += self._own("value", name, torch.as_tensor(value))
        found += self._outputs
        self._outputs = []
        for name, tensor, experts in reversed(named):
            grad = tensor.grad if tensor.grad is not None else getattr(tensor, "main_grad", None)
            if grad is not None:
                found += self._of("gradient", name, grad, experts)
        for name, tensor, experts in named if optimizer is not None else ():
            for key, state in optimizer.state.get(tensor, {}).items():
                if isinstance(state, Tensor):
                    found += self._of(f"state {key}", name, state, experts if state.shape == tensor.shape else None)
        self._line({"step": step, "tensors": _with_digests(found)})

    def watch(self, model: nn.Module) -> None:
        """From now on also write what the model's MoE layers and modules without children return, call by call.

        Each rank has its own; runs are compared in them if they have equally many ranks.
        """
        for path, module in model.named_modules():
            if isinstance(module, Experts) or next(module.children(), None) is None:
                module.register_forward_hook(self._watcher(_plain(path), module))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> DigestLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _line(self, document: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(document, separators=(",", ":")) + "\n")
        self._file.flush()

    def _watcher(self, name: str, watched: nn.Module) -> Any:
        def watch(module: nn.Module, args: Any, output: Any) -> None:
            if not self._file.closed and module is watched:  # a deep copy has the hook, too
                tensors = output if isinstance(output, (tuple, list)) else [output]
                for tensor in (t for t in tensors if isinstance(t, Tensor)):
                    call = sum(key.startswith(f"output {name},") for key, _, _ in self._outputs)
                    self._outputs += self._own("output", f"{name}, number {call}", tensor)

        return watch

    def _own(self, kind: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Entry, Tensor]]:
        local = local_part(tensor).detach()
        digests = part_digests(local, local.shape, [0] * local.ndim)
        yield f"{kind} {name}", [_is(local), None], digests

    def _of(self, kind: str, name: str, tensor: Tensor, experts: Experts | None) -> Iterator[tuple[str, Entry, Tensor]]:
        """(name, entry without its digest, digests) of what this rank holds of one tensor, one for each expert."""
        from torch.distributed.tensor import DTensor  # takes half a second
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        tensor = tensor.detach()
        local, shape, offset = tensor, tuple(tensor.shape), [0] * tensor.ndim
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                yield from self._own(kind, name, tensor)
                return
            local = tensor.to_local()
            offset = list(compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)[1])
        elif experts is not None:
            offset[0] = experts.first_expert
        if not local.numel():
            return
        digests = part_digests(local, shape, offset, each=experts is not None)
        if experts is None:
            yield f"{kind} {name}", [_is(tensor), offset], digests
            return
        what = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(shape[1:])}"
        for at in range(len(local)):
            yield f"{kind} {name}, expert {offset[0] + at}", [what, offset[1:]], digests[at : at + 1]


def _with_digests(found: Iterable[tuple[str, Entry, Tensor]]) -> dict[str, Entry]:
    """The entries with their digests, which come to the host together."""
    rows = list(found)
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, _, digest in rows:
        by_device.setdefault(digest.device, []).append(digest)
    numbers = {device: iter(torch.cat(digests).tolist()) for device, digests in by_device.items()}
    return {name: [*entry, f"{next(numbers[digest.device]) % 2**64:016x}"] for name, entry, digest in rows}


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor, Experts | None]]:
    """(name, tensor, its Experts if its first dimension is experts') of all parameters and buffers."""
    owner: dict[int, Experts] = {}
    for module in model.modules():
        if isinstance(module, Experts):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if module.expert_dims.get(name) == 0:
                    owner[id(tensor)] = module
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield _plain(path), tensor, owner.get(id(tensor))


def _plain(path: str) -> str:
    """The name without any wrappers, DDP included."""
    return unwrapped(path).removeprefix("module.")


def _is(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
