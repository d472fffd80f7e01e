# SPDX-License-Identifier: Apache-2.0
"""What the tests on a real SLURM share: the cluster, and an undisturbed run to compare with."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from jobs import JOB_ENVIRONMENT, PRETRAIN
from slurm import Slurm
from training import ARGUMENTS, EVENT_S, RESIHP, Training

from megatron_resihp.events.log import FILE_NAME, read_events
from megatron_resihp.report.run.summary import RunSummary, summarize_log


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Three nodes with one worker each."""
    try:
        cluster = Slurm(tmp_path_factory.mktemp("slurm"), nodes=3, workers=1)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    launch = [RESIHP, "launch", "--stand-in", "--nproc-per-node", "3", "--run-dir", run_dir]
    subprocess.run(
        [*launch, PRETRAIN, *ARGUMENTS],
        env=os.environ | JOB_ENVIRONMENT,
        check=True,
        timeout=EVENT_S,
        capture_output=True,
    )
    return summarize_log(read_events(run_dir / FILE_NAME))


@pytest.fixture
def train(slurm: Slurm, tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Submits a job on so many nodes. At the end of the test it is cancelled, and all nodes are there again."""
    yield partial(Training, slurm, tmp_path)
    slurm.restore()
