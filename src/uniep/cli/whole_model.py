"""What a whole model takes on one rank: parameters, gradients, optimizer state, and what its MoE layers keep."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from uniep.config import MoEConfig
from uniep.errors import ConfigError, UnsupportedError
from uniep.integrations.moe_layers import routed_experts
from uniep.memory import MemoryPlan

TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
"""Where configurations of transformers have the number of experts per token."""


class Optimizer(enum.StrEnum):
    adamw_fp32 = "adamw-fp32"
    adamw = "adamw"
    sgd = "sgd"
    none = "none"

    def bytes(self, dtype: torch.dtype) -> dict[str, int]:
        """Bytes for each parameter: {what: bytes}."""
        size, name = dtype.itemsize, str(dtype).removeprefix("torch.")
        parameters = {f"parameters, {name}": size}
        return {
            Optimizer.adamw_fp32: parameters | {"gradients, fp32": 4, "masters, fp32": 4, "two averages, fp32": 8},
            Optimizer.adamw: parameters | {f"gradients, {name}": size, f"two averages, {name}": 2 * size},
            Optimizer.sgd: parameters | {f"gradients, {name}": size},
            Optimizer.none: parameters,
        }[self]


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """name; numbers of MoE layers, and of parameters: of all routed experts, and of everything else."""

    name: str
    layers: int
    experts: int
    dense: int


def of_layers(cfg: MoEConfig, layers: int, dense: int) -> ModelSize:
    """A model of so many layers of this shape, with their routers, and `dense` further parameters."""
    experts = layers * 3 * cfg.num_experts * cfg.hidden * cfg.ffn
    return ModelSize(f"{layers} layers", layers, experts, dense + layers * cfg.num_experts * cfg.hidden)


def of_config(path: Path) -> tuple[ModelSize, dict[str, Any]]:
    """The model of a configuration of transformers (config.json, or its folder), and its layers' part of a MoEConfig.

    Every parameter is counted, in the model built without memory.
    Raises UnsupportedError without transformers; ConfigError if there is no such model, or no MoE layer in it, or MoE
    layers of several shapes.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise UnsupportedError(
            "--config needs transformers, which counts the parameters: pip install '.[hf]' or transformers; or give "
            "--layers, --dense and --shape"
        ) from None
    if not path.exists():
        raise ConfigError(f"--config {path}: no such file; give a config.json or its folder")
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())[:300]}") from None
    found = routed_experts(model)
    if not found:
        raise ConfigError(f"--config {path}: {type(model).__name__} has no MoE layer")
    text = config.get_text_config()
    top_k = next((value for name in TOP_K if isinstance(value := getattr(text, name, None), int)), None)
    if top_k is None:
        raise ConfigError(f"--config {path}: none of {', '.join(TOP_K)} is in it; give --layers and the shape instead")
    shapes = {_shape(experts, text.hidden_size) for experts in found.values()}
    if len(shapes) > 1:
        raise ConfigError(f"--config {path}: MoE layers of {len(shapes)} shapes; give --layers and the shape instead")
    (num_experts, ffn, gated, bias), *_ = shapes
    of_experts = sum(p.numel() for experts in found.values() for p in experts.parameters())
    size = ModelSize(
        getattr(config, "model_type", path.name), len(found), of_experts,
        sum(p.numel() for p in model.parameters()) - of_experts,
    )  # fmt: skip
    layer = {"hidden": text.hidden_size, "ffn": ffn, "num_experts": num_experts, "top_k": top_k, "bias": bias}
    return size, layer if gated else layer | {"activation": "silu"}


def _shape(experts: torch.nn.Module, hidden: int) -> tuple[int, int, bool, bool]:
    """(number of experts, width of one, whether there is a gate, are biases) of the module with a layer's experts."""
    stacked = [p for p in experts.parameters() if p.ndim > 2]
    number = stacked[0].shape[0] if stacked else len(list(experts.children()))
    matrices = stacked or [p for p in experts.parameters() if p.ndim > 1]
    gated, bias = bool(getattr(experts, "has_gate", True)), bool(getattr(experts, "has_bias", False))
    return number, sum(p.numel() for p in matrices) // ((3 if gated else 2) * number * hidden), gated, bias


def rows(size: ModelSize, plan: MemoryPlan, dtype: torch.dtype, ep: int, fsdp: int, optimizer: Optimizer) -> list[
    dict[str, Any]
]:  # fmt: skip
    """What one rank of the largest share holds: [{what, experts, dense, total}], bytes, the sum last.

    fsdp: ranks over which everything is sharded; 1: experts over EP alone, the rest copied.
    Raises ConfigError unless EP divides it.
    """
    if fsdp != 1 and fsdp % ep:
        raise ConfigError(f"--fsdp is {fsdp}; it must be 1 (nothing is sharded) or a multiple of --ep {ep}")
    experts, dense = math.ceil(size.experts / max(ep, fsdp)), math.ceil(size.dense / fsdp)
    found = [_row(what, experts * count, dense * count) for what, count in optimizer.bytes(dtype).items()]
    if fsdp > 1:
        layer = [-(-count // size.layers) * dtype.itemsize for count in (math.ceil(size.experts / ep), size.dense)]
        found.append(_row("two layers gathered by FSDP2", *(2 * part for part in layer)))
    training = optimizer != Optimizer.none
    moe = {
        "shared buffers of the MoE layers": plan.total_bytes("shared"),
        f"saved by {size.layers} MoE layers": size.layers * plan.total_bytes("saved") if training else 0,
        "one MoE call, beyond what it saves": plan.peak_bytes() - plan.total_bytes("saved"),
    }
    found += [_row(what, count, 0) for what, count in moe.items()]
    return [*found, _row("total", *(sum(row[part] for row in found) for part in ("experts", "dense")))]


def _row(what: str, experts: int, dense: int) -> dict[str, Any]:
    return {"what": what, "experts": experts, "dense": dense, "total": experts + dense}


def describe(size: ModelSize, ep: int, fsdp: int, optimizer: Optimizer) -> str:
    total = size.experts + size.dense
    sharded = f", sharded over {fsdp} ranks" if fsdp > 1 else ""
    return (
        f"{size.name}: {size.layers} MoE layers, {total / 1e9:.2f} B parameters, {size.experts / 1e9:.2f} B of them "
        f"experts; one rank, EP {ep}{sharded}, {optimizer.value}"
    )


def as_document(size: ModelSize, table: list[dict[str, Any]]) -> Mapping[str, Any]:
    return {**dataclasses.asdict(size), "bytes": table}
