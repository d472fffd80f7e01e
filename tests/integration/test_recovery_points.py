# SPDX-License-Identifier: Apache-2.0
"""Workers die at every point of an iteration and of a recovery; the job trains what it would have trained."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from jobs import PRETRAIN, WISHING, Job, Jobs, check_training, is_alive, tiny
from launched import children

from megatron_resihp.control import exit_codes
from megatron_resihp.plan import ParallelPlan

PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
"""Two replicas of two stages: workers 0 and 1 are the first stage of replica 0 and 1, 2 and 3 the second."""
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2}
"""Two replicas of two tensor-parallel ranks: workers 0 and 1, 2 and 3."""
EVALUATION: dict[str, Any] = {"eval_interval": 2, "eval_iters": 1}

OWN_DATA = Path(__file__).with_name("own_data_gpt.py")

NIGHTLY = pytest.mark.nightly
RECOVERY_POINTS = ("recovery-report", "recovery-rebuild", "recovery-ready")


def survive(jobs: Jobs, *injections: str, layout: dict[str, Any], extra: dict[str, Any] | None = None) -> Job:
    """Run a job of four workers through the fault injections and compare it with the undisturbed one."""
    reference = jobs.reference(tiny(**layout), workers=4)
    job = jobs.run(tiny(**layout, **(extra or {}), resihp_inject=injections), workers=4)
    check_training(job, reference)
    struck = {(injection.target, injection.point) for injection in job.summary.drills}
    wanted = [injection.partition(":")[2] for injection in injections]
    assert struck == {(int(text.partition("@")[0]), text.partition(":")[2]) for text in wanted}
    assert {death.worker for death in job.summary.deaths} == {worker for worker, _ in struck}
    return job


BOTH = (1, pytest.param(2, marks=NIGHTLY))
"""Victims on either side of what is split."""


def at_night(*points: str) -> list[Any]:
    return [pytest.param(point, marks=NIGHTLY) for point in points]


@pytest.mark.parametrize("victim", BOTH)
@pytest.mark.parametrize("point", ["backward", "p2p", "norm", "step", *at_night("forward", "grad-sync", "between")])
def test_a_death_in_a_pipeline(jobs: Jobs, point: str, victim: int) -> None:
    survive(jobs, f"kill:{victim}@3:{point}", layout=PIPELINE)


@pytest.mark.parametrize("victim", BOTH)
@pytest.mark.parametrize("point", ["backward", "grad-sync", "step", *at_night("forward", "norm", "between")])
def test_a_death_in_a_tensor_parallel_group(jobs: Jobs, point: str, victim: int) -> None:
    survive(jobs, f"kill:{victim}@3:{point}", layout=TENSOR)


@pytest.mark.parametrize("victim", BOTH)
def test_a_death_in_the_first_iteration(jobs: Jobs, victim: int) -> None:
    survive(jobs, f"kill:{victim}@1:backward", layout=PIPELINE)


def test_a_death_in_the_last_iteration(jobs: Jobs) -> None:
    survive(jobs, "kill:2@6:step", layout=PIPELINE)


@pytest.mark.parametrize("victim", BOTH)
def test_a_death_while_evaluating(jobs: Jobs, victim: int) -> None:
    reference = jobs.reference(tiny(**PIPELINE, **EVALUATION), workers=4)
    job = survive(jobs, f"kill:{victim}@4:evaluate", layout={**PIPELINE, **EVALUATION})
    assert evaluations(job) == evaluations(reference)


@NIGHTLY
def test_evaluation_goes_on_where_it_was_with_data_sets_of_a_user_s_own_class(jobs: Jobs) -> None:
    """They don't say which is for what. After the death three replicas share four micro-batches."""
    reference = jobs.reference(tiny(**EVALUATION), workers=4)
    job = jobs.run(tiny(**EVALUATION, resihp_inject="kill:1@3:backward"), workers=4, script=OWN_DATA)
    check_training(job, reference)
    assert evaluations(job) == evaluations(reference) and len(evaluations(job)) == 3


def evaluations(job: Job) -> dict[int, float]:
    """Validation loss by iteration, as everybody reads it: from Megatron's log, of whoever wrote it first."""
    found: dict[int, float] = {}
    for worker in range(job.workers):
        for line in job.log(worker).splitlines():
            if "validation loss at iteration" in line:
                iteration = int(line.split("at iteration ")[1].split()[0])
                found.setdefault(iteration, round(float(line.split("lm loss value: ")[1].split()[0]), 5))
    return found


@pytest.mark.parametrize("victim", BOTH)
def test_a_death_while_saving(jobs: Jobs, victim: int) -> None:
    directory = jobs.directory / f"checkpoint{victim}"
    survive(jobs, f"kill:{victim}@4:save", layout=PIPELINE, extra={"save": directory, "save_interval": 2})
    assert (directory / "latest_checkpointed_iteration.txt").read_text() == "6"


@pytest.mark.parametrize("second", [0, pytest.param(1, marks=NIGHTLY)])
@pytest.mark.parametrize("point", RECOVERY_POINTS)
def test_a_death_in_a_recovery(jobs: Jobs, point: str, second: int) -> None:
    """Worker 0 works before and after the first death; worker 1 is put on standby by it."""
    survive(jobs, "kill:3@3:backward", f"kill:{second}@3:{point}", layout=PIPELINE)


def test_a_whole_replica_dies_at_once(jobs: Jobs) -> None:
    """Killed from outside, since a fault injection of one may keep the other from reaching its own."""
    job = jobs.start(tiny(**PIPELINE), workers=4, script=WISHING, wishes=["hold-0-3", "hold-1-3"])
    job.await_event("iteration", iteration=2)
    for worker in (1, 3):
        os.kill(job.worker_pids()[worker], signal.SIGKILL)
    job.await_event("worker_dead", dead=1)
    job.await_event("worker_dead", dead=3)
    job.wish("go_on")
    check_training(job.wait(), jobs.reference(tiny(**PIPELINE), workers=4))
    assert job.summary.workers_at_end.standbys == 0


@pytest.mark.parametrize("point", ["backward", "step"])
def test_the_last_replica_is_put_together_from_what_two_have_left(jobs: Jobs, point: str) -> None:
    """Worker 3 is a standby after the first death, and holds the only copy of its stage after the second."""
    job = survive(jobs, f"kill:1@2:{point}", f"kill:2@4:{point}", layout=PIPELINE)
    assert len(job.summary.recoveries) == 2
    [replica] = job.events("epoch_started")[-1]["plan"]["replicas"]
    assert replica["stages"] == [[0], [3]]


def test_the_last_replica_is_put_together_from_tensor_parallel_ranks(jobs: Jobs) -> None:
    job = survive(jobs, "kill:3@2:backward", "kill:0@4:norm", layout=TENSOR)
    [replica] = job.events("epoch_started")[-1]["plan"]["replicas"]
    assert replica["stages"] == [[2, 1]]


def test_one_after_another_at_the_same_iteration(jobs: Jobs) -> None:
    """The step of the first is redone, and broken again in another way."""
    job = survive(jobs, "kill:3@3:norm", "kill:0@3:grad-sync", layout=PIPELINE)
    assert {death.worker for death in job.summary.deaths} == {0, 3}


@pytest.mark.parametrize("victim", BOTH)
def test_data_loaders_of_a_dead_worker_die_with_it(jobs: Jobs, victim: int) -> None:
    job = survive(jobs, f"kill:{victim}@3:forward", layout=PIPELINE, extra={"num_workers": 2})
    [recovery] = job.events("recovery")
    assert recovery["resumed_at"] - recovery["broken_at"] < 4.0, "peers waited for sockets that loaders held open"


@NIGHTLY
def test_a_data_loader_that_is_killed_is_its_workers_death(jobs: Jobs) -> None:
    """As by the out-of-memory killer; another worker comes in the place of its own."""
    model = PIPELINE | {"train_iters": 12}
    arguments = tiny(**model, num_workers=1)
    wishes = ["hold-0-3", "hold-0-8"]
    job = jobs.start(arguments, workers=4, max_restarts=1, script=WISHING, wishes=wishes)
    job.await_event("iteration", iteration=2)
    for loader in children(job.worker_pids()[1]):
        os.kill(loader, signal.SIGKILL)
    job.await_event("worker_dead")
    job.wish("go_on-3")
    job.await_event("worker_waiting", waiting=5, place=1)
    job.wish("go_on")
    check_training(job.wait(), jobs.reference(tiny(**model), workers=4))
    last = ParallelPlan.from_dict(job.events("epoch_started")[-1]["plan"])
    assert last.members == (0, 2, 3, 5) and job.summary.came_back == (5,)
    [death] = job.events("worker_dead")
    assert death["dead"] == 1 and "a data loader" in death["cause"] and "was killed by a signal" in death["cause"]


@NIGHTLY
@pytest.mark.parametrize(
    ("layout", "point"),
    [(PIPELINE, "forward"), (TENSOR, "norm")],
    ids=["pipeline", "tensor"],
)
def test_a_stopped_worker_is_given_up_and_ends_itself(jobs: Jobs, layout: dict[str, Any], point: str) -> None:
    reference = jobs.reference(tiny(**layout), workers=4)
    holds = [f"hold-{worker}-5" for worker in range(4)]
    job = jobs.start(
        tiny(**layout, resihp_inject=f"stop:1@3:{point}"),
        workers=4, script=WISHING, heartbeat_timeout_s=6.0, wishes=holds,
    )  # fmt: skip
    death = job.await_event("worker_dead", dead=1)
    assert death["cause"].startswith("fault injection, no heartbeat for 6.")
    job.await_event("recovery", to_epoch=1)
    stopped = job.worker_pids()[1]
    assert is_alive(stopped)
    os.kill(stopped, signal.SIGCONT)
    job.await_exit(1)
    assert job.exits()[1] == exit_codes.FENCED, job.tails()
    job.wish("go_on")
    check_training(job.wait(), reference)
    assert [death.worker for death in job.summary.deaths] == [1]


@NIGHTLY
@pytest.mark.parametrize("wish", ["grip-1-3", "hold-1-3"], ids=["a call keeps the lock", "stopped"])
def test_others_do_not_wait_for_a_worker_that_can_not_hear(jobs: Jobs, wish: str) -> None:
    """No thread of it runs, so none hears that another's death has broken the epoch. Its agent ends it."""
    reference = jobs.reference(tiny(**PIPELINE), workers=4)
    job = jobs.start(tiny(**PIPELINE), workers=4, script=WISHING, wishes=[wish], notice_timeout_s=3.0)
    job.await_event("iteration", iteration=2)
    job.await_wish("begun-1-3")
    if wish.startswith("hold"):
        os.kill(job.worker_pids()[1], signal.SIGSTOP)
    os.kill(job.worker_pids()[2], signal.SIGKILL)
    check_training(job.wait(), reference)
    deaths = {death["dead"]: death["cause"] for death in job.events("worker_dead")}
    assert deaths.keys() == {1, 2}
    assert re.fullmatch(r"did not hear within 3\.\d s that the epoch is broken", deaths[1]), deaths
    assert job.exits()[1] == -signal.SIGKILL
    [recovery] = job.events("recovery")
    assert recovery["resumed_at"] - recovery["broken_at"] < 20.0, "they have waited for missing heartbeats"


def test_the_script_of_this_project_is_what_ran(jobs: Jobs) -> None:
    assert jobs.reference(tiny(**PIPELINE), workers=4).events("run_started")[0]["command"][0] == str(PRETRAIN)
