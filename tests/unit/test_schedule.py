"""Schedule fields that an executor does not know are refused by name, never ignored."""

import dataclasses

import pytest
import torch

from uniep import ConfigError, MoEConfig, Schedule, Tile, Workspace
from uniep.schedule import DEFAULT_SCHEDULES, refuse_invalid

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
