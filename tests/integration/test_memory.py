# SPDX-License-Identifier: Apache-2.0
"""Recoveries and changes of jobs that fill 85 % of their devices: the stand-in's device has a size and counts.

Parameters, gradients and the optimizer's state are 85 % of it, and activations come on top while training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from jobs import BF16, FP32, Job, Jobs, Tolerance, ask_at, check_training, tiny
from test_plans import chunks, stages
from test_recovery_points import RECOVERY_POINTS

from megatron_resihp.plan import ParallelPlan, Replica

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

SCRIPT: Final = Path(__file__).with_name("full_device_gpt.py")
MODEL: dict[str, Any] = {
    "hidden_size": 128, "num_layers": 4, "seq_length": 8, "max_position_embeddings": 8,
    "pipeline_model_parallel_size": 2,
}  # fmt: skip
"""So large that the state takes more than activations do: 6.6 MB a worker in fp32. Two replicas of two stages."""
OWN = ParallelPlan((Replica(stages([0], [2]), (0, 2)), Replica(stages([1], [3]), (1, 3))), {})
"""As the job starts."""
UNLIKE = ParallelPlan((Replica(stages([0, 2]), (0, 1), chunks(6)), Replica(stages([1], [3]), (2, 3), chunks(3, 6))), {})
"""Workers 1 and 3 keep their shards, of which the others get halves of each layer in place of theirs. No state grows by
more than what two tensor-parallel members both have."""
ENDLESS: Final = 1 << 40
FULL: Final = 0.85
GOAL: Final = 1.05
"""The most that a recovery may take at a time, as a share of the state before it."""
SHARED_OUT: dict[str, Any] = {"use_distributed_optimizer": True}


def on_device(jobs: Jobs, size: int, wishes: Sequence[str] = (), **changes: Any) -> Job:
    environment = {"RESIHP_CPU_MEMORY": str(size)}
    arguments = tiny(**MODEL | changes)
    return jobs.start(arguments, workers=4, script=SCRIPT, environment=environment, wishes=wishes).wait()


def largest_state(jobs: Jobs, sizes: dict[str, int] = {}, **kind: Any) -> int:  # noqa: B006 (kept for later tests)
    """The bytes of the largest worker's state, once the optimizer has moments."""
    if str(kind) not in sizes:
        job = on_device(jobs, ENDLESS, **kind, resihp_inject="rebuild:0@3:backward")
        sizes[str(kind)] = max(event["bytes_before"] for event in job.events("resources"))
    return sizes[str(kind)]


def survive(
    jobs: Jobs, injections: Sequence[str] = (), plans: Sequence[str] = (), wishes: Sequence[str] = (),
    tolerance: Tolerance = FP32, full: float = FULL, **kind: Any,
) -> Job:  # fmt: skip
    """Run a job of four workers on full devices and compare it with the undisturbed one. `full`: the state's share."""
    disturbed = {"resihp_inject": list(injections) or None, "resihp_plan": list(plans) or None}
    job = on_device(jobs, int(largest_state(jobs, **kind) / full), wishes, **kind, **disturbed)
    check_training(job, jobs.reference(tiny(**MODEL, **kind), workers=4), tolerance)
    struck = {(drill.target, drill.point) for drill in job.summary.drills}
    wanted = [injection.partition(":")[2] for injection in injections]
    assert struck == {(int(text.partition("@")[0]), text.partition(":")[2]) for text in wanted}
    return job


def peaks(job: Job) -> dict[tuple[int, int, str], float]:
    """The most that a worker's device had in each phase on the way to each epoch, as a share of its state before."""
    before = {(event["worker"], event["to_epoch"]): event["bytes_before"] for event in job.events("resources")}
    return {
        (event["worker"], event["to_epoch"], event["phase"]): round(event["peak_bytes"] / whole, 3)
        for event in job.events("phase")
        if (whole := before[event["worker"], event["to_epoch"]])
    }


def took(job: Job, worker: int) -> list[dict[str, Any]]:
    """What each rebuild of a worker took."""
    return [event for event in job.events("resources") if event["worker"] == worker and event["bytes_before"]]


KINDS: Final = {"fp32": ({}, FP32), "bf16": ({"bf16": True}, BF16)}


@pytest.mark.parametrize(("kind", "tolerance"), KINDS.values(), ids=KINDS.keys())
def test_a_death(jobs: Jobs, kind: dict[str, Any], tolerance: Tolerance) -> None:
    """Who keeps its place builds nothing anew but gradients."""
    job = survive(jobs, ["kill:3@3:backward"], tolerance=tolerance, **kind)
    assert max(peaks(job).values()) <= GOAL, peaks(job)
    [[first], [last]] = took(job, 0), took(job, 2)
    for rebuilt in (first, last):
        assert rebuilt["bytes_new"] < 0.27 * rebuilt["bytes_before"] and not rebuilt["bytes_to_host"], rebuilt


def test_a_change_by_choice_and_back(jobs: Jobs, tmp_path: Path) -> None:
    """Who gets another shard has its old state in host memory meanwhile; who keeps its own takes it over."""
    plans = ask_at(tmp_path, (UNLIKE, 2), (OWN, 4))
    job = survive(jobs, plans=plans)
    assert max(peaks(job).values()) <= GOAL, peaks(job)
    assert len(job.events("reconfiguration")) == 2
    for worker in range(4):
        moved = [event["bytes_to_host"] > 0 for event in took(job, worker)]
        assert moved == [worker in (0, 2)] * 2, took(job, worker)


@pytest.mark.parametrize("point", RECOVERY_POINTS)
def test_a_second_death_in_a_recovery(jobs: Jobs, point: str) -> None:
    """Worker 1 is without work after the first death, and takes the place of worker 0 after the second."""
    job = survive(jobs, ["kill:3@3:backward", f"kill:0@3:{point}"])
    assert max(peaks(job).values()) <= GOAL, peaks(job)


@pytest.mark.parametrize("point", (*RECOVERY_POINTS, "recovery-migrate"))
def test_a_death_in_a_change(jobs: Jobs, tmp_path: Path, point: str) -> None:
    """Worker 0 dies when the state of worker 2 is in host memory, from where it comes back or moves on."""
    job = survive(jobs, [f"kill:0@1:{point}"], ask_at(tmp_path, (UNLIKE, 1)))
    assert max(peaks(job).values()) <= GOAL, peaks(job)


def test_parts_of_an_optimizer(jobs: Jobs) -> None:
    """They are built anew in each epoch, so the old ones are in host memory meanwhile. In each step the part's gradient
    is put together on the device, a sixth of the state."""
    job = survive(jobs, ["rebuild:0@3:backward"], full=0.75, **SHARED_OUT)
    assert max(peaks(job).values()) <= GOAL, peaks(job)
    assert all(took(job, worker)[0]["bytes_to_host"] for worker in range(4))


def test_memory_that_runs_out(jobs: Jobs, tmp_path: Path) -> None:
    """The estimate was wrong: the epoch is broken once more, and the old state is in host memory the next time."""
    job = survive(jobs, plans=ask_at(tmp_path, (UNLIKE, 1)), wishes=["optimist"])
    assert any("too little memory for old and new state together" in job.log(worker) for worker in (0, 2))
    assert any(event["bytes_to_host"] for worker in (0, 2) for event in took(job, worker))
