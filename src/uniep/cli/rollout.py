"""`uniep verify --rl`: a policy gives the same bits when it is sampled and when it is trained.

The model is the demo's language model.  Here all its operators are batch-invariant: a token's result depends only on
its own sequence.  It is *sampled* at one EP size, one position of all its sequences at a time, with a cache of keys and
values: a call of the MoE layer has as many tokens as the rank has sequences.  It is *trained* at another EP size, all
positions together, with activations saved or recomputed, and with its own routing or the sampler's.
    products   `uniep.nn.linear`, also for the scores and values of attention: over all CONTEXT positions, zeros for
               those that are not there yet
    sums       RMS norm, softmax: adjacent pairs, rows padded by zeros to a power of two (`row_sum`)
    routing    `uniep.nn.Router`; experts `uniep.moe`

Shape suffixes: B sequences, S positions, C = CONTEXT, D hidden, H heads, V = 256.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import uniep
from uniep.cli.bits import NOT_IDENTICAL, BitTable, Digests, digest, merge
from uniep.cli.launch import World
from uniep.cli.model import VOCABULARY, Block, Model, ModelConfig
from uniep.cli.progress import progress
from uniep.nn import RoutingRecord, linear, record_routing, replay_routing
from uniep.nn.invariant import ROWS
from uniep.nn.router_ops import row_sum

CONTEXT = 64
PROMPT = 8
HEADS = 2
QUANTITIES = ("tokens", "log-probs", "choice")
GRADIENTS = ("log-probs", "dw13", "dw2")


def check(cfg: uniep.MoEConfig, tokens: int, sizes: Sequence[int]) -> None:
    """Raise typer.BadParameter, which names the option, unless every EP size can share whole sequences."""
    if tokens % (CONTEXT * max(sizes)) or any(max(sizes) % size for size in sizes):
        raise typer.BadParameter(
            f"with --rl, {tokens} tokens are sequences of {CONTEXT}, which EP {', '.join(map(str, sizes))} must share "
            f"evenly; use a multiple of {CONTEXT * max(sizes)}",
            param_hint="--tokens",
        )
    if cfg.hidden % HEADS:
        raise typer.BadParameter(f"{cfg.hidden} is not a multiple of the {HEADS} heads", param_hint="--hidden")


class Cache:
    """Keys and values of one layer, (B, H, C, D / H), zeros after the last position."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extended(self, k_BHSD: Tensor, v_BHSD: Tensor) -> tuple[Tensor, Tensor]:
        """Append these; returns all keys and values."""
        if self.keys is not None and self.values is not None:
            k_BHSD, v_BHSD = torch.cat([self.keys, k_BHSD], 2), torch.cat([self.values, v_BHSD], 2)
        self.keys, self.values = k_BHSD, v_BHSD
        k_BHCD, v_BHCD = (F.pad(t, (0, 0, 0, CONTEXT - t.shape[2])) for t in (k_BHSD, v_BHSD))
        return k_BHCD, v_BHCD


def _norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    mean = row_sum(x * x)[..., None] / x.shape[-1]
    return x / torch.sqrt(mean + torch.finfo(x.dtype).eps) * norm.weight


def _softmax(scores_SC: Tensor) -> Tensor:
    powers_SC = torch.exp(scores_SC - scores_SC.detach().amax(-1, keepdim=True))
    return powers_SC / row_sum(powers_SC)[:, None]


def _attend(block: Block, x_BSD: Tensor, cache: Cache) -> Tensor:
    qkv = linear(_norm(x_BSD, block.attention_norm), block.qkv.weight).unflatten(-1, (3, block.heads, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    start = 0 if cache.keys is None else cache.keys.shape[2]
    k, v = cache.extended(k, v)
    later_SC = (
        torch.arange(CONTEXT, device=x_BSD.device) > torch.arange(q.shape[2], device=x_BSD.device)[:, None] + start
    )
    mixed = []
    for query_SD, key_CD, value_CD in zip(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), strict=True):
        scores_SC = linear(query_SD, key_CD) * query_SD.shape[1] ** -0.5
        mixed.append(linear(_softmax(scores_SC.masked_fill(later_SC, -torch.inf)), value_CD.T))
    together = torch.stack(mixed).unflatten(0, q.shape[:2]).transpose(1, 2).flatten(2)
    return x_BSD + linear(together, block.out.weight)


def logits(model: Model, tokens_BS: Tensor, start: int, caches: list[Cache], recompute: bool = False) -> Tensor:
    """Logits (B, S - start, V) of the positions from `start` on; earlier ones are in the caches."""
    before_BS = F.pad(tokens_BS[:, :-1], (1, 0))
    x = model.embedding(tokens_BS[:, start:]) + model.embedding_before(before_BS[:, start:])
    x = x + model.position[start : tokens_BS.shape[1]]
    dtype = model.workspace.cfg.dtype
    for module, cache in zip(model.blocks, caches, strict=True):
        assert isinstance(module, Block)
        x = _attend(module, x, cache)
        n = _norm(x, module.moe_norm)
        with torch.autocast(n.device.type, dtype, enabled=dtype != torch.float32):
            y = checkpoint(module.moe, n, use_reentrant=False) if recompute else module.moe(n)
        x = x + y
    return linear(_norm(x, model.norm), model.head.weight)


def log_probabilities(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """(B, S) fp32."""
    rows = logits_BSV.flatten(0, 1)
    count = len(rows)
    rows = F.pad(rows, (0, 0, 0, -count % ROWS))  # as in the router: no ragged tail
    highest = rows.detach().amax(-1, keepdim=True)
    log_sum = torch.log(row_sum(torch.exp(rows - highest)))[:, None] + highest
    return (rows - log_sum)[:count].gather(1, targets_BS.reshape(-1, 1)).view(targets_BS.shape)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Sequences (B, C + 1), the log-probabilities of all but the first token (B, C), where tokens went."""

    tokens: Tensor
    log_probs: Tensor
    record: RoutingRecord


@torch.no_grad()
def sample(model: Model, prompts_BS: Tensor, noise_BCV: Tensor) -> Rollout:
    """Continue the prompts with the argmax of logits + noise, one position at a time."""
    tokens_BS, found = prompts_BS[:, :1], []
    caches = [Cache() for _ in model.blocks]
    with record_routing(model) as record:
        for position in range(CONTEXT):
            logits_B1V = logits(model, tokens_BS, position, caches)
            chosen_B1 = (logits_B1V + noise_BCV[:, position : position + 1]).argmax(-1)
            if position + 1 < prompts_BS.shape[1]:
                chosen_B1 = prompts_BS[:, position + 1 : position + 2]
            found.append(log_probabilities(logits_B1V, chosen_B1))
            tokens_BS = torch.cat([tokens_BS, chosen_B1], 1)
    count = len(tokens_BS)
    by_sequence = torch.arange(CONTEXT * count, device=tokens_BS.device).view(CONTEXT, count).T.flatten()
    return Rollout(tokens_BS, torch.cat(found, 1), record.take(by_sequence))


def train(model: Model, rollout: Rollout, replay: bool, recompute: bool) -> tuple[Tensor, RoutingRecord]:
    """(log-probabilities (B, C), the choice) of a policy-gradient step's forward and backward: loss = -sum of log-probs
    times an advantage, here 1 for even and -1 for odd tokens."""
    model.zero_grad()
    tokens_BS, targets_BS = rollout.tokens[:, :-1], rollout.tokens[:, 1:]
    caches = [Cache() for _ in model.blocks]
    with (
        record_routing(model) as record,
        replay_routing(model, rollout.record) if replay else contextlib.nullcontext(),
    ):
        found = log_probabilities(logits(model, tokens_BS, 0, caches, recompute), targets_BS)
        (found * (2 * (targets_BS % 2) - 1)).sum().backward()
    return found.detach(), record


def _model(cfg: uniep.MoEConfig, workspace: uniep.Workspace, seed: int) -> Model:
    shape = ModelConfig(
        layers=2, heads=HEADS, context=CONTEXT, hidden=cfg.hidden, seed=seed,
        router=uniep.nn.RouterConfig(score="sigmoid", selection_bias=True),
    )  # fmt: skip
    return Model(shape, workspace)


def _digests(first: int, tokens_BS: Tensor, log_probs_BC: Tensor, record: RoutingRecord) -> Digests:
    """Digests per sequence; `first` is the number of the first sequence."""
    found: Digests = {}
    choice = torch.stack([ids.view(len(tokens_BS), -1) for ids in record.ids.values()], 1)
    for n, parts in enumerate(zip(tokens_BS, log_probs_BC, choice, strict=True)):
        found |= {(name, f"sequence {first + n}"): digest(t) for name, t in zip(QUANTITIES, parts, strict=True)}
    return found


def _gradients(model: Model) -> Digests:
    """Digests per layer and expert."""
    found: Digests = {}
    for name, parameter in model.expert_parameters().items():
        assert parameter.grad is not None
        first = model.workspace.rank * len(parameter)
        for n, part in enumerate(parameter.grad):
            found["d" + name.rpartition(".")[2], f"{name} expert {first + n}"] = digest(part)
    return found


def compare(
    cfg: uniep.MoEConfig, tokens: int, seed: int, world: World, groups: dict[int, dist.ProcessGroup | None]
) -> list[str]:
    """Print both tables.  Returns, on every rank, the parts that differ."""
    count = tokens // CONTEXT
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(VOCABULARY, (count, PROMPT), generator=draw)
    noise = -torch.log(-torch.log(torch.rand(count, CONTEXT, VOCABULARY, generator=draw).clamp(min=1e-12)))
    describe = f"{count} sequences of {CONTEXT} tokens, 2 layers, hidden {cfg.hidden}, {cfg.num_experts} experts"
    table = BitTable(f"Parts with the bits of EP=1, sampled a position at a time\n{describe}", QUANTITIES)
    steps = BitTable("Parts with the bits of EP=1, trained", GRADIENTS)
    sampled: Rollout | None = None
    with progress(world.console, "sampled and trained", 4 * len(groups)) as done:
        for size, group in groups.items():
            mine: Digests = {}
            rollout = None
            if world.rank < size:
                own = slice(world.rank * count // size, (world.rank + 1) * count // size)
                with uniep.Workspace(cfg, group, device=world.device) as workspace:
                    model = _model(cfg, workspace, seed)
                    rollout = sample(model, prompts[own].to(world.device), noise[own].to(world.device))
                mine = _digests(own.start, rollout.tokens, rollout.log_probs, rollout.record)
                rollout = Rollout(
                    rollout.tokens.cpu(),
                    rollout.log_probs.cpu(),
                    RoutingRecord({name: ids.cpu() for name, ids in rollout.record.ids.items()}),
                )
            table.add(size, f"sampled, {count // size} tokens a call", merge(world.gather(mine)))
            parts = [part for part in world.gather(rollout) if part is not None]
            record = RoutingRecord.cat([part.record for part in parts])
            sampled = Rollout(
                torch.cat([part.tokens for part in parts]), torch.cat([part.log_probs for part in parts]), record
            )
            done()
        assert sampled is not None  # at least EP=1 has run
        for size, group in groups.items():
            for replay, recompute in ((False, False), (True, False), (True, True)):
                mine, gradients = {}, {}
                if world.rank < size:
                    own = slice(world.rank * count // size, (world.rank + 1) * count // size)
                    rows = slice(own.start * CONTEXT, own.stop * CONTEXT)
                    rollout = Rollout(
                        sampled.tokens[own].to(world.device), sampled.log_probs[own], sampled.record.take(rows)
                    )
                    with uniep.Workspace(cfg, group, device=world.device) as workspace:
                        model = _model(cfg, workspace, seed)
                        log_probs, choice = train(model, rollout, replay, recompute)
                        mine = _digests(own.start, rollout.tokens, log_probs, choice)
                        gradients = _gradients(model)
                how = "trained" + ", replayed" * replay + ", recomputed" * recompute
                merged = merge(world.gather(mine))
                table.add(size, how, merged)
                both = {part: value for part, value in merged.items() if part[0] == "log-probs"}
                steps.add(size, how, both | merge(world.gather(gradients)))
                done()
    table.print(world.console)
    steps.print(world.console)
    wrong = table.wrong + steps.wrong
    if not wrong:
        sizes = ", ".join(map(str, groups))
        world.console.print(
            f"[bold green]identical[/bold green]: every bit of log-probabilities, routing and expert gradients, "
            f"sampled at EP {sizes} and trained at EP {sizes}"
        )
    else:
        world.console.print(NOT_IDENTICAL)
    return wrong
