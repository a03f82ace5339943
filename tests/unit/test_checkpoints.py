"""Checkpoints with w1, w3 and w2: joined, loaded at an EP size, and split again."""

import pytest
import torch

import uniep
from uniep.integrations.checkpoints import join_experts, split_experts
from uniep.integrations.torch import load_full_state_dict

E, F, D = 4, 24, 16
CFG = uniep.MoEConfig(hidden=D, ffn=F, num_experts=E, top_k=2, max_tokens_per_rank=8, dtype=torch.float32)

STYLES = {
    "stacked": {},
    "one for each expert": {"each": ".weight"},
    "Hugging Face's names": {"each": ".weight", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    "transposed": {"transposed": True},
}


class Model(torch.nn.Module):
    def __init__(self, workspace, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList([uniep.nn.MoE(CFG, workspace=workspace) for _ in range(2)])
        self.head = torch.nn.Linear(D, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.fixture
def workspace():
    with uniep.Workspace(CFG, device="cpu") as made:
        yield made


def other_checkpoint(model, *, each=None, gate="w1", up="w3", down="w2", transposed=False):
    """What another program would have saved, written down here by hand."""
    state = {"head.weight": model.head.weight, "head.bias": model.head.bias}
    for n, layer in enumerate(model.layers):
        state[f"layers.{n}.gate.weight"] = layer.router
        w13, w2 = layer.experts.w13, layer.experts.w2
        for name, tensor in ((gate, w13[:, :F]), (up, w13[:, F:]), (down, w2)):
            tensor = tensor.transpose(1, 2) if transposed else tensor
            if each is None:
                state[f"layers.{n}.experts.{name}"] = tensor
            else:
                state |= {f"layers.{n}.experts.{e}.{name}{each}": tensor[e] for e in range(E)}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@pytest.mark.parametrize("style", STYLES)
def test_there_and_back(workspace, style):
    options = STYLES[style]
    model, fresh = Model(workspace, 0), Model(workspace, 1)
    saved = other_checkpoint(model, **options)
    join = {name: value for name, value in options.items() if name != "each"}
    load_full_state_dict(fresh, join_experts(saved, router="gate.weight", **join))
    x = torch.randn(5, D)
    assert torch.equal(fresh(x), model(x)) and not torch.equal(Model(workspace, 1)(x), model(x))
    back = split_experts(fresh.state_dict(), router="gate.weight", **options)
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[name], saved[name]) for name in saved)


def named_by_megatron(name, w):
    """Of linear_fc1 or linear_fc2: stacked, as in its distributed checkpoints; of TEGroupedMLP; of SequentialMLP."""
    yield {f"experts.experts.{name}.weight": w}
    yield {f"experts.{name}.weight{e}": w[e] for e in range(E)}
    yield {f"experts.local_experts.{e}.{name}.weight": w[e] for e in range(E)}


def test_names_of_megatron():
    """Gate and up in one, gate rows first."""
    w13, w2, router = torch.randn(E, 2 * F, D), torch.randn(E, D, F), torch.randn(E, D)
    for first, second in zip(named_by_megatron("linear_fc1", w13), named_by_megatron("linear_fc2", w2), strict=True):
        state = {f"decoder.layers.1.mlp.{name}": t for name, t in (first | second | {"router.weight": router}).items()}
        options = {"gate_up": "linear_fc1", "down": "linear_fc2"}
        made = join_experts(state, router="router.weight", **options)
        assert list(made) == [f"decoder.layers.1.mlp.{name}" for name in ("router", "experts.w13", "experts.w2")]
        assert all(map(torch.equal, made.values(), (router, w13, w2)))
        with pytest.raises(uniep.ConfigError, match=r"linear_fc1 must be \(E, 2F, D\) and linear_fc2 \(E, D, F\)"):
            join_experts({name: t[..., :-1] for name, t in state.items()}, **options)
    with pytest.raises(uniep.ConfigError, match=r"no name ends in experts\.fc1 or experts\.fc2, with"):
        join_experts(state, gate_up="fc1", down="fc2")
    with pytest.raises(uniep.ConfigError, match=r"w1 \(24, 16\).* must be \(E, F, D\)"):
        join_experts({f"experts.{name}": torch.zeros(F, D) for name in ("w1", "w2", "w3")})


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda s: {"head.weight": s["head.weight"]}, {}, "no name ends in experts.w1, experts.w3 or experts.w2"),
        (
            lambda s: s,
            {"gate": "gate_proj"},
            r"layers.0.experts has layers.0.experts.w3, layers.0.experts.w2 but no gate_proj; beside the others are "
            r"layers.0.experts.0.w1, .* tell by gate=",
        ),
        (
            lambda s: {n: t.T if ".w3" in n else t for n, t in s.items()},
            {},
            r"w1 \(4, 24, 16\), w3 \(4, 16, 24\), w2 \(4, 16, 24\); w1 and w3 must be \(E, F, D\)",
        ),
        (
            lambda s: {n: t for n, t in s.items() if n != "layers.1.experts.2.w3"},
            {},
            "w3 is there for 3 of 4 experts; missing: 2; pass the t",
        ),
        (lambda s: {n: t for n, t in s.items() if n != "layers.1.experts.3.w1"}, {}, "w1 is there for 3 .*missing: 3;"),
        (
            lambda s: {n: t for n, t in s.items() if ".w2" not in n},
            {},
            "has .*experts.w1, .*experts.w3 but no w2; tell",
        ),
        (
            lambda s: {n.replace("0.w2", "w2"): t for n, t in s.items()},
            {},
            "w2 is there for all experts and again for single",
        ),
        (
            lambda s: {n.replace("3.w2", "w2"): t for n, t in s.items() if "w2" not in n or "3.w2" in n},
            {},
            "w1 for each, w3 for each, w2 of all experts; store all three alike",
        ),
    ],
    ids=[
        "no experts",
        "another name",
        "up transposed",
        "an up matrix missing",
        "the last gate missing",
        "no down matrix",
        "twice",
        "mixed",
    ],
)
def test_what_does_not_fit(workspace, change, options, words):
    saved = change(other_checkpoint(Model(workspace, 0), each=""))
    with pytest.raises(uniep.ConfigError, match=words):
        join_experts(saved, **options)


def test_names_that_are_not_the_models(workspace):
    """The error has the names on both sides, and the prefix that they differ by."""
    model = Model(workspace, 0)
    joined = join_experts(other_checkpoint(model), router="gate.weight")
    deeper = torch.nn.ModuleDict({"model": model})
    for change, into, words in (
        (lambda n: f"model.{n}", model, r"state's names begin with 'model\.'; take it off"),
        (lambda n: n, deeper, r"model's names begin with 'model\.'; put it before"),
        (
            lambda n: n.replace("router", "gate"),
            model,
            r"lacks 2 .*\(layers.0.router, .*others \(layers.0.gate, .*router=",
        ),
    ):
        with pytest.raises(uniep.ConfigError, match=words):
            load_full_state_dict(into, {change(name): t for name, t in joined.items()})
    load_full_state_dict(deeper, {f"model.{name}": t for name, t in joined.items()})


def test_a_part_of_the_experts_is_no_checkpoint(workspace):
    state = Model(workspace, 0).state_dict()
    state["layers.0.experts._extra_state"] = torch.tensor([1.0, 2.0])
    with pytest.raises(uniep.ConfigError, match="holds the experts of rank 1 of 2; take the state of all"):
        split_experts(state)


def test_experts_without_a_gate():
    """One matrix is no gate and up, and is not cut in two."""
    state = {"experts.w13": torch.randn(E, F, D), "experts.w2": torch.randn(E, D, F)}
    with pytest.raises(uniep.ConfigError, match=r"w13 is \(4, 24, 16\) beside w2 \(4, 16, 24\), not \(E, 2F, D\)"):
        split_experts(state)
