"""Activation checkpointing of a layer whose rows are allocated by the last call's need: shapes do not depend on it."""

import contextlib
import functools

import pytest
import torch
from hopper_on_host import host_backends
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import uniep
from uniep.weights import Lora

CFG = uniep.MoEConfig(hidden=64, ffn=64, num_experts=4, top_k=2, max_tokens_per_rank=128, dtype=torch.float16)
TOKENS = 128


def recompute_all():
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)


HOW = {
    "layer": {},
    "flops": {},
    "selective": {"context_fn": recompute_all},
    "lora": {},
    "compiled": {},
}


@pytest.mark.parametrize("how", HOW)
def test_recomputed_after_other_calls(how):
    make = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=make).half() / 8

    with uniep.Workspace(CFG, device="cpu") as workspace:
        workspace._backend.close()
        (workspace._backend,) = host_backends(CFG, 1)
        x_TD, w13, w2 = (
            t.requires_grad_(how != "lora") for t in (normal(TOKENS, 64), normal(4, 128, 64), normal(4, 64, 64))
        )
        factors = [normal(4, 8, 64), normal(4, 128, 8), normal(4, 8, 64), normal(4, 64, 8)]
        lora = None
        if how == "lora":
            factors = [t.requires_grad_() for t in factors]
            lora = Lora(w13=tuple(factors[:2]), w2=tuple(factors[2:]), scale=2.0)
        leaves = factors if how == "lora" else [x_TD, w13, w2]
        few = torch.tensor([[0, 3]]).expand(TOKENS, 2).contiguous()
        many = torch.stack([torch.randperm(4, generator=make)[:2] for _ in range(TOKENS)])
        layer = functools.partial(uniep.moe, lora=lora, workspace=workspace)

        if how == "compiled":
            layer = torch.compile(layer, backend="aot_eager")

        def call(ids_TK, checkpointed):
            given = x_TD, ids_TK, torch.ones(TOKENS, 2), w13, w2
            return checkpoint(layer, *given, use_reentrant=False, **HOW[how]) if checkpointed else layer(*given)

        def gradients(checkpointed):
            with FlopCounterMode(display=False) if how == "flops" else contextlib.nullcontext():
                call(few, False)
                allocated = workspace.backend.planner.allocate
                y_TD = call(few, checkpointed)
                call(many, False)
                assert workspace.backend.planner.allocate != allocated
                return torch.autograd.grad(y_TD.float().square().sum(), leaves)

        assert all(map(torch.equal, gradients(True), gradients(False)))
