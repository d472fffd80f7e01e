# SPDX-License-Identifier: Apache-2.0
"""Experts that one worker holds, without a distributed optimizer: the job outlives that worker, because another one
keeps a copy of them.
"""

from __future__ import annotations

from typing import Any

import pytest
from jobs import BF16, FP32, Job, Jobs, Tolerance, check_samples, check_training, tiny
from stock_runs import check_like_stock, like_stock_and_back, stock_steps
from test_expert_parallelism import OPTIMIZER, SHARED, check_gone_on_from, degrees
from test_nodes import FUSED, free_port

from megatron_resihp.control import exit_codes

pytestmark = pytest.mark.nightly

PAIR = 2
"""Workers that have two experts each of four."""
FOUR: dict[str, Any] = SHARED | {"expert_model_parallel_size": 4}
JOB_S = 300.0


def keepers(job: Job) -> dict[int, int]:
    """By worker that kept a copy as training ended, whose."""
    return {event["worker"]: event["owner"] for event in job.events("optimizer_copy")}


@pytest.mark.parametrize(("layout", "tolerance"), [({}, FP32), ({"bf16": True}, BF16)], ids=["fp32", "bf16"])
def test_the_last_of_a_pair_goes_on_with_the_other_ones_experts(
    jobs: Jobs, layout: dict[str, Any], tolerance: Tolerance
) -> None:
    layout = SHARED | layout
    stock = stock_steps(jobs, PAIR, **layout)
    healthy = jobs.start(tiny(**layout), workers=PAIR).wait(JOB_S)
    check_like_stock(healthy, stock, tolerance)
    assert keepers(healthy) == {0: 1, 1: 0}
    assert "losing one worker loses no expert" in "".join(healthy.log(worker) for worker in range(PAIR))
    for point in ("backward", "step"):
        job = jobs.start(tiny(**layout, resihp_inject=f"kill:1@4:{point}"), workers=PAIR).wait(JOB_S)
        check_like_stock(job, stock, tolerance)
        check_samples(job)
        assert degrees(job) == [(2, 2), (1, 1)]


def test_the_death_and_the_return_of_one_of_four_that_have_an_expert_each(jobs: Jobs) -> None:
    """The three that are left have all experts each. With the fourth they share them again, and keep copies again."""
    job = like_stock_and_back(jobs, layout=FOUR | {"train_iters": 14}, kill="kill:3@3:step")
    assert degrees(job) == [(4, 4), (1, 3), (4, 4)]
    assert len(keepers(job)) == len({*keepers(job).values()}) == 4


@pytest.mark.parametrize("layout", [{}, OPTIMIZER], ids=["plain", "optimizer"])
def test_a_node_dies_and_copies_of_its_experts_are_on_the_other_one(jobs: Jobs, layout: dict[str, Any]) -> None:
    arguments = tiny(**FOUR, **layout)
    reference = jobs.reference(arguments, workers=4)
    coordinator = ["127.0.0.1", free_port()]
    first, second = (jobs.start(arguments, workers=2, nodes=2, node=n, coordinator=coordinator) for n in range(2))
    first.await_event("iteration", iteration=3)
    second.kill()
    check_training(first.wait(JOB_S), reference)
    assert {death.worker for death in first.summary.deaths} == {2, 3}


def test_an_expert_is_lost_with_the_worker_that_keeps_its_copy(jobs: Jobs) -> None:
    """And so it is where none is kept. Survivors save the rest."""
    both: dict[str, Any] = {"resihp_inject": ["kill:1@4", "kill:2@4"]}
    for flags in (both, {"resihp_inject": "kill:1@4", "resihp_expert_copies": 0}):
        lost = jobs.start(tiny(**FOUR, **flags), workers=4).wait(JOB_S)
        assert lost.code == exit_codes.NO_PLAN, lost.tails()
        assert "of the experts of layer" in lost.output()


@pytest.mark.parametrize("layout", [{}, OPTIMIZER, {"bf16": True}], ids=["plain", "optimizer", "bf16"])
def test_what_the_last_of_a_pair_has_saved_is_gone_on_from(jobs: Jobs, layout: dict[str, Any]) -> None:
    """It is too few for the user. Its file has the experts of the dead one, too."""
    layout = SHARED | layout
    lost = jobs.start(tiny(**layout, resihp_inject="kill:1@4"), workers=PAIR, min_workers=PAIR, script=FUSED)
    assert lost.wait(JOB_S).code == exit_codes.NO_PLAN, lost.tails()
    check_gone_on_from(lost, jobs, PAIR, layout, BF16 if "bf16" in layout else FP32)
