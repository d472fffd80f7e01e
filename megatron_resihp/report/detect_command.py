"""`resihp detect`: run the detector over a recorded run, or over a table of iteration times.

May import: the standard library, rich, `detector` and this room's modules; matplotlib only to draw.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from megatron_resihp.config import FALSE_ALARMS_PER_JOB
from megatron_resihp.detector import recording, table
from megatron_resihp.detector.counters import Counters
from megatron_resihp.detector.replay import Replay, Step, replay, steps_of
from megatron_resihp.detector.settings import Settings
from megatron_resihp.detector.verdict import Verdict

VERDICTS_NAME: Final = "verdicts.json"
PICTURE_NAME: Final = "detection.png"

EPILOG = f"""\
RUN_DIR is the run directory of a job that was started with `resihp launch` and --resihp.

FILE needs a column `seconds`; `iteration`, `worker`, `tokens` (N, tokens of the iteration) and `squares` (sum of
squared document lengths) may be there too. Without `worker` each line is the whole job's iteration, and all that can
be said is that some worker is slow. With `tokens` and `squares`, long documents are not mistaken for slow workers:

  iteration,worker,seconds,tokens,squares
  1,0,0.512,8192,9437184
  1,1,0.498,8192,7340032

Verdicts are printed and written to {VERDICTS_NAME}; {PICTURE_NAME} shows observed against predicted time.
"""


class _BadInput(Exception):
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp detect`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("source", type=Path, nargs="?", metavar="RUN_DIR|FILE", help="a run, or a .csv or .jsonl file")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go (default: beside what is read)")
    parser.add_argument(
        "--false-alarms-per-job", type=float, metavar="RATE",
        help=f"false alarms accepted in a job (default: the job's own setting, or {FALSE_ALARMS_PER_JOB})",
    )  # fmt: skip
    parser.add_argument(
        "--warm-up", type=int, metavar="N", default=Settings.warm_up,
        help="iterations to learn from (default %(default)s)",
    )  # fmt: skip
    parser.set_defaults(parser=parser)


def run(namespace: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; the exit code is 0, or 2 for bad input or without any."""
    if namespace.source is None:
        namespace.parser.print_help()
        return 2
    try:
        found = _detect(namespace)
        out = namespace.out or (found.source if found.source.is_dir() else found.source.parent)
        _write(found, out)
    except (_BadInput, recording.RecordingError, table.TableError) as error:
        print(f"resihp: {error}", file=sys.stderr)
        return 2
    from megatron_resihp.report.detect_terminal import render
    from megatron_resihp.report.terminal import console_for

    render(found, console_for(sys.stdout))
    return 0


def _detect(namespace: argparse.Namespace) -> Detection:
    source: Path = namespace.source
    if namespace.warm_up < 3:
        raise _BadInput(f"--warm-up {namespace.warm_up} is too short to learn from; give at least 3")
    rate = namespace.false_alarms_per_job
    if rate is not None and not 0 < rate < 1:
        raise _BadInput(f"--false-alarms-per-job {rate:g} is no rate; give a number between 0 and 1, such as 0.01")
    settings = replace(Settings(), warm_up=namespace.warm_up)
    if source.is_dir():
        found = _of_run(source, rate, settings)
    else:
        found = _of_table(source, rate, settings)
    if not found.result.judged:
        needed = settings.skipped + settings.warm_up
        raise _BadInput(
            f"{source} holds {len(found.result.iterations)} iterations, and the first {needed} are learned from; "
            "give a longer record, or a smaller --warm-up"
        )
    return found


def _of_run(run_dir: Path, rate: float | None, settings: Settings) -> Detection:
    path = run_dir / recording.FILE_NAME
    if not path.exists():
        raise _BadInput(f"{run_dir} has no {path.name}; give the run directory of a job that ran with --resihp")
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


def _write(found: Detection, out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(to_json(found), indent=2, allow_nan=False)
        (out / VERDICTS_NAME).write_text(text + "\n")
        from megatron_resihp.report.detect_picture import draw

        draw(found.result, out / PICTURE_NAME)
    except OSError as error:
        raise _BadInput(f"{out} cannot be written to ({error.strerror}); give another directory with --out") from None


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
