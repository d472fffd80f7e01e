# SPDX-License-Identifier: Apache-2.0
"""Jobs whose length and rates are given in samples, and whose batches by a schedule, train as stock Megatron does.

Stock Megatron sets --global-batch-size to something else beside a schedule.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import EXPERTS, Jobs, ask_at, ask_for, tiny
from stock_runs import check_like_stock, losses_of, stock_steps
from test_plan_failures import are_heterogeneous
from test_plans import chunks, stages

from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.report.run.summary import compare

SAMPLES: dict[str, Any] = {
    "tensor_model_parallel_size": 2, "train_iters": None, "train_samples": 43, "lr_warmup_iters": None,
    "lr_warmup_samples": 8, "lr_decay_style": "WSD", "lr_decay_samples": 40, "lr_wsd_decay_samples": 24,
    "eval_iters": 1, "eval_interval": 4,
}  # fmt: skip
"""Two replicas of two members, and eleven iterations, of which the last reads one sample more than there are to be."""
SCHEDULE: dict[str, Any] = {"global_batch_size": None, "step_batch_size_schedule": "0:4 2K:8 1B:12"}
"""In tokens: the second step begins after 62 samples."""


@pytest.mark.nightly
@pytest.mark.parametrize(("schedule", "iterations"), [(SCHEDULE, 11), ({}, 10)], ids=["schedule", "samples alone"])
def test_a_schedule_of_one_size_trains_as_that_size_does(
    jobs: Jobs, tmp_path: Path, schedule: dict[str, Any], iterations: int
) -> None:
    """Worker 3 dies, the others run one replica of unlike stages, and then two workers the job's own layout."""
    plans = [ParallelPlan((Replica(stages([2], [1, 0]), (0, 1, 2, 3), chunks(1, 4)),), {})]
    plans += [ParallelPlan((Replica(stages([0, 1]), (0, 1, 2, 3), chunks(4)),), {})]
    model = SAMPLES | schedule
    words = ask_for(tmp_path, *plans, every=3)
    job = jobs.run(tiny(**model, resihp_plan=words, resihp_inject="kill:3@1:backward"), workers=4)
    expected = stock_steps(jobs, 4, **model)
    check_like_stock(job, expected)
    assert len(expected) == iterations
    assert are_heterogeneous(job) == [False, False, True, False]
    # The control: with a rate that doesn't decay, losses are others.
    constant = jobs.run(tiny(**model | {"lr_decay_style": "constant"}), workers=4)
    assert (compare(constant.summary.loss, losses_of(expected)) or 0) > 1e-3


GROWING: dict[str, Any] = {
    "global_batch_size": None, "step_batch_size_schedule": "0:4 256:8 960:12", "train_samples": 60,
    "lr_decay_samples": 56, "lr_wsd_decay_samples": 24,
}  # fmt: skip
"""Two iterations of 4 samples, three of 8, and then 12 in each."""
SIZES = [4, 4, 8, 8, 8, 12, 12, 12]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "inject",
    [None, "kill:3@2:step", "kill:3@3:backward", "kill:3@5:norm", "kill:1@4:backward"],
    ids=["none", "in the last small one's step", "in the first larger one", "before a larger one", "between"],
)
def test_batches_that_grow(jobs: Jobs, inject: str | None) -> None:
    """Each larger batch begins with a change to a plan for it."""
    model = SAMPLES | GROWING
    job = jobs.run(tiny(**model, resihp_inject=inject), workers=4)
    expected = stock_steps(jobs, 4, **model)
    assert len(expected) == len(SIZES)
    check_like_stock(job, expected)
    assert [(e["global_batch_size"], e["micro_batches"]) for e in job.events("batch_grown")] == [(8, 8), (12, 12)]
    summary = job.summary
    assert (summary.samples_lost, summary.samples_applied_twice, summary.samples_out_of_place) == (0, 0, 0)
    assert summary.samples_consumed == sum(SIZES)
    assert job.events("detection")[0]["iterations"] >= len(SIZES) - 1
    deaths, changes = len(job.events("recovery")), job.events("reconfiguration")
    assert deaths == (0 if inject is None else 1) and 1 <= len(changes) <= 2
    assert {each["why"] for each in changes} <= {"global batches of 8 samples", "global batches of 12 samples"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True, "overlap_grad_reduce": True,
         "overlap_param_gather": True},
        EXPERTS | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "calculate_per_token_loss": True,
                   "moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": None},
    ],
    ids=["parts of the optimizer", "shared experts"],
)  # fmt: skip
def test_batches_that_grow_in_other_layouts(jobs: Jobs, layout: dict[str, Any]) -> None:
    model = SAMPLES | GROWING | {"tensor_model_parallel_size": 1} | layout
    job = jobs.run(tiny(**model, resihp_inject="kill:3@4:backward"), workers=4)
    check_like_stock(job, stock_steps(jobs, 4, **model))
    assert len(job.events("batch_grown")) == 2


@pytest.mark.nightly
def test_batches_that_grow_under_another_plan(jobs: Jobs, tmp_path: Path) -> None:
    """It is for the smaller ones. What follows it is planned for the larger ones."""
    unlike = ParallelPlan((Replica(stages([2], [1, 0]), (0, 1, 2, 3), chunks(1, 4)),), {})
    model = SAMPLES | GROWING | {"step_batch_size_schedule": "0:4 768:8"}
    asked = ask_at(tmp_path, (unlike, 2))
    job = jobs.run(tiny(**model, resihp_plan=asked, resihp_inject="kill:1@9:backward"), workers=4)
    check_like_stock(job, stock_steps(jobs, 4, **model))
    assert are_heterogeneous(job)[:3] == [False, True, False]
    assert len(job.events("batch_grown")) == 1


@pytest.mark.nightly
def test_a_job_is_gone_on_with_that_was_saved_between_larger_batches(jobs: Jobs, tmp_path: Path) -> None:
    """It begins with a plan for the smallest ones, as nothing is loaded yet."""
    model = SAMPLES | GROWING
    saved = jobs.run(tiny(**model, save=tmp_path, save_interval=4, exit_interval=4), workers=4)
    assert saved.code == 0
    job = jobs.run(tiny(**model, load=tmp_path, resihp_inject="kill:1@7:backward"), workers=4)
    check_like_stock(job, stock_steps(jobs, 4, **model, load=tmp_path))
    assert [event["global_batch_size"] for event in job.events("batch_grown")] == [8, 12]
    assert sorted(job.summary.loss) == [5, 6, 7, 8]
