"""A small MoE transformer trained on its own source with FSDP2 and expert parallelism.

    torchrun --nproc-per-node 4 examples/fsdp2_train.py

On CPU processes or on GPUs, as many as torchrun starts, a multiple of --ep: ranks form a mesh (dp, ep).  Experts are
split over "ep" and then sharded over "dp"; all other parameters are sharded over all ranks.  What --save wrote, --load
reads with other numbers of processes and another --ep, too, and goes on with the step and the data behind it.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import uniep
from uniep.integrations.torch import TrainState, clip_grad_norm_, fully_shard_experts, split_parameters

HIDDEN, HEADS, LENGTH, SEQUENCES = 128, 4, 64, 8


class Block(nn.Module):
    """Causal attention, then the MoE layer."""

    def __init__(self, workspace: uniep.Workspace, seed: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = uniep.nn.MoE(workspace.cfg, workspace=workspace, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], HEADS, -1).transpose(1, 2).chunk(3, dim=-1)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    """Bytes (sequences, length) in, logits of each next byte out: (sequences * length, 256)."""

    def __init__(self, workspace: uniep.Workspace, layers: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block(workspace, seed) for seed in range(layers))
        self.head = nn.Sequential(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ep", type=int, default=2, help="ranks that the experts are split over")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--load", type=Path, help="checkpoint to go on from")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint at the end")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 0))
    if not ranks:
        parser.error("start it with torchrun --nproc-per-node N")
    if options.ep < 1 or ranks % options.ep:
        parser.error(f"--ep is {options.ep}; it must divide the number of processes, {ranks}")

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh(device.type, (ranks // options.ep, options.ep), mesh_dim_names=("dp", "ep"))
    everyone = init_device_mesh(device.type, (ranks,))

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cfg = uniep.MoEConfig(
        hidden=HIDDEN, ffn=128, num_experts=8, top_k=2, max_tokens_per_rank=SEQUENCES * LENGTH, dtype=dtype
    )
    with uniep.Workspace(cfg, mesh["ep"], device=device) as workspace:
        torch.manual_seed(0)
        model = Model(workspace, options.layers).to(device, torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        fully_shard_experts(model, mesh, mp_policy=policy)
        for block in model.blocks:
            fully_shard(block, mesh=everyone, mp_policy=policy)
        fully_shard(model, mesh=everyone, mp_policy=policy)
        dense, experts = split_parameters(model)
        optimizer = torch.optim.AdamW([{"params": dense}, {"params": experts}], lr=3e-3)
        state = {"train": TrainState(model, optimizer, mesh["ep"]), "step": 0}
        if options.load:
            dcp.load(state, checkpoint_id=options.load)
            if rank == 0:
                print(f"resumed at step {state['step']}")

        text = torch.tensor(list(Path(__file__).read_bytes()))
        began, last = time.perf_counter(), state["step"] + options.steps - 1
        for step in range(state["step"], last + 1):
            draw = torch.Generator().manual_seed(step * ranks + rank)  # the step is the position in the data
            starts = torch.randint(len(text) - LENGTH - 1, (SEQUENCES, 1), generator=draw)
            tokens = text[starts + torch.arange(LENGTH + 1)].to(device)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float(), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            norm = clip_grad_norm_(dense, experts, 1.0, mesh["ep"])
            optimizer.step()
            if step % 20 == 0 or step == last:
                dist.all_reduce(total := loss.detach().clone())
                if rank == 0:
                    seconds = time.perf_counter() - began
                    print(f"step {step:3d}  loss {total / ranks:.3f}  gradient norm {norm:.2f}  {seconds:.0f} s")
        state["step"] += options.steps
        if options.save:
            dcp.save(state, checkpoint_id=options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
