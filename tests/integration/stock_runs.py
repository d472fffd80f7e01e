# SPDX-License-Identifier: Apache-2.0
"""Runs of stock Megatron to compare jobs with, of workers that are forked as those of other jobs are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs import FP32, WISHING, Job, Jobs, Tolerance, check_samples, environment_of, tiny
from nursery import MOCK_DATA_SIZE

from megatron_resihp.report.run.summary import compare

Steps = dict[int, tuple[float, float]]
"""Loss and gradient norm of each iteration."""

NOTING = Path(__file__).with_name("noting_gpt.py")
STOCK_S = 200.0
LARGE_JOB_S = 300.0
"""For a job of eight workers."""
OURS: dict[str, Any] = {"resihp": False, "resihp_record_samples": False, "resihp_record_digests": False}


def stock_steps(jobs: Jobs, workers: int, script: Path = NOTING, **flags: Any) -> Steps:
    """What stock Megatron trains, without this package's flags, on the data of the other jobs. `script`: notes as
    noting_gpt.py does."""
    return _read(_stock(jobs, workers, script, flags).run_dir / "notes")


def stock_losses(jobs: Jobs, script: Path, workers: int, **flags: Any) -> dict[int, float]:
    """The losses that it prints, of any script. Each stands for the iterations since the line before."""
    return _printed("".join(map(_stock(jobs, workers, script, flags).log, range(workers))))


def torchrun_losses(script: Path, workers: int, **flags: Any) -> dict[int, float]:
    """The same under torchrun, of processes that end as Python's do, so that W&B has written all."""
    code = f"""
import megatron_resihp, runpy
megatron_resihp.enable()
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
MockGPTLowLevelDataset.size = {MOCK_DATA_SIZE}
runpy.run_path({str(script)!r}, run_name="__main__")
"""
    log = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers),
         "--no-python", sys.executable, "-c", code, *tiny(**flags | OURS)],
        env=environment_of(script), capture_output=True, text=True, timeout=STOCK_S,
    )  # fmt: skip
    assert log.returncode == 0, log.stdout[-3000:] + log.stderr[-3000:]
    return _printed(log.stdout)


def _printed(log: str) -> dict[int, float]:
    lines = re.findall(r"iteration +(\d+)/.* lm loss: (\S+) ", log)
    return {int(number): float(loss) for number, loss in lines}


def _stock(jobs: Jobs, workers: int, script: Path, flags: Mapping[str, Any]) -> Job:
    job = jobs.run(tiny(**flags | OURS), workers=workers, script=script, without_plugin=True)
    assert job.code == 0, job.tails()
    return job


def _read(notes: Path) -> Steps:
    return {int(number): (loss, norm) for number, (loss, norm) in json.loads(notes.read_text()).items()}


def losses_of(steps: Steps) -> dict[int, float]:
    return {number: loss for number, (loss, _) in steps.items()}


def check_like_stock(job: Job, expected: Steps, tolerance: Tolerance = FP32) -> None:
    difference = compare(job.summary.loss, losses_of(expected))
    norms = compare(job.summary.grad_norm, {number: norm for number, (_, norm) in expected.items()})
    assert job.code == 0 and len(expected) == len(job.summary.loss)
    assert difference is not None and difference <= tolerance.loss
    assert norms is not None and norms <= tolerance.norm


def like_stock(
    jobs: Jobs, *injections: str, layout: dict[str, Any], workers: int = 4, tolerance: Tolerance = FP32, **extra: Any
) -> Job:
    """A job that loses workers, compared with stock Megatron, which loses none."""
    stock = stock_steps(jobs, workers, **layout)
    job = jobs.start(tiny(**layout, **extra, resihp_inject=injections or None), workers=workers).wait(LARGE_JOB_S)
    assert job.code == 0, job.tails()
    check_like_stock(job, stock, tolerance)
    check_samples(job)
    assert len(job.summary.deaths) == len(injections)
    return job


def like_stock_and_back(
    jobs: Jobs, *, layout: dict[str, Any], workers: int = 4, kill: str | None = None, script: Path | None = None,
    tolerance: Tolerance = FP32,
) -> Job:  # fmt: skip
    """A job that loses a worker, its last one unless `kill` says otherwise, and gets it back, compared likewise.
    `script`: notes and has wishes."""
    stock = stock_steps(jobs, workers, script or NOTING, **layout)
    arguments = tiny(**layout, resihp_inject=kill or f"kill:{workers - 1}@3")
    job = jobs.start(arguments, workers=workers, max_restarts=1, script=script or WISHING, wishes=["hold-0-7"])
    job.await_event("worker_waiting", waiting=2 * workers - 1)
    job.wish("go_on")
    assert job.wait(LARGE_JOB_S).code == 0, job.tails()
    check_like_stock(job, stock, tolerance)
    check_samples(job)
    return job


def check_that_training_shows(jobs: Jobs, workers: int, layout: dict[str, Any]) -> None:
    """The negative control of comparisons: a job that learns next to nothing differs from one that learns."""
    stock, other = (stock_steps(jobs, workers, **layout | rate) for rate in ({}, {"lr": 1e-9, "min_lr": 0}))
    difference = compare(losses_of(stock), losses_of(other))
    assert difference is not None and difference > 100 * FP32.loss
