"""A tiny MoE language model trained on its own source, with experts spread over the ranks of torchrun.

    torchrun --nproc-per-node 2 examples/train_tiny.py

Each rank has its own tokens.  Gradients of experts are complete: the layer collected them from all ranks.  Gradients
of the dense layers are averaged by an ordinary all-reduce.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import uniep


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    cfg = uniep.MoEConfig(hidden=64, ffn=128, num_experts=8, top_k=2, max_tokens_per_rank=512, dtype=torch.float32)

    with uniep.Workspace(cfg, dist.group.WORLD, device="cpu") as workspace:
        embed, head = torch.nn.Embedding(256, cfg.hidden), torch.nn.Linear(cfg.hidden, 256)
        moe = uniep.nn.MoE(cfg, workspace=workspace)
        dense = [*embed.parameters(), *head.parameters(), moe.router]
        optimizer = torch.optim.AdamW([*dense, *moe.experts.parameters()], lr=1e-2)
        draw = torch.Generator().manual_seed(1 + dist.get_rank())

        for step in range(101):
            at = torch.randint(len(text) - 1, (512,), generator=draw)
            x = embed(text[at])
            # Every rank's loss is its share of the global mean, so gradients add up over the ranks.
            loss = F.cross_entropy(head(x + moe(x)), text[at + 1]) / dist.get_world_size()
            optimizer.zero_grad()
            loss.backward()
            for parameter in dense:
                dist.all_reduce(parameter.grad)
            optimizer.step()
            dist.all_reduce(total := loss.detach().clone())
            if dist.get_rank() == 0 and step % 20 == 0:
                print(f"step {step:3d}  loss {total:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
