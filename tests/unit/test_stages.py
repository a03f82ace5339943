"""Stages, as `Workspace.program` shows them where no GPU is needed.  (hopper: tests/interp/test_recorded_calls.py.)"""

import dataclasses
import re

import pytest

import uniep
from uniep import ConfigError, MoEConfig
from uniep.schedule import DEFAULT_SCHEDULES, Schedule
from uniep.stages import Flags, stages
from uniep.taskflow.layer import backward_operators, forward_operators
from uniep.way import resolve

CFG = MoEConfig(hidden=64, ffn=72, num_experts=4, top_k=2, max_tokens_per_rank=100)


@pytest.mark.parametrize(("backend", "names"), [
    ("cpu", "enter push gate_up keep down combine"),
    ("nccl", "enter dispatch gate_up down return combine"),
])  # fmt: skip
def test_a_workspace_shows_its_program(backend, names):
    with uniep.Workspace(CFG, device="cpu", backend=backend) as ws:
        forward, backward = ws.program(70, "forward"), ws.program(70, "backward")
        assert [s.name for s in forward.stages] == names.split()
        table = str(forward).splitlines()
        assert table[0] == f"forward, {backend}, 1 ranks, T=70" and table[1].split()[:3] == [
            "stage",
            "operators",
            "launches",
        ]
        assert [line.split()[0] for line in table[2:]] == names.split()
        assert {"down_wgrad", "gate_up_wgrad"} <= {op for s in backward.stages for op in s.operators}
        for tokens in (-1, 101, 2.0, True):
            with pytest.raises(ConfigError, match=re.escape(f"tokens is {tokens}; it must be between 0 and")):
                ws.program(tokens, "forward")
        of_w2 = [s.name for s in ws.program(70, "backward", lora=("w2",)).stages]
        assert "down_wgrad" in of_w2 and "gate_up_wgrad" not in of_w2
        assert str(ws.program(70, "forward", lora=("w2",))).startswith(f"forward, {backend}, 1 ranks, T=70, LoRA")
        for lora in ("w2", ("b2",)):
            with pytest.raises(ConfigError, match=re.escape(f"lora is {lora!r}; pass a tuple of some of 'w13', 'w2'")):
                ws.program(70, "forward", lora=lora)
        with pytest.raises(ConfigError, match="direction is 'sideways'; use 'forward' or 'backward'"):
            ws.program(70, "sideways")


@pytest.mark.parametrize("backend", ["cpu", "nccl"])
def test_a_report_says_what_is_made_again(backend):
    """(hopper: tests/interp/test_plan.py.)"""
    for received, preactivation, text in (
        ("saved", "saved", "kept for backward"), ("again", "recomputed", "dispatched again in backward"),
    ):  # fmt: skip
        schedule = dataclasses.replace(DEFAULT_SCHEDULES[backend], received=received, preactivation=preactivation)
        with uniep.Workspace(CFG, device="cpu", backend=backend, schedule=schedule) as ws:
            found = uniep.report(ws)
        assert found["received"] == text and found["gate and up"] == f"{preactivation} for backward"


def test_operators_are_those_of_the_stages():
    """On the CPU, and of the kernel that is a direction on a GPU."""
    for backend, overlap in (("cpu", "fused"), ("hopper", "mega")):
        way = resolve(CFG, 2, 70, Schedule(overlap=overlap), backend=backend)
        assert [op.name for op in forward_operators(way, keep=True)] == ["push", "gate_up", "keep", "down", "combine"]
        made = [op for s in stages(CFG, way, "backward") for op in s.operators]
        assert made == [op.name for op in backward_operators(way)] and made[-2:] == ["collect", "combine"]


def test_pipelined_is_two_launches_that_share_a_cursor():
    way = resolve(CFG, 2, 70, Schedule(overlap="pipelined", pipelined_from=0))
    both = [s for s in stages(CFG, way, "forward") if s.name == "down"]
    assert [(s.stream, s.shares_cursor) for s in both] == [("side", True), ("call", True)]
    assert sum(s.sms for s in both) == way.sms and both[0].sms == way.down_sms > 0
    plain = resolve(CFG, 2, 70, Schedule(overlap="fused"))
    assert not [s for s in stages(CFG, plain, "forward") if s.shares_cursor]


def sms_beside(way, **needed):
    """Of gate_up_grad and weight gradients, and those that are on the stream of the sum of dX."""
    made = {s.name: s for s in stages(CFG, way, "backward", Flags(**needed))}
    products = [made[name] for name in ("gate_up_grad", "down_wgrad", "gate_up_wgrad") if name in made]
    assert made["combine"].stream == "side" and made["combine"].sms == way.sms
    return [s.sms for s in products], [s.name for s in products if s.stream == "side"]


def test_dw2_beside_gate_up_grad():
    """By their time both end together; what is frozen takes no multiprocessors, and rows of dX then get them."""
    rows, none = ["gate_up_grad"], []
    for value, frozen, expected in (
        ("after", {}, ([132, 132, 132], none)),
        ("beside", {}, ([83, 49, 132], rows)),
        ("beside", {"w2": False}, ([132, 132], none)),
        ("beside", {"w13": False}, ([83, 49], rows)),
        ("beside", {"x": False, "weights": False}, ([83, 49, 132], rows)),  # a peer may need dX
    ):
        assert sms_beside(resolve(CFG, 2, 70, Schedule(down_wgrad=value)), **frozen) == expected, (value, frozen)
    assert sms_beside(resolve(CFG, 2, 70, Schedule(down_wgrad="beside", received="again"))) == ([83, 49, 132], rows)
    assert sms_beside(resolve(CFG, 2, 70, Schedule(down_wgrad="beside", free_sms=8)))[0] == [78, 46, 124]
    plain, few = dataclasses.replace(CFG, activation="relu2"), Schedule(down_wgrad="beside", free_sms=130)
    assert resolve(plain, 2, 70, Schedule(down_wgrad="beside")).gate_up_grad_sms == 61
    assert [resolve(cfg, 2, 70, few).gate_up_grad_sms for cfg in (CFG, plain)] == [1, 1], "of two"


def test_where_dw2_stays_behind():
    """Way says why; one kernel is as it was."""
    asked = Schedule(down_wgrad="beside")
    after = uniep.RowOperator(name="scale", after="gate_up_grad", rows=lambda values, valid: values)
    of_down = dataclasses.replace(after, after="down")
    serial, many = (dataclasses.replace(asked, **how) for how in ({"overlap": "serial"}, {"pipelined_from": 71}))
    for schedule, more, rule in (
        (serial, {}, "overlap"), (asked, {"lora": ("w13",)}, "lora"), (asked, {"operators": [after]}, "operators"),
        (asked, {"operators": [of_down]}, "operators"),
        (many, {}, "down_wgrad, pipelined_from"), (Schedule(), {"lora": ("w13",)}, "down_wgrad, pipelined_from"),
    ):  # fmt: skip
        way = resolve(CFG, 2, 70, schedule, **more)
        assert not way.down_wgrad_beside and all(s.sms in (0, 132) for s in stages(CFG, way, "backward"))
        assert next(c[1:3] for c in way.choices() if c.what == "dW2") == ("behind gate_up_grad", rule)
    found = next(c for c in resolve(CFG, 2, 70, asked).choices() if c.what == "dW2")
    assert found[1:] == ("beside gate_up_grad on 49 SMs", "down_wgrad, pipelined_from", "beside, T=70, from 0 on")
    mega = [stages(CFG, resolve(CFG, 2, 70, Schedule(overlap="mega", **how)), "backward") for how in (
        {}, {"down_wgrad": "beside"})]  # fmt: skip
    assert mega[0] == mega[1]


def test_parts_of_gate_up_alternate_with_their_down_products():
    """Each down product behind its part, beside the next one; the first part of gate_up and the last of down have all
    multiprocessors.  What both directions make, and who pushes, is said once."""
    for transfer in ("push", "copy"):
        way = resolve(CFG, 2, 70, Schedule(overlap="pipelined", gate_up_parts=3, down_sms=0, transfer=transfer))
        made = [s for s in stages(CFG, way, "forward") if s.part]
        beside, both = ("side", 44, ("gate_up",)), ("gate_up", "down")
        assert [(s.name, s.part) for s in made] == [(name, (n, 3)) for n in range(3) for name in both]
        others = [("call", 88, ()), beside, ("call", 88, ())]
        assert [(s.stream, s.sms, s.after) for s in made] == [("call", 132, ()), beside, *others, ("call", 132, ())]
        assert not any(s.shares_cursor for s in made)
        operators = [op for s in made for op in s.operators]
        assert operators == [*(["push"] if transfer == "push" else []), "gate_up", "down"]
        assert [name for s in made for name, _ in s.buffers] == ["act", "h"]
    names = [s.name for s in stages(CFG, way, "forward")]
    assert names.index("keep") > max(n for n, name in enumerate(names) if name == "gate_up"), "all have come by then"
    assert not [s for s in stages(CFG, way, "backward") if s.part]


def test_rows_are_shrunk_before_their_products():
    """Of those weights that have factors; what gathers rows waits for tokens, once."""
    weights = {"gate_up": "w13", "down": "w2", "down_grad": "w2", "gate_up_grad": "w13"}
    for lora in (("w13", "w2"), ("w2",)):
        way = resolve(CFG, 2, 70, Schedule(overlap="mega"), lora=lora)
        for direction in ("forward", "backward"):
            made = stages(CFG, way, direction)
            names = [s.name for s in made]
            for at, name in enumerate(names):
                if name in weights:
                    assert (names[at - 1] == f"{name}_shrink") == (weights[name] in lora)
            assert len([s for s in made if "arrived" in s.waits]) == 1
        assert ("gate_up_wgrad" in names) == ("w13" in lora) and "down_wgrad" in names


def test_what_is_recomputed():
    """Behind the entry, and behind a second dispatch of x, which then comes before that of dO; a launch in front of the
    one kernel.  The forward of the kernel makes no h."""
    plain, mega = {"overlap": "fused", "transfer": "copy"}, {"overlap": "mega", "transfer": "push"}
    names, made = {}, {}
    for how in ({}, {"received": "again"}, mega):
        way = resolve(CFG, 2, 70, Schedule(**{**plain, **how, "preactivation": "recomputed"}))
        names[str(how)] = [s.name for s in stages(CFG, way, "backward")]
        made[str(how)] = [name for s in stages(CFG, way, "forward") for name, _ in s.buffers]
    assert not any("h" in found for found in made.values())
    assert names["{}"][:4] == ["enter", "send", "recompute", "down_grad"]
    assert names[str({"received": "again"})][:4] == ["dispatch_again", "enter", "send", "recompute"]
    assert names[str({"received": "again"})].count("dispatch_again") == 1
    assert names[str(mega)] == ["enter", "recompute", "lists", "backward"]
    way = resolve(CFG, 2, 70, Schedule(preactivation="recomputed"), backend="cpu")
    assert "recompute" in [op.name for op in backward_operators(way)]


def test_what_is_not_needed_is_not_listed():
    way = resolve(CFG, 2, 70, Schedule(overlap="fused"))
    names = {s.name for s in stages(CFG, way, "backward", Flags(w13=False, w2=False))}
    assert "gate_up_grad" in names and not names & {"down_wgrad", "gate_up_wgrad"}
    assert "keep" not in {s.name for s in stages(CFG, way, "forward", Flags(save=False))}
    assert "send" not in {s.name for s in stages(CFG, way, "forward", Flags(wire=False))}
