# SPDX-License-Identifier: Apache-2.0
"""What an engineer reads at three in the morning."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

from megatron_resihp.report.console import WIDTH, console_for
from megatron_resihp.report.run.run_summary import RunSummary
from megatron_resihp.report.run.shape import describe, layers, micro_batches
from megatron_resihp.report.run.standing import Launcher, with_standing
from megatron_resihp.report.run.summary import summarize, with_reference
from megatron_resihp.report.run.terminal import DEATHS, render
from megatron_resihp.report.words import duration, size


def page(summary: Any) -> str:
    stream = io.StringIO()
    render(summary, console_for(stream))
    return stream.getvalue()


def test_the_headline_says_it_all(recovered_run: Any) -> None:
    headline = page(summarize(recovered_run.events)).splitlines()[0]
    assert headline == "Reached iteration 40 of 40; 2 recoveries; 3 workers dead; no sample lost or repeated"


def test_deaths_and_recoveries_are_tables(recovered_run: Any) -> None:
    lines = page(summarize(recovered_run.events)).splitlines()
    death = next(line for line in lines if "exit signal 9" in line)
    assert death.split()[0] == "3"
    assert death.split()[-1] == "12"
    recovery = next(line for line in lines if line.startswith("1 -> 2") and "MiB" in line)
    assert "5, 6" in recovery
    assert "2,250" in recovery
    assert "2.2 MiB" in recovery
    assert "35.8 -> 35." in recovery
    assert any("rebuild" in line and "abort" in line for line in lines)


def test_the_page_is_100_columns_wide_and_plain_where_there_is_no_terminal(recovered_run: Any) -> None:
    text = page(summarize(recovered_run.events))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "\x1b" not in text


def test_a_failed_run_says_so_first(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(12)
    run.die(3)
    run.write("salvage", iteration=12, path="left-behind", complete=False, missing=[[1, 0]])
    run.finish(1, "no plan fits: stage 1 is gone")
    text = page(summarize(run.events))
    assert text.startswith("FAILED (exit 1) at iteration 12 of 40; no recovery; 1 worker dead; no sample lost")
    assert "no plan fits: stage 1 is gone" in text
    assert "INCOMPLETE, missing stage 1 TP rank 0: left-behind" in text


def test_what_survivors_have_saved_whole_has_a_command_to_go_on_from_it(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(12)
    run.write("salvage", iteration=12, path="/runs/7/emergency_checkpoint/iter_0000012/worker_1.pt", complete=True)
    run.finish(69, "no plan fits")
    text = " ".join(page(summarize(run.events)).split())
    assert "all state: /runs/7/emergency_checkpoint/iter_0000012/worker_1.pt" in text
    assert "; go on from it with resihp emergency /runs/7" in text


@pytest.mark.parametrize(
    ("launcher", "later_s", "begins"),
    [
        (Launcher.ANSWERS, 0.4, "Running (last step 400 ms ago): iteration 12 of 40;"),
        (Launcher.ANSWERS, 26.0, "Running (last step 26.0 s ago): iteration 12 of 40;"),
        (Launcher.SILENT, 26.0, "STALLED (last step 26.0 s ago, usually one takes 1"),
        (Launcher.GONE, 0.4, "ENDED WITHOUT A WORD (last step 400 ms ago): iteration 12 of 40;"),
        (Launcher.AWAITED, 26.0, "WITHOUT A COORDINATOR, waiting for another (last step 26.0 s ago): iteration 12 "),
        (Launcher.AWAITED, 130.0, "ENDED WITHOUT A WORD (last step 2 min 10 s ago): iteration 12 of 40;"),
        (Launcher.UNKNOWN, 0.4, "Running (last step 400 ms ago): iteration 12 of 40;"),
        (Launcher.UNKNOWN, 26.0, "Running or ended, its launcher can't be reached from here (last step 26.0 s ago): "),
    ],
)
def test_a_run_without_an_end_runs_or_is_stalled_or_has_ended(
    synthetic_run: Callable[..., Any], launcher: Launcher, later_s: float, begins: str
) -> None:
    run = synthetic_run()
    run.step(12, seconds=1.0)
    summary = with_standing(summarize(run.events), launcher, run.now + later_s)
    assert page(summary).startswith(begins)
    assert RunSummary.from_json(summary.to_json()) == summary


@pytest.mark.parametrize("over", [False, True])
def test_a_run_is_stalled_when_its_launcher_says_so(synthetic_run: Callable[..., Any], over: bool) -> None:
    """It does not where a checkpoint is written, which may take long."""
    run = synthetic_run()
    run.step(12, seconds=1.0)
    run.write("stall", iteration=12, seconds=3.0, usual_s=1.0, over=False)
    if over:
        run.write("stall", iteration=12, seconds=9.0, usual_s=1.0, over=True)
        run.step(1, seconds=1.0)
    summary = with_standing(summarize(run.events), Launcher.ANSWERS, run.now + 26.0)
    assert page(summary).startswith("Running (last step " if over else "STALLED (last step 26.0 s ago, usually one ")


def test_a_run_that_has_done_no_iteration_yet_runs_as_long_as_its_launcher_answers(
    synthetic_run: Callable[..., Any],
) -> None:
    run = synthetic_run()
    summary = with_standing(summarize(run.events), Launcher.ANSWERS, run.now + 90)
    assert page(summary).startswith("Running (last event 90.0 s ago): iteration 0 of 40;")


@pytest.mark.parametrize(("saved_at", "ends"), [(12, "saved"), (10, "not saved"), (None, "not saved")])
def test_a_run_that_was_stopped_did_not_fail(
    synthetic_run: Callable[..., Any], saved_at: int | None, ends: str
) -> None:
    run = synthetic_run()
    run.step(12)
    if saved_at is not None:
        run.write("checkpoint", iteration=saved_at, path="saved")
    run.finish(143, "stopped by signal 15")
    text = page(summarize(run.events))
    assert text.startswith(f"STOPPED at iteration 12 of 40, {ends}; no recovery;")
    assert "reason: stopped by signal 15" in text


def test_a_run_that_was_killed_as_it_stopped_was_not_stopped_in_order(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(12)
    run.finish(143, "killed by a second SIGTERM")
    assert page(summarize(run.events)).startswith("FAILED (exit 143) at iteration 12 of 40;")


def test_who_was_lost_in_a_damaged_log_cannot_be_told(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(40)
    run.finish()
    whole = summarize(run.events)
    of_two = [line for line in run.lines if line["event"] == "samples" and line["iteration"] == 7]
    run.lines.remove(of_two[0])
    assert "samples: 8 LOST" in page(summarize(run.events)), "nothing is wrong with this log"
    page_of_damaged = page(summarize(run.events, 1, damaged=True))
    assert page_of_damaged.startswith("Reached iteration 40 of 40; ")
    assert "; samples: can't tell: log damaged\n" in page_of_damaged
    for line in of_two[1:]:
        run.lines.remove(line)
    lacking = page(summarize(run.events))
    assert "; samples: can't tell: log damaged\n" in lacking
    assert "the event log has gaps at iteration 7\n" in lacking
    assert "no sample lost or repeated" in page(whole)


def test_workers_that_came_back_are_in_the_headline(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(4)
    run.die(3)
    run.recover([3], replicas=[[[4, 5], [6, 7]]], standbys=[0, 1, 2], seconds=0.5)
    for worker in (11, 19):
        run.write("worker_waiting", waiting=worker, place=3)
    run.recover([3], replicas=[[[0, 1], [2, 11]], [[4, 5], [6, 7]]], standbys=[], seconds=0.5)
    run.step(36)
    run.finish()
    assert "; 1 worker dead; 1 came back; " in page(summarize(run.events))
    assert "8 working (DP2 PP2 TP2) -> 8 working (DP2 PP2 TP2)" in page(summarize(run.events))


def test_workers_of_a_node_that_joined_are_in_the_headline(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.step(4)
    for worker in (8, 9):
        run.write("worker_waiting", waiting=worker, place=worker)
    run.change("workers 8, 9 joined", [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]])
    run.step(36)
    run.finish()
    assert "; 2 workers joined; 1 voluntary change of plan; " in page(summarize(run.events))


def test_changes_by_choice_are_told(changed_run: Any) -> None:
    lines = page(summarize(changed_run.events)).splitlines()
    assert "; 1 worker dead; 1 came back; 3 voluntary changes of plan; no sample" in lines[0]
    plans = lines[next(n for n, line in enumerate(lines) if line.startswith("Plans (")) :]
    chosen = next(line for line in plans if line.strip().startswith("20 "))
    assert {"DP2", "3+3,", "4+2", "5+3", "200"} <= set(chosen.split())


def test_lost_and_repeated_samples_are_in_the_headline(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run(train_iters=2)
    run.step(1)
    run.feed(2, ranges=[[8, 23]])
    run.write("iteration", iteration=2)
    run.finish()
    headline = page(summarize(run.events)).splitlines()[0]
    assert headline.endswith("samples: 8 LOST, 8 REPEATED and 8 OUT OF PLACE")


def test_the_dead_are_named_with_their_machines_and_gpus(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.write("worker_started", 3, host="node7", node=1, local_rank=3, pid=9, gpu=2, gpu_uuid="GPU-1")
    run.die(3)
    run.die(4)
    run.write("worker_failed", failed=3, error="ValueError: no")
    summary = summarize(run.events)
    lines = page(summary).splitlines()
    table = lines[lines.index(DEATHS) :]
    assert any(line.strip().startswith("3   node7, GPU 2 ") for line in table)
    assert any(line.strip().startswith("4   node 0 ") for line in table)
    assert "  worker 3 (node7, GPU 2) raised: ValueError: no" in lines
    assert RunSummary.from_json(summary.to_json()) == summary


def test_causes_are_printed_as_they_are(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.die(3, "[/red] exit [code] 1")
    assert "[/red] exit [code] 1" in page(summarize(run.events))


def test_a_long_table_shows_its_end(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    for _ in range(30):
        run.step(1)
        run.die(3)
        run.recover([3], run.replicas, [])
    text = page(summarize(run.events))
    assert "the last 20 of 30; --json has them all" in text
    assert "29 -> 30" in text
    assert "9 -> 10 " not in text


def test_the_comparison_with_a_reference(recovered_run: Any, synthetic_run: Callable[..., Any]) -> None:
    summary = summarize(recovered_run.events)
    assert "reference run: identical over 40 iterations" in page(with_reference(summary, summary))
    empty = summarize(synthetic_run().events)
    assert "no iteration in common" in page(with_reference(summary, empty))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0004, "0.4 ms"), (0.48, "480 ms"), (12.34, "12.3 s"), (245, "4 min 5 s"), (12000, "3 h 20 min")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("number", "words"), [(None, "-"), (0, "0 bytes"), (1500, "1.5 KiB"), (2.5e12, "2.3 TiB"), (80 << 30, "80.0 GiB")]
)
def test_sizes(number: int | None, words: str) -> None:
    assert size(number) == words


def test_shapes_of_unlike_replicas() -> None:
    even = {"stages": [[0, 1], [2, 3]]}
    uneven = {"stages": [[4, 5], [6]]}
    assert describe({"replicas": [even, uneven, even]}) == "DP3: 2x PP2 TP2, 1x PP2 TP2/1"
    assert describe({"replicas": [uneven]}) == "DP1 PP2 TP2/1"
    assert describe({"replicas": [even] * 4, "context_parallel": 2}) == "DP2 CP2 PP2 TP2"
    unlike = {"replicas": [even] * 7, "context_parallel": 4, "context_groups": [4, 2, 1]}
    assert describe(unlike) == "DP3 CP4/2/1 PP2 TP2"
    assert describe({"replicas": [even] * 4, "expert_parallel": 2}) == "DP4 EP2 PP2 TP2"
    dealt = {"replicas": [even] * 3, "expert_parallel": 3, "uneven_experts": 8}
    assert describe(dealt) == "DP3 EP3 (3 or 2 experts each) PP2 TP2"


def test_layers_and_micro_batches_in_words() -> None:
    own = [[0, 0, 3], [1, 3, 6]]
    chunked = {"micro_batches": [0, 2, 4], "chunks": [[0, 0, 1], [1, 1, 3], [0, 3, 5], [1, 5, 6]]}
    plain = {"micro_batches": [1, 3]}
    assert layers({"replicas": [plain, plain]}, own) == "3+3"
    assert layers({"replicas": [chunked, plain]}, own) == "3+3" and layers({"replicas": [plain]}, []) == ""
    assert layers({"replicas": [{**chunked, "chunks": [[0, 0, 4], [1, 4, 6]]}, plain]}, own) == "4+2, 3+3"
    assert micro_batches({"replicas": [chunked, plain]}) == "3+2"
    moved = [[1, 0, 0], [1, 1, 0]]
    assert micro_batches({"replicas": [chunked, plain], "migrations": moved}) == "3+2, 1 shared"
    assert micro_batches({"replicas": [chunked] * 3 + [plain] * 3}) == "3x 3, 3x 2"


def test_what_the_detector_found_and_left_out(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    seen = {"iterations": 200, "records": 1600, "faults": {"unpaired": 12}, "warm": True, "held_up_s": {"data": 12.3}}
    run.write("stall", iteration=7, seconds=4.5, usual_s=0.4, over=False)
    run.write("stall", iteration=7, seconds=26.0, usual_s=0.4, over=True)
    run.write("stall", iteration=9, seconds=12.0, usual_s=0.4, over=False, meanwhile="recovery")
    run.write("detection", **seen)
    text = page(summarize(run.events))
    assert "no worker or link was found slow (200 iterations judged)" in text
    assert "measurements left out: 12 unpaired" in text
    assert text.count("stood still") == 1 and "stood still after iteration 7 for 26.0 s, usually 400 ms" in text
    assert "data held up workers for 12.3 s in all" in text
    run.write(
        "verdict", kind="compute", change="onset", workers=[5], speed=0.8, since=61, iteration=63, evidence={"z": 9.0}
    )
    summary = summarize(run.events)
    assert "iteration 63: worker 5 has run at 80 % of its healthy speed since iteration 61" in page(summary)
    assert RunSummary.from_json(summary.to_json()) == summary
