# SPDX-License-Identifier: Apache-2.0
"""What the detector knows across epochs: workers and links that leave, come back, or are new."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.judging.noise import Noise
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.detector.settings import Settings
from megatron_resihp.detector.verdict import Change, Kind

WARM = Settings(warm_up=30)
BY_WORKER = ("workers", "replica", "stage", "tp_rank", "node")
REPLICAS = [np.array([0, 1, 4, 5]), np.array([2, 3, 6, 7])]


def part(layout: Layout, epoch: int, rows: np.ndarray) -> Layout:
    """A later epoch's layout, of these workers only."""
    links = layout.links[np.isin(layout.links, layout.workers[rows]).all(axis=1)]
    return replace(layout, epoch=epoch, links=links, **{name: getattr(layout, name)[rows] for name in BY_WORKER})


def pairs(epoch: int, workers: list[int]) -> Layout:
    """Two replicas of two stages, a worker each, those of a stage next to each other."""
    zero, links = np.zeros(4, np.int64), np.zeros((0, 2), np.int64)
    return Layout(epoch, np.array(workers), np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1]), zero, zero, links)


def go_on(monitor, job, layout, first, last):
    """Watch a job from one iteration to another in this layout; its verdicts."""
    if layout is not job.layout:
        monitor.change_layout(layout)
    later = replace(job, layout=layout)
    return [verdict for each in later.iterations(last, first) for verdict in monitor.observe(each)]


def told(verdicts):
    return [(each.kind, each.change, each.workers) for each in verdicts]


@pytest.fixture
def watched(small_job):
    """(job) → its monitor after 80 iterations, and its verdicts."""

    def watch(job):
        monitor = Monitor(job.layout, 0.01, 1000, WARM)
        return monitor, go_on(monitor, job, job.layout, 1, 80)

    return watch


LATENCY, PER_BYTE = 50e-6, 1e-11


def with_transfers_of(observations: IterationObservations, size: float) -> IterationObservations:
    """The observations with transfers of this size, which take some time whatever their size."""
    factor = observations.transfer / 0.003
    return replace(
        observations, transfer=factor * (LATENCY + size * PER_BYTE),
        transfer_bytes=np.full_like(observations.transfer, size),
    )  # fmt: skip


@pytest.mark.parametrize("size", [5e6, 2e7])
@pytest.mark.parametrize("slow", [(), (1, 5)])
def test_links_are_not_slow_because_an_epoch_sends_other_sizes(small_job, slow_from, size, slow):
    job = small_job({slow: slow_from(130, 0.7)} if slow else {})
    monitor = Monitor(job.layout, 0.01, 1000, WARM)
    for each in job.iterations(80):
        assert monitor.observe(with_transfers_of(each, 1e7)) == []
    workers, links = np.array([0, 1, 2, 3, 4, 5, 8, 9]), np.array([[0, 4], [1, 5], [2, 8], [3, 9]])
    layout = replace(job.layout, epoch=1, workers=workers, links=links)
    monitor.change_layout(layout)
    later = replace(job, layout=layout).iterations(160, 81)
    verdicts = [verdict for each in later for verdict in monitor.observe(with_transfers_of(each, size))]
    assert told(verdicts) == ([(Kind.LINK, Change.ONSET, slow)] if slow else [])


def test_a_slow_link_stays_slow_in_an_epoch_that_sends_other_sizes(small_job, slow_from):
    job = small_job({(1, 5): slow_from(60, 0.5, 140)})
    monitor = Monitor(job.layout, 0.01, 1000, WARM)
    verdicts = [found for each in job.iterations(80) for found in monitor.observe(with_transfers_of(each, 1e7))]
    monitor.change_layout(replace(job.layout, epoch=1))
    later = replace(job, layout=replace(job.layout, epoch=1)).iterations(160, 81)
    verdicts += [found for each in later for found in monitor.observe(with_transfers_of(each, 5e6))]
    assert [each.change for each in verdicts] == [Change.ONSET, Change.RECOVERY] and verdicts[1].since == 140


@pytest.mark.parametrize("device", [5, (1, 5)])
def test_a_slow_device_stays_slow_while_an_epoch_leaves_it_out_and_when_it_returns(
    small_job, slow_from, watched, device
):
    job = small_job({device: slow_from(60, 0.7, 200)})
    monitor, verdicts = watched(job)
    assert [each.change for each in verdicts] == [Change.ONSET]

    def speed():
        return monitor.speed(device) if device == 5 else monitor.link_speed(device)

    assert go_on(monitor, job, part(job.layout, 1, REPLICAS[1]), 81, 120) == []
    assert abs(speed() - 0.7) < 0.02
    back = replace(job.layout, epoch=2)
    assert go_on(monitor, job, back, 121, 160) == []
    assert abs(speed() - 0.7) < 0.02
    last = [verdict for each in replace(job, layout=back).iterations(230, 161) for verdict in monitor.observe(each)]
    assert [each.change for each in last] == [Change.RECOVERY] and last[0].since == 200


def in_bursts(seen: IterationObservations, row: int, mates: list[int], share: float) -> IterationObservations:
    """A worker was slow in a part of the iteration, for this share of its work's time; mates wait for it."""
    stop = np.nansum(seen.compute[row] - np.nan_to_num(seen.waited[row])) / 2 * share / (1 - share)
    for op in (0, 1):
        at = (op, 0, (seen.iteration + op) % 4)
        seen.compute[[row, *mates], *at] += stop
        seen.waited[mates, *at] += stop
    return seen


@pytest.mark.parametrize("known", [40, 6], ids=["known", "not known yet"])
def test_who_is_slow_in_bursts_and_has_no_peers_later_is_as_slow_as_before(small_job, watched, known):
    """No other worker shows what its ops cost under the later plan."""
    job = small_job()
    monitor, _ = watched(job)
    for number in range(121 - known, 121):
        monitor.observe(in_bursts(job.iteration(number), 5, [4], 0.4))
    assert known < 40 or abs(monitor.speed(5) - 0.6) < 0.05
    alone, zero = np.array([1, 5]), np.zeros(2, np.int64)
    layout = Layout(1, alone, zero, np.array([0, 1]), zero, np.array([0, 1]), alone[None])
    monitor.change_layout(layout)
    later = replace(job, layout=layout, timed=False)
    verdicts = [
        v for number in range(121, 181) for v in monitor.observe(in_bursts(later.iteration(number), 1, [], 0.4))
    ]
    assert [each.change for each in verdicts] == ([] if known == 40 else [Change.ONSET])
    assert abs(monitor.speed(5) - 0.6) < 0.05
    last = [verdict for each in later.iterations(240, 181) for verdict in monitor.observe(each)]
    assert [each.change for each in last] == [Change.RECOVERY] and monitor.speed(5) == 1.0


def test_a_suspicion_outlives_an_epoch_without_its_group(small_job, slow_from, watched):
    job = small_job({5: slow_from(60, 0.8)}, timed=False)
    monitor, _ = watched(job)
    assert [each.workers for each in monitor.suspicions()] == [(4, 5)]
    go_on(monitor, job, part(job.layout, 1, REPLICAS[1]), 81, 100)
    assert monitor.suspicions() == []
    go_on(monitor, job, replace(job.layout, epoch=2), 101, 120)
    (suspicion,) = monitor.suspicions()
    (verdict,) = monitor.settle(suspicion, {5: 0.8})
    assert verdict.workers == (5,)
    go_on(monitor, job, part(job.layout, 3, REPLICAS[1]), 121, 140)
    assert abs(monitor.speed(5) - 0.8) < 0.02


def without_timed_waits(layout: Layout, epoch: int, groups: list[tuple[int, ...]], stages: list[int]) -> Layout:
    """These tensor-parallel groups, two replicas of each stage."""
    rows = [(worker, place % 2, stage, rank) for place, (group, stage) in enumerate(zip(groups, stages, strict=True))
            for rank, worker in enumerate(group)]  # fmt: skip
    workers, replica, stage, rank = np.array(rows).T
    return Layout(epoch, workers, replica, stage, rank, workers // 4, layout.links[:0])


@pytest.mark.parametrize("groups", [[(0, 1), (2, 3), (5, 6), (7,)], [(0, 1), (2, 3), (4, 7), (5,)]])
def test_who_was_named_within_a_group_recovers_in_another_one(small_job, slow_from, watched, groups):
    job = small_job({5: slow_from(60, 0.7, 150)}, timed=False)
    monitor, _ = watched(job)
    (suspicion,) = monitor.suspicions()
    monitor.settle(suspicion, {5: 0.7})
    layout = without_timed_waits(job.layout, 1, groups, [0, 0, 1, 1])
    assert go_on(monitor, job, layout, 81, 140) == [] and abs(monitor.speed(5) - 0.7) < 0.02
    verdicts = go_on(monitor, job, layout, 141, 200)
    assert told(verdicts) == [(Kind.COMPUTE, Change.RECOVERY, (5,))] and monitor.speed(5) == 1.0
    assert monitor.suspicions() == []


def test_who_was_named_within_a_group_and_stands_by_is_measured(small_job, slow_from, watched):
    job = small_job({5: slow_from(60, 0.7)}, timed=False)
    monitor, _ = watched(job)
    monitor.settle(monitor.suspicions()[0], {5: 0.7})
    layout = without_timed_waits(job.layout, 1, [(0, 1), (2, 3), (4,), (6, 7)], [0, 0, 1, 1])
    assert go_on(monitor, job, layout, 81, 140) == []
    (suspicion,) = monitor.idle_suspects()
    assert suspicion.workers == (5,)
    (recovery,) = monitor.settle(suspicion, {})
    assert (recovery.change, recovery.workers) == (Change.RECOVERY, (5,)) and monitor.speed(5) == 1.0


def test_a_group_that_returns_after_its_culprit_recovered_is_healthy(small_job, slow_from, watched):
    job = small_job({5: slow_from(60, 0.7, 100)}, timed=False)
    monitor, _ = watched(job)
    monitor.settle(monitor.suspicions()[0], {5: 0.7})
    layout = without_timed_waits(job.layout, 1, [(0, 1), (2, 3), (4, 7), (5,)], [0, 0, 1, 1])
    assert [each.change for each in go_on(monitor, job, layout, 81, 140)] == [Change.RECOVERY]
    assert go_on(monitor, job, replace(job.layout, epoch=2), 141, 180) == [] and monitor.speed(5) == 1.0


def test_a_new_worker_that_is_slow_is_told_by_its_peers(small_job, slow_from):
    job = small_job({6: slow_from(1, 0.7)})
    monitor = Monitor(part(job.layout, 0, np.array([0, 1, 2, 3, 4, 5, 7])), 0.01, 1000, WARM)
    few = replace(job, layout=part(job.layout, 0, np.array([0, 1, 2, 3, 4, 5, 7])))
    assert [verdict for each in few.iterations(60) for verdict in monitor.observe(each)] == []
    verdicts = go_on(monitor, job, replace(job.layout, epoch=1), 61, 100)
    assert told(verdicts) == [(Kind.COMPUTE, Change.ONSET, (6,))] and verdicts[0].iteration <= 71
    assert abs(monitor.speed(6) - 0.7) < 0.02


@pytest.mark.parametrize(("joins_at", "named"), [(0.5, [5, 0, 5]), (1.0, [0])])
def test_of_two_peers_a_new_one_that_is_slow_is_told_and_hides_nothing(small_job, slow_from, joins_at, named):
    job = small_job({5: slow_from(1, joins_at, 200), 0: slow_from(130, 0.75)}, layout=pairs(0, [0, 1, 2, 3]))
    monitor = Monitor(job.layout, 0.01, 1000, WARM)
    assert go_on(monitor, job, job.layout, 1, 80) == []
    verdicts = go_on(monitor, job, pairs(1, [0, 5, 2, 3]), 81, 240)
    assert [each.workers for each in verdicts] == [(each,) for each in named]
    assert abs(monitor.speed(0) - 0.75) < 0.02 and monitor.speed(5) == 1.0


def test_a_new_worker_is_not_slow_beside_a_slow_one_that_recovered_unseen(small_job, slow_from):
    job = small_job({1: slow_from(60, 0.7, 100)}, layout=pairs(0, [0, 1, 2, 3]))
    monitor = Monitor(job.layout, 0.01, 1000, WARM)
    verdicts = go_on(monitor, job, job.layout, 1, 80)
    verdicts += go_on(monitor, job, part(job.layout, 1, np.array([2, 3])), 81, 120)
    verdicts += go_on(monitor, job, pairs(2, [5, 1, 2, 3]), 121, 160)
    assert told(verdicts) == [(Kind.COMPUTE, Change.ONSET, (1,))]


def test_links_may_come_with_a_later_epoch(small_job, slow_from):
    job = small_job({(1, 5): slow_from(110, 0.4)})
    monitor = Monitor(replace(job.layout, links=job.layout.links[:0]), 0.01, 1000, WARM)
    alone = replace(job, layout=replace(job.layout, links=job.layout.links[:0]))
    assert [verdict for each in alone.iterations(60) for verdict in monitor.observe(each)] == []
    verdicts = go_on(monitor, job, replace(job.layout, epoch=1), 61, 140)
    assert told(verdicts) == [(Kind.LINK, Change.ONSET, (1, 5))]


@pytest.mark.parametrize("moved", [False, True])
def test_a_worker_that_is_known_to_be_slow_does_not_delay_the_verdict_on_others(small_job, slow_from, moved):
    job = small_job({6: slow_from(60 if moved else 1, 0.7), 1: slow_from(110, 0.6)}, noise=0.03)
    monitor = Monitor(job.layout, 0.01, 1000, Settings(warm_up=50))
    verdicts = go_on(monitor, job, job.layout, 1, 80)
    layout = replace(job.layout, epoch=1) if moved else job.layout
    verdicts += go_on(monitor, job, layout, 81, 130)
    assert [each.workers for each in verdicts] == [(6,), (1,)]
    assert verdicts[1].iteration <= 113


@pytest.mark.parametrize("moves", [1, 2])
def test_units_that_are_all_new_are_as_noisy_as_those_before(moves):
    random = np.random.default_rng(0)
    noise = Noise(random.normal(0.0, 0.02, (50, 2, 3)), smallest_clip=0.01)
    before = noise.variance.mean()
    for _ in range(moves):
        noise.move(np.array([-1, -1]))
    assert noise.variance == pytest.approx(before, rel=0.2)
