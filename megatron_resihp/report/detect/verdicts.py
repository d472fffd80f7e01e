# SPDX-License-Identifier: Apache-2.0
"""Verdicts in words, for the terminal and the picture. May import `detector`."""

from __future__ import annotations

from megatron_resihp.detector.verdict import Change, Kind, Verdict


def who_of(verdict: Verdict) -> str:
    """The worker or link, in words."""
    if not verdict.workers:
        return "some worker"
    if verdict.kind is Kind.LINK:
        return "link " + "–".join(map(str, verdict.workers))
    return "worker " + ", ".join(map(str, verdict.workers))


def what_of(verdict: Verdict) -> str:
    """The verdict's kind of change, in words."""
    return {Change.ONSET: "slow", Change.SEVERITY: "changed", Change.RECOVERY: "healthy again"}[verdict.change]


def speed_of(verdict: Verdict) -> str:
    """The speed with its confidence interval."""
    if verdict.change is Change.RECOVERY:
        return "1.00"
    return f"{verdict.speed:.2f} ({verdict.speed_low:.2f}–{verdict.speed_high:.2f})"
