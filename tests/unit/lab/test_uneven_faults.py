# SPDX-License-Identifier: Apache-2.0
"""Faults that are unevenly slow: what the generator makes of them, and how often the detector changes its mind."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from megatron_resihp.config import FALSE_ALARMS_PER_JOB
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.detector.verdict import Change, Kind
from megatron_resihp.lab.detection.faults import Fault
from megatron_resihp.lab.detection.jobs import JobSpec, Schedule, SyntheticJob, make_job
from megatron_resihp.lab.detection.noise import NOISES, Noise
from megatron_resihp.lab.detection.shapes import SHAPES

QUIET = Noise("quiet", op=1e-4)
ONSET = 100
MOST_VERDICTS = 10
"""Verdicts in 400 slow iterations: an onset, a recovery of the worst with its next onset, and severities."""
WAITS_TIMED = {"all": 1, "one-in-four": 4}


def job(*faults: Fault, noise: Noise = QUIET, iterations: int = 120, timed_every: int = 4) -> SyntheticJob:
    spec = JobSpec(SHAPES[0], 8192, 8, Schedule.ONE_F_ONE_B, noise, iterations, timed_every)
    seed = zlib.crc32(repr((faults, noise)).encode())
    return make_job(spec, faults, np.random.default_rng(seed))


def test_jitter_swings_around_the_speed_and_is_remembered() -> None:
    slow = job(Fault(Kind.COMPUTE, (5,), 0.5, 20, jitter=0.1), iterations=400).own[:, 5].sum(axis=(1, 2))
    usual = job(Fault(Kind.COMPUTE, (4,), 0.5, 20), iterations=400).own[:, 6].sum(axis=(1, 2))
    swings = np.log(slow[20:] / np.median(slow[:19]) * np.median(usual) / usual[20:])
    assert np.median(swings) == pytest.approx(np.log(2), abs=0.2)
    assert np.diff(swings).std() > 0.04 and swings.std() > 0.08


def test_bursts_slow_a_part_of_each_iteration() -> None:
    fault = Fault(Kind.LINK, (2, 10), 0.25, 20, share=0.25)
    slow = job(fault)
    link = slow.layout.links.tolist().index([2, 10])
    times = slow.transfers[19:, link] / np.median(slow.transfers[:19, link])
    assert ((times > 3.5).sum(axis=1) == 4).all() and (times.shape[1], fault.mean_speed) == (16, 1 / 1.75)


UNEVEN = {
    f"{name}-p={speed:.2f}": Fault(kind, workers, speed, ONSET, **how)
    for kind, workers in ((Kind.COMPUTE, (5,)), (Kind.LINK, (2, 10)))
    for name, speed, how in (
        ("jitter-5", 0.9, {"jitter": 0.05}), ("jitter-5", 0.7, {"jitter": 0.05}), ("jitter-10", 0.7, {"jitter": 0.1}),
        ("jitter-15", 0.5, {"jitter": 0.15}), ("bursts-38", 1 / 3, {"share": 0.375}),
        ("bursts-25", 0.25, {"share": 0.25}),
    )
    for name in (f"{kind}-{name}",)
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("noise", [noise for noise in NOISES if noise.scored], ids=lambda noise: noise.name)
@pytest.mark.parametrize("fault", UNEVEN.values(), ids=UNEVEN.keys())
@pytest.mark.parametrize("timed_every", WAITS_TIMED.values(), ids=WAITS_TIMED.keys())
def test_an_uneven_fault_is_named_in_time_and_not_again_and_again(fault: Fault, noise: Noise, timed_every: int) -> None:
    uneven = job(fault, noise=noise, iterations=500, timed_every=timed_every)
    monitor = Monitor(uneven.layout, FALSE_ALARMS_PER_JOB, uneven.spec.iterations)
    verdicts = [verdict for each in uneven.observations() for verdict in monitor.observe(each)]
    assert {(each.kind, each.workers) for each in verdicts} == {(fault.kind, fault.workers)}
    assert verdicts[0].change is Change.ONSET and verdicts[0].iteration <= ONSET + 30
    assert len(verdicts) <= MOST_VERDICTS
    first, *rest = fault.workers
    speed = monitor.link_speed((first, rest[0])) if rest else monitor.speed(first)
    # Where two ops in eight are timed, some bursts lie between them.
    seen_in_part = fault.share < 1 and fault.kind is Kind.COMPUTE and timed_every > 1
    assert speed == pytest.approx(fault.mean_speed, abs=0.25 if seen_in_part else 0.05 + fault.jitter)
