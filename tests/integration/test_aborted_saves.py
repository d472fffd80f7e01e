# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that training waits for: what a death in the midst of one leaves to go on from."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Jobs, check_training, tiny
from test_async_saves import PIPELINE, SCRIPT, kept, told, tracker

pytestmark = pytest.mark.nightly

SAVING: dict[str, Any] = {"ckpt_format": "torch_dist", "save_interval": 100}


def begun(job: Job) -> list[int]:
    """The iterations that Megatron has begun to save, each time it did."""
    logs = "".join(job.log(worker) for worker in range(job.workers))
    return sorted(int(number) for number in re.findall(r"saving checkpoint at iteration +(\d+) to", logs))


def test_a_non_persistent_save_that_is_cut_short_costs_no_whole_one(jobs: Jobs, tmp_path: Path) -> None:
    """Worker 1 has written half of its file, and the others all of theirs. Its successor makes the last one again."""
    directory = tmp_path / "saved"
    saving = SAVING | {"save": directory, "non_persistent_ckpt_type": "global", "non_persistent_save_interval": 2}
    job = jobs.start(tiny(**PIPELINE | {"train_iters": 5}, **saving), workers=4, script=SCRIPT, wishes=["hold-4-1"])
    half = directory / "non_persistent" / "iter_0000004" / "__1_0.distcp"
    assert job.nursery.serve_until(half.exists, job.started_at + 60.0), job.tails()
    os.kill(job.worker_pids()[1], signal.SIGKILL)
    job.await_event("worker_dead", dead=1)
    job.wish("write-4")
    check_training(job.wait(), jobs.reference(tiny(**PIPELINE | {"train_iters": 5}), workers=4))
    assert begun(job) == [2, 4, 4, 5] and told(job) == [2, 4, 5]
    assert kept(directory / "non_persistent") == [2, 4] and tracker(directory / "non_persistent") == 4


def test_a_save_that_has_ended_is_not_made_again_though_a_worker_died_before_any_saw_it(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Written again, it would be incomplete for a while, and it is the one that the tracker names."""
    directory = tmp_path / "saved"
    saving = SAVING | {"save": directory, "save_interval": 4}
    job = jobs.run(tiny(**PIPELINE, **saving), workers=4, script=SCRIPT, wishes=["die-4-1"])
    check_training(job, jobs.reference(tiny(**PIPELINE), workers=4))
    assert [death.worker for death in job.summary.deaths] == [1]
    assert begun(job) == told(job) == kept(directory) == [4, 6]
