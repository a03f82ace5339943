"""Ways: what a call of so many tokens does, resolved once, and what of it ranks have to agree on."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import torch

from uniep import MoEConfig, RowOperator, Schedule, Tile
from uniep.schedule import DIMENSIONS, FEW_ROWS, default_schedule, is_valid
from uniep.shapes import SHAPES
from uniep.way import Way, Ways, resolve, wave_of

PINNED = Path(__file__).with_name("ways.txt")
MOST = 8192
TOKENS = (1, 64, 512, 4096, 8192)


def config(shape, most=MOST, **changes):
    sizes = {"hidden": shape.hidden, "ffn": shape.ffn, "num_experts": shape.num_experts, "top_k": shape.top_k}
    return MoEConfig(**sizes, max_tokens_per_rank=most, **changes)


def described(cfg, ep_size, num_tokens):
    """What kernels of the default way are told, in one line."""
    way = resolve(cfg, ep_size, num_tokens)
    of = way.weight_gradient
    how = f"down:{way.down_sms} gradient:{'beside' if way.gradient_beside else 'after'}"
    how += f" parts:{way.gate_up_parts}" * (way.gate_up_parts > 1) + " dw2:beside" * way.down_wgrad_beside
    numbers = " rounds:{},{} leads:{},{}".format(*way.push_rounds, *way.leads) + f" waves:{way.waves}" * (way.waves > 1)
    sent = ("copy" if way.copies else way.transfer) if ep_size > 1 else "none"
    return (
        f"{'mega' if way.mega else how} {sent} programs:{way.push_programs}{'' if way.mega else numbers} "
        f"rows:{way.gate_up.group_rows},{way.down.group_rows} "
        f"tiles:{way.gate_up.rows} {of.columns}x{of.programs_per_sm}"
    )


def defaults():
    """A line for each shape, number of ranks, and tokens of a rank of the most there may be."""
    for shape, ep_size in itertools.product(SHAPES.values(), (1, 2, 4, 8)):
        if shape.per_rank:
            continue
        for num_tokens, most in [(t, MOST) for t in TOKENS] + [(t, t) for t in TOKENS[:-1]]:
            for groups in (None, ep_size) if most == MOST and num_tokens in (1, 4096, 8192) else (None,):
                cfg = config(shape, most, combine_groups=groups)
                what = described(cfg, ep_size, num_tokens)
                yield f"{shape.name} ep:{ep_size}{' groups' if groups else ''} T:{num_tokens}/{most} {what}"


def test_default_ways_are_the_pinned_ones():
    """Made by the code that chose call by call; whoever changes a default sees here what else it changes."""
    assert list(defaults()) == PINNED.read_text().splitlines()


QWEN = SHAPES["qwen3-30b"]
SCHEDULES = [Schedule(), *(d.put(Schedule(mega_to=9), value) for d in DIMENSIONS for value in d.domain)]


def agreed(way):
    """What ranks agree on."""
    return way.transfer, way.sends_by_expert, way.chunk_tokens, way.again, way.recomputes


@pytest.mark.parametrize("backend", ["cpu", "hopper", "nccl"])
def test_what_ranks_agree_on_does_not_follow_their_tokens(backend):
    """Under any schedule; only `hopper` goes different ways at all."""
    for schedule in [default_schedule(backend, config(QWEN), 4), *SCHEDULES]:
        ways = [resolve(config(QWEN), 4, tokens, schedule, backend=backend) for tokens in (0, 1, *TOKENS)]
        assert len({agreed(way) for way in ways}) == 1
        assert {way.gates for way in ways} == {schedule.overlap == "serial"}
        if backend != "hopper":
            assert len({way.kernels for way in ways}) == 1
    wire = [d.name for d in DIMENSIONS if d.scope == "wire"]
    assert wire == [
        "transfer", "send_order", "chunk_tokens", "matrix_workers", "vector_workers", "received", "preactivation",
    ]  # fmt: skip


def test_local_first_says_whose_tiles():
    """Of leading experts in kernels that follow each other, of all experts in one kernel and on the CPU."""
    cfg = config(QWEN)
    found = {
        (tokens, ep, backend): resolve(cfg, ep, tokens, backend=backend).local_first
        for tokens, ep, backend in ((8192, 4, "hopper"), (1, 4, "hopper"), (8192, 1, "hopper"), (8192, 4, "cpu"))
    }
    assert list(found.values()) == ["leading", "leading", "none", "all"]
    assert resolve(cfg, 4, 8192, Schedule(overlap="mega")).local_first == "all"
    natural = dataclasses.replace(default_schedule("hopper", cfg, 4), tile_order="natural")
    assert [resolve(cfg, 4, tokens, natural).local_first for tokens in (1, 8192)] == ["none", "none"]
    assert resolve(cfg, 2, 8192).leads != (0, 0) == resolve(cfg, 2, 8192, natural).leads


def test_waves_by_arrival():
    """Where sources arrive one by one and take longer than a rank's rows of one; for staged copies, local first."""

    def waves(ep, tokens=8192, shape=QWEN, **fields):
        cfg = config(shape)
        schedule = dataclasses.replace(default_schedule("hopper", cfg, ep), **fields)
        way = resolve(cfg, ep, tokens, schedule)
        assert way.waves == 1 or way.leads == (0, 0)
        return way.waves

    assert [waves(ep) for ep in (1, 2, 4, 8)] == [1, 1, 4, 8]
    assert [waves(8, tokens) for tokens in (100, 1024, 2048, 4096)] == [1, 2, 4, 8]
    assert waves(8, shape=SHAPES["mixtral-8x7b"]) == 1, "pushed"
    assert waves(4, shape=SHAPES["deepseek-v3"]) == 1, "the products take longer"
    assert [waves(8, arrival_waves=most) for most in (1, 2, 4, 8)] == [1, 2, 4, 8]
    assert waves(4, arrival_waves=8) == 4 and waves(1, arrival_waves=8) == 1
    unlike = {"transfer": "push"}, {"tile_order": "natural"}, {"overlap": "mega"}
    assert [waves(8, arrival_waves=8, **fields) for fields in unlike] == [1, 1, 1]
    here = {"overlap": "serial"}, {"operand": "expanded"}
    assert [waves(8, arrival_waves=8, **fields) for fields in here] == [1, 1], "all tokens have come before a product"
    assert resolve(config(QWEN), 8, 8192, lora=("w13",)).waves == 1
    assert [wave_of(arrival, 4, 8) for arrival in range(8)] == [0, 1, 1, 2, 2, 3, 3, 4]
    found = next(c for c in resolve(config(QWEN), 8, 8192).choices() if c.what == "local tiles first")
    assert found[1:3] == ("all, then 8 waves by arrival", "tile_order, arrival_waves")


def test_no_rows_come_first_where_nothing_arrives():
    serial = dataclasses.replace(default_schedule("hopper", config(QWEN), 2), overlap="serial")
    way = resolve(config(QWEN), 2, 8192, serial)
    assert (way.local_first, way.leads) == ("none", (0, 0))
    assert resolve(config(QWEN), 2, 8192, serial, backend="cpu").local_first == "all"


def test_stages_have_no_order_of_one_kernel():
    """What only one kernel follows is not in the way of a call in stages, nor among its stages."""
    schedule = Schedule(
        overlap="mega", tile_order="chunk-major", chunk_experts=2, peer_order="rotated",
        weight_gradient_order="interleaved",
    )  # fmt: skip
    for changes, lora in (({}, ("w13",)), ({"gradient_shards": 2}, ())):
        way = resolve(config(QWEN, **changes), 2, 64, schedule, lora=lora)
        assert not way.mega
        assert (way.chunk_experts, way.critical_path, way.rotated, way.interleaved) == (0, False, False, False)


def test_factors_beside_w13_leave_the_down_product_beside_gate_up():
    schedule = Schedule(overlap="pipelined")
    sms = [resolve(config(QWEN), 2, 8192, schedule, lora=lora).down_sms for lora in ((), ("w13",), ("w2",))]
    assert sms[0] == sms[1] > 0 == sms[2]
    cfg = config(QWEN, combine_groups=2)
    found = [resolve(cfg, 2, 8192, Schedule(group_sum="beside"), lora=lora).returns for lora in (("w13",), ("w2",))]
    assert found == ["sums beside", "sums after"]


def test_reasons_are_those_that_decided():
    few = str(resolve(config(QWEN, 256), 2, 256))
    assert "usual for up to 512 tokens" in few and "pipelined from" not in few
    assert "usual for up to" not in str(resolve(config(QWEN), 2, 8192, Schedule(transfer="copy", mega_to=MOST)))
    many = str(resolve(config(QWEN), 2, 8192))
    assert "a peer wants 1.00 of the tokens, copies from" in many and "pipelined from" in many
    pushed = str(resolve(config(QWEN), 8, 8192, Schedule(transfer="push", arrival_waves=4)))
    assert "arrival_waves=4 is for copies for which both first products wait, in stages" in pushed
    scale = RowOperator(name="scale", after="down", rows=lambda values, valid: values)
    choices = {c.what: c for c in resolve(config(QWEN), 2, 8192, operators=[scale]).choices()}
    assert choices["results return"][1:] == ("pass", "operators", "behind 'scale'")


def test_where_ways_part():
    """At the very numbers of tokens that a Schedule names."""
    schedule = Schedule(overlap="pipelined", mega_to=5, beside_from=9, pipelined_from=20, activation_gradient="beside")
    mega, plain, beside, many = (True, False, False), (False,) * 3, (False, False, True), (False, True, True)
    expected = {0: mega, 5: mega, 6: plain, 8: plain, 9: beside, 19: beside, 20: many, 8192: many}
    assert {tokens: resolve(config(QWEN), 2, tokens, schedule).kernels for tokens in expected} == expected
    serial = dataclasses.replace(schedule, overlap="serial")
    assert {resolve(config(QWEN), 2, tokens, serial).kernels for tokens in expected} == {plain}
    one = dataclasses.replace(schedule, overlap="mega")
    assert {resolve(config(QWEN), 2, tokens, one).kernels for tokens in expected} == {mega}
    assert resolve(config(QWEN), 2, 20, schedule).down_sms == 32
    assert resolve(config(QWEN), 2, 20, dataclasses.replace(schedule, down_sms=100)).down_sms == 66, "at most half"


def test_dw2_is_beside_where_calls_are_pipelined():
    """By default, by one rule; a call of fewer tokens than that has it behind."""
    for shape, ep, most, groups in itertools.product(("qwen3-30b", "deepseek-v3"), (1, 2, 4), (2048, MOST), (None, 4)):
        cfg = config(SHAPES[shape], most, combine_groups=groups)
        for tokens in (most, 2048):
            way = resolve(cfg, ep, tokens)
            assert (
                way.down_wgrad_beside
                == (way.down_sms > 0)
                == ((shape, ep, tokens, groups) == ("qwen3-30b", 4, MOST, None))
            )
    few = Schedule(down_wgrad="beside", pipelined_from=2049)
    assert [resolve(config(QWEN), 2, tokens, few).down_wgrad_beside for tokens in (2048, 2049)] == [False, True]


def test_parts_of_gate_up():
    """In pipelined calls alone.  down_sms = 0: the down product's share of the operations, with a gate and without."""
    schedule = Schedule(overlap="pipelined", gate_up_parts=4, down_sms=0)
    way = resolve(config(QWEN), 2, 8192, schedule)
    assert (way.gate_up_parts, way.down_sms) == (4, 44) and "beside gate_up on 44 SMs, in 4 parts" in str(way)
    assert "leading (58, 115), then their others" in str(way)
    assert resolve(config(QWEN, activation="relu2"), 2, 8192, schedule).down_sms == 66
    assert resolve(config(QWEN), 2, 8192, dataclasses.replace(schedule, gate_up_parts=1)).down_sms == 44
    alone = RowOperator(name="scale", after="gate_up", rows=lambda values, valid: values)
    for changes, how in (
        ({"overlap": "fused"}, {}), ({"pipelined_from": 8193}, {}), ({"overlap": "mega"}, {}),
        ({}, {"lora": ("w2",)}), ({}, {"operators": [alone]}),
    ):  # fmt: skip
        way = resolve(config(QWEN), 2, 8192, dataclasses.replace(schedule, **changes), **how)
        assert (way.gate_up_parts, way.down_sms) == (1, 0)
        assert how or way.mega or "gate_up_parts=4 is for pipelined calls" in str(way)
        down = next((c[1:] for c in way.choices() if c.what == "down product"), None)
        assert "operators" not in how or down == ("behind gate_up", "operators", "'scale' in between")
    pushed = dataclasses.replace(schedule, transfer="push", push_programs=100)
    assert is_valid(pushed, config(QWEN), 2, "hopper") == [], "the first part has all multiprocessors"
    assert is_valid(dataclasses.replace(pushed, gate_up_parts=1), config(QWEN), 2, "hopper")


def test_how_results_return():
    """By the product, by a pass where stages wait for each other, or as sums of groups."""

    def returns(groups, **fields):
        return resolve(config(QWEN, combine_groups=groups), 4, 4096, Schedule(**fields)).returns

    assert [returns(None), returns(None, overlap="serial")] == ["epilogue", "pass"]
    assert [returns(8), returns(8, overlap="serial"), returns(8, group_sum="beside")] == 2 * ["sums after"] + [
        "sums beside"
    ]


def test_one_kernel_takes_a_plain_tile_for_weight_gradients_of_several_programs():
    """So that a default for few rows can run both ways."""
    cfg = config(QWEN, 128, dtype=torch.bfloat16)
    usual = default_schedule("hopper", cfg, 1)
    some = dataclasses.replace(usual, mega_to=64)
    assert usual.weight_gradient == FEW_ROWS[64] and is_valid(some, cfg, 1, "hopper") == []
    assert resolve(cfg, 1, 128, some).weight_gradient == FEW_ROWS[64]
    assert resolve(cfg, 1, 64, some).weight_gradient == Schedule().weight_gradient
    (reason,) = is_valid(dataclasses.replace(some, weight_gradient=Tile(columns=128, warps=4)), cfg, 1, "hopper")
    assert "weight_gradient.warps is 4; overlap='mega' needs 8" in reason


@pytest.mark.parametrize("ep_size", [1, 2])
def test_tiles_follow_the_rows_of_an_expert(ep_size):
    """On average, in a full call: of products of rows up to 48, of weight gradients up to 64 and 256."""
    found = {}
    for rows in (1, 48, 49, 64, 65, 256, 257):
        cfg = config(QWEN, -(-rows * 16 // ep_size))  # 128 experts, top-8
        usual = default_schedule("hopper", cfg, ep_size)
        assert usual.gate_up.rows == usual.down.rows
        found[rows] = usual.gate_up.rows, usual.weight_gradient.programs_per_sm
        nccl = default_schedule("nccl", cfg, ep_size)
        assert (nccl.gate_up.rows, nccl.weight_gradient) == (128, usual.weight_gradient)
    assert found == {1: (64, 3), 48: (64, 3), 49: (128, 3), 64: (128, 3), 65: (128, 2), 256: (128, 2), 257: (128, 1)}
    by_blocks = config(QWEN, 16, gradient_shards=2)
    assert default_schedule("hopper", by_blocks, 2).weight_gradient == Schedule().weight_gradient


def test_a_way_explains_itself():
    """Each line has the choice, its rule, and the numbers that the rule compared."""
    cfg = config(QWEN)
    usual = default_schedule("hopper", cfg, 4)
    many, few = str(resolve(cfg, 4, 8192)), str(resolve(cfg, 4, 100, dataclasses.replace(usual, mega_to=512)))
    assert "beside gate_up on 44 SMs, in 4 parts" in many and "pipelined, T=8192, from 4096 on" in many
    assert "a peer wants 0.91 of the tokens, copies from 0.35 on" in many
    tiny = str(resolve(config(QWEN, 128), 1, 128))
    share = "results take 2.03 of the down product's time on the wire"
    assert f"pipelined; {share}, pipelined from 1.7 on" in many
    assert f"beside; {share}, beside from 1.7 on, T=8192, from 4096 on" in many
    assert share not in str(resolve(cfg, 4, 8192, dataclasses.replace(usual, overlap="fused", down_wgrad="after")))
    assert "mega_to" in few and "T=100, up to 512" in few and "one each way" in few and "behind gate_up" not in few
    assert "sums after" in str(resolve(config(QWEN, combine_groups=8), 4, 8192))
    assert re.search(r"row tiles +128 rows .* an expert has 2048 rows on average; 64 up to 48", many)
    few = r"weight gradients' tiles +128 x 128, 3 for each .* 8 rows on average; others up to 64 and 256"
    assert re.search(few, tiny)
    serial = str(resolve(cfg, 4, 100, Schedule(overlap="serial")))
    assert "one after the other" in serial and "one each way" not in serial and "behind gate_up" in serial
    sent = {
        (ep, transfer): str(resolve(cfg, ep, 8192, Schedule(transfer=transfer)))
        for ep, transfer in ((4, "push"), (4, "copy"), (1, "push"))
    }
    assert ["send lists" in text for text in sent.values()] == [True, False, False]
    cpu = str(resolve(cfg, 4, 100, backend="cpu"))
    assert "local-first, stages of cpu" in cpu and "mega_to" not in cpu and "transfer" not in cpu


def test_ways_are_resolved_once(monkeypatch):
    """By tokens; and one for each set of kernels that calls of up to the most tokens launch."""
    cfg = config(QWEN)
    ways = Ways(cfg, 4, None, "hopper")
    assert ways[8192] is ways[8192] == resolve(cfg, 4, 8192) and len(ways) == 1
    kinds = [way.kernels for way in ways.kinds()]
    assert kinds == [(False, False, False), (False, False, True), (False, True, True)]
    every = {ways[tokens].kernels for tokens in range(0, MOST + 1, 7)}
    assert every == set(kinds)
    some = dataclasses.replace(default_schedule("hopper", cfg, 4), mega_to=512)
    assert [way.kernels for way in Ways(cfg, 4, some, "hopper").kinds()] == [(True, False, False), *kinds]
    assert [way.kernels for way in Ways(config(QWEN, 64), 4, some, "hopper").kinds()] == [(True, False, False)]
    for tokens in range(1500):
        ways[tokens]
    assert len(ways) <= 1000, "any number of lengths may come"
    assert all(isinstance(way, Way) for way in ways.values())
