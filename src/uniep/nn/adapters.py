"""LoRA on the experts of a model, named as in PEFT: `add_lora`, `merge_lora`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from uniep.config import refused_number
from uniep.errors import ConfigError
from uniep.limits import lora_limit
from uniep.nn.initial import LORA, generator, normal
from uniep.nn.modules import BIASES, Experts, local_part

__all__ = ["add_lora", "merge_lora"]

_WEIGHTS = {"w13": "13", "w2": "2"}


def add_lora(
    model: nn.Module,
    *,
    r: int = 16,
    lora_alpha: float = 32.0,
    target_parameters: Sequence[str] = ("experts.w13", "experts.w2"),
    seed: int | None = None,
) -> list[str]:
    """Give experts low-rank factors beside w13 and w2: `W + lora_alpha / r * B A`; those and any biases are frozen.

    Returns the new parameters' names.  In each `Experts` whose parameters are targeted they are `lora_a13` (e, r, D),
    `lora_b13` (e, 2F, r), `lora_a2` (e, r, F) and `lora_b2` (e, D, r), of this rank's e experts and the weights' dtype;
    their gradients are complete over the EP group, like those of experts.  A is normal with std 1/sqrt(fan-in), from
    the seed and the expert's global id, so that the model is the same at every EP size; B is 0.  All other parameters
    stay as they are: freeze what you do not train.  Call it before the optimizer is made and the model is wrapped.

    target_parameters: names, or ends of names after a dot, as in PEFT's LoraConfig.
    seed: None: one number drawn from torch's default generator; seed that alike on all ranks.

    Raises ConfigError for r below 1, or above what leaves a low rank; for names that no parameter has; for parameters
    that are not w13 or w2 of an `Experts`, that have factors already, or that have no memory or are not whole yet;
    UnsupportedError for r that is not a multiple of 8, or above 128, on the backend hopper.
    """
    if reason := refused_number(r, 1):
        raise ConfigError(f"r is {reason}")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    found = _targets(model, layers, target_parameters)
    for layer, weights in found.items():
        _check(layer, layers[layer], weights, r)
    drawn = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu")) if seed is None else seed
    made = []
    for number, (layer, weights) in enumerate(found.items()):
        experts = layers[layer]
        experts.lora_scale = lora_alpha / r
        for name in ("w13", "w2", *(BIASES if experts.cfg.bias else ())):
            experts.get_parameter(name).requires_grad_(False)
        for name in weights:
            for factor, value in zip("ab", _factors(experts, name, r, drawn + number), strict=True):
                own = f"lora_{factor}{_WEIGHTS[name]}"
                experts.register_parameter(own, nn.Parameter(value))
                experts.expert_dims[own] = 0
                made.append(f"{layer}.{own}".lstrip("."))
    return made


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Add the factors to w13 and w2, `W = cast(float(W) + scale * (float(B) float(A)))`, and remove them.

    w13 and w2 stay frozen.  Raises ConfigError if there are none, or for experts that are sharded within an expert."""
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, Experts) and m.lora_scale is not None]
    if not layers:
        raise ConfigError("no Experts of this model has LoRA factors; call add_lora first")
    for layer, experts in layers:
        if not experts._is_whole(experts._local()[0]):
            raise ConfigError(f"{layer}.w13 is not whole experts here; merge before sharding, or in a model of its own")
    for _, experts in layers:
        lora = experts._lora()
        assert lora is not None
        for name, pair in (("w13", lora.w13), ("w2", lora.w2)):
            if pair is None:
                continue
            a, b = (t.float() for t in pair)
            for weight, low, high in zip(local_part(experts.get_parameter(name)), a, b, strict=True):
                weight.copy_(weight.float() + lora.scale * (high @ low))
            for factor in "ab":
                own = f"lora_{factor}{_WEIGHTS[name]}"
                delattr(experts, own)
                del experts.expert_dims[own]
        experts.lora_scale = None


def _targets(model: nn.Module, layers: dict[str, Experts], names: Sequence[str]) -> dict[str, list[str]]:
    """Layer -> its weights that `names` target, in the model's order."""
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        hits = [path for path, _ in model.named_parameters() if path == name or path.endswith(f".{name}")]
        if not hits:
            raise ConfigError(
                f"target_parameters has {name!r}, but no parameter of this {type(model).__name__} has that name or "
                "ending; those of its experts are "
                f"{', '.join(f'{layer}.w13, {layer}.w2' for layer in list(layers)[:3]) or 'none'}"
            )
        for path in hits:
            layer, _, weight = path.rpartition(".")
            if layer not in layers or weight not in _WEIGHTS:
                raise ConfigError(
                    f"target_parameters has {name!r}, which is {path}, not w13 or w2 of a uniep.nn.Experts; adapt "
                    "dense layers with PEFT (target_modules)"
                )
            found.setdefault(layer, []).append(weight)
    return {layer: [w for w in _WEIGHTS if w in found[layer]] for layer in layers if layer in found}


def _check(layer: str, experts: Experts, weights: Sequence[str], r: int) -> None:
    if experts.lora_scale is not None:
        raise ConfigError(f"{layer} has LoRA factors already; merge_lora first, or target all its parameters at once")
    if experts.workspace.backend.name == "hopper" and (error := lora_limit(r)) is not None:
        raise type(error)(f"{layer}: {error}")
    if type(experts.w13) is not nn.Parameter or not experts._is_whole(experts.w13) or experts.w13.is_meta:
        raise ConfigError(
            f"{layer}.w13 is a {type(experts.w13).__name__}, sharded or without memory; add LoRA before that"
        )
    most = min(experts.cfg.hidden, experts.cfg.ffn)
    if r > most:
        raise ConfigError(f"r is {r}, but {layer} has only {most} columns; use at most {most}")


def _factors(experts: Experts, name: str, r: int, seed: int) -> tuple[Tensor, Tensor]:
    """A, drawn, and B, zeros."""
    weight = experts.get_parameter(name)
    count, high, wide = weight.shape
    a = weight.new_empty(count, r, wide)
    for local in range(count):
        draw = generator(2 * seed + (name == "w2"), LORA - experts.first_expert - local)
        a[local] = normal(torch.Size((r, wide)), draw)
    return a, weight.new_zeros(count, high, r)
