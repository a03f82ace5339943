"""Operators of one's own: where they may stand, what they show, what is refused."""

import dataclasses
import functools
import itertools
import re

import pytest
import torch
import triton

import uniep
from uniep import ConfigError, MoEConfig, RowOperator, Schedule
from uniep.row_operator import PLACES, TAKEN
from uniep.schedule import DIMENSIONS
from uniep.stages import DIRECTIONS, stages
from uniep.taskflow.graph import GATE
from uniep.way import resolve

CFG = MoEConfig(hidden=64, ffn=72, num_experts=4, top_k=2, max_tokens_per_rank=100, dtype=torch.float32)


def nothing(values, valid):
    pass


@triton.jit
def same(values):
    return values


make = functools.partial(RowOperator, name="mine", after="gate_up", rows=nothing)


def arguments(requires_grad=False, tokens=30):
    g = torch.Generator().manual_seed(0)
    x, w13 = torch.randn(tokens, 64, generator=g), torch.randn(4, 144, 64, generator=g) / 8
    ids = torch.rand(tokens, 4, generator=g).argsort(1)[:, :2]
    w2 = torch.randn(4, 64, 72, generator=g) / 8
    return x.requires_grad_(requires_grad), ids, torch.rand(tokens, 2, generator=g), w13, w2


@pytest.mark.parametrize(("changes", "message"), [
    ({"name": "down"}, "operator 'down' needs another name"),
    ({"name": "My op"}, "operator 'My op' needs another name: lower-case letters, digits, _"),
    ({"after": "push"}, "stands after 'push'; it may stand after 'gate_up': the activation"),
    ({"rows": None}, "operator 'mine' does nothing; give it rows"),
    ({"rows": 3}, "has rows=3; it must be a function"),
    ({"body": nothing}, "it must be a @triton.jit function"),
    ({"body": same, "changes": False}, "has a body, whose results are stored, but changes=False"),
])  # fmt: skip
def test_what_is_refused_when_it_is_made(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make(**changes)


@pytest.mark.parametrize(("operators", "message"), [
    (make(), "operators is a RowOperator; pass a list"),
    ([nothing], "operators[0] is a function; pass a uniep.RowOperator"),
    ([make(), make(after="down")], "there are two operators 'mine'"),
    ([make(rows=None, body=same)], "has a Triton body alone, which backend 'cpu' does not run; give it rows"),
])  # fmt: skip
def test_what_a_workspace_refuses(operators, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        uniep.Workspace(CFG, device="cpu", operators=operators)


def test_names_of_the_layer_are_taken():
    """Those of every way, and no others: of each value of each dimension, with combine groups and biases, with factors,
    on more than two ranks."""
    grouped = dataclasses.replace(CFG, combine_groups=4, bias=True)
    usual = [Schedule(overlap=overlap) for overlap in ("serial", "fused", "mega")]
    schedules = {d.put(schedule, value) for schedule in usual for d in DIMENSIONS for value in d.domain}
    found = {GATE}
    for cfg, backend, lora in itertools.product((CFG, grouped), ("hopper", "cpu", "nccl"), ((), ("w13", "w2"))):
        for schedule, direction in itertools.product(schedules, DIRECTIONS):
            way = resolve(cfg, 4, 70, schedule, backend=backend, lora=lora)
            for stage in stages(cfg, way, direction):
                found |= {stage.name, *stage.operators}
    assert found == TAKEN


def test_a_change_of_the_forward_has_no_gradient():
    for after in ("gate_up", "down"):
        with uniep.Workspace(CFG, device="cpu", operators=[make(after=after)]) as ws:
            with pytest.raises(
                ConfigError, match=f"'mine' changes rows after '{after}', and has no gradient; call under"
            ):
                uniep.moe(*arguments(requires_grad=True), workspace=ws)
            with torch.no_grad():
                uniep.moe(*arguments(requires_grad=True), workspace=ws)
            uniep.moe(*arguments(), workspace=ws)


@pytest.mark.parametrize("backend", ["cpu", "nccl"])
def test_what_only_reads_may_stand_in_training(backend):
    """It sees each valid row once, whole."""
    seen = {after: [] for after in PLACES}
    operators = [
        make(name=f"of_{after}", after=after, rows=lambda v, m, s=seen[after]: s.append(v[m].clone()), changes=False)
        for after in PLACES
    ]
    found = []
    for own in ((), operators):
        x, ids, weights, w13, w2 = arguments(requires_grad=True)
        with uniep.Workspace(CFG, device="cpu", backend=backend, operators=own) as ws:
            ws.backend.trace = spans = []
            y = uniep.moe(x, ids, weights, w13, w2, workspace=ws)
            y.sum().backward()
        found.append((y.detach(), x.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert backend == "nccl" or {s.op for s in spans} >= {op.name for op in operators}, "and is in the trace"
    rows = {after: torch.cat(parts) for after, parts in seen.items()}
    assert {after: t.shape for after, t in rows.items()} == {
        "gate_up": (60, 72), "down": (60, 64), "down_grad": (60, 72), "gate_up_grad": (60, 64)
    }  # fmt: skip
    assert torch.allclose(rows["gate_up_grad"].sum(0), found[1][1].sum(0), atol=1e-4)


def test_rows_of_no_token_are_zero_behind_it():
    """Whatever it makes of them: here infinity, which would be NaN in dW2."""
    with uniep.Workspace(CFG, device="cpu", operators=[
        make(after="down_grad", rows=lambda v, m: v.copy_(torch.where(m[:, None], v, float("inf"))))
    ]) as ws:  # fmt: skip
        x, ids, weights, w13, w2 = arguments(requires_grad=True)
        w13.requires_grad_()
        uniep.moe(x, ids, weights, w13, w2, workspace=ws).sum().backward()
        assert w13.grad.isfinite().all() and x.grad.isfinite().all()


def test_stages_on_gpus():
    """A kernel for a body; for a function "torch", without multiprocessors, and a mask of rows; memory says so."""
    own = [
        make(),
        make(name="other", body=same),
        make(name="third", after="down"),
        make(name="of_dx", after="gate_up_grad"),
    ]
    way = resolve(CFG, 2, 70, Schedule(overlap="pipelined", pipelined_from=0), operators=own)
    forward = {s.name: s for s in stages(CFG, way, "forward")}
    names = list(forward)
    assert names[names.index("gate_up") :][:6] == ["gate_up", "mine", "other", "keep", "down", "third"]
    assert (forward["mine"].kernels, forward["mine"].sms) == (("torch",), 0)
    assert (forward["other"].kernels, forward["other"].sms) == (("row_operator_kernel",), way.sms)
    assert [s.name for s in forward.values() if ("valid", "end") in s.buffers] == ["mine"]
    assert forward["third"].after == () and "push_rows" in forward and way.down_sms == 0
    assert way.computes_in_torch("forward") and way.computes_in_torch("backward")
    only = resolve(CFG, 2, 70, Schedule(overlap="pipelined", pipelined_from=0), operators=own[2:3])
    assert only.down_sms > 0 and not only.computes_in_torch("backward")
    assert [s.after for s in stages(CFG, only, "forward") if s.name in ("third", "push_rows")] == [("down",)] * 2
    small = MoEConfig(hidden=64, ffn=72, num_experts=4, top_k=2, max_tokens_per_rank=100)
    plans = [{b.name: b for b in uniep.plan_memory(small, 2, operators=ops).buffers} for ops in ((), own)]
    assert plans[1].keys() - plans[0].keys() >= {"valid", "results"} and plans[1]["valid"].dtype == torch.bool


def test_one_kernel_has_no_place_for_them():
    """Then calls run in stages, and the way says why."""
    for schedule in (Schedule(overlap="mega"), Schedule(mega_to=100)):
        plain, way = (resolve(CFG, 2, 70, schedule, operators=own) for own in ((), (make(),)))
        assert plain.mega and not way.mega
        assert re.search(r"kernels +in stages +operators +one kernel has no place for one's own", way.explain())
        assert re.search(r"mine +after gate_up +operators +the down product runs behind gate_up", way.explain())
