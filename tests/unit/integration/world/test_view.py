# SPDX-License-Identifier: Apache-2.0
"""What workers are under a uniform plan whose replicas share experts, or sequences."""

from __future__ import annotations

import pytest

from megatron_resihp.integration.world.view import UniformView
from megatron_resihp.plan import ParallelPlan, Replica

SHARES = ((0, 4), (1, 5), (2,), (3,))
PLAN = ParallelPlan(tuple(Replica(((w,),), share) for w, share in enumerate(SHARES)), expert_parallel=2)
VIEWS = [UniformView(PLAN, worker, pipeline_last=True) for worker in range(4)]


@pytest.mark.parametrize(("count", "runs"), [(1, [1, 1, 1, 1]), (5, [2, 2, 1, 1]), (7, [2, 2, 2, 2])])
def test_those_that_share_evaluate_as_many_micro_batches(count: int, runs: list[int]) -> None:
    """Each meets the other one in every layer, also with micro-batches that count nothing."""
    assert [view.evaluation_runs(count) for view in VIEWS] == runs
    assert [len(view.evaluation_order(count)) for view in VIEWS] == runs
    assert sorted(index for view in VIEWS for index in view.evaluation_share(count)) == list(range(count))


def test_ops_that_can_only_be_run_together_have_one_number() -> None:
    assert [view.op_numbers for view in VIEWS] == [(0, 4), (0, 4), (2,), (2,)]
    assert [view.numbering for view in VIEWS] == list(SHARES)


def test_who_has_fewer_micro_batches_runs_its_last_one_again_and_counts_it_once() -> None:
    shares = ((0, 5), (1, 4, 6), (2,), (3,))
    plan = ParallelPlan(tuple(Replica(((w,),), share) for w, share in enumerate(shares)), expert_parallel=2)
    views = [UniformView(plan, worker, pipeline_last=True) for worker in range(4)]
    assert [view.read_order for view in views] == [(0, 5, 5), (1, 4, 6), (2,), (3,)]
    assert [view.numbering for view in views] == [view.read_order for view in views]
    assert [view.counted for view in views] == list(shares)
    assert [[view.counts(number) for number in range(3)] for view in views[:2]] == [[True, True, False], [True] * 3]
    assert [view.op_numbers for view in views] == [(1, 4, 6), (1, 4, 6), (2,), (2,)]


def test_groups_of_unlike_sizes_evaluate_as_much_as_they_are_large() -> None:
    hands = ((0, 1, 2), (0, 1, 2), (3,))
    replicas = tuple(Replica(((w,),), hand) for w, hand in enumerate(hands))
    plan = ParallelPlan(replicas, context_parallel=2, context_groups=(2, 1))
    views = [UniformView(plan, worker, pipeline_last=True) for worker in range(3)]
    assert [list(view.evaluation_share(6)) for view in views] == [[0, 2, 4, 5], [0, 2, 4, 5], [1, 3]]
    assert [view.evaluation_runs(6) for view in views] == [4, 4, 2]
    assert [list(view.evaluation_share(1)) for view in views] == [[0], [0], []]
    assert [view.evaluation_runs(1) for view in views] == [1, 1, 1]
    assert [view.feeds_first for view in views] == [True, False, True]
