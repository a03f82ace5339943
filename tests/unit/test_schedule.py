"""Schedule fields that an executor does not know are refused by name, never ignored."""

import pytest
import torch

from uniep import ConfigError, MoEConfig, Schedule, Tile, Workspace

CFG = MoEConfig(hidden=8, ffn=8, num_experts=2, top_k=1, max_tokens_per_rank=4, dtype=torch.float32)


@pytest.mark.parametrize(
    ("field", "value"), [("operand", "expanded"), ("push_programs", 3), ("weight_gradient", Tile(columns=128))]
)
def test_cpu_refuses_gpu_fields(field, value):
    with pytest.raises(ConfigError, match=rf"Schedule\.{field} is .*, but backend 'cpu' knows only"):
        Workspace(CFG, device="cpu", schedule=Schedule(**{field: value}))


def test_cpu_takes_its_own():
    own = Schedule(overlap="serial", tile_order="natural", matrix_workers=2, chunk_tokens=32, received="again")
    Workspace(CFG, device="cpu", schedule=own).close()
