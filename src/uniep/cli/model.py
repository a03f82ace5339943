"""The demo's language model, and how to train it so that its bits do not depend on how ranks share the work.

The layer's promise covers the MoE call.  For a whole training step to keep it, everything around the
call must be computed in units that stay the same when ranks are added (`uniep.integrations.torch`):

* The global batch is NUM_SHARDS fixed shards; a rank owns NUM_SHARDS / ranks consecutive ones.
* Dense layers run shard by shard, so every operator sees the same shapes at every EP size.
* The MoE call takes all shards of the rank together.  Its rows are in the canonical order (source rank,
  token, slot), which for consecutive shards is the order of the global batch.
* Each shard has its own gradients of the dense parameters (`of_shard`).  They are added in shard order on
  every rank, and so is the loss (`reduce_dense_gradients`, `sum_over_shards`).
* Experts of several EP groups: `gradient_shards` blocks of ranks, `Workspace(copies=)`.
* The norm of the gradients is summed in an order of its own (`clip_grad_norm_(independent=True)`).

A data-parallel all-reduce would add the same numbers in an order that depends on the number of ranks.

Shape suffixes: B sequences, S bytes, D hidden, T = B*S tokens, K top-k, V = 256.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import uniep
from uniep.integrations.torch import clip_grad_norm_, of_shard, reduce_dense_gradients, sum_over_shards

NUM_SHARDS = 4
VOCABULARY = 256
BALANCE = 0.02
"""Weight of the routers' imbalance in the loss, next to the cross entropy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The whole model: `layers` blocks of attention and MoE over `context` bytes."""

    layers: int = 4
    heads: int = 4
    context: int = 128
    sequences_per_shard: int = 4
    hidden: int = 128
    ffn: int = 192
    num_experts: int = 8
    top_k: int = 2
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    router: uniep.nn.RouterConfig | None = None
    gradient_shards: int = 1

    @property
    def tokens_per_shard(self) -> int:
        return self.sequences_per_shard * self.context

    def moe(self, ranks: int) -> uniep.MoEConfig:
        """ranks: of all EP groups."""
        return uniep.MoEConfig(
            hidden=self.hidden,
            ffn=self.ffn,
            num_experts=self.num_experts,
            top_k=self.top_k,
            max_tokens_per_rank=self.tokens_per_shard * NUM_SHARDS // ranks,
            dtype=self.dtype,
            gradient_shards=self.gradient_shards,
        )


class Block(nn.Module):
    """Causal self-attention, then experts; both read RMS-normalised inputs and add to the residual stream."""

    def __init__(self, cfg: ModelConfig, workspace: uniep.Workspace, seed: int) -> None:
        super().__init__()
        self.heads = cfg.heads
        self.attention_norm = nn.RMSNorm(cfg.hidden)
        self.qkv = nn.Linear(cfg.hidden, 3 * cfg.hidden, bias=False)
        self.out = nn.Linear(cfg.hidden, cfg.hidden, bias=False)
        self.moe_norm = nn.RMSNorm(cfg.hidden)
        self.moe = uniep.nn.MoE(workspace.cfg, workspace=workspace, router=cfg.router, seed=seed)

    def attend(self, x_BSD: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x_BSD)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x_BSD + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Byte-level decoder.  fp32 parameters; the experts compute in the Workspace's dtype."""

    def __init__(self, cfg: ModelConfig, workspace: uniep.Workspace) -> None:
        super().__init__()
        torch.manual_seed(cfg.seed)
        self.workspace = workspace
        self.embedding = nn.Embedding(VOCABULARY, cfg.hidden)
        self.embedding_before = nn.Embedding(VOCABULARY, cfg.hidden)
        self.position = nn.Parameter(torch.randn(cfg.context, cfg.hidden) * 0.1)
        seeds = (cfg.seed * 1000 + layer for layer in range(cfg.layers))
        self.blocks = nn.ModuleList(Block(cfg, workspace, seed) for seed in seeds)
        self.norm = nn.RMSNorm(cfg.hidden)
        self.head = nn.Linear(cfg.hidden, VOCABULARY, bias=False)
        self._shrink(cfg)
        self.to(workspace.device, torch.float32)

    @torch.no_grad()
    def _shrink(self, cfg: ModelConfig) -> None:
        """Residual branches start small, scaled by depth (GPT-2); logits start near uniform: fast early learning."""
        self.embedding.weight.mul_(0.5)
        self.embedding_before.weight.mul_(0.5)
        self.head.weight.mul_(0.3)
        for name, parameter in self.named_parameters():
            if name.endswith((".out.weight", ".experts.w2")):
                parameter.mul_((2 * cfg.layers) ** -0.5)

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Each byte, the byte before it, and its position."""
        before_BS = F.pad(tokens_BS[:, :-1], (1, 0))
        return self.embedding(tokens_BS) + self.embedding_before(before_BS) + self.position

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """Expert parameters: each rank holds those of its own experts."""
        return {name: p for name, p in self.named_parameters() if ".experts." in name}

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """Dense parameters: each rank holds all of them."""
        return {name: p for name, p in self.named_parameters() if ".experts." not in name}


def forward(twins: list[Model], tokens: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(logits (B, S, V), imbalance) of each of this rank's shards; tokens are (B, S).  One MoE call per layer."""
    imbalance = [torch.zeros((), device=t.device) for t in tokens]
    x = [m.embed(t) for m, t in zip(twins, tokens, strict=True)]
    for blocks in zip(*(m.blocks for m in twins), strict=True):
        x = [b.attend(xs) for b, xs in zip(blocks, x, strict=True)]
        n = [b.moe_norm(xs).flatten(0, 1) for b, xs in zip(blocks, x, strict=True)]
        routes = [b.moe.route(ns) for b, ns in zip(blocks, n, strict=True)]
        imbalance = [
            total + _imbalance(b.moe, ns, ids)
            for total, b, ns, (ids, _) in zip(imbalance, blocks, n, routes, strict=True)
        ]
        ids_TK, weights_TK = (torch.cat(part) for part in zip(*routes, strict=True))
        experts = blocks[0].moe.experts
        with torch.autocast(x[0].device.type, experts.cfg.dtype, enabled=experts.cfg.dtype != torch.float32):
            y_TD = experts(torch.cat(n), ids_TK, weights_TK)
        parts = y_TD.split([ns.shape[0] for ns in n])
        x = [xs + part.view_as(xs) for xs, part in zip(x, parts, strict=True)]
    return [m.head(m.norm(xs)) for m, xs in zip(twins, x, strict=True)], imbalance


def _imbalance(moe: uniep.nn.MoE, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
    """1 if a shard's slots are spread evenly over the experts, E if all go to one; pushes the router only."""
    weight_ED = moe.router.weight if isinstance(moe.router, uniep.nn.Router) else moe.router
    num_experts = weight_ED.shape[0]
    share_E = torch.bincount(ids_TK.flatten(), minlength=num_experts) / ids_TK.numel()
    mean_E = torch.softmax(x_TD.detach() @ weight_ED.T, dim=-1).mean(0)
    return num_experts * (share_E * mean_E).sum()


def losses(logits: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """Each shard's part of the global mean cross entropy."""
    count = NUM_SHARDS * targets[0].numel()
    pairs = zip(logits, targets, strict=True)
    return [F.cross_entropy(a.flatten(0, 1), b.flatten(), reduction="sum") / count for a, b in pairs]


class Trainer:
    """AdamW on a Model.  `step` is one optimizer step on the global batch; `evaluate` only its loss.

    group: the ranks that share the shards, in this order: of the Workspace's EP group (the default), or of that and of
        the copies of its experts.
    max_norm: the gradients' norm that they are scaled down to; None: they are not.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        workspace: uniep.Workspace,
        learning_rate: float,
        group: dist.ProcessGroup | None = None,
        max_norm: float | None = None,
    ) -> None:
        self.workspace, self.max_norm = workspace, max_norm
        self.group = group if group is not None else workspace.group
        ranks, rank = (self.group.size(), self.group.rank()) if self.group is not None else (1, 0)
        self.model = Model(cfg, workspace)
        per_rank = NUM_SHARDS // ranks
        self.shards = range(rank * per_rank, (rank + 1) * per_rank)
        self.twins = [of_shard(self.model) for _ in self.shards]
        self.dense = self.model.dense_parameters()
        self.experts = self.model.expert_parameters()
        # One parameter at a time: a fused loop would split the list in a way that depends on the EP size.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), learning_rate, betas=(0.9, 0.95), foreach=False)
        self.logits: list[Tensor] = []
        self.norm = torch.zeros(())

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model, including the other ranks' experts."""
        experts = sum(p.numel() for p in self.experts.values()) * self.workspace.ep_size
        return experts + sum(p.numel() for p in self.dense.values())

    def step(self, batch: list[Tensor]) -> Tensor:
        """batch: NUM_SHARDS tensors (B, S+1) of bytes.  Returns the global mean loss.

        Afterwards `.grad` of every parameter is the global gradient, `logits` are this rank's shards', and `norm` is
        the gradients' norm before they were scaled.
        """
        for part in (*self.twins, self.model):
            part.zero_grad(set_to_none=True)
        logits, imbalance, loss = self._run(batch)
        self.logits = [part.detach() for part in logits]
        torch.autograd.backward([a + BALANCE / NUM_SHARDS * b for a, b in zip(loss, imbalance, strict=True)])
        reduce_dense_gradients(self.model, self.twins, self.group)
        if self.max_norm is not None:
            parameters = list(self.dense.values()), list(self.experts.values())
            self.norm = clip_grad_norm_(*parameters, self.max_norm, self.workspace.group, independent=True)
        self.optimizer.step()
        return sum_over_shards([[value] for value in loss], self.group)[0]

    @torch.no_grad()
    def evaluate(self, batch: list[Tensor]) -> Tensor:
        """The global mean loss.  Collective like `step`: every rank calls it the same number of times."""
        loss = self._run(batch)[2]
        return sum_over_shards([[value] for value in loss], self.group)[0]

    def experts_of(self, layer: int) -> uniep.nn.Experts:
        """The `Experts` modules, which run for all of this rank's shards."""
        block = self.twins[0].blocks[layer]
        assert isinstance(block, Block)
        return block.moe.experts

    def _run(self, batch: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """(logits, imbalance, loss) of each of this rank's shards."""
        mine = [batch[shard].to(self.workspace.device) for shard in self.shards]
        logits, imbalance = forward(self.twins, [b[:, :-1] for b in mine])
        return logits, imbalance, losses(logits, [b[:, 1:] for b in mine])
