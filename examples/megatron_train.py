"""A tiny GPT of Megatron-Core, trained on this file with the experts of its MoE layers spread over the ranks by uniep.

    pip install 'megatron-core>=0.19,<0.21'
    torchrun --nproc-per-node 2 examples/megatron_train.py --save checkpoint
    torchrun --nproc-per-node 1 examples/megatron_train.py --load checkpoint --steps 0

The same commands train on GPUs, one per process, where there are any.  Without Transformer Engine: layers are
Megatron's own, and Megatron warns about each package that it does without (PYTHONWARNINGS=ignore).  A checkpoint is
Megatron's, too: any expert-parallel size loads it, with uniep or without.
"""

import argparse
import contextlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_config import TransformerConfig

from uniep.integrations.megatron import free, status, use_uniep

HIDDEN, LENGTH, SEQUENCES = 128, 64, 8


def without_cuda() -> None:
    """Megatron asks CUDA for devices, streams and random states; tell it about the CPU."""

    class Random:
        fork = staticmethod(lambda *args: contextlib.nullcontext())

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.current_stream = torch.cuda.synchronize = lambda *device: None
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = Random(), True


def training_state(model: GPTModel, masters: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> dict:
    """The model, its fp32 masters and Adam's averages for Megatron's checkpoint, each split as its parameter is."""
    sharded = model.sharded_state_dict()
    split = get_param_id_to_sharded_param_map(sharded, model.parameters())
    kept = {name: [optimizer.state[master][name] for master in masters] for name in ("exp_avg", "exp_avg_sq")}
    kept["fp32"] = masters
    parts = {
        kind: {n: make_sharded_optimizer_tensor(split[n], t, f"optimizer.{kind}") for n, t in enumerate(tensors)}
        for kind, tensors in kept.items()
    }
    return {"model": sharded, "steps": int(optimizer.state[masters[0]]["step"]), **parts}


def load(folder: Path, model: GPTModel, masters: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    loaded = dist_checkpointing.load(training_state(model, masters, optimizer), str(folder))
    model.load_state_dict(loaded["model"])
    for number, master in enumerate(masters):
        master.copy_(loaded["fp32"][number])
        state = optimizer.state[master]
        state["step"].fill_(loaded["steps"])
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(loaded[name][number])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--load", type=Path, help="checkpoint to go on from")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint at the end")
    options = parser.parse_args()

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        without_cuda()
    device, dtype = torch.cuda.current_device(), torch.bfloat16 if gpu else torch.float32
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    if gpu:
        random.model_parallel_cuda_manual_seed(1)

    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=4 * HIDDEN,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=HIDDEN,
        moe_shared_expert_intermediate_size=HIDDEN,
        moe_router_dtype="fp32",
        moe_aux_loss_coeff=0.01,
        expert_model_parallel_size=ranks,
        params_dtype=dtype,
        bf16=gpu,
        use_cpu_initialization=True,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    spec = use_uniep(spec, max_tokens_per_rank=SEQUENCES * LENGTH)
    torch.manual_seed(1 + rank)
    model = GPTModel(config, spec, vocab_size=256, max_sequence_length=LENGTH).to(device, dtype)
    for parameter in model.parameters():
        if getattr(parameter, "allreduce", True):  # all but experts: the same on all ranks
            dist.broadcast(parameter.data, 0)
    masters = [parameter.detach().clone().float() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=3e-3)
    for master in masters:  # what the first step would make, for a checkpoint to go into
        averages = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[master] = {"step": torch.tensor(0.0, device="cpu"), **averages}
    if options.load:
        load(options.load, model, masters, optimizer)
    if rank == 0:
        print(status(model))
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)

    text = torch.tensor(list(Path(__file__).read_bytes()))
    draw = torch.Generator().manual_seed(1 + rank)
    positions = torch.arange(LENGTH, device=device).expand(SEQUENCES, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)
    began = time.perf_counter()
    for step in range(options.steps + 1):
        starts = torch.randint(len(text) - LENGTH - 1, (SEQUENCES, 1), generator=draw)
        tokens = text[starts + torch.arange(LENGTH + 1)].to(device)
        ddp.zero_grad_buffer()
        loss = ddp(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        loss.backward()
        ddp.finish_grad_sync()
        if step % 20 == 0:
            dist.all_reduce(total := loss.detach().clone())
            if rank == 0:
                print(f"step {step:3d}  loss {total / ranks:.3f}  {time.perf_counter() - began:.0f} s")
        if step == options.steps:
            break
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.main_grad
            optimizer.step()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    if options.save:
        if rank == 0:
            options.save.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(training_state(model, masters, optimizer), str(options.save))
    free(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
