# SPDX-License-Identifier: Apache-2.0
"""Jobs whose own pipeline is interleaved: each worker has several chunks of layers, by Megatron's own flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import FP32, WISHING, Job, Jobs, ask_at, check_training, environment_of, tiny
from test_distributed_optimizer import SHARED, load, tensors
from test_plan_failures import are_heterogeneous
from test_plans import PER_TOKEN, UNTIED, chunks, stages

from megatron_resihp.plan import Chunk, ParallelPlan, Replica
from megatron_resihp.report.run.summary import compare

NIGHTLY = pytest.mark.nightly
NOTING = Path(__file__).with_name("noting_gpt.py")
STOCK_S = 240
INTERLEAVED: dict[str, Any] = {
    "num_layers": 4, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1,
    "global_batch_size": 8, "train_iters": 12,
}  # fmt: skip
"""On four workers two replicas. Workers 0 and 1 have layers 0, 1 and 3; workers 2 and 3 have 2, 4 and the head."""
LAYOUT: dict[str, Any] = {
    "num_layers_per_virtual_pipeline_stage": None, "pipeline_model_parallel_layout": "E|t|tt|tL",
}  # fmt: skip
"""The embedding has a chunk of its own."""
ENDS: dict[str, Any] = {
    "num_layers": 6, "num_layers_per_virtual_pipeline_stage": None, "num_virtual_stages_per_pipeline_rank": 2,
    "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
}  # fmt: skip
GROUPS: dict[str, Any] = {
    "microbatch_group_size_per_virtual_pipeline_stage": 3, "overlap_p2p_communication_warmup_flush": True,
    "global_batch_size": 10,
}  # fmt: skip
"""Each replica has a group of three micro-batches and one of two."""
OWN_LAYERS = (Chunk(0, 0, 2), Chunk(1, 2, 3), Chunk(0, 3, 4), Chunk(1, 4, 6))
UNLIKE = ParallelPlan((
    Replica(stages([3], [0]), (0, 2, 4, 6), chunks(2, 6)), Replica(stages([1]), (1, 3, 5, 7), chunks(6)),
))  # fmt: skip
"""Worker 3, of the last stage, has the embedding, and worker 1 has everything."""


def stock_steps(directory: Path, workers: int, **flags: Any) -> dict[int, tuple[float, float]]:
    """Losses and norms of stock Megatron under torchrun, unrounded."""
    ours = {"resihp": False, "resihp_record_samples": False, "resihp_record_digests": False}
    notes = directory / "notes"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    finished = subprocess.run(
        [*launcher, str(NOTING), *tiny(**flags | ours)], env=environment_of(NOTING) | {"NOTES": str(notes)},
        capture_output=True, text=True, timeout=STOCK_S,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return {int(number): (loss, norm) for number, (loss, norm) in json.loads(notes.read_text()).items()}


def check_like_stock(job: Job, expected: dict[int, tuple[float, float]]) -> None:
    difference = compare(job.summary.loss, {number: loss for number, (loss, _) in expected.items()})
    norms = compare(job.summary.grad_norm, {number: norm for number, (_, norm) in expected.items()})
    assert job.code == 0 and len(expected) == len(job.summary.loss)
    assert difference is not None and difference <= FP32.loss
    assert norms is not None and norms <= FP32.norm


def own_plan(*replicas: tuple[int, int]) -> ParallelPlan:
    """Replicas of the job's own layout. `replicas`: the worker of each stage."""
    return ParallelPlan(tuple(
        Replica(stages(*([worker] for worker in workers)), tuple(range(number, 8, len(replicas))))
        for number, workers in enumerate(replicas)
    ))  # fmt: skip


def test_a_worker_dies_and_another_plan_comes_and_goes(jobs: Jobs, tmp_path: Path) -> None:
    """The last of two replicas goes on with all micro-batches in Megatron's own order; then others get its layers."""
    words = ask_at(tmp_path, (UNLIKE, 5), (own_plan((0, 3)), 8))
    reference = jobs.reference(tiny(**INTERLEAVED), workers=4)
    job = jobs.run(tiny(**INTERLEAVED, resihp_inject="kill:2@3:backward", resihp_plan=words), workers=4)
    check_training(job, reference)
    assert are_heterogeneous(job) == [False, False, True, False]


@NIGHTLY
@pytest.mark.parametrize(
    "model", [{}, LAYOUT | UNTIED, ENDS | PER_TOKEN, GROUPS, SHARED], ids=["layers", "layout", "ends", "groups", "shared"]
)
def test_without_a_death_it_trains_what_stock_megatron_trains(
    jobs: Jobs, tmp_path: Path, model: dict[str, Any]
) -> None:
    job = jobs.reference(tiny(**INTERLEAVED | model), workers=4)
    check_like_stock(job, stock_steps(tmp_path, 4, **INTERLEAVED | model))
