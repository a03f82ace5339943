"""Threads as ranks meet over one store: every wait ends, failures are told, nobody is taken for an earlier one."""

import contextlib
import random
import threading
import time

import pytest
import torch.distributed as dist

from uniep import waiting
from uniep.errors import ConfigError, InputError, PeerTimeoutError
from uniep.meeting import Board, Meeting, Notices
from uniep.waiting import Patience


def meeting(store, rank, size, timeout_s=5.0):
    made = Meeting(None, timeout_s)
    made.rank, made.size, made.board = rank, size, Board(store, "uniep")
    return made


def ranks(size, act):
    """(results, errors, seconds) of `act(rank)` in a thread for each rank."""
    results, errors, seconds = [None] * size, [None] * size, [0.0] * size

    def work(rank):
        start = time.monotonic()
        try:
            results[rank] = act(rank)
        except Exception as error:
            errors[rank] = error
        seconds[rank] = time.monotonic() - start

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, errors, seconds


def talk(store, rank, size, *, wait_s=0.0, timeout_s=5.0, values=2):
    time.sleep(wait_s)
    with meeting(store, rank, size, timeout_s) as m:
        said = [m.exchange((rank, n), "stage") for n in range(values)]
    return m.session, said


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_values_of_all_ranks_and_nothing_left(tmp_path, kind):
    stores = [dist.HashStore()] * 3 if kind == "hash" else [dist.FileStore(str(tmp_path / "s"), 3) for _ in range(3)]
    for _ in range(2):  # one after the other, in one store
        results, errors, _ = ranks(3, lambda rank: talk(stores[rank], rank, 3))
        assert errors == [None] * 3 and len({session for session, _ in results}) == 1
        assert all(said == [[(r, n) for r in range(3)] for n in range(2)] for _, said in results)
    if kind == "hash":
        assert stores[0].num_keys() == 0


def test_late_ranks_of_one_attempt_do_not_meet_ranks_of_another():
    """Both give up after timeout_s, the late one too, for whom only withdrawn greetings are there; then they meet."""
    store = dist.HashStore()

    def act(rank):
        with pytest.raises(PeerTimeoutError, match=rf"rank {1 - rank} did not come within 0.3 s"):
            talk(store, rank, 2, wait_s=0.7 * rank, timeout_s=0.3)
        return talk(store, rank, 2, wait_s=1.0 - rank)

    results, errors, seconds = ranks(2, act)
    assert errors == [None] * 2 and results[0][0] == results[1][0] and max(seconds) < 4
    assert store.num_keys() == 0


def test_ranks_of_an_earlier_life_are_nobody():
    """Whatever killed ranks have left in the store, in any stage."""
    store = dist.HashStore()
    for values in (0, 1, 2):
        old = [meeting(store, rank, 2, 0.5) for rank in range(2)]
        ranks(2, lambda rank: [old[rank].exchange(rank, "stage") for _ in range(values)])  # noqa: B023
        with contextlib.suppress(PeerTimeoutError):
            old[0].exchange(0, "never reached by rank 1")
    with pytest.raises(PeerTimeoutError, match="rank 1 did not come"):
        talk(store, 0, 2, timeout_s=0.3)
    results, errors, _ = ranks(2, lambda rank: talk(store, rank, 2))
    assert errors == [None] * 2 and results[0] == results[1]


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_come_and_give_up_at_any_time(seed):
    """Until all stay: then all are in one session."""
    store = dist.HashStore()

    def act(rank):
        order = random.Random(10 * seed + rank)
        for _ in range(4):
            with contextlib.suppress(PeerTimeoutError):
                talk(store, rank, 3, wait_s=order.uniform(0, 0.03), timeout_s=order.uniform(0.01, 0.08))
        with contextlib.suppress(PeerTimeoutError):  # told of one who gave up meanwhile
            return talk(store, rank, 3, wait_s=0.3)
        return talk(store, rank, 3)

    results, errors, _ = ranks(3, act)
    assert errors == [None] * 3 and len({session for session, _ in results}) == 1


@pytest.mark.parametrize("before", [0, 1])
def test_a_failure_is_told_at_once(before):
    store = dist.HashStore()

    def act(rank):
        with meeting(store, rank, 3, 20.0) as m:
            for _ in range(before):
                m.exchange(None, "first")
            if rank == 1:
                time.sleep(0.2)  # the others have seen it
                m.exchange(None, "second") if before == 0 else None
                raise OSError("no disk")
            m.exchange(None, "second")
            m.exchange(None, "third")

    _, errors, seconds = ranks(3, act)
    assert isinstance(errors[1], OSError) and max(seconds) < 3
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerTimeoutError) and "rank 1 failed with OSError: no disk" in str(errors[rank])
    assert store.num_keys() == 0


def test_agree_raises_the_first_error_everywhere():
    def act(rank):
        with meeting(store, rank, 3) as m:
            m.agree(rank, InputError(f"bad {rank}") if rank else None, "inputs")

    store = dist.HashStore()
    _, errors, _ = ranks(3, act)
    assert all(isinstance(error, InputError) and str(error) == "bad 1" for error in errors)


def test_versions_that_differ():
    """Every rank names them all."""
    store = dist.HashStore()

    def act(rank):
        made = meeting(store, rank, 2)
        made.version = f"1.{rank}"
        with made as m:
            m.exchange(None, "stage")

    _, errors, _ = ranks(2, act)
    assert all(isinstance(e, ConfigError) and "(rank 0: 1.0, rank 1: 1.1)" in str(e) for e in errors), errors


class Silent:
    """A store whose host is suspended."""

    def __getattr__(self, name):
        return lambda *_: time.sleep(3)


def test_a_store_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError, match=r"store .* did not answer within 0.3 s"):
        talk(Silent(), 0, 2, timeout_s=0.3)
    assert time.monotonic() - start < 2


def test_time_in_which_the_process_did_not_run_does_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    patience = Patience(2.0)
    now[0] += 100  # suspended
    assert not patience.over()
    looks = 0
    while not patience.over():
        now[0] += patience.look()
        looks += 1
    assert 1.8 < now[0] - 100 < 2.1 and looks < 60


def test_notices():
    """What a rank tells is raised in calls that it will not come to; nothing is left once all have left."""
    store = dist.HashStore()

    def act(rank):
        with meeting(store, rank, 2) as m:
            m.exchange(None, "stage")
            return Notices(m)

    (first, second), _, _ = ranks(2, act)
    first.look(7, now=True)
    second.tell(7, "close() was called", failed=False)
    first.look(7, now=True)
    with pytest.raises(PeerTimeoutError, match=r"in call 8.*rank 1 left after call 7 \(close\(\) was called\)"):
        first.look(8, now=True)
    first.tell(8, "ValueError: x", failed=True)
    assert store.num_keys() == 0


def test_who_gives_up_in_an_exchange_takes_its_value_back():
    """A rank that comes after another gave up waiting must not go on alone into what follows."""
    store = dist.HashStore()

    def act(rank):
        with meeting(store, rank, 2, 0.4 if rank == 0 else 3.0) as m:
            m.exchange(rank, "first")
            time.sleep(1.0 * rank)
            return m.exchange(rank, "second")

    results, errors, _ = ranks(2, act)
    assert results == [None] * 2 and all(isinstance(error, PeerTimeoutError) for error in errors)
    assert "rank 0 failed with PeerTimeoutError" in str(errors[1])
