# SPDX-License-Identifier: Apache-2.0
"""Runs the detector over a recorded run or a table of iteration times, and writes the files of `resihp detect`.

May import: the standard library, `config`, `cost`, `detector` and this package's modules; matplotlib only to draw.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from megatron_resihp.config import FALSE_ALARMS_PER_JOB, ConfigError, check_false_alarms
from megatron_resihp.cost.fitted.store import CostModelError
from megatron_resihp.detector.input import recording, table
from megatron_resihp.detector.input.counters import Counters
from megatron_resihp.detector.input.replay import Replay, Step, replay, steps_of
from megatron_resihp.detector.judging.learned import load
from megatron_resihp.detector.series.judge import FEWEST_ROWS, judge_series
from megatron_resihp.detector.settings import Settings
from megatron_resihp.detector.verdict import Change, Verdict
from megatron_resihp.report.console import progress_bar
from megatron_resihp.report.detect import PICTURE_NAME, VERDICTS_NAME

CERTAIN_ERROR: Final = 0.15
"""Mean error of predictions above which the evidence is insufficient to call workers healthy."""
CERTAIN_SLOWDOWN: Final = 0.20
"""The evidence is also insufficient where a slow-down by this share of the speed would not have been found."""
TABLE_LEARNS_EVERY: Final = 15
"""Iterations between updates of a table's costs: it may have 100,000 iterations, with one op per worker in each."""
FEWEST_JUDGED: Final = 5
"""The evidence is also insufficient with fewer judged iterations."""


class BadInput(Exception):
    """Bad input from the user; the message is "cause; remedy"."""


@dataclass(frozen=True)
class Detection:
    """A judged source.

    Attributes:
        source: the file or directory that was read.
        result: the detector's output.
        left_out: the unusable parts of the source, in words.
        named: whether workers can be told apart.
        restarts: rows of the file at which the numbering restarts.
    """

    source: Path
    result: Replay
    left_out: Sequence[str]
    named: bool
    restarts: tuple[int, ...] = ()

    @property
    def doubts(self) -> list[str]:
        """Why the evidence is insufficient to call workers healthy; empty if it is sufficient."""
        result, reasons = self.result, []
        if result.judged < FEWEST_JUDGED:
            reasons.append(f"only {result.judged} iterations could be judged")
        if result.iteration_mape > CERTAIN_ERROR:
            reasons.append(f"healthy iterations differ by {result.iteration_mape:.0%} on average from the prediction")
        if result.smallest_seen > CERTAIN_SLOWDOWN:
            reasons.append(f"a loss of up to {result.smallest_seen:.0%} of the speed would not have been found")
        if result.unknown > result.judged:
            reasons.append("most iterations had a workload outside what had been learned")
        return reasons

    @property
    def conclusion(self) -> str:
        """The result: a worker or link is slow, or was slow, or none is slow, or the evidence is insufficient."""
        if self.result.verdicts:
            last = {verdict.workers: verdict.change for verdict in self.result.verdicts}
            return "slow" if any(change is not Change.RECOVERY for change in last.values()) else "recovered"
        return "insufficient evidence" if self.doubts else "nobody is slow"


def detect(source: Path, false_alarms_per_job: float | None, warm_up: int) -> Detection:
    """Judge a run's directory, or a table.

    Args:
        source: a run's directory, or a table.
        false_alarms_per_job: accepted in the whole job, on average; None: the job's own setting, or the default.
        warm_up: iterations to learn from.

    Raises:
        BadInput: the source or a setting is unusable.
    """
    if warm_up < 3:
        raise BadInput(f"--warm-up {warm_up} is too short to learn from; give at least 3")
    if not source.exists():
        raise BadInput(f"{source} does not exist; give a run directory, or a .csv or .jsonl file")
    settings = replace(Settings(), warm_up=warm_up)
    judge = _of_run if source.is_dir() else _of_table
    try:
        if false_alarms_per_job is not None:
            check_false_alarms("--false-alarms-per-job", false_alarms_per_job)
        found = judge(source, false_alarms_per_job, settings)
    except (ConfigError, recording.RecordingError, table.TableError) as error:
        raise BadInput(str(error)) from None
    if not found.result.judged:
        needed = settings.skipped + settings.warm_up
        if len(found.result.workers) == 1 and source.is_file():
            raise BadInput(
                f"{source} holds {len(found.result.iterations)} iterations, too few to judge any; give at least "
                f"{FEWEST_ROWS}"
            )
        raise BadInput(
            f"{source} holds {len(found.result.iterations)} iterations, and the first {needed} are learned from; "
            "give a longer record, or a smaller --warm-up"
        )
    return found


def _of_run(run_dir: Path, rate: float | None, settings: Settings) -> Detection:
    path = run_dir / recording.FILE_NAME
    if not path.exists():
        raise BadInput(f"{run_dir} has no {path.name}; give the run directory of a job that ran with --resihp")
    recorded = recording.Recording(path)
    counters = Counters()
    steps = list(steps_of(recorded, counters))
    expected = recorded.job.get("train_iters") or len(steps)
    budget = rate or recorded.job.get("false_alarms_per_job") or FALSE_ALARMS_PER_JOB
    left_out = [f"{count} × {name.replace('_', ' ')}" for name, count in counters.nonzero().items()]
    if recorded.cut:
        left_out.append("the end of the file is cut off")
    known = None
    if recorded.job.get("cost_model"):
        try:
            known = load(Path(recorded.job["cost_model"]))
        except CostModelError as error:
            left_out.append(f"the costs that the job began with: {error}")
    return Detection(run_dir, replay(steps, float(budget), int(expected), settings, known), left_out, named=True)


def _of_table(path: Path, rate: float | None, settings: Settings) -> Detection:
    with progress_bar() as progress:
        reading = progress.add_task("reading", total=None)
        read = table.read(path, lambda rows: progress.update(reading, advance=rows))
        progress.update(reading, visible=False)
        count = len(read.iterations)
        judging = progress.add_task("judging", total=count)

        def advance(rows: int) -> None:
            progress.update(judging, advance=rows)

        budget = rate or FALSE_ALARMS_PER_JOB
        if len(read.workers) == 1:
            result = judge_series(read, budget, settings, advance)
        else:
            rare = replace(settings, learn_every=TABLE_LEARNS_EVERY)
            result = replay(_counted(read.steps(), advance), budget, count, rare)
    return Detection(path, result, read.left_out, read.has_workers, tuple(read.restarts))


def _counted(steps: Iterable[Step], advance: Callable[[int], None]) -> Iterator[Step]:
    for number, step in enumerate(steps, 1):
        yield step
        if number % 100 == 0:
            advance(100)


def write(found: Detection, out: Path) -> None:
    """Write verdicts and picture into a directory. Raises BadInput where that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(to_json(found), indent=2, allow_nan=False)
        (out / VERDICTS_NAME).write_text(text + "\n")
        from megatron_resihp.report.detect.picture import draw

        draw(found.result, out / PICTURE_NAME)
    except OSError as error:
        raise BadInput(f"{out} cannot be written to ({error.strerror}); give another directory with --out") from None


def to_json(found: Detection) -> dict[str, Any]:
    """The whole result as plain values."""
    result = found.result
    return {
        "source": str(found.source),
        "iterations": len(result.iterations),
        "judged": result.judged,
        "workers": sorted(result.workers) if found.named else None,
        "verdicts": [verdict_to_json(verdict) for verdict in result.verdicts],
        "notices": [
            {"what": notice.what.value, "workers": list(notice.workers), "seconds": notice.seconds,
             "iteration": notice.iteration} for notice in result.notices
        ],
        "micro_batch_mape": _finite(result.micro_batch_mape),
        "iteration_mape": _finite(result.iteration_mape),
        "conclusion": found.conclusion,
        "doubts": found.doubts,
        "smallest_seen": _finite(result.smallest_seen),
        "unknown_workload": result.unknown,
        "restarts_at_row": list(found.restarts),
        "left_out": list(found.left_out),
    }  # fmt: skip


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain values."""
    values = verdict.to_dict()
    return {name: _finite(value) if isinstance(value, float) else value for name, value in values.items()} | {
        "evidence": {name: _finite(value) for name, value in verdict.evidence.items()}
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
