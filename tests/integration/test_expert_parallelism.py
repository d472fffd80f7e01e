# SPDX-License-Identifier: Apache-2.0
"""Experts that replicas share: the job trains what Megatron itself trains, under the job's own degree of expert
parallelism and under smaller ones.
"""

from __future__ import annotations

from typing import Any

import pytest
from jobs import EXPERTS, FP32, WISHING, Job, Jobs, check_samples, tiny
from stock_runs import check_like_stock, forked_stock_steps, losses_of

from megatron_resihp.plan import ParallelPlan
from megatron_resihp.report.run.summary import compare

pytestmark = pytest.mark.nightly

WORKERS = 4
SHARED: dict[str, Any] = EXPERTS | {
    "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall",
    "train_iters": 9, "global_batch_size": 8,
}  # fmt: skip
"""Two pairs of workers: each pair shares the experts."""


def degrees(job: Job) -> list[tuple[int, int]]:
    """Of each epoch: how many replicas share experts, and how many there are."""
    plans = [ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started")]
    return [(plan.expert_parallel, len(plan.replicas)) for plan in plans]


def test_training_shows_in_the_losses(jobs: Jobs) -> None:
    """The negative control of the other tests: a job that learns next to nothing differs from one that learns."""
    stock, other = (forked_stock_steps(jobs, WORKERS, **SHARED | rate) for rate in ({}, {"lr": 1e-9, "min_lr": 0}))
    difference = compare(losses_of(stock), losses_of(other))
    assert difference is not None and difference > 100 * FP32.loss


def test_a_death_and_the_return_of_the_worker(jobs: Jobs) -> None:
    """Three workers have all experts each; with the fourth they share them again."""
    layout = SHARED | {"train_iters": 14}
    stock = forked_stock_steps(jobs, WORKERS, **layout)
    arguments = tiny(**layout, resihp_inject="kill:3@3")
    job = jobs.start(arguments, workers=WORKERS, max_restarts=1, script=WISHING, wishes=["hold-0-7"])
    job.await_event("worker_waiting", waiting=7)
    job.wish("go_on")
    assert job.wait().code == 0, job.tails()
    check_like_stock(job, stock)
    check_samples(job)
    assert degrees(job) == [(2, 4), (1, 3), (2, 4)]
