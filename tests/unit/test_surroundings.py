"""What surrounds a call does not change it: the process's settings, the caller's tensors, copies, forks."""

import concurrent.futures
import contextlib
import copy
import os
import pickle
import re

import case
import pytest
import torch
import torch.distributed as dist
from case import config, equal_bits, random_batch, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import uniep

CFG = config()
BATCH = random_batch(CFG, (5, 6, 0, 9))
HALF_CFG = config(dtype=torch.bfloat16)
HALF_BATCH = random_batch(HALF_CFG, (5, 6, 0, 9))


def make(cfg=CFG, backend="cpu", **options):
    return uniep.Workspace(cfg, device="cpu", backend=backend, timeout_s=case.TIMEOUT_S, **options)


@pytest.fixture(params=["cpu", "nccl"])
def backend(request):
    return request.param


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS = {
    "default dtype fp64": lambda: default_dtype(torch.float64),
    "default dtype bf16": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly detection": torch.autograd.set_detect_anomaly,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_the_process(backend, setting):
    """A global setting changes no bit of a step, also when the Workspace is made under it."""
    enter = (lambda: SETTINGS[setting](True)) if setting == "anomaly detection" else SETTINGS[setting]
    for cfg, batch in ((CFG, BATCH), (HALF_CFG, HALF_BATCH)):
        want = case.forward_backward(make(cfg, backend), batch)
        with enter():
            workspace = make(cfg, backend)
            if setting != "default device":
                same_bits(case.forward_backward(workspace, batch), want, setting)
                continue
            y = uniep.moe(batch.x, batch.ids, batch.weights, batch.w13, batch.w2, workspace=workspace)
        equal_bits(y, want.y, setting)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("setting", ["default dtype fp64", "default dtype bf16"])
def test_settings_of_the_process_when_a_layer_is_made(setting, seed):
    """Parameters come from the seed alone, or from torch's."""
    torch.manual_seed(5)
    want = uniep.nn.MoE(CFG, device="cpu", seed=seed).state_dict()
    torch.manual_seed(5)
    with SETTINGS[setting]():
        got = uniep.nn.MoE(CFG, device="cpu", seed=seed).state_dict()
    for name in want:
        equal_bits(got[name], want[name], name)


def test_the_router_is_fp32_under_autocast():
    layer = uniep.nn.MoE(CFG, device="cpu")
    want = layer.route(BATCH.x)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer.route(BATCH.x)
    equal_bits(got[0], want[0], "ids")
    equal_bits(got[1], want[1], "weights")


def test_autocast_with_lists_of_parameters(backend):
    """36: gradients reach an nn.ParameterList through the cast."""
    lists = [torch.nn.ParameterList([t.float() for t in w]) for w in (HALF_BATCH.w13, HALF_BATCH.w2)]
    with torch.autocast("cpu", torch.bfloat16), make(HALF_CFG, backend) as workspace:
        y = uniep.moe(HALF_BATCH.x.float(), HALF_BATCH.ids, HALF_BATCH.weights, *lists, workspace=workspace)
        y.backward(HALF_BATCH.dy)
        want = case.forward_backward(workspace, HALF_BATCH)
    for parameters, gradient in zip(lists, (want.dw13, want.dw2), strict=True):
        equal_bits(torch.stack([p.grad for p in parameters]), gradient.float(), "gradient")


def test_fake_tensors(backend):
    """A Workspace that is made among them has memory; a call without values has shapes, or says what it lacks."""
    leaves = [case.leaf(t) for t in (BATCH.x, BATCH.weights, BATCH.w13, BATCH.w2)]
    with FakeTensorMode():
        workspace = make(backend=backend)
    for known, enough in ((None, False), (ShapeEnv(), True)):
        with FakeTensorMode(shape_env=known) as mode:
            x, weights, w13, w2 = map(mode.from_tensor, leaves)
            with torch.no_grad():
                assert uniep.moe(x, mode.from_tensor(BATCH.ids), weights, w13, w2, workspace=workspace).shape == x.shape
            with contextlib.nullcontext() if enough else pytest.raises(uniep.UnsupportedError, match="shape_env="):
                uniep.moe(x, mode.from_tensor(BATCH.ids), weights, w13, w2, workspace=workspace).sum().backward()
    case.forward_backward(workspace, BATCH)


@pytest.mark.parametrize("position", range(5))
def test_a_tensor_on_another_device(backend, position):
    """Refused by name; a "meta" tensor would turn the call into one without values."""
    arguments = [BATCH.x, BATCH.ids, BATCH.weights, BATCH.w13, BATCH.w2]
    arguments[position] = arguments[position].to("meta")
    name = ("x", "ids", "weights", "w13", "w2")[position]
    with pytest.raises(uniep.UniEPError, match=f"{name} is on meta but the Workspace is on cpu"):
        uniep.moe(*arguments, workspace=make(backend=backend))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_ids_that_torch_cannot_compare(dtype):
    with pytest.raises(uniep.DTypeError, match=str(dtype)):
        uniep.moe(BATCH.x, BATCH.ids.to(dtype), BATCH.weights, BATCH.w13, BATCH.w2, workspace=make())


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("weights", None, "weights is or holds NoneType"),
        ("ids", BATCH.ids.tolist(), "ids is or holds list"),
        ("x", BATCH.x.numpy(), "x is or holds ndarray"),
        ("x", BATCH.x.to_sparse(), "x has layout torch.sparse_coo; pass a dense tensor"),
        ("w13", None, "w13 is or holds NoneType"),
        ("w2", [BATCH.w2[0], 1.0], "w2 is or holds float"),
        ("w2", BATCH.w2.to_sparse(), "w2 has layout torch.sparse_coo"),
    ],
)
def test_what_is_no_dense_tensor(backend, name, value, text):
    """Refused as every bad input is, under autocast, too."""
    arguments = {"x_TD": BATCH.x, "ids_TK": BATCH.ids, "weights_TK": BATCH.weights, "w13": BATCH.w13, "w2": BATCH.w2}
    key = next(k for k in arguments if k.partition("_")[0] == name)
    for enter in (contextlib.nullcontext, SETTINGS["autocast"]):
        with enter(), pytest.raises(uniep.UniEPError, match=text):
            uniep.moe(**{**arguments, key: value}, workspace=make(backend=backend))


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_autocast_casts_floating_tensors_only(dtype):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(uniep.DTypeError, match=f"x has dtype {dtype}"):
        uniep.moe(BATCH.x.to(dtype), BATCH.ids, BATCH.weights, BATCH.w13, BATCH.w2, workspace=make())


def test_a_launcher_without_a_process_group(monkeypatch):
    """dist.group.WORLD is None before init_process_group: every rank would train all experts alone."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    make()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(uniep.ConfigError, match=r"WORLD_SIZE is 2, .*call torch.distributed.init_process_group first"):
        make()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
    assert make().ranks == [1]


def call_with(**changes):
    given = {"workspace": make()} | changes
    return uniep.moe(BATCH.x, BATCH.ids, BATCH.weights, BATCH.w13, BATCH.w2, **given)


KINDS = {
    "workspace is a NoneType; it must be a Workspace": lambda: call_with(workspace=None),
    "workspace is a MoE; it must be a Workspace": lambda: call_with(workspace=uniep.nn.MoE(CFG, device="cpu")),
    "layer is a int; it must be a LayerRecord": lambda: call_with(layer=3),
    "lora is a tuple; it must be a Lora": lambda: call_with(lora=(None, None, 1.0)),
    "LoRA factors of w13 are": lambda: call_with(lora=uniep.nn.Lora((BATCH.w13,), None, 1.0)),
    "LoRA factors of w2 are": lambda: call_with(lora=uniep.nn.Lora(None, (1, 2), 1.0)),
    "scale of LoRA is '1'": lambda: call_with(lora=uniep.nn.Lora(None, None, "1")),
    "workspace is a str; it must be a Workspace": lambda: uniep.route(BATCH.ids, workspace="ws"),
    "workspace is a bool; it must be a Workspace": lambda: uniep.report(True),
    "workspace is a float; it must be a Workspace": lambda: uniep.nn.Experts(CFG, workspace=1.0),
    "cfg is a dict; it must be a MoEConfig": lambda: uniep.nn.MoE({}, device="cpu"),
    "cfg is a list; it must be a MoEConfig": lambda: uniep.plan_memory([], 1),
    "router is a str; it must be a RouterConfig": lambda: uniep.nn.MoE(CFG, device="cpu", router="sigmoid"),
    "ffn of the shared experts is 1.5, a float": lambda: uniep.nn.SharedExperts(CFG, 1.5),
    "seed is '0'; it must be an int": lambda: uniep.nn.Experts(CFG, device="cpu", seed="0"),
    "token_ids is a list; it must be a Tensor": lambda: uniep.nn.MoE(CFG, device="cpu")(BATCH.x, [1]),
    "ids is a list; it must be a Tensor": lambda: uniep.nn.MoE(CFG, device="cpu")(BATCH.x, ids=[[1, 2]]),
    "renormalize is 'no'; it must be True or False": lambda: uniep.nn.RouterConfig(renormalize="no"),
    "scale is None; it must be a number": lambda: uniep.nn.RouterConfig(scale=None),
    "jitter is '0.1'": lambda: uniep.nn.RouterConfig(jitter="0.1"),
    "groups is None, a NoneType": lambda: uniep.nn.RouterConfig(groups=None),
    "bias is a list; it must be a Tensor": lambda: uniep.nn.choose_experts(
        BATCH.x, ROUTER, 2, uniep.nn.RouterConfig(), bias_E=[0.0]
    ),
}


@pytest.mark.parametrize("text", KINDS)
def test_arguments_of_another_kind(text):
    """Named, with what is needed: no error of an attribute that they lack."""
    with pytest.raises(uniep.ConfigError, match=re.escape(text)):
        KINDS[text]()


@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
@pytest.mark.parametrize(
    ("change", "text"),
    [(lambda t: t[:1].expand(t.shape), "share memory"), (lambda t: t.to_sparse(), "has layout torch.sparse_coo")],
)
def test_a_main_grad_that_cannot_be_written(backend, mode, change, text):
    """Refused before the call, not after the others have their gradients."""
    w13, workspace = case.leaf(BATCH.w13), make(backend=backend)
    w13.main_grad = change(torch.zeros(w13.shape))
    with pytest.raises(uniep.UniEPError, match=text):
        uniep.moe(BATCH.x, BATCH.ids, BATCH.weights, w13, BATCH.w2, workspace=workspace, main_grad=mode)
    case.forward_backward(workspace, BATCH)


def test_forward_mode_is_refused():
    """Custom operators would return a tangent of zeros."""
    workspace = make()

    def layer(x):
        return uniep.moe(x, BATCH.ids, BATCH.weights, BATCH.w13, BATCH.w2, workspace=workspace)

    with pytest.raises(uniep.UnsupportedError, match="x carries a forward-mode tangent"):
        torch.func.jvp(layer, (BATCH.x,), (BATCH.x,))


ROUTER = torch.ones(8, 64)
DENSE = {
    "linear": lambda x: uniep.nn.linear(x, BATCH.w2[0]),
    "activate": lambda x: uniep.nn.activate(x, "swiglu"),
    "add": lambda x: uniep.nn.add(BATCH.x, x),
    "attach_loss": lambda x: uniep.nn.attach_loss(BATCH.weights, x.sum()),
    "choose_experts": lambda x: uniep.nn.choose_experts(x, ROUTER, 2, uniep.nn.RouterConfig()).weights_TK,
}


@pytest.mark.parametrize("name", DENSE)
def test_forward_mode_is_refused_by_other_operators(name):
    """As by the layer: each gave a tangent of zeros."""
    with pytest.raises(uniep.UnsupportedError, match="carries a forward-mode tangent"):
        torch.func.jvp(DENSE[name], (BATCH.x,), (BATCH.x,))


@pytest.mark.parametrize("h", [BATCH.x[None], BATCH.x[0], BATCH.x[:, :63], BATCH.x.int(), BATCH.x.to(torch.complex64)])
def test_an_activation_of_something_else(h):
    with pytest.raises(uniep.UniEPError, match=r"h has (shape|dtype)"):
        uniep.nn.activate(h, "swiglu")


def test_copies_share_the_workspace():
    """A deep copy of a model works on; pickling a Workspace says what to save instead."""
    layer = uniep.nn.MoE(CFG, device="cpu")
    twin = copy.deepcopy(layer)
    assert twin.experts.workspace is layer.experts.workspace
    assert twin.experts.w13 is not layer.experts.w13
    equal_bits(twin(BATCH.x), layer(BATCH.x), "y")
    with pytest.raises(uniep.UnsupportedError, match="state_dict"):
        pickle.dumps(layer)


def test_a_layer_and_its_workspace_agree():
    workspace = make()
    with pytest.raises(uniep.ConfigError, match=r"weight_at='activation'.*weight_at='output'"):
        uniep.nn.Experts(config(weight_at="activation"), workspace=workspace)
    with pytest.raises(uniep.ConfigError, match="either workspace or group and device"):
        uniep.nn.Experts(CFG, workspace=workspace, device="cpu")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_write_into_its_parent(backend):
    """A data loader's worker inherits the layer: using it there is an error, and the parent works on."""
    workspace = make(backend=backend)
    want = case.forward_backward(workspace, BATCH)
    child = os.fork()
    if child == 0:
        error = case.named_error(case.forward_only, workspace, BATCH)
        os._exit(0 if error and error[0] == "ClosedError" and f"process {os.getppid()}" in error[1] else 1)
    assert os.waitpid(child, 0)[1] == 0
    same_bits(case.forward_backward(workspace, BATCH), want)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e300])
def test_timeouts_that_are_none(value):
    with pytest.raises(uniep.ConfigError, match="timeout_s is "):
        uniep.Workspace(CFG, device="cpu", timeout_s=value)


def test_a_timeout_in_the_environment(monkeypatch):
    monkeypatch.setenv("UNIEP_TIMEOUT_S", "ten")
    with pytest.raises(uniep.ConfigError, match="UNIEP_TIMEOUT_S is 'ten'"):
        uniep.Workspace(CFG, device="cpu")
    assert uniep.Workspace(CFG, device="cpu", timeout_s=1e9).timeout_s == 1e9


def test_more_slots_than_a_plan_counts(backend):
    """Plans are int32: more slots would wrap to others without a word."""
    with pytest.raises(uniep.ConfigError, match="plans count up to 2147483647"):
        make(config(max_tokens_per_rank=2**30), backend)


def test_threads_take_turns(backend):
    """Two threads in calls of one Workspace: each step has its own bits."""
    workspace, batches = make(backend=backend), [random_batch(CFG, (5, 6, 0, 9), seed=seed) for seed in (0, 1)]
    wanted = [case.forward_backward(workspace, batch) for batch in batches]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = [threads.submit(case.forward_backward, workspace, batches[n % 2]) for n in range(20)]
    for n, step in enumerate(found):
        same_bits(step.result(), wanted[n % 2])


def compiled(workspace, graphs):
    """`moe` compiled in one graph, each compilation appended to `graphs`; numbers of tokens unknown to it."""
    torch._dynamo.reset()

    def count(graph, _):
        graphs.append(graph)
        return graph

    function = torch.compile(
        lambda x, ids, weights, w13, w2: uniep.moe(x, ids, weights, w13, w2, workspace=workspace),
        fullgraph=True,
        backend=count,
    )

    def call(x, ids, weights, *experts):
        arguments = [t.detach().clone().requires_grad_(t.requires_grad) for t in (x, ids, weights)]
        for t in arguments:
            torch._dynamo.decorators.mark_unbacked(t, 0)
        return function(*arguments, *experts)

    return call


def test_one_compilation_for_any_number_of_tokens(backend):
    """72: with mark_unbacked T = 64, 96, 1, 0 share one graph, and more than the limit is refused by name."""
    graphs = []
    batch, workspace = random_batch(CFG, (100, 100, 57, 0)), make(backend=backend)
    call, w13, w2 = compiled(workspace, graphs), case.leaf(batch.w13), case.leaf(batch.w2)
    for tokens in (64, 96, 1, 0):
        arguments = batch.x[:tokens], batch.ids[:tokens], batch.weights[:tokens], w13, w2
        equal_bits(call(*arguments).detach(), uniep.moe(*arguments, workspace=workspace).detach(), f"T={tokens}")
    with pytest.raises(uniep.ConfigError, match="257 tokens but max_tokens_per_rank is 256"):
        call(batch.x, batch.ids, batch.weights, w13, w2)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["x", "weights"])
def test_different_numbers_of_tokens(backend, name):
    arguments = {"x": BATCH.x, "weights": BATCH.weights}
    arguments[name] = arguments[name][:7]
    with pytest.raises(uniep.ConfigError, match=f"{name} and ids differ in their number of tokens: 7 and 20"):
        uniep.moe(arguments["x"], BATCH.ids, arguments["weights"], BATCH.w13, BATCH.w2, workspace=make(backend=backend))
