"""The public functions: `moe` and `route`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from uniep.errors import ConfigError, DTypeError, UnsupportedError, check_kind
from uniep.nn.invariant import refuse_forward_mode
from uniep.nn.lora import call_lora, check_lora
from uniep.nn.ops import call, check_tokens, freed, is_freed
from uniep.nn.record import LayerRecord
from uniep.routing import RoutingPlan
from uniep.weights import ExpertWeights, Lora
from uniep.workspace import Workspace, told_to_all

Weights = Tensor | Sequence[Tensor]
MainGrad = Literal["accumulate", "overwrite"]

MATERIALISE = "call to_empty(device=...) and reset_parameters() of every module, or load a state, before the first call"
_ORDINARY = (Tensor, torch.nn.Parameter)
_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@told_to_all(lambda *_, **named: named.get("workspace"))
def moe(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w13: Weights,
    w2: Weights,
    *,
    workspace: Workspace,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    main_grad: MainGrad | None = None,
    layer: LayerRecord | None = None,
    lora: Lora | None = None,
) -> Tensor:
    """Send tokens to their experts, run the experts, return the weighted sum.  Differentiable.

    Collective over the Workspace's group: every rank calls it the same number of times, with T=0 if it has no tokens.

    x_TD: (T, D) in cfg.dtype; T may differ per rank and per call, up to cfg.max_tokens_per_rank.
    ids_TK: (T, K) int8 to int64 or uint8, global expert ids; -1 leaves a slot unused; repeats in a row both count.
    weights_TK: (T, K) routing weights, used in fp32, never renormalised.
    w13: this rank's e experts: (e, 2F, D) gate rows first, (e, 2, F, D), a pair (w1, w3) of (e, F, D), or a
        list of e tensors (2F, D); never concatenated.  Interleaved rows (gate, up, gate, ...) are the pair
        (w13[:, 0::2], w13[:, 1::2]), not a copy.  Of activations without a gate (e, F, D), or a list of (F, D).
    w2: (e, D, F) or a list of e tensors (D, F).
    b13, b2: biases (e, 2F), gate first, or (e, F) without a gate, and (e, D), of cfg.dtype; given if cfg.bias, else
        None: h = cast(x W13^T + b13), y_k = cast(act W2^T + b2), added in fp32 before the cast; with
        weight_at="activation" w * b2.
    main_grad: None, "accumulate" or "overwrite".  If given, each of w13 and w2 that requires a gradient must have an
        attribute main_grad, fp32 and of its shape.  Backward adds the finished fp32 gradient to it ("accumulate") or
        writes it there ("overwrite"), without rounding to cfg.dtype.  It sets the parameter's grad_added_to_main_grad
        to True and returns zeros as its gradient, so that hooks run (Megatron's protocol).  The zeros share one
        element: a hook must not write into them.  Every backward through the call does this, even
        `torch.autograd.grad` for x alone.  If several parameters share a main_grad, such as one given twice, only
        "accumulate" works.  Biases get ordinary gradients, which hooks add to their main_grad.  On GPUs the first such
        backward compiles kernels that `prepare` did not.
    layer: identifies this layer; made once and passed in every call of it.  Then ranks raise an error, instead of
        computing something else, if they are in different layers (in a forward, a recomputation or a backward) or if a
        tool has made their experts equal.  None: the layer is identified by w13 if that is an nn.Parameter.
    lora: low-rank factors; the layer then computes with `W + scale B A`, which is never materialised, and w13 and w2
        are not trained.  On backend hopper their rank is a multiple of 8, up to 128.  A compiled graph breaks here.
        Tracing such a call, or saving it by selective checkpointing, raises UnsupportedError.
    Returns y (T, D), fresh memory.  Under torch.autocast the floating inputs are cast to cfg.dtype.

    Gradients: x, weights (fp32) and the expert parameters, or the factors of lora, in their own layout and dtype;
    experts and ranks without tokens get zeros, never None.  Reverse mode, once: no second derivatives, no forward mode.

    Raises, on every rank and before any row moves: InputError, DTypeError, ConfigError, UnsupportedError;
    CapacityError; PeerTimeoutError when a peer does not come; ClosedError afterwards.

    **Order**: rows of an expert by (source rank, token, slot); slots of a token summed k = 0..K-1 in fp32.
    Bits depend on neither schedule, EP size, nor timing: docs/numerics.md.
    """
    check_kind("workspace", workspace, Workspace)
    if layer is not None:
        check_kind("layer", layer, LayerRecord)
    if lora is not None:
        check_kind("lora", lora, Lora)
    given, biases = (w13, w2), {name: b for name, b in (("b13", b13), ("b2", b2)) if b is not None}
    ordinary = _are_ordinary((x_TD, ids_TK, weights_TK, w13, w2, *biases.values()), workspace)
    if not ordinary:
        check_dense(x=x_TD, ids=ids_TK, weights=weights_TK, w13=w13, w2=w2, **biases)
    if torch.is_autocast_enabled(workspace.device.type):
        x_TD, w13, w2 = (_cast(t, workspace.cfg.dtype) for t in (x_TD, w13, w2))
        biases = {name: _cast(b, workspace.cfg.dtype) for name, b in biases.items()}
        lora = lora.to(workspace.cfg.dtype) if lora is not None else None
    _check(x_TD, ids_TK, workspace)
    if weights_TK.shape[1:] != ids_TK.shape[1:] or not weights_TK.is_floating_point():
        raise ConfigError(
            f"weights have shape {tuple(weights_TK.shape)} and dtype {weights_TK.dtype}; they must be floating "
            f"point with the shape of ids, {tuple(ids_TK.shape)}"
        )
    experts = ExpertWeights.parse(w13, w2, workspace.cfg, workspace.ep_size, **biases)
    if lora is not None:
        experts = dataclasses.replace(experts, lora=lora)
        check_lora(experts, workspace, main_grad)
    parameters, main_grads = _main_grads(*given, main_grad, workspace)
    factors = [] if lora is None else [t for pair in experts.trained for t in pair]
    tensors = (x_TD, weights_TK, *experts.w13, *experts.w2, *experts.biases, *factors)
    save = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if save and (own := [op for op in workspace.operators if op.direction == "forward" and op.changes]):
        raise ConfigError(
            f"operator {own[0].name!r} changes rows after {own[0].after!r}, and has no gradient; call under "
            "torch.no_grad(), or, if it only reads, make it with changes=False"
        )
    named = {"x": [x_TD], "ids": [ids_TK], "weights": [weights_TK], "w13": experts.w13, "w2": experts.w2}
    named |= {name: [b] for name, b in biases.items()}
    if lora is not None:
        named["lora"] = factors
    if not ordinary or lora is not None:
        check_devices(named, workspace)
        if save:
            _refuse_inference_tensors(named)
    if main_grads:
        _refuse_inference_tensors({"main_grad": main_grads})
    refuse_forward_mode(named)
    if lora is not None:
        of_call = x_TD.contiguous(), ids_TK.contiguous(), weights_TK.float().contiguous()
        return call_lora(*of_call, experts, workspace, save, layer.key if layer is not None else None)
    return call(
        x_TD.contiguous(),
        ids_TK.contiguous(),
        weights_TK.float().contiguous(),
        list(experts.w13),
        list(experts.w2),
        [b.contiguous() for b in experts.biases],
        experts.layout,
        workspace.key,
        save,
        parameters,
        main_grads,
        main_grad == "accumulate",
        # Fake tensors cannot be mixed with real ones.
        layer.key if layer is not None and not isinstance(x_TD, FakeTensor) else None,
    )


@told_to_all(lambda *_, **named: named.get("workspace"))
def route(ids_TK: Tensor, *, workspace: Workspace) -> RoutingPlan:
    """This rank's RoutingPlan for the ids of all ranks: tensors only.  Collective, like `moe`.

    ids_TK: (T, K) integers as for `moe`.  Raises InputError on every rank, naming rank, row, slot, value.
    """
    check_kind("workspace", workspace, Workspace)
    check_dense(ids=ids_TK)
    _check_ids(ids_TK, workspace)
    check_devices({"ids": [ids_TK]}, workspace)
    check_tokens({"ids": ids_TK}, workspace)
    return workspace.enter().route(ids_TK.contiguous())


def _main_grads(
    w13: Weights, w2: Weights, main_grad: MainGrad | None, workspace: Workspace
) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that need a gradient, and their main_grads; none if there is no backward or no main_grad."""
    if main_grad not in (None, "accumulate", "overwrite"):
        raise ConfigError(f"main_grad is {main_grad!r}; it must be 'accumulate', 'overwrite' or None")
    parameters: list[Tensor] = []
    main_grads: list[Tensor] = []
    if main_grad is None or not torch.is_grad_enabled():
        return parameters, main_grads
    for name, value in (("w13", w13), ("w2", w2)):
        alone = isinstance(value, Tensor)
        for number, parameter in enumerate([value] if alone else value):
            if not parameter.requires_grad:
                continue
            label = name if alone else f"{name}[{number}]"
            shape, found = tuple(parameter.shape), getattr(parameter, "main_grad", None)
            remedy = (
                f"make it fp32 of shape {shape} before the call, e.g. torch.zeros(shape, dtype=torch.float32), or pass "
                "main_grad=None"
            )
            if not isinstance(found, Tensor):
                raise ConfigError(f"{label}.main_grad is {found!r} but main_grad={main_grad!r}; {remedy}")
            if found.layout != torch.strided or found.is_nested:
                raise UnsupportedError(f"{label}.main_grad has layout {found.layout}; {remedy}")
            if found.dtype != torch.float32:
                raise DTypeError(f"{label}.main_grad has dtype {found.dtype}; {remedy}")
            if tuple(found.shape) != shape:
                raise ConfigError(f"{label}.main_grad has shape {tuple(found.shape)}; {remedy}")
            check_devices({f"{label}.main_grad": [found]}, workspace)
            if any(step == 0 and size > 1 for step, size in zip(found.stride(), shape, strict=True)):
                raise ConfigError(
                    f"{label}.main_grad has strides {found.stride()}, so that elements share memory, and cannot be "
                    f"written; {remedy}"
                )
            if main_grad == "overwrite" and any(found.data_ptr() == other.data_ptr() for other in main_grads):
                raise ConfigError(
                    f"{label}.main_grad is also that of a parameter before it, so that 'overwrite' would leave one "
                    "gradient of several in it; zero it and pass main_grad='accumulate'"
                )
            parameters.append(parameter)
            main_grads.append(found)
    return parameters, main_grads


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Casts floating tensors, or lists of them, as autocast does."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return [_cast(t, dtype) for t in value]  # a ParameterList of the results would detach them from their parameters


def _are_ordinary(values: Sequence[Any], workspace: Workspace) -> bool:
    """Whether all tensors are as in most calls, so that the detailed checks can be skipped: dense, in memory, on the
    Workspace's type of device, and usable by autograd.  Takes a sixth of the time of those checks."""
    if torch.compiler.is_compiling():
        return False
    kind = workspace.device.type
    for t in values:
        if type(t) not in _ORDINARY or t.layout is not torch.strided or t.is_nested or t.is_inference():
            return False
        if t.device.type != kind or is_freed(t):
            return False
    return True


def check_dense(**named: Any) -> None:
    for name, value in named.items():
        tensors = value if name in ("w13", "w2") and isinstance(value, Sequence | torch.nn.ParameterList) else [value]
        for t in tensors:
            if not isinstance(t, Tensor):
                raise ConfigError(
                    f"{name} is or holds {type(t).__name__}; it must be a torch.Tensor (torch.fx cannot trace the "
                    "layer: make it a leaf, or use torch.export)"
                )
            if hasattr(t, "device_mesh"):
                raise UnsupportedError(
                    f"{name} is a {type(t).__name__} over {t.device_mesh}; a call takes this rank's own part, such as "
                    f"its tokens or its experts: {name}.to_local()"
                )
            if t.layout != torch.strided:
                raise UnsupportedError(f"{name} has layout {t.layout}; pass a dense tensor, e.g. {name}.to_dense()")
            if t.is_nested:
                raise UnsupportedError(f"{name} is a nested tensor; pass its values as one, e.g. {name}.values()")
            if not torch.compiler.is_compiling() and type(t) in _ORDINARY and is_freed(t):
                raise ConfigError(freed(name, t))


def _check(x_TD: Tensor, ids_TK: Tensor, workspace: Workspace) -> None:
    """Checks all but the number of tokens, which torch.compile may not know: the operator itself checks that."""
    cfg = workspace.cfg
    if x_TD.dim() != 2 or x_TD.shape[1] != cfg.hidden:
        raise ConfigError(f"x has shape {tuple(x_TD.shape)}; it must be (T, hidden={cfg.hidden})")
    if x_TD.dtype != cfg.dtype:
        raise DTypeError(
            f"x has dtype {x_TD.dtype} but the layer computes in {cfg.dtype}; convert x or change MoEConfig.dtype"
        )
    _check_ids(ids_TK, workspace)


def _check_ids(ids_TK: Tensor, workspace: Workspace) -> None:
    cfg = workspace.cfg
    if ids_TK.dim() != 2 or ids_TK.shape[1] != cfg.top_k:
        raise ConfigError(f"ids have shape {tuple(ids_TK.shape)}; they must be (T, top_k={cfg.top_k})")
    if ids_TK.dtype not in _ID_DTYPES:
        raise DTypeError(f"ids have dtype {ids_TK.dtype}; they must be integers, int8 to int64 or uint8")


def check_devices(named: Mapping[str, Sequence[Tensor]], workspace: Workspace) -> None:
    """One tensor on another device would dispatch the whole call there: "meta" would give shapes without values."""
    for name, tensors in named.items():
        for t in tensors:
            if t.device.type != workspace.device.type:
                remedy = MATERIALISE if t.is_meta and name in ("w13", "w2") else f"move {name}"
                raise ConfigError(f"{name} is on {t.device} but the Workspace is on {workspace.device}; {remedy}")


def _refuse_inference_tensors(named: Mapping[str, Sequence[Tensor]]) -> None:
    """Autograd cannot save inference tensors, and would raise only after the call."""
    if torch.compiler.is_compiling():
        return
    for name, tensors in named.items():
        if any(t.is_inference() for t in tensors):
            raise UnsupportedError(
                f"{name} was made in torch.inference_mode and cannot be kept for backward; make it outside, pass "
                f"{name}.clone(), or call the layer under torch.no_grad"
            )
