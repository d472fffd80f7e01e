# SPDX-License-Identifier: Apache-2.0
"""`resihp detect`: a run's records or a table in; verdicts, a file and a picture out; bad input in one line."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_resihp.cli import main
from megatron_resihp.config import ConfigError, ResihpConfig
from megatron_resihp.detector.input.counters import Counters
from megatron_resihp.detector.input.layout import layout_of
from megatron_resihp.detector.input.recording import FILE_NAME, Recorder, Recording
from megatron_resihp.detector.input.records import OP, SPAN, TRANSFER, WORKLOAD, IterationRecord, OpKind, SpanKind
from megatron_resihp.detector.input.replay import steps_of
from megatron_resihp.detector.input.wire import pack
from megatron_resihp.detector.judging.learned import save
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.plan.parallel_plan import ParallelPlan, Replica

ITERATIONS, ONSET, SLOWNESS = 90, 70, 1.25


def durations(random: np.random.Generator, iteration: int, workers: int, slow: int | None) -> tuple[Any, Any]:
    """Seconds and Σ l² of each worker; documents come in two regimes."""
    squares = random.uniform(1e6, 4e6, workers) if iteration % 40 < 20 else random.uniform(5e6, 3e7, workers)
    seconds = (0.2 + 1e-8 * squares) * (1 + 0.01 * random.standard_normal(workers))
    if slow is not None and iteration >= ONSET:
        seconds[slow] *= SLOWNESS
    return seconds, squares


def write_table(path: Path, slow: int | None, with_workers: bool = True) -> Path:
    random = np.random.default_rng(0)
    lines: list[dict[str, Any]] = []
    for iteration in range(1, ITERATIONS + 1):
        seconds, squares = durations(random, iteration, 6, slow)
        rows = [{"iteration": iteration, "worker": w, "seconds": seconds[w], "tokens": 8192, "squares": squares[w]}
                for w in range(6)]  # fmt: skip
        if not with_workers:
            rows = [{"seconds": seconds[3], "tokens": 8192, "squares": squares[3]}]
        lines += rows
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    else:
        path.write_text("\n".join([",".join(lines[0]), *(",".join(map(str, row.values())) for row in lines)]) + "\n")
    return path


def detect(*arguments: Any) -> int:
    return main(["detect", *map(str, arguments)])


def verdicts_in(directory: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((directory / "verdicts.json").read_text())["verdicts"]
    return found


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_slow_worker_in_a_table_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    table = write_table(tmp_path / f"times.{suffix}", slow=2)
    assert detect(table) == 0
    (verdict,) = verdicts_in(tmp_path)
    assert (verdict["workers"], verdict["kind"], verdict["change"]) == ([2], "compute", "onset")
    assert ONSET <= verdict["iteration"] <= ONSET + 10
    assert verdict["speed"] == pytest.approx(1 / SLOWNESS, abs=0.03)
    assert "worker 2" in capsys.readouterr().out
    assert (tmp_path / "detection.png").read_bytes().startswith(b"\x89PNG")


def test_long_documents_are_nobodys_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert detect(write_table(tmp_path / "times.csv", slow=None)) == 0
    assert verdicts_in(tmp_path) == []
    assert "nobody is slow" in capsys.readouterr().out


def test_without_workers_somebody_is_slow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert detect(write_table(tmp_path / "times.csv", slow=3, with_workers=False)) == 0
    (verdict,) = verdicts_in(tmp_path)
    assert verdict["workers"] == []
    assert "some worker" in capsys.readouterr().out


def test_a_wild_series_is_no_proof_of_health(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = np.exp(0.4 * np.random.default_rng(0).standard_normal(60))
    (tmp_path / "times.csv").write_text("\n".join(["seconds", *map(str, times)]) + "\n")
    assert detect(tmp_path / "times.csv") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "insufficient evidence" in out
    assert "nobody is slow" not in out
    assert json.loads((tmp_path / "verdicts.json").read_text())["conclusion"] == "insufficient evidence"


def test_a_restart_and_a_new_workload_are_told_in_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{number},{0.5 + 0.001 * (number % 5)},8192" for number in (*range(1, 61), *range(41, 81))]
    rows += [f"{number},{1.0 + 0.002 * (number % 5)},16384" for number in range(81, 121)]
    (tmp_path / "times.csv").write_text("\n".join(["iteration,seconds,tokens", *rows]) + "\n")
    assert detect(tmp_path / "times.csv") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("the numbering starts again at row 61:") == 1
    assert "unknown, not slow:" in out
    assert "nobody is slow" in out


def test_lines_that_cannot_be_used_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_table(tmp_path / "times.csv", slow=None)
    with table.open("a") as file:
        file.write("91,0,nan,1,1\n91,1,-3,1,1\n91,x,0.2,1,1\n91,3\n")
    assert detect(table, "--out", tmp_path / "elsewhere") == 0
    out = capsys.readouterr().out
    assert out.count("left out: line") == 4
    assert len(json.loads((tmp_path / "elsewhere" / "verdicts.json").read_text())["left_out"]) == 4


def record_run(
    run_dir: Path,
    slow: int | None,
    damage: Callable[[bytes], bytes] = bytes,
    iterations: int = ITERATIONS,
    onset: int = ONSET,
    **job: Any,
) -> Path:
    """A recorded job of two replicas of two stages."""
    replicas = (Replica(((0,), (1,)), (0, 2, 4, 6)), Replica(((2,), (3,)), (1, 3, 5, 7)))
    layout = layout_of(ParallelPlan(replicas), 0, dict.fromkeys(range(4), 0))
    run_dir.mkdir()
    recorder = Recorder(run_dir / FILE_NAME, {"train_iters": iterations, **job})
    recorder.layout(layout)
    random = np.random.default_rng(0)
    for iteration in range(1, iterations + 1):
        squares = random.uniform(1e6, 3e7, 8)
        for worker in range(4):
            is_slow = worker == slow and iteration >= onset
            recorder.message(pack(worker_record(random, worker, iteration, squares, is_slow)))
    recorder.close()
    (run_dir / FILE_NAME).write_bytes(damage((run_dir / FILE_NAME).read_bytes()))
    return run_dir


def worker_record(
    random: np.random.Generator, worker: int, iteration: int, squares: np.ndarray, slow: bool
) -> IterationRecord:
    """One worker's record; at iteration 80 all wait for data."""
    indices = np.arange(4) * 2 + worker // 2
    seconds = (0.01 + 1e-9 * squares[indices]) * (1 + worker % 2)
    ops = np.zeros(8, OP)
    ops["kind"], ops["micro_batch"] = np.repeat([OpKind.F, OpKind.B], 4), np.tile(indices, 2)
    factor = SLOWNESS if slow else 1.0
    length = np.concatenate([seconds, 2 * seconds]) * factor * (1 + 0.01 * random.standard_normal(8))
    ops["start"] = iteration + 0.1 * np.arange(8)
    ops["end"], ops["waited"] = ops["start"] + length, np.nan
    workload = np.zeros(4, WORKLOAD)
    workload["micro_batch"], workload["tokens"], workload["squares"] = indices, 8192, squares[indices]
    start = float(iteration)
    spans = np.array([(SpanKind.DATA, start, start + (0.5 if iteration == 80 else 0.01))], SPAN)
    return IterationRecord(0, iteration, worker, 0, start, start + 0.9, ops, np.zeros(0, TRANSFER), workload, spans)


def test_a_recorded_run_is_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = record_run(tmp_path / "run", slow=1)
    assert detect(run_dir) == 0
    (verdict,) = verdicts_in(run_dir)
    assert verdict["workers"] == [1]
    out = " ".join(capsys.readouterr().out.split())
    assert "90 iterations of 4 workers" in out
    assert "data held up 1 iteration, by up to 0.5 s" in out


def test_a_run_that_began_with_anothers_costs_is_judged_with_them_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is too short to learn from, and the job itself judged it."""
    costs = tmp_path / "cost_model.json"
    steps = list(steps_of(Recording(record_run(tmp_path / "before", slow=None) / FILE_NAME), Counters()))
    monitor = Monitor(steps[0])
    for step in steps[1:]:
        monitor.observe(step)
    save(monitor.learned(), costs)
    run_dir = record_run(tmp_path / "run", slow=1, iterations=40, onset=25, cost_model=str(costs))
    assert detect(run_dir) == 0
    (verdict,) = verdicts_in(run_dir)
    assert verdict["workers"] == [1] and 25 <= verdict["iteration"] <= 30
    costs.unlink()
    capsys.readouterr()
    assert detect(run_dir) == 2
    assert "holds 40 iterations, and the first 52 are learned from" in capsys.readouterr().err


def test_a_damaged_recording_is_judged_as_far_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def damage(data: bytes) -> bytes:
        middle = len(data) // 2
        return data[:middle] + b"\0\0\0\0" + data[middle + 4 : -7]

    run_dir = record_run(tmp_path / "run", slow=None, damage=damage)
    assert detect(run_dir) == 0
    assert verdicts_in(run_dir) == []
    out = capsys.readouterr().out
    assert "damaged" in out and "cut off" in out


def test_without_arguments_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert detect() == 2
    out = capsys.readouterr().out
    assert "RUN_DIR|FILE" in out and "iteration,worker,seconds" in out


def bad_source(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / {"suffix": "times.txt", "broken": "run"}.get(kind, "times.csv")
    match kind:
        case "empty directory":
            return tmp_path
        case "broken":
            path.mkdir()
            (path / FILE_NAME).write_bytes(b"not a recording")
        case "columns":
            path.write_text("time,node\n1,2\n")
        case "words":
            path.write_text("seconds\nfast\nslow\n")
        case "short":
            path.write_text("seconds\n" + "0.5\n" * 8)
        case "binary":
            path.write_bytes(bytes(range(256)))
        case "suffix" | "empty":
            path.write_text("")
    return path


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "times.csv does not exist; give a run directory, or a .csv or .jsonl file"),
        ("empty directory", f"has no {FILE_NAME}"),
        ("broken", "not a recording"),
        ("suffix", "neither a directory nor"),
        ("empty", "no column `seconds`"),
        ("columns", "its first line holds: time, node"),
        ("words", "line 2: seconds is 'fast', not a number"),
        ("short", "8 iterations, too few to judge any; give at least 10"),
        ("binary", "not a text table"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, says: str) -> None:
    assert detect(bad_source(tmp_path, kind)) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.startswith("resihp: ") and captured.err.count("\n") == 1
    assert not captured.out


@pytest.mark.parametrize("option", [("--warm-up", "1"), ("--false-alarms-per-job", "2")])
def test_options_out_of_range_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    assert detect(write_table(tmp_path / "times.csv", slow=None), *option) == 2
    assert option[0] in capsys.readouterr().err


@pytest.mark.parametrize("rate", [0.0, 1.0, 1.5, float("nan")])
def test_a_job_and_a_replay_accept_the_same_rates(tmp_path: Path, rate: float) -> None:
    try:
        ResihpConfig(resihp_false_alarms_per_job=rate).check()
        expected = 0
    except ConfigError:
        expected = 2
    assert detect(write_table(tmp_path / "times.csv", slow=None), "--false-alarms-per-job", rate) == expected


def test_the_command_starts_without_what_only_detection_needs() -> None:
    script = (
        "import sys; from megatron_resihp.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print(*sorted({'numpy', 'scipy', 'numba', 'torch'} & set(sys.modules)), file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "detect" in shown.stdout
    assert shown.stderr.split() == []
