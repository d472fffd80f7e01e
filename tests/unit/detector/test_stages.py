# SPDX-License-Identifier: Apache-2.0
"""A stage that has more to do in all replicas is not several slow devices; a slow node, or a slow worker of it, is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.detector.notices import What
from megatron_resihp.detector.verdict import Change, Verdict
from megatron_resihp.lab.detection.jobs import JobSpec, Schedule, SyntheticJob, make_job
from megatron_resihp.lab.detection.noise import Noise
from megatron_resihp.lab.detection.shapes import Shape

NOISE = Noise("iteration", op=0.02, iteration=0.005)
FIRST = 70
"""First iteration of a change."""


@pytest.fixture(scope="module")
def job() -> SyntheticJob:
    """Four replicas of four stages: two stages on each of two nodes."""
    shape = Shape("dp", 1, 4, 4, layers=32, hidden=4096)
    return make_job(JobSpec(shape, 4096, 4, Schedule.ONE_F_ONE_B, NOISE, 160), (), np.random.default_rng(0))


def watch(
    job: SyntheticJob, more: Callable[[int], np.ndarray], layout: Layout | None = None
) -> tuple[Monitor, list[Verdict]]:
    """`more`: by iteration, the factor on each worker's time."""
    monitor = Monitor(layout or job.layout, 0.01, 1000)

    def seen(each: IterationObservations) -> IterationObservations:
        factors = more(each.iteration) if each.iteration >= FIRST else np.ones(16)
        return replace(each, compute=each.compute * factors[:, None, None, None])

    return monitor, [verdict for each in job.observations() for verdict in monitor.observe(seen(each))]


@pytest.mark.parametrize("more", [1.06, 1.3, 0.8])
def test_a_stage_whose_work_changes_in_all_replicas_is_no_slow_device(job: SyntheticJob, more: float) -> None:
    monitor, verdicts = watch(job, lambda _: np.where(job.layout.stage == 2, more, 1.0))
    assert verdicts == []
    notices = [each for each in monitor.take_notices() if each.what is What.WORK_OF_A_STAGE]
    assert bool(notices) == (more > 1)
    assert {each.workers for each in notices} <= {(8, 9, 10, 11)}


def test_a_slow_worker_of_a_stage_with_more_work_is_told_with_its_own_speed(job: SyntheticJob) -> None:
    def more(iteration: int) -> np.ndarray:
        work = np.where(job.layout.stage == 2, 1.15, 1.0)
        return np.where((np.arange(16) == 9) & (iteration >= 100), work / 0.7, work)

    monitor, verdicts = watch(job, more)
    assert [(each.workers, each.change, each.since) for each in verdicts] == [((9,), Change.ONSET, 100)]
    assert abs(monitor.speed(9) - 0.7) < 0.03


def test_half_of_a_stages_workers_may_be_slow(job: SyntheticJob) -> None:
    _, verdicts = watch(job, lambda _: np.where(np.isin(np.arange(16), (8, 10)), 1.1, 1.0))
    assert sorted(each.workers for each in verdicts) == [(8,), (10,)]


def test_a_node_with_two_stages_may_be_slow(job: SyntheticJob) -> None:
    _, verdicts = watch(job, lambda _: np.where(job.layout.node == 1, 1.05, 1.0))
    assert sorted(each.workers for each in verdicts) == [(worker,) for worker in range(8, 16)]


def test_a_node_with_most_workers_of_a_stage_may_be_slow(job: SyntheticJob) -> None:
    layout = replace(job.layout, node=np.isin(np.arange(16), (8, 9, 10)).astype(np.int64))
    _, verdicts = watch(job, lambda _: np.where(layout.node == 1, 1.1, 1.0), layout)
    assert sorted(each.workers for each in verdicts) == [(8,), (9,), (10,)]
