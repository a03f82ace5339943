"""A model of your own with the same bits at every EP size: the whole training step, of public functions.

    torchrun --nproc-per-node 1 examples/equal_bits.py --out run-1
    torchrun --nproc-per-node 4 examples/equal_bits.py --out run-4
    uniep diff run-1 run-4                    # identical: parameters, gradients, optimizer states, loss and norm

The global batch is four shards; a rank has one, two or all of them.  Dense layers run shard by shard, so that an
operator sees the same shapes at every EP size, and what they add is added in the order of the shards.  The MoE call
takes the rank's shards together: its rows are in the order of the batch.  docs/integrations/torch.md ("Whole steps")
says which sum has which order.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import uniep
from uniep.integrations.torch import (
    clip_grad_norm_,
    of_shard,
    reduce_dense_gradients,
    split_parameters,
    sum_over_shards,
)
from uniep.nn import DigestLog

SHARDS, TOKENS, WORDS = 4, 96, 128  # of the batch; of a shard; of the vocabulary


class Model(nn.Module):
    """Stands for yours.  x and the result are lists, with an entry for each shard of this rank."""

    def __init__(self, cfg: uniep.MoEConfig, workspace: uniep.Workspace) -> None:
        super().__init__()
        torch.manual_seed(0)  # alike on every rank
        self.embed, self.norm = nn.Embedding(WORDS, cfg.hidden), nn.RMSNorm(cfg.hidden)
        self.moe = uniep.nn.MoE(cfg, workspace=workspace)
        self.head = nn.Linear(cfg.hidden, WORDS)

    @staticmethod
    def forward_shards(shards: list[Model], tokens: list[Tensor]) -> list[Tensor]:
        """shards: for each shard the model that has its dense gradients; tokens (T,).  -> logits (T, WORDS)."""
        x = [m.embed(t) for m, t in zip(shards, tokens, strict=True)]
        normed = [m.norm(xs) for m, xs in zip(shards, x, strict=True)]
        ids, weights = zip(*(m.moe.route(ns) for m, ns in zip(shards, normed, strict=True)), strict=True)
        y = shards[0].moe.experts(torch.cat(normed), torch.cat(ids), torch.cat(weights))
        parts = y.split([len(t) for t in tokens])
        return [m.head(xs + part) for m, xs, part in zip(shards, x, parts, strict=True)]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", default="run", help="folder for the digests that uniep diff compares")
    made.add_argument("--steps", type=int, default=5)
    args = made.parse_args()
    dist.init_process_group("gloo")
    rank, ranks, everyone = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    if SHARDS % ranks:
        made.error(f"{ranks} ranks cannot share {SHARDS} shards evenly; use 1, 2 or 4")
    mine = range(rank * SHARDS // ranks, (rank + 1) * SHARDS // ranks)
    cfg = uniep.MoEConfig(
        hidden=64, ffn=96, num_experts=8, top_k=2, max_tokens_per_rank=SHARDS * TOKENS, dtype=torch.float32
    )
    with uniep.Workspace(cfg, everyone, device="cpu") as workspace, DigestLog(args.out) as log:
        model = Model(cfg, workspace)
        shards = [of_shard(model) for _ in mine]
        dense, experts = split_parameters(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # element by element
        for step in range(args.steps):
            draw = torch.Generator().manual_seed(step)
            batch = torch.randint(
                WORDS, (SHARDS, TOKENS + 1), generator=draw
            )  # of all ranks, the same at every EP size
            logits = Model.forward_shards(shards, [batch[s, :-1] for s in mine])
            losses = [  # each shard's part of the global mean
                F.cross_entropy(out, batch[s, 1:], reduction="sum") / (SHARDS * TOKENS)
                for out, s in zip(logits, mine, strict=True)
            ]
            torch.autograd.backward(losses)  # expert gradients are complete
            reduce_dense_gradients(model, shards, everyone)
            norm = clip_grad_norm_(dense, experts, 1.0, everyone, independent=True)
            (loss,) = sum_over_shards([[part.detach()] for part in losses], everyone)
            log.write(step, model, optimizer=optimizer, loss=loss, norm=norm)
            optimizer.step()
            for part in (model, *shards):
                part.zero_grad(set_to_none=True)
            if rank == 0:
                print(f"step {step}  loss {loss:.6f}  norm {norm:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
