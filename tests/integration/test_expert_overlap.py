# SPDX-License-Identifier: Apache-2.0
"""Experts' communication that is overlapped with computation: whatever becomes of a job, it trains what stock Megatron
trains with the same schedule.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from jobs import BF16, DROPOUT, FP32, PRETRAIN, Job, Jobs, Tolerance, check_samples, check_training, tiny
from stock_runs import LARGE_JOB_S, NOTING, check_like_stock, like_stock_and_back, stock_steps
from test_expert_parallelism import (
    MEMBERS,
    OPTIMIZER,
    PIPELINE,
    SHARED,
    WHOLE,
    WORKER,
    WORKERS,
    degrees,
    there_and_back,
)
from test_records import recorded

from megatron_resihp.detector.input.records import OpKind
from megatron_resihp.plan import ParallelPlan

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).with_name("overlapping_gpt.py")
OVERLAPPED: dict[str, Any] = SHARED | {"overlap_moe_expert_parallel_comm": True}
EARLY: dict[str, Any] = {"ep_overlap_early_attn_memory_release": True, "high_priority_a2a_comm_stream": True}
STAGES = ((0,), (2,)), ((1,), (3,))
CHUNKS: dict[str, Any] = PIPELINE | {"num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1}
"""Two replicas, of two stages with two chunks each."""
LOST = "--overlap-moe-expert-parallel-comm is off, as there is nothing to overlap"


def test_a_death_and_the_return_of_the_worker(jobs: Jobs) -> None:
    """The worker dies in the middle of two micro-batches that are run in turns. Three workers have all experts each,
    and nothing to overlap; with the fourth they share them again, and overlap again."""
    layout = OVERLAPPED | EARLY | {"train_iters": 14}
    job = like_stock_and_back(jobs, layout=layout, kill="kill:3@3:backward", script=SCRIPT)
    assert degrees(job) == [(2, 4), (1, 3), (2, 4)]
    assert sum(job.log(worker).count(LOST) for worker in range(WORKERS)) == 1
    turns = {number: [overlapped(each.ops) for each in recorded(job)[1] if each.iteration == number]
             for number in (1, 6, 14)}  # fmt: skip
    assert turns == {1: [1] * 4, 6: [0] * 3, 14: [1] * 4}


@pytest.mark.parametrize("draws", [{"moe_input_jitter_eps": 0.1}, CHUNKS | OPTIMIZER], ids=["plain", "chunks"])
def test_masks_are_those_of_a_job_without_overlap(jobs: Jobs, tmp_path: Path, draws: dict[str, Any]) -> None:
    """Whichever of both schedules a plan leaves."""
    replicas = STAGES if "num_layers" in draws else WORKER
    reference = jobs.reference(tiny(**SHARED | DROPOUT | draws), workers=WORKERS)
    asked = there_and_back(tmp_path, replicas)
    job = jobs.run(tiny(**OVERLAPPED | DROPOUT | draws, **asked), workers=WORKERS, script=SCRIPT)
    check_training(job, reference)
    assert [degree for degree, _ in degrees(job)] == [2, 1, 2, 1]


@pytest.mark.parametrize(
    ("replicas", "layout", "tolerance"),
    [
        (WORKER, {"bf16": True}, BF16),
        (STAGES, CHUNKS | OPTIMIZER, FP32),
        (STAGES, CHUNKS | EARLY | {"bf16": True, "use_distributed_optimizer": True}, BF16),
        (MEMBERS, WHOLE | OPTIMIZER, FP32),
    ],
    ids=["bf16", "chunks, optimizer", "chunks, bf16", "whole, optimizer"],
)
def test_a_change_there_and_back_and_a_death(
    jobs: Jobs, tmp_path: Path, replicas: Any, layout: dict[str, Any], tolerance: Tolerance
) -> None:
    layout, workers = OVERLAPPED | layout, len(replicas) * sum(map(len, replicas[0]))
    mine, stocks = (PRETRAIN, NOTING) if "bf16" in layout else (SCRIPT, SCRIPT)
    stock = stock_steps(jobs, workers, stocks, **layout)
    asked = there_and_back(tmp_path, replicas, 1 if layout["expert_model_parallel_size"] > 2 else 0)
    job = jobs.start(tiny(**layout, **asked), workers=workers, script=mine).wait(LARGE_JOB_S)
    check_like_stock(job, stock, tolerance)
    check_samples(job)
    assert degrees(job) == [(2, len(replicas)), (1, len(replicas)), (2, len(replicas)), (1, len(replicas) - 1)]
    check_records(job, chunks=2 if "num_layers" in layout else 1)


def overlapped(ops: Any) -> int:
    """How many forward ops were run in turns with the backward op after them: they have half of its time, to the
    last digits."""
    time = ops["end"] - ops["start"]
    return int(((ops["kind"][:-1] == OpKind.F) & (abs(2 * time[:-1] - time[1:]) < 1e-9)).sum())


def check_records(job: Job, chunks: int) -> None:
    """In the first iteration, whose micro-batches are run in turns, each op is noted once, and each message between
    stages by both ends. Their numbers are those of the first replica of two that share experts."""
    plan = ParallelPlan.from_dict(job.events("epoch_started")[0]["plan"])
    share = {worker: set(plan.replicas[number - number % 2].micro_batches)
             for number, replica in enumerate(plan.replicas) for worker, _ in replica.workers()}  # fmt: skip
    records = {record.worker: record for record in recorded(job)[1] if record.iteration == 1}
    assert records.keys() == share.keys()
    for worker, record in records.items():
        ops = record.ops
        places = [(kind, chunk, number) for kind in (OpKind.F, OpKind.B) for chunk in range(chunks)
                  for number in sorted(share[worker])]  # fmt: skip
        assert sorted(zip(ops["kind"], ops["chunk"], ops["micro_batch"], strict=True)) == places
        assert (ops["start"] <= ops["end"]).all() and (ops["end"][:-1] <= ops["start"][1:] + 1e-9).all()
        assert overlapped(ops) == len(share[worker]) - 1 if chunks == 1 else overlapped(ops) > 0
    for (one, first), (other, second) in permutations(records.items(), 2):
        sent = first.transfers[(first.transfers["received"] == 0) & (first.transfers["peer"] == other)]
        came = second.transfers[(second.transfers["received"] == 1) & (second.transfers["peer"] == one)]
        for kind in (OpKind.F, OpKind.B):
            numbers = [sorted(rows["micro_batch"][rows["kind"] == kind]) for rows in (sent, came)]
            assert numbers[0] == numbers[1] and set(numbers[0]) <= share[one]
