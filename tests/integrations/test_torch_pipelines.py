"""torch.distributed.pipelining around layers that are expert parallel inside each stage."""

import case
import pytest
import torch
from case import config
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

import uniep

LAYERS, MICRO_BATCHES = 4, 4
G = torch.Generator().manual_seed(0)
X, TARGET = (torch.randn(2, 8, 64, generator=G) for _ in "xy")  # of the two ranks of an EP group
SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2}
"""Stages of a rank."""


def loss_of(y, target):
    return (y - target).square().sum()


def layer(workspace, number):
    return uniep.nn.MoE(workspace.cfg, workspace=workspace, seed=number)


def grads_of(layers):
    return {n: {name: p.grad.clone() for name, p in one.named_parameters()} for n, one in layers.items()}


def piped(world, name):
    """Gradients of this rank's layers, by layer; two stages' ranks, each with an EP group of two."""
    mesh, stages_here = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep")), SCHEDULES[name]
    stage, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    with uniep.Workspace(config(), mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
        count, layers, stages = 2 * stages_here, {}, []
        for number in range(stage, count, 2):
            mine = range(number * LAYERS // count, (number + 1) * LAYERS // count)
            layers |= {n: layer(workspace, n) for n in mine}
            module = nn.Sequential(*(layers[n] for n in mine))
            stages.append(pipelining.PipelineStage(module, number, count, torch.device("cpu"), group=group))
        schedule = pipelining.schedules.get_schedule_class(name)(
            stages if stages_here > 1 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=loss_of, scale_grads=False
        )
        x, target = X[workspace.rank], TARGET[workspace.rank]
        schedule.step(*[x] * (stage == 0), **({"target": target} if stage else {}))
        return workspace.rank, grads_of(layers)


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipelines(pool, name):
    """Expert gradients are complete over the EP group; the router's are those of this rank's tokens."""
    with uniep.Workspace(config(), device="cpu") as workspace:
        layers = {n: layer(workspace, n) for n in range(LAYERS)}
        model, parts = nn.Sequential(*layers.values()), []
        for x, target in zip(X, TARGET, strict=True):
            for micro_batch in zip(x.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES), strict=True):
                loss_of(model(micro_batch[0]), micro_batch[1]).backward()
            parts.append(grads_of(layers))
        first, both = parts
    for rank, found in pool.run(piped, name):
        assert len(found) == LAYERS // 2
        for n, grads in found.items():
            for what, g in grads.items():
                if what == "router":
                    want = both[n][what] - first[n][what] if rank else first[n][what]
                else:
                    want = both[n][what].chunk(2)[rank]
                torch.testing.assert_close(g, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
