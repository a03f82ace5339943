"""Dimensions of a Schedule: each declared once; what an executor does not know is refused by name, never ignored."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

from uniep import ConfigError, MoEConfig, Schedule, Tile, Workspace
from uniep.dimension import MEGA, Setting
from uniep.layout import GROUP_BITS
from uniep.schedule import (
    DEFAULT_SCHEDULES,
    DIMENSION,
    DIMENSIONS,
    TILES,
    default_schedule,
    is_valid,
    known_fields,
    neighbours,
    parse_schedule,
    refuse_invalid,
)

CFG = MoEConfig(hidden=8, ffn=8, num_experts=2, top_k=1, max_tokens_per_rank=4, dtype=torch.float32)


@pytest.mark.parametrize(
    ("field", "value"), [("operand", "expanded"), ("push_programs", 3), ("weight_gradient", Tile(columns=128))]
)
def test_cpu_refuses_gpu_fields(field, value):
    with pytest.raises(ConfigError, match=rf"Schedule\.{field} is .*, but backend 'cpu' knows only"):
        Workspace(CFG, device="cpu", schedule=Schedule(**{field: value}))


@pytest.mark.parametrize("backend", ["hopper", "nccl"])
@pytest.mark.parametrize(
    "change", [{"tile_order": "chunk-major"}, {"tile_order": "critical-path"}, {"peer_order": "rotated"},
               {"weight_gradient_order": "interleaved"}, {"activation": "separate"}, {"chunk_experts": 2}],
    ids=str,
)  # fmt: skip
def test_orders_of_the_cpu_are_refused_elsewhere(backend, change):
    schedule = dataclasses.replace(DEFAULT_SCHEDULES[backend], **change)
    with pytest.raises(ConfigError, match=rf"Schedule\.{next(iter(change))} is .*, but backend '{backend}' knows only"):
        refuse_invalid(schedule, CFG, 1, backend)


def test_cpu_takes_its_own():
    own = Schedule(overlap="serial", tile_order="natural", matrix_workers=2, chunk_tokens=32, received="again")
    Workspace(CFG, device="cpu", schedule=own).close()


BACKENDS = tuple(DEFAULT_SCHEDULES)
LAYER = MoEConfig(hidden=2048, ffn=768, num_experts=128, top_k=8, max_tokens_per_rank=8192)
SETTINGS = [Setting(LAYER, 4, backend) for backend in BACKENDS]


def test_every_field_is_a_dimension():
    """Of a Tile, each part; defaults are in the domain, and the default of any shape is valid and one of them."""
    parts = [f"{tile}.{part.name}" for tile in TILES for part in dataclasses.fields(Tile)]
    fields = [f.name for f in dataclasses.fields(Schedule) if f.name not in TILES]
    assert sorted(DIMENSION) == sorted(fields + parts)
    for d in DIMENSIONS:
        assert d.of(Schedule()) == d.default and d.default in d.domain and len(set(d.domain)) == len(d.domain) > 1
        assert all((d.doc, d.helps, d.source, d.backends)) and set(d.backends) <= {*BACKENDS, MEGA}
        assert all(d.of(default_schedule(backend, LAYER, 4)) in d.domain for backend in BACKENDS)
    for cfg, ep_size, backend, _ in SETTINGS:
        assert is_valid(default_schedule(backend, cfg, ep_size), cfg, ep_size, backend) == []


def test_words_of_row_tiles_have_room_for_every_group():
    sizes = [d for d in DIMENSIONS if d.name.endswith(".group_rows")]
    assert len(sizes) == 3
    assert all(max(d.most, *d.domain) < 2**GROUP_BITS for d in sizes)


@pytest.mark.parametrize("d", DIMENSIONS, ids=lambda d: d.name)
def test_a_dimension_is_parsed_named_and_refused_as_declared(d):
    for value in d.domain:
        made = parse_schedule(f"{d.name}={value}", Schedule())
        assert d.of(made) == value and d.put(made, d.default) == Schedule()
        assert (d.shown.get(value, "/") in made.name.split("/")) == (value in d.shown)
    bad = "all" if isinstance(d.default, str) else d.least - 1
    (reason,) = is_valid(d.put(Schedule(), bad), LAYER)
    assert reason.startswith(f"{d.name} is {bad!r}")
    for backend in BACKENDS:
        usual = DEFAULT_SCHEDULES[backend]
        other = next(v for v in d.domain if v != d.of(usual))
        reasons = is_valid(d.put(usual, other), LAYER, 1, backend)
        field = d.name.partition(".")[0]
        known = field in known_fields(backend) and (
            d.name in TILES or other in d.values(usual, backend) or "." in d.name
        )
        assert any(f"backend {backend!r} knows only" in reason for reason in reasons) == (not known), (backend, reasons)


@pytest.mark.parametrize("at", SETTINGS, ids=lambda at: at.backend)
def test_neighbours(at):
    """Valid, one dimension away, and enough of them to reach what the default is not."""
    usual = default_schedule(at.backend, at.cfg, at.ep_size)
    steps = list(neighbours(usual, at))
    assert len(steps) == len({made for _, made in steps}) > 10
    for d, made in steps:
        assert not is_valid(made, at.cfg, at.ep_size, at.backend)
        part = d.name.partition(".")[2]
        others = {f"{tile}.{part}" for tile in TILES} if part else {d.name}
        changed = {other.name for other in DIMENSIONS if other.of(made) != other.of(usual)}
        assert d.name in changed and changed <= others
    reached = {(d.name, d.of(made)) for d, made in steps}
    wanted = {"cpu": ("matrix_workers", 2), "hopper": ("gate_up.rows", 64), "nccl": ("received", "again")}
    assert wanted[at.backend] in reached


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gate_up.stages=5", "gate_up.stages is 5: tiles of 128 x 256, depth 64, then take 278568 bytes of shared"),
        ("down.depth=128", "down.stages is 4: tiles of 128 x 256, depth 128"),
        ("weight_gradient.warps=4", "weight_gradient.warps is 4: each thread then has 256 values of a tile of 128"),
        ("transfer=copy,send_order=expert", "send_order is 'expert', but transfer='copy' sends all tokens"),
        (
            "gate_up.rows=64,down.rows=64,weight_gradient.depth=128,weight_gradient.columns=64",
            "weight_gradient.depth is 128 and gate_up.rows 64; segments, multiples of 64, are walked in such steps",
        ),
    ],
)
def test_what_cannot_run_on_a_gpu_is_known_before_it_is_compiled(text, says):
    cfg = MoEConfig(hidden=512, ffn=256, num_experts=8, top_k=2, max_tokens_per_rank=4096)
    usual = default_schedule("hopper", cfg, 2)
    schedule = parse_schedule(text, usual)
    (reason,) = is_valid(schedule, cfg, 2, "hopper")
    assert reason.startswith(says)
    fits = {"gate_up.stages=5": "gate_up.columns=64", "weight_gradient.warps=4": "weight_gradient.columns=128"}
    for changed, more in fits.items():
        assert is_valid(parse_schedule(f"{changed},{more}", usual), cfg, 2, "hopper") == []


def test_the_page_is_up_to_date():
    """`python docs/schedule.py` writes it."""
    path = Path(__file__).parents[2] / "docs" / "schedule.py"
    spec = importlib.util.spec_from_file_location("docs_schedule", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.PAGE.read_text() == made.page()
