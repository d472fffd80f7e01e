# SPDX-License-Identifier: Apache-2.0
"""What crosses between workers goes between their devices: the same training, also after deaths and after its failure.

On the stand-in gloo takes NCCL's place, with the same order of grouped sends and receives and no tags.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import WISHING, Job, Jobs, ask_at, check_training, tiny
from test_plans import FOUR, MODEL, UNIFORM_LAYOUT, own_plan

from megatron_resihp.plan import ParallelPlan
from megatron_resihp.report.run.summary import compare

pytestmark = pytest.mark.nightly

DIRECT: dict[str, Any] = {"resihp_carrier": "device"}


def through_the_host(job: Job) -> bool:
    return any("they can't cross between devices" in job.log(worker) for worker in range(job.workers))


def run(jobs: Jobs, path: Path, *plans: tuple[ParallelPlan, int], **changes: Any) -> Job:
    model = MODEL | UNIFORM_LAYOUT | {"train_iters": 12} | changes
    options = {name: model.pop(name) for name in ("script", "wishes") if name in model}
    reference = {name: value for name, value in model.items() if not name.startswith("resihp")}
    job = jobs.run(tiny(**model, resihp_plan=ask_at(path, *plans)), workers=4, **options)
    check_training(job, jobs.reference(tiny(**reference), workers=4))
    return job


@pytest.mark.parametrize(
    ("names", "model"),
    [
        (("TP 2 and 1", "unlike replicas"), {"sequence_parallel": True, "distributed_backend": "nccl"}),
        (("a standby keeps its shard", "zero bubble"), {"untie_embeddings_and_output_weights": True}),
        (("TP 2 and 1 help each other",), {"eval_interval": 5, "eval_iters": 2, "bf16": False}),
    ],
    ids=["degrees", "standby", "migrated, evaluations"],
)
def test_the_training_is_that_through_the_host(
    jobs: Jobs, tmp_path: Path, names: tuple[str, ...], model: dict[str, Any]
) -> None:
    plans = [(FOUR[name], 2 + 3 * number) for number, name in enumerate(names)]
    plans.append((own_plan(4), 2 + 3 * len(names)))
    through_host = run(jobs, tmp_path, *plans, **model)
    direct = run(jobs, tmp_path, *plans, **model, **DIRECT)
    difference = compare(direct.summary.loss, through_host.summary.loss)
    assert difference is not None and difference <= 1e-6
    assert not through_the_host(direct)


@pytest.mark.parametrize("point", ["grad-sync", "p2p"])
def test_a_death_where_workers_wait_for_each_other(jobs: Jobs, tmp_path: Path, point: str) -> None:
    """What failed of the way is the dead worker's end, so it is used again under the next plan."""
    job = run(jobs, tmp_path, (FOUR["unlike replicas"], 2), resihp_inject=[f"kill:1@6:{point}"], **DIRECT)
    assert len(job.events("worker_dead")) == 1
    assert not through_the_host(job)


@pytest.mark.parametrize("error", ["uncarried", "roomless"], ids=["an operation fails", "too little memory"])
def test_after_an_error_all_go_on_through_the_host(jobs: Jobs, tmp_path: Path, error: str) -> None:
    """It strikes one worker only, and no worker is lost. The plan is asked for once more after that."""
    asked = [(FOUR["unlike replicas"], 2), (FOUR["unlike replicas"], 9)]
    job = run(jobs, tmp_path, *asked, script=WISHING, wishes=[f"{error}-1-7"], **DIRECT)
    plans = [ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started")]
    assert [plan.not_uniform is not None for plan in plans] == [False, True, False, True]
    assert not job.events("worker_dead")
    assert through_the_host(job)
