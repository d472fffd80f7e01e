# SPDX-License-Identifier: Apache-2.0
"""The live line that shows a run is alive."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megatron_resihp.events.codec import read_event
from megatron_resihp.events.event import Event
from megatron_resihp.report.live.progress import Progress


def follow(events: Sequence[Event], isatty: bool, columns: int = 200) -> str:
    stream = io.StringIO()
    now = 0.0
    progress = Progress(stream, isatty, clock=lambda: now, columns=lambda: columns)
    for event in events:
        now = event.time
        progress.feed(event)
    progress.close()
    return stream.getvalue()


def test_the_line_says_how_the_run_stands(recovered_run: Any) -> None:
    last = follow(recovered_run.events, isatty=False).splitlines()[-1]
    assert last.startswith("iteration 40/40  loss 3.")
    assert last.endswith("samples/s  4 workers (DP1 PP2 TP2, 1 standby)  epoch 2  recovered 2")


def test_deaths_and_recoveries_have_lines_of_their_own(recovered_run: Any) -> None:
    lines = follow(recovered_run.events, isatty=False).splitlines()
    assert "worker 3 died (exit signal 9), noticed after 12 ms" in lines
    assert "recovered in 480 ms: 1 replica, 3 standbys, 0 bytes moved, resumed after iteration 10" in lines
    assert "iteration 11 done 930 ms after the death" in lines


def test_a_file_gets_a_line_now_and_then(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(40, seconds=1.0)
    lines = follow(run.events, isatty=False).splitlines()
    assert 4 <= len(lines) <= 6, lines
    assert lines[-1].startswith("iteration 40/40"), "the last state is never kept back"


def test_a_terminal_gets_one_line_that_rewrites_itself(recovered_run: Any) -> None:
    text = follow(recovered_run.events, isatty=True)
    rewritten = [part for part in text.split("\r") if part.startswith("iteration") and "/40" in part]
    assert len(rewritten) >= 40
    assert text.count("\n") == 8, "3 deaths, 2 recoveries, 2 first iterations, the end"
    assert text.endswith("\n")


def test_workers_are_named_with_their_machines_and_gpus(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.write("worker_started", 3, host="node7", node=1, local_rank=3, pid=9, gpu=2)
    run.write("worker_started", 5, host="node8", node=2, local_rank=1, pid=9, gpu=None)
    run.die(3, "out-of-memory killer, exit signal 9")
    run.write("worker_failed", failed=5, error="ValueError: no")
    run.write("verdict", **VERDICT)
    run.write("suspicion", workers=[4, 5], speed=0.8, since=7, iteration=9, tested=False)
    lines = follow(run.events, isatty=False).splitlines()
    assert "worker 3 (node7, GPU 2) died (out-of-memory killer, exit signal 9), noticed after 12 ms" in lines
    assert "worker 5 (node8) raised: ValueError: no" in lines
    assert any(line.startswith("iteration 63: worker 5 (node8) has run at 80 %") for line in lines)
    assert any(line.startswith("iteration 9: one of worker 4 and worker 5 (node8) runs at 80 %") for line in lines)


def test_the_line_fits_the_terminal(recovered_run: Any) -> None:
    text = follow(recovered_run.events, isatty=True, columns=40)
    shown = [part.split("\x1b")[0] for part in text.split("\r")]
    assert all(len(line) < 40 for line in shown if line.startswith("iteration") and "after the death" not in line)


def test_between_death_and_recovery_the_line_shows_the_hole(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(1)
    run.die(3)
    assert "7 workers (DP2 PP2 TP2 less 1)" in follow(run.events, isatty=False).splitlines()[-1]


def test_whatever_befalls_a_run_is_told(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.write("drill", action="kill", target=3, iteration=10, point="forward")
    run.write("worker_failed", failed=2, error="ValueError: no")
    run.write("checkpoint", iteration=10, path="saved", seconds=1.5)
    run.write("planned", strategy="joint", planning_s=1.5)
    run.write("planned", strategy="joint", planning_s=2.5, made_ahead=True)
    run.write("planned", strategy="uniform", instead_of="joint", reason="no plan within 30 s")
    run.write("would_change", why="worker 3 at 0.50: iterations 20 % shorter", gain=0.2)
    run.write("proposal", why="worker 3 at 0.50: iterations 20 % shorter", gain=0.2, path="run/proposals/1.json")
    run.write("change_refused", why="asked for by hand: plan.json", reason="this plan is in force already")
    run.write(
        "plan_change", number=1, why="asked for by hand: plan.json", from_digest="0", to_digest="1",
        changes=["replica 0: layers 3, 3 → 2, 4"],
    )  # fmt: skip
    run.write(
        "reconfiguration", number=1, why="asked for", from_epoch=0, to_epoch=1, resumed_iteration=10, stood_still_s=0.25
    )
    run.write("change_measured", number=1, before_s=0.5, after_s=0.25)
    run.write("policy_failed", error="ValueError: no")
    run.write("salvage", iteration=10, path="left", complete=False, missing=[])
    run.finish(3, "no plan fits")
    lines = follow(run.events, isatty=False).splitlines()
    assert lines[1:-1] == [
        "injected: kill 3 at iteration 10 (forward)",
        "worker 2 raised: ValueError: no",
        "checkpoint of iteration 10 written in 1.5 s: saved",
        "planned by joint in 1.5 s",
        "planned ahead by joint in 2.5 s",
        "planned by uniform instead of joint: no plan within 30 s",
        "another plan would pay off: worker 3 at 0.50: iterations 20 % shorter; --resihp-act act would take it",
        "another plan would pay off: worker 3 at 0.50: iterations 20 % shorter; see `resihp apply`: "
        "run/proposals/1.json",
        "change of plan refused (asked for by hand: plan.json): this plan is in force already",
        "change 1 of the plan, asked for by hand: plan.json:",
        "  replica 0: layers 3, 3 → 2, 4",
        "change 1 done after iteration 10; stood still for 250 ms",
        "change 1: iterations took 500 ms before it, and take 250 ms now",
        "the policy gave up, training goes on: ValueError: no",
        "no plan is left; survivors wrote INCOMPLETE state of iteration 10: left",
        "run ended with exit code 3: no plan fits",
    ]


def test_what_survivors_have_saved_whole_has_a_command_to_go_on_from_it(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.write("salvage", iteration=10, path="/runs/7/emergency_checkpoint/iter_0000010/worker_1.pt", complete=True)
    [line] = [each for each in follow(run.events, isatty=False).splitlines() if "survivors" in each]
    assert line.startswith("no plan is left; survivors wrote all state of iteration 10: /runs/7/")
    assert line.endswith("; go on from it with resihp emergency /runs/7")


def test_an_event_of_a_later_version_is_passed_over() -> None:
    assert follow([read_event({"event": "straggler", "time": 0.0})], isatty=False) == ""


def test_a_recovery_is_told_once_however_many_workers_report_it(recovered_run: Any) -> None:
    lines = follow(recovered_run.events, isatty=False).splitlines()
    assert sum("after the death" in line for line in lines) == 2


@pytest.mark.parametrize("isatty", [True, False])
def test_a_closed_stream_does_not_end_the_run(synthetic_run: Callable[..., Any], isatty: bool) -> None:
    stream = io.StringIO()
    progress = Progress(stream, isatty)
    stream.close()
    for event in synthetic_run().events:
        progress.feed(event)
    progress.close()


VERDICT = {
    "kind": "compute", "change": "onset", "workers": [5], "speed": 0.804, "speed_low": 0.79, "speed_high": 0.82,
    "since": 61, "iteration": 63,
}  # fmt: skip


def test_verdicts_are_told_in_words(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.write("verdict", **VERDICT)
    run.write("verdict", **VERDICT | {"kind": "link", "workers": [1, 3], "speed_low": None})
    run.write("verdict", **VERDICT | {"change": "recovery", "since": 90, "iteration": 93})
    run.write("notice", what="data", workers=[0, 2], seconds=4.0, iteration=95)
    run.write("notice", what="data", workers=[1], seconds=0.042, iteration=96, times=24, total_s=1.008, longest_s=0.05)
    stall = {"iteration": 96, "usual_s": 0.4}
    run.write("stall", **stall, seconds=1.5, over=False, meanwhile=None)
    run.write("stall", **stall, seconds=4.5, over=False, meanwhile="evaluation")
    run.write("stall", **stall, seconds=26.0, over=True, meanwhile=None)
    run.write("detection_failed", part="verdicts", error="RuntimeError: no judgement")
    lines = follow(run.events, isatty=False).splitlines()
    link = "the link between workers 1 and 3"
    assert "iteration 63: worker 5 has run at 80 % (79 to 82 %) of its healthy speed since iteration 61" in lines
    assert f"iteration 63: {link} has run at 80 % of its healthy speed since iteration 61" in lines
    assert "iteration 93: worker 5 has been back at full speed since iteration 90" in lines
    assert "iteration 95: data held up worker 0 and worker 2 for 4.0 s" in lines
    assert "iteration 96: data held up worker 1; 24 iterations so far, for 1.0 s in all, 50 ms at most" in lines
    stalled = "after iteration 96; one usually takes 400 ms"
    assert f"no iteration finished for 1.5 s {stalled}" in lines
    assert f"no iteration finished for 4.5 s {stalled}; evaluation under way or due" in lines
    assert "iteration 97 done after 26.0 s; one usually takes 400 ms" in lines
    assert "the detector's verdicts gave up, training goes on: RuntimeError: no judgement" in lines
