"""Workers that died are started anew and join while the others train; then the job is what it was before."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from jobs import WISHING, Job, Jobs, check_training, tiny

from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.places import renamed

WORKERS = 4
TWO_REPLICAS: dict[str, Any] = {"tensor_model_parallel_size": 2, "train_iters": 12}


def plans(job: Job) -> list[ParallelPlan]:
    return [ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started")]


def test_worker_that_died_comes_back_and_the_first_plan_with_it(jobs: Jobs) -> None:
    """The job goes on without it meanwhile, and trains what a run trains to which nothing happened."""
    reference = jobs.reference(tiny(**TWO_REPLICAS), workers=WORKERS)
    arguments = tiny(**TWO_REPLICAS, resihp_drill="kill:3@3")
    # The others are in iteration 7, however long the newcomer takes to start.
    job = jobs.start(arguments, workers=WORKERS, max_restarts=1, script=WISHING, wishes=["hold-0-7"])
    job.await_event("worker_waiting", waiting=7, place=3)
    job.wish("go_on")
    check_training(job.wait(), reference)
    first, alone, again = plans(job)
    assert [len(plan.replicas) for plan in (first, alone)] == [2, 1]
    assert again == renamed(first, lambda worker: 7 if worker == 3 else worker)
    [change] = job.events("reconfiguration")
    assert 7 <= change["resumed_iteration"] <= 9


@pytest.mark.nightly
@pytest.mark.usefixtures("compiled_planner")
def test_a_strategy_gives_it_work(jobs: Jobs) -> None:
    """Between the death and the return three workers share the work, in stages of the planner's choice."""
    model = {"num_layers": 4, "global_batch_size": 8, "train_iters": 12, "pipeline_model_parallel_size": 2}
    reference = jobs.reference(tiny(**model), workers=WORKERS)
    arguments = tiny(**model, resihp_emulate="h800", resihp_strategy="joint", resihp_drill="kill:3@3")
    job = jobs.start(arguments, workers=WORKERS, max_restarts=1, script=WISHING, wishes=["hold-0-7"])
    job.await_event("plan_change", why="worker 7 came back")
    job.wish("go_on")
    check_training(job.wait(), reference)
    _, three, four = plans(job)
    assert set(three.working) == {0, 1, 2} and set(four.working) == {0, 1, 2, 7}


@pytest.mark.nightly
def test_who_dies_while_it_waits_holds_up_nobody_and_comes_back_again(jobs: Jobs) -> None:
    reference = jobs.reference(tiny(**TWO_REPLICAS), workers=WORKERS)
    arguments = tiny(**TWO_REPLICAS, resihp_drill="kill:3@3")
    job = jobs.start(arguments, workers=WORKERS, max_restarts=2, script=WISHING, wishes=["hold-0-7"])
    job.await_event("worker_waiting", waiting=7)
    os.kill(job.worker_pids()[7], signal.SIGKILL)
    job.await_event("worker_waiting", waiting=11)
    job.wish("go_on")
    check_training(job.wait(), reference)
    assert plans(job)[-1].members == (0, 1, 2, 11)
