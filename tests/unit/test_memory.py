"""plan_memory against hand-computed sizes, the shared layout, and shared memory that does not fit."""

import dataclasses
import errno
import glob
import itertools
import os
import resource
import types

import pytest
import torch

import uniep
from uniep.backends.cpu import shm
from uniep.backends.hopper.arena import Arena
from uniep.config import MoEConfig
from uniep.errors import CapacityError, ConfigError, UnsupportedError
from uniep.layout import (
    ALIGN_BYTES,
    cpu_arrays,
    hopper_arrays,
    pack,
    packed_bytes,
)
from uniep.meeting import Meeting
from uniep.memory import check_room, plan_memory
from uniep.nn.ops import moe_forward
from uniep.schedule import DEFAULT_SCHEDULES, Schedule, Tile, default_schedule
from uniep.way import resolve

CFG = MoEConfig(hidden=7168, ffn=2048, num_experts=64, top_k=8, max_tokens_per_rank=8192)


def by_name(plan):
    return {b.name: b for b in plan.buffers}


def test_sizes_by_hand():
    plan = plan_memory(CFG, ep_size=2)
    sizes = {name: b.bytes for name, b in by_name(plan).items()}
    assert sizes["returns"] == 8192 * 8 * 7168 * 2 == 0.875 * 2**30
    assert sizes["receive"] == (8192 + 1) * 7168 * 2
    assert sizes["dweights"] == 8192 * 8 * 4
    rows = 32 * 2048 + 2048 + 128  # 8192 * 8 / 32 = 2048 rows for each of 32 local experts; 1/32 more, aligned
    assert sizes["h"] == rows * 2 * 2048 * 2 and sizes["act"] == rows * 2048 * 2
    assert sizes["dweight_groups"] == rows * 32 * 4
    assert sizes["kept"] == sizes["receive"] - 7168 * 2  # without the zero row
    assert plan.total_bytes() == sum(plan.total_bytes(kind) for kind in ("shared", "saved", "transient"))


def test_low_rank_factors():
    """Gradients of factors instead of weights; on hopper rows of r columns, padded, of which u13 is saved."""
    whole, low = (plan_memory(CFG, 2, lora=r) for r in (None, 24))
    usual, adapted = by_name(whole), by_name(low)
    assert usual.keys() - adapted.keys() == {"dw13", "dw2"}
    assert adapted.keys() - usual.keys() == {"u13", "u2", "v2", "v13", "dlora13", "dlora2"}
    assert adapted["dlora13"].bytes == 32 * 24 * (7168 + 2 * 2048) * 2
    assert adapted["dlora2"].bytes == 32 * 24 * (2048 + 7168) * 2
    rows = usual["h"].shape[1]
    assert all(adapted[name].shape == (rows, 32) for name in ("u13", "u2", "v2", "v13"))
    assert [b.name for b in low.buffers if b.kind == "saved" and b.name not in usual] == ["u13"]
    assert adapted["u2"].during[:2] == ("forward: down_shrink", "forward: down")
    blocks = by_name(plan_memory(dataclasses.replace(CFG, gradient_shards=4), 2, copies=2, backend="nccl", lora=24))
    assert blocks["dlora13_blocks"].bytes == 2 * 2 * adapted["dlora13"].bytes and "dw13_sum" not in blocks
    assert not {"block_rows", "x_rows", "raw"} & blocks.keys(), "torch operations, an expert at a time"
    for r, error in ((0, ConfigError), (12, UnsupportedError), (136, UnsupportedError)):
        with pytest.raises(error, match=f"lora.* is {r}; "):
            plan_memory(CFG, 2, lora=r)
    assert "dlora2" in by_name(plan_memory(CFG, 2, backend="cpu", lora=12))


def test_gradient_shards():
    """Blocks are added where a gradient is made; with copies every block is kept, what is exchanged, and the sum.  On
    GPUs where the rows of blocks lie, and no copy of them."""
    of_13 = 16 * 2 * 2048 * 7168 * 4
    one = dataclasses.replace(CFG, gradient_shards=4)
    for backend, more in (("cpu", set()), ("hopper", {"block_rows"}), ("nccl", {"block_rows"})):
        usual, added = (by_name(plan_memory(cfg, 4, backend=backend)) for cfg in (CFG, one))
        assert added.keys() - usual.keys() == more and all(usual[name] == added[name] for name in usual)
    assert added["block_rows"].bytes < added["dh"].bytes / 50
    apart = by_name(plan_memory(one, 2, copies=2, backend="cpu"))
    assert apart["dw13_blocks"].bytes == 2 * (2 * of_13) and apart["dw13_sum"].bytes == 2 * of_13
    assert apart["dw_copies"].shape == (2 * 2 + 2, 2**24)
    assert "block_rows" not in by_name(plan_memory(one, 1, copies=4)), "all rows of a rank are one block"
    with pytest.raises(ConfigError, match="copies is 0; it must be at least 1"):
        plan_memory(one, 4, copies=0)


def test_received_tokens():
    """Hardly a token has all 8 experts elsewhere; one rank receives nothing; what is dispatched again is not kept."""
    two, one = by_name(plan_memory(CFG, 2, backend="cpu")), by_name(plan_memory(CFG, 1, backend="cpu"))
    assert two["received"].bytes == pytest.approx(8192 * 7168 * 2, rel=0.01)
    assert one["receive"].shape == (1, 7168) and one["received"].shape == (0, 7168)
    nccl = dataclasses.replace(default_schedule("nccl", CFG, 2), received="again")
    again = by_name(plan_memory(CFG, 2, backend="nccl", schedule=nccl))
    assert again["received"].shape == (0, 7168)
    assert {"forward: gate_up", "backward: dispatch", "backward: combine"} <= {*again["received_again"].during}
    assert again["received_dy"].shape == again["received_again"].shape == (two["received"].shape[0] + 1, 7168)


@pytest.mark.parametrize(("transfer", "slots"), [("push", 768), ("copy", 1152)])
def test_kept_tokens_follow_the_call(transfer, slots):
    """T of 1024 where 32k may come, EP 8: 73 or 110 MiB instead of 3,136, aligned, with 1/32 more.  Without a host read
    as much as may come; a token that was pushed has a row."""
    cfg, schedule = dataclasses.replace(CFG, max_tokens_per_rank=2**15), Schedule(transfer=transfer)
    sizes = by_name(plan_memory(cfg, 8, tokens=1024, schedule=schedule))
    assert sizes["kept"].shape == (7 * slots, 7168)
    assert sizes["histogram"].bytes + sizes["plan"].bytes < 2**20
    bounded = by_name(plan_memory(dataclasses.replace(cfg, max_rows=9000), 8, tokens=1024, schedule=schedule))
    rows = bounded["h"].shape[1]
    assert bounded["kept"].shape == (7 * (rows if transfer == "push" else 2**15), 7168)


def test_no_room_on_some_gpu():
    """Every rank raises the same, with the sizes of what is shared."""
    plan = plan_memory(CFG, 2)
    needed = packed_bytes(pack(hopper_arrays(CFG, 2, resolve(CFG, 2, 0, Schedule()))))
    check_room(plan, needed, [needed, 2 * needed])
    with pytest.raises(CapacityError, match=r"take 1010.27 MiB.*\(rank 1: 1\.00 KiB\).*lower max_tokens") as raised:
        check_room(plan, needed, [needed, 1024])
    text = str(raised.value)
    assert "returns" in text and "896.00 MiB" in text and "saved" not in text


def test_no_room_before_anything_is_allocated(monkeypatch):
    """What PyTorch only holds for later is given back first."""
    layout = pack(hopper_arrays(CFG, 1, resolve(CFG, 1, 0, Schedule())))
    free = [100, 1000]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 2**36))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.pop(0))
    monkeypatch.setattr(torch, "zeros", lambda *args, **options: pytest.fail("allocated"))
    workspace = types.SimpleNamespace(device=torch.device("cpu"), ep_size=1, group=None, rank=0)
    with pytest.raises(CapacityError, match=r"rank 0: 1000 B"):
        Arena(layout, workspace, lambda: plan_memory(CFG, 1))


def test_rows_follow_tokens_and_max_rows():
    for tokens, rows in ((0, 0), (1, 32 * 128)):  # each expert's segment is aligned
        assert by_name(plan_memory(CFG, 2, backend="cpu", tokens=tokens))["h"].shape == (rows, 4096)
        assert by_name(plan_memory(CFG, 2, tokens=tokens))["h"].shape == (2, rows + (256 if rows else 128), 2048)
    bounded = MoEConfig(**{**vars(CFG), "max_rows": 1000})
    assert by_name(plan_memory(bounded, 2))["h"].shape == (2, (1000 + 32 * 127 + 127) // 128 * 128, 2048)


@pytest.mark.parametrize("backend", ["hopper", "cpu", "nccl"])
def test_combine_groups(backend):
    """Eight slots come back as at most two rows; at EP=2 nearly every token has both."""
    plain, two = (dataclasses.replace(CFG, combine_groups=groups) for groups in (None, 2))
    before, after = (by_name(plan_memory(cfg, 2, backend=backend)) for cfg in (plain, two))
    if backend == "nccl":
        assert after["parts"].shape[0] == pytest.approx(2 * 8192, rel=0.01)
    else:
        assert before["returns"].shape[0] == 8192 * 8 and after["returns"].shape[0] == 8192 * 2
    assert after["results"].shape == (before["act"].shape[0], 7168)
    with pytest.raises(ConfigError, match="combine_groups=2 cannot be split evenly over 4 ranks"):
        plan_memory(two, 4, backend=backend)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize(
    ("received", "preactivation"), [("saved", "saved"), ("again", "saved"), ("saved", "recomputed")]
)
@pytest.mark.parametrize("backend", ["cpu", "nccl"])
def test_the_plan_is_what_the_backend_has(backend, received, preactivation, groups):
    """Shared memory and saved tensors, byte for byte.  (hopper: tests/interp/test_plan.py.)"""
    cfg = MoEConfig(hidden=64, ffn=72, num_experts=4, top_k=2, max_tokens_per_rank=100, combine_groups=groups)
    schedule = dataclasses.replace(DEFAULT_SCHEDULES[backend], received=received, preactivation=preactivation)
    plan = plan_memory(cfg, 1, backend=backend, schedule=schedule, tokens=70)
    ids = torch.arange(140).view(70, 2) % 4
    w13, w2 = torch.zeros(4, 144, 64, dtype=cfg.dtype), torch.zeros(4, 64, 72, dtype=cfg.dtype)
    x = torch.zeros(70, 64, dtype=cfg.dtype)
    with uniep.Workspace(cfg, device="cpu", backend=backend, schedule=schedule) as ws:
        saved = moe_forward(x, ids, torch.zeros(70, 2), [w13], [w2], [], "stacked", ws.key, True, [], [], False)[1:]
        assert sum(t.nbytes for t in saved) == plan.total_bytes("saved")
        if backend == "cpu":
            assert sorted(ws.backend.peers.tensors[0]) == sorted(b.name for b in plan.buffers if b.kind == "shared")
            assert sum(t.nbytes for t in ws.backend.peers.tensors[0].values()) == plan.total_bytes("shared")
        else:
            assert plan.total_bytes("shared") == 0


def test_peak_is_what_meets():
    """Saved tensors, and either the activation's gradient in fp32 or the results of the backward; both, and the lists
    of tasks, where one kernel is a direction."""
    cfg, schedule = MoEConfig(hidden=64, ffn=128, num_experts=4, top_k=2, max_tokens_per_rank=64), Schedule()
    plan = plan_memory(cfg, 1, schedule=schedule)
    of = {name: buffer.bytes for name, buffer in by_name(plan).items()}
    backward = of["act"] + of["dh"] + of["dweight_groups"] + of["address"] + of["y"]
    results = of["dx"] + of["dw13"] + of["dw2"]
    assert plan.peak_bytes() == plan.total_bytes("saved") + backward + max(of["raw"], results)
    assert of["raw"] > results
    mega = plan_memory(cfg, 1, schedule=Schedule(overlap="mega"))
    lists = by_name(mega)["lists"].bytes
    assert lists > 0
    assert mega.peak_bytes() == mega.total_bytes("saved") + backward + lists + of["raw"] + results
    small = plan_memory(dataclasses.replace(cfg, hidden=256, max_tokens_per_rank=1), 1, schedule=schedule)
    of = {name: buffer.bytes for name, buffer in by_name(small).items()}
    results = of["dx"] + of["dw13"] + of["dw2"]
    assert results > of["raw"]
    assert small.peak_bytes() == small.total_bytes("saved") + results + sum(
        of[name] for name in ("act", "dh", "dweight_groups", "address", "y")
    )


def test_recomputed():
    """h is not saved, but made while the backward needs it, beside dO @ W2; with one kernel, to its end.  What is
    dispatched again is kept in the backward then."""
    saved, made = (
        plan_memory(CFG, 2, schedule=Schedule(preactivation=how, received="again", transfer="copy"))
        for how in ("saved", "recomputed")
    )
    h, kept = (by_name(made)[name] for name in ("h", "received_again"))
    assert saved.total_bytes("saved") - made.total_bytes("saved") == h.bytes == by_name(saved)["h"].bytes
    assert h.kind == kept.kind == "transient" and kept.shape == (CFG.receive_block, CFG.hidden)
    assert [moment for moment in h.during if "activation" in moment or "combine" in moment] == [
        "backward: activation_gradient"
    ]
    assert made.peak_bytes() < saved.peak_bytes() + kept.bytes
    mega = plan_memory(dataclasses.replace(CFG, max_tokens_per_rank=256), 2, schedule=Schedule(
        overlap="mega", preactivation="recomputed"
    ))  # fmt: skip
    assert by_name(mega)["h"].during[-1] == "backward: backward"
    for backend in ("cpu", "nccl"):
        schedule = dataclasses.replace(default_schedule(backend, CFG, 2), preactivation="recomputed")
        plan = plan_memory(CFG, 2, backend=backend, schedule=schedule)
        assert by_name(plan)["h"].kind == "transient"


def test_an_activation_of_its_own_needs_its_input():
    plans = [plan_memory(CFG, 2, backend="cpu", schedule=Schedule(activation=how)) for how in ("fused", "separate")]
    names = [set(by_name(plan)) for plan in plans]
    assert names[1] - names[0] == {"raw"} and names[0] < names[1]
    assert plans[1].peak_bytes() > plans[0].peak_bytes()


def test_explain_names_every_buffer_and_why():
    plan = plan_memory(CFG, ep_size=8)
    text = plan.explain()
    assert str(plan) == text
    for buffer in plan.buffers:
        line = next(line for line in text.splitlines() if line.split()[:2] == [buffer.kind, buffer.name])
        assert buffer.why in line and " x ".join(map(str, buffer.shape)) in line
    assert "64 experts over 8 ranks" in text and "896.00 MiB" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ep_size": 3}, "64.*3 ranks"),
        ({"ep_size": 2, "tokens": 8193}, "tokens is 8193.*8192"),
        ({"ep_size": 2, "backend": "tpu"}, "'tpu'"),
        ({"ep_size": 2.0}, "ep_size is 2.0"),
        ({"ep_size": 2, "tokens": 1.5}, "tokens is 1.5"),
        ({"ep_size": 2, "schedule": Schedule(overlap="banana")}, "overlap is 'banana'"),
        ({"ep_size": 2, "schedule": Schedule(chunk_tokens=0)}, "chunk_tokens is 0"),
        ({"ep_size": 2, "schedule": Schedule(send_order="expert", transfer="copy")}, "send_order is 'expert', but"),
        ({"ep_size": 2, "schedule": Schedule(gate_up=Tile(stages=6))}, "bytes of shared memory"),
        ({"ep_size": 2, "backend": "cpu", "schedule": Schedule(transfer="pull")}, "backend 'cpu' knows only 'push'"),
        ({"ep_size": 3, "num_experts": 66}, "3 ranks; the hopper backend needs a power of two; or use backend='nccl'"),
        ({"ep_size": 2, "dtype": torch.float32}, "dtype is torch.float32"),
        ({"ep_size": 2, "hidden": 7}, "hidden is 7; on Hopper"),
    ],
)
def test_refused_by_name(arguments, text):
    fields = {field.name for field in dataclasses.fields(CFG)}
    changes = {name: value for name, value in arguments.items() if name in fields}
    rest = {name: value for name, value in arguments.items() if name not in fields}
    with pytest.raises(ConfigError, match=text):
        plan_memory(dataclasses.replace(CFG, **changes), **rest)


@pytest.mark.parametrize("arrays", [cpu_arrays, hopper_arrays])
def test_layout_is_aligned_and_disjoint(arrays):
    layout = pack(arrays(CFG, 4, Schedule()))
    fields = sorted(layout.values())
    assert all(f.offset % ALIGN_BYTES == 0 for f in fields)
    assert all(a.offset + a.bytes <= b.offset for a, b in itertools.pairwise(fields))
    assert fields[-1].offset + fields[-1].bytes <= packed_bytes(layout)


def small():
    cfg = MoEConfig(hidden=8, ffn=8, num_experts=2, top_k=1, max_tokens_per_rank=4)
    return pack(cpu_arrays(cfg, 1, resolve(cfg, 1, 0, backend="cpu")))


def test_segment_is_zero_and_writable():
    (segment,) = shm.map_segments(small(), Meeting(None, 1.0))
    for name, field in segment.layout.items():
        tensor = segment.tensor(name)
        assert (tensor.shape, tensor.dtype) == (field.shape, field.dtype) and not tensor.any()
    segment.words[segment.word("entered")] = 7
    assert segment.tensor("entered").tolist() == [7]


def test_no_room_is_an_error_with_a_remedy_and_leaves_no_file(monkeypatch):
    def full(fd, size):
        os.write(fd, b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    before = set(glob.glob(f"/dev/shm/{shm._PREFIX}{os.getpid()}-*"))
    monkeypatch.setattr(shm, "_reserve", full)
    with pytest.raises(OSError, match=r"no room for 4096 bytes.*No space left.*bytes free.*--shm-size"):
        shm._create(4096)
    assert set(glob.glob(f"/dev/shm/{shm._PREFIX}{os.getpid()}-*")) == before


def test_the_kernel_is_asked_for_the_space():
    with pytest.raises(OSError, match="no room for"):
        shm._create(1 << 60)


def test_the_temporary_directory_is_second_choice(monkeypatch, tmp_path):
    monkeypatch.setattr(shm.tempfile, "gettempdir", lambda: str(tmp_path))
    isdir = os.path.isdir
    monkeypatch.setattr(shm.os.path, "isdir", lambda path: path != "/dev/shm" and isdir(path))
    path, fd = shm._create_named(4096)
    assert path.startswith(str(tmp_path)) and os.stat(path).st_size == 4096
    os.close(fd)


def no_temporary_directory():
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")


def test_a_temporary_directory_is_not_needed(monkeypatch):
    """As in a container that can write nothing but /dev/shm."""
    monkeypatch.setattr(shm.tempfile, "gettempdir", no_temporary_directory)
    shm._create(4096).drop()
    with pytest.raises(OSError, match="no room for"):
        shm._create(1 << 60)


def in_folder(monkeypatch, folder):
    """Files are made there only."""
    monkeypatch.setattr(shm.tempfile, "gettempdir", lambda: str(folder))
    isdir = os.path.isdir
    monkeypatch.setattr(shm.os.path, "isdir", lambda path: path != "/dev/shm" and isdir(path))


def test_files_of_killed_processes_are_removed(monkeypatch, tmp_path):
    in_folder(monkeypatch, tmp_path)
    (dead, dead_fd), (alive, alive_fd) = shm._create_named(4096), shm._create_named(4096)
    os.close(dead_fd)
    for path in (dead, alive):
        os.utime(path, (0, 0))
    young, young_fd = shm._create_named(4096)
    os.close(young_fd)
    _, fd = shm._create_named(4096)
    assert [os.path.exists(path) for path in (dead, alive, young)] == [False, True, True]
    for left in (alive_fd, fd):
        os.close(left)


def test_files_of_others_are_left_alone(monkeypatch, tmp_path):
    """Whatever is not exactly what `_create_named` makes: other names, links and what they point to, folders."""
    in_folder(monkeypatch, tmp_path)
    ours = f"uniep-4242-{'0' * 31}"
    kept = [tmp_path / name for name in ("uniep-2026-results.csv", "uniep-1-" + "0" * 33, "target", "uniep-1-x")]
    for path in kept:
        path.write_text("mine")
    folder, soft, hard = (tmp_path / f"{ours}{end}" for end in "123")
    folder.mkdir()
    soft.symlink_to(kept[2])
    hard.hardlink_to(kept[0])
    for path in (*kept, folder):
        os.utime(path, (0, 0))
    shm._create_named(4096).drop()
    assert all(path.read_text() == "mine" for path in (*kept, soft, hard)) and soft.is_symlink() and folder.is_dir()


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs files without a name")
def test_what_peers_map_never_has_a_name(monkeypatch, tmp_path):
    """So nothing is left of a process that is killed, whenever that is; and only the very file is mapped."""
    in_folder(monkeypatch, tmp_path)
    made = shm._create(4096)
    os.pwrite(made.fd, b"a token of bytes", 4080)
    assert not list(tmp_path.iterdir()) and made.path.startswith("/proc/")
    assert len(shm._map(made.path, 4080, b"a token of bytes")) == 4080
    with pytest.raises(FileNotFoundError, match="another process's"):
        shm._map(made.path, 4080, b"the other token!")
    made.drop()


@pytest.mark.parametrize("create", [shm._create, shm._create_named])
def test_no_descriptors_left(create):
    """It is said as what it is."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]  # no gaps below the limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(held), limits[1]))
    try:
        with pytest.raises(OSError, match=r"Too many open files; .*ulimit -n") as caught:
            create(4096)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in held:
            os.close(fd)
    assert caught.value.errno == errno.EMFILE


def test_a_workspace_that_cannot_fit():
    cfg = MoEConfig(hidden=1 << 20, ffn=8, num_experts=2, top_k=2, max_tokens_per_rank=1 << 24, dtype=torch.float32)
    with pytest.raises(CapacityError, match="lower max_tokens_per_rank"):
        uniep.Workspace(cfg, device="cpu")
