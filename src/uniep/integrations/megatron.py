"""Megatron-Core: MoE layers whose tokens travel and whose experts run through uniep.

    from uniep.integrations.megatron import use_uniep

    spec = use_uniep(get_gpt_decoder_block_spec(config, use_transformer_engine=True))
    model = GPTModel(config, spec, ...)
    print(status(model))

Token dispatchers are a closed list in Megatron, so uniep plugs in at the layer's spec: `use_uniep` replaces `MoELayer`
by `UniEPMoELayer`.  Router, auxiliary losses, shared experts, process groups, parameters, their names in
checkpoints and their attributes stay Megatron's; dispatch, experts and combine are one call of uniep.  Routing weights
multiply the activation before the second GEMM (weight_at="activation"), as Megatron's do.  Anything that uniep
would compute differently or not at all raises UnsupportedError, naming the flag.
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uniep.config import DTYPES
from uniep.errors import ConfigError, UnsupportedError
from uniep.integrations.common import LayerStatus, Status, Workspaces, free_of, status_of
from uniep.nn.record import LayerRecord

NEEDED = (0, 19)
"""First version whose specs and layer have these hooks."""

try:
    import megatron.core
    from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec
except ImportError as cause:
    raise UnsupportedError(f"megatron-core cannot be imported ({cause}): pip install megatron-core") from cause
if tuple(int(part) for part in megatron.core.__version__.split(".")[:2]) < NEEDED:
    raise UnsupportedError(f"megatron-core is {megatron.core.__version__}; uniep needs at least 0.19")

__all__ = ["LayerStatus", "Status", "UniEPMoELayer", "free", "status", "use_uniep"]

log = logging.getLogger("uniep")

ALLOWED: dict[str, tuple[Any, str]] = {
    "activation_func_fp8_input_store": (False, "activations are kept in the layer's dtype"),
    "use_te_activation_func": (False, "the activation is uniep's own"),
    "moe_mlp_glu_interleave_size": (None, "gate rows come first"),
    "add_bias_linear": (False, "experts have no biases"),
    "fp8": (None, "experts compute in bf16, fp16 or fp32"),
    "fp4": (None, "experts compute in bf16, fp16 or fp32"),
    "quant_recipe": (None, "experts compute in bf16, fp16 or fp32"),
    "use_kitchen": (False, "experts compute in bf16, fp16 or fp32"),
    "moe_dispatch_fwd_dtype": ("bf16", "tokens travel in the layer's dtype"),
    "moe_combine_bwd_dtype": ("bf16", "gradients travel in the layer's dtype"),
    "expert_gtp_weight_remat_size": (1, "experts are whole on their rank"),
    "moe_apply_probs_on_input": (False, "routing weights act on the activation"),
    "moe_expert_capacity_factor": (None, "no token is dropped"),
    "moe_expert_rank_capacity_factor": (None, "no token is dropped"),
    "moe_token_dropping": (False, "no token is dropped"),
    "moe_pad_expert_input_to_capacity": (False, "there is no capacity"),
    "moe_pad_experts_for_cuda_graph_inference": (False, "there is no capacity"),
    "moe_router_padding_for_quantization": (False, "rows are padded inside uniep"),
    "moe_latent_size": (None, "tokens travel in the model's width"),
    "moe_single_grouped_weight": (False, "experts are one parameter each"),
    "moe_use_grouped_tensor": (False, "the GEMMs are uniep's own"),
    "use_transformer_engine_op_fuser": (False, "the GEMMs are uniep's own"),
    "moe_shared_expert_overlap": (False, "shared experts run before the routed ones"),
    "overlap_moe_expert_parallel_comm": (False, "a layer is one call, which overlaps inside"),
    "overlap_dispatch_backward_with_experts_wgrad": (False, "a layer is one call, which overlaps inside"),
    "delay_wgrad_compute": (False, "weight gradients are computed in the layer's backward"),
    "moe_paged_stash": (False, "what backward needs is saved by autograd"),
    "batch_invariant_mode": (False, "its kernels are not used; uniep's results do not depend on the batch"),
}
"""Flag of TransformerConfig -> (the value it must have, what uniep does)."""

FORBIDDEN = {
    "recompute_modules": ({"moe_act"}, "recompute 'moe' or whole layers"),
    "offload_modules": ({"expert_fc1", "moe_act", "fused_group_mlp"}, "nothing inside a layer can be offloaded"),
}
"""Flag that lists modules -> (modules for which uniep would ignore the flag, the remedy)."""

GATED = {
    (F.silu, 0.0): "swiglu", (F.gelu, 0.0): "geglu", (fast_gelu, 0.0): "geglu_tanh", (quick_gelu, 1.0): "swiglu_oai",
}  # fmt: skip
"""With `gated_linear_unit`, by `activation_func` and `glu_linear_offset`; the limit: `activation_func_clamp_value`."""
UNGATED = {F.silu: "silu", F.gelu: "gelu", fast_gelu: "gelu_tanh", squared_relu: "relu2"}
"""Without, by `activation_func`."""


class UniEPMoELayer(MoELayer):
    """A MoELayer with uniep between router and output.  Made by the specs that `use_uniep` returns.

    workspaces, main_grad: as `use_uniep` decided.

    Raises UnsupportedError for flags, experts and process groups that uniep does not run, naming each.
    """

    def __init__(self, config: Any, *args: Any, workspaces: Workspaces, main_grad: bool | None, **kwargs: Any) -> None:
        if reasons := _refused_flags(config):
            raise UnsupportedError("uniep cannot run these MoE layers: " + "; ".join(reasons))
        super().__init__(config, *args, **kwargs)
        self.workspaces, self.record = workspaces, LayerRecord()
        self.main_grad = config.gradient_accumulation_fusion if main_grad is None else main_grad
        if (ranks := self.experts.tp_group.size()) > 1:
            raise UnsupportedError(
                f"expert_tensor_parallel_size is {ranks}: uniep keeps experts whole; set it to 1 (tensor parallelism "
                "of the other layers continues, with sequence_parallel)"
            )
        _linears(self.experts)

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Any]:
        """(hidden_states, (ids (T, K), weights (T, K))): chosen experts ascending, unused slots -1."""
        num_experts = routing_map.shape[1]
        first = torch.arange(num_experts, 0, -1, device=probs.device)
        found, ids_TK = (routing_map * first).topk(self.config.moe_router_topk, dim=1)
        return hidden_states, (ids_TK.masked_fill(found == 0, -1), probs.gather(1, ids_TK))

    def dispatch(self, hidden_states: Tensor, probs: Any) -> tuple[Tensor, Any]:
        return hidden_states, probs

    def routed_experts_compute(self, hidden_states: Tensor, probs: Any) -> tuple[Tensor, None]:
        ids_TK, weights_TK = probs
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        up, down = _linears(self.experts)
        for linear in {id(linear): linear for linear, _ in (*up, *down)}.values():
            for hook in linear._forward_pre_hooks.values():  # DDP waits for gathered parameters in them
                hook(linear, (x_TD,))
        w13, w2 = (_tensors(places) for places in (up, down))
        reverse, last = False, self.num_local_experts - 1
        if not self._takes_lists(x_TD):
            w13, w2, reverse = _one_tensor_each(w13, w2, self.main_grad)
        if reverse:  # bits do not depend on the order of a rank's experts
            local = ids_TK % (last + 1)
            ids_TK = torch.where(ids_TK < 0, ids_TK, ids_TK - local + last - local)
        y_TD = self.workspaces.moe(
            self.ep_group, x_TD, ids_TK, weights_TK, w13, w2, num_local=last + 1,
            **_activation(self.config), weight_at="activation",
            main_grad="accumulate" if self.main_grad else None, agreed="in reverse" if reverse else "",
            layer=self.record,
        )  # fmt: skip
        return y_TD.view(hidden_states.shape), None

    def _takes_lists(self, x_TD: Tensor) -> bool:
        return x_TD.device.type == "cpu" or self.workspaces.options["backend"] == "nccl"

    def combine(self, output: Tensor) -> Tensor:
        return output

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        return output if shared_expert_output is None else output + shared_expert_output


def use_uniep(
    spec: Any,
    *,
    max_tokens_per_rank: int | None = None,
    max_rows: int | None = None,
    main_grad: bool | None = None,
    backend: str = "auto",
    schedule: Any = None,
    timeout_s: float | None = None,
) -> Any:
    """A copy of `spec` with uniep in its MoE layers.

    spec: a layer, a block, a hybrid stack, a multi-token prediction block: anything that contains MoELayer.
    max_tokens_per_rank: most tokens a rank passes to a layer in one call, sequence length * micro batch / (tensor *
        context parallel size).  None: Workspaces grow with the calls, and every call first exchanges the numbers
        of tokens of all ranks, and the host waits for it.
    main_grad: whether backward adds fp32 gradients of experts to param.main_grad itself.  None: what
        config.gradient_accumulation_fusion says.  False: Megatron's hook adds param.grad, rounded to its dtype.
    max_rows, backend, schedule, timeout_s: as for `MoEConfig` and `Workspace`.
    Workspaces are shared by the layers of the spec and freed by `free(model)`, or at exit.

    Raises ConfigError if no MoELayer is in the spec.
    """
    options = {"backend": backend, "schedule": schedule, "timeout_s": timeout_s}
    made = Workspaces(max_tokens_per_rank, max_rows, options)
    replaced = _Replacement({"workspaces": made, "main_grad": main_grad})
    result = replaced(spec)
    if not replaced.count:
        others = f" (there are {', '.join(sorted(replaced.others))})" if replaced.others else ""
        raise ConfigError(
            f"there is no MoELayer in this {type(spec).__name__}{others}, so uniep would run nothing; pass the spec of "
            "layers with num_moe_experts set"
        )
    if replaced.others:
        log.warning("use_uniep leaves %s alone; it replaces MoELayer only", ", ".join(sorted(replaced.others)))
    atexit.register(made.free)
    return result


def status(model: nn.Module | Sequence[nn.Module], pattern: str = "*") -> Status:
    """Which MoE layers uniep runs, and why not the others.

    model: one, or the list of chunks that Megatron's training loop holds.
    pattern: of names of MoE layers, as for fnmatch, e.g. "*.layers.3.mlp".

    Raises ConfigError if no MoE layer of the model matches.
    """
    others = "it is not a BaseMoELayer of Megatron, so use_uniep leaves it alone"
    return status_of(model, pattern, lambda module: isinstance(module, BaseMoELayer), _layer, others)


def free(model: nn.Module | Sequence[nn.Module]) -> None:
    """Close the Workspaces of a model's layers: before `destroy_process_group`.  As `Workspaces.free`."""
    free_of(model, UniEPMoELayer)


def _layer(layer: Any) -> tuple[str, str]:
    """How the layer runs, and why not through uniep."""
    if isinstance(layer, UniEPMoELayer):
        return f"uniep, expert parallel over {layer.ep_group.size()} ranks", ""
    if type(layer) is MoELayer:
        why = "; ".join(_refused_flags(layer.config)) or "its spec was not passed through use_uniep"
        return f"Megatron, {layer.config.moe_token_dispatcher_type!r}", why
    return f"Megatron, {type(layer).__name__}", "it is not a MoELayer, or a custom subclass of it"


class _Replacement:
    """A function of specs.  count: number of replaced layers; others: names of MoE layers that were not replaced."""

    def __init__(self, keywords: dict[str, Any]) -> None:
        self.keywords = keywords
        self.count = 0
        self.others: set[str] = set()
        self._seen: dict[int, Any] = {}

    def __call__(self, node: Any) -> Any:
        """`node` itself where nothing in it changes."""
        if id(node) not in self._seen:
            self._seen[id(node)] = self._changed(node)
        return self._seen[id(node)]

    def _changed(self, node: Any) -> Any:
        if isinstance(node, functools.partial):
            if kind := self._kind(node.func):
                return functools.partial(kind, *node.args, **node.keywords, **self.keywords)
            args, keywords = self(node.args), self(node.keywords)
            same = args is node.args and keywords is node.keywords
            return node if same else functools.partial(node.func, *args, **keywords)
        if isinstance(node, ModuleSpec) and (kind := self._kind(node.module)):
            return dataclasses.replace(node, module=kind, params={**node.params, **self.keywords})
        if isinstance(node, (list, tuple)) and not hasattr(node, "_fields"):
            new = [self(item) for item in node]
            return node if all(a is b for a, b in zip(new, node, strict=True)) else type(node)(new)
        if isinstance(node, dict):
            changed = {key: self(value) for key, value in node.items()}
            return node if all(changed[key] is node[key] for key in node) else changed
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            fields = {f.name: getattr(node, f.name) for f in dataclasses.fields(node) if hasattr(node, f.name)}
            changed = {name: self(value) for name, value in fields.items()}
            if all(changed[name] is value for name, value in fields.items()):
                return node
            made = copy.copy(node)
            for name, value in changed.items():
                object.__setattr__(made, name, value)
            return made
        return node

    def _kind(self, function: Any) -> type | None:
        if function is MoELayer:
            self.count += 1
            return UniEPMoELayer
        if isinstance(function, type) and issubclass(function, BaseMoELayer):
            self.others.add(function.__name__)
        return None


def _refused_flags(config: Any) -> list[str]:
    """Flags under which uniep would not compute what Megatron computes."""
    reasons = []
    for name, (value, meaning) in ALLOWED.items():
        found = getattr(config, name, value)
        if found is not value and found != value:
            reasons.append(f"{name} is {_label(found)}: it must be {_label(value)}, {meaning}")
    function, offsets = config.activation_func, {gate: offset for gate, offset in GATED}  # noqa: C416
    if function not in (known := offsets if config.gated_linear_unit else UNGATED):
        gate = "with" if config.gated_linear_unit else "without"
        listed = ", ".join(map(_label, known))
        reasons.append(f"activation_func is {_label(function)}: it must be one of {listed} {gate} a gate")
    elif config.gated_linear_unit and config.glu_linear_offset != (offset := offsets[function]):
        found = config.glu_linear_offset
        reasons.append(f"glu_linear_offset is {found}: it must be {offset} with {_label(function)}")
    for name, (modules, remedy) in FORBIDDEN.items():
        if common := modules & set(getattr(config, name, None) or ()):
            reasons.append(f"{name} has {', '.join(sorted(common))}: {remedy}")
    if config.transformer_impl == "inference_optimized":
        reasons.append("transformer_impl is 'inference_optimized': it has its own experts and dispatchers")
    if config.cuda_graph_impl != "none":
        graphs = config.cuda_graph_modules or ["whole layers"]
        names = [getattr(g, "name", str(g)) for g in ([graphs] if isinstance(graphs, str) else graphs)]
        if config.cuda_graph_impl == "full_iteration" or any(n.startswith(("moe", "whole", "full")) for n in names):
            reasons.append(
                f"cuda_graph_impl is {config.cuda_graph_impl!r} for cuda_graph_modules {', '.join(names)}: no part of "
                "an MoE layer can be captured; leave graphs to other modules"
            )
    return reasons


def _activation(config: Any) -> dict[str, Any]:
    """The activation and its limit, as arguments of `Workspaces.moe`."""
    if not config.gated_linear_unit:  # Megatron clamps gates only
        return {"activation": UNGATED[config.activation_func]}
    name = GATED[config.activation_func, config.glu_linear_offset]
    return {"activation": name, "activation_limit": config.activation_func_clamp_value}


def _label(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)


Places = list[tuple[Any, str]]
"""(module, name of its weight), one per expert."""


def _linears(experts: Any) -> tuple[Places, Places]:
    """Where each expert's weight is found, for fc1 and fc2, in SequentialMLP or TEGroupedMLP.

    Raises UnsupportedError for other experts, and for parameters that uniep would leave without gradients.
    """
    kind, num_local = type(experts).__name__, experts.num_local_experts
    both = []
    for name in ("linear_fc1", "linear_fc2"):
        if hasattr(experts, "local_experts"):
            places = [(getattr(expert, name), "weight") for expert in experts.local_experts]
        else:
            places = [(getattr(experts, name, None), f"weight{i}") for i in range(num_local)]
        for module, weight in places:
            if not isinstance(getattr(module, weight, None), Tensor):
                raise UnsupportedError(
                    f"uniep cannot run {kind}: its {name} is a {type(module).__name__} without a tensor {weight}; "
                    "supported: SequentialMLP and TEGroupedMLP of Megatron's own linear layers"
                )
        both.append(places)
    used = {id(getattr(module, weight)) for places in both for module, weight in places}
    used |= {id(p) for p in _parametrized(experts)}
    if unused := [name for name, p in experts.named_parameters() if id(p) not in used]:
        raise UnsupportedError(
            f"uniep cannot run {kind}: it would leave {', '.join(unused[:3])} ({len(unused)} parameters) unused; "
            "supported: a weight per linear layer, parametrised or not"
        )
    return both[0], both[1]


def _parametrized(module: nn.Module) -> Iterable[nn.Parameter]:
    """Parameters from which torch.nn.utils.parametrize computes the weights."""
    for name, parameter in module.named_parameters():
        if "parametrizations." in name:
            yield parameter


def _tensors(places: Places) -> Any:
    tensors = [getattr(module, weight) for module, weight in places]
    if tensors[0].dtype not in DTYPES:
        raise UnsupportedError(f"experts have dtype {tensors[0].dtype}; supported: {', '.join(map(str, DTYPES))}")
    if hasattr(tensors[0], "full_tensor"):
        raise UnsupportedError("experts are DTensors, as in Megatron-FSDP; use Megatron's DistributedDataParallel")
    return tensors


class _Together(torch.autograd.Function):
    """Tensors at equal distances in one storage, viewed as one tensor (e, ...), in the order of that storage.

    added: whether backward has already added their gradients to main_grad; their hooks are told so.
    """

    @staticmethod
    def forward(ctx: Any, distance: int, added: bool, *parts: Tensor) -> Tensor:
        ctx.reverse, ctx.told = distance < 0, parts if added else ()
        return _view(distance, parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        for part in ctx.told:
            part.grad_added_to_main_grad = True
        return None, None, *_ordered(grad.unbind(0), ctx.reverse)


def _one_tensor_each(w13: list[Tensor], w2: list[Tensor], main_grad: bool) -> tuple[Tensor, Tensor, bool]:
    """w13 and w2 as (e, ...) and whether experts come in reverse order, as they lie in the buffers of Megatron's DDP.

    No copy is made if the parts lie at equal distances.  Parts with a storage each move into a common one, once.
    Parts in any other layout are stacked in each call.
    """
    both = (w13, w2)
    added = [main_grad and torch.is_grad_enabled() and any(t.requires_grad for t in parts) for parts in both]
    grads: list[list[Any]] = [[getattr(t, "main_grad", None) for t in parts] for parts in both]
    # Even if this call has no backward: parameters move only once, so they must lie as later calls need them.
    decide = [found for found in grads if main_grad and all(isinstance(g, Tensor) for g in found)] or both
    steps = [_distance(parts) for parts in decide]
    reverse = all(step is not None and step < 0 for step in steps)
    whole: list[Any] = []
    for parts, to, found in zip(both, added, grads, strict=True):
        distance = _distance(parts)
        if distance is None and all(t.is_leaf and t.untyped_storage().nbytes() == t.nbytes for t in parts):
            with torch.no_grad():
                for part, place in zip(_ordered(parts, reverse), torch.stack(_ordered(parts, reverse)), strict=True):
                    part.data = place
            distance = _distance(parts)
        fits = distance is not None and (distance < 0) == reverse
        if not to:
            one = _Together.apply(distance, False, *parts) if fits else torch.stack(_ordered(parts, reverse))
        else:
            apart = _distance(found)
            if not fits or apart is None or (apart < 0) != reverse:
                raise UnsupportedError(
                    "experts and their main_grads do not lie in memory in one regular order, so this backend cannot "
                    "add gradients to main_grad; pass main_grad=False to use_uniep (Megatron's hook then adds "
                    "param.grad, rounded to its dtype), or backend='nccl'"
                )
            one = _Together.apply(distance, True, *parts)
            one.main_grad = _view(apart, found)
        whole.append(one)
    return whole[0], whole[1], reverse


def _ordered(parts: Sequence[Tensor], reverse: bool) -> list[Tensor]:
    return list(parts[::-1] if reverse else parts)


def _distance(parts: Sequence[Any]) -> int | None:
    """Distance in elements from each part to the next, if it is constant in one storage; negative in reverse order."""
    if not all(isinstance(t, Tensor) and t.is_contiguous() for t in parts):
        return None
    first, offsets = parts[0], [int(t.storage_offset()) for t in parts]
    steps = {b - a for a, b in itertools.pairwise(offsets)} or {first.numel()}
    if len({t.untyped_storage().data_ptr() for t in parts}) > 1 or len(steps) > 1:
        return None
    (step,) = steps
    return step if abs(step) >= first.numel() else None


def _view(distance: int, parts: Sequence[Tensor]) -> Tensor:
    first = parts[-1 if distance < 0 else 0].detach()
    return first.as_strided((len(parts), *first.shape), (abs(distance), *first.stride()))
