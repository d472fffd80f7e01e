# SPDX-License-Identifier: Apache-2.0
"""Models that predict further tokens: layers of their own behind the decoder, and word embeddings beside the head. A
job with a death and changes of plan trains and logs what one without does, and that is what stock Megatron does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import DROPOUT, EXPERTS, Job, Jobs, ask_at, check_training, tiny
from stock_runs import check_like_stock, stock_steps
from test_distributed_optimizer import SHARED
from test_interleaved import UNLIKE, own_plan
from test_logs import tensorboard_curves
from test_plan_failures import are_heterogeneous
from test_plans import EVERYTHING, PER_TOKEN, PREDICTIONS, explicit, one, stages

from megatron_resihp.integration import releases
from megatron_resihp.plan import Chunk, ParallelPlan

NIGHTLY = pytest.mark.nightly
PIPELINE: dict[str, Any] = PREDICTIONS | {
    "num_layers": 4, "pipeline_model_parallel_size": 2, "global_batch_size": 8, "train_iters": 11,
}  # fmt: skip
"""On four workers two replicas. Layers 0 to 5; what predicts is a part of the last one, the head."""
INTERLEAVED: dict[str, Any] = SHARED | PER_TOKEN | {"num_layers_per_virtual_pipeline_stage": 1}
LAYOUT: dict[str, Any] = EXPERTS | {"pipeline_model_parallel_layout": "Ettt|tmmL"}
BOTH_ENDS = ParallelPlan((
    one(stages([3], [0]), (Chunk(0, 0, 2), Chunk(1, 2, 5), Chunk(0, 5, 6)), explicit((0, 1, 0), 2, EVERYTHING, True)),
))  # fmt: skip
"""Worker 3 has the embedding and the head, with word embeddings each. The norm before the head is worker 0's. Weight
gradients are ops of their own."""


MODELS: dict[str, dict[str, Any]] = {
    "pipeline": {}, "interleaved, shared, per token": INTERLEAVED, "layout, experts": LAYOUT,
}  # fmt: skip


def run(jobs: Jobs, directory: Path, model: dict[str, Any], **faults: Any) -> Job:
    """`directory`: for the job's curves."""
    return jobs.run(tiny(**model, tensorboard_dir=directory, **faults), workers=4)


def check_predictions(found_in: Path, expected_in: Path) -> None:
    """Each loss, and each share of right predictions, in the step and since the start: once a step, and the same."""
    found, expected = tensorboard_curves(found_in), tensorboard_curves(expected_in)
    tags = [tag for tag in expected if tag.startswith("mtp")]
    assert len(tags) == PREDICTIONS["mtp_num_layers"] * len(releases.current().prediction_metrics)
    for tag in tags:
        assert [step for step, _ in found[tag]] == [step for step, _ in expected[tag]] == list(range(1, 12)), tag
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in expected[tag]], rel=1e-5), tag


@NIGHTLY
@pytest.mark.parametrize("model", [*MODELS.values(), DROPOUT], ids=[*MODELS, "dropout"])
def test_deaths_and_plans_and_back(jobs: Jobs, tmp_path: Path, model: dict[str, Any]) -> None:
    """The last of two replicas goes on alone, then two unlike ones, then one whose ends are on one worker."""
    model = PIPELINE | model
    words = ask_at(tmp_path, (UNLIKE, 4), (BOTH_ENDS, 6), (own_plan((0, 3)), 8))
    whole, mended = tmp_path / "whole", tmp_path / "mended"
    job = run(jobs, mended, model, resihp_inject="kill:2@3:backward", resihp_plan=words)
    check_training(job, run(jobs, whole, model))
    assert are_heterogeneous(job) == [False, False, True, True, False]
    check_predictions(mended, whole)


@NIGHTLY
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_without_a_death_it_trains_and_logs_what_stock_megatron_does(
    jobs: Jobs, tmp_path: Path, model: dict[str, Any]
) -> None:
    model, ours, stock = PIPELINE | model, tmp_path / "ours", tmp_path / "stock"
    job = run(jobs, ours, model)
    check_like_stock(job, stock_steps(jobs, 4, **model, tensorboard_dir=stock))
    check_predictions(ours, stock)
