# SPDX-License-Identifier: Apache-2.0
"""Dropout and other noise: whatever becomes of a job, each micro-batch has the masks that it would have had.

Daily, test_interleaved.py has a death and a change of plan with dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import DROPOUT, EXPERTS, FP32, Jobs, check_training, tiny
from stock_runs import check_like_stock, stock_steps
from test_plans import FOUR, UNIFORM_LAYOUT, own_plan, survive
from test_recovery_points import EVALUATION

from megatron_resihp.report.run.summary import compare

pytestmark = pytest.mark.nightly
IN_SLICES: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
"""On four workers two replicas. Each worker has half of a sequence between the layers' matrices."""
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
"""Two layers are recomputed together, from states of before the first one."""
SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective"}
SAVED = 4


@pytest.mark.parametrize(
    ("model", "recomputed"),
    [
        (DROPOUT | EVALUATION, {}),
        (DROPOUT | IN_SLICES, {}),
        (DROPOUT | {"num_layers": 4}, FULL),
        (DROPOUT | IN_SLICES | {"num_layers": 4}, FULL),
        (DROPOUT | {"tensor_model_parallel_size": 2}, SELECTIVE),
        (DROPOUT | EXPERTS | IN_SLICES | {"moe_input_jitter_eps": 0.1}, {}),
        (EXPERTS | {"moe_router_force_load_balancing": True}, {}),
    ],
    ids=[
        "evaluations", "sequence parallel", "recomputed", "recomputed, sequence parallel", "attention recomputed",
        "jitter", "random routes",
    ],
)  # fmt: skip
def test_a_death(jobs: Jobs, model: dict[str, Any], recomputed: dict[str, Any]) -> None:
    """The other replica takes the micro-batches over, and repeats those that it had. The undisturbed job keeps its
    activations: recomputed ones have the same masks."""
    job = jobs.run(tiny(**model, **recomputed, resihp_inject="kill:3@4:backward"), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4))
    assert len(job.summary.recoveries) == 1


@pytest.mark.parametrize(
    ("names", "model"),
    [
        (("other layers", "interleaved", "one stage"), {}),
        (("V shape", "zero bubble"), {"sequence_parallel": True}),
        (("other layers", "V shape"), FULL | {"recompute_num_layers": 1}),
        (("TP 4", "TP 1"), {"attention_dropout": 0}),
    ],
    ids=["layers", "sequence parallel", "recomputed", "degrees"],
)
def test_from_plan_to_plan_and_back(jobs: Jobs, tmp_path: Path, names: Sequence[str], model: dict[str, Any]) -> None:
    """Stages of the job's own degree. Of other degrees where all members of a stage have the same mask."""
    plans = [*(FOUR[name] for name in names), own_plan(4)]
    train_iters = 3 * len(plans) + 3
    survive(jobs, tmp_path, plans, workers=4, train_iters=train_iters, **UNIFORM_LAYOUT | DROPOUT | model)


def test_a_job_goes_on_from_a_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    """One that had lost a worker has saved it. What it saves of random states doesn't matter."""
    model = DROPOUT | IN_SLICES | {"train_iters": 8}
    saving = {"save": tmp_path, "save_interval": SAVED, "exit_interval": SAVED, "resihp_inject": "kill:3@2:backward"}
    saved = jobs.run(tiny(**model, **saving), workers=4)
    assert saved.code == 0, saved.tails()
    job = jobs.run(tiny(**model, load=tmp_path), workers=4)
    assert job.code == 0, job.tails()
    reference = jobs.reference(tiny(**model), workers=4).summary
    rest = {number: loss for number, loss in reference.loss.items() if number > SAVED}
    assert rest and job.summary.loss == pytest.approx(rest, rel=FP32.loss)


def test_megatrons_own_streams(jobs: Jobs) -> None:
    """On request: a job without failures draws what stock Megatron draws, and a repeated iteration something else."""
    model = DROPOUT | {"tensor_model_parallel_size": 2}
    megatrons = {"resihp_megatron_random_streams": True}
    reference = jobs.reference(tiny(**model, **megatrons), workers=4)
    check_like_stock(reference, stock_steps(jobs, 4, **model))
    job = jobs.run(tiny(**model, **megatrons, resihp_inject="kill:3@4:backward"), workers=4)
    assert job.code == 0, job.tails()
    difference = compare(job.summary.loss, reference.summary.loss)
    assert difference is not None and difference > 10 * FP32.loss, "so masks matter in the other tests"
