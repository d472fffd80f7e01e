# SPDX-License-Identifier: Apache-2.0
"""State that goes to an unlike plan and back is bitwise what left; state that changed on the way trains nobody."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import test_plan_failures
import torch
from jobs import BIASED, EXPERTS, Job, Jobs, ask_for, check_training, tiny
from test_plan_failures import PIPELINE, are_heterogeneous
from test_plans import EVERYTHING, FOUR, GROUPED, LLAMA, MODEL, UNIFORM_LAYOUT, chunks, stages

from megatron_resihp.plan import ParallelPlan, Replica

NIGHTLY = pytest.mark.nightly
WATCHING = Path(__file__).with_name("watching_gpt.py")
SHORT = MODEL | {"train_iters": 6, "num_layers": 4}
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True}
UNLIKE = ParallelPlan((Replica(stages([2], [1], [0]), EVERYTHING, chunks(2, 3, 6)),), {3: None})
ELSEWHERE = ParallelPlan((Replica(stages([3, 2], [1, 0]), EVERYTHING),), {})
"""UNIFORM_LAYOUT with everybody at another place than in the beginning."""
CROSSED = ParallelPlan((Replica(stages([3, 2]), EVERYTHING[::2]), Replica(stages([1, 0]), EVERYTHING[1::2])), {})
"""The same for TENSOR."""


def start(jobs: Jobs, path: Path, model: dict[str, Any], plans: Sequence[ParallelPlan], *wishes: str) -> Job:
    words = ask_for(path, *plans)
    return jobs.start(tiny(**model, resihp_plan=words), workers=4, script=WATCHING, wishes=wishes)


@pytest.mark.parametrize(
    "model",
    [
        UNIFORM_LAYOUT | GROUPED | {"bf16": True},
        pytest.param(UNIFORM_LAYOUT, marks=NIGHTLY),
        pytest.param(UNIFORM_LAYOUT | LLAMA | {"sequence_parallel": True}, marks=NIGHTLY),
        pytest.param(UNIFORM_LAYOUT | EXPERTS | {"sequence_parallel": True}, marks=NIGHTLY),
        pytest.param(TENSOR | BIASED | {"sequence_parallel": True}, marks=NIGHTLY),
        pytest.param({"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}, marks=NIGHTLY),
        pytest.param({"tensor_model_parallel_size": 4} | GROUPED, marks=NIGHTLY),
    ],
    ids=[
        "grouped, bf16", "dense", "llama", "experts", "expert biases", "distributed optimizer",
        "more members than query groups",
    ],
)  # fmt: skip
def test_there_and_back_is_bitwise_what_left(jobs: Jobs, tmp_path: Path, model: dict[str, Any]) -> None:
    """The unlike plan's epoch is broken before it takes a step, so there is nothing that could have changed. With TP 2
    x PP 2 there is one replica, of which each shard has one holder: no digests of others would tell."""
    job = start(jobs, tmp_path, SHORT | model, [UNLIKE], "break").wait()
    assert job.code == 0, job.tails()
    assert are_heterogeneous(job) == [False, True, False]
    check_state(job)


@NIGHTLY
@pytest.mark.parametrize(
    "name", ["TP 2 and 1", "unlike replicas", "TP 2 and 1 help each other", "interleaved", "zero bubble"]
)
def test_there_and_back_by_choice(jobs: Jobs, tmp_path: Path, name: str) -> None:
    """All ops of the unlike plan are run and all gradients summed, but the step is skipped, as after an overflow."""
    model = SHORT | UNIFORM_LAYOUT | GROUPED | {"bf16": True}
    check_choice(start(jobs, tmp_path, model, [FOUR[name], ELSEWHERE], "skip").wait())


@NIGHTLY
@pytest.mark.parametrize(
    ("model", "name"),
    [(LLAMA, "TP 2 and 1"), (GROUPED, "zero bubble"), (GROUPED | {"bf16": True}, "V shape, W apart")],
    ids=["TP 2 and 1", "zero bubble", "V shape, W apart, bf16"],
)
def test_parts_there_and_back_by_choice(jobs: Jobs, tmp_path: Path, model: dict[str, Any], name: str) -> None:
    """The same with the distributed optimizer: two replicas have a part each of masters and moments."""
    check_choice(start(jobs, tmp_path, SHORT | TENSOR | model, [FOUR[name], CROSSED], "skip").wait())


def check_choice(job: Job) -> None:
    assert job.code == 0, job.tails()
    assert are_heterogeneous(job) == [False, True, False] and not job.events("epoch_broken")
    there = {event["iteration"] for event in job.events("iteration") if event["epoch"] == 1}
    assert there and there == set(job.summary.skipped_iterations)
    check_state(job)


def check_state(job: Job) -> None:
    """What has come back is what left."""
    own, _, back = [ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started")]
    left = {place(own, worker): state(job, "left", 1, worker) for worker in own.working}
    for worker in back.working:
        assert_equal(state(job, "came", 2, worker), left[place(back, worker)])


def place(plan: ParallelPlan, worker: int) -> tuple[Any, ...]:
    """Of a distributed optimizer replicas have different parts."""
    return plan.replica_of(worker), plan.coordinate_of(worker)


def state(job: Job, when: str, epoch: int, worker: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(job.run_dir / "state" / f"{when}-{epoch}-{worker}.pt", weights_only=False)
    return found


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["steps"] == other["steps"]
    assert one["tensors"].keys() == other["tensors"].keys()
    assert any(name.startswith("state/") or "exp_avg" in name for name in one["tensors"]), "moments are among them"
    for name, tensor in one["tensors"].items():
        assert tensor.dtype == other["tensors"][name].dtype
        assert torch.equal(tensor.view(-1).view(torch.uint8), other["tensors"][name].view(-1).view(torch.uint8)), name


def test_a_slice_that_changes_while_it_is_copied_is_trained_by_nobody(jobs: Jobs, tmp_path: Path) -> None:
    job = start(jobs, tmp_path, SHORT | UNIFORM_LAYOUT, [FOUR["one stage"]], "flip-own-1").wait()
    assert job.code == 1, job.tails()
    [end] = job.events("run_finished")
    assert end["reason"].startswith("worker 1 failed: ContractBroken: the state of the word embeddings")
    assert "is not what it was before it moved" in end["reason"]
    assert {event["epoch"] for event in job.events("iteration")} == {0}


def test_a_slice_that_changes_on_its_way_is_trained_by_nobody(jobs: Jobs, tmp_path: Path) -> None:
    """Its receiver cannot tell; who sent it can. Nobody has lost anything: all go on as before the change."""
    job = start(jobs, tmp_path, PIPELINE, [test_plan_failures.UNLIKE], "flip-sent-3").wait()
    [broken] = job.events("epoch_broken")
    assert "state differs between holders of layer" in broken["cause"]
    assert are_heterogeneous(job) == [False, False]
    check_training(job, jobs.reference(tiny(**PIPELINE), workers=4))


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ({}, "ContractBroken: the state of stage 0 TP rank 0"),
        pytest.param({"use_distributed_optimizer": True, "bf16": True}, "the optimizer's state of", marks=NIGHTLY),
    ],
    ids=["a shard", "parts"],
)
def test_a_state_that_changes_on_its_way_to_its_only_holder_is_trained_by_nobody(
    jobs: Jobs, model: dict[str, Any], what: str
) -> None:
    """On Megatron's own groups, and no digest of another holder would tell."""
    flags = tiny(**SHORT | model, resihp_inject="kill:1@3:backward")
    job = jobs.run(flags, workers=2, script=WATCHING, wishes=["flip-new-0"])
    assert job.code != 0, job.tails()
    [end] = job.events("run_finished")
    assert what in end["reason"] and "is not what it was before it moved" in end["reason"]
    assert {event["epoch"] for event in job.events("iteration")} == {0}
