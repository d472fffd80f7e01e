# SPDX-License-Identifier: Apache-2.0
"""The summary of a run says what its events say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_resihp.events.log import read_events
from megatron_resihp.events.training import Iteration, Samples
from megatron_resihp.report.run.summary import RunSummary, compare, summarize, summarize_log, with_reference


def test_a_run_without_failures(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run(train_iters=5)
    run.step(5)
    run.finish()
    summary = summarize(run.events)
    assert (summary.completed, summary.exit_code, summary.iterations) == (True, 0, 5)
    assert (summary.recoveries, summary.deaths) == ((), ())
    assert summary.workers_at_start == summary.workers_at_end
    assert (summary.samples_consumed, summary.samples_lost, summary.samples_applied_twice) == (80, 0, 0)
    assert list(summary.loss) == list(summary.grad_norm) == [1, 2, 3, 4, 5]


def test_deaths_say_who_when_and_how_it_was_noticed(recovered_run: Any) -> None:
    deaths = summarize(recovered_run.events).deaths
    assert [(death.worker, death.node, death.cause) for death in deaths] == [
        (3, 0, "exit signal 9"),
        (5, 1, "node lost"),
        (6, 1, "node lost"),
    ]
    assert [death.iteration for death in deaths] == [10, 25, 25]
    assert [death.noticed_ms for death in deaths] == pytest.approx([12, 800, 0], abs=0.01)


def test_recoveries_say_what_they_took(recovered_run: Any) -> None:
    first, second = summarize(recovered_run.events).recoveries
    assert (first.from_epoch, first.to_epoch, first.resumed_iteration) == (0, 1, 10)
    assert [death.worker for death in second.dead] == [5, 6]
    assert (first.total_s, second.total_s) == pytest.approx((0.93, 2.25))
    assert first.resumed_s == pytest.approx(0.480)
    assert (second.bytes_moved, second.steps_redone) == (2_345_678, 1)


def test_a_phase_takes_as_long_as_its_slowest_worker(recovered_run: Any) -> None:
    phases = summarize(recovered_run.events).recoveries[0].phases
    assert list(phases) == ["notice", "abort", "agree", "rebuild", "migrate", "data", "ready"]
    assert phases["rebuild"] == pytest.approx(0.468 * 0.5 * 1.1)


def test_plans_in_force_say_why_they_were_taken(changed_run: Any) -> None:
    plans = summarize(changed_run.events).plans
    assert [(plan.after, plan.why, plan.by_choice) for plan in plans[:4]] == [
        (0, "the start", False),
        (5, "worker 3 died", False),
        (10, "worker 11 came back", True),
        (20, "worker 6 at 0.50: iterations 30 % shorter", True),
    ]
    assert [(plan.shape, plan.layers, plan.micro_batches) for plan in plans[1:4]] == [
        ("DP2: 1x PP2 TP2/1, 1x PP2 TP2", "3+3", "0+0"),
        ("DP2 PP2 TP2", "3+3", "0+0"),
        ("DP2 PP2 TP2", "3+3, 4+2", "5+3"),
    ]
    assert [plan.like_the_first for plan in plans] == [True, False, True, False, True]
    assert [plan.stood_still_s for plan in plans] == [None, None, 0.2, 0.2, 0.2]


def test_a_plan_that_broke_before_anybody_went_on_was_not_in_force(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(1)
    run.epoch += 1
    run.write("epoch_started", plan=run.plan(), digest="d1")
    run.die(3)
    run.recover([3], [[[4, 5], [6, 7]]], [0, 1, 2])
    assert [plan.epoch for plan in summarize(run.events).plans] == [0, 2]


def test_throughput_is_taken_from_settled_iterations(recovered_run: Any) -> None:
    first, second = summarize(recovered_run.events).recoveries
    assert first.samples_per_second_before == pytest.approx(16 / 0.25, rel=0.04)
    assert first.samples_per_second_after == pytest.approx(16 / 0.45, rel=0.04)
    assert second.samples_per_second_before == pytest.approx(16 / 0.45, rel=0.04)


def test_the_first_iteration_after_a_recovery_is_left_out_of_the_throughput(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(3)
    run.die(3)
    run.recover([3], run.replicas[1:], [0, 1, 2])
    run.step(1, duration_s=100.0)
    assert summarize(run.events).recoveries[0].samples_per_second_after is None
    run.step(3, duration_s=1.0)
    assert summarize(run.events).recoveries[0].samples_per_second_after == 16.0


def test_a_recovery_that_broke_before_its_first_iteration_has_no_total(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(3)
    run.die(3)
    run.recover([3], [[[4, 5], [6, 7]]], [0, 1, 2])
    run.died_at = []
    run.die(4)
    run.recover([4], [[[0, 1], [2, 7]]], [5, 6])
    run.step(1)
    run.first_step(1.5)
    first, second = summarize(run.events).recoveries
    assert first.total_s is None
    assert second.total_s == pytest.approx(1.5)
    assert [death.worker for death in first.dead + second.dead] == [3, 4]
    assert second.samples_per_second_before == pytest.approx(64, rel=0.04), "that of the last epoch that got anywhere"


def test_without_a_first_step_event_the_total_is_taken_from_the_iteration(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(3)
    died_at = run.now
    run.die(3)
    run.recover([3], [[[4, 5], [6, 7]]], [0, 1, 2])
    run.step(2)
    ended = [event.time for event in run.events if isinstance(event, Iteration)][3]
    assert summarize(run.events).recoveries[0].total_s == pytest.approx(ended - died_at)


def test_a_worker_that_came_back_can_die_twice(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    for _ in range(2):
        run.step(3)
        run.die(3)
        run.recover([3], run.replicas, [])
    run.step(1)
    summary = summarize(run.events)
    assert [death.iteration for death in summary.deaths] == [3, 6]
    assert [len(recovery.dead) for recovery in summary.recoveries] == [1, 1]


def test_one_death_that_was_noticed_twice_is_one_death(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(1)
    run.die(3)
    run.die(3, "connection lost")
    assert [death.cause for death in summarize(run.events).deaths] == ["exit signal 9"]


def test_the_coordinators_record_stands_in_for_a_dead_reporter(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(4)
    run.feed(5)
    run.iteration = 5
    run.die(7)
    run.recover([7], [[[0, 1], [2, 3]]], [4, 5, 6], redo=False)
    run.step(1)
    summary = summarize(run.events)
    assert summary.iterations == 6
    assert summary.loss[5] == 1.0
    assert (summary.samples_consumed, summary.samples_lost, summary.samples_applied_twice) == (96, 0, 0)


def test_an_attempt_that_was_not_agreed_applied_nothing(recovered_run: Any) -> None:
    fed = [each for each in recovered_run.events if isinstance(each, Samples) and each.iteration == 11]
    assert {event.epoch for event in fed} == {0, 1}, "the run has an attempt that broke"
    summary = summarize(recovered_run.events)
    assert (summary.samples_consumed, summary.samples_applied_twice) == (640, 0)


def test_workers_at_the_end_are_those_still_alive(recovered_run: Any) -> None:
    start, end = summarize(recovered_run.events).workers_at_start, summarize(recovered_run.events).workers_at_end
    assert start is not None
    assert end is not None
    assert (start.working, start.standbys, start.shape) == (8, 0, "DP2 PP2 TP2")
    assert (end.working, end.standbys, end.shape) == (4, 1, "DP1 PP2 TP2")


def test_a_death_without_a_plan_after_it_leaves_fewer_workers(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(1)
    run.die(3)
    run.write("salvage", iteration=1, path="left", complete=False, missing=[[0, 1]])
    run.finish(1, "no plan fits")
    summary = summarize(run.events)
    assert summary.workers_at_end is not None
    assert summary.workers_at_end.working == 7
    assert (summary.completed, summary.exit_code, summary.reason) == (False, 1, "no plan fits")
    assert summary.salvages[0].missing == ((0, 1),)


def test_a_log_without_an_end_is_not_a_completed_run(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(2)
    summary = summarize(run.events)
    assert (summary.completed, summary.exit_code, summary.iterations) == (False, None, 2)


def test_of_several_runs_in_one_log_the_last_counts(recovered_run: Any, synthetic_run: Callable[..., Any]) -> None:
    again = synthetic_run(first_iteration=40)
    again.step(2)
    summary = summarize(recovered_run.events + again.events)
    assert (summary.iterations, summary.deaths) == (42, ())
    assert (summary.samples_consumed, summary.samples_lost) == (32, 0)


def test_a_run_that_goes_on_from_a_checkpoint_lost_nothing(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run(first_iteration=10)
    run.step(5)
    summary = summarize(run.events)
    assert summary.job is not None
    assert (summary.job.first_iteration, summary.samples_consumed, summary.samples_lost) == (10, 80, 0)


def test_events_that_cannot_be_used_are_counted_by_what_is_wrong(
    synthetic_run: Callable[..., Any], tmp_path: Path
) -> None:
    run = synthetic_run()
    run.step(2)
    run.write("iteration", loss={})
    run.write("iteration", loss={})
    run.write("of_a_later_version", anything=1)
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in run.lines))
    summary = summarize_log(read_events(path))
    assert summary.ignored_events == {"iteration lacks iteration": 2}
    assert summary.iterations == 2


def test_no_events_make_an_empty_summary() -> None:
    assert summarize([]) == RunSummary(completed=False)


def test_plans_go_to_json_and_back(changed_run: Any) -> None:
    summary = summarize(changed_run.events)
    assert RunSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary


def test_json_and_back(recovered_run: Any) -> None:
    recovered_run.write("drill", action="kill", target=3, iteration=10, point="forward")
    recovered_run.write("salvage", iteration=40, path="left", complete=False, missing=[[0, 1]])
    recovered_run.write("worker_failed", failed=2, error="ValueError: no")
    recovered_run.step(1, grad_norm="inf", skipped=True)
    summary = summarize(recovered_run.events)
    summary = with_reference(summary, summary)
    assert RunSummary.from_json(json.loads(json.dumps(summary.to_json(), allow_nan=False))) == summary
    assert (summary.grad_norm[41], summary.skipped_iterations) == (math.inf, (41,))


@pytest.mark.parametrize(
    ("loss", "reference", "difference"),
    [
        ({1: 1.0, 2: 2.0}, {1: 1.0, 2: 2.0}, 0.0),
        ({1: 1.1, 2: 2.0}, {1: 1.0, 2: 2.5}, 0.2),
        ({1: 1.0, 2: 9.0}, {1: 1.0, 3: 5.0}, 0.0),
        ({1: 1.0}, {2: 1.0}, None),
        ({1: math.nan}, {1: 1.0}, math.inf),
        ({1: math.nan}, {1: math.nan}, 0.0),
        ({1: 1.0}, {1: 0.0}, math.inf),
    ],
)
def test_compare(loss: dict[int, float], reference: dict[int, float], difference: float | None) -> None:
    assert compare(loss, reference) == (None if difference is None else pytest.approx(difference))
