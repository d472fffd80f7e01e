# SPDX-License-Identifier: Apache-2.0
"""How fast a plan is with a given health."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from megatron_resihp.cost.device import Device, durations, transfers
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS
from megatron_resihp.cost.training import Training
from megatron_resihp.pipeline.planned import program_of
from megatron_resihp.pipeline.simulate import simulate
from megatron_resihp.plan import Chunk, ParallelPlan, Replica, Schedule
from megatron_resihp.planner.evaluation import evaluate, iteration_times, migrating
from megatron_resihp.planner.health import Health, HealthError
from megatron_resihp.planner.strategies.recycle import recycle

MODEL = model_from_arguments({**PRESETS["llama2-7b"], "num_layers": 6})
COST = JobCost(MODEL, Training(4096, sequence_parallel=True), Device(312e12, 0.5, {1: 1.0, 2: 0.9}), micro_batches=4)
WHOLE = ParallelPlan((Replica(((0,),), (0, 1, 2, 3)),))
PIPELINE = ParallelPlan((Replica(((0, 1), (2, 3)), (0, 1, 2, 3)),))


def healthy(workers: int, **changes: float) -> Health:
    return Health({worker: 1.0 for worker in range(workers)} | {int(name[1:]): p for name, p in changes.items()})


def test_one_device_reaches_the_bound() -> None:
    evaluation = evaluate(WHOLE, healthy(1), COST)
    assert evaluation.iteration_s == pytest.approx(4 * COST.seconds(1).sum())
    assert evaluation.share_of_bound == pytest.approx(1)
    assert evaluation.samples_per_s == pytest.approx(4 / evaluation.iteration_s)


def test_a_stage_is_as_fast_as_its_slowest_member() -> None:
    times = [evaluate(PIPELINE, healthy(4, w0=p, w1=q), COST).iteration_s for p, q in ((0.5, 1), (0.5, 0.5), (1, 1))]
    assert times[0] == times[1] > times[2]


def test_no_plan_beats_the_bound() -> None:
    for speed in (1.0, 0.5):
        assert evaluate(PIPELINE, healthy(4, w3=speed), COST).share_of_bound < 1


def test_a_slow_link_delays_what_goes_over_it() -> None:
    cost = JobCost(MODEL, COST.training, Device(312e12, 0.5, bandwidth=1e9), micro_batches=4)
    slow = Health({worker: 1.0 for worker in range(4)}, {(1, 3): 0.5})
    assert evaluate(PIPELINE, slow, cost).iteration_s > evaluate(PIPELINE, healthy(4), cost).iteration_s


def test_split_backward_fills_bubbles() -> None:
    chunks = (Chunk(0, 0, 4), Chunk(1, 4, 8))
    replicas = [Replica(((0,), (1,)), (0, 1, 2, 3), chunks, Schedule(name)) for name in ("1f1b", "zero-bubble-h1")]
    whole, split = (evaluate(ParallelPlan((each,)), healthy(2), COST).iteration_s for each in replicas)
    assert split < whole


TWO = ParallelPlan((Replica(((0,), (1,)), (0, 2), HALVES := (Chunk(0, 0, 4), Chunk(1, 4, 8))),
                    Replica(((2,), (3,)), (1, 3), HALVES)))  # fmt: skip


def migrated() -> tuple[ParallelPlan, Health]:
    """A plan in which replicas work for each other."""
    survivors = Health({0: 1.0, 2: 0.9, 3: 1.0})
    plan = recycle(TWO, survivors, COST)
    assert migrating(plan) == (0, 1)
    return plan, survivors


@pytest.mark.parametrize("case", [lambda: (TWO, healthy(4, w2=0.7)), migrated])
def test_micro_batches_that_are_alike_take_what_a_typical_one_takes(
    case: Callable[[], tuple[ParallelPlan, Health]],
) -> None:
    plan, health = case()
    squares = np.array([1e6, 4096.0**2, 4e7])
    found = iteration_times(plan, health, COST, np.repeat(squares[:, np.newaxis], 4, axis=1))
    alike = [evaluate(plan, health, replace(COST, squares=each)).iteration_s for each in squares]
    assert found == pytest.approx(alike)


def test_each_micro_batch_takes_its_own_time() -> None:
    """As ops and transfers one by one say; the replica with the long documents is the slowest."""
    health, squares = healthy(4, w2=0.7), np.array([[1e6, 9e7, 2e6, 3e7], [9e7, 1e6, 3e7, 2e6]])
    expected = []
    for of_iteration in squares:
        seconds = []
        for replica in TWO.replicas:
            own = [4096.0] * 2, of_iteration[list(replica.micro_batches)]
            cells = durations(replica, MODEL, COST.training, COST.device, *own, health.speed)
            edges = transfers(replica, MODEL, COST.device, own[0])
            seconds.append(simulate(program_of(replica), cells, edges).makespan)
        expected.append(max(seconds))
    assert iteration_times(TWO, health, COST, squares) == pytest.approx(expected)
    assert expected[0] > expected[1]


def test_a_migrated_micro_batch_takes_its_own_time_where_it_is_run() -> None:
    """Worker 3 runs the second half of all four, so each long one makes the iteration longer by its second half at
    least, and by both halves at most."""
    plan, health = migrated()
    more = 39 * COST.typical_squares
    squares = np.full((4, 4), COST.typical_squares) + more * np.eye(4)
    longer = iteration_times(plan, health, COST, squares) - evaluate(plan, health, COST).iteration_s
    first, second = (float(COST.seconds_per_square(1)[:, half].sum() * more) for half in (slice(4), slice(4, None)))
    assert (longer >= second * (1 - 1e-9)).all()
    assert (longer <= (first / 0.9 + second) * (1 + 1e-9)).all()


@pytest.mark.parametrize(
    ("speed", "link", "text"),
    [({0: 0.0}, {}, "worker 0 has speed 0"), ({0: 1.5}, {}, "at most 1"), ({0: 1.0}, {(1, 0): 0.5}, "smaller worker")],
)
def test_health_that_cannot_be(speed: dict[int, float], link: dict[tuple[int, int], float], text: str) -> None:
    with pytest.raises(HealthError, match=text):
        Health(speed, link)
