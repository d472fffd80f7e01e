# SPDX-License-Identifier: Apache-2.0
"""Workers that died are started anew and join while the others train; then the job is what it was before."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from jobs import BIASED, EXPERTS, WISHING, Job, Jobs, check_digests, check_training, difference_table, tiny
from test_plans import PREDICTIONS

from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.slots import renamed
from megatron_resihp.report.run.summary import compare

WORKERS = 4
TWO_REPLICAS: dict[str, Any] = {"tensor_model_parallel_size": 2, "train_iters": 12}
MIXTURE = EXPERTS | {"sequence_parallel": True}
PIPELINE: dict[str, Any] = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}


def plans(job: Job) -> list[ParallelPlan]:
    return [ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started")]


@pytest.mark.parametrize(
    "model",
    [
        {},
        pytest.param(MIXTURE, marks=pytest.mark.nightly),
        pytest.param(BIASED | {"sequence_parallel": True}, marks=pytest.mark.nightly),
        pytest.param(PREDICTIONS | PIPELINE, marks=pytest.mark.nightly),
    ],
    ids=["dense", "experts", "expert biases", "further predictions"],
)
def test_worker_that_died_comes_back_and_the_first_plan_with_it(jobs: Jobs, model: dict[str, Any]) -> None:
    """The job goes on without it meanwhile, and trains what a run trains to which nothing happened."""
    reference = jobs.reference(tiny(**TWO_REPLICAS | model), workers=WORKERS)
    arguments = tiny(**TWO_REPLICAS | model, resihp_inject="kill:3@3")
    # The others are in iteration 7 at most, however long the joining worker takes to start.
    job = jobs.start(arguments, workers=WORKERS, max_restarts=1, script=WISHING, wishes=["hold-0-7"])
    job.await_event("worker_waiting", waiting=7, place=3)
    job.wish("go_on")
    check_training(job.wait(), reference)
    first, alone, again = plans(job)
    assert [len(plan.replicas) for plan in (first, alone)] == [2, 1]
    assert again == renamed(first, lambda worker: 7 if worker == 3 else worker)
    [change] = job.events("reconfiguration")
    assert change["resumed_iteration"] <= 9
    assert job.summary.came_back == (7,)


@pytest.mark.nightly
@pytest.mark.usefixtures("compiled_planner")
def test_a_strategy_gives_it_work(jobs: Jobs) -> None:
    """Between the death and the return three workers share the work, in stages of the planner's choice."""
    model = {"num_layers": 4, "global_batch_size": 8, "train_iters": 12, "pipeline_model_parallel_size": 2}
    reference = jobs.reference(tiny(**model), workers=WORKERS)
    strategy = {"resihp_strategy": "joint", "resihp_plan_wait": 60.0}
    arguments = tiny(**model, **strategy, resihp_emulate="h800", resihp_inject="kill:3@3")
    job = jobs.start(arguments, workers=WORKERS, max_restarts=1, script=WISHING, wishes=["hold-0-7"])
    job.await_event("plan_change", why="worker 7 came back")
    job.wish("go_on")
    check_training(job.wait(), reference)
    _, three, four = plans(job)
    assert set(three.working) == {0, 1, 2} and set(four.working) == {0, 1, 2, 7}


@pytest.mark.nightly
def test_who_dies_while_it_waits_holds_up_nobody_and_comes_back_again(jobs: Jobs) -> None:
    reference = jobs.reference(tiny(**TWO_REPLICAS), workers=WORKERS)
    arguments = tiny(**TWO_REPLICAS, resihp_inject="kill:3@3")
    job = jobs.start(arguments, workers=WORKERS, max_restarts=2, script=WISHING, wishes=["hold-0-7"])
    job.await_event("worker_waiting", waiting=7)
    os.kill(job.worker_pids()[7], signal.SIGKILL)
    job.await_event("worker_waiting", waiting=11)
    job.wish("go_on")
    check_training(job.wait(), reference)
    assert plans(job)[-1].members == (0, 1, 2, 11)


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["recovery-rebuild", "recovery-ready"])
def test_who_dies_while_it_is_taken_in_and_comes_back_again(jobs: Jobs, point: str) -> None:
    reference = jobs.reference(tiny(**TWO_REPLICAS), workers=WORKERS)
    arguments = tiny(**TWO_REPLICAS, resihp_inject=["kill:3@3", f"kill:7@1:{point}"])
    wishes = ["hold-0-6", "hold-0-10"]
    job = jobs.start(arguments, workers=WORKERS, max_restarts=2, script=WISHING, wishes=wishes)
    for iteration, worker in ((6, 7), (10, 11)):
        job.await_event("worker_waiting", waiting=worker)
        job.wish(f"go_on-{iteration}")
    check_training(job.wait(), reference)
    assert plans(job)[-1].members == (0, 1, 2, 11) and len(plans(job)[-1].replicas) == 2


@pytest.mark.nightly
def test_in_a_resumed_job_it_needs_no_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    """State, counters, cursor and learning rate come from the others, who have them from the checkpoint."""
    saving = tiny(**TWO_REPLICAS | {"save": tmp_path / "saved", "save_interval": 3, "exit_interval": 3})
    first = jobs.run(saving, workers=WORKERS)
    assert first.code == 0, first.tails()
    schedule = {"use_checkpoint_opt_param_scheduler": True, "lr_decay_iters": 40, "adam_beta2": 0.5}
    arguments = tiny(**TWO_REPLICAS | schedule | {"load": tmp_path / "saved"})
    reference = jobs.reference(arguments, workers=WORKERS)
    loading = [*arguments, "--resihp-inject", "kill:3@5"]
    job = jobs.start(loading, workers=WORKERS, max_restarts=1, script=WISHING, wishes=["hold-0-8"])
    job.await_event("worker_waiting", waiting=7)
    job.wish("go_on")
    assert job.wait().code == 0, job.tails()
    assert sorted(job.summary.loss) == list(range(4, 13))
    difference = compare(job.summary.loss, reference.summary.loss)
    assert difference is not None and difference <= 1e-5, difference_table(job.summary, reference.summary)
    assert (job.summary.samples_lost, job.summary.samples_applied_twice) == (0, 0)
    check_digests(job)
    assert job.summary.came_back == (7,)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "length",
    [{}, {"train_iters": None, "train_samples": 48, "lr_warmup_iters": None, "lr_warmup_samples": 8}],
    ids=["iterations", "samples"],
)
def test_it_needs_no_arguments_of_a_checkpoint(jobs: Jobs, tmp_path: Path, length: dict[str, Any]) -> None:
    """There is one by then, of this job's, and there was none as it began. --train-samples alone gives its length."""
    model = TWO_REPLICAS | length
    reference = jobs.reference(tiny(**model), workers=WORKERS)
    saving = {"save": tmp_path, "load": tmp_path, "save_interval": 2, "use_checkpoint_args": True}
    arguments = tiny(**model | saving, resihp_inject="kill:3@5")
    job = jobs.start(arguments, workers=WORKERS, max_restarts=1, script=WISHING, wishes=["hold-0-8"])
    job.await_event("worker_waiting", waiting=7)
    job.wish("go_on")
    check_training(job.wait(), reference)
    assert job.summary.came_back == (7,)
