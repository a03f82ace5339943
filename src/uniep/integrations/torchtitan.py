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

from uniep.errors import UniEPError, UnsupportedError
from uniep.integrations.common import LayerStatus, Status, Workspaces, free_of, status_of
from uniep.integrations.routing_hooks import RoutingHooks
from uniep.nn.modules import local_part
from uniep.nn.ops import SAVE_OPS
from uniep.nn.record import LayerRecord

try:
    import spmd_types
    from torchtitan.config import derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
except ImportError as cause:
    raise UnsupportedError(f"torchtitan cannot be imported ({cause}): pip install 'torchtitan>=0.3,<0.4'") from cause

__all__ = [
    "LayerStatus", "RoutingHooks", "Status", "UniEPRoutedExperts", "UniEPSelectiveAC", "free", "hook_routing", "status",
]  # fmt: skip

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
        self.error: UniEPError | None = None  # of this rank's router: the call passes it on to the other ranks
        self.workspaces = _workspaces(config.max_tokens_per_rank, config.max_rows, config.backend, config.timeout_s)

    def _run(self, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        if spmd_types.is_type_checking():
            raise UnsupportedError("debug.spmd_typechecking is on, and uniep's operators have no types; turn it off")
        mesh = getattr(self.token_dispatcher, "ep_mesh", None)
        group = None if mesh is None else mesh.get_group()
        w1, w2, w3 = (local_part(getattr(self.inner_experts, name)) for name in WEIGHTS)
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
        half, error, self.error = torch.bfloat16, self.error, None
        y_TD = self.workspaces.moe(
            group,
            x.flatten(0, -2).to(half),
            ids.flatten(0, -2),
            scores.flatten(0, -2),
            (w1.to(half), w3.to(half)),
            w2.to(half),
            num_local=len(w1),
            layer=self.record,
            error=error,
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


def hook_routing(model: nn.Module | Sequence[nn.Module]) -> RoutingHooks:
    """Make `uniep.nn.record_routing` and `replay_routing` work on the model's routers, until the result's `remove()`.

    model: one, or the list of parts of a pipeline; the two contexts take a part, or `nn.ModuleList(parts)`.
    Records use the routers' names, and have the tokens that this rank's routers see: with tensor parallelism a part of
    each sequence.  Works whoever runs the experts, with checkpointing and FSDP2.  A replay reads its ids on the host.
    Raises UnsupportedError, naming the layer, for compiled models, for routers of other kinds, and for those whose
    choice is overwritten (`_debug_force_load_balance`); ConfigError for a model that is hooked already.
    """
    found: list[tuple[MoE, int]] = []
    for part in [model] if isinstance(model, nn.Module) else model:
        for name, module in part.named_modules():
            if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
                raise UnsupportedError(
                    f"{name or type(module).__name__} is compiled, and a compiled router cannot be recorded or "
                    "replayed; set compile.enable to False"
                )
            if isinstance(module, MoE):
                if type(module.router).forward is not TokenChoiceTopKRouter.forward:
                    raise UnsupportedError(
                        f"{name}.router is a {type(module.router).__name__} with its own forward, which is not known "
                        "to choose by torch.topk of all scores; supported: TokenChoiceTopKRouter"
                    )
                if module.router._debug_force_load_balance:
                    raise UnsupportedError(
                        f"{name}.router has _debug_force_load_balance, which overwrites every choice; turn it off"
                    )
                found.append((module, module.router.num_experts))
    if not found:
        raise UnsupportedError("the model has no MoE of torchtitan, whose routing could be recorded or replayed")
    hooks = RoutingHooks()
    for layer, num_experts in found:

        def fail(error: UniEPError, routed: nn.Module = layer.routed_experts) -> None:
            if not isinstance(routed, UniEPRoutedExperts):
                raise error
            routed.error = error

        hooks.add(layer.router, num_experts, 3, "torchtitan", fail)
    return hooks


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
