# SPDX-License-Identifier: Apache-2.0
"""Logs of a job that loses its coordinator: files of both coordinators together hold each step once."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from etcds import needs_etcd
from jobs import Jobs, check_training, tiny
from launched import eventually
from test_logs import PIPELINE, check_files, logged, run, tensorboard_curves, wandb_curves
from test_takeover import begun

from megatron_resihp.control.head.logs.wandb_run import WandbRun
from megatron_resihp.control.head.logs.writer import Term
from megatron_resihp.control.transport.etcd.location import Location
from megatron_resihp.protocol.logs import LogPage, WandbRow, WandbWish

pytestmark = [pytest.mark.nightly, needs_etcd]
STEPS = 40
DIES_AT = 30


def test_a_standby_goes_on_with_the_logs(jobs: Jobs, tmp_path: Path, place: Location) -> None:
    """And then the worker dies that has sent them. Of W&B's rows most were in its memory when it was killed."""
    whole, mended = tmp_path / "whole", tmp_path / "mended"
    layout = {**PIPELINE, "use_tp_pp_dp_mapping": True, "train_iters": STEPS, "eval_interval": 10}
    reference = run(jobs, whole, **layout)
    arguments = tiny(**logged(mended, **layout, resihp_inject=f"kill:3@{DIES_AT}:between"))
    first, _, _, standby = begun(jobs, tmp_path, replace(place, lease_s=3), arguments)
    lost_after = 12
    first.await_event("iteration", iteration=lost_after)
    first.kill()
    standby.await_event("coordinator_replaced")
    job = standby.wait()
    check_training(job, reference)
    assert [death.worker for death in job.summary.deaths] == [3] and not job.events("log_failed"), job.tails()
    assert len(list(mended.glob("*tfevents*"))) == 2, "each coordinator has a file of its own"
    check_files(mended, whole, STEPS)
    for curves in (tensorboard_curves(mended), wandb_curves(mended)):
        alive = curves["resihp/workers_alive"]
        steps = [step for step, _ in alive]
        assert len(set(steps)) == len(steps)
        assert [value for step, value in alive if step > lost_after] == [
            4.0 if step <= DIES_AT else 3.0 for step in steps if step > lost_after
        ]
    shown = {step for step, _ in tensorboard_curves(mended)["resihp/share_of_healthy_speed"]}
    timed = set(range(lost_after + 4, STEPS + 1)) - {DIES_AT + 1}  # in an epoch the first duration is not known
    assert timed <= shown, "from right after the takeover on"


def test_steps_of_an_earlier_job_with_the_same_run_of_w_and_b_are_not_those_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started again from an earlier checkpoint, with WANDB_RUN_ID, and then loses its coordinator."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    wish = WandbWish("tests", "name", None, str(tmp_path), {}, "1234abcd")

    def lead(term: Term, *steps: int) -> None:
        writer = WandbRun(wish, term)
        for step in steps:
            writer.write(LogPage(3, 0, step, 0.0, rows=(WandbRow({"lm loss": 1.0}, step),)))
        writer.close()

    lead(Term("earlier"), 1, 2, 3, 4, 5)
    time.sleep(1.1)  # the names and times of W&B's directories are whole seconds
    began = time.time()
    lead(Term("this"), 3, 4)
    time.sleep(1.1)
    lead(Term("this", began), 3, 4, 5, 6)
    written = [(step, 1.0) for step in (1, 2, 3, 4, 5, 3, 4, 5, 6)]
    eventually("W&B's process has closed its file", lambda: wandb_curves(tmp_path)["lm loss"] == written)
