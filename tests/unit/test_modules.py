"""nn.Experts, nn.MoE and the operators in one process without a process group."""

import contextlib
import copy
import io
import pickle

import case
import pytest
import torch
from case import config, random_batch
from torch._dynamo import compiled_autograd
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize, prune  # noqa: F401
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import uniep
from uniep.nn.ops import moe_forward


@pytest.fixture
def workspace():
    with uniep.Workspace(config(), device="cpu") as ws:
        yield ws


def test_ties_go_to_the_lower_expert(workspace):
    layer = uniep.nn.MoE(workspace.cfg, workspace=workspace)
    with torch.no_grad():
        layer.router.zero_()
        ids, weights = layer.route(torch.randn(5, 64))
        assert ids.tolist() == [[0, 1]] * 5 and weights.unique().tolist() == [0.5]
        layer.router[6] = layer.router[3] = 1.0
        assert layer.route(torch.ones(1, 64))[0].tolist() == [[3, 6]]


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_weights(workspace, renormalize):
    layer = uniep.nn.MoE(workspace.cfg, workspace=workspace, renormalize=renormalize)
    x = torch.randn(7, 64)
    ids, weights = layer.route(x)
    probabilities = torch.softmax(x @ layer.router.T, -1)
    chosen = probabilities.topk(2).values
    expected = chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen
    torch.testing.assert_close(weights, expected)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    assert all(len(set(row)) == 2 for row in ids.tolist())


def test_nan_logits_give_valid_ids(workspace):
    """13: ids stay in range and distinct; the weights are NaN."""
    layer = uniep.nn.MoE(workspace.cfg, workspace=workspace)
    x = torch.randn(3, 64)
    x[1] = float("nan")
    ids, weights = layer.route(x)
    assert ids[1].tolist() == [0, 1] and weights[1].isnan().all() and weights[[0, 2]].isfinite().all()


def test_renormalising_one_choice_is_refused():
    """56: the weight would always be 1."""
    with pytest.raises(uniep.ConfigError, match=r"top_k=1.*renormalize=False"):
        uniep.nn.MoE(config(top_k=1), device="cpu")


def test_experts_are_seeded_by_global_id(workspace):
    one, two = (uniep.nn.Experts(workspace.cfg, workspace=workspace, seed=seed) for seed in (0, 1))
    again = uniep.nn.Experts(workspace.cfg, workspace=workspace, seed=0)
    assert torch.equal(one.w13, again.w13) and torch.equal(one.w2, again.w2)
    assert not torch.equal(one.w13, two.w13) and not torch.equal(one.w13[0], one.w13[1])
    assert abs(float(one.w13.detach().std()) - 64**-0.5) < 0.01
    assert [name for name, _ in one.named_parameters()] == ["w13", "w2"] and "experts 0..7" in repr(one)


def test_a_result_of_rows_is_no_view(workspace):
    """FSDP2 warns where the module that it wraps returns one."""
    for shared in (None, 8):
        layer = uniep.nn.MoE(workspace.cfg, workspace=workspace, shared_ffn=shared)
        assert not layer(torch.randn(5, workspace.cfg.hidden, dtype=workspace.cfg.dtype))._is_view()


def test_leading_dimensions(workspace):
    layer = uniep.nn.MoE(workspace.cfg, workspace=workspace)
    x = torch.randn(2, 3, 64)
    assert torch.equal(layer(x).flatten(0, 1), layer(x.flatten(0, 1)))
    assert layer(x[:0]).shape == (0, 3, 64)


def test_router_gradient_against_fp64(workspace):
    layer = uniep.nn.MoE(workspace.cfg, workspace=workspace)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    layer(x).square().sum().backward()
    router = layer.router.detach().double().requires_grad_()
    ids = layer.route(x)[0]
    chosen = torch.softmax(x.double() @ router.T, -1).gather(1, ids)
    parameters = (layer.experts.w13.detach().double(), layer.experts.w2.detach().double())
    y = uniep.reference.composition(x.double(), ids, chosen / chosen.sum(-1, keepdim=True), *parameters)
    y.square().sum().backward()
    torch.testing.assert_close(
        layer.router.grad.double(), router.grad, rtol=1e-4, atol=1e-5 * float(router.grad.abs().max())
    )


def test_inputs_are_left_alone(workspace):
    """82: x, ids, weights and parameters are not written."""
    batch = random_batch(workspace.cfg, (5, 5, 5, 5))
    copies = [t.clone() for t in (batch.x, batch.ids, batch.weights, batch.dy, batch.w13, batch.w2)]
    case.forward_backward(workspace, batch)
    for before, now in zip(copies, (batch.x, batch.ids, batch.weights, batch.dy, batch.w13, batch.w2), strict=True):
        assert torch.equal(before, now)


def test_results_are_fresh_memory(workspace):
    """An earlier result does not change when the Workspace is used again or closed."""
    batch, other = random_batch(workspace.cfg, (5, 5, 5, 5)), random_batch(workspace.cfg, (50, 5, 5, 5), seed=1)
    got = case.forward_backward(workspace, batch)
    kept = case.Outcome(*(getattr(got, name).clone() for name in case.FIELDS))
    case.forward_backward(workspace, other)
    workspace.close()
    case.same_bits(got, kept)


def test_no_grad_saves_nothing(workspace):
    batch = random_batch(workspace.cfg, (5, 5, 5, 5))
    arguments = (batch.x, batch.ids, batch.weights, [batch.w13], [batch.w2], [], "stacked", workspace.key)
    assert len(moe_forward(*arguments, False, [], [], False)) == 1
    assert len(moe_forward(*arguments, True, [], [], False)) > 1


@pytest.mark.parametrize("tokens", [(5, 5, 5, 5), (0, 0, 0, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_operator_checks(tokens, bias):
    """72: schema, fake tensors and autograd registration, by torch's own checker."""
    with uniep.Workspace(case.config(bias=bias), device="cpu") as workspace:
        check_operator(workspace, random_batch(workspace.cfg, tokens))


def check_operator(workspace, batch):
    x, weights, w13, w2, *biases = map(case.leaf, (batch.x, batch.weights, batch.w13, batch.w2, *batch.biases))
    arguments = (x, batch.ids, weights, [w13], [w2], biases, "stacked", workspace.key, True, [], [], False)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.uniep.moe_fwd.default, arguments, test_utils=tests)


def test_compiled_autograd(workspace):
    """A backward that is traced sees the operator, though the forward ran without."""
    batch = random_batch(workspace.cfg, (5, 5, 5, 5))
    found = []
    for compiled in (False, True):
        x = case.leaf(batch.x)
        loss = uniep.moe(x, batch.ids, batch.weights, batch.w13, batch.w2, workspace=workspace).square().sum()
        with compiled_autograd._enable(torch.compile(backend="eager")) if compiled else contextlib.nullcontext():
            loss.backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_second_derivatives_are_refused(workspace):
    """Never different numbers: a gradient of a gradient is an error, also where it would be a zero among others."""
    batch = random_batch(workspace.cfg, (5, 5, 5, 5))

    def layer(x):
        return uniep.moe(x, batch.ids, batch.weights, batch.w13, batch.w2, workspace=workspace)

    for loss in (lambda y: y.square().sum(), lambda y: y.sum()):
        x = case.leaf(batch.x)
        with pytest.raises(uniep.UnsupportedError, match="create_graph=True"):
            torch.autograd.grad(loss(layer(x)), x, create_graph=True)
    with pytest.raises(uniep.UnsupportedError, match="create_graph=True"):
        torch.autograd.functional.jvp(layer, batch.x, batch.x)


def test_function_transforms_are_refused(workspace):
    batch = random_batch(workspace.cfg, (5, 5, 5, 5))

    def loss(x):
        return uniep.moe(x, batch.ids, batch.weights, batch.w13, batch.w2, workspace=workspace).sum()

    with pytest.raises(uniep.UnsupportedError, match=r"torch\.func"):
        torch.func.grad(loss)(batch.x)


def test_overwrite_needs_a_main_grad_for_each_parameter(workspace):
    """A parameter that is given twice: its gradients can be added, but each would overwrite the other."""
    batch = random_batch(workspace.cfg, (5, 5, 5, 5))
    half = torch.nn.Parameter(batch.w13[:, : workspace.cfg.ffn].clone())
    w2 = torch.nn.Parameter(batch.w2)
    for parameter in (half, w2):
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    arguments = batch.x, batch.ids, batch.weights, (half, half), w2
    with pytest.raises(uniep.ConfigError, match=r"w13\[1\].main_grad is also that of a parameter before it"):
        uniep.moe(*arguments, workspace=workspace, main_grad="overwrite")
    uniep.moe(*arguments, workspace=workspace, main_grad="accumulate").sum().backward()
    sums = []
    for _ in range(2):
        pair = [torch.nn.Parameter(half.detach().clone()) for _ in range(2)]
        uniep.moe(*arguments[:3], pair, batch.w2, workspace=workspace).sum().backward()
        sums = [p.grad.float() for p in pair]
    torch.testing.assert_close(half.main_grad, sums[0] + sums[1], rtol=1e-2, atol=1e-2)


def test_no_two_random_streams_are_one():
    """Routers and experts of layers with consecutive seeds: no row of one is a row of another."""
    cfg = uniep.MoEConfig(hidden=16, ffn=8, num_experts=8, top_k=2, max_tokens_per_rank=8, dtype=torch.float32)
    rows = []
    with uniep.Workspace(cfg, device="cpu") as workspace:
        for seed in range(4):
            layer = uniep.nn.MoE(cfg, workspace=workspace, seed=seed)
            rows += [layer.router, *layer.experts.w13, *layer.experts.w2.view(8, 8, 16)]
    rows = torch.cat(rows)
    assert len(rows.unique(dim=0)) == len(rows)


def test_report_names_the_backend(workspace):
    assert any("cpu" in value for value in uniep.report(workspace).values())


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"backend": "gpu"}, uniep.ConfigError, "backend is 'gpu'; known: auto, cpu"),
        ({"backend": "hopper"}, uniep.ConfigError, "'hopper' does not run on cpu"),
        ({"device": "meta"}, uniep.UnsupportedError, "meta"),
        ({"group": "all"}, uniep.ConfigError, "group is a str"),
        ({"schedule": uniep.Schedule(chunk_tokens=0)}, uniep.ConfigError, "chunk_tokens is 0"),
    ],
)
def test_workspaces_that_cannot_be(arguments, error, text):
    with pytest.raises(error, match=text):
        uniep.Workspace(config(), **({"device": "cpu"} | arguments))


def test_environment_is_read_when_a_workspace_is_made(monkeypatch):
    monkeypatch.setenv("UNIEP_TIMEOUT_S", "7.5")
    with uniep.Workspace(config(), device="cpu") as ws:
        assert ws.timeout_s == 7.5
    with uniep.Workspace(config(), device="cpu", timeout_s=3) as ws:
        assert ws.timeout_s == 3
    monkeypatch.setenv("UNIEP_BACKEND", "hopper")
    with pytest.raises(uniep.ConfigError, match=r"'hopper' does not run on cpu.*; unset UNIEP_BACKEND"):
        uniep.Workspace(config(), device="cpu")
    monkeypatch.setenv("UNIEP_BACKEND", "gpu")
    with pytest.raises(uniep.ConfigError, match="UNIEP_BACKEND is 'gpu'; known"):
        uniep.Workspace(config(), device="cpu")


@pytest.mark.parametrize("value", ["abc", "0", "-1", "nan"])
def test_a_bad_timeout_in_the_environment_is_named(monkeypatch, value):
    monkeypatch.setenv("UNIEP_TIMEOUT_S", value)
    with pytest.raises(uniep.ConfigError, match=f"UNIEP_TIMEOUT_S is '{value}'"):
        uniep.Workspace(config(), device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(uniep.UnsupportedError, match=r"no CUDA device is usable .*; pass device='cpu'"):
        uniep.Workspace(config(), device=device, backend="hopper")


def test_moe_refuses_another_width(workspace):
    layer = uniep.nn.MoE(workspace.cfg, workspace=workspace)
    with pytest.raises(uniep.ConfigError, match=r"x has shape \(3, 5\); it must be \(\.\.\., hidden="):
        layer(torch.zeros(3, 5))


def two_layers(workspace, seed=None):
    torch.manual_seed(7)
    layers = (uniep.nn.MoE(workspace.cfg, workspace=workspace, seed=seed) for _ in range(2))
    return torch.nn.ModuleList([torch.nn.Linear(4, 4), *layers])


def reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def without_memory(workspace, seed, fill):
    """Two layers built on the meta device, which have got their memory since."""
    with torch.device("meta"):
        model = two_layers(workspace, seed)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(fill)
    return model


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("order", ["parents first", "children first"])
def test_95_reset_of_every_module_is_as_built(workspace, seed, order):
    """95: of layers without memory, in either order: as built, router included; once more: as drawn next."""
    want = two_layers(workspace, seed)
    after = torch.rand(1)
    model = without_memory(workspace, seed, float("nan"))
    torch.manual_seed(7)
    for again in range(2):
        if order == "children first":
            model.apply(reset)
        else:
            for module in model.modules():
                reset(module)
        if again == 0:
            for (name, got), (_, p) in zip(model.named_parameters(), want.named_parameters(), strict=True):
                case.equal_bits(got, p, name)
            assert torch.equal(torch.rand(1), after)
    same = [torch.equal(p, q) for p, q in zip(model[1].parameters(), want[1].parameters(), strict=True)]
    assert all(same) if seed is not None else not any(same)


@pytest.mark.parametrize("name", ["experts.w2", "router.weight", "router", "shared.w13"])
def test_95_reset_of_what_is_computed(workspace, name):
    """What a reset writes into a parametrization's result is lost: an error, and nothing has changed."""
    kit = uniep.nn.RouterConfig() if name == "router.weight" else None
    layer = uniep.nn.MoE(workspace.cfg, workspace=workspace, router=kit, shared_ffn=8, seed=0)
    path, _, own = name.rpartition(".")
    module = layer.get_submodule(path)
    parametrize.register_parametrization(module, own, torch.nn.Tanh())
    before = [p.clone() for p in module.parameters()]
    with pytest.raises(uniep.ConfigError, match=rf"{own} of \w+ is computed by a parametrization"):
        module.reset_parameters(1)
    assert all(map(torch.equal, before, module.parameters()))


def test_95_a_call_without_memory(workspace):
    with torch.device("meta"):
        layer = uniep.nn.MoE(workspace.cfg, workspace=workspace)
    ids, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    for call in (lambda: layer(torch.zeros(3, 64)), lambda: layer.experts(torch.zeros(3, 64), ids, weights)):
        with pytest.raises(uniep.ConfigError, match=r"is on meta but the Workspace is on cpu; call to_empty"):
            call()


def test_layers_differ_and_follow_torchs_seed(workspace):
    """A2: layers differ; torch.manual_seed decides; one draw for each layer; a seed gives what it always gave."""
    first, second = two_layers(workspace), two_layers(workspace)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(first[1].parameters(), first[2].parameters(), strict=True):
        assert not torch.equal(a, b)
    torch.manual_seed(0)
    torch.randint(-(2**63), 2**63 - 1, ())
    want = torch.rand(1)
    torch.manual_seed(0)
    uniep.nn.Experts(workspace.cfg, workspace=workspace)
    assert torch.equal(torch.rand(1), want)
    seeded = uniep.nn.Experts(workspace.cfg, workspace=workspace, seed=5)
    generator = torch.Generator().manual_seed(5 * 1_000_003 + 2)
    assert torch.equal(seeded.w13[2], torch.randn(128, 64, generator=generator) * 64**-0.5)


def test_compiled_blocks_share_one_graph(workspace):
    """Layers are told apart by a tensor that nobody guards."""
    torch._dynamo.reset()
    graphs, x = [], torch.randn(5, 64)

    def backend(graph, _):
        graphs.append(graph)
        return graph

    blocks = list(two_layers(workspace))[1:]
    want = [block(x) for block in blocks]
    for block in blocks:
        block.compile(backend=backend, fullgraph=True)
    for block, y in zip(blocks, want, strict=True):
        assert torch.equal(block(x), y)
    assert len(graphs) == 1
    assert [block.experts.record.number(workspace) for block in blocks] == [1, 2]


class Doubled(torch.nn.Module):
    def forward(self, w):
        return 2 * w


def parametrized(m, x):
    with torch.no_grad():
        m.experts.w13 /= 2
    parametrize.register_parametrization(m.experts, "w13", Doubled())
    m.load_state_dict(m.state_dict())
    return copy.deepcopy(m)(x)


def replaced(m, function):
    function(m)
    return m


TOOLS = {
    "export": lambda m, x: torch.export.export(m, (x,), strict=False).module()(x),
    "make_fx": lambda m, x: make_fx(m)(x)(x),
    "functional_call": lambda m, x: torch.func.functional_call(m, m.state_dict(), (x,)),
    "aot_eager": lambda m, x: torch.compile(m, backend="aot_eager", fullgraph=True)(x),
    "deepcopy": lambda m, x: copy.deepcopy(m)(x),
    "averaged": lambda m, x: torch.optim.swa_utils.AveragedModel(m)(x),
    "DataParallel": lambda m, x: torch.nn.DataParallel(m)(x),
    "parametrize": parametrized,
    "weight_norm": lambda m, x: replaced(m, lambda m: torch.nn.utils.parametrizations.weight_norm(m.experts, "w13"))(x),
    "old weight_norm": lambda m, x: replaced(m, lambda m: torch.nn.utils.weight_norm(m.experts, "w2"))(x),
    "pruning": lambda m, x: replaced(m, lambda m: torch.nn.utils.prune.identity(m.experts, "w13"))(x),
    "quantize_dynamic": lambda m, x: torch.ao.quantization.quantize_dynamic(m, {torch.nn.Linear})(x),
    "share_memory": lambda m, x: m.share_memory()(x),
    "jit.trace": (lambda m, x: torch.jit.trace(m, x), "jit.trace"),
    "jit.script": (lambda m, x: torch.jit.script(torch.nn.Sequential(m)), "jit.script"),
    "symbolic_trace": (lambda m, x: torch.fx.symbolic_trace(m), "make it a leaf"),
    "vmap": (lambda m, x: torch.vmap(lambda v: m(v[None]))(x), "torch.func"),
    "func.grad": (lambda m, x: torch.func.grad(lambda v: m(v).sum())(x), "torch.func"),
    "func.jvp": (lambda m, x: torch.func.jvp(m, (x,), (x,)), "jvp"),
    "hessian": (lambda m, x: torch.autograd.functional.hessian(lambda v: m(v).sum(), x), "create_graph"),
    "pickle": (lambda m, x: pickle.dumps(m), "cannot be pickled"),
    "torch.save": (lambda m, x: torch.save(m, io.BytesIO()), "cannot be pickled"),
    "half": (lambda m, x: m.half()(x), "w13 has dtype torch.float16"),
    "to meta": (lambda m, x: m.to("meta")(x), "is on meta"),
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.filterwarnings("ignore")
def test_what_traces_records_or_transforms_the_layer(workspace, tool):
    """The right numbers, or an error of uniep's own."""
    torch._dynamo.reset()
    layer = uniep.nn.MoE(workspace.cfg, workspace=workspace)
    x = torch.randn(5, 64)
    want = layer(x).detach()
    if callable(TOOLS[tool]):
        torch.testing.assert_close(TOOLS[tool](layer, x), want)
        return
    function, text = TOOLS[tool]
    with pytest.raises(uniep.UniEPError, match=text):
        function(layer, x)


@pytest.mark.parametrize("tool", ["jit.trace", "vmap", "func.grad", "func.jvp", "hessian"])
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_transform_a_layer_with_factors(workspace, tool):
    """As without them."""
    layer, (function, text) = uniep.nn.MoE(workspace.cfg, workspace=workspace), TOOLS[tool]
    uniep.nn.add_lora(layer, r=4)
    x = torch.randn(5, 64)
    for call in (function, torch.no_grad()(function)) if tool in ("jit.trace", "vmap") else (function,):
        with pytest.raises(uniep.UniEPError, match=text):
            call(layer, x)
    layer(x)


@pytest.mark.parametrize("tool", ["export", "make_fx", "fake"])
def test_factors_need_tensors_with_values(workspace, tool):
    layer = uniep.nn.MoE(workspace.cfg, workspace=workspace)
    uniep.nn.add_lora(layer, r=4)
    x, calls = torch.randn(5, 64), workspace.forwards
    with pytest.raises(uniep.UnsupportedError, match=r"factors cannot be traced, .*; merge_lora first"):
        if tool == "fake":
            with FakeTensorMode(allow_non_fake_inputs=True):
                layer(x)
        else:
            TOOLS[tool](layer, x)
    assert workspace.forwards == calls
    layer(x)


def test_what_cannot_save_a_layer_with_factors(workspace):
    """Policies that save the layer's calls; others run it again, with the same gradients."""
    layer, x = uniep.nn.MoE(workspace.cfg, workspace=workspace, seed=0), torch.randn(5, 64)
    uniep.nn.add_lora(layer, r=4)
    factors = [p for name, p in layer.named_parameters() if "lora" in name]

    def run(context_fn):
        y = checkpoint(layer, x, use_reentrant=False, context_fn=context_fn)
        return torch.autograd.grad(y.square().sum(), factors)

    def recompute(ctx, op, *args, **kwargs):
        assert op not in uniep.SAVE_OPS or ctx.op_output.numel()
        return CheckpointPolicy.PREFER_RECOMPUTE

    def of_many_arguments(ctx, op, *args, **kwargs):
        return op in uniep.SAVE_OPS and args[3] is not None

    want = torch.autograd.grad(layer(x).square().sum(), factors)
    for policy in (recompute, of_many_arguments):
        got = run(lambda policy=policy: create_selective_checkpoint_contexts(policy))
        assert all(map(torch.equal, got, want))
    with pytest.raises(uniep.UnsupportedError, match=r"leave SAVE_OPS out of the policy of layers with factors"):
        run(lambda: create_selective_checkpoint_contexts(list(uniep.SAVE_OPS)))


def test_an_error_before_a_call_leaves_the_workspace_usable(workspace, monkeypatch):
    """Told once, by the innermost of the functions that tell: the outer ones do not take it for one in the call."""
    layer = uniep.nn.MoE(workspace.cfg, workspace=workspace)
    x = torch.randn(5, 64)
    want = layer(x).detach()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(uniep.weights.ExpertWeights, "parse", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        layer(x)
    assert torch.equal(layer(x), want)
