"""`uniep verify --rl`: a policy's bits when it is sampled and when it is trained."""

import dataclasses
import io

import case
import pytest
import torch
import torch.distributed as dist
from case import config
from rich.console import Console
from typer.testing import CliRunner

from uniep.cli import launch, rollout
from uniep.cli.main import app

CFG = config(hidden=32, ffn=32, dtype=torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Few(launch.World):
    """The first ranks of a pool, or this process alone."""

    group: dist.ProcessGroup | None = None

    def gather(self, value):
        if self.group is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


def compared(world, ep_size, tokens):
    """(whether all bits agree, what is printed)."""
    text = io.StringIO()
    here = Few(
        world.rank if world else 0, ep_size, torch.device("cpu"), Console(file=text, width=100), None,
        world.group(ep_size) if world else None,
    )  # fmt: skip
    groups = {size: world.group(size) if world else None for size in (1, 2, 4) if size <= ep_size}
    wrong = rollout.compare(dataclasses.replace(CFG, max_tokens_per_rank=tokens), tokens, 0, here, groups)
    return not wrong, text.getvalue()


def test_sampling_at_one_ep_size_and_training_at_another(pool):
    (same, text), (other, _) = pool.run(compared, 2, 128, ranks=2)
    assert same and other, text
    assert "2  sampled, 1 tokens a call" in text and "2  trained, replayed, recomputed" in text


def test_operators_that_look_at_their_neighbours_are_found(monkeypatch):
    """With PyTorch's own product the bits of one position at a time are others."""
    monkeypatch.setattr(rollout, "linear", torch.nn.functional.linear)
    same, text = compared(None, 1, 64)
    assert not same and "NOT identical" in text


def test_a_routing_of_its_own_is_found(monkeypatch):
    """Routers whose selection bias has moved since: the choice differs, unless it is replayed."""
    train = rollout.train

    def moved(model, *args):
        for block in model.blocks:
            block.moe.router.bias[0] += 1
        return train(model, *args)

    monkeypatch.setattr(rollout, "train", moved)
    same, text = compared(None, 1, 64)
    lines = [line for line in text.splitlines() if "  trained" in line]
    assert not same and lines[0].count("✗") >= 2 and "✗" not in lines[1]


@pytest.mark.parametrize(
    "arguments, words",
    [(["--tokens", "100"], "multiple of 256"), (["--hidden", "65"], "2 heads"), (["--ep", "2,3"], "EP 1, 2, 3")],
)
def test_what_cannot_be_shared_evenly(arguments, words):
    result = CliRunner().invoke(app, ["verify", "--rl", "--experts", "12", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and words in result.output


def test_log_probabilities():
    """Those of log_softmax, for any number of rows alike."""
    logits, targets = torch.randn(3, 5, 256), torch.randint(256, (3, 5))
    found = rollout.log_probabilities(logits, targets)
    want = torch.log_softmax(logits.double(), -1).gather(2, targets[..., None])[..., 0]
    torch.testing.assert_close(found.double(), want)
    case.equal_bits(rollout.log_probabilities(logits[1:2, 2:3], targets[1:2, 2:3]), found[1:2, 2:3], "one row")
