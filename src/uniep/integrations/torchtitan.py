"""torchtitan: its routed experts, with tokens and experts run by uniep, chosen by an override of its config.

    python -m torchtitan.train --module qwen3 --config ... --override.imports \\
        'uniep.integrations.torchtitan.routed_experts={"max_tokens_per_rank": 8192}' \\
        uniep.integrations.torchtitan.selective_ac

Router, load balancing, shared experts, parameters (w1, w3 (e, F, D) and w2 (e, D, F)), sharding and FSDP2 stay
torchtitan's; dispatch, experts and combine are one call of uniep over the "ep" mesh.  Like torchtitan's grouped GEMM,
it computes in bfloat16.  Anything that uniep would compute differently raises UnsupportedError.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from uniep.errors import UnsupportedError
from uniep.integrations.common import LayerStatus, Status, Workspaces, free_of, status_of
from uniep.nn.ops import SAVE_OPS
from uniep.nn.record import LayerRecord

try:
    import spmd_types
    from torchtitan.config import derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
except ImportError as cause:
    raise UnsupportedError(f"torchtitan cannot be imported ({cause}): pip install 'torchtitan>=0.3,<0.4'") from cause

__all__ = ["LayerStatus", "Status", "UniEPRoutedExperts", "UniEPSelectiveAC", "free", "status"]

WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")
SIGNATURES = (
    ("x_TD", "topk_scores_TK", "topk_expert_ids_TK", "num_local_tokens_per_expert_E"),
    ("x_BLD", "topk_scores_BLK", "topk_expert_ids_BLK", "num_local_tokens_per_expert_E"),
)
"""Signatures of RoutedExperts.forward, on which torchtitan's sharding depends: after 0.3, and in 0.3."""

_signature = tuple(inspect.signature(RoutedExperts.forward).parameters)[1:]
if _signature not in SIGNATURES:
    raise UnsupportedError(f"RoutedExperts.forward of this torchtitan takes {_signature}; uniep knows {SIGNATURES}")


class UniEPRoutedExperts(RoutedExperts):
    """RoutedExperts in which uniep replaces dispatch, grouped GEMMs and combine.

    Config: the original fields, and max_tokens_per_rank, max_rows, backend, timeout_s as for `MoEConfig` and
        `Workspace`.
    max_tokens_per_rank None: Workspaces grow with the calls, and every call first exchanges the numbers of tokens of
    all ranks, and the host waits for it.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        max_tokens_per_rank: int | None = None
        max_rows: int | None = None
        backend: str = "auto"
        timeout_s: float | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if reason := _refused(type(self.inner_experts), type(self.token_dispatcher)):
            raise UnsupportedError(f"uniep cannot run these routed experts: {reason}")
        self.ffn = config.inner_experts.hidden_dim
        self.record = LayerRecord()
        self.workspaces = _workspaces(config.max_tokens_per_rank, config.max_rows, config.backend, config.timeout_s)

    def _run(self, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        if spmd_types.is_type_checking():
            raise UnsupportedError("debug.spmd_typechecking is on, and uniep's operators have no types; turn it off")
        mesh = getattr(self.token_dispatcher, "ep_mesh", None)
        group = None if mesh is None else mesh.get_group()
        w1, w2, w3 = (_local(getattr(self.inner_experts, name)) for name in WEIGHTS)
        if isinstance(self.inner_experts, FSDPModule):
            raise UnsupportedError(
                "inner_experts are an FSDP unit of their own, whose parameters are gathered when that is called, and "
                "uniep does not call it; leave them to the unit of their block, as torchtitan does"
            )
        if w1.shape[1] != self.ffn:
            raise UnsupportedError(
                f"this rank holds w1 {tuple(w1.shape)} of experts of width {self.ffn}: uniep keeps experts whole. "
                "Beside tensor parallelism set expert_parallel_degree > 1"
            )
        half = torch.bfloat16
        y_TD = self.workspaces.moe(
            group,
            x.flatten(0, -2).to(half),
            ids.flatten(0, -2),
            scores.flatten(0, -2),
            (w1.to(half), w3.to(half)),
            w2.to(half),
            num_local=len(w1),
            layer=self.record,
        )
        return y_TD.to(x.dtype).view(x.shape)


def _flat(
    self: Any,
    x_TD: Tensor,
    topk_scores_TK: Tensor,
    topk_expert_ids_TK: Tensor,
    num_local_tokens_per_expert_E: Tensor,
) -> Tensor:
    return self._run(x_TD, topk_scores_TK, topk_expert_ids_TK)


def _batched(
    self: Any,
    x_BLD: Tensor,
    topk_scores_BLK: Tensor,
    topk_expert_ids_BLK: Tensor,
    num_local_tokens_per_expert_E: Tensor,
) -> Tensor:
    return self._run(x_BLD, topk_scores_BLK, topk_expert_ids_BLK)


UniEPRoutedExperts.forward = _flat if _signature == SIGNATURES[0] else _batched  # type: ignore[method-assign]


class UniEPSelectiveAC(SelectiveAC):
    """SelectiveAC that also saves uniep's results, so that no layer is run again."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | set(SAVE_OPS)


@override(target=RoutedExperts.Config, exact=True, description="uniep: expert parallelism in one call")
def routed_experts(cfg: Any, **options: Any) -> Any:
    """Override: uniep in every MoE layer.  options: fields of `UniEPRoutedExperts.Config`.

    Raises UnsupportedError for experts and dispatchers that uniep cannot replace exactly.
    """
    if reason := _refused(_owner(cfg.inner_experts), _owner(cfg.token_dispatcher)):
        raise UnsupportedError(f"uniep cannot run these routed experts: {reason}")
    return derive(cfg, UniEPRoutedExperts.Config, **options)


@override(target=SelectiveAC.Config, exact=True, description="uniep: selective checkpointing saves its results")
def selective_ac(cfg: Any) -> Any:
    """Override: selective activation checkpointing that does not run uniep's layers again."""
    return derive(cfg, UniEPSelectiveAC.Config)


def status(model: nn.Module | Sequence[nn.Module], pattern: str = "*") -> Status:
    """Which MoE layers uniep runs, and why not the others.

    model: one, or the list of parts of a pipeline.
    pattern: of names of routed experts, as for fnmatch, e.g. "layers.3.*".

    Raises ConfigError if no MoE layer of the model matches.
    """
    others = "it is not inside a RoutedExperts of torchtitan, which the override replaces"
    return status_of(model, pattern, lambda module: isinstance(module, RoutedExperts), _layer, others)


def free(model: nn.Module | Sequence[nn.Module]) -> None:
    """Close the Workspaces of a model's layers: before `destroy_process_group`.  As `Workspaces.free`."""
    free_of(model, UniEPRoutedExperts)


@functools.cache
def _workspaces(max_tokens_per_rank: int | None, max_rows: int | None, backend: str, timeout_s: float | None) -> Any:
    """One object for all layers with the same options: torchtitan builds each layer from its own config."""
    made = Workspaces(max_tokens_per_rank, max_rows, {"backend": backend, "timeout_s": timeout_s})
    atexit.register(made.free)
    return made


def _layer(layer: Any) -> tuple[str, str]:
    """How the layer runs, and why not through uniep."""
    if isinstance(layer, UniEPRoutedExperts):
        mesh = getattr(layer.token_dispatcher, "ep_mesh", None)
        return f"uniep, expert parallel over {1 if mesh is None else mesh.size()} ranks", ""
    reason = _refused(type(layer.inner_experts), type(layer.token_dispatcher))
    why = "it was not overridden; add uniep.integrations.torchtitan.routed_experts to override.imports"
    if type(layer) is not RoutedExperts:
        why = f"it is a {type(layer).__name__}, and the override replaces RoutedExperts only"
    return f"torchtitan, {type(layer.token_dispatcher).__name__}", reason or why


def _owner(config: Any) -> type:
    """The class that a Config builds."""
    return config._owner


def _refused(experts: type, dispatcher: type) -> str:
    """Why uniep cannot compute what these experts compute; empty if it can."""
    if dispatcher not in (LocalTokenDispatcher, AllToAllTokenDispatcher):
        return (
            f"token_dispatcher is a {dispatcher.__name__}, and uniep would ignore its settings; use comm_backend "
            "'standard'"
        )
    for name in ("forward", "_grouped_mm"):  # activations, biases, adapters, quantized GEMMs
        if getattr(experts, name, None) is not getattr(GroupedExperts, name, None):
            return f"inner_experts is a {experts.__name__} with its own {name}; supported: GroupedExperts"
    return ""


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight
