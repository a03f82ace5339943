"""What the adapters share: Workspaces made on demand, and the status of layers: whether uniep runs them, or why not."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from uniep.config import MoEConfig, align_rows
from uniep.errors import ConfigError, UniEPError, UnsupportedError
from uniep.integrations.moe_layers import routed_experts
from uniep.nn import Experts
from uniep.nn.functional import MainGrad, Weights, moe
from uniep.nn.record import LayerRecord
from uniep.nn.router_ops import reduce_counts
from uniep.nn.wrappers import unwrapped
from uniep.weights import Lora
from uniep.workspace import Workspace, choose_timeout

__all__ = ["LayerStatus", "Status", "Workspaces", "free_of", "status_of"]


class Workspaces:
    """The Workspaces of many layers, one per group, device, shape and `agreed`, made by the first call that needs them.

    max_tokens_per_rank: T for all Workspaces; None: they grow with the calls.
    max_rows: as in `MoEConfig`.
    options: keywords of `Workspace`.
    A copy, also a deep one, shares the Workspaces, as copies of a layer do.
    """

    def __init__(self, max_tokens_per_rank: int | None, max_rows: int | None, options: dict[str, Any]) -> None:
        self.max_tokens_per_rank = max_tokens_per_rank
        self.max_rows = max_rows
        self.options = options
        self._made: dict[tuple, list[Workspace]] = {}

    @property
    def workspaces(self) -> list[Workspace]:
        """All open Workspaces."""
        return [workspace for made in self._made.values() for workspace in made]

    def free(self) -> None:
        """Close all Workspaces: before `destroy_process_group`, or to free their memory.  Not collective.

        Graphs whose backward has not run are lost.  Later calls make new Workspaces, on all ranks together.
        """
        for workspace in self.workspaces:
            workspace.close()
        self._made.clear()

    def moe(
        self,
        group: Any,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        w13: Weights,
        w2: Weights,
        *,
        num_local: int,
        activation: str = "swiglu",
        activation_limit: float | None = None,
        biases: tuple[Tensor, Tensor] | None = None,
        weight_at: Literal["output", "activation"] = "output",
        main_grad: MainGrad | None = None,
        agreed: str = "",
        layer: LayerRecord | None = None,
        lora: Lora | None = None,
        error: UniEPError | None = None,
    ) -> Tensor:
        """`uniep.moe` in the parameters' dtype, or autocast's; y in x's.  Collective over `group`, None for one rank.

        num_local: e, the number of experts in w13 and w2.
        biases: b13 and b2, or None.
        agreed: what must be the same on all ranks of the group; calls with other values use another Workspace.
            Ranks that differ in it raise an error when they make a Workspace; later they wait for each other until the
            timeout.
        layer, lora: as for `uniep.moe`; factors of any floating dtype, cast like x.
        error: an error of this rank before the call; all ranks raise it instead of running the call.
        """
        device = x_TD.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        down = w2 if isinstance(w2, Tensor) else w2[0]
        shape = MoEConfig(
            hidden=down.shape[-2],
            ffn=down.shape[-1],
            num_experts=num_local * (1 if group is None else dist.get_world_size(group)),
            top_k=ids_TK.shape[1],
            max_tokens_per_rank=self.max_tokens_per_rank or 1,
            max_rows=self.max_rows,
            activation=activation,
            activation_limit=activation_limit,
            bias=biases is not None,
            dtype=autocast or down.dtype,
            weight_at=weight_at,
        )
        workspace = self._workspace(shape, group, x_TD, agreed)
        if error is not None:
            workspace.tell(error, workspace.entered)
            raise error
        x = x_TD.to(shape.dtype)
        b13, b2 = biases or (None, None)
        y = moe(
            x, ids_TK, weights_TK, w13, w2, workspace=workspace, b13=b13, b2=b2, main_grad=main_grad, layer=layer,
            lora=lora.to(shape.dtype) if lora is not None else None,
        )  # fmt: skip
        return y.to(x_TD.dtype)

    def _workspace(self, shape: MoEConfig, group: Any, x_TD: Tensor, agreed: str) -> Workspace:
        """The newest Workspace of its kind.  If max_tokens_per_rank is not given, it is large enough for every rank's
        tokens.

        Smaller ones stay open, because backwards may still need them.  Sizes at least double, so all smaller ones
        together take less memory than the newest.
        """
        made = self._made.setdefault((group, x_TD.device, shape, agreed), [])
        if self.max_tokens_per_rank is not None:
            if not made:
                made.append(Workspace(shape, group, device=x_TD.device, agreed=agreed, **self.options))
            return made[-1]
        needed = len(x_TD) if group is None else self._most(group, x_TD)
        room = made[-1].cfg.max_tokens_per_rank if made else 0
        if needed > room or not made:
            cfg = dataclasses.replace(shape, max_tokens_per_rank=max(align_rows(needed), 2 * room, 1))
            made.append(Workspace(cfg, group, device=x_TD.device, agreed=agreed, **self.options))
        return made[-1]

    @_disable_dynamo
    def _most(self, group: Any, x_TD: Tensor) -> int:
        """The number of tokens of the rank that has most."""
        most = torch.tensor(len(x_TD), device=x_TD.device)
        timeout_s = choose_timeout(self.options.get("timeout_s"))
        reduce_counts(most, group, timeout_s, "an expert-parallel layer", dist.ReduceOp.MAX)
        return int(most)

    def __copy__(self) -> Workspaces:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Workspaces:
        return self


@dataclasses.dataclass(frozen=True)
class LayerStatus:
    """One MoE layer.  how: what runs it.  why: why uniep does not run it; empty if it does."""

    name: str
    how: str
    why: str

    @property
    def active(self) -> bool:
        """Whether uniep runs it."""
        return not self.why


@dataclasses.dataclass(frozen=True)
class Status:
    """All MoE layers that a `status` function found, including those that uniep does not reach.

    layers: one `LayerStatus` each, in the model's order; iteration and len() go over them.  str() is a table.
    """

    layers: tuple[LayerStatus, ...]

    def __iter__(self) -> Iterator[LayerStatus]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def require_all(self) -> Status:
        """Returns itself if uniep runs all layers, so that a training script cannot silently run without uniep.

        Raises UnsupportedError, with the name and reason of each layer that uniep does not run.
        """
        if self.num_active < len(self):
            raise UnsupportedError(f"{self}\n  remedy: what each reason says, or do not require these layers")
        return self

    @property
    def num_active(self) -> int:
        """Number of layers that uniep runs."""
        return sum(layer.active for layer in self.layers)

    def __str__(self) -> str:
        lines = [f"uniep runs {self.num_active} of {len(self.layers)} MoE layers"]
        for layer in self.layers:
            lines.append(f"  {layer.name}: {layer.how}" + (f"; not uniep: {layer.why}" if layer.why else ""))
        return "\n".join(lines)


def free_of(models: nn.Module | Sequence[nn.Module], kind: type[nn.Module]) -> None:
    """`Workspaces.free` of the layers of this kind.  models: one, or the parts of one."""
    for part in [models] if isinstance(models, nn.Module) else models:
        for module in part.modules():
            if isinstance(module, kind):
                module.workspaces.free()  # type: ignore[operator, union-attr]


def status_of(
    models: nn.Module | Sequence[nn.Module],
    pattern: str,
    is_layer: Callable[[nn.Module], bool],
    describe: Callable[[Any], tuple[str, str]],
    others: str,
) -> Status:
    """Status of all MoE layers whose names match `pattern`: `describe` gives (how, why) of those that `is_layer`.

    others: why uniep does not run other modules that hold routed experts.
    models: one model, or its parts; with several parts, names begin with the part's number.  Names leave out
        torch.compile and checkpoint_wrapper.

    Raises ConfigError if there are none.
    """
    parts = [models] if isinstance(models, nn.Module) else list(models)
    layers = {
        (f"{number}." if len(parts) > 1 else "") + unwrapped(name): module
        for number, part in enumerate(parts)
        for name, module in routed_experts(part, lambda m: is_layer(m) or isinstance(m, Experts)).items()
    }
    found = {name: module for name, module in layers.items() if fnmatch.fnmatchcase(name, pattern)}
    if not found:
        some = ", ".join(list(layers)[:3]) or "none"
        kinds = ", ".join(dict.fromkeys(type(part).__name__ for part in parts))
        raise ConfigError(
            f"pattern {pattern!r} matches none of the {len(layers)} MoE layers of {kinds} "
            f"(first names: {some}); pass a pattern that does"
        )

    def how_and_why(module: nn.Module) -> tuple[str, str]:
        if isinstance(module, Experts):
            return "uniep.nn.Experts", ""
        return describe(module) if is_layer(module) else (f"its own {type(module).__name__}", others)

    return Status(tuple(LayerStatus(name, *how_and_why(module)) for name, module in found.items()))
