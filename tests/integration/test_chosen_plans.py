# SPDX-License-Identifier: Apache-2.0
"""A plan that was chosen and can't be run: the error of its first step is answered once; a user's own comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import WISHING, Jobs, ask_at, check_training, tiny

from megatron_resihp.plan import Chunk, ParallelPlan, Replica

NIGHTLY = pytest.mark.nightly
PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
TOGETHER = ParallelPlan((Replica(((0, 1),), (0, 1, 2, 3), (Chunk(0, 0, 4),)),))


def are_heterogeneous(job: Any) -> list[bool]:
    plans = [ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started")]
    return [plan.not_uniform is not None for plan in plans]


def test_a_plan_that_takes_too_much_memory_is_left_for_the_plan_before(jobs: Jobs, tmp_path: Path) -> None:
    plans = ask_at(tmp_path, (TOGETHER, 2))
    job = jobs.run(tiny(**PIPELINE, resihp_plan=plans), workers=2, script=WISHING, wishes=["oom-degree-2"])
    check_training(job, jobs.reference(tiny(**PIPELINE), workers=2))
    assert are_heterogeneous(job) == [False, True, False]
    [failed] = job.events("plan_failed")
    assert failed["error"].startswith("OutOfMemoryError: CUDA out of memory")
    assert "the plan's first step failed, so the plan before will follow; worker" in job.output()
    assert "Traceback" in job.log(failed["failed"])


@NIGHTLY
@pytest.mark.parametrize("action", ["error", "oom", "nan"])
def test_a_users_own_error_comes_back_under_the_plan_before_and_ends_the_job(
    jobs: Jobs, tmp_path: Path, action: str
) -> None:
    """In the iteration that was to be the first one under the new plan."""
    plans, wish = ask_at(tmp_path, (TOGETHER, 2)), f"lasting-{action}-degree-2"
    job = jobs.run(tiny(**PIPELINE, resihp_plan=plans), workers=2, script=WISHING, wishes=[wish])
    assert job.code == 1, job.tails()
    assert are_heterogeneous(job) == [False, True, False]
    [failed], [ended] = job.events("plan_failed"), job.events("run_finished")
    assert failed["error"].split(":")[0] in ended["reason"]


@NIGHTLY
@pytest.mark.usefixtures("compiled_planner")
def test_a_strategys_plan_that_fails_is_left_for_uniform_plans(jobs: Jobs) -> None:
    """Seven survivors of eight have stages of one member, or of four; the job's own stages have two."""
    model = {
        "num_layers": 4, "global_batch_size": 8, "train_iters": 12, "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
    }  # fmt: skip
    arguments = tiny(
        **model,
        resihp_emulate="h800",
        resihp_strategy="joint",
        resihp_plan_wait=60,
        resihp_inject=["kill:5@6:backward"],
    )
    job = jobs.start(
        arguments, workers=8, script=WISHING, wishes=["error-degree-1", "error-degree-3", "error-degree-4"]
    ).wait(240.0)  # fmt: skip
    check_training(job, jobs.reference(tiny(**model), workers=8))
    assert [event["strategy"] for event in job.events("planned")] == ["joint"]
    assert are_heterogeneous(job) == [False, True, False] and len(job.events("plan_failed")) == 1
