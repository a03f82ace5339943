"""The custom operators behind `uniep.moe`, and their autograd.

They return fresh tensors, never the Workspace's memory, and carry the ORDERED effect: torch.compile may neither delete
nor reorder them, because peers wait for every call.  The effect orders functional operators only.
`moe_bwd_main_grad` writes to its arguments, so `in_turn` before and after it keeps it in order.

If no mode or compiler needs to see the operators, `call` runs their functions without the dispatcher, which would take
a third of the host's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from uniep.backends.base import UNKNOWN_LAYER, ExpertGradients, Inputs, LayerTag, MainGrads, Needs
from uniep.errors import ConfigError, UnsupportedError
from uniep.nn import flops, gradient_shards
from uniep.nn.record import LayerRecord, find_record
from uniep.weights import ExpertWeights
from uniep.workspace import Workspace, by_key, told_to_all

__all__ = ["SAVE_OPS", "call", "check_tokens", "freed", "is_freed", "moe_forward", "refuse_unusual_backward"]


@told_to_all(lambda named, workspace: workspace)
def check_tokens(named: dict[str, Tensor], workspace: Workspace) -> None:
    """Raise ConfigError unless all have the same number of tokens, and the Workspace can take that many."""
    for name, tensor in named.items():
        if tensor.shape[0] != named["ids"].shape[0]:
            raise ConfigError(f"{name} and ids differ in their number of tokens: {len(tensor)} and {len(named['ids'])}")
    if len(named["ids"]) > workspace.cfg.max_tokens_per_rank:
        raise ConfigError(
            f"there are {len(named['ids'])} tokens but max_tokens_per_rank is "
            f"{workspace.cfg.max_tokens_per_rank}; raise it in MoEConfig or split the batch"
        )


def check_memory(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, workspace: Workspace) -> None:
    """For calls at whose tensors `moe` has not looked, or not at all of them: of compiled graphs, with LoRA factors."""
    if any(map(is_freed, (x, ids, weights, *experts.tensors, *experts.factors))):
        _told_of_forward({"x": [x], "ids": [ids], "weights": [weights], **_named(experts)}, workspace)


def _refuse_freed(named: dict[str, Sequence[Tensor]], workspace: Workspace) -> None:
    for name, tensors in named.items():
        for t in tensors:
            if is_freed(t):
                raise ConfigError(freed(name, t))


_told_of_forward = told_to_all(lambda named, workspace: workspace)(_refuse_freed)
_told_of_backward = told_to_all(lambda named, workspace: workspace, sums=True)(_refuse_freed)


def is_freed(t: Tensor) -> bool:
    """Whether an ordinary tensor has lost its memory, as FSDP takes it from parameters, and has only its shape."""
    try:
        return not t.untyped_storage().nbytes() and t.numel() > 0
    except NotImplementedError:  # a wrapper of torch.func
        return False


def freed(name: str, t: Tensor) -> str:
    """The error's text."""
    return (
        f"{name} has shape {tuple(t.shape)}, but its {t.numel() * t.element_size()} bytes have been freed; pass a "
        "tensor that has memory.  FSDP frees a parameter outside the forward and backward of the module that it wraps: "
        "call the layer inside"
    )


@told_to_all(lambda layer, experts, workspace: workspace)
def _layer_of(
    layer: Tensor | None, experts: ExpertWeights, workspace: Workspace
) -> tuple[LayerRecord | None, LayerTag]:
    """The layer's record and tag of a forward.  Peers get errors from here, because compiled calls start here."""
    record = find_record(layer, experts.w13[0], workspace)
    return record, record.enter(workspace, experts) if record is not None else UNKNOWN_LAYER


def _forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: list[Tensor],
    w2: list[Tensor],
    biases: list[Tensor],
    layout: str,
    workspace: str,
    save: bool,
    parameters: list[Tensor],
    main_grads: list[Tensor],
    accumulate: bool,
    layer: Tensor | None = None,
) -> list[Tensor]:
    """[y, *saved].  x (T, D), ids (T, K), weights (T, K) fp32, experts as in `ExpertWeights`; biases: b13 and b2, or
    none.

    parameters, main_grads, accumulate: for backward, unless empty.  main_grads: where gradients go, for those of
    w13, w2 that need one, in this order; parameters: the parameters they belong to.
    layer: `LayerRecord.key`.
    """
    space = by_key(workspace)
    experts = _experts(w13, w2, biases, layout, space)
    check_memory(x, ids, weights, experts, space)
    y, saved = enter_forward(x, ids, weights, experts, space, save, layer)
    return [y, *saved]


def _run(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Sequence[Tensor], w2: Sequence[Tensor], biases: Sequence[Tensor],
    layout: str, workspace: str, save: bool, layer: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """`_forward` where `moe` has just looked at these tensors."""
    space = by_key(workspace)
    return enter_forward(x, ids, weights, _experts(w13, w2, biases, layout, space), space, save, layer)


def enter_forward(
    x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, space: Workspace, save: bool, layer: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """A forward of the backend: (y, saved).  Arguments as of `_forward`."""
    tokens = ids.shape[0]
    if not tokens == x.shape[0] == weights.shape[0] or tokens > space.cfg.max_tokens_per_rank:
        check_tokens({"ids": ids, "x": x, "weights": weights}, space)
    with space.entering:
        record, tag = _layer_of(layer, experts, space)
        y, saved = space.enter().forward(Inputs(x, ids, weights, experts, tag), save)
        space.forwards += 1
        if record is not None:
            record.done(space, tag)
        else:
            space.unnamed = True
    return y, saved


def enter_backward(
    dy: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    saved: list[Tensor],
    space: Workspace,
    needs: Needs,
    layer: Tensor | None,
    main_grads: MainGrads | None = None,
) -> ExpertGradients:
    """A backward of the backend, with expert gradients as `nn.gradient_shards` says."""
    record = find_record(layer, experts.w13[0], space)
    tag = LayerTag(record.number(space)) if record is not None else UNKNOWN_LAYER
    inputs = Inputs(x, ids, weights, experts, tag)
    targets = main_grads.tensors if main_grads is not None else ()
    if any(map(is_freed, (dy, x, ids, weights, *experts.tensors, *experts.factors, *targets))):
        named = {"the gradient of y": [dy], "x": [x], "ids": [ids], "weights": [weights], **_named(experts)}
        _told_of_backward(named | {"main_grad": targets}, space)
    return gradient_shards.backward(space, dy, inputs, saved, needs, main_grads)


def _named(experts: ExpertWeights) -> dict[str, Sequence[Tensor]]:
    """Its tensors, for errors."""
    return {"w13": experts.w13, "w2": experts.w2, "biases": experts.biases, "lora": experts.factors}


def _experts(
    w13: Sequence[Tensor], w2: Sequence[Tensor], biases: Sequence[Tensor], layout: str, space: Workspace
) -> ExpertWeights:
    return ExpertWeights(tuple(w13), tuple(w2), layout, space.cfg.gated, *biases)  # type: ignore[arg-type]


moe_forward = torch.library.custom_op("uniep::moe_fwd", _forward, mutates_args=())


@moe_forward.register_fake
def _(x, ids, weights, w13, w2, biases, layout, workspace, save, parameters, main_grads, accumulate, layer=None):
    y = x.new_empty(x.shape)
    if not save:
        return [y]
    context = torch.library.get_ctx()
    if getattr(context, "_shape_env", context) is None:
        raise UnsupportedError(
            "what a forward keeps for its backward depends on the routing, and this FakeTensorMode knows no unknown "
            "sizes; make it with shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv(), or call under "
            "torch.no_grad()"
        )
    return [y, *by_key(workspace).backend.fake_saved(x.shape[0], x, context.new_dynamic_size)]


def _gradients(
    dy: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: list[Tensor],
    w2: list[Tensor],
    biases: list[Tensor],
    saved: list[Tensor],
    layout: str,
    workspace: str,
    needs: list[bool],
    layer: Tensor | None = None,
) -> list[Tensor]:
    """The gradients that `needs` names (x, weights, w13, w2, biases), flattened in that order."""
    space = by_key(workspace)
    experts = _experts(w13, w2, biases, layout, space)
    got = enter_backward(dy, x, ids, weights, experts, saved, space, Needs(*needs), layer)
    parts = ([got.x], [got.weights], got.w13 or (), got.w2 or (), got.biases)
    return [t for part, needed in zip(parts, needs, strict=True) if needed for t in part if t is not None]


moe_backward = torch.library.custom_op("uniep::moe_bwd", _gradients, mutates_args=())


@moe_backward.register_fake
def _(dy, x, ids, weights, w13, w2, biases, saved, layout, workspace, needs, layer=None):
    parts = ([x], [weights], w13, w2, biases)
    return [t.new_empty(t.shape) for part, needed in zip(parts, needs, strict=True) if needed for t in part]


def _gradients_main_grad(
    dy: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: list[Tensor],
    w2: list[Tensor],
    biases: list[Tensor],
    saved: list[Tensor],
    layout: str,
    workspace: str,
    needs: list[bool],
    main_w13: list[Tensor],
    main_w2: list[Tensor],
    accumulate: bool,
    parameters: list[Tensor],
    turn: Tensor,
    layer: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx, dweights, db13, db2), empty where not needed; writes `MainGrads` and sets the parameters'
    grad_added_to_main_grad."""
    space = by_key(workspace)
    experts = _experts(w13, w2, biases, layout, space)
    given = [*main_w13, *main_w2]
    fit = [
        t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)
        for t in given
    ]
    main_grads = MainGrads(tuple(fit[: len(main_w13)]), tuple(fit[len(main_w13) :]), accumulate)
    got = enter_backward(dy, x, ids, weights, experts, saved, space, Needs(*needs), layer, main_grads)
    for theirs, ours in zip(given, fit, strict=True):
        if theirs is not ours:
            theirs.copy_(ours)
    for parameter in parameters:
        parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    found = got.x, got.weights, *(got.biases or (None, None))
    dx, dweights, db13, db2 = (weights.new_empty(0) if t is None else t for t in found)
    return dx, dweights, db13, db2


moe_backward_main_grad = torch.library.custom_op(
    "uniep::moe_bwd_main_grad", _gradients_main_grad, mutates_args=("main_w13", "main_w2")
)


@moe_backward_main_grad.register_fake
def _(
    dy, x, ids, weights, w13, w2, biases, saved, layout, workspace, needs, main_w13, main_w2, accumulate, parameters,
    turn, layer=None,
):  # fmt: skip
    like = (x, needs[0]), (weights, needs[1]), *((b, needs[4]) for b in biases)
    empty = [weights.new_empty(0) for _ in range(4 - len(like))]
    return *(t.new_empty(t.shape) if needed else weights.new_empty(0) for t, needed in like), *empty


@torch.library.custom_op("uniep::in_turn", mutates_args=())
def in_turn(after: Tensor) -> Tensor:
    """An empty tensor (0,): an operator that takes it runs after `after`, in the order of all operators here."""
    return after.new_empty(0)


@in_turn.register_fake
def _(after):
    return after.new_empty(0)


@_disable_dynamo
def for_autograd(saved: list[Tensor], space: Workspace) -> list[Tensor]:
    """What a forward saved, `Backend.trimmed` if hooks look at it, such as those of checkpointing; as it is where a
    compiler traces the operator, which has said what shapes it returns."""
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return space.backend.trimmed(saved) if hooked and all(type(t) is Tensor for t in saved) else saved


def _setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, ids, weights, w13, w2, biases, layout, workspace, _, ctx.parameters, ctx.main_grads, ctx.accumulate, layer = (
        inputs
    )
    ctx.counts = len(w13), len(w2), len(biases)
    ctx.layout, ctx.workspace = layout, workspace
    ctx.needs = [any(t.requires_grad for t in ts) for ts in ([x], [weights], w13, w2, biases)]
    ctx.wanted = [t.requires_grad for t in (*w13, *w2)]
    saved = for_autograd(output[1:], by_key(workspace))  # without main_grads, which may change until the backward
    ctx.save_for_backward(layer, x, ids, weights, *w13, *w2, *biases, *saved)
    ctx.set_materialize_grads(False)


@told_to_all(lambda ctx, *_, **__: by_key(ctx.workspace), sums=True)
def _backward(ctx: Any, grads: Sequence[Tensor | None], *, direct: bool = False) -> tuple:
    """direct: run without the dispatcher, unless the backward itself is traced, as in compiled autograd."""
    refuse_unusual_backward(grads[0])
    tensors = ctx.saved_tensors  # read once: under checkpointing this recomputes them
    direct = direct and not _operators_are_seen(tensors[1:])
    layer, x, ids, weights, *rest = tensors
    a, b, c = ctx.counts
    w13, w2, biases, saved = rest[:a], rest[a : a + b], rest[a + b : a + b + c], rest[a + b + c :]
    dy = torch.zeros_like(x) if grads[0] is None else grads[0].contiguous()
    if ctx.main_grads:
        return _backward_main_grad(ctx, dy, x, ids, weights, w13, w2, biases, saved, layer, direct)
    out = (_gradients if direct else moe_backward)(
        dy, x, ids, weights, w13, w2, biases, saved, ctx.layout, ctx.workspace, ctx.needs, layer
    )
    left = iter(out)
    need_x, need_weights, need_w13, need_w2, need_biases = ctx.needs
    dx = next(left) if need_x else None
    dweights = next(left) if need_weights else None
    dw13 = [next(left) if need_w13 else None for _ in range(a)]
    dw2 = [next(left) if need_w2 else None for _ in range(b)]
    dbiases = [next(left) if need_biases else None for _ in range(c)]
    return dx, None, dweights, dw13, dw2, dbiases, None, None, None, [], [], None, *_of_layer(layer)


def _of_layer(layer: Tensor | None) -> tuple[None, ...]:
    """The gradient of `layer` if it was an input: the dispatcher omits a last argument that has its default value."""
    return () if layer is None else (None,)


def _backward_main_grad(
    ctx: Any, dy: Tensor, x: Tensor, ids: Tensor, weights: Tensor, w13: list[Tensor], w2: list[Tensor],
    biases: list[Tensor], saved: list[Tensor], layer: Tensor | None, direct: bool,
) -> tuple:  # fmt: skip
    """Zeros instead of gradients that went to main_grads: the parameters' hooks run, and nothing is added twice."""
    left, wanted = iter(ctx.main_grads), iter(ctx.wanted)
    need_x, need_weights, *need_experts, need_biases = ctx.needs
    targets: list[list[Tensor]] = []
    dummies: list[list[Tensor | None]] = []
    for tensors, needed in zip((w13, w2), need_experts, strict=True):
        into = [next(left) if next(wanted) else None for _ in tensors]
        pairs = list(zip(into, tensors, strict=True))
        dummies.append([None if m is None else t.new_zeros(()).expand(t.shape) for m, t in pairs])
        # If only some parameters are frozen, their gradients are computed and dropped.
        filled = [torch.zeros_like(t, dtype=torch.float32) if m is None else m for m, t in pairs]
        targets.append(filled if needed else [])
    arguments: list[Any] = [
        dy, x, ids, weights, w13, w2, biases, saved, ctx.layout, ctx.workspace, ctx.needs, *targets, ctx.accumulate,
        ctx.parameters, dy if direct else in_turn(dy), layer,
    ]  # fmt: skip
    if direct:
        dx, dweights, *dbiases = _gradients_main_grad(*arguments)
        torch.autograd.graph.increment_version(ctx.main_grads)
    else:
        dx, dweights, *dbiases = moe_backward_main_grad(*arguments)
        in_turn(dx)
    nothing: list[None] = [None] * len(ctx.main_grads)
    of_biases = [db if need_biases else None for db in dbiases[: len(biases)]]
    grads = dx if need_x else None, None, dweights if need_weights else None, *dummies, of_biases
    return *grads, None, None, None, nothing, nothing, None, *_of_layer(layer)


class _Direct(torch.autograd.Function):
    """The operators' functions and autograd, for tensors that autograd sees one by one."""

    @staticmethod
    def forward(
        ctx: Any, how: tuple, counts: tuple[int, int], x: Tensor, ids: Tensor, weights: Tensor, *experts: Tensor
    ) -> Tensor:
        """how: the arguments of `_forward` from layout on.  experts: so many of w13 and of w2, then biases."""
        a, b = counts[0], sum(counts)
        layout, workspace, save, *_, layer = how
        tensors = x, ids, weights, experts[:a], experts[a:b], experts[b:]
        y, saved = _run(*tensors, layout, workspace, save, layer)
        _setup_context(ctx, (*tensors, *how), [y, *saved])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        dx, _, dweights, dw13, dw2, dbiases, *_ = _backward(ctx, grads, direct=True)
        return None, None, dx, None, dweights, *dw13, *dw2, *dbiases


def call(
    x: Tensor, ids: Tensor, weights: Tensor, w13: list[Tensor], w2: list[Tensor], biases: list[Tensor], layout: str,
    workspace: str, save: bool, parameters: list[Tensor], main_grads: list[Tensor], accumulate: bool,
    layer: Tensor | None,
) -> Tensor:  # fmt: skip
    """y of `moe_forward`, differentiable."""
    refuse_transforms()
    how = (layout, workspace, save, parameters, main_grads, accumulate, layer)
    if _operators_are_seen((x, ids, weights, *w13, *w2, *biases)):
        return moe_forward(x, ids, weights, w13, w2, biases, *how)[0]
    if not save:
        return _run(x, ids, weights, w13, w2, biases, layout, workspace, save, layer)[0]
    return _Direct.apply(how, (len(w13), len(w2)), x, ids, weights, *w13, *w2, *biases)


def refuse_transforms() -> None:
    """Raise UnsupportedError inside what does not know uniep's calls."""
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedError("uniep does not run inside torch.func transforms; use torch.autograd's backward or grad")
    if torch.jit.is_tracing():
        raise UnsupportedError("torch.jit.trace does not know uniep's calls; use torch.compile")


def refuse_unusual_backward(dy: Tensor | None) -> None:
    """Raise UnsupportedError for a backward of a backward, and for many at once."""
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "this backward runs with create_graph=True, but uniep has no second derivatives, which would be zeros; "
            "call backward or grad without it, or keep the layer out of what is differentiated twice"
        )
    if dy is not None and not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(dy):
        raise UnsupportedError(
            "this backward has many gradients at once (is_grads_batched=True, or jacobian with vectorize=True), and "
            "uniep's calls have one; call grad for each"
        )


def _operators_are_seen(tensors: Sequence[Tensor]) -> bool:
    """Whether operators are seen: by a compiler, a subclass, or a mode (fake tensors, selective checkpointing,
    FLOPs)."""
    if torch.compiler.is_compiling():
        return True
    if flops.looked_at():
        return True
    return any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors)


moe_forward.register_autograd(_backward, setup_context=_setup_context)
for _op in (moe_forward, moe_backward, in_turn):
    _op.register_effect(torch.library.EffectType.ORDERED)

SAVE_OPS = (torch.ops.uniep.moe_fwd.default,)
"""Operators to pass to selective activation checkpointing as MUST_SAVE, so that the layer is not recomputed."""
