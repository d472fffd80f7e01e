# SPDX-License-Identifier: Apache-2.0
"""A strategy plans for the survivors of a real job on the emulated clock, and training goes on with the same losses."""

from __future__ import annotations

import pytest
from jobs import EXPERTS, WISHING, Jobs, check_training, tiny

from megatron_resihp.plan import ParallelPlan

MODEL = {
    "num_layers": 4, "global_batch_size": 8, "train_iters": 12, "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.usefixtures("compiled_planner")
def test_survivors_of_a_death_in_a_tensor_parallel_group_all_go_on_working(jobs: Jobs) -> None:
    """Complete replicas would need eight workers, or leave three of seven idle."""
    arguments = tiny(
        **MODEL, resihp_emulate="h800", resihp_strategy="joint", resihp_plan_wait=60.0,
        resihp_inject=["kill:5@6:backward"],
    )  # fmt: skip
    job = jobs.start(arguments, workers=8).wait(240.0)
    assert job.code == 0, job.tails()
    [planned] = job.events("planned")
    assert planned["strategy"] == "joint" and planned["bound_s"] <= planned["iteration_s"]
    plan = ParallelPlan.from_dict(job.events("epoch_started")[-1]["plan"])
    assert set(plan.working) == {0, 1, 2, 3, 4, 6, 7} and plan.not_uniform is not None
    check_training(job, jobs.reference(tiny(**MODEL), workers=8))


@pytest.mark.nightly
@pytest.mark.usefixtures("compiled_planner")
def test_a_model_of_unlike_layers_begins_with_the_planners_own_layout(jobs: Jobs) -> None:
    """Dense layers, then mixtures of experts, and a head that takes longer than both."""
    model = EXPERTS | {
        "num_layers": 6, "moe_layer_freq": "[0,0,0,1,1,1]", "pipeline_model_parallel_size": 2, "global_batch_size": 8,
        "train_iters": 10,
    }  # fmt: skip
    reference = jobs.reference(tiny(**model), workers=4)
    arguments = tiny(**model, resihp_emulate="h800", resihp_plan="auto")
    job = jobs.start(arguments, workers=4, script=WISHING, wishes=["hold-0-7"])
    job.await_event("plan_change")  # a planner on a busy machine may need longer than the job
    job.wish("go_on")
    check_training(job.wait(), reference)
    first, chosen = (ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started"))
    assert first.not_uniform is None and chosen.not_uniform is not None
    assert "iterations" in job.events("reconfiguration")[-1]["why"]
