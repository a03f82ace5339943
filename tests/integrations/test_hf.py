"""uniep inside Hugging Face transformers: tiny random models against transformers' own experts.

Numbers: a tensor may be as far from fp64 as twice transformers' own result, or one rounding.  Of gradients of
fewer than FEW numbers, each of which may be exact by luck, the worst counts; of the loss, the logits.
"""

import importlib.metadata
import os
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch.distributed as dist  # noqa: E402
from case import equal_bits  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402
from transformers.integrations.moe import use_experts_implementation  # noqa: E402

import uniep  # noqa: E402
from uniep.integrations import hf  # noqa: E402
from uniep.nn import RoutingRecord, record_routing, replay_routing  # noqa: E402

COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}
OWN = {
    "Qwen3Moe": {
        "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "head_dim": 16,
    },
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
    },
    "Olmoe": {"intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3},
    "Gemma4": {
        "intermediate_size": 64, "moe_intermediate_size": 32, "enable_moe_block": True, "num_experts": 8,
        "top_k_experts": 2, "head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 64,
    },
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
OWN |= {
    "GptOss": {
        "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "swiglu_limit": 0.5,
    },
    "NemotronH": {
        "layers_block_type": ["moe", "full_attention"], "head_dim": 16, "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 32, "moe_latent_size": 32, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "mamba_num_heads": 4, "mamba_head_dim": 16,
    },
    "AriaText": {"intermediate_size": 32, "moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 1},
    "HYV4": {
        **LATENT, "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "num_key_value_heads": 4, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "swiglu_limit": 0.5,
        "mlp_layer_types": ["dense", "sparse"], "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "Beam": {
        "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3, "n_group": 2,
        "topk_group": 1, "head_dim": 16, "mlp_layer_types": ["dense", "sparse"],
    },
}  # fmt: skip
OWN["Qwen3Moe, gelu"] = {**OWN["Qwen3Moe"], "hidden_act": "gelu"}
MODELS = list(OWN)
OWN["Phimoe"] = {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
OWN["DeepseekV2"] = {**OWN["DeepseekV3"], "topk_method": "group_limited_greedy"}
EP2 = {"fsdp_size": 2, "ep_size": 2}
FEW = 16


def build(kind: str, **changes) -> nn.Module:
    model = getattr(transformers, f"{kind.partition(',')[0]}ForCausalLM")
    config = model.config_class(**{**COMMON, **OWN[kind], **changes})
    torch.manual_seed(0)
    return model(config)


def batch(rank: int = 0) -> Tensor:
    """Ranks have different numbers of tokens."""
    return torch.randint(64, (2, 9 + 4 * rank), generator=torch.Generator().manual_seed(rank))


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "is_concatenated")}


def run(model: nn.Module, *batches: Tensor) -> dict[str, Tensor]:
    """Loss (mean over batches), its gradients, and logits of the first batch."""
    model.zero_grad()
    outs = [model(ids, labels=ids) for ids in batches]
    loss = sum(out.loss for out in outs) / len(outs)
    loss.backward()
    gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "logits": outs[0].logits.detach(), **gradients}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distance(tensor: Tensor, true: Tensor) -> float:
    return float((tensor.double() - true).norm() / true.norm().clamp_min(1e-30))


def check(ours: dict[str, Tensor], theirs: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys() == truth.keys()
    errors = {name: distance(theirs[name], true) for name, true in truth.items()}
    few = [name for name, true in truth.items() if true.numel() < FEW and name != "loss"]
    for name, true in truth.items():
        error, allowed = distance(ours[name], true), errors[name]
        if name in few:
            allowed = max(errors[other] for other in few)
        elif name == "loss":
            allowed = max(allowed, errors["logits"])
        rounding = torch.finfo(ours[name].dtype).eps
        assert error <= 2 * allowed + rounding, f"{name}: {error:.2e}, transformers' own {allowed:.2e}"


@pytest.fixture
def registration():
    made = hf.register()
    yield made
    made.free()


@pytest.fixture(scope="module")
def pair():
    """Two processes, the whole world of the models they load."""
    from pool import Pool

    made = Pool(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a model, as from_pretrained reads it."""
    made: dict[str, str] = {}

    def save(kind: str) -> str:
        if kind not in made:
            made[kind] = str(tmp_path_factory.mktemp(kind))
            build(kind).save_pretrained(made[kind])
        return made[kind]

    return save


def load(world, folder: str, sizes: dict, ep: str | None = None, experts: str | None = None) -> nn.Module:
    os.environ.update(RANK=str(world.rank), LOCAL_RANK=str(world.rank), WORLD_SIZE=str(world.size))
    distributed = DistributedConfig(**sizes, **({"ep_implementation": ep} if ep else {}))
    chosen = {"experts_implementation": experts} if experts else {}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=distributed, dtype=torch.float32, **chosen
    )


# One device.


@pytest.mark.parametrize("kind", MODELS)
def test_one_device(kind, registration):
    model = build(kind)
    truth = run(build(kind, experts_implementation="eager").double(), batch())
    results, tokens = {}, {}
    for name in ("eager", "grouped_mm", "uniep"):
        model.set_experts_implementation(name)
        results[name] = run(model, batch())
        tokens[name] = model.generate(batch()[:, :5], max_new_tokens=8, do_sample=False, pad_token_id=0)
    check(results["uniep"], results["grouped_mm"], truth)
    assert torch.equal(tokens["uniep"], tokens["eager"])
    found = hf.status(model)
    assert found.num_active == len(found.layers) == len(experts_of(model)) > 0
    assert len(registration.workspaces) == 1  # shared by all layers and by generation


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layer_in_each_dtype(dtype, registration):
    """Experts alone, so that no routing depends on the rounding; one slot is a sentinel."""
    model = build("Qwen3Moe")
    experts = experts_of(model)["model.layers.0.mlp.experts"].to(dtype)
    experts._is_expert_parallel = True
    x, dy = torch.randn(2, 33, 64).to(dtype)
    weights = torch.rand(33, 2)
    ids = torch.randint(8, (33, 2))
    ids[3, 1], weights[3, 1] = 8, 0.0
    results = {}
    for name, cast in (("eager", torch.float64), ("grouped_mm", dtype), ("uniep", dtype)):
        experts = experts.to(cast)
        model.set_experts_implementation(name)
        leaves = [t.to(cast).requires_grad_() for t in (x, weights)]
        y = experts(leaves[0], ids, leaves[1])
        inputs = [*leaves, *experts.parameters()]
        got = torch.autograd.grad(y, inputs, dy.to(cast))
        results[name] = dict(zip(("y", "x", "weights", "gate_up", "down"), (y.detach(), *got), strict=True))
    check(results["uniep"], results["grouped_mm"], results["eager"])
    assert results["uniep"]["y"].dtype == dtype


@pytest.mark.parametrize("bad", [8, 2**31 - 1])
def test_ids_of_no_expert_are_an_error_on_one_device(bad, registration):
    """11: dropped only where transformers marks experts of other devices so."""
    experts = next(iter(experts_of(build("Qwen3Moe")).values()))
    experts.config._experts_implementation = "uniep"
    ids = torch.tensor([[0, 1], [2, bad]])
    x = torch.randn(2, experts.hidden_dim)
    with pytest.raises(uniep.InputError, match="row 1, slot 1"):
        experts(x, ids, torch.ones(2, 2))


@pytest.mark.parametrize("train_x", [True, False])
@pytest.mark.parametrize("train_down", [True, False])
@pytest.mark.parametrize("train_gate_up", [True, False])
def test_frozen(train_gate_up, train_down, train_x, registration):
    """Gradients exist where they are required and nowhere else."""
    model = build("Qwen3Moe", experts_implementation="uniep")
    experts = experts_of(model)["model.layers.0.mlp.experts"]
    experts.gate_up_proj.requires_grad_(train_gate_up)
    experts.down_proj.requires_grad_(train_down)
    x = torch.randn(7, 64, requires_grad=train_x)
    y = experts(x, torch.randint(8, (7, 2)), torch.rand(7, 2))
    if train_gate_up or train_down or train_x:
        y.sum().backward()
    leaves = {experts.gate_up_proj: train_gate_up, experts.down_proj: train_down, x: train_x}
    assert all((leaf.grad is not None) == wanted for leaf, wanted in leaves.items())


def test_adapters_on_experts(registration):
    """A low-rank parametrisation of gate_up_proj trains."""

    class LowRank(nn.Module):
        def __init__(self, like: Tensor) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(like.shape[0], like.shape[1], 2))
            self.b = nn.Parameter(torch.randn(like.shape[0], 2, like.shape[2]))

        def forward(self, weight: Tensor) -> Tensor:
            return weight + self.a @ self.b

    gradients = []
    for name in ("grouped_mm", "uniep"):
        model = build("Qwen3Moe", experts_implementation=name)
        experts = experts_of(model)["model.layers.1.mlp.experts"]
        experts.gate_up_proj.requires_grad_(False)
        torch.manual_seed(1)
        nn.utils.parametrize.register_parametrization(experts, "gate_up_proj", LowRank(experts.gate_up_proj))
        assert hf.status(model).num_active == (2 if name == "uniep" else 0)
        gradients.append({n: g for n, g in run(model, batch()).items() if "parametrizations" in n})
    assert len(gradients[0]) == 2
    for name, theirs in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], theirs)


def test_autocast(registration):
    """Computes in autocast's dtype, gives x's back."""
    experts = experts_of(build("Qwen3Moe", experts_implementation="uniep"))["model.layers.0.mlp.experts"]
    x = torch.randn(7, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, torch.randint(8, (7, 2)), torch.rand(7, 2))
    assert y.dtype == torch.float32
    assert registration.workspaces[0].cfg.dtype == torch.bfloat16
    y.sum().backward()
    assert experts.gate_up_proj.grad.dtype == torch.float32


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiled(registration):
    """One graph, the same bits."""
    experts = experts_of(build("Qwen3Moe", experts_implementation="uniep"))["model.layers.0.mlp.experts"]
    x, ids, weights = torch.randn(7, 64), torch.randint(8, (7, 2)), torch.rand(7, 2)
    results = []
    for function in (experts, torch.compile(experts, backend="aot_eager", fullgraph=True)):
        experts.zero_grad()
        y = function(x, ids, weights)
        y.sum().backward()
        results.append((y, experts.gate_up_proj.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Workspaces.


def call(experts: nn.Module, tokens: int) -> Tensor:
    return experts(torch.randn(tokens, 64), torch.randint(8, (tokens, 2)), torch.rand(tokens, 2))


def test_workspaces_grow_and_are_freed(registration):
    experts = experts_of(build("Qwen3Moe", experts_implementation="uniep"))["model.layers.0.mlp.experts"]
    small = call(experts, 7)
    large = call(experts, 200)
    assert [w.cfg.max_tokens_per_rank for w in registration.workspaces] == [128, 256]
    call(experts, 0)
    assert len(registration.workspaces) == 2
    (small.sum() + large.sum()).backward()  # also through the one that was outgrown
    old = registration.workspaces
    registration.free()
    with pytest.raises(uniep.ClosedError):
        old[0].check()
    call(experts, 300)
    assert [w.cfg.max_tokens_per_rank for w in registration.workspaces] == [384]


def test_given_max_tokens_per_rank():
    made = hf.register(max_tokens_per_rank=16, backend="cpu", timeout_s=60)
    experts = experts_of(build("Qwen3Moe", experts_implementation="uniep"))["model.layers.0.mlp.experts"]
    call(experts, 16)
    assert made.workspaces[0].timeout_s == 60
    with pytest.raises(uniep.ConfigError, match="17 tokens but max_tokens_per_rank is 16"):
        call(experts, 17)
    made.free()


# What is refused, and who says so.


def experts_like(activation: str = "silu", own_gate=None, limit=None, swiglu_limit=None, **flags) -> nn.Module:
    class PlainExperts(nn.Module):
        def __init__(self, config) -> None:
            super().__init__()
            self.num_experts = 8
            self.gate_up_proj = nn.Parameter(torch.randn(8, 64, 64))
            self.down_proj = nn.Parameter(torch.randn(8, 64, 32))
            self.act_fn = transformers.activations.ACT2FN[activation]
            self.limit, self.swiglu_limit = limit, swiglu_limit

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise NotImplementedError

    if own_gate is not None:
        PlainExperts._apply_gate = own_gate
    made = use_experts_implementation(**flags)(PlainExperts)
    config = transformers.Qwen3MoeConfig(experts_implementation="uniep")
    config._experts_implementation = "uniep"
    return made(config)


REFUSED = {
    "a norm": ({"has_post_expert_norm": True}, "has_post_expert_norm is True: a norm follows each expert"),
    "no biases": ({"has_bias": True}, "it has no tensor gate_up_proj_bias"),
    "no up_proj": ({"has_gate": False}, "it has no tensor up_proj"),
    "own gate": ({"own_gate": lambda self, h: h[..., ::2]}, "_apply_gate is its own, and none of swiglu, swiglu_oai, "),
    "gate beyond": (
        {"own_gate": lambda self, h: nn.functional.silu(h.chunk(2, -1)[0].clamp(max=9.0)) * h.chunk(2, -1)[1]},
        "_apply_gate is its own, and none of .* with or without a limit",
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", REFUSED)
def test_refused_experts(case, registration):
    how, why = REFUSED[case]
    experts = experts_like(**how)
    with pytest.raises(uniep.UnsupportedError, match=f"PlainExperts of model type 'qwen3_moe': {why}"):
        call(experts, 3)
    (layer,) = hf.status(nn.ModuleDict({"mlp": experts})).layers
    assert (
        not layer.active
        and re.search(why, layer.why)
        and "not uniep" in str(hf.status(nn.ModuleDict({"mlp": experts})))
    )


def test_own_gates(registration):
    """A gate of the experts' own is known by its values, with the limit that they have."""

    def oai(self, h):
        gate, up = h[..., ::2].clamp(max=self.limit), h[..., 1::2].clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * 1.702) * (up + 1)

    def silu(self, h):
        gate, up = h.float().chunk(2, -1)
        return (self.act_fn(gate) * up).to(h.dtype)

    experts = experts_like(own_gate=oai, is_concatenated=False)
    assert hf._refused(experts)  # which limit?
    experts.limit = 7.0
    assert hf._activation(experts) == ("swiglu_oai", 7.0, "")
    experts.limit = 3.0
    assert hf._activation(experts) == ("swiglu_oai", 3.0, "")
    assert hf._refused(experts_like(own_gate=oai, limit=7.0))  # oai is of interleaved columns
    assert hf._activation(experts_like(own_gate=silu, swiglu_limit=10.0)) == ("swiglu", None, "")
    assert hf._activation(experts_like("gelu_new", own_gate=silu)) == ("geglu_tanh", None, "")


@pytest.mark.parametrize("kind", ["GptOss", "AriaText"])
def test_copied_weights(kind, registration):
    """Transposed weights copied as rows: the bits of those read in place."""
    model = build(kind, experts_implementation="uniep")
    in_place = run(model, batch())
    registration.copy_weights = True
    for name, got in run(model, batch()).items():
        equal_bits(got, in_place[name], name)


GATES = {
    "silu": "swiglu", "gelu": "geglu", "gelu_python": "geglu",
    **dict.fromkeys(
        ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "geglu_tanh"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GATES)
def test_gates(name, registration):
    """What transformers knows by this name is what uniep computes, and by uniep's name for it."""
    experts = experts_like(name).requires_grad_(False)
    assert hf.ACTIVATION_OF[hf._label(experts)] == GATES[name]
    x, weights = torch.randn(5, 64) / 8, torch.rand(5, 2)
    ids = torch.randint(8, (5, 2))
    true = torch.zeros(5, 64, dtype=torch.float64)
    for k in range(2):
        gate, up = (experts.gate_up_proj[ids[:, k]].double() @ x.double()[..., None])[..., 0].chunk(2, -1)
        down = experts.down_proj[ids[:, k]].double() @ (experts.act_fn(gate) * up)[..., None]
        true += weights[:, k, None] * down[..., 0]
    assert distance(experts(x, ids, weights), true) < 1e-6


def test_refused_gates_and_dtypes(registration):
    with pytest.raises(uniep.UnsupportedError, match=r"act_fn is QuickGELU\w*; supported: SiLU, .*GELUTanh"):
        call(experts_like("quick_gelu"), 3)
    with pytest.raises(
        uniep.UnsupportedError, match=r"gate_up_proj has dtype torch.float64; supported: torch.bfloat16"
    ):
        call(experts_like().double(), 3)
    assert call(experts_like(), 3).shape == (3, 64)


@pytest.mark.smoke
def test_status(registration):
    model = build("Qwen3Moe")
    model.model.layers[1].mlp.experts.act_fn = nn.Mish()
    assert hf.status(model).num_active == 0
    assert "experts_implementation is 'grouped_mm'" in hf.status(model).layers[0].why
    model.set_experts_implementation("uniep")
    first, second = hf.status(model).layers
    assert first == hf.LayerStatus("model.layers.0.mlp.experts", "uniep on one device", "")
    assert second.name == "model.layers.1.mlp.experts" and second.why.startswith("act_fn is Mish; supported: SiLU, ")
    assert str(hf.status(model)).startswith("uniep runs 1 of 2 MoE layers\n")
    assert hf.status(model, "*.0.mlp.experts").layers == (first,)
    assert hf.status(model, "*.0.mlp.experts").require_all().num_active == 1
    with pytest.raises(uniep.UnsupportedError, match=r"(?s)1 of 2 MoE layers.*layers.1.mlp.experts: .*act_fn is Mish"):
        hf.status(model).require_all()
    with pytest.raises(
        uniep.ConfigError, match=r"'\*.block.\*' matches none of the 2 MoE layers of Qwen3MoeForCausalLM"
    ):
        hf.status(model, "*.block.*")
    with pytest.raises(uniep.ConfigError, match="none of the 0 MoE layers"):
        hf.status(nn.Linear(2, 2))


T5_LIKE = {
    "vocab_size": 64,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
}
UNREACHED = {
    "Llama4": (
        "Llama4TextConfig", "Llama4ForCausalLM", "*.0.feed_forward.experts",
        {"intermediate_size": 32, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1,
         "head_dim": 16},
    ),
    "Dbrx": (
        "DbrxConfig", "DbrxForCausalLM", "*.0.ffn.experts.mlp",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
         "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
         "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    "JetMoe": (
        "JetMoeConfig", "JetMoeForCausalLM", "*.0.mlp",
        {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16},
    ),
    "Switch": (
        "SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", "encoder.block.1.layer.1.mlp.experts",
        {**T5_LIKE, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "LongcatFlash": (
        "LongcatFlashConfig", "LongcatFlashForCausalLM", "*.0.mlp.experts",
        {"num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 32, "n_routed_experts": 4,
         "zero_expert_num": 2, "moe_topk": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
         "qk_rope_head_dim": 8,
         "v_head_dim": 16, "head_dim": 8},
    ),
    "Doge": (
        "DogeConfig", "DogeForCausalLM", "*.0.mlp",
        {"intermediate_size": 32, "is_moe": True, "num_experts": 16, "num_experts_per_tok": 2},
    ),
    "NllbMoe": (
        "NllbMoeConfig", "NllbMoeForConditionalGeneration", "*encoder.layers.1.ffn.experts",
        {"vocab_size": 64, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_experts": 4,
         "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", UNREACHED)
def test_models_that_ignore_the_choice(family, registration):
    """Their MoE layers are listed, whatever they are called; the choice is refused when made and when set."""
    config_name, model_name, layer, own = UNREACHED[family]
    kind = getattr(transformers, model_name)

    def made(**changes) -> nn.Module:
        common = {} if "d_model" in own else COMMON
        config = getattr(transformers, config_name)(**{**common, **own, **changes})
        with torch.device("meta"):
            return kind(config)

    model = made()
    status = hf.status(model)
    assert status.num_active == 0 and len(status) == len(list(status)) > 0
    (found,) = hf.status(model, layer).layers[:1]
    assert "use_experts_implementation" in found.why
    with pytest.raises(uniep.UnsupportedError, match=r"(?s)uniep runs 0 of .*use_experts_implementation.*remedy"):
        status.require_all()
    before = model.config._experts_implementation
    with pytest.raises(uniep.UnsupportedError, match=r"would ignore it in \d+ MoE layers, such as .*use 'eager'"):
        model.set_experts_implementation("uniep")
    assert model.config._experts_implementation == before
    with pytest.raises(uniep.UnsupportedError, match="would ignore it"):
        made(experts_implementation="uniep")
    model.set_experts_implementation("eager")


def test_dense_models_may_be_asked(registration):
    config = transformers.LlamaConfig(**COMMON, intermediate_size=32, experts_implementation="uniep")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.set_experts_implementation("uniep")
    with pytest.raises(uniep.ConfigError, match="none of the 0 MoE layers"):
        hf.status(model)


def test_version(monkeypatch):
    monkeypatch.setitem(os.sys.modules, "transformers.distributed.expert_parallel", None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.17.0")
    with pytest.raises(
        uniep.UnsupportedError, match=r"transformers 5.17.0 is installed; .* needs transformers >= 5.23"
    ):
        hf.register()

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(uniep.UnsupportedError, match="transformers is not installed"):
        hf.register()


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict:
        ids = batch(number)[0]
        return {"input_ids": ids[:9], "labels": ids[:9]}


def test_trainer_resumes(registration, tmp_path):
    """transformers' Trainer, whose own resuming leaves out experts: after from_pretrained it goes on as if it had not
    stopped."""

    def trained(folder: Path, steps: int, checkpoint: Path | None = None) -> dict[str, Tensor]:
        model = build("Qwen3Moe", experts_implementation="uniep")
        if checkpoint:
            model = type(model).from_pretrained(checkpoint, experts_implementation="uniep", dtype=torch.float32)
        arguments = transformers.TrainingArguments(
            str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[],
            learning_rate=1e-2, lr_scheduler_type="constant", disable_tqdm=True,
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=Sentences()).train(resume_from_checkpoint=checkpoint)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    want = trained(tmp_path / "whole", 4)
    trained(tmp_path / "parts", 2)
    for name, p in trained(tmp_path / "parts", 4, tmp_path / "parts" / "checkpoint-2").items():
        equal_bits(p, want[name], name)


# Two processes.


def train_pair(world, folder: str, kind: str) -> dict:
    made = hf.register()
    ids, got = batch(world.rank), {}
    for name in ("all_to_all", "uniep"):
        model = load(world, folder, EP2, ep=name)
        got[name] = run(model, ids)
        got[f"{name} status"] = str(hf.status(model))
        if name == "uniep":
            model.activation_checkpointing_enable()
            got["checkpointed"] = run(model.train(), ids)
            model.activation_checkpointing_disable()
        got[f"{name} tokens"] = model.eval().generate(batch()[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=0)
    one = build(kind, experts_implementation="uniep")
    with torch.no_grad():
        got["one device logits"] = one(ids).logits
    got["one device tokens"] = one.generate(batch()[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=0)
    made.free()
    return got


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "Gemma4"])
def test_expert_parallel(kind, pair, saved):
    """EP 2 equals transformers' own EP 2 within rounding, and one device in every bit of the logits.

    Not Gemma 4: transformers 5.24 cannot shard its experts (FSDP2: "Cannot concatenate overlapping meshes")."""
    ranks = pair.run(train_pair, saved(kind), kind)
    reference = build(kind, experts_implementation="eager").double()
    for rank, got in enumerate(ranks):
        mean = run(reference, batch(0), batch(1))  # FSDP averages gradients
        alone = run(reference, batch(rank))
        truth = {**mean, "loss": alone["loss"], "logits": alone["logits"]}
        check(got["uniep"], got["all_to_all"], truth)
        assert got["uniep"].keys() == got["checkpointed"].keys()
        assert all(torch.equal(got["uniep"][name], value) for name, value in got["checkpointed"].items())
        assert torch.equal(got["uniep"]["logits"], got["one device logits"])
        assert torch.equal(got["uniep tokens"], got["all_to_all tokens"])
        assert torch.equal(got["uniep tokens"], got["one device tokens"])
        layers = len(experts_of(reference))
        assert f"uniep runs {layers} of {layers}" in got["uniep status"]
        assert "uniep, expert parallel over 2 ranks" in got["uniep status"]
        assert f"uniep runs 0 of {layers}" in got["all_to_all status"]
        assert "ep_implementation is another one" in got["all_to_all status"]


def save_pair(world, folder: str, target: str) -> dict:
    """Train a step with frozen experts in layer 0, save; and load what was saved."""
    made = hf.register()
    model = load(world, folder, EP2, ep="uniep")
    for parameter in model.model.layers[0].mlp.experts.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    got = {"with gradient": set(run(model, batch(world.rank))) - {"loss", "logits"}}
    optimizer.step()
    got["parameters"] = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    model.save_pretrained(target)
    dist.barrier()
    again = load(world, target, EP2, ep="uniep")
    with torch.no_grad():
        got["logits"], got["logits again"] = (m(batch(world.rank)).logits for m in (model, again))
    made.free()
    return got


def test_save_and_load(pair, saved, registration, tmp_path):
    """Saved at EP 2, every expert's bytes are found at EP 1 and 2, under its own name; frozen ones did not move."""
    ranks = pair.run(save_pair, saved("Qwen3Moe"), str(tmp_path))
    one = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path), experts_implementation="uniep")
    before = dict(build("Qwen3Moe").named_parameters())
    frozen = {f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    for rank, got in enumerate(ranks):
        assert got["with gradient"] == before.keys() - frozen
        for name, parameter in one.named_parameters():
            assert torch.equal(parameter, got["parameters"][name]), name
            assert torch.equal(parameter, before[name]) == (name in frozen), name
        with torch.no_grad():
            assert torch.equal(one(batch(rank)).logits, got["logits"])
        assert torch.equal(got["logits"], got["logits again"])


def ragged_pair(world, folder: str) -> list:
    """Only rank 1's batch outgrows the Workspace; then a rank has no tokens for an expert layer."""
    made = hf.register()
    model = load(world, folder, EP2, ep="uniep")
    first = model(batch(0)).logits
    large = torch.randint(64, (4, 50), generator=torch.Generator().manual_seed(5))
    second = model(large if world.rank else batch(0)).logits
    sizes = [w.cfg.max_tokens_per_rank for w in made.workspaces]
    (first.sum() + second.sum()).backward()
    experts = model.model.layers[0].mlp.experts
    experts.zero_grad()
    tokens = 5 * world.rank
    call(experts, tokens).sum().backward()
    gradient = whole(experts.gate_up_proj.grad)
    made.free()
    return [sizes, bool(gradient.any()), len(made.workspaces)]


def test_ragged(pair, saved):
    assert pair.run(ragged_pair, saved("Qwen3Moe")) == [[[128, 256], True, 0]] * 2


def refused_pair(world, folder: str) -> str:
    hf.register()
    try:
        load(world, folder, EP2, ep="uniep")
    except uniep.UnsupportedError as error:
        return str(error)
    return "loaded"


def test_expert_parallel_refused(pair, tmp_path):
    config = transformers.GptOssConfig(
        **COMMON, head_dim=16, intermediate_size=32, num_local_experts=4, swiglu_alpha=1.5
    )
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path)
    for text in pair.run(refused_pair, str(tmp_path)):
        assert "uniep cannot run GptOssExperts of model type 'gpt_oss': _apply_gate is its own, and none of" in text


def layouts(world, folder: str, sizes: dict, batches: list[int], experts: bool) -> dict:
    """A layout's own result and uniep's."""
    made = hf.register()
    got = {}
    for name in ("theirs", "uniep"):
        if experts:
            model = load(world, folder, sizes, experts={"theirs": "grouped_mm"}.get(name, name))
        else:
            model = load(world, folder, sizes, ep={"theirs": "all_to_all"}.get(name, name))
        got[name] = run(model, batch(batches[world.rank]))
    assert hf.status(model).num_active == 2
    made.free()
    return got


LAYOUTS = {
    "fsdp-ep1": ({"fsdp_size": 2}, [0, 1]),
    "tp-ep1": ({"tp_size": 2}, [0, 0]),
    "tp-ep": ({"tp_size": 2, "ep_size": 2}, [0, 0]),
    "efsdp": ({"fsdp_size": 4, "ep_size": 2}, [0, 1, 2, 3]),
    "mixed": ({"fsdp_size": 2, "tp_size": 2, "ep_size": 4}, [0, 0, 1, 1]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, request, saved):
    """Experts whole on each device, cut or copied by transformers; tokens shared by a tensor-parallel group."""
    sizes, batches = LAYOUTS[layout]
    processes = request.getfixturevalue("pair" if len(batches) == 2 else "pool")
    ranks = processes.run(layouts, saved("Qwen3Moe"), sizes, batches, "ep_size" not in sizes)
    reference = build("Qwen3Moe", experts_implementation="eager").double()
    mean = run(reference, *(batch(b) for b in sorted(set(batches))))
    for number, got in zip(batches, ranks, strict=True):
        alone = run(reference, batch(number))
        check(got["uniep"], got["theirs"], {**mean, "loss": alone["loss"], "logits": alone["logits"]})


# Record and replay of routing.


def moved(model):
    """Routers that choose otherwise."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.copy_(parameter.flip(0))


@pytest.mark.parametrize("experts", ["eager", "uniep"])
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral", "DeepseekV3", "DeepseekV3, one group", "Olmoe"])
def test_routing_is_replayed(registration, kind, experts):
    """The own choice gives the same bits; another router's the record's experts, also under gradient checkpointing.

    One group: as of GLM-4.5, whose router looks for the best of all experts twice."""
    model = build(kind.partition(",")[0], **({"n_group": 1} if "," in kind else {}))
    model.set_experts_implementation(experts)
    hooks = hf.hook_routing(model)
    ids = batch()

    def replay(record):
        with record_routing(model) as seen, replay_routing(model, record):
            found = run(model, ids)
        assert seen == record
        return found

    with record_routing(model) as record:
        want = run(model, ids)
    assert all(name.endswith("gate") for name in record.ids) and record.ids
    got = replay(record)
    for name in want:
        equal_bits(got[name], want[name], name)
    moved(model)
    with record_routing(model) as other:
        free = run(model, ids)
    assert other != record
    got = replay(record)
    assert not torch.equal(got["logits"], free["logits"])
    model.gradient_checkpointing_enable()
    model.train()
    again = replay(record)
    for name in got:
        equal_bits(again[name], got[name], f"{name}, recomputed")
    hooks.remove()
    with pytest.raises(uniep.ConfigError, match=r"has no uniep\.nn\.MoE"), record_routing(model):
        pass


def test_wrong_records_of_routing(registration):
    model = build("Qwen3Moe")
    hf.hook_routing(model)
    with record_routing(model) as record:
        model(batch())
    with pytest.raises(uniep.InputError, match=r"gate has \(18, 2\) choices"), replay_routing(model, record):
        model(batch()[:, 1:])
    unused = RoutingRecord({name: ids - 1 for name, ids in record.ids.items()})
    with pytest.raises(uniep.InputError, match="take experts 0 to 7 in every slot"), replay_routing(model, unused):
        model(batch())
    with pytest.raises(uniep.UnsupportedError, match="Linear has no experts"):
        hf.hook_routing(torch.nn.Linear(1, 1))
    with pytest.raises(uniep.UnsupportedError, match=r"layers\.1\.mlp has .*group_limited_greedy"):
        hf.hook_routing(build("DeepseekV2"))


@pytest.mark.smoke
def test_routers_that_choose_otherwise(registration):
    """Phi's sparsemixer asks no torch.topk: a record of it would be empty, and a given one would have no effect."""
    model = build("Phimoe", experts_implementation="uniep").eval()
    want = model(batch()).logits
    hooks = hf.hook_routing(model)
    record = RoutingRecord({f"model.layers.{n}.mlp.router": torch.zeros(18, 2) for n in range(2)})
    for context in (record_routing(model), replay_routing(model, record)):
        with context, pytest.raises(uniep.UnsupportedError, match=r"PhimoeTopKRouter did not choose by torch\.topk"):
            model(batch())
    assert torch.equal(model(batch()).logits, want)
    hooks.remove()


@pytest.mark.smoke
def test_hooked_twice(registration):
    """Two hooks would record every token twice."""
    model = build("Qwen3Moe").eval()
    first = hf.hook_routing(model)
    with pytest.raises(uniep.ConfigError, match="Qwen3MoeTopKRouter is hooked already"):
        hf.hook_routing(model)
    first.remove()
    again = hf.hook_routing(model)
    with record_routing(model) as record:
        model(batch())
    assert {len(ids) for ids in record.ids.values()} == {18}
    again.remove()


def one_is_short(world, folder: str) -> tuple:
    """Rank 1 has a record of fewer tokens: the error of each rank, and that the layer goes on."""
    made = hf.register(timeout_s=20)
    model = load(world, folder, EP2, "uniep")
    hf.hook_routing(model)
    ids = batch(world.rank)
    with torch.no_grad():
        with record_routing(model) as record:
            want = model(ids).logits
        short = record.take(slice(world.rank, None))
        error = None
        try:
            with replay_routing(model, short):
                model(ids)
        except uniep.InputError as raised:
            error = str(raised)
        with replay_routing(model, record):
            same = torch.equal(model(ids).logits, want)
    made.free()
    return error, same


def test_a_short_record_is_told_to_all(pair, saved):
    for error, same in pair.run(one_is_short, saved("Qwen3Moe")):
        assert same and "(25, 2) choices" in error and "RoutingRecord.take" in error, error
