# SPDX-License-Identifier: Apache-2.0
"""Shares of the batch, as good as any."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_instances import first_plan, healthy, job

from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.shares import fastest_shares, pace_of

PACES = st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 5)), min_size=1, max_size=3)


@given(PACES, st.integers(0, 6))
def test_no_other_shares_end_sooner(paces: list[tuple[float, float]], more: int) -> None:
    micro_batches = len(paces) + more

    def end(counts: tuple[int, ...]) -> float:
        return max(first + (count - 1) * further for (first, further), count in zip(paces, counts, strict=True))

    counts = fastest_shares(paces, micro_batches)
    assert sum(counts) == micro_batches and min(counts) >= 1
    others = (each for each in product(range(1, micro_batches + 1), repeat=len(paces)) if sum(each) == micro_batches)
    assert end(tuple(counts)) <= min(map(end, others)) * (1 + 1e-9)


def test_a_replicas_pace_is_that_of_1f1b() -> None:
    cost = job(layers=14, micro_batches=24, bandwidth=1e15)
    plan = first_plan(cost, tensor=1, replicas=1, pipeline=4)
    slow = healthy(plan, slow={3: 0.3})
    first, further = pace_of(plan.replicas[0], slow, cost)
    assert evaluate(plan, slow, cost).iteration_s == pytest.approx(first + 23 * further)
