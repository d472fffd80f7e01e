# SPDX-License-Identifier: Apache-2.0
"""Sessions: downtime is charged, time has no gaps, aborts end a job, sessions of large clusters are quick."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resihp.cost.bounds import iteration_bound
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.model.presets import preset
from megatron_resihp.cost.training import Training
from megatron_resihp.lab.calibration import calibrated
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.common import with_shares
from megatron_resihp.planner.strategies.drop_replica import drop_replica
from megatron_resihp.planner.strategies.registry import STRATEGIES, Change, Entry, ReactsTo
from megatron_resihp.simulator import traces
from megatron_resihp.simulator.cluster import (
    UNMITIGATED,
    Delays,
    Judge,
    Outcome,
    capacity,
    capacity_asked,
    run,
    run_from,
)
from megatron_resihp.simulator.sizes import Sizes, a100
from megatron_resihp.simulator.traces import HOUR, Event, Trace, What, trace

DELAYS = Delays(detect_dead_s=5.0, detect_slow_iterations=3.0, planning_s=1.0)


def sizes(tensor: int = 4, pipeline: int = 2, data: int = 2, micro_batches: int = 8) -> Sizes:
    return Sizes(preset("llama2-7b"), Training(4096), a100(), tensor, pipeline, data, micro_batches)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(sizes().cost())


@pytest.fixture(scope="module")
def start() -> ParallelPlan:
    return sizes().plan()


def keep(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    return plan


def rate(judge: Judge, plan: ParallelPlan, speed: Mapping[int, float] = {}) -> float:
    return judge.samples_per_s(plan, Health(dict.fromkeys(plan.members, 1.0) | speed))


def assert_without_gaps(outcome: Outcome) -> None:
    times = [0.0, *(part.end_s for part in outcome.segments)]
    assert times == [*(part.start_s for part in outcome.segments), pytest.approx(outcome.duration_s)]


def death(at_s: float, *workers: int) -> Event:
    return Event(at_s, What.DEATH, workers)


DROP = STRATEGIES["drop-replica"]


def test_a_quiet_session_is_trained_at_full_speed(judge: Judge, start: ParallelPlan) -> None:
    outcome = run(DROP, Trace(HOUR, ()), start, judge, DELAYS)
    assert outcome.samples_per_s == pytest.approx(rate(judge, start))
    assert (outcome.changes, outcome.stopped_s, outcome.aborted) == (0, 0.0, "")


def test_a_death_costs_detection_planning_moving_and_half_an_iteration(judge: Judge, start: ParallelPlan) -> None:
    outcome = run(DROP, trace(HOUR, [death(600.0, 5)]), start, judge, DELAYS)
    assert_without_gaps(outcome)
    survivors = Health({worker: 1.0 for worker in range(16) if worker != 5})
    after = drop_replica(start, survivors, judge.cost)
    half = 0.5 * judge.iteration_s(after, survivors)
    assert outcome.stopped_s == pytest.approx(5.0 + 1.0 + judge.cost.rebuild_s + half)
    trained = 600 * rate(judge, start) + (3000 - outcome.stopped_s) * judge.samples_per_s(after, survivors)
    assert outcome.samples_per_s == pytest.approx(trained / HOUR)
    assert outcome.plan == after


def test_a_slow_worker_drags_a_job_that_does_not_react(judge: Judge, start: ParallelPlan) -> None:
    found = run(DROP, trace(HOUR, [Event(0.0, What.SPEED, (3,), 0.5)]), start, judge, DELAYS)
    assert found.samples_per_s == pytest.approx(rate(judge, start, {3: 0.5}))
    assert found.changes == 0


def test_training_goes_on_while_a_slow_worker_is_noticed(judge: Judge, start: ParallelPlan) -> None:
    """Only putting the new plan in force stops it."""
    without_slow = Entry(lambda p, h, c: drop_replica(p, Health({w: s for w, s in h.speed.items() if s == 1}), c),
                         "", Change.IN_PLACE, ReactsTo.BOTH)  # fmt: skip
    outcome = run(without_slow, trace(HOUR, [Event(0.0, What.SPEED, (3,), 0.1)]), start, judge, DELAYS)
    noticing, moving, training = outcome.segments
    assert noticing.samples_per_s == pytest.approx(rate(judge, start, {3: 0.1}))
    assert noticing.end_s == pytest.approx(3 * judge.iteration_s(start, slowed(start, {3: 0.1})) + 1.0)
    assert moving.samples_per_s == 0 and training.samples_per_s > noticing.samples_per_s


def slowed(plan: ParallelPlan, speed: Mapping[int, float]) -> Health:
    return Health(dict.fromkeys(plan.members, 1.0) | speed)


def test_an_answer_that_the_next_failure_overtakes_begins_anew(judge: Judge, start: ParallelPlan) -> None:
    outcome = run(DROP, trace(HOUR, [death(600.0, 5), death(603.0, 6)]), start, judge, DELAYS)
    assert_without_gaps(outcome)
    once = run(DROP, trace(HOUR, [death(600.0, 5, 6)]), start, judge, DELAYS)
    assert outcome.stopped_s == pytest.approx(once.stopped_s + 3.0)
    assert outcome.changes == 1 and outcome.plan == once.plan


def test_without_a_plan_the_job_ends(judge: Judge, start: ParallelPlan) -> None:
    events = [death(600.0, *range(16)[1:]), Event(900.0, What.REJOIN, tuple(range(16)[1:]))]
    outcome = run(DROP, trace(HOUR, events), start, judge, DELAYS)
    assert_without_gaps(outcome)
    assert outcome.aborted
    assert outcome.samples_per_s == pytest.approx(600 * rate(judge, start) / HOUR)


def test_no_plan_for_slow_workers_changes_nothing(judge: Judge, start: ParallelPlan) -> None:
    def refuse(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
        raise NoPlanError("no")

    entry = Entry(refuse, "", Change.IN_PLACE, ReactsTo.BOTH)
    outcome = run(entry, trace(HOUR, [Event(600.0, What.SPEED, (3,), 0.5)]), start, judge, DELAYS)
    assert not outcome.aborted and outcome.stopped_s == 0


def test_a_restart_loses_half_an_interval_of_checkpoints(judge: Judge, start: ParallelPlan) -> None:
    delays = replace(DELAYS, checkpoint_every_s=1000.0, restart_s=100.0)
    outcome = run(STRATEGIES["restart"], trace(HOUR, [death(1300.0, 5)]), start, judge, delays)
    assert outcome.lost_samples == pytest.approx(500 * rate(judge, start))
    assert outcome.stopped_s > 100
    again = run(STRATEGIES["restart"], trace(HOUR, [death(1300.0, 5), death(1301.0, 4)]), start, judge, delays)
    assert again.lost_samples == pytest.approx(outcome.lost_samples)


def test_whoever_lost_the_models_state_pays_for_a_restart_too(judge: Judge, start: ParallelPlan) -> None:
    """All holders of a shard die at once."""
    first = replace(start.replicas[0], micro_batches=tuple(range(8)))
    used = {worker for stage in first.stages for worker in stage}
    spare = ParallelPlan((first,), dict.fromkeys(worker for worker in range(16) if worker not in used))
    lost, free = spare.replicas[0].stages[0][0], min(spare.standbys)

    def swap(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
        stages = tuple(tuple(free if w == lost else w for w in stage) for stage in plan.replicas[0].stages)
        return ParallelPlan((replace(plan.replicas[0], stages=stages),))

    entry = Entry(swap, "", Change.IN_PLACE, ReactsTo.BOTH)
    outcome = run(entry, trace(HOUR, [death(1300.0, lost)]), spare, judge, replace(DELAYS, checkpoint_every_s=1000.0))
    assert outcome.lost_samples == pytest.approx(500 * judge.samples_per_s(spare, slowed(spare, {})))
    assert outcome.stopped_s > DELAYS.restart_s


def test_a_rejoined_worker_keeps_no_job_waiting(judge: Judge, start: ParallelPlan) -> None:
    events = [death(600.0, 5), Event(1800.0, What.REJOIN, (5,))]
    outcome = run(STRATEGIES["restart"], trace(HOUR, events), start, judge, DELAYS)
    assert outcome.segments[-1].samples_per_s == pytest.approx(rate(judge, start))


def test_capacity_counts_speeds_over_time() -> None:
    events = [Event(0.0, What.SPEED, (0,), 0.5), death(1800.0, 1), Event(2700.0, What.REJOIN, (1,))]
    assert capacity(trace(HOUR, events), 4) == pytest.approx((3.5 - 0.25) / 4)


def test_time_in_which_nobody_is_left_was_asked_for() -> None:
    events = [death(900.0, 0), *(death(1800.0, worker) for worker in (1, 2, 3))]
    assert capacity(trace(HOUR, events), 4) == pytest.approx((1 + 0.75) / 4)
    assert capacity_asked(trace(HOUR, events), 4) == pytest.approx((1 + 3 * 0.75) / 4)


def test_iterations_that_vary_take_their_mean_time(start: ParallelPlan) -> None:
    """Micro-batches of an iteration being alike."""
    cost = sizes().cost()
    lengths = (1e6, 8e6, 16e6)
    varied = Judge(cost, [[each] * 8 for each in lengths])
    typical = Judge(replace(cost, squares=float(np.mean(lengths))))
    assert rate(varied, start) == pytest.approx(rate(typical, start), rel=1e-3)
    assert rate(varied, start) > rate(Judge(cost), start)


def test_micro_batches_that_vary_slow_the_job_by_their_imbalance(start: ParallelPlan) -> None:
    """The same tokens² in every iteration, but all the long documents in one replica, or half in each."""
    cost = replace(sizes().cost(), squares=10e6)
    first = start.replicas[0].micro_batches
    lopsided = [15e6 if index in first else 5e6 for index in range(8)]
    alike, even, uneven = (
        rate(Judge(cost, [each]), start) for each in ([10e6] * 8, [5e6, 5e6, 15e6, 15e6] * 2, lopsided)
    )
    assert uneven < even < alike


def test_planning_time_is_measured_if_asked_for(start: ParallelPlan) -> None:
    ticks = iter(range(0, 1000, 50))
    judge = Judge(sizes().cost(), clock=lambda: float(next(ticks)))
    measured = run(DROP, trace(HOUR, [death(600.0, 5)]), start, judge, replace(DELAYS, planning_s=None))
    fixed = run(DROP, trace(HOUR, [death(600.0, 5)]), start, judge, DELAYS)
    assert measured.stopped_s == pytest.approx(fixed.stopped_s - 1.0 + 50.0)


def test_the_unmitigated_job_stands_still_once_somebody_is_dead(judge: Judge, start: ParallelPlan) -> None:
    outcome = run(UNMITIGATED, trace(HOUR, [death(1800.0, 5)]), start, judge, DELAYS)
    assert outcome.samples_per_s == pytest.approx(rate(judge, start) / 2)


def test_calibration_gives_the_throughput_that_is_asked_for() -> None:
    found = calibrated(sizes(), 3.21)
    assert rate(Judge(found.cost()), found.plan()) == pytest.approx(3.21)


def test_calibration_refuses_what_links_dont_allow() -> None:
    with pytest.raises(ValueError, match="transfers alone"):
        calibrated(replace(sizes(), device=a100(gbps=0.01)), 1000.0)


def test_ten_thousand_workers_work() -> None:
    large = sizes(tensor=8, pipeline=4, data=320, micro_batches=1280)
    deaths = traces.removals([6 * HOUR, 12 * HOUR], large.workers, np.random.default_rng(0))
    outcome = run(DROP, trace(24 * HOUR, deaths), large.plan(), Judge(large.cost()), DELAYS)
    assert outcome.changes == 2
    speeds = [part.samples_per_s for part in outcome.segments if part.samples_per_s]
    assert all(later <= earlier for earlier, later in pairwise(speeds))


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_whatever_happens_time_has_no_gaps_and_nobody_beats_the_bound(seed: int) -> None:
    judge, start = Judge(sizes().cost()), sizes().plan()
    rng = np.random.default_rng(seed)
    times = traces.moments(traces.poisson(HOUR / 4), 2 * HOUR, rng)
    events = trace(
        2 * HOUR,
        traces.outages(times, traces.single(16), traces.poisson(HOUR / 2), rng),
        traces.slow_downs(times, traces.single(16), traces.poisson(HOUR / 2), rng),
    )
    outcome = run(STRATEGIES["oobleck+greyhound"], events, start, judge, DELAYS)
    assert_without_gaps(outcome)
    most = 8 / iteration_bound(judge.cost, dict.fromkeys(range(16), 1.0)).seconds
    assert all(0 <= part.samples_per_s <= most for part in outcome.segments)
    assert outcome.samples_per_s >= 0
    assert outcome == run(STRATEGIES["oobleck+greyhound"], events, start, Judge(sizes().cost()), DELAYS)


def test_sessions_side_by_side_are_those_one_after_another(judge: Judge, start: ParallelPlan) -> None:
    entry = STRATEGIES["oobleck+greyhound"]
    happening = trace(HOUR, [death(600.0, 5), Event(1200.0, What.SPEED, (9,), 0.5), death(2400.0, 12)])
    plans = [start, replace(start, replicas=with_shares(start.replicas, [3, 5]))]
    together = run_from(plans, entry, happening, judge)
    assert together == [run(entry, happening, plan, judge) for plan in plans]
    assert together[0] != together[1]
