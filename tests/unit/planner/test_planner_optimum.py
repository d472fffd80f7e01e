# SPDX-License-Identifier: Apache-2.0
"""The optimum that plans are measured against, held against all plans of jobs so small that all can be tried."""

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations, product

import numpy as np
import pytest
from planner_optimum import NotProvenError, optimum

from megatron_resihp.cost.device import Device
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS
from megatron_resihp.cost.training import Training
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.search.makespan import pipeline_makespan
from megatron_resihp.planner.search.tables import Tables, tables_of

MODEL = model_from_arguments({**PRESETS["llama2-7b"], "num_layers": 3})
Replica = tuple[float, ...]
"""Speed of each stage, which is one worker."""


def job(micro_batches: int, memory_gb: int) -> JobCost:
    """Every worker is a node, so that groups are single workers."""
    device = Device(312e12, 0.5, memory=memory_gb * 2**30, latency=1e-3, bandwidth=25e9)
    return JobCost(MODEL, Training(4096, sequence_parallel=True), device, micro_batches, workers_per_node=1)


@pytest.mark.parametrize("memory_gb", [80, 16, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 0.4), (1.0, 1.0, 0.7), (1.0, 0.9, 0.5)])
def test_the_optimum_is_the_best_of_all_plans(speeds: Replica, micro_batches: int, memory_gb: int) -> None:
    cost = job(micro_batches, memory_gb)
    tables = tables_of(cost, True)
    expected = min(
        _seconds(tables, replicas, micro_batches)
        for workers in range(1, len(speeds) + 1)
        for order in permutations(speeds, workers)
        for replicas in _cuts(order)
    )
    assert optimum(Health(dict(enumerate(speeds))), cost) == pytest.approx(expected)


def test_spent_trials_are_told() -> None:
    with pytest.raises(NotProvenError):
        optimum(Health({0: 1.0, 1: 1.0, 2: 0.7}), job(5, 80), trials=3)


def _cuts(order: Replica) -> Iterator[tuple[Replica, ...]]:
    """All ways to cut workers in a row into replicas."""
    for count in range(len(order)):
        for cuts in combinations(range(1, len(order)), count):
            yield tuple(order[first:end] for first, end in pairwise((0, *cuts, len(order))))


def _seconds(tables: Tables, replicas: tuple[Replica, ...], micro_batches: int) -> float:
    """Of the best shares and layers."""
    shares = product(range(1, micro_batches + 1), repeat=len(replicas))
    return min(
        (
            max(_least(tables, replica, share) for replica, share in zip(replicas, each, strict=True))
            for each in shares
            if sum(each) == micro_batches
        ),
        default=np.inf,
    )


def _least(tables: Tables, replica: Replica, micro_batches: int) -> float:
    """Seconds of a pipeline with the best layers for each stage."""
    stages, layers = len(replica), tables.forward.shape[1]
    least = np.inf
    for cut in combinations(range(layers + stages - 1), stages - 1):
        ends = (0, *(place - number for number, place in enumerate(cut)), layers)
        parts = [slice(first, end) for first, end in pairwise(ends)]
        if all(_fits(tables, part, min(stages - stage, micro_batches)) for stage, part in enumerate(parts)):
            forward, backward = (
                np.array([each[1, part].sum() / speed for part, speed in zip(parts, replica, strict=True)])
                for each in (tables.forward, tables.backward)
            )
            transfer, none = np.full(stages, tables.transfer[1, 1]), np.zeros(stages)
            scratch = np.empty((2, stages))
            seconds = pipeline_makespan(forward, backward, none, transfer, stages, micro_batches, *scratch)
            least = min(least, seconds)
    return least


def _fits(tables: Tables, part: slice, in_flight: int) -> bool:
    state = (tables.held + tables.shared)[1, part].sum()
    return bool(
        state + tables.kept[1, part].sum() * in_flight + tables.working[1, part].max(initial=0) <= tables.memory
    )
