# SPDX-License-Identifier: Apache-2.0
"""Figures of a detector over many scored jobs, with 95 % bounds. Imports numpy and scipy.

Bounds are exact where the distribution is known: Clopper and Pearson's for shares, Garwood's for Poisson rates, order
statistics for medians; the normal approximation for means.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from megatron_resihp.detector.verdict import Kind
from megatron_resihp.lab.detection.scoring import FaultScore, JobScore

CONFIDENCE = 0.95
SMALLEST_SCORED = 0.10
"""Smallest slowdown that counts for accuracy."""
FOUND_SHARE = 0.95
"""Share of culprits that must be found for a slowdown to count as found."""
LATENCY_FROM = 0.20
"""Smallest slowdown that counts for latency."""

_TAIL = (1 - CONFIDENCE) / 2


def share(hits: int, of: int) -> dict[str, Any]:
    """A share of `of` jobs, with its bounds."""
    low = float(stats.beta.ppf(_TAIL, hits, of - hits + 1)) if hits else 0.0
    high = float(stats.beta.ppf(1 - _TAIL, hits + 1, of - hits)) if hits < of else 1.0
    return {"value": hits / of if of else None, "low": low, "high": high, "of": of}


def rate(count: int, of: int) -> dict[str, Any]:
    """Events per job, with its bounds."""
    low = float(stats.chi2.ppf(_TAIL, 2 * count)) / 2 if count else 0.0
    high = float(stats.chi2.ppf(1 - _TAIL, 2 * count + 2)) / 2
    return {"value": count / of, "low": low / of, "high": high / of, "of": of} if of else {"value": None, "of": 0}


def median(values: Sequence[float]) -> dict[str, Any]:
    """The median with its bounds; infinite values count as larger than any other and are given as null."""
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        return {"value": None, "of": 0}
    below = int(stats.binom.ppf(_TAIL, count, 0.5))
    low, high = ordered[max(below - 1, 0)], ordered[min(count - below, count - 1)]
    numbers = {"value": float(np.median(ordered)), "low": low, "high": high}
    return {name: float(number) if np.isfinite(number) else None for name, number in numbers.items()} | {"of": count}


def mean(values: Sequence[float]) -> dict[str, Any]:
    """The mean with its bounds."""
    count = len(values)
    if not count:
        return {"value": None, "of": 0}
    middle = float(np.mean(values))
    if count == 1:
        return {"value": middle, "low": None, "high": None, "of": 1}
    half = float(stats.norm.ppf(1 - _TAIL) * np.std(values, ddof=1) / np.sqrt(count))
    return {"value": middle, "low": middle - half, "high": middle + half, "of": count}


def summarize(scores: Sequence[JobScore]) -> dict[str, Any]:
    """All figures of a detector over these jobs.

    Returns:
        accuracy: share of jobs judged correctly, among healthy jobs and jobs whose slowdowns are all ≥ 10 %.
        accuracy_faulty: the same without healthy jobs.
        found: share of culprits with a slowdown ≥ 10 % that were named in time, regardless of other alarms.
        false_alarms_per_job, false_alarms_per_healthy_job: as `scoring` defines them.
        smallest_slowdown: the smallest slowdown from which on at least 95 % of the culprits of each slowdown were
            found; `low` and `high` use the upper and the lower bounds of these shares.
        latency_iterations: median over culprits with s ≥ 20 %; those not found in time count as infinite.
        speed_error: mean over all culprits, those not found included.
        found_by_slowdown: share of culprits found, for each slowdown.
    """
    scored = [score for score in scores if all(_at_least(SMALLEST_SCORED, fault) for fault in score.faults)]
    faulty = [score for score in scored if score.faults]
    healthy = [score for score in scores if not score.faults]
    faults = [fault for score in scores for fault in score.faults]
    large = [fault for fault in faults if _at_least(SMALLEST_SCORED, fault)]
    by_slowdown = {slowdown: _found(fault for fault in faults if fault.slowdown == slowdown)
                   for slowdown in sorted({fault.slowdown for fault in faults})}  # fmt: skip
    return {
        "accuracy": share(sum(score.is_correct for score in scored), len(scored)),
        "accuracy_faulty": share(sum(score.is_correct for score in faulty), len(faulty)),
        "found": _found(large),
        "found_by_kind": {kind.value: _found(fault for fault in large if fault.kind is kind) for kind in Kind},
        "false_alarms_per_job": rate(sum(score.false_alarms for score in scores), len(scores)),
        "false_alarms_per_healthy_job": rate(sum(score.false_alarms for score in healthy), len(healthy)),
        "smallest_slowdown": _smallest(by_slowdown),
        "latency_iterations": median([_latency(fault) for fault in faults if _at_least(LATENCY_FROM, fault)]),
        "speed_error": mean([fault.speed_error for fault in faults]),
        "found_by_slowdown": {f"{slowdown:.3g}": found for slowdown, found in by_slowdown.items()},
    }


def _at_least(slowdown: float, fault: FaultScore) -> bool:
    return fault.slowdown >= slowdown


def _latency(fault: FaultScore) -> float:
    return float("inf") if fault.latency is None else fault.latency


def _found(faults: Iterable[FaultScore]) -> dict[str, Any]:
    named = [fault.latency is not None for fault in faults]
    return share(sum(named), len(named))


def _smallest(by_slowdown: dict[float, dict[str, Any]]) -> dict[str, Any]:
    # The less is known of a share, the smaller the slowdown that its upper bound admits.
    bounds = {"value": "value", "low": "high", "high": "low"}
    return {name: _smallest_by(by_slowdown, bound) for name, bound in bounds.items()}


def _smallest_by(by_slowdown: dict[float, dict[str, Any]], bound: str) -> float | None:
    smallest = None
    for slowdown in sorted(by_slowdown, reverse=True):
        if by_slowdown[slowdown][bound] < FOUND_SHARE:
            break
        smallest = slowdown
    return smallest
