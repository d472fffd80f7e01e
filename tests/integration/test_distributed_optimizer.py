# SPDX-License-Identifier: Apache-2.0
"""Megatron's distributed optimizer: its parts outlive their owners, in copies that other workers keep."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import BF16, EXPERTS, FP32, WISHING, Job, Jobs, Tolerance, ask_for, check_training, tiny
from test_plans import GROUPED, LLAMA, explicit

from megatron_resihp.control import exit_codes
from megatron_resihp.integration.emergency.contents import found_groups
from megatron_resihp.plan import Chunk, Coordinate, ParallelPlan, Replica, Schedule

SHARED: dict[str, Any] = {"use_distributed_optimizer": True}
"""Four replicas, each of which owns a fourth of the optimizer's state, and keeps a copy of its predecessor's."""
TENSOR: dict[str, Any] = {**SHARED, "tensor_model_parallel_size": 2}
"""Two replicas of two tensor-parallel ranks: workers 0 and 1, 2 and 3."""
PIPELINE: dict[str, Any] = {**SHARED, "pipeline_model_parallel_size": 2}
NIGHTLY = pytest.mark.nightly


def survive(jobs: Jobs, *injections: str, layout: dict[str, Any], tolerance: Tolerance = FP32, **extra: Any) -> Job:
    reference = jobs.reference(tiny(**layout), workers=4)
    job = jobs.run(tiny(**layout, **extra, resihp_inject=injections or None), workers=4)
    check_training(job, reference, tolerance)
    assert len(job.summary.deaths) == len(injections)
    return job


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=NIGHTLY) for point in ("backward", "grad-sync", "norm", "step", "gather", "between")],
)
def test_a_death_of_one_of_four_replicas(jobs: Jobs, point: str) -> None:
    survive(jobs, f"kill:1@3:{point}", layout=SHARED)


@NIGHTLY
@pytest.mark.parametrize("point", ["recovery-report", "recovery-rebuild", "recovery-migrate", "recovery-ready"])
def test_a_death_in_a_recovery(jobs: Jobs, point: str) -> None:
    """Workers 3 and 1 are no neighbours in the ring of four. That copies are made as the job begins is no recovery."""
    survive(jobs, "kill:3@3:step", f"kill:1@1:{point}", layout=SHARED)


def test_a_copy_becomes_the_last_replica(jobs: Jobs) -> None:
    """Worker 0 is a standby after the first death: what it has of the state is a copy, and all after the second."""
    job = survive(jobs, "kill:3@2:gather", "kill:0@4:norm", layout=TENSOR)
    [replica] = job.events("epoch_started")[-1]["plan"]["replicas"]
    assert replica["stages"] == [[2, 1]]


@pytest.mark.parametrize(
    ("layout", "tolerance"),
    [
        pytest.param(TENSOR | {"bf16": True}, BF16, marks=NIGHTLY),
        pytest.param(PIPELINE | {"bf16": True}, BF16, marks=NIGHTLY),
        pytest.param(PIPELINE | {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}, FP32, marks=NIGHTLY),
        pytest.param(TENSOR | {"ddp_num_buckets": 3, "ddp_pad_buckets_for_high_nccl_busbw": True}, FP32, marks=NIGHTLY),
        pytest.param(TENSOR | EXPERTS | {"sequence_parallel": True}, FP32, marks=NIGHTLY),
    ],
    ids=["tensor, bf16", "pipeline, bf16", "pipeline, small buckets, overlap", "three padded buckets", "experts"],
)
def test_deaths_in_other_layouts(jobs: Jobs, layout: dict[str, Any], tolerance: Tolerance) -> None:
    survive(jobs, "kill:1@2:step", "kill:2@4:backward", layout=layout, tolerance=tolerance)


def test_the_state_after_a_death_is_bit_for_bit_the_one_without(jobs: Jobs, tmp_path: Path) -> None:
    """The victim has sent its gradient of the last iteration and dies with the step; nothing is computed after it."""
    saving = {**SHARED, "ckpt_format": "torch", "save_interval": 100}
    whole, mended = jobs.directory / "shared_out", tmp_path / "mended"
    reference = jobs.reference(tiny(**saving, save=whole), workers=4)
    job = jobs.run(tiny(**saving, save=mended, resihp_inject="kill:1@6:step"), workers=4)
    check_training(job, reference)
    assert len(job.events("epoch_started")[-1]["plan"]["replicas"]) == 3
    for name in ("model_optim_rng.pt", "distrib_optim.pt"):
        before, after = (dict(tensors(load(path / "iter_0000006" / "mp_rank_00" / name))) for path in (whole, mended))
        assert before.keys() == after.keys() and before
        for key, tensor in before.items():
            # Buffers end with padding, so that they can be cut in equal parts.
            size = min(tensor.numel(), after[key].numel())
            assert torch.equal(tensor.flatten()[:size], after[key].flatten()[:size]), key


def test_what_copies_cost_is_told(jobs: Jobs) -> None:
    """Of each parameter a gradient crosses each step, and a master and two moments are kept: all of four bytes here."""
    job = jobs.reference(tiny(**SHARED), workers=4)
    costs = job.events("optimizer_copy")
    assert sorted((cost["owner"], cost["worker"]) for cost in costs) == [(0, 1), (1, 2), (2, 3), (3, 0)]
    for cost in costs:
        assert cost["steps"] == job.summary.iterations
        assert cost["bytes_kept"] == pytest.approx(3 * cost["bytes_per_step"], rel=0.05)


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a checkpoint but random states, which start anew in each epoch."""
    if isinstance(value, torch.Tensor):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        if key != "rng_state":
            yield from tensors(item, f"{path}/{key}")


@NIGHTLY
def test_fewer_replicas_by_choice_and_back(jobs: Jobs, tmp_path: Path) -> None:
    """Workers that stand by meanwhile keep copies, and get their parts again."""
    job = survive(jobs, layout=SHARED, resihp_plan=ask_for(tmp_path, FEWER, FOUR))
    assert [len(event["plan"]["replicas"]) for event in job.events("epoch_started")] == [4, 2, 4]


FOUR = ParallelPlan(tuple(Replica(((worker,),), (worker,)) for worker in range(4)), {})
FEWER = ParallelPlan(
    tuple(Replica(((worker,),), (worker, worker + 2)) for worker in (0, 1)), {2: Coordinate(0, 0), 3: None}
)
UNLIKE = ParallelPlan((
    Replica(((0,), (1,)), (0, 1, 2), (Chunk(0, 0, 2), Chunk(1, 2, 4))), Replica(((2,),), (3,), (Chunk(0, 0, 4),)),
), {3: None})  # fmt: skip
UNLIKE_DEGREES = ParallelPlan((Replica(((3,), (0, 1)), (0, 1, 2, 3), (Chunk(0, 0, 2), Chunk(1, 2, 4))),), {2: None})
ZERO_BUBBLE = ParallelPlan(
    (Replica(((0, 1), (3,)), (0, 1, 2, 3), (Chunk(0, 0, 3), Chunk(1, 3, 4)), Schedule("zero-bubble-h1")),), {2: None}
)
VEE = ParallelPlan((
    Replica(
        ((3,), (0, 1)), (0, 1, 2, 3), (Chunk(0, 0, 1), Chunk(1, 1, 2), Chunk(1, 2, 3), Chunk(0, 3, 4)),
        explicit((0, 1, 1, 0), 2, (0, 1, 2, 3), weights=True),
    ),
), {2: None})  # fmt: skip
CROSSED = ParallelPlan((Replica(((3, 2),), (0, 2)), Replica(((1, 0),), (1, 3))), {})
"""TENSOR with everybody at another place than in the beginning."""
LONGER: dict[str, Any] = {**TENSOR, "train_iters": 10}


@pytest.mark.parametrize(
    ("layout", "plans", "tolerance"),
    [
        (SHARED, (UNLIKE, FOUR), FP32),
        pytest.param(SHARED, (UNLIKE, FEWER), FP32, marks=NIGHTLY),
        pytest.param(SHARED | {"bf16": True}, (UNLIKE, FEWER), BF16, marks=NIGHTLY),
        pytest.param(TENSOR, (UNLIKE_DEGREES,), FP32, marks=NIGHTLY),
        pytest.param(LONGER | LLAMA | {"sequence_parallel": True}, (UNLIKE_DEGREES, CROSSED), FP32, marks=NIGHTLY),
        pytest.param(LONGER | GROUPED, (ZERO_BUBBLE, CROSSED), FP32, marks=NIGHTLY),
        pytest.param(LONGER | GROUPED | {"bf16": True}, (VEE, CROSSED), BF16, marks=NIGHTLY),
    ],
    ids=[
        "and back",
        "then with standbys",
        "then with standbys, bf16",
        "unlike degrees",
        "unlike degrees and back, llama",
        "zero bubble and back, grouped",
        "V shape and back, grouped, bf16",
    ],
)
def test_unlike_replicas(
    jobs: Jobs, tmp_path: Path, layout: dict[str, Any], plans: tuple[ParallelPlan, ...], tolerance: Tolerance
) -> None:
    """Parts are put together on the way there and shared out on the way back."""
    job = survive(jobs, layout=layout, tolerance=tolerance, resihp_plan=ask_for(tmp_path, *plans))
    assert len(job.events("reconfiguration")) == len(plans), job.tails()


@NIGHTLY
@pytest.mark.parametrize("injections", [["kill:1@4:step"], ["kill:1@4:backward", "kill:2@5:gather"]], ids=len)
def test_a_death_among_unlike_replicas(jobs: Jobs, tmp_path: Path, injections: list[str]) -> None:
    """Those that are left are equal replicas again, each with a part."""
    job = survive(jobs, *injections, layout=SHARED, resihp_plan=ask_for(tmp_path, UNLIKE))
    assert len(job.events("recovery")) == len(injections)


@NIGHTLY
def test_a_worker_that_comes_back_gets_a_part_again(jobs: Jobs) -> None:
    layout = TENSOR | {"train_iters": 12}
    reference = jobs.reference(tiny(**layout), workers=4)
    arguments = tiny(**layout, resihp_inject="kill:3@3:gather")
    job = jobs.start(arguments, workers=4, max_restarts=1, script=WISHING, wishes=["hold-0-7"])
    job.await_event("worker_waiting", waiting=7)
    job.wish("go_on")
    check_training(job.wait(), reference)
    assert [len(event["plan"]["replicas"]) for event in job.events("epoch_started")] == [2, 1, 2]


def test_a_part_that_dies_with_its_copy_ends_the_job(jobs: Jobs) -> None:
    """Survivors save what they have, and say what is missing."""
    job = jobs.start(tiny(**SHARED), workers=4, script=WISHING, wishes=["hold-0-3", "hold-1-3", "hold-2-3", "hold-3-3"])
    job.await_event("iteration", iteration=2)
    for worker in (1, 2):
        os.kill(job.worker_pids()[worker], signal.SIGKILL)
    job.await_event("worker_dead", dead=1)
    job.await_event("worker_dead", dead=2)
    job.wish("go_on")
    assert job.wait().code == exit_codes.NO_PLAN
    assert "a part of the optimizer's state of stage 0 TP rank 0 died with its copy" in job.output(), job.tails()
    assert {each.complete for each in job.summary.salvages} == {False}
    saved = [
        load(next((job.run_dir / "emergency_checkpoint" / "iter_0000002").glob(f"worker_{worker}-*.pt")))["tensors"]
        for worker in (0, 3)
    ]
    # Of four parts they have three: their own, and the copies of 3's and 2's.
    kinds = {kind for part in saved for ranges in part.values() for found in ranges.values() for kind in found}
    assert kinds == {"master", "exp_avg", "exp_avg_sq"}
    [group] = found_groups(job.run_dir)
    [gap] = group.gaps
    assert gap.endswith("elements of the optimizer's state of layers 0–3")
