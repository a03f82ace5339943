"""MoEConfig and Schedule refuse what cannot work, when they are made, with value and limit."""

import dataclasses
import math
import subprocess
import sys
from fractions import Fraction

import pytest
import torch

from uniep.config import ROW_ALIGN, MoEConfig, align_rows, divisors, max_padded_rows
from uniep.errors import ConfigError, UniEPError, UnsupportedError
from uniep.schedule import DEFAULT_SCHEDULES, Schedule, Tile, default_schedule, is_valid
from uniep.way import resolve

GOOD = {"hidden": 64, "ffn": 32, "num_experts": 8, "top_k": 2, "max_tokens_per_rank": 16}


def test_defaults():
    cfg = MoEConfig(**GOOD)
    assert (cfg.activation, cfg.dtype, cfg.weight_at, cfg.max_rows) == ("swiglu", torch.bfloat16, "output", None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.hidden = 3


@pytest.mark.parametrize(
    ("name", "meant"),
    [("hidden_size", "'hidden'"), ("n_experts", "'num_experts'"), ("topk", "'top_k'"), ("max_row", "'max_rows'")],
)
def test_unknown_keywords_are_named(name, meant):
    with pytest.raises(ConfigError, match=rf"no '{name}'; did you mean {meant}\?  Its fields: hidden, ffn"):
        MoEConfig(**GOOD, **{name: 3})
    with pytest.raises(ConfigError, match=f"no '{name}'"):
        dataclasses.replace(MoEConfig(**GOOD), **{name: 3})
    with pytest.raises(ConfigError, match=r"no 'zzz'\.  Its fields"):
        MoEConfig(**GOOD, zzz=1)


@pytest.mark.parametrize("name", [*GOOD, "combine_groups", "gradient_shards", "max_rows"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_sizes_are_positive_integers(name, value):
    with pytest.raises(ConfigError, match=rf"{name} is {value!r}.*at least 1"):
        MoEConfig(**(GOOD | {name: value}))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"top_k": 9}, ConfigError, "top_k is 9.*num_experts=8.*lower top_k"),
        ({"activation": "mish"}, UnsupportedError, "'mish'.*'swiglu', 'swiglu_oai', 'geglu', .*'silu', .*'relu2'"),
        ({"activation_limit": -1.0}, ConfigError, "activation_limit is -1.0.*above 0, or None"),
        ({"activation": "relu2", "activation_limit": 7.0}, UnsupportedError, "limit is 7.0 but .*'relu2' has no gate"),
        ({"bias": None}, ConfigError, "bias is None; it must be True or False"),
        ({"dtype": torch.float64}, ConfigError, "float64.*supported.*bfloat16"),
        ({"weight_at": "input"}, ConfigError, "'input'.*'output' or 'activation'"),
        ({"combine_groups": 3}, ConfigError, "combine_groups is 3.*num_experts=8.*1, 2, 4, 8, or None"),
    ],
)
def test_refused_by_name(change, error, text):
    with pytest.raises(error, match=text):
        MoEConfig(**(GOOD | change))


LARGE = 2**31 - 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        *(({name: 2**60}, f"{name} is {2**60}; it must be at most {LARGE}") for name in (*GOOD, "max_rows")),
        ({"hidden": 10**5000}, "hidden is a number of 16610 bits; it must be at most"),
        ({"hidden": -(10**5000)}, "hidden is a number of 16610 bits; it must be at least 1"),
        ({"hidden": LARGE, "ffn": LARGE}, r"w13 of all experts, .*are \d+ bytes in fp32; the limit"),
        ({"combine_groups": 5, "num_experts": LARGE - 1}, r"combine_groups is 5.*one of 1, 2, 3, 6, .*, \.\.\., or"),
        ({"hidden": torch.tensor(64)}, r"hidden is tensor\(64\), a Tensor; it must be an int of at least 1"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)  # fmt: skip
def test_numbers_that_nothing_can_count(change, text):
    with pytest.raises(ConfigError, match=text) as caught:
        MoEConfig(**(GOOD | change))
    assert len(str(caught.value)) < 400


def test_divisors():
    for number in range(1, 200):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
    cfg = MoEConfig(**(GOOD | {"num_experts": 735134400}))  # 1344 divisors
    with pytest.raises(
        ConfigError, match=r"group of 120 ranks \(these sizes fit: \.\.\., 104, .*, 120, 126, .*\.\.\.\)"
    ) as caught:
        cfg.check_group(121)
    assert len(str(caught.value)) < 400
    for size in (10**30, 2.0, True, "2", 0):
        with pytest.raises(ConfigError, match="ep_size is"):
            cfg.check_group(size)
    with pytest.raises(ConfigError, match="the experts' tokens"):
        MoEConfig(**(GOOD | {"hidden": LARGE, "max_tokens_per_rank": 2**28})).check_group(2)


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(128, 8, 2), (8, 2, 8), (256, 8, 4), (4, 3, 2), (4, 4, 1)])
def test_part_of_tokens_that_a_rank_wants(experts, top_k, ranks):
    others = experts - experts // ranks
    exact = 1 - Fraction(math.comb(others, top_k), math.comb(experts, top_k))
    cfg = MoEConfig(**(GOOD | {"num_experts": experts, "top_k": top_k}))
    assert cfg.wanted(ranks) == pytest.approx(float(exact), rel=1e-14)
    assert MoEConfig(**(GOOD | {"num_experts": 2**30, "top_k": 2**29})).wanted(8) == 1


def test_errors_are_also_value_errors():
    with pytest.raises(ValueError, match="top_k") as caught:
        MoEConfig(**(GOOD | {"top_k": 9}))
    assert isinstance(caught.value, UniEPError)


@pytest.mark.parametrize(
    ("experts", "ranks", "local"), [(6, 2, 3), (60, 4, 15), (384, 8, 48), (160, 4, 40), (4, 4, 1), (7, 1, 7)]
)
def test_experts_per_rank(experts, ranks, local):
    assert MoEConfig(**(GOOD | {"num_experts": experts})).experts_per_rank(ranks) == local


@pytest.mark.parametrize(
    ("experts", "ranks", "below", "fits"),
    [
        (10, 4, 2, "1, 2, 5, 10"),
        (256, 3, 2, "1, 2, 4, 8, 16, 32, 64, 128, 256"),
        (8, 16, 8, "1, 2, 4, 8"),
        (7, 6, 1, "1, 7"),
    ],
)
def test_experts_that_do_not_divide(experts, ranks, below, fits):
    """Field report 15: the error has E, R and what to change."""
    cfg = MoEConfig(**(GOOD | {"num_experts": experts}))
    text = rf"num_experts={experts}.*over {ranks} ranks.*group of {below} ranks \(these sizes fit: {fits}\)"
    with pytest.raises(ConfigError, match=text):
        cfg.experts_per_rank(ranks)


def test_groups_that_ranks_do_not_divide():
    cfg = MoEConfig(**GOOD, combine_groups=4)
    for ranks in (1, 2, 4):
        cfg.check_group(ranks)
    text = "combine_groups=4.*over 8 ranks.*EP group of 1, 2, 4 ranks.*multiple of 8 that divides num_experts=8"
    with pytest.raises(ConfigError, match=text):
        cfg.check_group(8)


@pytest.mark.parametrize(("groups", "slots", "experts"), [(None, 2, 1), (1, 1, 8), (2, 2, 4), (8, 2, 1)])
def test_group_sizes(groups, slots, experts):
    cfg = MoEConfig(**GOOD, combine_groups=groups)
    assert (cfg.return_slots, cfg.experts_per_group) == (slots, experts)


def test_row_arithmetic():
    assert [align_rows(n) for n in (0, 1, 127, 128, 129)] == [0, 128, 128, 128, 256]
    for rows in range(1, 400, 7):
        for local in (1, 3, 8):
            worst = sum(align_rows(n) for n in [1] * min(local - 1, rows - 1) + [rows - min(local - 1, rows - 1)])
            assert max_padded_rows(rows, local) >= worst
            assert max_padded_rows(rows, local) % ROW_ALIGN == 0


def test_default_schedules_are_valid():
    assert all(is_valid(schedule, MoEConfig(**GOOD)) == [] for schedule in DEFAULT_SCHEDULES.values())
    assert Schedule(overlap="serial", tile_order="natural").name == "serial/natural"


def test_default_schedule_of_hopper():
    """Copies where a third of the tokens are wanted, unless all calls are small; pipelined where results take longer
    than what computes them; no calls are one kernel each way; row tiles of an expert share its weights."""

    def schedule(ep_size, **changes):
        usual = GOOD | {"num_experts": 128, "top_k": 8, "max_tokens_per_rank": 8192}
        return default_schedule("hopper", MoEConfig(**usual | changes), ep_size)

    def default(ep_size, **changes):
        made = schedule(ep_size, **changes)
        return made.transfer, made.overlap

    assert default(1, ffn=768) == ("push", "fused")
    assert default(2, ffn=768, max_tokens_per_rank=512) == ("push", "fused")
    assert default(2, ffn=768) == ("copy", "fused")
    assert default(4, ffn=768) == ("copy", "pipelined")
    assert default(8, ffn=2048) == ("copy", "fused")
    assert default(8, ffn=2048, top_k=2) == ("push", "fused")
    usual, cfg = schedule(2), MoEConfig(**GOOD)
    some = dataclasses.replace(usual, mega_to=512)
    assert [resolve(cfg, 2, tokens, some).mega for tokens in (0, 512, 513)] == [True, True, False]
    serial = dataclasses.replace(some, overlap="serial")
    assert not any(resolve(cfg, 2, 0, made).mega for made in (usual, serial, Schedule()))
    assert [tile.group_rows for tile in (usual.gate_up, usual.down, usual.weight_gradient)] == [16, 16, 8]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"overlap": "all"}, "overlap is 'all'"),
        ({"tile_order": "random"}, "tile_order is 'random'"),
        ({"gate_up": Tile(rows=96)}, "gate_up.rows is 96"),
        ({"down": Tile(rows=32)}, "down.rows is 32"),
        ({"down": Tile(columns=32)}, "down.columns is 32"),
        ({"gate_up": Tile(warps=6)}, "gate_up.warps is 6; it must be 4, 8 or 16"),
        ({"vector_workers": 1025}, "vector_workers is 1025; it must be at most 1024"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"group_sum": "during"}, "group_sum is 'during'"),
        ({"group_sum": "beside", "overlap": "serial"}, "'beside' needs overlap='fused', not 'serial'"),
        ({"matrix_workers": 0}, "matrix_workers is 0"),
        ({"mega_to": -1}, "mega_to is -1 tokens"),
        ({"beside_from": -1}, "beside_from is -1 tokens"),
        ({"mega_to": 8, "received": "again"}, "received is 'again'; overlap='mega' needs 'saved', or use mega_to=0"),
        ({"vector_workers": -1}, "vector_workers is -1"),
        ({"overlap": "mega", "operand": "expanded"}, "operand is 'expanded'; overlap='mega' needs 'gathered'"),
        ({"overlap": "mega", "received": "again"}, "received is 'again'; overlap='mega' needs 'saved'"),
        ({"overlap": "mega", "down": Tile(warps=4)}, "down.warps is 4; overlap='mega' needs 8"),
        (
            {"overlap": "mega", "gate_up": Tile(programs_per_sm=2)},
            "gate_up.programs_per_sm is 2; overlap='mega' needs 1",
        ),
    ],
)
def test_schedules_that_cannot_run(change, text):
    (reason,) = is_valid(Schedule(**change), MoEConfig(**GOOD))
    assert text in reason


BAD_NUMBERS = (64.0, 10**30, 10**5000, True, "64", None, torch.tensor(64), -1, float("nan"), [64])


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Schedule) if type(f.default) is int])
def test_numbers_of_schedules(name):
    for value in BAD_NUMBERS:
        (reason,) = is_valid(Schedule(**{name: value}), MoEConfig(**GOOD))
        assert reason.startswith(f"{name} is ") and len(reason) < 200


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Tile)])
def test_numbers_of_tiles(name):
    for value in (*BAD_NUMBERS, 0):
        (reason,) = is_valid(Schedule(down=Tile(**{name: value})), MoEConfig(**GOOD))
        assert reason.startswith(f"down.{name} is ") and len(reason) < 200


@pytest.mark.parametrize("name", ["overlap", "gate_up"])
@pytest.mark.parametrize(
    "value", [None, 3, torch.zeros(2), ["fused"], {"rows": 64}], ids=lambda value: repr(value)[:12]
)
def test_kinds_of_schedules(name, value):
    (reason,) = is_valid(Schedule(**{name: value}), MoEConfig(**GOOD))
    assert reason.startswith(f"{name} is ")
    (reason,) = is_valid(value, MoEConfig(**GOOD))
    assert "pass a uniep.Schedule" in reason


@pytest.mark.parametrize(
    ("shards", "ep", "copies", "fits"),
    [(3, 4, 1, "1, 2, 4"), (1, 2, 2, "2, 4"), (2, 1, 4, "4"), (16, 8, 1, "1, 2, 4, 8")],
)
def test_gradient_shards_are_whole_ranks_of_every_copy(shards, ep, copies, fits):
    cfg = MoEConfig(**GOOD, gradient_shards=shards)
    text = (
        f"gradient_shards={shards} .* {copies} EP groups of {ep} ranks.*use gradient_shards of {fits}, or other sizes"
    )
    with pytest.raises(ConfigError, match=text):
        cfg.check_group(ep, copies)
    for good in map(int, fits.split(", ")):
        MoEConfig(**GOOD, gradient_shards=good).check_group(ep, copies)


def test_gradient_shards_take_stages():
    """One kernel sums an expert's rows in one chain."""
    mega, cfg = Schedule(overlap="mega", mega_to=8), MoEConfig(**GOOD, gradient_shards=2)
    assert resolve(MoEConfig(**GOOD), 2, 4, mega).mega and not resolve(cfg, 2, 4, mega).mega
    assert not resolve(cfg, 2, 4, Schedule(mega_to=8)).mega
    assert "in stages" in (text := resolve(cfg, 2, 4, mega).explain()) and "gradient_shards" in text


def test_combine_groups_are_not_for_one_kernel():
    (reason,) = is_valid(Schedule(overlap="mega"), MoEConfig(**GOOD, combine_groups=2))
    assert "combine_groups is 2; overlap='mega' needs None" in reason


def test_import_touches_nothing():
    """Importing uniep loads no Triton and no DTensor, starts no CUDA, reads no environment, patches nothing."""
    code = """
import os, sys, torch
read = []
class Watched(dict):
    def __getitem__(self, key): read.append(key); return super().__getitem__(key)
    def get(self, key, default=None): read.append(key); return super().get(key, default)
    def __contains__(self, key): read.append(key); return super().__contains__(key)
slow = {"triton", "torch.distributed.tensor"} - set(sys.modules)
os.environ = Watched(os.environ)
os.getenv = lambda key, default=None: os.environ.get(key, default)
before = {name: id(value) for name, value in vars(torch).items()}
import uniep
assert not slow & set(sys.modules), f"{slow & set(sys.modules)} imported"
assert not torch.cuda.is_initialized(), "CUDA was started"
assert not [key for key in read if key.startswith(("UNIEP", "CUDA", "TRITON"))], read
changed = [name for name, value in before.items() if id(getattr(torch, name)) != value]
assert not changed, changed
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
