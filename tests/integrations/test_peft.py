"""PEFT's own LoRA on experts (`target_parameters`), run by uniep, against PEFT's dense wrappers on one device."""

from pathlib import Path

import pytest
import test_hf
import torch

peft = pytest.importorskip("peft", reason="PEFT is not installed")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from case import equal_bits  # noqa: E402
from test_hf import EP2, batch, build, check, load, pair, registration, saved  # noqa: E402, F401
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import uniep  # noqa: E402
from uniep.integrations import hf  # noqa: E402
from uniep.integrations import peft as uniep_peft  # noqa: E402
from uniep.integrations.torch import clip_grad_norm_  # noqa: E402
from uniep.nn import record_routing  # noqa: E402

KINDS = ["Qwen3Moe", "Mixtral", "GptOss", "NemotronH"]


def configuration(kind, **changes):
    up = "up_proj" if kind == "NemotronH" else "gate_up_proj"
    how = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj"], "init_lora_weights": False}
    return peft.LoraConfig(**{**how, "target_parameters": [f"experts.{up}", "experts.down_proj"], **changes})


def wrapped(model, kind, **changes):
    """By PEFT; both factors are random."""
    torch.manual_seed(5)
    return peft.get_peft_model(model, configuration(kind, **changes))


def gradients(model, *batches):
    """As `test_hf.run`, of what is trained; factors whole and in PEFT's layout."""
    got = test_hf.run(model, *batches)
    for name in got:
        factor = next((f for f in ("lora_A", "lora_B") if f".experts.{f}" in name or f"base_layer.{f}" in name), None)
        if factor and got[name].dim() == 3:
            got[name] = uniep_peft._flat(factor, got[name])
    return got


def dense(kind, *batches, **changes):
    """(PEFT's own on one device, the same in fp64)."""
    plain = gradients(wrapped(build(kind, experts_implementation="grouped_mm"), kind, **changes), *batches)
    return plain, gradients(wrapped(build(kind, experts_implementation="eager"), kind, **changes).double(), *batches)


class Shapes(TorchDispatchMode):
    """Shapes of all new tensors."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.seen.add(tuple(out.shape))
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_one_device(kind, registration):  # noqa: F811
    theirs, truth = dense(kind, batch())
    model = wrapped(build(kind, experts_implementation="uniep"), kind)
    names = uniep_peft.adapt(model)
    assert len(names) == 4 * len(test_hf.experts_of(model)) and set(names) <= dict(model.named_parameters()).keys()
    check(gradients(model, batch()), theirs, truth)


@pytest.mark.smoke
def test_nothing_is_multiplied_out(registration):  # noqa: F811
    kind, found = "Qwen3Moe", {}
    for name in ("grouped_mm", "uniep"):
        model = wrapped(build(kind, experts_implementation=name), kind)
        if name == "uniep":
            uniep_peft.adapt(model)
        with Shapes() as shapes:
            model(batch(), labels=batch()).loss.backward()
        found[name] = shapes.seen & {(8, 64, 64), (8, 64, 32)}
    assert found == {"grouped_mm": {(8, 64, 64), (8, 64, 32)}, "uniep": set()}


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, foreach=False)


def states(model, optimizer):
    """Of what is trained, for torch.distributed.checkpoint."""
    found = get_state_dict(model, optimizer, options=StateDictOptions(ignore_frozen_params=True))
    return dict(zip(("model", "optimizer"), found, strict=True))


def moments(model, optimizer):
    named = dict(model.named_parameters()).items()
    return {n: test_hf.whole(optimizer.state[p]["exp_avg"]).clone() for n, p in named if p in optimizer.state}


def on_two(world, folder, kind, adapter, target):
    """Gradients, logits and files with factors of `adapter`, or new ones."""
    made = hf.register()
    model = load(world, folder, EP2, ep="uniep")
    if adapter:
        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    else:
        torch.manual_seed(5 + world.rank)  # rank 0's values count
        model = peft.get_peft_model(model, configuration(kind))
    names = uniep_peft.adapt(model)
    assert names == uniep_peft.adapt(model)
    assert all(isinstance(model.get_parameter(name), DTensor) for name in names)
    got = gradients(model, batch(world.rank))
    held = sum(model.get_parameter(name).to_local().numel() for name in names)
    assert 2 * held == sum(model.get_parameter(name).numel() for name in names)
    model.save_pretrained(target, is_main_process=world.rank == 0)
    model.get_base_model().activation_checkpointing_enable()
    for name, value in gradients(model.train(), batch(world.rank)).items():
        equal_bits(value, got[name], f"{name}, recomputed")
    model.get_base_model().activation_checkpointing_disable()
    got["norm"] = clip_grad_norm_(model.parameters(), [], 1e9, None)
    with pytest.raises(uniep.UnsupportedError, match="over 2 ranks, where nothing is merged: save_pretrained, then"):
        model.merge_and_unload()
    optimizer = adamw(model)
    optimizer.step()
    dcp.save(states(model, optimizer), checkpoint_id=f"{target}/states")
    kept = moments(model, optimizer)
    with torch.no_grad():
        trained = model(batch(world.rank)).logits
    state = uniep_peft.adapter_state(model)
    assert all("lora" in name for name in state), "the base is left where it is"
    for folder, given in ((f"{target}/whole", None), (f"{target}/trained", state)):
        model.save_pretrained(folder, is_main_process=world.rank == 0, **({"state_dict": given} if given else {}))
    if world.rank == 0:
        first, second = (Path(target, name, "adapter_model.safetensors") for name in ("whole", "trained"))
        assert first.read_bytes() == second.read_bytes()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "lora" in name}
    uniep_peft.restore(model)
    uniep_peft.adapt(model)
    for name, value in before.items():
        equal_bits(*map(test_hf.whole, (model.get_parameter(name).detach(), value)), name)
    dist.barrier()
    made.free()
    return got, trained, kept


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
def test_expert_parallel(kind, pair, saved, registration, tmp_path):  # noqa: F811
    """Gradients of PEFT's dense model on one device; what EP 2 has written has EP 1's bits, and the other way round."""
    folder, first, second = saved(kind), str(tmp_path / "first"), str(tmp_path / "second")
    ranks = pair.run(on_two, folder, kind, None, first)
    theirs, truth = dense(kind, batch(0), batch(1))
    norm = torch.stack([truth[name].norm() for name in truth if "lora" in name]).norm()
    for rank, (got, trained, _) in enumerate(ranks):
        torch.testing.assert_close(got.pop("norm"), norm, check_dtype=False, rtol=1e-4, atol=0)
        own_theirs, own = dense(kind, batch(rank))
        for name in ("loss", "logits"):
            theirs[name], truth[name] = own_theirs[name], own[name]
        check(got, theirs, truth)
        for adapter, logits in ((first, got["logits"]), (f"{first}/trained", trained)):
            one = peft.PeftModel.from_pretrained(build(kind, experts_implementation="uniep"), adapter)
            uniep_peft.adapt(one)
            with torch.no_grad():
                equal_bits(one(batch(rank)).logits, logits, adapter)
    again = pair.run(on_two, folder, kind, f"{first}/trained", second)
    for (_, trained, _), (got, _, _) in zip(ranks, again, strict=True):
        equal_bits(got["logits"], trained, "loaded at EP 2")
    one = wrapped(build(kind, experts_implementation="uniep"), kind)
    uniep_peft.adapt(one)
    optimizer = adamw(one)
    state = states(one, optimizer)
    dcp.load(state, checkpoint_id=f"{first}/states", no_dist=True)
    set_state_dict(
        one, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=False),
    )  # fmt: skip
    with torch.no_grad():
        equal_bits(one(batch(0)).logits, ranks[0][1], "from a distributed checkpoint")
    for name, value in moments(one, optimizer).items():
        equal_bits(value, ranks[0][2][name], f"{name}: its moment")


def in_layout(world, folder, sizes, refused):
    made = hf.register()
    how = {"ep": "uniep"} if sizes.get("ep_size", 1) > 1 else {"experts": "uniep"}
    model = load(world, folder, sizes, **how)
    only = {"target_parameters": ["experts.gate_up_proj"]} if refused else {}  # PEFT itself fails with both under TP
    model = wrapped(model, "Qwen3Moe", **only)
    if refused:
        with pytest.raises(uniep.UnsupportedError, match=refused):
            uniep_peft.adapt(model)
        return None
    model.add_adapter("other", configuration("Qwen3Moe"))
    uniep_peft.adapt(model)
    with torch.no_grad():  # the other one is trained, and was not when adapt saw it
        for module in model.modules():
            for factors in (getattr(module, "lora_A", None), getattr(module, "lora_B", None)):
                if factors:
                    factors["other"].weight.copy_(factors["default"].weight)
    model.set_adapter("other")
    got = {name.replace("other", "default"): value for name, value in gradients(model, batch(world.rank)).items()}
    made.free()
    return got


@pytest.mark.parametrize("sizes", [{"fsdp_size": 4, "ep_size": 2}, {"fsdp_size": 4}], ids=["copies", "no EP"])
def test_layouts(sizes, pool, saved):  # noqa: F811
    """Experts in two copies, and whole on every rank: means over all ranks."""
    ranks = pool.run(in_layout, saved("Qwen3Moe"), sizes, None)
    theirs, truth = dense("Qwen3Moe", *map(batch, range(4)))
    for rank, got in enumerate(ranks):
        own_theirs, own = dense("Qwen3Moe", batch(rank))
        for name in ("loss", "logits"):
            theirs[name], truth[name] = own_theirs[name], own[name]
        check(got, theirs, truth)


def test_tensor_parallel_is_refused(pair, saved):  # noqa: F811
    refused = r"mesh has \{'pp': 1, 'tp': 2\}; PEFT beside uniep needs tp_size=1 and pp_size=1"
    pair.run(in_layout, saved("Qwen3Moe"), {"tp_size": 2, "ep_size": 2}, refused)


def test_files_are_those_of_peft(registration, tmp_path):  # noqa: F811
    """Written by uniep, read by PEFT's dense wrapper, merged by both; and back."""
    kind = "GptOss"
    model = wrapped(build(kind, experts_implementation="uniep"), kind)
    theirs = wrapped(build(kind, experts_implementation="grouped_mm"), kind)
    uniep_peft.adapt(model)
    state, plain = peft.get_peft_model_state_dict(model), peft.get_peft_model_state_dict(theirs)
    assert state.keys() == plain.keys()
    for name, value in plain.items():
        equal_bits(state[name], value, name)
    with torch.no_grad():
        for p in theirs.parameters():
            p.mul_(-1.5 if p.requires_grad else 1.0)
        want = theirs(batch()).logits
    theirs.save_pretrained(tmp_path)
    model.load_adapter(tmp_path, "default")
    with torch.no_grad():
        torch.testing.assert_close(model(batch()).logits, want)
        with model.disable_adapter():
            plain = model(batch()).logits
        assert not torch.allclose(plain, want)
        uniep_peft.restore(model)
        model.set_adapter("default")
        assert not any(type(m) is uniep_peft.ParamWrapper for m in model.modules())
        for name, value in peft.get_peft_model_state_dict(theirs).items():
            equal_bits(peft.get_peft_model_state_dict(model)[name], value, name)
        uniep_peft.adapt(model)
        model.merge_adapter()
        torch.testing.assert_close(model(batch()).logits, want)
        model.unmerge_adapter()
        merged = model.merge_and_unload()
        assert not any("lora" in name for name, _ in merged.named_parameters())
        torch.testing.assert_close(merged(batch()).logits, want)


def test_rslora_and_one_of_two(registration):  # noqa: F811
    kind = "Qwen3Moe"
    for changes in ({"use_rslora": True}, {"target_parameters": ["experts.down_proj"]}):
        theirs, truth = dense(kind, batch(), **changes)
        model = wrapped(build(kind, experts_implementation="uniep"), kind, **changes)
        uniep_peft.adapt(model)
        check(gradients(model, batch()), theirs, truth)
    hf.hook_routing(model)
    with record_routing(model) as record:
        model(batch())
    assert len(record.ids) == 2
    model = wrapped(build(kind, experts_implementation="uniep").bfloat16(), kind)  # PEFT keeps factors in fp32
    uniep_peft.adapt(model)
    assert {p.dtype for n, p in model.named_parameters() if "lora" in n} == {torch.float32}
    model(batch(), labels=batch()).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_refused(registration):  # noqa: F811
    kind = "Qwen3Moe"

    def made(**changes):
        return wrapped(build(kind, experts_implementation="uniep"), kind, **changes)

    bare = made()
    with pytest.raises(uniep.UnsupportedError, match=r"ParamWrapper adds B A to \w+_proj, .*integrations.peft.adapt"):
        bare(batch())
    for changes in ({"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}):
        with pytest.raises(ValueError, match=next(iter(changes))):  # PEFT's own words
            made(**changes)
    with pytest.raises(uniep.ConfigError, match="no parameter of this Qwen3MoeForCausalLM is wrapped by PEFT"):
        uniep_peft.adapt(build(kind))
    with pytest.raises(uniep.UnsupportedError, match=r"experts: uniep does not run these experts: .*'grouped_mm'"):
        uniep_peft.adapt(wrapped(build(kind), kind))
    model = made()
    model.merge_adapter()
    with pytest.raises(uniep.ConfigError, match=r"has merged \['default'\]; call unmerge_adapter"):
        uniep_peft.adapt(model)
    model = made()
    uniep_peft.adapt(model)
    next(m for m in model.modules() if isinstance(m, uniep_peft.ParamWrapper)).set_scale("default", 2)
    with pytest.raises(uniep.UnsupportedError, match=r"has scalings .* the same r and lora_alpha"):
        model(batch())
    model = made()
    uniep_peft.adapt(model)
    model.add_adapter("other", configuration(kind))
    model.set_adapter("other")
    with pytest.raises(uniep.ConfigError, match=r"'other' of \w+ came after adapt"):
        model(batch())
    uniep_peft.adapt(model)
    model(batch())
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(uniep.UnsupportedError, match=r"\['default', 'other'\] of \w+ are active together"):
        model(batch())
    model.set_adapter("default")
    model.get_base_model().set_experts_implementation("eager")
    with pytest.raises(uniep.UnsupportedError, match="did not run in uniep, and without its LoRA factors"):
        model(batch())
    model = wrapped(build("GptOss", experts_implementation="uniep"), "GptOss", bias="all")
    uniep_peft.adapt(model)
    test_hf.run(model, batch())  # of dense layers alone
    next(iter(test_hf.experts_of(model).values())).down_proj_bias.requires_grad_()
    with pytest.raises(uniep.ConfigError, match=r"requires a gradient beside LoRA factors"):
        model(batch())
