"""`DigestLog` and `uniep diff`: runs at any number of ranks, and the first tensor that differs."""

import json

import pytest
import torch
from case import config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

import uniep
from uniep.cli.main import app
from uniep.integrations.torch import fully_shard_experts
from uniep.nn import DigestLog
from uniep.nn.bits import bits_digest, part_digests


class Model(nn.Module):
    def __init__(self, workspace):
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(workspace.cfg.hidden, workspace.cfg.hidden)
        self.moe = uniep.nn.MoE(workspace.cfg, workspace=workspace)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        return self.scale * self.moe(torch.tanh(self.mix(x)))


def train(world, folder, ep_size, steps, spoil=None):
    """Every rank has the same tokens.  spoil: (step, expert): a bit of its w2's gradient changes in that step."""
    cfg = config(dtype=torch.float32, num_experts=8)
    group = world.group(ep_size) if world else None
    with uniep.Workspace(cfg, group, device="cpu") as workspace, DigestLog(folder, group=group) as log:
        model = Model(workspace)
        optimizer = torch.optim.AdamW(model.parameters())
        log.watch(model)
        x = torch.randn(11, cfg.hidden, generator=torch.Generator().manual_seed(1))
        for step in range(steps):
            loss = model(x).square().mean()
            loss.backward()
            first = model.moe.experts.first_expert
            if spoil and step == spoil[0] and 0 <= spoil[1] - first < len(model.moe.experts.w2):
                flat = model.moe.experts.w2.grad[spoil[1] - first].view(torch.int32).flatten()
                flat[77] ^= 1
            log.write(step, model, optimizer=optimizer, loss=loss, rank=workspace.rank)
            optimizer.step()
            optimizer.zero_grad()


def sharded(world, folder):
    """Parameters at EP 2 x FSDP2 over 2, experts and all others DTensors."""
    cfg = config(dtype=torch.float32, num_experts=8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with uniep.Workspace(cfg, mesh["ep"], device="cpu") as workspace, DigestLog(folder) as log:
        model = Model(workspace)
        fully_shard_experts(model, mesh)
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        log.write(0, model)


def diff(*args):
    return CliRunner().invoke(app, ["diff", *map(str, args)], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_parts_add_up_to_the_whole():
    """As bits_digest, however the tensor is cut, and for slices of their own."""
    for shape in ((), (5,), (3, 4), (2, 3, 4)):
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64):
            whole = (torch.randn(shape) * 3).to(dtype)
            digest = part_digests(whole, shape, [0] * whole.ndim)
            assert digest.tolist() == [int(bits_digest(whole))] if shape or whole.element_size() > 1 else True
            for dim in range(whole.ndim):
                total = 0
                for at in range(shape[dim]):
                    offset = [at * (d == dim) for d in range(whole.ndim)]
                    total += int(part_digests(whole.narrow(dim, at, 1), shape, offset))
                assert (total - int(digest)) % 2**64 == 0
            if shape:
                each = [int(part_digests(t, t.shape, [0] * t.ndim)) for t in whole]
                assert part_digests(whole, shape, [0] * whole.ndim, each=True).tolist() == each


@pytest.mark.slow
def test_runs_at_other_ep_sizes_are_compared_tensor_by_tensor(pool, tmp_path):
    folders = [tmp_path / name for name in ("ep1", "ep2", "ep4", "fsdp")]
    train(None, folders[0], 1, 1)
    for ep_size, folder in zip((2, 4), folders[1:3], strict=True):
        pool.run(train, folder, ep_size, 1, ranks=ep_size)
    for folder in folders[1:3]:
        result = diff(folders[0], folder)
        names = result.output
        # Gradients of experts are sums over as many copies of the tokens as there are ranks; parameters are equal.
        assert result.exit_code == 1 and "step 0 is the first that differs" in names, names
        assert "parameter" not in names and "gradient moe.experts.w13, expert 0: float32" in names, names
        assert "values of single ranks, such as" in names and "the runs have 1 and" in names
    pool.run(sharded, folders[3], ranks=4)
    lines = [json.loads(line) for line in (folders[3] / "3.jsonl").read_text().splitlines()]
    assert any(offset and offset[0] for _, offset, _ in lines[1]["tensors"].values()), "a part that begins later"
    for folder in folders[:3]:
        result = diff(folder, folders[3], "--most", "100", "--json", tmp_path / "diff.json")
        found = json.loads((tmp_path / "diff.json").read_text())["differ"]
        assert set(found.values()) == {"only the first run has it"}
        assert not any(name.startswith(("parameter", "buffer")) for name in found)


def test_the_first_bit_that_differs_is_named(pool, tmp_path):
    for name, spoil in (("one", None), ("same", None), ("other", (1, 5))):
        pool.run(train, tmp_path / name, 2, 3, spoil, ranks=2)
    same = diff(tmp_path / "one", tmp_path / "same")
    assert same.exit_code == 0 and "identical" in same.output and "digests of steps 0, 1, 2" in same.output
    other = diff(tmp_path / "one", tmp_path / "other")
    assert other.exit_code == 1 and "step 1 is the first that differs, in 1 tensors" in other.output
    assert "gradient moe.experts.w2, expert 5: float32 (" in other.output
    words = json.loads((tmp_path / "one" / "0.jsonl").read_text().splitlines()[2])["tensors"]
    kinds = list(dict.fromkeys(name.split(" ")[0] for name in words))
    assert kinds == ["parameter", "buffer", "value", "output", "gradient", "state"]
    assert "output moe.experts, number 0" in words


def test_copies_that_differ_between_ranks_are_found(tmp_path):
    for name, digests in (("right", "11"), ("wrong", "12")):
        (tmp_path / name).mkdir()
        for rank, digest in enumerate(digests):
            lines = [{"ranks": 2}, {"step": 7, "tensors": {"parameter head": ["float32 (2,)", [0], digest]}}]
            (tmp_path / name / f"{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = diff(tmp_path / "right", tmp_path / "wrong")
    assert result.exit_code == 1 and "ranks 0 and 1 of one run hold different bits of it" in result.output


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "has no file RANK.jsonl"),
        ({"0": '{"ranks":2}\n'}, "has files of 1 ranks, but 2 wrote"),
        ({"0": "hello\n"}, "0.jsonl, line 1 was not written by a uniep.nn.DigestLog"),
        ({"0": ""}, "0.jsonl is empty"),
        ({"0": '{"ranks":1}\n{"step":9,"tensors":{}}\n'}, "none in common; compare runs of the same steps"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_what_is_no_run(tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    good = tmp_path / "good"
    with DigestLog(good) as log:
        log.write(0, loss=1.0)
        log.write(1, loss=0.5)
    with (good / "0.jsonl").open("a") as cut:
        cut.write('{"step":2,"tens')  # a run that was killed
    assert diff(good, good).exit_code == 0
    result = diff(good, tmp_path)
    assert result.exit_code == 2 and words in result.output and len(result.output.splitlines()) == 1
