"""A small Qwen3-MoE of torchtitan, trained on this file with FSDP2, and its experts spread over the ranks by uniep.

    pip install 'torchtitan>=0.3,<0.4'
    torchrun --nproc-per-node 2 examples/torchtitan_train.py

The same command trains on GPUs, one per process, where there are any.  It calls what torchtitan's trainer calls; with
the trainer itself the two overrides go to its command line:

    python -m torchtitan.train --module qwen3 --config ... --override.imports \\
        'uniep.integrations.torchtitan.routed_experts={"max_tokens_per_rank": 8192}' \\
        uniep.integrations.torchtitan.selective_ac
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import torchtitan.tools.utils as tools
from torch import nn
from torch.distributed.fsdp import FSDPModule

if not torch.cuda.is_available():  # torchtitan takes it for granted
    tools.device_type, tools.device_module = "cpu", torch.cpu

from torchtitan.components.checkpoint_utils import (
    get_flat_optim_state_dict,
    init_optim_state,
    load_flat_optim_state_dict,
)
from torchtitan.config import CompileConfig, OverrideConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as distributed
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3 import parallelize_qwen3, qwen3_configs
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from uniep.integrations.torchtitan import free, selective_ac, status

LENGTH, SEQUENCES = 64, 8


def small_config(layers: int):
    """Of Qwen3's debug model, with 8 experts and an attention that CPUs have, too."""
    config = qwen3_configs["debugmodel_moe"](attn_backend="flex")
    config.layers = config.layers[:layers]
    for block in config.layers:
        block.attention.inner_attention = ScaledDotProductAttention.Config()
        moe, routed = block.moe, block.moe.routed_experts
        moe.num_experts = moe.router.num_experts = moe.router.gate.out_features = 8
        routed.inner_experts.num_experts = routed.token_dispatcher.num_experts = 8
        moe.router.top_k = routed.token_dispatcher.top_k = 2
        routed.inner_experts.hidden_dim = 256
    return config


def build(layers: int, parallelism: ParallelismConfig, dims: ParallelDims) -> nn.Module:
    """As torchtitan's trainer does it: shard the config, override it, build without memory, parallelize, initialise."""
    config = small_config(layers)
    set_qwen3_sharding_config(config, enable_sp=True, enable_ep=dims.ep > 1)
    experts = ("uniep.integrations.torchtitan.routed_experts", {"max_tokens_per_rank": SEQUENCES * LENGTH})
    apply_overrides(OverrideConfig(imports=[experts]), config)
    with torch.device("meta"):
        model = config.build()
    model = parallelize_qwen3(
        model,
        parallel_dims=dims,
        training=TrainingConfig(),  # parameters in fp32, computed in bf16
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=selective_ac(SelectiveAC.Config()),
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule) and tools.device_type == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply on the way
    model.to_empty(device=tools.device_type)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ep", type=int, help="ranks that the experts are split over; default: all")
    parser.add_argument("--load", type=Path, help="checkpoint to go on from, of any number of ranks")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint at the end")
    options = parser.parse_args()

    device = torch.device(tools.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=ranks,
        expert_parallel_degree=options.ep or ranks,
        spmd_backend="partial_dtensor",
    )
    dims = ParallelDims.from_config(parallelism, ranks)
    dims.build_mesh()
    distributed.set_spmd_backend(parallelism.spmd_backend)
    model = build(options.layers, parallelism, dims)
    if rank == 0:
        print(status(model))

    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3, foreach=False)
    if options.load:
        init_optim_state(optimizer)
        state = {"model": model.state_dict(), "optimizer": get_flat_optim_state_dict(optimizer)}
        dcp.load(state, checkpoint_id=options.load)
        model.load_state_dict(state["model"])
        load_flat_optim_state_dict(optimizer, state["optimizer"])
    text = torch.tensor(list(Path(__file__).read_bytes()))
    draw = torch.Generator().manual_seed(1 + rank)
    began = time.perf_counter()
    for step in range(options.steps + 1):
        starts = torch.randint(len(text) - LENGTH - 1, (SEQUENCES, 1), generator=draw)
        tokens = text[starts + torch.arange(LENGTH + 1)].to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        (loss / ranks).backward()  # torchtitan's FSDP2 adds gradients up
        norm = distributed.clip_grad_norm_(list(model.parameters()), 1.0, ep_enabled=dims.ep_enabled)
        optimizer.step()
        if step % 20 == 0:
            dist.all_reduce(total := loss.detach().clone())
            if rank == 0:
                seconds = time.perf_counter() - began
                print(f"step {step:3d}  loss {total / ranks:.3f}  gradient norm {norm:.2f}  {seconds:.0f} s")
    if options.save:
        state = {"model": model.state_dict(), "optimizer": get_flat_optim_state_dict(optimizer)}
        dcp.save(state, checkpoint_id=options.save)
    free(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
