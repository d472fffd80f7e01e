# SPDX-License-Identifier: Apache-2.0
"""How jobs end when they can't or mustn't go on: at once, on all workers, with a reason, leaving nothing running."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from jobs import WISHING, Job, Jobs, tiny

from megatron_resihp.control import exit_codes

PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2}
FAILED_S = 8.0
"""From the error on one worker to the end of all, on two busy cores."""


def seconds_from(job: Job, name: str) -> float:
    """From an event to the end of the run."""
    end = job.events("run_finished")[-1]["time"]
    return float(end - job.events(name)[0]["time"])


@pytest.mark.parametrize(
    ("wish", "text"),
    [("oom-2-3", "CUDA out of memory"), ("error-1-3", "ValueError: the user's code has a bug")],
    ids=["out of memory", "exception"],
)
@pytest.mark.parametrize("layout", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
def test_an_error_of_the_training_itself_is_no_failure_to_recover_from(
    jobs: Jobs, layout: dict[str, Any], wish: str, text: str
) -> None:
    job = jobs.run(tiny(**layout), workers=4, script=WISHING, wishes=[wish])
    assert job.code != 0
    worker = int(wish.split("-")[1])
    assert [event["failed"] for event in job.events("worker_failed")] == [worker], job.tails()
    assert not job.events("recovery") and not job.events("worker_dead")
    assert text in job.log(worker)
    assert f"worker {worker} failed" in job.output()
    assert all(code > 0 for code in job.exits().values()), job.exits()
    assert seconds_from(job, "worker_failed") < FAILED_S


@pytest.mark.parametrize("layout", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
def test_a_loss_that_is_no_number_ends_the_job_as_megatron_does(jobs: Jobs, layout: dict[str, Any]) -> None:
    """With an exit code of its rerun machinery: 16, run the iteration again elsewhere, or 17, the result is wrong.

    It saves on the way, and in stock Megatron too it ends with a TypeError where there is no --save.
    """
    save = {"save": str(jobs.directory / "not-a-number"), "save_interval": 100, "ckpt_format": "torch"}
    job = jobs.run(tiny(**layout, **save), workers=4, script=WISHING, wishes=["nan-2-3"])
    assert job.code != 0
    assert not job.events("recovery") and not job.events("worker_dead")
    assert job.summary.iterations == 2, "a step with a loss that is no number was taken"
    assert "NaN" in job.log(2)
    [failure] = job.events("worker_failed")
    assert failure["error"] in ("exit code 16", "exit code 17"), job.tails()


def test_a_termination_ends_after_the_iteration(jobs: Jobs) -> None:
    """Without --save there is nothing to save."""
    job = jobs.start(tiny(**PIPELINE, train_iters=2000), workers=4)
    job.await_event("iteration", iteration=3)
    job.signal(signal.SIGTERM)
    job.wait()
    assert job.code == 143, job.tails()
    assert 3 <= job.summary.iterations < 2000
    assert set(job.exits().values()) <= {0, 143}, job.tails()


def test_one_signal_saves_and_another_one_saves_and_ends(jobs: Jobs) -> None:
    directory = jobs.directory / "warned"
    saving = {"save": directory, "save_interval": 1000, "ckpt_format": "torch"}
    job = jobs.start(tiny(**PIPELINE, **saving, train_iters=2000), workers=4)
    job.await_event("iteration", iteration=3)
    job.signal(signal.SIGUSR2)
    asked_for = job.await_event("checkpoint")["iteration"]
    job.await_event("iteration", iteration=asked_for + 1)
    job.signal(signal.SIGUSR1)
    job.wait()
    assert job.code == 138, job.tails()
    assert asked_for < job.summary.iterations < 2000
    assert [event["iteration"] for event in job.events("checkpoint")] == [asked_for, job.summary.iterations]
    tracker = directory / "latest_checkpointed_iteration.txt"
    assert int(tracker.read_text()) == job.summary.iterations
    assert job.summary.last_checkpoint == str(directory)


def test_too_few_survivors_save_what_they_hold(jobs: Jobs) -> None:
    """Both holders of the second stage die."""
    job = jobs.run(tiny(**PIPELINE, resihp_inject=["kill:2@3:backward", "kill:3@3:backward"]), workers=4)
    assert job.code == exit_codes.NO_PLAN, job.tails()
    [saved] = job.summary.salvages
    assert saved.missing == ((1, 0),) and not saved.complete
    assert Path(saved.path).is_file()
    assert "the state of stage 1 TP rank 0 is held by no survivor" in job.output()


def test_one_survivor_of_each_shard_is_too_few_once_another_is_lost(jobs: Jobs) -> None:
    injections = ["kill:1@2:forward", "kill:2@3:forward", "kill:0@5:step"]
    job = jobs.run(tiny(**PIPELINE, resihp_inject=injections), workers=4)
    assert job.code == exit_codes.NO_PLAN, job.tails()
    assert len(job.summary.recoveries) == 2
    assert {death.cause for death in job.summary.deaths} == {"fault injection, exit signal 9"}
    assert job.summary.places == dict.fromkeys(range(4), socket.gethostname().partition(".")[0])
    assert "the state of stage 0 TP rank 0 is held by no survivor" in job.output()
    assert job.summary.salvages[0].iteration == 5


def test_recoveries_without_a_step_are_bounded(jobs: Jobs) -> None:
    """A worker whose communication fails again and again, with nobody dead."""
    injections = [f"rebuild:0@3:{point}" for point in ["backward"] * 12]
    job = jobs.run(tiny(**PIPELINE, resihp_inject=injections), workers=4)
    assert job.code == exit_codes.NO_PLAN, job.tails()
    assert "8 recoveries without a step after iteration 2" in job.output()
    assert len(job.events("recovery")) == 8
    assert {Path(each.path).is_file() for each in job.summary.salvages} == {True}
    assert all(each.complete for each in job.summary.salvages)


def test_a_saved_state_can_be_gone_on_from(jobs: Jobs) -> None:
    reference = jobs.reference(tiny(**PIPELINE), workers=4)
    injections = [f"rebuild:0@3:{point}" for point in ["backward"] * 12]
    first = jobs.run(tiny(**PIPELINE, resihp_inject=injections), workers=4)
    going_on = {"load": first.run_dir / "emergency_checkpoint", "ckpt_format": "torch", "no_load_rng": True}
    second = jobs.run(tiny(**PIPELINE, **going_on), workers=4)
    assert second.code == 0, second.tails()
    whole = {n: loss for n, loss in reference.summary.loss.items() if n > 2}
    assert second.summary.loss == pytest.approx(whole, rel=1e-5)


@pytest.mark.nightly
def test_fewer_workers_than_are_wanted_save_what_they_hold(jobs: Jobs) -> None:
    """They could train on, and the next job does so from there."""
    reference = jobs.reference(tiny(**PIPELINE), workers=4)
    first = jobs.run(tiny(**PIPELINE, resihp_inject="kill:3@3:backward"), workers=4, min_workers=4)
    assert first.code == exit_codes.NO_PLAN, first.tails()
    assert "losing any worker ends the job, which then has fewer workers than --min-workers 4" in first.output()
    assert "no plan fits the survivors: 3 are left, fewer than --min-workers 4" in first.output()
    assert {each.complete for each in first.summary.salvages} == {True}
    going_on = {"load": first.run_dir / "emergency_checkpoint", "ckpt_format": "torch", "no_load_rng": True}
    second = jobs.run(tiny(**PIPELINE, **going_on), workers=4, min_workers=4)
    assert second.code == 0, second.tails()
    rest = {n: loss for n, loss in reference.summary.loss.items() if n > 2}
    assert second.summary.loss == pytest.approx(rest, rel=1e-5)


def refused(job: Job, *texts: str) -> None:
    """It has not begun, and the launcher says why in one line."""
    assert job.code == 2, job.tails()
    assert not job.events("iteration")
    lines = [line for line in job.output().splitlines() if all(text in line for text in texts)]
    assert lines, job.tails()


def test_an_unknown_flag(jobs: Jobs) -> None:
    refused(jobs.run(tiny(**PIPELINE, lerning_rate=3), workers=2), "--lerning-rate")


def test_a_flag_that_is_refused(jobs: Jobs) -> None:
    job = jobs.run(tiny(**PIPELINE, rerun_mode="report_stats"), workers=2)
    refused(job, "--rerun-mode", "not supported with --resihp", "use disabled")


def test_an_injection_that_is_none(jobs: Jobs) -> None:
    refused(jobs.run(tiny(**PIPELINE, resihp_inject="kill:7@3"), workers=2), "--resihp-inject", "worker 7")


def test_a_world_that_does_not_divide(jobs: Jobs) -> None:
    refused(jobs.run(tiny(**PIPELINE), workers=3), "3 workers are not a multiple", "start 2")


def test_micro_batches_that_cannot_be_shared_evenly(jobs: Jobs) -> None:
    refused(jobs.run(tiny(global_batch_size=4), workers=3), "4", "3")


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        ({"save": "checkpoints"}, ["Megatron refuses", "save_interval is not None"]),
        ({"seq_length": 64, "max_position_embeddings": 32}, ["Megatron refuses", "max_position_embeddings"]),
        ({"eval_interval": None}, ["--eval-interval is missing"]),
    ],
    ids=["a save without an interval", "sizes that contradict", "no evaluation interval"],
)
def test_flags_that_megatron_asserts_about(jobs: Jobs, flags: dict[str, Any], texts: list[str]) -> None:
    refused(jobs.run(tiny(**PIPELINE, **flags), workers=2), *texts)


def test_a_data_set_that_is_missing(jobs: Jobs) -> None:
    missing = jobs.directory / "nowhere" / "corpus"
    refused(
        jobs.run(tiny(**PIPELINE, mock_data=False, data_path=missing), workers=2), str(missing), "preprocess_data.py"
    )


def test_a_script_that_is_missing(jobs: Jobs) -> None:
    job = jobs.run(tiny(**PIPELINE), workers=2, script=Path("no_such_script.py"))
    refused(job, "no_such_script.py does not exist")
