"""LoRA on experts inside DDP, FSDP2 and checkpoints: its factors have owners like experts."""

import case
import pytest
import test_torch
import torch
import torch.distributed.checkpoint as dcp
from case import config, equal_bits
from torch.distributed.device_mesh import init_device_mesh

import uniep
from uniep.integrations import torch as uniep_torch


def adapted(world, how, folder):
    """(names, whole factors after two steps at EP 2 x 2, and as loaded and trained on at EP 4 x 1)."""
    cfg, found = config(), []
    for ep, load in ((2, False), (4, True)):
        mesh = init_device_mesh("cpu", (world.size // ep, ep), mesh_dim_names=("dp", "ep"))
        everyone = init_device_mesh("cpu", (world.size,))
        with uniep.Workspace(cfg, mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as workspace:
            model = test_torch.Model(workspace)
            names = uniep.nn.add_lora(model, r=8, seed=3)
            for name, p in model.named_parameters():
                p.requires_grad_("lora" in name or "head" in name)
            model = test_torch.wrapped(how, model, mesh, everyone)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, foreach=False, **test_torch.ADAMW)
            state = {"train": uniep_torch.TrainState(model, optimizer, mesh["ep"])}
            if load:
                dcp.load(state, checkpoint_id=folder)
            for step, ((x, target), tokens) in enumerate(zip(test_torch.batches(), test_torch.TOKENS, strict=True)):
                if load == (step < 2):
                    continue
                optimizer.zero_grad()
                mine = test_torch.share(world.rank, tokens)
                (test_torch.loss_of(model, x[mine], target[mine], len(x)) * world.size).backward()
                optimizer.step()
                if step == 1:
                    dcp.save(state, checkpoint_id=folder)
                    break
            whole = test_torch.all_whole(model, lambda p: p, mesh, 8)
            found.append({name: whole[name] for name in names})
    return found


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_lora_with_wrappers_and_checkpoints(pool, how, tmp_path):
    """Against the same steps on one rank with all tokens."""
    (saved, resumed), *others = pool.run(adapted, how, str(tmp_path))
    for theirs in others:
        for name, value in theirs[1].items():
            equal_bits(value, resumed[name], name)
    cfg = config()
    with uniep.Workspace(cfg, device="cpu") as workspace:
        model = test_torch.Model(workspace)
        names = uniep.nn.add_lora(model, r=8, seed=3)
        for name, p in model.named_parameters():
            p.requires_grad_("lora" in name or "head" in name)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **test_torch.ADAMW)
        for step, (x, target) in enumerate(test_torch.batches()):
            optimizer.zero_grad()
            test_torch.loss_of(model, x, target, len(x)).backward()
            optimizer.step()
            for name in names if step > 0 else ():
                torch.testing.assert_close(
                    (saved, resumed)[step - 1][name], model.get_parameter(name), rtol=1e-3, atol=1e-5
                )
