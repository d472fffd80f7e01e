# SPDX-License-Identifier: Apache-2.0
"""What users do today: restart on what is left, or leave a broken replica out."""

from __future__ import annotations

import pytest
from planner_instances import first_plan, healthy, job

from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.strategies.drop_replica import drop_replica
from megatron_resihp.planner.strategies.restart import restart

COST = job()
PLAN = first_plan(COST, tensor=2, replicas=4, pipeline=2)
"""16 workers on 4 nodes."""


def test_restart_keeps_the_shape_and_loses_as_few_replicas_as_the_batch_allows() -> None:
    one = restart(PLAN, healthy(PLAN, dead=(5,)), COST)
    assert [replica.shape for replica in one.replicas] == [(2, 2)] * 2, "8 micro-batches can't be shared by 3 evenly"
    assert {len(replica.micro_batches) for replica in one.replicas} == {4}
    assert restart(PLAN, healthy(PLAN), COST).replicas[0].shape == (2, 2)


def test_restart_uses_what_is_left_of_broken_nodes() -> None:
    plan = restart(PLAN, healthy(PLAN, dead=(0, 4, 8, 12)), COST)
    assert len(plan.replicas) == 2 and len(plan.standbys) == 4


def test_restart_leaves_slow_workers_out_where_it_has_a_choice() -> None:
    plan = restart(PLAN, healthy(PLAN, dead=(0,), slow={9: 0.4, 12: 0.5}), COST)
    assert {9, 12} <= set(plan.standbys)


def test_restart_needs_one_replica() -> None:
    with pytest.raises(NoPlanError, match="1 groups of 2 workers are left; a replica takes 2"):
        restart(PLAN, healthy(PLAN, dead=tuple(range(2, 16))), COST)


def test_a_broken_replica_is_dropped_and_the_others_do_its_work() -> None:
    plan = drop_replica(PLAN, healthy(PLAN, dead=(0,)), COST)
    assert plan.replicas[0].stages == PLAN.replicas[1].stages
    assert [len(replica.micro_batches) for replica in plan.replicas] == [3, 3, 2]
    assert set(plan.standbys) == {worker for worker, _ in PLAN.replicas[0].workers()} - {0}
    assert all(plan.standbys.values()), "they keep their state"
    before, after = (evaluate(each, healthy(PLAN), COST).iteration_s for each in (PLAN, plan))
    assert after > before


def test_a_replica_comes_back_with_its_worker() -> None:
    dropped = drop_replica(PLAN, healthy(PLAN, dead=(0,)), COST)
    again = drop_replica(dropped, healthy(PLAN), COST)
    assert len(again.replicas) == 4 and not again.standbys


def test_nothing_is_left_when_every_replica_is_broken() -> None:
    with pytest.raises(NoPlanError, match="each of the 4 replicas lost a worker"):
        drop_replica(PLAN, healthy(PLAN, dead=(0, 2, 4, 6)), COST)
