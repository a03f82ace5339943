"""MoE layers are found by what they hold, whatever they are called."""

import torch
from torch import nn

from uniep.integrations.moe_layers import routed_experts


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False))


class Layer(nn.Module):
    """counted: the attribute that says that there are 4 experts; other keywords: modules, or shapes of parameters."""

    def __init__(self, counted: str = "num_experts", **parts) -> None:
        super().__init__()
        if counted:
            setattr(self, counted, 4)
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(torch.zeros(part)))


def found(**layers: nn.Module) -> list[str]:
    return list(routed_experts(nn.ModuleDict({"layers": nn.ModuleDict(layers)})))


def test_found():
    stacked = {"up": (4, 8, 8), "down": (4, 8, 4)}
    assert found(a=Layer(**stacked)) == ["layers.a"]
    assert found(a=Layer("n_routed_experts", inner=Layer("", **stacked))) == ["layers.a.inner"]
    assert found(a=Layer("", experts=Layer("", **stacked))) == ["layers.a.experts"]
    assert found(a=Layer(router=nn.Linear(8, 4), ffns=nn.ModuleList(mlp() for _ in range(4)))) == ["layers.a.ffns"]
    assert found(a=Layer("", experts=nn.ModuleDict({str(i): mlp() for i in range(3)}))) == ["layers.a.experts"]
    assert found(a=Layer(experts=Layer(w1=(16, 8), w2=(16, 8)))) == ["layers.a.experts"]
    assert found(a=Layer(up=Layer("", w=(4, 8, 8)), down=Layer("", w=(4, 8, 8)))) == ["layers.a"]
    assert found(a=Layer(up=nn.Embedding(4, 8), down=nn.Embedding(4, 8))) == ["layers.a"]
    assert found(a=Layer(**stacked), b=mlp(), c=Layer(**stacked)) == ["layers.a", "layers.c"]


def test_not_found():
    assert not found(a=mlp(), b=nn.ModuleList(mlp() for _ in range(4)))
    assert not found(a=Layer(router=nn.Linear(8, 4), weight=(4, 8), conv=nn.Conv1d(4, 4, 3)))
    assert not found(a=Layer("num_experts_per_tok", conv=(4, 1, 3)))
    assert not found(a=Layer(shared_experts=nn.ModuleList(mlp() for _ in range(2)), shared_expert_gate=nn.Linear(8, 1)))
    assert not found(a=Layer(norms=nn.ModuleList(nn.LayerNorm(8, bias=False) for _ in range(4))))


def test_known_layers_hide_what_is_inside():
    model = nn.ModuleDict({"a": Layer(up=(4, 8, 8), inner=Layer(up=(4, 8, 8)))})
    assert list(routed_experts(model, lambda module: hasattr(module, "inner"))) == ["a"]
    assert list(routed_experts(model["a"], lambda module: hasattr(module, "inner"))) == [""]
