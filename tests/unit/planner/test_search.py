# SPDX-License-Identifier: Apache-2.0
"""The parts of the joint search: pipelines' makespans, layers per stage, groups inside nodes."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resihp.cost.device import Device
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS
from megatron_resihp.cost.training import Training
from megatron_resihp.pipeline.schedules import one_f_one_b, zero_bubble_h1
from megatron_resihp.pipeline.simulate import simulate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.search.groups import form_groups, members_of, nodes_of
from megatron_resihp.planner.search.makespan import pipeline_makespan
from megatron_resihp.planner.search.stages import split_layers
from megatron_resihp.planner.search.tables import tables_of

MODEL = model_from_arguments({**PRESETS["llama2-7b"], "num_layers": 8})
COST = JobCost(MODEL, Training(4096, sequence_parallel=True), Device(312e12, 0.5), 8, workers_per_node=4)
TABLES = tables_of(COST, True)

seconds = st.floats(0.0, 9.0)


@given(st.lists(st.tuples(*[seconds] * 4), min_size=1, max_size=6), st.integers(1, 9), st.booleans())
def test_makespan_is_that_of_the_simulated_program(
    stages: list[tuple[float, float, float, float]], micro_batches: int, splits_backward: bool
) -> None:
    forward, backward, weight, transfer = (np.array(column) for column in zip(*stages, strict=True))
    program = (zero_bubble_h1 if splits_backward else one_f_one_b)(len(stages), micro_batches)
    weight *= splits_backward
    expected = simulate(program, np.stack([forward, backward, weight])[..., np.newaxis], transfer[:-1, np.newaxis])
    scratch = np.empty((2, len(stages)))
    found = pipeline_makespan(forward, backward, weight, transfer, len(stages), micro_batches, *scratch)
    assert found == pytest.approx(expected.makespan)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.floats(0.2, 1.0)), min_size=1, max_size=4))
def test_layers_are_split_as_well_as_any_split_in_memory(groups: list[tuple[int, float]]) -> None:
    degree, speed = np.array([group[0] for group in groups]), np.array([group[1] for group in groups])
    tables = TABLES._replace(memory=30e9)
    ends = np.zeros(len(groups), np.int64)
    fits = split_layers(tables, degree, speed, len(groups), 8, 1, ends) == 0
    best = _least_by_trying(tables, degree, speed)
    assert fits == (best < np.inf)
    if fits:
        assert _longest(tables, degree, speed, tuple(ends)) == pytest.approx(best, rel=1e-4)


def _least_by_trying(tables, degree, speed):  # type: ignore[no-untyped-def]
    layers, stages = COST.layers, len(degree)
    cuts = combinations(range(layers + stages - 1), stages - 1)
    ends = ((*(place - number for number, place in enumerate(cut)), layers) for cut in cuts)
    return min(_longest(tables, degree, speed, each) for each in ends)


def _longest(tables, degree, speed, ends):  # type: ignore[no-untyped-def]
    """Seconds of the slowest stage; infinite if one doesn't fit."""
    longest = 0.0
    for stage, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
        k, part = degree[stage], slice(first, end)
        state = (tables.held + tables.shared)[k, part].sum()
        memory = state + tables.kept[k, part].sum() * (len(ends) - stage) + tables.working[k, part].max(initial=0)
        if memory > tables.memory:
            return np.inf
        longest = max(longest, (tables.forward + tables.backward)[k, part].sum() / speed[stage])
    return longest


def test_dear_stages_make_large_groups_and_cheap_ones_small() -> None:
    nodes = nodes_of(Health({0: 1.0, 1: 1.0, 2: 0.5, 3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0}), 4)
    rate = np.array([0.0, 1.0, 1.9, 2.7, 3.4])
    formed = {price: form_groups(nodes, rate, price) for price in (0.0, 0.3, 9.0)}
    groups = {price: {members_of(nodes, group) for group in working} for price, (working, _) in formed.items()}
    assert groups[0.0] == {(each,) for each in range(7)}
    assert groups[0.3] == {(0, 1, 3), (2,), (4, 5, 6)}
    assert groups[9.0] == {(0, 1, 3), (4, 5, 6)}
    assert [members_of(nodes, group) for group in formed[9.0][1]] == [(2,)]
