"""Hugging Face transformers: its MoE models with their experts run by uniep.

    from uniep.integrations import hf

    hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="uniep")  # one device
    model = AutoModelForCausalLM.from_pretrained(                                       # under torchrun
        name, distributed_config=DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="uniep"))
    print(hf.status(model))

The model keeps its modules and parameters, so checkpoints, optimizers and FSDP2 see no change; uniep reads the
parameters in place: gate_up_proj (e, 2F, D), gate rows first, or up_proj (e, F, D), and down_proj (e, D, F), and any
biases.  Transposed ones (GPT-OSS, Aria) are read in place on CPUs; on GPUs `register(copy_weights=True)` copies them in
every call.  Routing stays the model's own.  Anything that uniep would compute differently raises UnsupportedError;
nothing is approximated.  So does experts_implementation="uniep" for models that ignore it.  `status` shows which layers
those are.
"""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from uniep.activation import ACTIVATIONS, activation_of
from uniep.config import DTYPES
from uniep.errors import UniEPError, UnsupportedError
from uniep.integrations.common import LayerStatus, Status, Workspaces, status_of
from uniep.integrations.moe_layers import routed_experts
from uniep.integrations.routing_hooks import RoutingHooks, find_router
from uniep.nn.record import LayerRecord
from uniep.weights import Lora

__all__ = ["LayerStatus", "Registration", "RoutingHooks", "Status", "hook_routing", "register", "status"]

NAME = "uniep"
NEEDED = "5.23"
"""First version of transformers with a registry of expert-parallel implementations."""

_MARK = "_uniep_ep_size"
"""Attribute of experts modules that exchange tokens through uniep."""
_ERROR = "_uniep_error"
"""Attribute of experts modules whose router failed before their call."""
FACTORS = "_uniep_factors"
"""Attribute of experts modules in a call with low-rank factors: parameter -> (A, B, scale), B gate rows first."""

ACTIVATION_OF = {
    **dict.fromkeys(("SiLU", "SiLUActivation", "silu"), "swiglu"),
    **dict.fromkeys(("GELU", "GELUActivation", "gelu"), "geglu"),
    **dict.fromkeys(
        ("GELU(tanh)", "GELUTanh", "NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation"), "geglu_tanh"
    ),
}
"""The activation of experts, by the label of the gate's function."""
UNGATED_OF = {
    **{
        label: {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}[name]
        for label, name in ACTIVATION_OF.items()
    },
    "ReLUSquaredActivation": "relu2",
}
"""Of experts without a gate."""
LIMITS = ("limit", "swiglu_limit")
"""Attributes of experts that may hold the limit of a gate of their own."""


_UNREACHED = "its class is not made with transformers' use_experts_implementation"

log = logging.getLogger("uniep")


class Registration(Workspaces):
    """What `register` made: the Workspaces of all layers, one per group and shape, and their options.

    options: keywords of `Workspace`.
    max_tokens_per_rank: None, or T for all Workspaces.
    copy_weights: as for `register`.
    """

    copy_weights = False

    def run(
        self,
        experts: Any,
        group: Any,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        layer: LayerRecord | None = None,
    ) -> Tensor:
        """`uniep.moe` on the parameters of `experts`.  Collective over `group`."""
        if reason := _refused_tensors(experts, self.copy_weights):
            raise UnsupportedError(f"uniep cannot run {_name(experts)}: {reason}")
        w13, w2, biases = _parameters(experts, self.copy_weights)
        lora = _lora(experts)
        activation, limit, _ = _activation(experts)
        return self.moe(
            group, x_TD, ids_TK, weights_TK, w13, w2, num_local=w2.shape[0], activation=activation,
            activation_limit=limit, biases=biases, layer=layer, lora=lora, error=experts.__dict__.pop(_ERROR, None),
        )  # fmt: skip


class _OneDevice:
    """An experts function, as transformers' ExpertsInterface calls it."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration

    def __call__(self, experts: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        _refuse(experts)
        if getattr(experts, "_is_expert_parallel", False):  # transformers marks slots of other devices with larger ids
            ids_TK = ids_TK.masked_fill(ids_TK >= experts.down_proj.shape[0], -1)
        return self.registration.run(experts, None, x_TD, ids_TK, weights_TK)


class _ExpertParallel:
    """An expert-parallel implementation, as transformers' EPImplementationInterface makes one per experts module."""

    def __init__(self, registration: Registration, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        _refuse(experts)
        self.registration, self.experts, self.record = registration, experts, LayerRecord()
        self.group = ep_mesh.get_group()
        self.tp_mesh = tp_mesh
        setattr(experts, _MARK, ep_mesh.size())

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if self.tp_mesh.size() == 1:
            return self.registration.run(self.experts, self.group, x_TD, ids_TK, weights_TK, layer=self.record)
        # Ranks of a tensor-parallel group hold the same tokens: each rank sends a slice, then all ranks gather all
        # results.
        from torch.distributed.tensor import DTensor, Replicate, Shard

        whole, sliced = [Replicate()], [Shard(0)]
        parts = [
            DTensor.from_local(t, self.tp_mesh, whole, run_check=False).redistribute(self.tp_mesh, sliced).to_local()
            for t in (x_TD, ids_TK, weights_TK)
        ]
        y = self.registration.run(self.experts, self.group, *parts, layer=self.record)
        return DTensor.from_local(y, self.tp_mesh, sliced, shape=x_TD.shape, stride=(x_TD.shape[1], 1)).full_tensor()


def register(
    *,
    max_tokens_per_rank: int | None = None,
    max_rows: int | None = None,
    backend: str = "auto",
    schedule: Any = None,
    timeout_s: float | None = None,
    copy_weights: bool = False,
) -> Registration:
    """Make "uniep" known to transformers, as experts_implementation and as ep_implementation.

    max_tokens_per_rank: most tokens a rank passes to a layer in one call.  None: Workspaces grow with the calls, and
        with expert parallelism every call first exchanges the numbers of tokens of all ranks, and the host waits for
        it.
    max_rows, backend, schedule, timeout_s: as for `MoEConfig` and `Workspace`.
    copy_weights: copy transposed weights, (e, D, 2F) and (e, F, D), into rows in every call, and their gradients back.
        Needed on GPUs; a layer then takes its experts' memory twice while it runs.  False: refused there.
    Returns the Registration that owns the Workspaces; they are freed by its `free`, or at exit.
    A second call applies to models loaded after it, and to all models on one device.

    Raises UnsupportedError where transformers is missing or older than 5.23.
    """
    implementations, functions, _ = _seams()
    made = Registration(
        max_tokens_per_rank, max_rows, {"backend": backend, "schedule": schedule, "timeout_s": timeout_s}
    )
    made.copy_weights = copy_weights
    atexit.register(made.free)
    implementations.register(NAME, functools.partial(_ExpertParallel, made))
    functions.register(NAME, _OneDevice(made))
    _watch_models()
    return made


def status(model: nn.Module, pattern: str = "*") -> Status:
    """Which MoE layers uniep runs, and why not the others.

    pattern: of names of experts modules, as for fnmatch, e.g. "model.layers.3.*".

    The result is iterable, and `status(model).require_all()` raises UnsupportedError unless uniep runs all of them.

    Raises ConfigError if no MoE layer of the model matches.
    """
    return status_of(model, pattern, is_experts, _layer, _UNREACHED)


def hook_routing(model: nn.Module) -> RoutingHooks:
    """Make `uniep.nn.record_routing` and `replay_routing` work on the model's routers, until the result's `remove()`.

    Works for routers that are separate modules and choose by `torch.topk` of (T, E) scores, such as those of Qwen3-MoE,
    Mixtral, OLMoE and DeepSeek-V3, whatever runs the experts.  Records use the routers' names.  Does not work in a
    model compiled as one graph.  A replay reads its ids on the host.
    Raises UnsupportedError, naming the layer, if one has no such router, or one that takes its weights from scores of
    the groups that it has chosen itself, where a replayed expert of another group would get none; in a recorded or
    replayed forward, if a router chooses otherwise.  ConfigError for a model that is hooked already.
    """
    found = [
        (name, experts, *find_router(around, experts, name))
        for name, around in model.named_modules()
        if isinstance(experts := _inner(getattr(around, "experts", None)), nn.Module) and is_experts(experts)
    ]
    if not found:
        raise UnsupportedError(f"{type(model).__name__} has no experts that transformers lets uniep run")
    hooks = RoutingHooks()
    for name, _, router, _ in found:
        if getattr(router, "topk_method", "") == "group_limited_greedy":
            raise UnsupportedError(
                f"{name} has topk_method 'group_limited_greedy': experts of groups that the router itself would not "
                "choose have weight 0 there, so no choice can be replayed; unhooked routers work as usual"
            )
    for _, experts, router, num_experts in found:

        def fail(error: UniEPError, experts: nn.Module = experts) -> None:
            if not getattr(experts, _MARK, 0):
                raise error
            experts.__dict__[_ERROR] = error  # uniep's call passes it on to the other ranks

        hooks.add(router, num_experts, 2, "transformers", fail)
    return hooks


@functools.cache
def _watch_models() -> None:
    """Make models that would ignore experts_implementation="uniep" refuse it, when they are made and when it is set.

    transformers accepts any registered name for any model without a check.  So this wraps two methods of its base
    class.
    """
    from transformers import PreTrainedModel

    try:
        made, chosen = PreTrainedModel.post_init, PreTrainedModel.set_experts_implementation
    except AttributeError as missing:
        log.warning("%s: models that ignore 'uniep' are not refused; check hf.status(model).require_all()", missing)
        return

    @functools.wraps(made)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = made(self, *args, **kwargs)
        _refuse_unreached(self, lambda config: getattr(config, "_experts_implementation", None) == NAME)
        return result

    @functools.wraps(chosen)
    def set_experts_implementation(self: Any, experts_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        parts = {id(getattr(self.config, key, None)): key for key in self.config.sub_configs}

        def asked(config: Any) -> bool:
            if not isinstance(experts_implementation, dict):
                return experts_implementation == NAME
            return experts_implementation.get(parts.get(id(config), "")) == NAME

        _refuse_unreached(self, asked)
        return chosen(self, experts_implementation, *args, **kwargs)

    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]
    PreTrainedModel.set_experts_implementation = set_experts_implementation  # type: ignore[method-assign]


def _refuse_unreached(model: Any, asked: Callable[[Any], bool]) -> None:
    """Raise UnsupportedError if the config asks for uniep but some MoE layers of the model would ignore it."""
    configs = {name: m.config for name, m in model.named_modules() if hasattr(m, "set_experts_implementation")}
    if not any(map(asked, configs.values())):
        return
    unreached = {}
    for name, module in routed_experts(model, is_experts).items():
        inside = [config for around, config in configs.items() if not around or name.startswith(f"{around}.")]
        if not is_experts(module) and asked(inside[-1]):
            unreached[name] = type(module).__name__
    if unreached:
        (name, kind), *_ = unreached.items()
        raise UnsupportedError(
            f"experts_implementation is {NAME!r}, but {type(model).__name__} would ignore it in {len(unreached)} MoE "
            f"layers, such as {name}: {kind}, {_UNREACHED}; use 'eager' for them, by a dict where a model has parts"
        )


def _layer(experts: Any) -> tuple[str, str]:
    """How the layer runs, and why not through uniep."""
    if ep_size := getattr(experts, _MARK, 0):
        return f"uniep, expert parallel over {ep_size} ranks", ""
    if reason := _refused(experts):
        return "transformers", reason
    chosen = experts.config._experts_implementation or "eager"
    ours = chosen == NAME
    if getattr(experts, "_is_expert_parallel", False):
        if ours:
            return "uniep on this rank's experts, tokens exchanged by transformers", ""
        return f"transformers, {chosen!r}", "ep_implementation is another one; pass ep_implementation='uniep'"
    if ours:
        return "uniep on one device", ""
    return (
        f"transformers, {chosen!r}",
        f"experts_implementation is {chosen!r} and no expert parallelism was applied (that takes ep_size > 1); pass "
        "experts_implementation='uniep', or a DistributedConfig with ep_size and ep_implementation='uniep'",
    )


def why_not(experts: Any) -> str:
    """Why uniep does not run these experts; empty if it does."""
    return _layer(experts)[1]


def ep_size(experts: Any) -> int:
    """Over how many ranks uniep spreads these experts; 0: all are on each device."""
    return getattr(experts, _MARK, 0)


def weight_names(experts: Any) -> tuple[str, ...]:
    """Names of the parameters that are w13 and w2."""
    return _names(experts)[:2]


def _inner(module: Any) -> Any:
    """What PEFT's wrappers are around."""
    while isinstance(base := getattr(module, "base_layer", None), nn.Module):
        module = base
    return module


def is_experts(module: nn.Module) -> bool:
    """Experts modules whose implementation transformers can replace."""
    return hasattr(module, "is_concatenated")


def _refuse(experts: Any) -> None:
    if reason := _refused(experts):
        raise UnsupportedError(
            f"uniep cannot run {_name(experts)}: {reason}; load the model with another experts_implementation and "
            "ep_implementation, e.g. 'grouped_mm' and 'auto'"
        )


def _name(experts: Any) -> str:
    kind = getattr(getattr(experts, "config", None), "model_type", "unknown")
    return f"{type(experts).__name__} of model type {kind!r}"


def _refused(experts: Any) -> str:
    """Why uniep cannot compute what these experts compute; empty if it can."""
    if not is_experts(experts):
        return _UNREACHED
    if experts.has_post_expert_norm:
        return f"has_post_expert_norm is {experts.has_post_expert_norm}: a norm follows each expert"
    for name in _names(experts):
        if not isinstance(getattr(experts, name, None), Tensor):
            return f"it has no tensor {name}"
    return _activation(experts)[2]


def _names(experts: Any) -> tuple[str, ...]:
    """Of the parameters: w13, w2, and with biases b13, b2."""
    names = "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"
    return names + tuple(f"{name}_bias" for name in names) if experts.has_bias else names


def _parameters(experts: Any, copy: bool) -> tuple[Any, Tensor, tuple[Tensor, Tensor] | None]:
    """(w13, w2, biases) as `uniep.moe` takes them, views; copy: transposed weights as rows in new memory."""
    w13, w2, *biases = (getattr(experts, name) for name in _names(experts))
    if experts.is_transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    interleaved = experts.has_gate and not experts.is_concatenated
    if interleaved:
        w13 = w13[:, 0::2], w13[:, 1::2]
        biases[:1] = [torch.cat([b[:, 0::2], b[:, 1::2]], 1) for b in biases[:1]]
    if experts.is_transposed and copy:
        w13, w2 = torch.cat(w13, 1) if interleaved else w13.contiguous(), w2.contiguous()
    return w13, w2, (biases[0], biases[1]) if biases else None


def _activation(experts: Any) -> tuple[str, float | None, str]:
    """(activation, its limit, "") of experts, or ("", None, why uniep has none)."""
    _, _, default_gate = _seams()
    if experts.has_gate and type(experts)._apply_gate is not default_gate:
        if (found := _own_gate(experts)) is not None:
            return *found, ""
        known = ", ".join(name for name, activation in ACTIVATIONS.items() if activation.gated)
        return "", None, f"_apply_gate is its own, and none of {known}, with or without a limit"
    names, label = ACTIVATION_OF if experts.has_gate else UNGATED_OF, _label(experts)
    if label not in names:
        return "", None, f"act_fn is {label}; supported: {', '.join(names)}"
    return names[label], None, ""


_own_gates: dict[Any, tuple[str, float | None] | None] = {}


@_disable_dynamo
def _own_gate(experts: Any) -> tuple[str, float | None] | None:
    """The activation and limit that the experts' own `_apply_gate` is, by its values on a grid; None if it is none.

    The grid reaches from -1000 to 1000 and beyond the limit, and values may differ by the rounding of fp32.
    """
    numbers = {name: value for name, value in vars(experts).items() if isinstance(value, int | float)}
    key = type(experts)._apply_gate, _label(experts), tuple(sorted(numbers.items()))
    if key not in _own_gates:
        _own_gates[key] = _matched(
            experts, {None, *(float(numbers[name]) for name in LIMITS if 0 < numbers.get(name, 0) < math.inf)}
        )
    return _own_gates[key]


def _matched(experts: Any, limits: set[float | None]) -> tuple[str, float | None] | None:
    most = max((limit for limit in limits if limit is not None), default=1.0)
    steps = torch.linspace(-1, 1, 81, device="cpu")
    line = torch.cat([12 * steps, 2 * most * steps, torch.tensor([-1e3, -30.0, 30.0, 1e3], device="cpu")])
    gate, up = (t.flatten() for t in torch.meshgrid(line, line, indexing="ij"))
    together = torch.cat([gate, up]) if experts.is_concatenated else torch.stack([gate, up], 1).flatten()
    try:
        with torch.no_grad():
            found = experts._apply_gate(together[None])[0].double()
    except Exception as cause:  # whatever a gate of other experts may raise for these
        log.debug("%s: _apply_gate: %s", _name(experts), cause)
        return None
    for name, activation in ACTIVATIONS.items():
        for limit in sorted(limits, key=lambda limit: limit or 0.0) if activation.gated else ():
            exact = activation_of(name, limit).plain(gate.double(), up.double())
            near = 1e-5 * exact.abs() + 1e-6 * gate.abs() * (up.abs() + 1)  # 1 + tanh cancels in fp32
            if found.shape == exact.shape and ((found - exact).abs() <= near).all():
                return name, limit
    return None


def _label(experts: Any) -> str:
    """Label of the gate's activation function."""
    function = getattr(experts, "act_fn", None)
    name = getattr(function, "__name__", type(function).__name__)
    return f"{name}(tanh)" if getattr(function, "approximate", "none") == "tanh" else name


def _lora(experts: Any) -> Lora | None:
    """The factors of this call, taken off the module."""
    given = experts.__dict__.pop(FACTORS, None)
    if given is None:
        return None
    scales = {name: scale for name, (_, _, scale) in given.items()}
    if len(set(scales.values())) > 1:
        raise UnsupportedError(
            f"LoRA of {_name(experts)} has scalings {scales}; uniep needs one: the same r and lora_alpha for both"
        )
    w13, w2 = (given[name][:2] if name in given else None for name in weight_names(experts))
    return Lora(w13, w2, next(iter(scales.values())))


def _refused_tensors(experts: Any, copy: bool) -> str:
    for name, proxies in getattr(experts, "parametrizations", {}).items():
        if any(type(proxy).__module__.startswith("peft.") for proxy in proxies):
            return (
                f"PEFT's ParamWrapper adds B A to {name}, of all experts in every call; call "
                "uniep.integrations.peft.adapt(model) after get_peft_model"
            )
    for name in _names(experts):
        tensor = getattr(experts, name)
        if experts.is_transposed and not copy and tensor.is_cuda and tensor.dim() == 3:
            return (
                f"is_transposed is True: {name} {tuple(tensor.shape)} is stored transposed, which GPU kernels do not "
                "read; hf.register(copy_weights=True) copies it in every call"
            )
        if tensor.dtype not in DTYPES:
            return f"{name} has dtype {tensor.dtype}; supported: {', '.join(map(str, DTYPES))}"
        if hasattr(tensor, "full_tensor"):
            return f"{name} is a DTensor here; its module must run on local tensors (ep_plan 'ep_dispatch_experts')"
    return ""


def _seams() -> tuple[Any, Any, Any]:
    """(EPImplementationInterface, ExpertsInterface, the gate function that uniep computes)."""
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
        from transformers.integrations.moe import ExpertsInterface, _default_apply_gate
    except ImportError as cause:
        try:
            found = f"transformers {importlib.metadata.version('transformers')} is installed"
        except importlib.metadata.PackageNotFoundError:
            found = "transformers is not installed"
        raise UnsupportedError(
            f"{found}; uniep.integrations.hf needs transformers >= {NEEDED}, < 6: pip install accelerate "
            f"'transformers>={NEEDED},<6' ({cause})"
        ) from cause
    return EPImplementationInterface, ExpertsInterface, _default_apply_gate
