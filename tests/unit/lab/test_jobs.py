# SPDX-License-Identifier: Apache-2.0
"""Synthetic jobs: the truth that they are made from shows in what a detector would see, and nothing else does."""

import numpy as np
import pytest

from megatron_resihp.detector.input.records import OpKind
from megatron_resihp.detector.verdict import Kind
from megatron_resihp.lab.detection.draws import Purpose, draw_job
from megatron_resihp.lab.detection.faults import Fault, draw_faults
from megatron_resihp.lab.detection.jobs import JobSpec, Schedule, SyntheticJob, make_job, make_layout
from megatron_resihp.lab.detection.noise import NOISES, Noise
from megatron_resihp.lab.detection.shapes import SHAPES

SMALL = SHAPES[0]
QUIET = Noise("quiet", op=1e-4)


def job(*faults: Fault, schedule: Schedule = Schedule.ONE_F_ONE_B, seed: int = 1) -> SyntheticJob:
    spec = JobSpec(SMALL, sequence=8192, micro_batches=4, schedule=schedule, noise=QUIET, iterations=120)
    return make_job(spec, faults, np.random.default_rng(seed))


def test_a_seed_gives_the_same_job_again_and_another_seed_another() -> None:
    one, same, other = (draw_job(Purpose.TUNING, seed, NOISES[1], SMALL, 1) for seed in (5, 5, 6))
    assert np.array_equal(one.own, same.own) and np.array_equal(one.seconds, same.seconds)
    assert one.faults == same.faults
    assert not np.array_equal(one.seconds, other.seconds)


def test_no_job_that_is_tuned_on_is_scored_on() -> None:
    tuning, scoring = (draw_job(purpose, 0, NOISES[0], SMALL, 0) for purpose in Purpose)
    assert not np.any(tuning.seconds == scoring.seconds)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_layouts_have_megatrons_order(shape) -> None:
    layout = make_layout(shape)
    assert layout.workers.size == {"7b": 16, "30b": 64, "70b": 256}[shape.name]
    first, second = layout.links.T
    assert np.array_equal(layout.stage[second], layout.stage[first] + 1)
    assert np.array_equal(layout.replica[second], layout.replica[first])
    assert np.array_equal(layout.tp_rank[second], layout.tp_rank[first])


def test_a_slow_worker_slows_its_group_and_waits_least_in_it() -> None:
    slow = job(Fault(Kind.COMPUTE, (5,), 0.5, onset=60))
    after = slow.iteration(60)
    group = slow.layout.workers[(slow.layout.stage == 0) & (slow.layout.replica == 1)]
    assert group.tolist() == [4, 5, 6, 7]
    forward = after.compute[group, OpKind.F, 0]
    assert np.all(forward == forward[0])
    assert np.nanargmin(np.nanmean(after.waited[group, OpKind.F, 0], axis=1)) == 1
    assert slow.seconds[59:].mean() > 1.4 * job().seconds[59:].mean()


def test_the_own_compute_of_the_healthy_is_what_it_would_have_been() -> None:
    slow, healthy = job(Fault(Kind.COMPUTE, (5,), 0.5, onset=60)), job()
    others = np.arange(16) != 5
    assert np.allclose(slow.own[:, others], healthy.own[:, others])
    assert np.allclose(slow.own[59:, 5], 2 * healthy.own[59:, 5])
    assert np.allclose(slow.own[:59], healthy.own[:59])


def test_a_slow_link_slows_its_transfers_only() -> None:
    slow, healthy = job(Fault(Kind.LINK, (2, 10), 0.5, onset=60)), job()
    ratio = slow.transfers / healthy.transfers
    hit = slow.layout.links.tolist().index([2, 10])
    assert np.allclose(ratio[59:, hit], 2.0, rtol=0.02)  # its latency does not double
    ratio[59:, hit] = 1.0
    assert np.allclose(ratio, 1.0)
    assert np.array_equal(slow.own, healthy.own)


def test_waiting_is_timed_on_a_quarter_of_the_micro_batches_in_turn() -> None:
    steady = job()
    timed = [np.flatnonzero(np.isfinite(steady.iteration(n).waited[0, OpKind.F, 0])).tolist() for n in range(1, 6)]
    assert timed == [[3], [2], [1], [0], [3]]


def test_ops_are_as_the_schedule_has_them() -> None:
    whole, split = job().iteration(1), job(schedule=Schedule.ZERO_BUBBLE).iteration(1)
    assert np.isnan(whole.compute[:, OpKind.W]).all()
    assert np.isfinite(split.compute).all()
    assert np.all(split.waited[:, OpKind.W] == 0)


def test_the_time_of_an_iteration_follows_the_workload() -> None:
    healthy = job()
    assert np.corrcoef(healthy.seconds, healthy.squares.sum(axis=(1, 2)))[0, 1] > 0.9


def test_faults_are_drawn_inside_the_job_and_name_real_devices() -> None:
    layout, rng = make_layout(SHAPES[1]), np.random.default_rng(7)
    links = set(map(tuple, layout.links.tolist()))
    drawn = [draw_faults(layout, 0.2, 300, rng) for _ in range(300)]
    assert {len(faults) for faults in drawn} == {1, 2, 3}
    for faults in drawn:
        assert faults[0].slowdown == pytest.approx(0.2)
        assert len({(fault.kind, fault.workers) for fault in faults}) == len(faults)
        for fault in faults:
            assert 51 <= fault.onset <= 250
            assert fault.workers in links if fault.kind is Kind.LINK else fault.workers[0] in layout.workers


def test_half_of_a_rows_jobs_are_healthy() -> None:
    counts = [len(draw_job(Purpose.TUNING, 0, NOISES[0], SMALL, index).faults) for index in range(12)]
    assert [count == 0 for count in counts] == [True, False] * 6
