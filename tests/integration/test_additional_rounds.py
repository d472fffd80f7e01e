# SPDX-License-Identifier: Apache-2.0
"""Replicas that share experts and have unequal numbers of micro-batches: they train what stock Megatron trains with
equal ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import BF16, BIASED, DROPOUT, FP32, Job, Jobs, Tolerance, ask_at, check_samples, check_training, tiny
from stock_runs import LARGE_JOB_S, check_like_stock, stock_steps
from test_expert_biases import RECOMPUTED
from test_expert_parallelism import (
    DROPPING,
    GATHERED,
    HALF,
    MEMBERS,
    OPTIMIZER,
    PIPELINE,
    SHARED,
    SINKHORN,
    STAGES,
    TENSOR,
    WORKER,
    WORKERS,
    degrees,
    shared_by,
)

from megatron_resihp.plan import ParallelPlan, Replica

pytestmark = pytest.mark.nightly

FOUR: dict[str, Any] = SHARED | {"expert_model_parallel_size": 4, "num_experts": 12}
"""All four workers share the experts, which three can share, too."""
PER_TOKEN: dict[str, Any] = {"calculate_per_token_loss": True}
HANDS = ((0, 4), (1, 5, 6), (7, 2), (3,))
"""In either pair, one runs its last micro-batch again."""
PAIRS = ((0,), (2,)), ((1,), (3,))
CHUNKS: dict[str, Any] = PIPELINE | {"num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1}
"""Two replicas, of two stages with two chunks each."""


def counts(job: Job) -> list[list[int]]:
    """How many micro-batches the replicas have in each epoch."""
    plans = [ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started")]
    return [[len(replica.micro_batches) for replica in plan.replicas] for plan in plans]


def dealt(replicas: Sequence[Sequence[Sequence[int]]], hands: Sequence[tuple[int, ...]]) -> ParallelPlan:
    """Pairs that share experts, with these micro-batches."""
    rows = zip(replicas, hands, strict=True)
    return ParallelPlan(tuple(Replica(tuple(map(tuple, stages)), hand) for stages, hand in rows), expert_parallel=2)


def test_three_survivors_of_four_that_share(jobs: Jobs) -> None:
    """None of them waits. The lost worker's experts are made of copies of its part of the optimizer's state."""
    layout = FOUR | OPTIMIZER
    stock = stock_steps(jobs, WORKERS, **layout)
    job = jobs.run(tiny(**layout, resihp_inject="kill:3@3:backward"), workers=WORKERS)
    check_like_stock(job, stock)
    check_samples(job)
    assert degrees(job) == [(4, 4), (3, 3)]
    assert counts(job) == [[2, 2, 2, 2], [3, 3, 2]]


@pytest.mark.parametrize(
    ("replicas", "layout", "tolerance"),
    [
        (WORKER, {}, FP32),
        (WORKER, GATHERED | SINKHORN, FP32),
        (WORKER, DROPPING | PER_TOKEN, FP32),
        (WORKER, BIASED | RECOMPUTED, FP32),
        (MEMBERS, TENSOR | OPTIMIZER | PER_TOKEN, FP32),
        (STAGES, PIPELINE | OPTIMIZER, FP32),
        (PAIRS, CHUNKS | BIASED | PER_TOKEN, FP32),
    ],
    ids=[
        "plain", "gathered, sinkhorn", "dropping, per token", "biased, recomputed", "tensor, optimizer, per token",
        "stages, optimizer", "chunks, biased, per token",
    ],
)  # fmt: skip
def test_a_change_there_and_back(
    jobs: Jobs, tmp_path: Path, replicas: Any, layout: dict[str, Any], tolerance: Tolerance
) -> None:
    layout, workers = SHARED | layout, len(replicas) * sum(map(len, replicas[0]))
    stock = stock_steps(jobs, workers, **layout)
    hands = HANDS if len(replicas) == len(HANDS) else ((0, 1, 3, 4, 7), (2, 5, 6))
    asked = ask_at(tmp_path, (dealt(replicas, hands), 2), (shared_by(2, replicas), 6))
    job = jobs.start(tiny(**layout, resihp_plan=asked), workers=workers).wait(LARGE_JOB_S)
    check_like_stock(job, stock, tolerance)
    check_samples(job)
    assert counts(job)[1] == [len(hand) for hand in hands] and len(counts(job)) == 3


@pytest.mark.parametrize("layout", [DROPOUT | {"moe_input_jitter_eps": 0.1}, HALF], ids=["dropout", "fp16"])
def test_what_stock_megatron_draws_or_skips_otherwise(jobs: Jobs, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Masks, and the steps that overflow, are those of the undisturbed job."""
    reference = jobs.reference(tiny(**SHARED | layout), workers=WORKERS)
    asked = ask_at(tmp_path, (dealt(WORKER, HANDS), 2), (shared_by(2, WORKER), 6))
    job = jobs.run(tiny(**SHARED | layout, resihp_plan=asked), workers=WORKERS)
    check_training(job, reference, BF16 if "fp16" in layout else FP32)
    assert job.summary.skipped_iterations == reference.summary.skipped_iterations
