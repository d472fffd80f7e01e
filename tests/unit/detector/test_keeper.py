# SPDX-License-Identifier: Apache-2.0
"""What a run keeps of its costs is that of healthy workers, whoever was slow meanwhile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_resihp.cost.fitted.store import load
from megatron_resihp.detector.keeper import Keeper
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.detector.verdict import Kind
from megatron_resihp.lab.detection.faults import Fault
from megatron_resihp.lab.detection.jobs import JobSpec, Schedule, make_job
from megatron_resihp.lab.detection.noise import Noise
from megatron_resihp.lab.detection.shapes import Shape


def durations(path: Path, data_parallel: int, faults: tuple[Fault, ...]) -> np.ndarray:
    """[stages, kinds] of the cost model that a run keeps."""
    shape = Shape("tp4", 4, data_parallel, 2, layers=32, hidden=4096)
    spec = JobSpec(shape, 4096, 4, Schedule.ONE_F_ONE_B, Noise("op", op=0.02), 60)
    job = make_job(spec, faults, np.random.default_rng(1))
    monitor, keeper = Monitor(job.layout, 0.01, 300), Keeper(path)
    keeper.begin(job.layout)
    for each in job.observations():
        monitor.observe(each)
        if keeper.add(each, monitor.speed):
            learned = monitor.learned()
            assert learned is not None
            keeper.save(learned)
    tokens = np.full((2, 1), 4096.0)
    return load(path).durations(np.arange(2), tokens, tokens**2)[:, :2, 0, 0]


@pytest.mark.parametrize("data_parallel", [1, 2])
def test_collectives_are_kept_without_the_wait_for_a_slow_member(tmp_path: Path, data_parallel: int) -> None:
    healthy = durations(tmp_path / "healthy.json", data_parallel, ())
    slow = durations(tmp_path / "slow.json", data_parallel, (Fault(Kind.COMPUTE, (0,), 0.5, 1),))
    assert slow == pytest.approx(healthy, rel=0.03)
