# SPDX-License-Identifier: Apache-2.0
"""Workers die while a plan that Megatron's own groups can't run is in force, and while plans change."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import WISHING, Job, Jobs, ask_at, check_training, tiny
from nursery import SUSPECTS
from test_plans import V_SHAPE, chunks, explicit, in_order, stages
from test_recovery_points import EVALUATION, RECOVERY_POINTS, evaluations

from megatron_resihp.control import exit_codes
from megatron_resihp.detector.inquiry import PAUSE
from megatron_resihp.plan import Migration, ParallelPlan, Replica, Shard

PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2, "num_layers": 4, "global_batch_size": 4}
"""Two replicas of two stages on four workers: any two survivors that hold everything between them can go on."""
NIGHTLY = pytest.mark.nightly

UNLIKE = ParallelPlan((Replica(stages([0, 1], [2]), (0, 1), chunks(3, 6)), Replica(stages([3]), (2, 3), chunks(6))), {})
"""A stage of two members and one of one; and a replica of a single stage that holds everything."""
LONE = ParallelPlan((Replica(stages([0], [1, 2]), (0, 1, 2, 3), chunks(2, 6)),), {3: None})
"""Worker 0 is the only holder of the first layers."""
KEEPING = ParallelPlan(
    (Replica(stages([1], [2]), (0, 1, 2, 3), chunks(2, 6)),), {0: (Shard(0, 3, 0, 1),), 3: (Shard(3, 6, 0, 1),)}
)
"""Standbys go on holding the shards of the job's own layout."""

VEE = ParallelPlan(
    (Replica(stages([3], [0]), (0, 1, 2, 3), V_SHAPE, explicit((0, 1, 1, 0), 2, (0, 1, 2, 3))),), {1: None, 2: None}
)
"""Embedding and head on the same worker, what lies between on another one."""

PIPELINES = ParallelPlan(
    (Replica(stages([0], [1]), (0, 1), chunks(3, 6)), Replica(stages([2], [3]), (2, 3), chunks(2, 6))), {}
)

IDLE_HEAD = ParallelPlan(
    (
        Replica(stages([2], [1]), (0, 1), chunks(3, 6), in_order((0, 1), ())),
        Replica(stages([0], [3]), (2, 3), chunks(3, 6), in_order((2, 3), (0, 1, 2, 3))),
    ),
    {}, (Migration(0, 1, 1), Migration(1, 1, 1)),
)  # fmt: skip
"""The second stage of the first replica, worker 1, which had no head before, has no work."""

HELPED = ParallelPlan(
    (
        Replica(stages([0], []), (0, 1), chunks(3, 6), in_order((0, 1, 2, 3), ())),
        Replica(stages([], [3]), (2, 3), chunks(3, 6), in_order((), (0, 1, 2, 3))),
    ),
    {1: None, 2: None}, (Migration(0, 1, 1), Migration(1, 1, 1), Migration(2, 0, 0), Migration(3, 0, 0)),
)  # fmt: skip
"""No replica has members in both stages: each does a stage's work for the other one."""


def survive(
    jobs: Jobs, path: Path, plans: Sequence[tuple[ParallelPlan, int]], injections: Sequence[str], **extra: Any
) -> Job:
    """Run a job of four workers through plans and fault injections and compare it with the undisturbed one."""
    reference = jobs.reference(tiny(**PIPELINE), workers=4)
    job = jobs.run(
        tiny(**PIPELINE, **extra, resihp_plan=ask_at(path, *plans), resihp_inject=list(injections) or None), workers=4
    )
    check_training(job, reference)
    struck = {(injection.target, injection.point) for injection in job.summary.drills}
    wanted = [injection.partition(":")[2] for injection in injections]
    assert struck == {(int(text.partition("@")[0]), text.partition(":")[2]) for text in wanted}
    return job


def are_heterogeneous(job: Job) -> list[bool]:
    """Of each epoch, whether it was run under a heterogeneous plan."""
    plans = [ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started")]
    return [plan.not_uniform is not None for plan in plans]


@pytest.mark.parametrize(
    ("point", "victim"),
    [
        ("p2p", 0),
        ("backward", 2),
        ("grad-sync", 3),
        ("step", 2),
        *(pytest.param(*case, marks=NIGHTLY) for case in (("forward", 1), ("p2p", 2), ("norm", 1), ("between", 3))),
    ],
)
def test_a_death_under_an_unlike_plan(jobs: Jobs, tmp_path: Path, point: str, victim: int) -> None:
    job = survive(jobs, tmp_path, [(UNLIKE, 1)], [f"kill:{victim}@3:{point}"])
    assert are_heterogeneous(job) == [False, True, False]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=NIGHTLY), 3])
def test_a_standby_that_keeps_a_shard_dies(jobs: Jobs, tmp_path: Path, victim: int) -> None:
    job = survive(jobs, tmp_path, [(KEEPING, 1)], [f"kill:{victim}@3:grad-sync"])
    assert are_heterogeneous(job) == [False, True, False]


def test_two_deaths_under_an_unlike_plan(jobs: Jobs, tmp_path: Path) -> None:
    """Worker 3 has everything, worker 0 fetches what it lacks."""
    job = survive(jobs, tmp_path, [(UNLIKE, 1)], ["kill:1@3:norm", "kill:2@3:recovery-rebuild"])
    assert {death.worker for death in job.summary.deaths} == {1, 2}


@pytest.mark.parametrize("victim", [0, pytest.param(3, marks=NIGHTLY)])
@pytest.mark.parametrize("point", (*RECOVERY_POINTS, pytest.param("recovery-migrate", marks=NIGHTLY)))
def test_a_death_in_a_change(jobs: Jobs, tmp_path: Path, point: str, victim: int) -> None:
    """Worker 3 fetches the first layers from workers 0 and 1: where it dies between transfers it has those of one."""
    survive(jobs, tmp_path, [(UNLIKE, 1)], [f"kill:{victim}@1:{point}"])


@NIGHTLY
@pytest.mark.parametrize("point", (*RECOVERY_POINTS, "recovery-migrate"))
def test_a_death_in_a_change_from_one_unlike_plan_to_another(jobs: Jobs, tmp_path: Path, point: str) -> None:
    job = survive(jobs, tmp_path, [(UNLIKE, 1), (KEEPING, 3)], [f"kill:2@3:{point}"])
    assert are_heterogeneous(job) == [False, True, False]


def test_an_epoch_breaks_without_a_death_under_a_heterogeneous_plan(jobs: Jobs, tmp_path: Path) -> None:
    injections = ["rebuild:1@2:backward", "rebuild:2@4:grad-sync", "rebuild:0@5:recovery-ready"]
    job = survive(jobs, tmp_path, [(UNLIKE, 1), (KEEPING, 3), (UNLIKE, 5)], injections)
    assert not job.summary.deaths


def test_a_plan_that_falls_due_in_a_change_is_taken_after_it(jobs: Jobs, tmp_path: Path) -> None:
    job = survive(jobs, tmp_path, [(UNLIKE, 2), (KEEPING, 2)], [])
    assert are_heterogeneous(job) == [False, True, True] and not job.events("change_refused")


def test_a_standby_that_reports_later_asks_for_no_plan_again(jobs: Jobs, tmp_path: Path) -> None:
    job = survive(jobs, tmp_path, [(KEEPING, 1), (VEE, 3), (KEEPING, 5)], [])
    assert are_heterogeneous(job) == [False, True, True, True] and not job.events("change_refused")


def test_a_head_whose_work_is_all_done_by_another_replica(jobs: Jobs, tmp_path: Path) -> None:
    survive(jobs, tmp_path, [(IDLE_HEAD, 1)], [])


@pytest.mark.since_megatron("0.19")
@NIGHTLY
def test_a_worker_without_work_sees_no_documents(jobs: Jobs, documents: Path, tmp_path: Path) -> None:
    """Megatron sums their lengths over all who have seen one, and those who have would wait for it."""
    model = PIPELINE | {
        "mock_data": False, "data_path": documents, "vocab_size": 257, "dataloader_inter_document_masking": True,
        "data_cache_path": documents.with_name("cache"), "log_progress": True, "ckpt_format": "torch_dist",
        "save_interval": 100,
    }  # fmt: skip
    plain, planned = tmp_path / "plain", tmp_path / "planned"
    reference = jobs.reference(tiny(**model, save=plain), workers=4)
    job = jobs.run(tiny(**model, save=planned, resihp_plan=ask_at(tmp_path, (IDLE_HEAD, 1), (VEE, 4))), workers=4)
    check_training(job, reference)
    operations = [re.findall("operations: (.*?)\t", (path / "progress.txt").read_text()) for path in (plain, planned)]
    assert operations[0] and operations[0] == operations[1]


def test_a_gradient_that_is_no_number_is_not_stepped_with(jobs: Jobs, tmp_path: Path) -> None:
    """The loss of that iteration is one: Megatron's own check of gradients finds it, and ends the job as it does."""
    save = {"save": str(jobs.directory / "spoiled"), "save_interval": 100}
    plans = ask_at(tmp_path, (KEEPING, 1))
    job = jobs.run(tiny(**PIPELINE, **save, resihp_plan=plans), workers=4, script=WISHING, wishes=["spoil-2-4"])
    assert job.code != 0 and are_heterogeneous(job) == [False, True], job.tails()
    assert job.summary.iterations == 3, "a step with a gradient that is no number was taken"
    assert "found NaN in local grad norm for bucket #0" in job.log(2)
    assert not job.events("recovery") and not job.events("worker_dead")


@pytest.mark.parametrize("iteration", [pytest.param(5, marks=NIGHTLY), 6])
def test_a_change_shortly_before_the_end(jobs: Jobs, tmp_path: Path, iteration: int) -> None:
    """Standbys can't know that no further iteration comes: they wait for the others, who finish the job."""
    job = survive(jobs, tmp_path, [(KEEPING, 1), (UNLIKE, iteration)], [])
    assert are_heterogeneous(job)[:2] == [False, True]


def test_a_death_in_the_last_iteration_under_a_heterogeneous_plan(jobs: Jobs, tmp_path: Path) -> None:
    survive(jobs, tmp_path, [(UNLIKE, 4)], ["kill:2@6:step"])


@pytest.mark.nightly
def test_evaluation_under_a_heterogeneous_plan(jobs: Jobs, tmp_path: Path) -> None:
    """Within training and after it: of two replicas, and of one for all."""
    model = {**PIPELINE, **EVALUATION, "eval_iters": 2}
    reference = jobs.reference(tiny(**model), workers=4)
    job = jobs.run(tiny(**model, resihp_plan=ask_at(tmp_path, (UNLIKE, 1), (VEE, 3), (LONE, 5))), workers=4)
    check_training(job, reference)
    assert are_heterogeneous(job) == [False, True, True, True]
    assert evaluations(job) == evaluations(reference)
    assert final_losses(job) == final_losses(reference)


@NIGHTLY
def test_evaluation_of_other_micro_batches_and_with_helpers(jobs: Jobs, tmp_path: Path) -> None:
    model = {**PIPELINE, **EVALUATION, "eval_iters": 2, "eval_micro_batch_size": 2}
    reference = jobs.reference(tiny(**model), workers=4)
    job = jobs.run(tiny(**model, resihp_plan=ask_at(tmp_path, (HELPED, 1), (VEE, 3), (UNLIKE, 5))), workers=4)
    check_training(job, reference)
    assert are_heterogeneous(job) == [False, True, True, True]
    assert evaluations(job) == evaluations(reference)
    assert final_losses(job) == final_losses(reference)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=NIGHTLY), 1, pytest.param(3, marks=NIGHTLY)])
def test_a_death_while_evaluating_under_a_heterogeneous_plan(jobs: Jobs, tmp_path: Path, victim: int) -> None:
    model = {**PIPELINE, **EVALUATION, "eval_iters": 2}
    reference = jobs.reference(tiny(**model), workers=4)
    plans, injection = ask_at(tmp_path, (UNLIKE, 1)), f"kill:{victim}@4:evaluate"
    job = jobs.run(tiny(**model, resihp_plan=plans, resihp_inject=injection), workers=4)
    check_training(job, reference)
    assert evaluations(job) == evaluations(reference)


@pytest.mark.parametrize("victim", [0, pytest.param(3, marks=NIGHTLY)])
def test_a_death_after_the_last_iteration_under_a_heterogeneous_plan(jobs: Jobs, tmp_path: Path, victim: int) -> None:
    model = {**PIPELINE, **EVALUATION, "eval_iters": 2}
    reference = jobs.reference(tiny(**model), workers=4)
    plans, injection = ask_at(tmp_path, (UNLIKE, 4)), f"kill:{victim}@7:evaluate"
    job = jobs.run(tiny(**model, resihp_plan=plans, resihp_inject=injection), workers=4)
    check_training(job, reference)
    assert final_losses(job) == final_losses(reference)


def test_a_stop_during_a_change(jobs: Jobs, tmp_path: Path) -> None:
    plans = ask_at(tmp_path, (UNLIKE, 2), (KEEPING, 4), (UNLIKE, 6))
    job = jobs.start(tiny(**PIPELINE | {"train_iters": 1000}, resihp_plan=plans), workers=4)
    job.await_event("plan_change", number=2)
    job.signal(signal.SIGTERM)
    assert job.wait().code == 128 + signal.SIGTERM, job.tails()
    iterations = [event["iteration"] for event in job.events("iteration")]
    assert iterations and iterations == sorted(set(iterations))


def test_survivors_are_too_few_for_a_replica(jobs: Jobs, tmp_path: Path) -> None:
    """First two of four, who are a replica of the plan, and keep the other's first layers beside them; then no replica
    is whole, and who is left makes a pipeline."""
    model = {**PIPELINE, "tensor_model_parallel_size": 2}
    plans = ask_at(tmp_path, (PIPELINES, 1))
    injections = ["kill:1@3:backward", "kill:2@5:grad-sync"]
    job = jobs.run(tiny(**model, resihp_plan=plans, resihp_inject=injections), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4))
    assert are_heterogeneous(job) == [False, True, True, True]
    assert [event["strategy"] for event in job.events("planned")] == ["fallback", "fallback"]
    assert [replica["stages"] for replica in job.events("epoch_started")[-1]["plan"]["replicas"]] == [[[0], [3]]]


def test_the_only_holder_of_a_layer_dies(jobs: Jobs, tmp_path: Path) -> None:
    plans = ask_at(tmp_path, (LONE, 1))
    job = jobs.run(tiny(**PIPELINE, resihp_plan=plans, resihp_inject="kill:0@3:backward"), workers=4)
    assert job.code == exit_codes.NO_PLAN, job.tails()
    assert "no plan fits the survivors" in job.events("run_finished")[0]["reason"]


@NIGHTLY
def test_suspects_are_tested_under_a_heterogeneous_plan(jobs: Jobs, tmp_path: Path) -> None:
    """Matrix products on the suspects, while training goes on as if nothing were."""
    # A first test is ordered before the plan is in force, and the next one is long after it.
    model = PIPELINE | {"train_iters": PAUSE + 6}
    job = jobs.run(tiny(**model, resihp_plan=ask_at(tmp_path, (UNLIKE, 1))), workers=4, judge="suspects")
    check_training(job, jobs.reference(tiny(**model), workers=4))
    assert {event["worker"] for event in job.events("validation")} == set(SUSPECTS)


def final_losses(job: Job) -> dict[str, float]:
    """Losses of validation and test set after the last iteration."""
    found: dict[str, float] = {}
    for worker in range(job.workers):
        for line in job.log(worker).splitlines():
            if "validation loss at " in line and "iteration 6 on" in line:
                name = line.split("validation loss at ")[1].split("|")[0].strip()
                found[name] = round(float(line.split("lm loss value: ")[1].split()[0]), 5)
    return found
