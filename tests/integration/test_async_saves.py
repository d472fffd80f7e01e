# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are written beside training: what comes of a save that is under way when a worker dies."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import BF16, FP32, PRETRAIN, Job, Jobs, Tolerance, ask_at, check_training, flags, tiny
from launched import children
from stock_runs import stock_losses
from test_checkpoints import FUSED, change_to
from test_leaks import UNLIKE, check_flat, resources
from test_plans import MODEL, UNIFORM_LAYOUT

from megatron_resihp.plan import ParallelPlan

SCRIPT = Path(__file__).with_name("slow_saves_gpt.py")
ASYNC: dict[str, Any] = {"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "mcore"}
SAVING = ASYNC | {"ckpt_assume_constant_structure": True, "verify_integrity": True, "dist_ckpt_workers": 2}
LOADING: dict[str, Any] = {
    "use_checkpoint_args": True, "verify_integrity": True, "auto_detect_ckpt_format": True,
    "ckpt_fully_parallel_load": True, "ckpt_fully_parallel_load_process_group": "ep_dp",
    "no_ckpt_load_validate_sharding_integrity": True, "no_stream_ckpt_dequant": True, "dist_ckpt_strictness": "log_all",
}  # fmt: skip
PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}


def tracker(directory: Path) -> int:
    return int((directory / "latest_checkpointed_iteration.txt").read_text())


def kept(directory: Path) -> list[int]:
    """The iterations of which there are files."""
    return sorted(int(path.name.removeprefix("iter_")) for path in directory.glob("iter_*"))


def told(job: Job) -> list[int]:
    """The iterations whose checkpoints the log names."""
    return [event["iteration"] for event in job.events("checkpoint")]


def dropped(job: Job) -> list[int]:
    """The iterations whose saves were given up."""
    logs = "".join(job.log(worker) for worker in range(job.workers))
    return [int(number) for number in re.findall(r"drops the save of iteration (\d+)", logs)]


def left_behind(job: Job) -> list[str]:
    """What runs in the process groups of a job's workers."""
    leaders, found = set(job.worker_pids().values()), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        state, _, leader, *_ = text.rpartition(")")[2].split()
        if state not in "ZX" and int(leader) in leaders:
            found.append(text)
    return found


@pytest.mark.since_megatron("0.19")
def test_a_save_under_way_when_a_worker_dies_is_dropped_whole_and_made_up_for(jobs: Jobs, tmp_path: Path) -> None:
    """Its files are half written, by the dead worker's writer too."""
    directory = tmp_path / "saved"
    saving = SAVING | {"save": directory, "save_interval": 2}
    job = jobs.run(
        tiny(**PIPELINE, **saving, resihp_inject="kill:1@4:backward"), workers=4, script=SCRIPT, wishes=["hold-2"]
    )
    check_training(job, jobs.reference(tiny(**PIPELINE), workers=4))
    assert told(job) == kept(directory) == [4, 6] and tracker(directory) == 6
    assert dropped(job) == [2]
    assert not left_behind(job)
    loaded = jobs.run(tiny(**PIPELINE, **LOADING, load=directory, ckpt_step=4), workers=2)
    assert loaded.code == 0, loaded.tails()
    reference = jobs.reference(tiny(**PIPELINE), workers=4).summary.loss
    assert loaded.summary.loss == pytest.approx({n: reference[n] for n in (5, 6)}, rel=1e-5)


def test_a_job_whose_time_is_up_ends_after_the_same_step_on_all_workers(jobs: Jobs, tmp_path: Path) -> None:
    """Though one alone has seen that; it saves, and Megatron's exit code is 0."""
    saving = ASYNC | {"save": tmp_path / "saved", "save_interval": 1000, "train_iters": 2000}
    job = jobs.start(tiny(**saving, exit_duration_in_mins=60), workers=2, script=SCRIPT)
    job.await_event("iteration", iteration=3)
    job.wish("late-1")
    job.wait()
    assert job.code == 0, job.tails()
    assert 3 <= job.summary.iterations < 2000
    assert told(job) == [job.summary.iterations] and tracker(tmp_path / "saved") == job.summary.iterations
    assert set(job.exits().values()) == {0} and not left_behind(job)


# ---- every night

NIGHTLY = pytest.mark.nightly
LAYOUT: dict[str, Any] = MODEL | UNIFORM_LAYOUT
EVERYTHING = SAVING | {"save_retain_interval": 6, "save_interval": 3}


@NIGHTLY
@pytest.mark.parametrize("plan", [None, UNLIKE], ids=["uniform", "unlike replicas"])
@pytest.mark.parametrize(
    ("model", "script", "tolerance"),
    [({}, PRETRAIN, FP32), ({"use_distributed_optimizer": True, "bf16": True}, FUSED, BF16)],
    ids=["", "distributed optimizer"],
)
def test_stock_megatron_goes_on_from_the_save_that_follows(
    jobs: Jobs, tmp_path: Path, model: dict[str, Any], script: Path, tolerance: Tolerance, plan: ParallelPlan | None
) -> None:
    """As it does from what stock Megatron has saved after the same iteration, beside training as well."""
    model = PIPELINE | {"num_layers": 4, "train_iters": 18, "dist_ckpt_optim_fully_reshardable": bool(model)} | model
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    saving = EVERYTHING | {"exit_interval": 12}
    changing = {} if plan is None else {"resihp_plan": ask_at(tmp_path, (plan, 2))}
    job = jobs.run(
        tiny(**model, **saving, save=ours, **changing, resihp_inject="kill:3@8:backward"),
        workers=4, script=SCRIPT, wishes=["hold-6-0"],
    )  # fmt: skip
    assert job.code == 0, job.tails()
    assert len(job.summary.deaths) == 1 and dropped(job) == [6]
    assert told(job) == [3, 8, 9, 12] and tracker(ours) == 12
    assert kept(ours) == [12], "older ones are removed, but for multiples of 6"
    stock_losses(jobs, script, 4, **model, **saving, save=stock)
    assert tracker(stock) == 12
    first, second = (stock_losses(jobs, script, 2, **model, load=path) for path in (ours, stock))
    assert first == pytest.approx(second, rel=tolerance.loss) and sorted(first) == list(range(13, 19))
    unlike = stock_losses(jobs, script, 2, **model, load=stock, no_load_optim=True)
    assert max(abs(unlike[n] / loss - 1) for n, loss in second.items()) > 10 * tolerance.loss


@NIGHTLY
def test_a_save_under_way_is_finished_before_a_change_by_choice(jobs: Jobs, tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    plan = change_to("TP 2 and 1", tmp_path, 7)
    saving = ASYNC | {"save": directory, "save_interval": 6}
    job = jobs.start(tiny(**LAYOUT, **saving, **plan), workers=4, script=SCRIPT, wishes=["hold-6"])
    job.await_event("iteration", iteration=7)
    job.wish("write-6")
    check_training(job.wait(), jobs.reference(tiny(**LAYOUT), workers=4))
    assert len(job.events("reconfiguration")) == 1 and not job.events("recovery")
    assert told(job) == kept(directory) == [6, 12, 18] and tracker(directory) == 18


@NIGHTLY
def test_non_persistent_saves_are_dropped_and_kept_like_others(jobs: Jobs, tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    model = PIPELINE | {"train_iters": 9, "non_persistent_ckpt_type": "global"}
    saving = ASYNC | {"save": directory, "save_interval": 6, "non_persistent_save_interval": 2}
    job = jobs.run(
        tiny(**model, **saving, resihp_inject="kill:1@5:backward"), workers=4, script=SCRIPT, wishes=["hold-4"]
    )
    reference = jobs.reference(tiny(**PIPELINE | {"train_iters": 9}), workers=4)
    check_training(job, reference)
    assert dropped(job) == [4] and told(job) == [2, 5, 6, 8, 9]
    assert kept(directory) == [5, 6, 9] and kept(directory / "non_persistent") == [2, 8]
    (directory / "latest_checkpointed_iteration.txt").write_text("6")
    loaded = jobs.run(tiny(**model, load=directory), workers=2)
    assert loaded.summary.loss == pytest.approx({9: reference.summary.loss[9]}, rel=1e-5), loaded.tails()


@pytest.mark.since_megatron("0.19")
@NIGHTLY
def test_an_iteration_that_is_given_in_the_checkpoint_s_place(jobs: Jobs, tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    jobs.run(tiny(**PIPELINE, save=directory, save_interval=4, exit_interval=4), workers=2)
    job = jobs.run(tiny(**PIPELINE, load=directory, override_ckpt_iteration=2), workers=2)
    assert job.code == 0 and sorted(job.summary.loss) == [3, 4, 5, 6], job.tails()


@NIGHTLY
def test_a_job_that_is_to_end_without_a_checkpoint_does(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.run(tiny(**PIPELINE, load=tmp_path / "none", exit_on_missing_checkpoint=True), workers=2)
    assert job.code != 0 and not job.events("iteration")
    assert "exit-on-missing-checkpoint" in job.log(0)


@NIGHTLY
def test_a_worker_whose_writer_is_killed_dies_like_one_whose_loader_is(jobs: Jobs, tmp_path: Path) -> None:
    saving = ASYNC | {"save": tmp_path / "saved", "save_interval": 2}
    job = jobs.start(tiny(**PIPELINE, **saving), workers=4, script=SCRIPT, wishes=["hold-2"])
    job.await_event("iteration", iteration=3)
    [writer] = writers_of(job, 1)
    os.kill(writer, signal.SIGKILL)
    check_training(job.wait(), jobs.reference(tiny(**PIPELINE), workers=4))
    assert "its checkpoint writer" in job.log(1) and [death.worker for death in job.summary.deaths] == [1]
    assert told(job)[-1] == tracker(tmp_path / "saved") == 6


@NIGHTLY
def test_twenty_saves_that_are_dropped_leave_nothing_behind(jobs: Jobs, tmp_path: Path) -> None:
    rounds = 20
    arguments = tiny(**PIPELINE | {"train_iters": 3 * rounds + 3})
    saving = flags(**ASYNC, save=tmp_path / "saved", save_interval=3)
    strikes = [f"rebuild:{number % 4}@{3 * number + 5}:backward" for number in range(rounds)]
    held = [f"hold-{3 * number + 3}" for number in range(rounds)]
    job = jobs.start(
        [*arguments, *saving, "--resihp-inject", *strikes], workers=4, script=SCRIPT, wishes=held
    ).wait(180.0)  # fmt: skip
    check_training(job, jobs.reference(arguments, workers=4))
    assert len(job.events("recovery")) == rounds
    assert not [iteration for iteration in told(job)[:-1] if iteration % 3 == 0]
    for worker in range(4):
        check_flat(resources(job, worker)[1:], 6)


def writers_of(job: Job, worker: int) -> list[int]:
    """The writers that a worker has, by process."""
    [leader] = [pid for number, pid in job.worker_pids().items() if number == worker]
    return [pid for child in children(leader) for pid in children(child)]


@NIGHTLY
def test_survivors_wait_for_workers_that_are_writing_a_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    """A write to a disk can't be interrupted, and may take longer than they wait for one that says nothing."""
    directory, bound_s = tmp_path / "saved", 7.0
    saving = {"save": directory, "save_interval": 2, "ckpt_format": "torch_dist"}
    job = jobs.start(
        tiny(**PIPELINE, **saving), workers=4, script=SCRIPT, wishes=["hold-2"], survivor_timeout_s=bound_s
    )
    assert wait_until(lambda: len(list(directory.glob("iter_0000002/*.distcp"))) == 4), job.tails()
    os.kill(job.worker_pids()[1], signal.SIGKILL)
    job.await_event("worker_dead", dead=1)
    assert not wait_until(lambda: len(job.events("worker_dead")) > 1, 1.5 * bound_s), job.tails()
    job.wish("write-2")
    job.wait()
    check_training(job, jobs.reference(tiny(**PIPELINE), workers=4))
    assert [event["dead"] for event in job.events("worker_dead")] == [1]
    assert all("is still writing a checkpoint" in job.log(worker) for worker in (0, 2, 3))
    assert told(job) == kept(directory) == [2, 4, 6] and tracker(directory) == 6


def wait_until(true: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Whether it becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
