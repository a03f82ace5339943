"""A tiny random Qwen3-MoE of Hugging Face transformers, trained on this file with its experts spread over the ranks.

    pip install 'transformers>=5.23,<6' accelerate
    torchrun --nproc-per-node 2 examples/hf_train.py

The same command trains on GPUs, one per process, where there are any.  At the end rank 0 loads what was saved
onto one device, where uniep runs all experts, and compares the losses.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from uniep.integrations import hf

CONFIG = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_experts=8,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    use_cache=False,
)
LENGTH, BATCH, STEPS = 64, 8, 101


def main() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    registration = hf.register(max_tokens_per_rank=BATCH * LENGTH)
    own = tempfile.TemporaryDirectory()
    folder = [own.name]
    dist.broadcast_object_list(folder)  # rank 0's
    if rank == 0:
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(CONFIG).save_pretrained(folder[0])
    dist.barrier()
    distributed = DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation="uniep")
    model = AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=distributed, dtype=dtype)
    if rank == 0:
        print(hf.status(model))

    text = torch.tensor(list(Path(__file__).read_bytes()))
    draw = torch.Generator().manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    for step in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=draw)
        ids = text[starts + torch.arange(LENGTH)].to(device)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach().clone())
        if rank == 0 and step % 20 == 0:
            print(f"step {step:3d}  loss {mean / size:.3f}")

    model.save_pretrained(folder[0])
    with torch.no_grad():
        trained = model(input_ids=ids, labels=ids).loss
    if rank == 0:
        alone = AutoModelForCausalLM.from_pretrained(folder[0], dtype=dtype, experts_implementation="uniep").to(device)
        with torch.no_grad():
            again = alone(input_ids=ids, labels=ids).loss
        print(f"loss at EP {size}: {trained:.6f}; saved and loaded on one device: {again:.6f}")
    dist.barrier()
    registration.free()
    dist.destroy_process_group()
    own.cleanup()


if __name__ == "__main__":
    main()
