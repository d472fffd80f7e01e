# SPDX-License-Identifier: Apache-2.0
"""The online detector on small jobs: who is named, when, how slow, and what is not an alarm."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_resihp.detector.input.records import SpanKind
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.detector.notices import What
from megatron_resihp.detector.settings import Settings
from megatron_resihp.detector.validation import culprits
from megatron_resihp.detector.verdict import Change, Kind

WARM = Settings(warm_up=30)


def watch(job, last, monitor=None, first=1):
    monitor = monitor or Monitor(job.layout, 0.01, 1000, WARM)
    return monitor, [verdict for each in job.iterations(last, first) for verdict in monitor.observe(each)]


def test_healthy_job_gives_no_verdict(small_job):
    monitor, verdicts = watch(small_job(noise=0.03), 200)
    assert verdicts == [] and monitor.speed(0) == 1.0


@pytest.mark.parametrize("speed", [0.93, 0.8, 0.4])
def test_slow_worker_is_named_and_its_peers_are_not(small_job, slow_from, speed):
    monitor, verdicts = watch(small_job({5: slow_from(60, speed)}), 90)
    assert [(each.kind, each.change, each.workers) for each in verdicts] == [(Kind.COMPUTE, Change.ONSET, (5,))]
    verdict = verdicts[0]
    assert verdict.since == 60 and verdict.iteration <= 66
    assert verdict.speed_low < speed < verdict.speed_high
    assert abs(monitor.speed(5) - speed) < 0.02


def test_slow_link_is_named_as_a_link(small_job, slow_from):
    monitor, verdicts = watch(small_job({(2, 6): slow_from(60, 0.3)}), 90)
    assert [(each.kind, each.workers) for each in verdicts] == [(Kind.LINK, (2, 6))]
    assert abs(monitor.link_speed((6, 2)) - 0.3) < 0.02


def test_several_culprits_at_once(small_job, slow_from):
    job = small_job({4: slow_from(60, 0.7), 5: slow_from(60, 0.9), (0, 4): slow_from(62, 0.5)})
    _, verdicts = watch(job, 95)
    assert {each.workers for each in verdicts} == {(4,), (5,), (0, 4)} and len(verdicts) == 3


def test_a_whole_node_may_be_slow(small_job, slow_from):
    _, verdicts = watch(small_job({worker: slow_from(60, 0.85) for worker in range(4)}), 90)
    assert sorted(each.workers for each in verdicts) == [(0,), (1,), (2,), (3,)]


def test_recovery_is_seen_and_a_second_onset_too(small_job, slow_from):
    def speed(iteration):
        return slow_from(60, 0.8, 80)(iteration) * slow_from(110, 0.7)(iteration)

    _, verdicts = watch(small_job({3: speed}), 130)
    assert [each.change for each in verdicts] == [Change.ONSET, Change.RECOVERY, Change.ONSET]
    assert verdicts[1].since == 80 and verdicts[1].speed == 1.0


@pytest.mark.parametrize("iterations", [40, 100, 200])
def test_a_recovery_by_and_by_is_seen(small_job, iterations):
    def speed(iteration):
        return float(np.interp(iteration, [59, 60, 90, 90 + iterations], [1.0, 0.9, 0.9, 1.0]))

    monitor, verdicts = watch(small_job({3: speed}, noise=0.05), 90 + iterations + 40)
    assert verdicts[0].change is Change.ONSET and verdicts[-1].change is Change.RECOVERY
    assert {each.change for each in verdicts[1:-1]} <= {Change.SEVERITY} and monitor.speed(3) == 1.0


@pytest.mark.parametrize("period", [24, 30])
def test_a_device_that_is_slower_by_turns_from_the_start_raises_no_alarms(small_job, period):
    job = small_job({5: lambda iteration: 1 / 1.1 if iteration % period < 8 else 1.0})
    monitor = Monitor(job.layout, 0.01, 1000)
    _, verdicts = watch(job, 300, monitor)
    assert verdicts == []


def test_new_severity_is_told(small_job, slow_from):
    def speed(iteration):
        return slow_from(60, 0.9)(iteration) * slow_from(90, 0.7)(iteration)

    monitor, verdicts = watch(small_job({3: speed}), 120)
    assert [each.change for each in verdicts] == [Change.ONSET, Change.SEVERITY]
    assert abs(monitor.speed(3) - 0.63) < 0.02


def correlated(deviation, memory, first, seed=0):
    """An AR(1) process from an iteration on, which is remembered for `memory` iterations."""
    share = np.exp(-1 / memory)
    swings = deviation * np.random.default_rng(seed).standard_normal(2000)
    for number in range(1, swings.size):
        swings[number] = share * swings[number - 1] + np.sqrt(1 - share**2) * swings[number]
    return lambda iteration: swings[iteration - first]


@pytest.mark.parametrize(("speed", "jitter"), [(0.9, 0.05), (0.7, 0.05), (0.7, 0.1), (0.5, 0.15)])
@pytest.mark.parametrize("memory", [0.1, 4.5])
def test_a_device_that_is_unevenly_slow_is_told_once(small_job, speed, jitter, memory):
    swings = correlated(jitter, memory, 60)

    def uneven(iteration):
        return min(1.0, speed / (1 + swings(iteration))) if iteration >= 60 else 1.0

    monitor, verdicts = watch(small_job({5: uneven}), 500)
    assert verdicts[0].change is Change.ONSET and {each.workers for each in verdicts} == {(5,)}
    assert [each.change for each in verdicts].count(Change.RECOVERY) <= 1 and len(verdicts) <= 4
    assert abs(monitor.speed(5) - speed) < 0.05 + jitter / 2


def test_a_device_that_is_slow_in_every_other_iteration_is_slow_by_its_mean(small_job):
    monitor, verdicts = watch(small_job({5: lambda n: 1 / 1.5 if n >= 60 and n % 2 else 1.0}), 500)
    assert verdicts[0].change is Change.ONSET and len(verdicts) <= 7
    assert abs(monitor.speed(5) - 1 / 1.25) < 0.03


@pytest.mark.parametrize("spell", [5, 6, 8, 12])
def test_a_device_that_relapses_at_once_has_to_be_healthy_for_longer(small_job, spell):
    job = small_job({5: lambda iteration: 0.7 if iteration >= 60 and (iteration - 60) // spell % 2 == 0 else 1.0})
    monitor, verdicts = watch(job, 460)
    assert verdicts[0].change is Change.ONSET and len(verdicts) <= 10
    assert [each.change for each in verdicts].count(Change.RECOVERY) <= 2
    assert 0.7 < monitor.speed(5) < 1.0


def test_a_device_that_was_unevenly_slow_recovers(small_job):
    swings = correlated(0.05, 4.5, 60)
    monitor, verdicts = watch(small_job({5: lambda n: 0.7 / (1 + swings(n)) if 60 <= n < 300 else 1.0}), 340)
    assert verdicts[-1].change is Change.RECOVERY and monitor.speed(5) == 1.0
    assert 300 <= verdicts[-1].iteration <= 336


def test_a_stall_while_slow_delays_no_recovery(small_job, slow_from):
    def speed(iteration):
        return 0.3 if iteration == 100 else slow_from(60, 0.8, 140)(iteration)

    _, verdicts = watch(small_job({5: speed}), 160)
    assert [each.change for each in verdicts] == [Change.ONSET, Change.RECOVERY]
    assert verdicts[-1].iteration <= 150


def test_severities_are_far_apart_and_the_last_one_is_told(small_job):
    def speed(iteration):
        return float(np.interp(iteration, [59, 60, 90, 150], [1.0, 0.9, 0.9, 0.45]))

    monitor, verdicts = watch(small_job({5: speed}), 300)
    severities = [each for each in verdicts if each.change is Change.SEVERITY]
    assert (np.diff([each.iteration for each in severities]) >= 32).all()
    assert abs(severities[-1].speed - 0.45) < 0.03 and abs(monitor.speed(5) - 0.45) < 0.02


def test_a_stall_of_one_iteration_is_no_alarm(small_job, slow_from):
    _, verdicts = watch(small_job({3: slow_from(60, 0.3, 61), 6: slow_from(80, 0.4, 81)}), 120)
    assert verdicts == []


def test_who_was_slow_from_the_start_is_told_by_its_peers(small_job, slow_from):
    _, verdicts = watch(small_job({6: slow_from(1, 0.7)}), 40)
    assert [(each.change, each.workers) for each in verdicts] == [(Change.ONSET, (6,))]
    assert abs(verdicts[0].speed - 0.7) < 0.02


def test_a_link_that_was_slow_from_the_start_is_told_by_its_peers(small_job, slow_from):
    monitor, verdicts = watch(small_job({(2, 6): slow_from(1, 0.6, 70)}), 60)
    assert [(each.kind, each.change, each.workers) for each in verdicts] == [(Kind.LINK, Change.ONSET, (2, 6))]
    assert abs(monitor.link_speed((2, 6)) - 0.6) < 0.02
    _, last = watch(small_job({(2, 6): slow_from(1, 0.6, 70)}), 90, monitor, 61)
    assert [(each.change, each.workers) for each in last] == [(Change.RECOVERY, (2, 6))]


def test_documents_all_alike_are_judged_by_plain_levels(small_job, slow_from):
    monitor, verdicts = watch(small_job({2: slow_from(60, 0.9)}, alike=True), 90)
    assert [each.workers for each in verdicts] == [(2,)]
    assert not monitor.model.informative[:, :2].any()


def test_untimed_waits_leave_a_suspicion_until_validation_names_the_culprit(small_job, slow_from):
    job = small_job({5: slow_from(60, 0.8)}, timed=False)
    monitor, verdicts = watch(job, 80)
    assert verdicts == []
    (suspicion,) = monitor.suspicions()
    assert suspicion.workers == (4, 5)
    found = culprits(suspicion, {4: [1.0, 1.01], 5: [1.25, 1.26]})
    (verdict,) = monitor.settle(suspicion, found)
    assert verdict.workers == (5,) and abs(verdict.speed - 0.8) < 0.02 and monitor.suspicions() == []
    assert abs(monitor.speed(5) - 0.8) < 0.02 and monitor.speed(4) == 1.0


def test_a_group_that_is_slow_as_a_whole_is_told_by_a_healthy_worker_of_its_stage(small_job, slow_from):
    job = small_job({worker: slow_from(60, 0.7) for worker in (4, 5)}, timed=False)
    monitor, _ = watch(job, 80)
    (suspicion,) = monitor.suspicions()
    assert suspicion.workers == (4, 5) and suspicion.reference in (6, 7)
    found = culprits(suspicion, {4: [1 / 0.7], 5: [1 / 0.7], suspicion.reference: [1.0]})
    verdicts = monitor.settle(suspicion, found)
    assert [each.workers for each in verdicts] == [(4,), (5,)] and monitor.suspicions() == []
    assert all(abs(monitor.speed(worker) - 0.7) < 0.02 for worker in (4, 5))


def test_a_suspicion_stays_where_validation_finds_nobody(small_job, slow_from):
    job = small_job({5: slow_from(60, 0.8, 100)}, timed=False)
    monitor, _ = watch(job, 80)
    (suspicion,) = monitor.suspicions()
    assert monitor.settle(suspicion, {}) == [] and monitor.suspicions() == [suspicion]
    watch(job, 120, monitor, 81)
    assert monitor.suspicions() == [] and monitor.settle(suspicion, {5: 0.8}) == []


def test_garbage_collection_is_not_the_devices_doing(small_job, slow_from):
    job = small_job({3: slow_from(60, 0.5, 64)})
    monitor, _ = watch(job, 59)
    verdicts = []
    for each in job.iterations(90, 60):
        spans = each.spans.copy()
        spans[3, SpanKind.GARBAGE_COLLECTION] = 0.1 if each.iteration < 64 else 0.0
        verdicts += monitor.observe(replace(each, spans=spans))
    assert verdicts == []


def test_data_loader_stall_is_a_notice(small_job):
    job = small_job()
    monitor, _ = watch(job, 40)
    stalled = job.iteration(41)
    stalled.spans[2:4, SpanKind.DATA] = 0.5, 0.4
    assert monitor.observe(stalled) == []
    (notice,) = monitor.take_notices()
    assert (notice.what, notice.workers, notice.seconds) == (What.DATA, (2, 3), 0.4)
    assert monitor.take_notices() == []


def test_who_waits_for_the_one_that_reads_for_its_group_is_not_held_up_by_data(small_job):
    job = small_job()
    monitor, _ = watch(job, 40)
    stalled = job.iteration(41)
    stalled.spans[3, SpanKind.DATA] = 0.5
    monitor.observe(stalled)
    assert monitor.take_notices() == []


def stopped_now_and_then(job, worker, number, share):
    """The job's iteration in which a process has been stopped for this share of its work's time, in a single op."""
    seen = job.iteration(number)
    own = seen.compute[worker] - seen.waited[worker]  # of those that are timed
    stop = np.nansum(own) * share / (1 - share)
    mate = worker ^ 1
    at = (number % 2, 0, number % 4)
    seen.compute[[worker, mate], *at] += stop
    seen.waited[mate, *at] += stop  # it waits for the other
    seen.spans[worker, SpanKind.ABSENT] = stop
    return seen


def in_bursts(job, worker, number, share):
    """The same without knowing that the process was stopped: its device was slow for a part of the iteration."""
    seen = stopped_now_and_then(job, worker, number, share)
    seen.spans[:, SpanKind.ABSENT] = 0.0
    return seen


@pytest.mark.parametrize("lost", [0.25, 0.5])
def test_a_device_that_is_slow_in_a_part_of_each_iteration_is_slow(small_job, lost):
    job = small_job()
    monitor, _ = watch(job, 59)
    verdicts = [verdict for number in range(60, 100) for verdict in monitor.observe(in_bursts(job, 5, number, lost))]
    assert verdicts[0].change is Change.ONSET and {each.workers for each in verdicts} == {(5,)} and len(verdicts) <= 2
    assert verdicts[0].iteration <= 75 and abs(monitor.speed(5) - (1 - lost)) < 0.05
    _, last = watch(job, 130, monitor, 100)
    assert [each.change for each in last] == [Change.RECOVERY] and last[0].iteration <= 115


def test_hiccups_in_half_of_the_iterations_are_no_slowness(small_job):
    job = small_job()
    monitor, _ = watch(job, 59)
    seen = (in_bursts(job, 5, number, 0.3) if number % 2 else job.iteration(number) for number in range(60, 160))
    assert [verdict for each in seen for verdict in monitor.observe(each)] == []


def test_hiccups_that_all_workers_have_are_no_slowness(small_job):
    job = small_job()
    monitor, _ = watch(job, 59)
    verdicts = []
    for number in range(60, 120):
        seen = job.iteration(number)
        seen.compute[:, number % 2, 0, number % 4] *= 3.0
        verdicts += monitor.observe(seen)
    assert verdicts == []


def test_a_link_that_is_slow_in_few_of_its_transfers_is_slow(small_job):
    job = small_job()
    monitor, _ = watch(job, 59)
    verdicts = []
    for number in range(60, 100):
        seen = job.iteration(number)
        seen.transfer[2, number % 8] *= 17.0
        verdicts += monitor.observe(seen)
    assert [(each.kind, each.change, each.workers) for each in verdicts] == [(Kind.LINK, Change.ONSET, (2, 6))]
    assert abs(monitor.link_speed((2, 6)) - 1 / 3) < 0.02


def test_a_process_that_is_stopped_in_few_of_its_ops_is_slow(small_job):
    """Without knowing that it was stopped, these ops would be outliers at first."""
    job = small_job()
    monitor, _ = watch(job, 59)
    stops = [stopped_now_and_then(job, 5, number, 0.6) for number in range(60, 90)]
    verdicts = [verdict for each in stops for verdict in monitor.observe(each)]
    assert [(each.kind, each.change, each.workers) for each in verdicts] == [(Kind.COMPUTE, Change.ONSET, (5,))]
    assert verdicts[0].iteration <= 66 and verdicts[0].speed_low < 0.4 < verdicts[0].speed_high
    assert abs(monitor.speed(5) - 0.4) < 0.03


def test_a_process_whose_stops_are_known_in_part_is_slow(small_job):
    job = small_job()
    monitor, _ = watch(job, 59)
    stops = [(stopped_now_and_then if number % 3 else in_bursts)(job, 5, number, 0.6) for number in range(60, 100)]
    verdicts = [verdict for each in stops for verdict in monitor.observe(each)]
    assert verdicts[0].change is Change.ONSET and {each.workers for each in verdicts} == {(5,)}
    assert abs(monitor.speed(5) - 0.4) < 0.03


def test_an_alarm_before_bursts_are_known_tells_the_speed_with_them(small_job):
    """Its usual ops are 10 % longer, too, so three iterations raise the alarm."""
    job = small_job({5: lambda number: 0.9 if number >= 60 else 1.0})
    monitor, _ = watch(job, 59)
    seen = (in_bursts(job, 5, number, 0.5) for number in range(60, 66))
    verdicts = [verdict for each in seen for verdict in monitor.observe(each)]
    assert verdicts[0].change is Change.ONSET and verdicts[0].workers == (5,)
    assert verdicts[0].iteration <= 64 and abs(verdicts[0].speed - 0.45) < 0.04


def test_bad_input_is_counted_and_harmless(small_job, slow_from):
    job = small_job({1: slow_from(60, 0.8)})
    monitor, _ = watch(job, 50)
    bad = job.iteration(51)
    bad.compute[0] = np.nan
    bad.compute[3] = -1.0
    bad.transfer[1] = np.inf
    bad.reported[2] = False
    verdicts = monitor.observe(bad)
    verdicts += monitor.observe(job.iteration(50))
    verdicts += monitor.observe(replace(job.iteration(53), epoch=7))
    verdicts += monitor.observe(replace(job.iteration(54), compute=bad.compute[:3]))
    counters = monitor.counters
    assert (counters.repeated, counters.other_epoch, counters.malformed, counters.unreported) == (1, 1, 1, 1)
    verdicts += watch(job, 80, monitor, 56)[1]
    assert [each.workers for each in verdicts] == [(1,)] and counters.missing > 0


def test_a_new_epoch_keeps_what_is_known_of_devices(small_job, slow_from):
    slow = {5: slow_from(60, 0.8)}
    job = small_job(slow)
    monitor, verdicts = watch(job, 80)
    later = small_job(slow, scale=1.7, layout=with_epoch(job.layout, 1))
    monitor.change_layout(later.layout)
    _, more = watch(later, 120, monitor, 81)
    assert [each.workers for each in verdicts] == [(5,)] and more == []
    assert abs(monitor.speed(5) - 0.8) < 0.02
    _, last = watch(small_job(scale=1.7, layout=later.layout), 150, monitor, 121)
    assert [(each.change, each.workers) for each in last] == [(Change.RECOVERY, (5,))]


def with_epoch(layout, epoch):
    return type(layout)(epoch, *(getattr(layout, name) for name in list(layout.__dataclass_fields__)[1:]))


def named(verdicts, ids=lambda worker: worker):
    return sorted((each.kind, each.change, tuple(map(ids, each.workers)), each.since) for each in verdicts)


def test_other_units_of_time_change_nothing(small_job, slow_from):
    slow = {5: slow_from(60, 0.85), (1, 5): slow_from(50, 0.6)}
    plain, scaled = (watch(small_job(slow, scale=scale), 80)[1] for scale in (1.0, 1000.0))
    assert named(plain) == named(scaled) and len(plain) == 2
    assert [each.speed for each in plain] == pytest.approx([each.speed for each in scaled])


@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_and_the_names_of_workers_do_not_matter(small_job, slow_from, seed):
    job = small_job({5: slow_from(45, 0.85), (2, 6): slow_from(45, 0.5)})
    order, ids = (np.random.default_rng((seed, part)).permutation(8) for part in (0, 1))
    layout = job.layout
    names = {name: getattr(layout, name)[order] for name in ("replica", "stage", "tp_rank", "node")}
    monitor = Monitor(
        replace(layout, workers=ids[layout.workers[order]], links=ids[layout.links], **names), 0.01, 1000, WARM
    )
    verdicts = []
    for each in job.iterations(60):
        by_worker = ("compute", "waited", "tokens", "squares", "spans", "seconds", "reported")
        verdicts += monitor.observe(replace(each, **{name: getattr(each, name)[order] for name in by_worker}))
    _, plain = watch(job, 60)
    assert named(plain, lambda worker: int(ids[worker])) == named(verdicts) and len(plain) == 2


def test_a_worse_slowdown_is_not_found_later(small_job, slow_from):
    found = []
    for speed in (0.95, 0.9, 0.8, 0.5):
        _, verdicts = watch(small_job({5: slow_from(45, speed)}, noise=0.03), 80)
        found.append(verdicts[0].iteration)
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("number", [5, 20, 50])
def test_an_iteration_without_any_op_is_left_out(small_job, slow_from, number):
    job = small_job({1: slow_from(60, 0.8)})
    monitor, _ = watch(job, number - 1)
    whole = job.iteration(number)
    none = {name: getattr(whole, name)[..., :0] for name in ("compute", "waited", "tokens", "squares")}
    assert monitor.observe(replace(whole, **none)) == [] and monitor.counters.malformed == 1
    _, verdicts = watch(job, 80, monitor, number + 1)
    assert [each.workers for each in verdicts] == [(1,)]
