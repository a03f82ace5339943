"""What ranks of the Hopper backend tell each other, interpreted as two processes; scenarios: calls_rank.py."""

import tempfile
from pathlib import Path

import pytest
import torch
from calls_rank import LIMIT_S, LONG_S, RANKS
from hopper_on_host import run_as_ranks


@pytest.fixture(scope="module")
def seen():
    """Scenario -> what each rank saw."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="uniep-test-") as folder:
        run_as_ranks("calls_rank.py", RANKS, LIMIT_S + 20, folder)
        of_rank = [torch.load(Path(folder) / f"result-{rank}") for rank in range(RANKS)]
    return {name: [found[name] for found in of_rank] for name in of_rank[0]}


def same_error(found, text):
    """On both ranks, with this text; "": no error."""
    errors = {rank["error"] for rank in found}
    assert len(errors) == 1, errors
    error = errors.pop()
    assert error.startswith(text) and bool(error) == bool(text), error


@pytest.mark.parametrize("name", ["backwards", "backwards, mega", "backwards, again"])
def test_backwards_of_different_forwards_give_no_gradient(seen, name):
    same_error(seen[name], "UniEPError: call 3: ranks run the backward of different forwards")
    assert all(rank["nan"] for rank in seen[name])


def test_gradients_on_one_rank_only(seen):
    listed = "rank 0: forward, rank 1: forward without gradients"
    same_error(seen["gradients"], f"UniEPError: ranks are in different operations in call 1 ({listed})")
    assert all(rank["afterwards"] for rank in seen["gradients"])


def test_layers(seen):
    same_error(seen["layers"], "UniEPError: call 1: ranks are in different layers (rank 0: layer 1, rank 1: layer 2")
    same_error(seen["draws"], "UniEPError: call 1: ranks initialised this layer from different random numbers")
    same_error(seen["one known layer"], "")


def test_experts_taken_for_copies(seen):
    copied = "UniEPError: call 1: ranks 0 and 1 hold different experts, but their weights have become equal"
    same_error(seen["copies"], copied)
    for rank in seen["copies, sync-free"]:
        assert not rank["error"]
        assert copied in rank["checked"], "check() says so"
        assert copied in rank["second"], "and the next look, on every rank"
    for rank in (*seen["copies"], *seen["copies, sync-free"]):
        assert not rank["last"], "the Workspace works"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("memory, forward", "MemoryError: 2 GiB"),
        ("memory, mega", "MemoryError: 2 GiB"),
        ("interrupt, backward", "KeyboardInterrupt: "),
    ],
)
def test_an_exception_inside_a_call_ends_it_on_all_ranks(seen, name, error):
    told, failed = seen[name]
    assert failed["error"] == error
    assert failed["told"] == [error]
    assert told["error"] == f"PeerTimeoutError: rank 0 cannot go on: rank 1 failed with {error}"
    assert told["nan"]
    assert told["s"] < LONG_S / 2


def test_a_rank_that_left(seen):
    told = seen["left"][0]
    left = "rank 0, in call 2, cannot go on: rank 1 left after call 1 (ValueError: the data are at their end)"
    assert told["error"].startswith(f"PeerTimeoutError: {left}")
    assert told["s"] < LONG_S / 2


def test_a_refusal_without_host_reads_leaves_nobody_waiting(seen):
    told, refused = seen["refused"]
    assert told["nan"]
    assert told["error"] == "UniEPError: rank 1: no such thing"
    assert "rank 1, in call 2, cannot go on: rank 0 left after call 1" in refused["error"]
    assert refused["s"] < LONG_S / 2


def test_a_refused_forward_counts_on_no_rank(seen):
    """Who refused is not behind."""
    assert seen["refused, then others"][0]["refused"] == "UniEPError: rank 1: no such thing"
    different = "UniEPError: ranks are in different operations in call 2 (rank 0: forward, rank 1: forward without grad"
    same_error(seen["refused, then others"], different)
    assert all("ahead" not in rank["error"] for rank in seen["refused, then others"])


def test_workspaces_in_another_order(seen):
    errors = [rank["error"] for rank in seen["order"]]
    assert all(error.startswith("PeerTimeoutError: rank") for error in errors), errors
    # Who gives up first says where the other one is.
    assert any("is in call 1 of Workspace" in error for error in errors), errors


@pytest.mark.parametrize("name", ["checkpointed", "checkpointed, no gate"])
def test_what_checkpointing_compares(seen, name):
    for rank in seen[name]:
        first, again = rank["shapes"]
        assert first == again
        assert rank["same"] == [True] * 6
    assert any(first != again for first, again in (rank["allocated"] for rank in seen[name]))


def test_calls_past_the_last_number(seen):
    for rank in seen["wrap"]:
        assert rank["same"] == [True, True]
        assert -3 <= rank["last"] <= 8
