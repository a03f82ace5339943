"""Record and replay of routing in one process: recompute, micro-batches, other lengths."""

import copy

import case
import pytest
import torch
from case import config
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import uniep
from uniep.nn import RouterConfig, RoutingRecord, record_routing, replay_routing

KIT = RouterConfig(score="sigmoid", aux_loss=0.01, selection_bias=True)
ROUTERS = {"default": None, "kit": KIT}


class Model(torch.nn.Module):
    """Two layers, checkpointed if asked."""

    def __init__(self, workspace, router, recompute):
        super().__init__()
        made = (uniep.nn.MoE(workspace.cfg, workspace=workspace, seed=n, router=router) for n in range(2))
        self.blocks = torch.nn.ModuleList(made)
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            y = torch.tanh(x)
            x = x + (checkpoint(block, y, use_reentrant=self.recompute == "reentrant") if self.recompute else block(y))
        return x


@pytest.fixture
def workspace():
    with uniep.Workspace(config(), device="cpu") as ws:
        yield ws


def moved(model):
    """Routers that choose otherwise than before."""
    with torch.no_grad():
        for block in model.blocks:
            weight = block.router if block.router.__class__ is torch.nn.Parameter else block.router.weight
            weight.copy_(weight.flip(0))


def step(model, x, record=None):
    """(y, dx, gradients) and the choice, replayed if there is a record."""
    model.zero_grad()
    x = case.leaf(x)
    with record_routing(model) as seen:
        if record is None:
            y = model(x)
            y.square().sum().backward()
        else:
            with replay_routing(model, record):
                y = model(x)
                y.square().sum().backward()
    return seen, [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("recompute", [None, "reentrant", "other"])
@pytest.mark.parametrize("router", ROUTERS)
def test_replayed(workspace, router, recompute):
    """The choice is the record's, with the weights and gradients of the routers of now; recompute changes no bit."""
    x = torch.randn(20, 64)
    model = Model(workspace, ROUTERS[router], recompute)
    record, before = step(model, x)
    assert sorted(record.ids) == ["blocks.0", "blocks.1"] and record.of("blocks.0").shape == (20, 2)
    same = step(model, x, record)[1]
    for a, b in zip(same, before, strict=True):
        case.equal_bits(a, b, "replay of the own choice")
    moved(model)
    other, free = step(model, x)
    seen, replayed = step(model, x, record)
    assert seen == record
    assert other != record and not torch.equal(free[0], replayed[0])
    plain = Model(workspace, ROUTERS[router], None)
    plain.load_state_dict(model.state_dict())
    for a, b in zip(replayed, step(plain, x, record)[1], strict=True):
        case.equal_bits(a, b, "recomputed")


def test_records_of_decoding(workspace):
    """Calls of a token each, then one of all: take, split, cat put tokens where they belong."""
    model = Model(workspace, KIT, None)
    x = torch.randn(6, 64)
    with record_routing(model) as steps, torch.no_grad():
        for row in x.split([1, 2, 3]):
            model(row)
    with record_routing(model) as whole:
        model(x)
    assert steps == whole
    order = torch.tensor([5, 0, 3])
    with record_routing(model) as some:
        model(x[order])
    assert whole.take(order) == some
    assert RoutingRecord.cat(whole.split(4)) == whole and [r.of("blocks.1").shape[0] for r in whole.split([1, 5])] == [
        1,
        5,
    ]


def test_micro_batches_of_a_pipeline(workspace):
    """Forwards first, backwards later inside their replays: the gradients of one by one."""
    x = torch.randn(2, 9, 64)
    model = Model(workspace, KIT, "other")
    records = [step(model, part)[0] for part in x]
    moved(model)
    want = [step(model, part, record)[1] for part, record in zip(x, records, strict=True)]
    model.zero_grad()
    losses = []
    for part, record in zip(x, records, strict=True):
        with replay_routing(model, record):
            losses.append(model(part).square().sum())
    for number in (1, 0):
        with replay_routing(model, records[number]):
            losses[number].backward()
    for n, parameter in enumerate(model.parameters()):
        case.equal_bits(parameter.grad, want[1][2 + n] + want[0][2 + n], "accumulated")


def test_a_reference_model_in_between(workspace):
    """One record in two models: the backward of the first recomputes its own forward."""
    x = torch.randn(9, 64)
    policy = Model(workspace, None, "other")
    record, _ = step(policy, x)
    other = copy.deepcopy(policy)
    moved(other)
    want = step(policy, x, record)[1]
    policy.zero_grad()
    with replay_routing(policy, record):
        loss = policy(x).square().sum()
        with replay_routing(other, record), torch.no_grad():
            other(x)
        loss.backward()
    for parameter, grad in zip(policy.parameters(), want[2:], strict=True):
        case.equal_bits(parameter.grad, grad, "gradient")


def test_a_replay_in_inference_mode_first(workspace):
    """Probabilities of a sampler, then training with the same layers: of the same inputs, and of others."""
    x = torch.randn(2, 9, 64)
    model, same = (Model(workspace, None, "other") for _ in range(2))
    records = [step(same, part)[0] for part in x]
    want = step(same, x[1], records[1])[1]
    with torch.inference_mode():
        with replay_routing(model, records[0]):
            model(x[0])
        model(x[0])
    for a, b in zip(step(model, x[1], records[1])[1], want, strict=True):
        case.equal_bits(a, b, "trained afterwards")


def test_recompute_of_another_replay_is_refused(workspace):
    model = Model(workspace, None, "other")
    x = torch.randn(2, 9, 64)
    records = [step(model, part)[0] for part in x]

    def forward(number):
        with replay_routing(model, records[number]):
            return model(x[number]).sum()

    loss = forward(0)
    with pytest.raises(uniep.ConfigError, match="no replay is active"):
        loss.backward()
    loss, other = forward(0), forward(1)
    with pytest.raises(uniep.ConfigError, match="run again with other inputs"), replay_routing(model, records[1]):
        loss.backward()
    with pytest.raises(uniep.ConfigError, match="no replay is active"), record_routing(model):
        other.backward()
    model(x[0]).sum()  # a forward of its own is none of that


def test_wrong_records(workspace):
    model = Model(workspace, None, None)
    x = torch.randn(5, 64)
    record, _ = step(model, x)
    with pytest.raises(uniep.InputError, match=r"blocks.0 has \(5, 2\) choices .* call has \(4, 2\)"):
        step(model, x[:4], record)
    with pytest.raises(uniep.ConfigError, match="second time in one replay_routing"), replay_routing(model, record):
        model(x)
        model(x)
    with pytest.raises(uniep.ConfigError, match=r"layers are \['blocks.0', 'blocks.1'\], but the record is of \['a'\]"):
        step(model, x, RoutingRecord({"a": torch.zeros(5, 2)}))
    with pytest.raises(uniep.ConfigError, match=r"has no uniep\.nn\.MoE"), record_routing(torch.nn.Linear(1, 1)):
        pass
    bad = RoutingRecord({name: ids + 8 for name, ids in record.ids.items()})
    with pytest.raises(uniep.InputError, match=r"choice of token 0 in slot 0 is \d+; it must be from -1 .* to 7"):
        step(model, x, bad)


def test_unused_slots_are_replayed(workspace):
    """-1 stays unused, with the weight 0; the others are renormalised among themselves."""
    for router in (None, RouterConfig()):
        layer = uniep.nn.MoE(workspace.cfg, workspace=workspace, seed=0, router=router)
        ids, weights = layer.route(torch.randn(3, 64), ids_TK=torch.tensor([[4, 1], [-1, 3], [-1, -1]]))
        assert ids.tolist() == [[4, 1], [-1, 3], [-1, -1]] and weights[1:].tolist() == [[0, 1], [0, 0]]


def test_compiled(workspace):
    """A layer runs in eager mode while it has a tape, which a recording alone takes away again."""
    layer = uniep.nn.MoE(workspace.cfg, workspace=workspace, seed=0, router=KIT)
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(9, 64)
    want = compiled(x)
    with record_routing(layer) as record:
        assert torch.equal(compiled(x), want)
    assert layer.tape is None
    with replay_routing(layer, record):
        assert torch.equal(compiled(x), want)
    with record_routing(layer) as again:
        assert torch.equal(compiled(x), want)
    assert record == again and layer.tape is not None


def test_names_leave_out_checkpointing(workspace):
    """A sampler's record fits the trainer's model, whose layers checkpoint_wrapper holds."""
    model = Model(workspace, None, False)
    x = torch.randn(6, workspace.cfg.hidden)
    record, want = step(model, x)
    model.blocks = torch.nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    seen, got = step(model, x, record)
    assert seen == record and list(record.ids) == ["blocks.0", "blocks.1"]
    assert all(map(torch.equal, got, want))
