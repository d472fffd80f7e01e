"""A recorded run, or a table of iteration times, through the detector: what `resihp detect` found, and its files.

May import: the standard library, `config`, `detector` and this room's modules; matplotlib only to draw.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_resihp.config import FALSE_ALARMS_PER_JOB, ConfigError, check_false_alarms
from megatron_resihp.detector import recording, table
from megatron_resihp.detector.counters import Counters
from megatron_resihp.detector.replay import Replay, Step, replay, steps_of
from megatron_resihp.detector.settings import Settings
from megatron_resihp.detector.verdict import Verdict
from megatron_resihp.report.detect_command import PICTURE_NAME, VERDICTS_NAME


class BadInput(Exception):
    """The user has to mend something; the message is "cause; mend"."""


@dataclass(frozen=True)
class Detection:
    """A judged source.

    Attributes:
        source: what was read.
        result: what the detector said.
        left_out: what could not be used, in words.
        named: whether workers can be told apart.
    """

    source: Path
    result: Replay
    left_out: Sequence[str]
    named: bool


def detect(source: Path, false_alarms_per_job: float | None, warm_up: int) -> Detection:
    """Judge a run's directory, or a table.

    Args:
        source: what to read.
        false_alarms_per_job: accepted in the whole job, on average; None: the job's own setting, or the default.
        warm_up: iterations to learn from.

    Raises:
        BadInput: the source or a setting cannot be used.
    """
    if warm_up < 3:
        raise BadInput(f"--warm-up {warm_up} is too short to learn from; give at least 3")
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
    return Detection(run_dir, replay(steps, float(budget), int(expected), settings), left_out, named=True)


def _of_table(path: Path, rate: float | None, settings: Settings) -> Detection:
    read = table.read(path)
    steps: list[Step] = [read.layout(), *read.observations()]
    result = replay(steps, rate or FALSE_ALARMS_PER_JOB, len(read.iterations), settings)
    if not read.has_workers:
        # The one "worker" is the job: who it is that is slow is not known.
        result.verdicts = [replace(verdict, workers=()) for verdict in result.verdicts]
    return Detection(path, result, read.left_out, read.has_workers)


def write(found: Detection, out: Path) -> None:
    """Write verdicts and picture into a directory. Raises BadInput where that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(to_json(found), indent=2, allow_nan=False)
        (out / VERDICTS_NAME).write_text(text + "\n")
        from megatron_resihp.report.detect_picture import draw

        draw(found.result, out / PICTURE_NAME)
    except OSError as error:
        raise BadInput(f"{out} cannot be written to ({error.strerror}); give another directory with --out") from None


def to_json(found: Detection) -> dict[str, Any]:
    """All that was found, as plain values."""
    result = found.result
    return {
        "source": str(found.source),
        "iterations": len(result.iterations),
        "judged": result.judged,
        "workers": sorted(result.workers) if found.named else None,
        "verdicts": [verdict_to_json(verdict) for verdict in result.verdicts],
        "notices": [
            {"what": notice.what.name.lower(), "workers": list(notice.workers), "seconds": notice.seconds,
             "iteration": notice.iteration} for notice in result.notices
        ],
        "micro_batch_mape": _finite(result.micro_batch_mape),
        "iteration_mape": _finite(result.iteration_mape),
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
