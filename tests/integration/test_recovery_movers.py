# SPDX-License-Identifier: Apache-2.0
"""State that moves, and shares that become uneven: models and losses of all kinds train on undisturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import BF16, EXPERTS, FP32, Job, Jobs, Tolerance, check_training, tiny

WIDE: dict[str, Any] = {"pipeline_model_parallel_size": 2, "global_batch_size": 6}
"""Three replicas of two stages: workers 0 to 2 hold the first stage, 3 to 5 the second."""
LLAMA: dict[str, Any] = {
    "group_query_attention": True, "num_query_groups": 2, "swiglu": True, "normalization": "RMSNorm",
    "untie_embeddings_and_output_weights": True, "disable_bias_linear": True, "ffn_hidden_size": 64,
}  # fmt: skip
SEQUENCE_PARALLEL: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PER_TOKEN: dict[str, Any] = {"calculate_per_token_loss": True}
LOSSES = ({}, pytest.param(PER_TOKEN, marks=pytest.mark.nightly))


def survive(
    jobs: Jobs, *injections: str, model: dict[str, Any], workers: int, tolerance: Tolerance = FP32
) -> tuple[Job, dict[str, Any]]:
    """The job, and its last plan."""
    reference = jobs.reference(tiny(**model), workers=workers)
    job = jobs.run(tiny(**model, resihp_inject=injections), workers=workers)
    check_training(job, reference, tolerance)
    assert len(job.summary.drills) == len(injections)
    return job, job.events("epoch_started")[-1]["plan"]


def shares(plan: dict[str, Any]) -> list[int]:
    return sorted(len(replica["micro_batches"]) for replica in plan["replicas"])


def moved(job: Job) -> int:
    return sum(event["bytes_moved"] for event in job.events("recovery"))


@pytest.mark.parametrize("loss", LOSSES, ids=["mean", "per token"])
def test_one_of_three_replicas_dies(jobs: Jobs, loss: dict[str, Any]) -> None:
    job, plan = survive(jobs, "kill:4@3:backward", model=WIDE | loss, workers=6)
    assert shares(plan) == [3, 3] and moved(job) == 0


@pytest.mark.parametrize("point", ["backward", "step"])
@pytest.mark.parametrize("loss", LOSSES, ids=["mean", "per token"])
def test_a_survivor_moves_to_a_shard_that_lost_two_of_its_holders(jobs: Jobs, loss: dict[str, Any], point: str) -> None:
    """Of the second stage one holder is left, of the first three; one of these fetches the second stage from there."""
    job, plan = survive(jobs, f"kill:3@3:{point}", f"kill:4@3:{point}", model=WIDE | loss, workers=6)
    assert shares(plan) == [3, 3] and moved(job) > 0
    assert {replica["stages"][1][0] for replica in plan["replicas"]} > {5}


def test_a_standby_moves_at_a_second_death(jobs: Jobs) -> None:
    job, plan = survive(jobs, "kill:3@2:forward", "kill:4@4:norm", model=WIDE, workers=6)
    assert shares(plan) == [3, 3] and moved(job) > 0


@pytest.mark.parametrize(
    ("point", "victim"), [("recovery-ready", 2), pytest.param("recovery-migrate", 1, marks=pytest.mark.nightly)]
)
def test_a_worker_is_killed_where_state_has_moved(jobs: Jobs, point: str, victim: int) -> None:
    """Worker 1 is the one that fetches the second stage."""
    injections = ("kill:3@3:backward", "kill:4@3:backward", f"kill:{victim}@3:{point}")
    job, plan = survive(jobs, *injections, model=WIDE, workers=6)
    assert shares(plan) == [6] or shares(plan) == [3, 3]
    assert 5 in {worker for replica in plan["replicas"] for worker in replica["stages"][1]}
    assert job.summary.deaths


@pytest.mark.parametrize("loss", LOSSES, ids=["mean", "per token"])
def test_uneven_shares(jobs: Jobs, loss: dict[str, Any]) -> None:
    """Four replicas with two micro-batches each become three with 3, 3 and 2."""
    job, plan = survive(jobs, "kill:1@3:backward", model={"global_batch_size": 8} | loss, workers=4)
    assert shares(plan) == [2, 3, 3] and moved(job) == 0


@pytest.mark.parametrize("loss", LOSSES, ids=["mean", "per token"])
def test_uneven_shares_of_a_pipeline(jobs: Jobs, loss: dict[str, Any]) -> None:
    """Three replicas with three micro-batches each become two with 5 and 4."""
    _, plan = survive(jobs, "kill:2@3:p2p", model=WIDE | {"global_batch_size": 9} | loss, workers=6)
    assert shares(plan) == [4, 5]


@pytest.mark.nightly
def test_grouped_queries_gated_layers_and_untied_embeddings(jobs: Jobs) -> None:
    model = {"tensor_model_parallel_size": 2, **LLAMA, "global_batch_size": 4}
    survive(jobs, "kill:1@3:backward", model=model, workers=4)


def test_sequence_parallelism(jobs: Jobs) -> None:
    survive(jobs, "kill:2@3:backward", model=SEQUENCE_PARALLEL | LLAMA, workers=4)


@pytest.mark.nightly
def test_sequence_parallelism_with_uneven_shares(jobs: Jobs) -> None:
    model = SEQUENCE_PARALLEL | {"global_batch_size": 9}
    _, plan = survive(jobs, "kill:2@3:backward", model=model, workers=6)
    assert shares(plan) == [4, 5]


@pytest.mark.nightly
def test_sixteen_bits(jobs: Jobs) -> None:
    """Sums in another order differ in the last of 8 bits of a gradient; after a few steps that is seen in the loss."""
    survive(jobs, "kill:1@3:backward", model={"global_batch_size": 8, "bf16": True}, workers=4, tolerance=BF16)


@pytest.mark.nightly
def test_sixteen_bits_of_a_shard_that_moves(jobs: Jobs) -> None:
    injections = ("kill:3@3:backward", "kill:4@3:backward")
    job, _ = survive(jobs, *injections, model=WIDE | {"bf16": True}, workers=6, tolerance=BF16)
    assert moved(job) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("loss", [{}, PER_TOKEN], ids=["mean", "per token"])
def test_uneven_shares_of_experts(jobs: Jobs, loss: dict[str, Any]) -> None:
    """What balances the experts weighs as much in each of the shares 3, 3 and 2."""
    _, plan = survive(jobs, "kill:1@3:backward", model=EXPERTS | {"global_batch_size": 8} | loss, workers=4)
    assert shares(plan) == [2, 3, 3]


@pytest.mark.since_megatron("0.19")
@pytest.mark.parametrize("loss", LOSSES, ids=["mean", "per token"])
def test_packed_documents(jobs: Jobs, documents: Path, loss: dict[str, Any]) -> None:
    model = {
        "pipeline_model_parallel_size": 2, "mock_data": False, "data_path": documents, "vocab_size": 257,
        "dataloader_inter_document_masking": True, "data_cache_path": documents.with_name("cache"),
    }  # fmt: skip
    survive(jobs, "kill:1@3:backward", model=model | loss, workers=4)
