# SPDX-License-Identifier: Apache-2.0
"""The part of `detection.py` on series of iteration times without workers; Greyhound's beside some of them.

What is right is said in `lab/detection/series_scoring.py`, the kinds of series in `series.py` beside it.
The goals: 98 % of slow-downs of at least 2.5 standard deviations found within 30 rows after at least 30 healthy ones,
and 95 % of their ends; a median latency of 4 rows at noise up to 3 %, and of 6 for 30 % at 8 % noise; 0.1 false alarms
in 1,000 healthy rows of each kind that is scored.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_resihp.lab.detection.series import KINDS, SeriesKind
from megatron_resihp.lab.detection.series_scoring import SeriesScore, greyhound, score_kind, this_detector

GOALS = {"found_share": 0.98, "recovered_share": 0.95, "false_alarms_per_1000": 0.1, "latency_iterations": 4,
         "latency_of_30_percent_at_8": 6}  # fmt: skip
QUIET = 0.03
"""The highest noise for which the latency counts."""
BESIDE = ("noise_3", "noise_8", "spikes", "faster", "begins_slow", "regimes")
"""Kinds that Greyhound is run on, a quarter of the series."""


def run_series(seed: int, count: int, results: Path | None) -> dict[str, Any]:
    """All kinds' rows, the figures over them, and Greyhound's; finished rows are kept in `results`."""
    scores = {kind: _kept(results, "this", kind, seed, count) for kind in KINDS}
    scored = [kind for kind in KINDS if kind.scored]
    later = [kind for kind in scored if not kind.early]
    quiet = [scores[kind] for kind in later if kind.noise <= QUIET]
    overall = sum((scores[kind] for kind in later), SeriesScore()).figures()
    worst = max(float(scores[kind].figures()["false_alarms_per_1000"] or 0) for kind in scored)
    by_30 = next(kind for kind in KINDS if kind.name == "noise_8_by_30")
    beside = {kind.name: _kept(results, "greyhound", kind, seed, max(count // 4, 1)) for kind in KINDS
              if kind.name in BESIDE}  # fmt: skip
    return {
        "found_share": overall["found_share"],
        "recovered_share": overall["recovered_share"],
        "false_alarms_per_1000": worst,
        "latency_iterations": sum(quiet, SeriesScore()).figures()["latency_iterations"],
        "latency_of_30_percent_at_8": scores[by_30].figures()["latency_iterations"],
        "rows": [
            {"kind": kind.name, "scored": kind.scored, "held_out": kind.held_out, **scores[kind].figures()}
            for kind in KINDS
        ],
        "greyhound": {
            **sum(beside.values(), SeriesScore()).figures(),
            "rows": [{"kind": name, **found.figures()} for name, found in beside.items()],
        },
        "goals": GOALS,
    }


def series_missed(found: dict[str, Any]) -> list[str]:
    """The goals that these figures miss."""
    shares = [name for name in ("found_share", "recovered_share") if (found[name] or 0) < GOALS[name]]
    above = [name for name in GOALS if not name.endswith("share") and not (found[name] or 0) <= GOALS[name]]
    return [f"series: {name}" for name in shares + above]


def _kept(results: Path | None, detector: str, kind: SeriesKind, seed: int, count: int) -> SeriesScore:
    """A row, from an earlier run if that has it."""
    path = results / f"series-{detector}-{kind.name}.json" if results else None
    draw = {"seed": seed, "count": count, "kind": asdict(kind)}
    if path and path.exists():
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["draw"] == draw:
            return SeriesScore(**{**data["score"], "latencies": tuple(data["score"]["latencies"])})
    started = time.monotonic()
    found = score_kind(kind, seed, count, this_detector if detector == "this" else greyhound)
    shown = {name: value if value is None else round(value, 3) for name, value in found.figures().items()}
    print(f"series {detector} {kind.name}: {shown} [{time.monotonic() - started:.0f} s]", file=sys.stderr)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"draw": draw, "score": asdict(found)}), encoding="utf-8")
    return found
