# SPDX-License-Identifier: Apache-2.0
"""AdaPtis as a strategy: faster pipelines without any failure, and valid ones after some."""

from dataclasses import replace

import pytest

from megatron_resihp.cost.device import Device
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError
from megatron_resihp.planner.strategies.adaptis import adaptis, with_effort

MODEL = model_from_arguments({**PRESETS["gemma-2b"], "num_layers": 8})
COST = JobCost(MODEL, Training(2048, sequence_parallel=True), Device(312e12, 0.5, {1: 1.0, 2: 0.9}), micro_batches=8)
PLAN = ParallelPlan((Replica(((0, 1), (2, 3)), (0, 1, 2, 3)), Replica(((4, 5), (6, 7)), (4, 5, 6, 7))))
quick = with_effort(200_000)


def healthy(workers: int = 8, **changes: float) -> Health:
    return Health({worker: 1.0 for worker in range(workers)} | {int(name[1:]): p for name, p in changes.items()})


def test_speeds_up_a_heterogeneous_model_without_any_failure() -> None:
    """A big vocabulary makes the last stage slow where layers are split evenly."""
    after = adaptis(PLAN, healthy(), COST)
    before, after_s = (evaluate(plan, healthy(), COST).iteration_s for plan in (PLAN, after))
    assert after_s < before / 1.3
    assert after.working == PLAN.working


def test_gives_a_slow_group_less_to_do() -> None:
    slow = healthy(w2=0.5)
    before, after = (evaluate(plan, slow, COST).iteration_s for plan in (quick(PLAN, healthy(), COST), PLAN))
    assert evaluate(quick(PLAN, slow, COST), slow, COST).iteration_s < min(before, after)


@pytest.mark.parametrize("dead", [(0,), (0, 1), (0, 1, 2, 3), (1, 4, 5, 6, 7)])
def test_goes_on_with_what_is_left(dead: tuple[int, ...]) -> None:
    health = Health({worker: 1.0 for worker in range(8) if worker not in dead})
    plan = quick(PLAN, health, COST)
    assert plan.members == health.live
    assert plan.micro_batch_count == 8
    assert evaluate(plan, health, COST).share_of_bound <= 1


def test_workers_that_come_back_are_used() -> None:
    fewer = quick(PLAN, Health({worker: 1.0 for worker in range(6)}), COST)
    back = quick(fewer, healthy(), COST)
    assert not back.standbys
    assert evaluate(back, healthy(), COST).iteration_s < evaluate(fewer, healthy(), COST).iteration_s


def test_a_plan_that_is_as_fast_stays() -> None:
    tuned = quick(PLAN, healthy(), COST)
    assert quick(tuned, healthy(), COST) == tuned


def test_says_why_nothing_fits() -> None:
    with pytest.raises(NoPlanError, match="no pipeline fits"):
        quick(PLAN, healthy(), replace(COST, device=Device(312e12, memory=2**30)))
