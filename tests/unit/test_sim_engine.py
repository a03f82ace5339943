"""The simulator's engine: bounds, sharing, the same bytes, and speed."""

import dataclasses
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import UNIT, graphs, workers

from uniep.errors import ConfigError
from uniep.sim.costs import Costs
from uniep.sim.engine import Queue, run
from uniep.taskflow.graph import WORKERS, Block, Event, Task, from_tasks
from uniep.taskflow.scheduler import assign, longest_paths


def class_queues(graph, matrix, vector):
    count = {"matrix": matrix, "vector": vector}
    return [
        Queue(rank, worker, count[worker], graph.indices(rank, worker).tolist())
        for rank in range(graph.ep_size)
        for worker in WORKERS
    ]


def with_flows(graph, alone_N, flows, capacity):
    """flows: (task, resource, bytes per ns)."""
    flows = sorted(flows)
    count = torch.bincount(torch.tensor([f[0] for f in flows], dtype=torch.int64), minlength=graph.num_tasks)
    return dataclasses.replace(
        Costs.without_contention(graph, alone_N),
        flow_start_N1=torch.cat([torch.zeros(1, dtype=torch.int64), count.cumsum(0)]),
        flow_resource_F=torch.tensor([f[1] for f in flows], dtype=torch.int64),
        flow_demand_F=torch.tensor([f[2] for f in flows], dtype=torch.float64),
        capacity=torch.tensor(capacity, dtype=torch.float64),
    )


def random_flows(graph, seed, resources=3):
    rng = random.Random(seed)
    return [
        (task, resource, rng.choice([0.5, 1.0, 3.0]))
        for task in range(graph.num_tasks)
        for resource in range(resources)
        if rng.random() < 0.6
    ]


def lone_tasks(count):
    return from_tasks(1, [Task("t", "vector", 0, Block(0, i, i + 1, 0, 1)) for i in range(count)])


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_no_faster_than_path_and_work_allow(graph, matrix, vector, seed):
    alone_N = UNIT.cost(graph)
    flows = random_flows(graph, seed)
    costs = with_flows(graph, alone_N, flows, [1.0, 2.0, 4.0])
    queues = class_queues(graph, matrix, vector)
    made = run(graph, queues, costs)
    assert made.makespan_ns >= int(longest_paths(graph, alone_N).max())
    for queue in queues:
        assert made.makespan_ns * queue.workers >= int(alone_N[torch.tensor(queue.tasks, dtype=torch.int64)].sum())
    for resource, capacity in enumerate(costs.capacity.tolist()):
        moved = sum(int(alone_N[task]) * demand for task, r, demand in flows if r == resource)
        assert made.makespan_ns * capacity >= moved - 1e-3, "no resource gives more than it has"
    assert bool((made.finish_N - made.start_N >= alone_N).all()) and bool((made.start_N >= made.claimed_N).all())
    again = run(graph, queues, costs)
    for name in ("claimed_N", "start_N", "finish_N", "queue_N", "worker_N"):
        assert torch.equal(getattr(made, name), getattr(again, name))


@settings(max_examples=40, deadline=None)
@given(graphs(), st.integers(1, 3), st.integers(1, 3))
def test_without_contention_it_is_the_static_scheduler(graph, matrix, vector):
    alone_N = UNIT.cost(graph)
    planned = assign(graph, workers(matrix, vector), alone_N)
    costs = Costs.without_contention(graph, alone_N)
    made = run(graph, class_queues(graph, matrix, vector), costs)
    assert torch.equal(made.start_N, planned.start_N) and torch.equal(made.finish_N, planned.finish_N)
    own = [Queue(name.rank, str(name), 1, tasks) for name, tasks in planned.queues.items()]
    assert torch.equal(run(graph, own, costs).finish_N, planned.finish_N)


@settings(max_examples=40, deadline=None)
@given(graphs(), st.integers(0, 99), st.sampled_from([0.5, 0.9]))
def test_faster_workers_never_hurt_queues_without_contention(graph, seed, factor):
    """Queues are fixed, and an end is the later of two ends plus a time: a monotone function of times."""
    alone_N = UNIT.cost(graph)
    rng = random.Random(seed)
    faster_N = torch.tensor([max(1, int(a * factor)) if rng.random() < 0.5 else a for a in alone_N.tolist()])
    own = [Queue(n.rank, str(n), 1, tasks) for n, tasks in assign(graph, workers(2, 2), alone_N).queues.items()]
    slow, fast = (run(graph, own, Costs.without_contention(graph, c)) for c in (alone_N, faster_N))
    assert bool((fast.finish_N <= slow.finish_N).all())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=12),
       st.floats(0.3, 8), st.floats(1, 4))  # fmt: skip
def test_more_bandwidth_never_hurts_tasks_that_only_share(tasks, capacity, more):
    graph = lone_tasks(len(tasks))
    alone_N = torch.tensor([alone for alone, _ in tasks])
    flows = [(i, 0, demand) for i, (_, demand) in enumerate(tasks)]
    queues = class_queues(graph, 1, len(tasks))
    slow, fast = (run(graph, queues, with_flows(graph, alone_N, flows, [c])) for c in (capacity, capacity * more))
    assert bool((fast.finish_N <= slow.finish_N).all())


def test_sharing_by_hand():
    """Capacity 2; tasks of 10, 10 and 20 ns that ask for 2 each: all at a third of their speed until 30, when two are
    over; the third has 10 left, which it gets at full speed."""
    graph = lone_tasks(3)
    alone_N = torch.tensor([10, 10, 20])
    made = run(graph, class_queues(graph, 1, 3), with_flows(graph, alone_N, [(i, 0, 2.0) for i in range(3)], [2.0]))
    assert made.finish_N.tolist() == [30, 30, 40]
    # One that comes later: alone until 5, halved until the first ends at 15, then alone.
    first = Task("a", "vector", 0, Block(0, 0, 1, 0, 1))
    gate, later = (
        Task("b", "matrix", 0, Block(0, 1, 2, 0, 1), (), (Event(0, "e", 0),)),
        Task("c", "vector", 0, Block(0, 2, 3, 0, 1), ((Event(0, "e", 0), 1),)),
    )
    graph = from_tasks(1, [first, gate, later])
    costs = with_flows(graph, torch.tensor([10, 5, 10]), [(0, 0, 2.0), (2, 0, 2.0)], [2.0])
    made = run(graph, class_queues(graph, 1, 2), costs)
    assert made.start_N.tolist() == [0, 0, 5] and made.finish_N.tolist() == [15, 5, 20]


def test_the_slowest_of_several_resources_decides():
    graph = lone_tasks(2)
    flows = [(0, 0, 1.0), (0, 1, 1.0), (1, 1, 3.0)]
    made = run(graph, class_queues(graph, 1, 2), with_flows(graph, torch.tensor([10, 10]), flows, [9.0, 2.0]))
    assert made.finish_N.tolist() == [20, 20]


def test_events_are_seen_late_and_waiting_workers_look_now_and_then():
    event = Event(0, "e", 0)
    tasks = [Task("a", "matrix", 0, Block(0, 0, 1, 0, 1), (), (event,)),
             Task("b", "vector", 0, Block(0, 1, 2, 0, 1), ((event, 1),))]  # fmt: skip
    graph = from_tasks(1, tasks)
    costs = dataclasses.replace(
        Costs.without_contention(graph, torch.tensor([10, 5])), delay_V=torch.tensor([3]), poll_N=torch.tensor([7, 4])
    )
    made = run(graph, class_queues(graph, 1, 1), costs)
    assert made.start_N.tolist() == [0, 17] and made.finish_N.tolist() == [10, 22]


def test_workers_that_join_another_queue():
    """Two of four workers push two tasks of 10 each, then help with eight tasks of 10: 2 workers until 10, then 4."""
    graph = lone_tasks(10)
    queues = [Queue(0, "worker", 2, range(2, 10)), Queue(0, "worker", 2, [0, 1], 0)]
    made = run(graph, queues, Costs.without_contention(graph, torch.full((10,), 10)))
    assert made.makespan_ns == 30 and sorted(set(made.worker_N[made.queue_N == 0].tolist())) == [0, 1, 2, 3]


def test_queues_that_block_are_told():
    event = Event(0, "e", 0)
    tasks = [Task("a", "vector", 0, Block(0, 0, 1, 0, 1), ((event, 1),)),
             Task("b", "vector", 0, Block(0, 1, 2, 0, 1), (), (event,))]  # fmt: skip
    graph = from_tasks(1, tasks)
    with pytest.raises(ConfigError, match="order of tasks that blocks"):
        run(graph, class_queues(graph, 1, 1), Costs.without_contention(graph, torch.tensor([1, 1])))


def test_speed():
    """The log has rates on an idle core. Shared cores are up to ten times slower; this tells an order of growth."""
    graph = lone_tasks(50_000)
    alone_N = torch.arange(50_000) % 97 + 1
    queues = class_queues(graph, 1, 64)
    flows = [(i, i % 2, 1.0) for i in range(50_000)]
    for costs, least in (
        (Costs.without_contention(graph, alone_N), 50_000), (with_flows(graph, alone_N, flows, [8.0, 8.0]), 10_000)
    ):  # fmt: skip
        start = time.process_time()
        run(graph, queues, costs)
        assert 50_000 / (time.process_time() - start) > least
