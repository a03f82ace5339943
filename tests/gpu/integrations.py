"""One framework on all GPUs of this machine, in bfloat16, against the framework's own experts; run by torchrun.

    torchrun --nproc-per-node 2 tests/gpu/integrations.py hf   # or: peft, plain, megatron, torchtitan

Without GPUs it runs on CPU processes.  A tensor may be as far from fp64 as twice the framework's own result, or one
rounding; y and dx at EP=2 have the bits of one rank.
"""

import contextlib
import os
import sys
import tempfile
import types
from pathlib import Path

import torch
import torch.distributed as dist

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "integrations"), str(TESTS / "dist")]

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
HALF = torch.bfloat16


def shared_folder():
    """One that rank 0 removes at its exit."""
    own = tempfile.TemporaryDirectory()
    names = [own.name]
    dist.broadcast_object_list(names)
    return own, names[0]


def saved_qwen3(rank):
    """`shared_folder` with a small Qwen3-MoE of random weights."""
    import test_hf

    test_hf.COMMON |= {"hidden_size": 256, "num_hidden_layers": 1}
    test_hf.OWN["Qwen3Moe"] |= {"moe_intermediate_size": 128, "head_dim": 64}
    own, folder = shared_folder()
    if rank == 0:
        test_hf.build("Qwen3Moe").to(HALF).save_pretrained(folder)
    dist.barrier()
    return own, folder


def hf(rank, size):
    """Expert parallelism with FSDP2, and all experts on one device."""
    import test_hf as cpu
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    registration = cpu.hf.register()
    own, folder = saved_qwen3(rank)
    batches = [cpu.batch(r).to(DEVICE) for r in range(size)]

    def alone(experts):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=HALF, experts_implementation=experts)
        return model.to(DEVICE)

    got = {}
    for name in ("all_to_all", "uniep"):
        how = DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation=name)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=how, dtype=HALF)
        got[name] = cpu.run(model, batches[rank])
    assert cpu.hf.status(model).num_active == 1
    reference = alone("eager").double()
    mean, mine = cpu.run(reference, *batches), cpu.run(reference, batches[rank])
    cpu.check(got["uniep"], got["all_to_all"], {**mean, "loss": mine["loss"], "logits": mine["logits"]})
    one = {name: cpu.run(alone(name), batches[rank]) for name in ("grouped_mm", "uniep")}
    cpu.check(one["uniep"], one["grouped_mm"], mine)
    assert torch.equal(one["uniep"]["logits"], got["uniep"]["logits"])
    registration.free()
    dist.barrier()
    own.cleanup()


def peft(rank, size):
    """PEFT's LoRA on experts and on a dense layer, with expert parallelism; against PEFT's dense wrapper on one GPU."""
    import test_hf
    import test_peft as cpu

    registration = test_hf.hf.register()
    own, folder = saved_qwen3(rank)
    batches = [cpu.batch(r).to(DEVICE) for r in range(size)]

    def alone(experts):
        kind = test_hf.transformers.AutoModelForCausalLM
        model = kind.from_pretrained(folder, dtype=HALF, experts_implementation=experts)
        return cpu.wrapped(model, "Qwen3Moe", r=8).to(DEVICE)

    how = test_hf.DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation="uniep")
    model = test_hf.transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=how, dtype=HALF)
    model = cpu.wrapped(model, "Qwen3Moe", r=8)
    cpu.uniep_peft.adapt(model)
    got = cpu.gradients(model, batches[rank])
    state = cpu.uniep_peft.adapter_state(model)
    model.save_pretrained(f"{folder}/adapter", state_dict=state, is_main_process=rank == 0)
    dist.barrier()
    reference, dense = alone("eager").double(), alone("grouped_mm")
    results = []
    for other in (dense, reference):
        mean, mine = cpu.gradients(other, *batches), cpu.gradients(other, batches[rank])
        results.append({**mean, "loss": mine["loss"], "logits": mine["logits"]})
    cpu.check(got, *results)
    one = alone("uniep")
    cpu.uniep_peft.adapt(one)
    one.load_adapter(f"{folder}/adapter", "default")
    assert torch.equal(one(batches[rank]).logits, got["logits"])
    registration.free()
    dist.barrier()
    own.cleanup()


def plain(rank, size):
    """uniep.nn.MoE in DDP and FSDP2, against one process with a composition of PyTorch's parts."""
    import test_torch as cpu
    from torch.distributed.device_mesh import init_device_mesh

    import uniep
    from uniep.reference import composition

    tokens = (90, 50, 40, 70, 20, 60, 30, 80)[:size]
    cfg = uniep.MoEConfig(hidden=256, ffn=128, num_experts=8, top_k=2, max_tokens_per_rank=512)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(sum(tokens), cfg.hidden, generator=draw).to(DEVICE, HALF)
    target = torch.randint(16, (sum(tokens),), generator=draw).to(DEVICE)

    def composed(dtype):
        with uniep.Workspace(cfg, device=DEVICE) as workspace:
            model = cpu.Model(workspace, blocks=1).to(DEVICE, HALF).to(dtype)
            experts = model.blocks[0].moe.experts
            experts.forward = lambda x, ids, weights: composition(x, ids, weights, experts.w13, experts.w2)
            cpu.loss_of(model, x.to(dtype), target, len(x)).backward()
            return {name: p.grad for name, p in model.named_parameters()}

    truth, theirs = composed(torch.float64), composed(HALF)
    mesh = init_device_mesh(DEVICE.type, (1, size), mesh_dim_names=("dp", "ep"))
    everyone = init_device_mesh(DEVICE.type, (size,))
    for how in ("ddp", "fsdp2"):
        with uniep.Workspace(cfg, mesh["ep"], device=DEVICE) as workspace:
            model = cpu.wrapped(how, cpu.Model(workspace, blocks=1).to(DEVICE, HALF), mesh, everyone)
            mine = cpu.share(rank, tokens)
            cpu.loss_of(model, x[mine], target[mine], len(x) / size).backward()
            ours = cpu.all_whole(model, lambda p: p.grad, mesh, cfg.num_experts)
            near(ours, theirs, truth)


def megatron(rank, size):
    """A layer; its gradients by way of Megatron's DDP; experts as one tensor and as a list."""
    import test_megatron as cpu
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel import random

    if not GPU:
        from megatron_on_cpu import stand_in

        stand_in()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=size)
    if GPU:
        random.model_parallel_cuda_manual_seed(1)
    options = {"hidden_size": 256, "moe_ffn_hidden_size": 128, "moe_shared_expert_intermediate_size": 64}
    options["moe_token_dispatcher_type"] = "alltoall" if GPU else "allgather"
    draw = torch.Generator().manual_seed(rank)
    x, dy = (torch.randn(40, 2, 256, generator=draw).to(HALF) for _ in range(2))

    def build(change, dtype):
        cfg = cpu.config(size, dtype, **options)
        return cfg, cpu.layer(cfg, change).to(DEVICE)

    def use(**keywords):
        return lambda spec: cpu.megatron.use_uniep(spec, **keywords)

    kinds = {"true": (lambda spec: spec, torch.float64), "stock": (lambda spec: spec, HALF)}
    kinds |= {"uniep": (use(), HALF), "nccl": (use(backend="nccl"), HALF)}
    got = {}
    for name, (change, dtype) in kinds.items():
        _, layer = build(change, dtype)
        leaf = x.to(DEVICE, dtype).requires_grad_()
        y, _ = layer(leaf)
        y.backward(dy.to(DEVICE, dtype))
        got[name] = {"y": y.detach(), "dx": leaf.grad, **cpu.gradients(layer)}
        cpu.megatron.free(layer)
    near(got["uniep"], got["stock"], got["true"])
    assert all(torch.equal(value, got["nccl"][name]) for name, value in got["uniep"].items())

    main = {}
    kinds = {"stock": lambda spec: spec, "grad": use(), "nccl": use(backend="nccl", main_grad=True)}
    kinds["main_grad"] = use(main_grad=True)
    for name, change in kinds.items():
        cfg, layer = build(change, HALF)
        how = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
        ddp = DistributedDataParallel(cfg, how, layer)
        ddp.zero_grad_buffer()
        for context in (ddp.no_sync(), contextlib.nullcontext()):
            with context:
                ddp(x.to(DEVICE).requires_grad_())[0].backward(dy.to(DEVICE))
        ddp.finish_grad_sync()
        main[name] = {n: p.main_grad.clone() for n, p in layer.named_parameters()}
        cpu.megatron.free(layer)
    for name, value in main["stock"].items():
        assert torch.equal(main["main_grad"][name], main["nccl"][name]), name
        for how in ("grad", "main_grad"):
            assert cpu.distance(main[how][name], value.double()) < 0.01, f"{how}: {name}"


def torchtitan(rank, size):
    """The MoE layer, sharded by torchtitan over its "ep" mesh."""
    import test_torchtitan as cpu

    cpu.HIDDEN, cpu.FFN = 256, 128
    inputs = [cpu.tokens(r, 80) for r in range(size)]
    truths = cpu.in_fp64(inputs)
    dims = cpu.parallel_dims(types.SimpleNamespace(rank=rank, size=size), "partial_dtensor", size)
    got = {}
    for ours in (False, True):
        layer = cpu.layer(ours, dims)
        got[ours] = cpu.run(layer, *inputs[rank])
    held = cpu.EXPERTS // size
    truth = dict(truths[rank])
    for name in truth:
        if "inner_experts" in name:
            truth[name] = sum(t[name] for t in truths)[rank * held : (rank + 1) * held]
    cpu.check(got[True], got[False], truth)
    alone = cpu.run(cpu.layer(ours=True), *inputs[rank])
    assert all(torch.equal(got[True][name], alone[name]) for name in ("y", "dx"))
    assert f"uniep, expert parallel over {size} ranks" in str(cpu.adapter.status(layer))
    cpu.adapter.free(layer)


def near(ours, theirs, truth):
    assert ours.keys() == theirs.keys() == truth.keys()
    for name, true in truth.items():
        error, allowed = (float((t[name].double() - true).norm() / true.norm()) for t in (ours, theirs))
        assert error <= 2 * allowed + torch.finfo(HALF).eps, f"{name}: {error:.2e}, own {allowed:.2e}"


FRAMEWORKS = {"hf": hf, "peft": peft, "plain": plain, "megatron": megatron, "torchtitan": torchtitan}


if __name__ == "__main__":
    if GPU:
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl", device_id=DEVICE)
    else:
        dist.init_process_group("gloo")
    FRAMEWORKS[sys.argv[1]](dist.get_rank(), dist.get_world_size())
    print(f"rank {dist.get_rank()}: {sys.argv[1]} on {DEVICE} is right", flush=True)
    dist.destroy_process_group()
