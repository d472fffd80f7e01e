# SPDX-License-Identifier: Apache-2.0
"""What the coordinator writes to the event log when one epoch follows another.

Pure; imports `plan` and this package.
"""

from collections.abc import Collection, Iterable
from typing import Any

from megatron_resihp.control.replanning.change import Change
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.protocol.messages import Ready
from megatron_resihp.protocol.records import Commit, Outcome

Event = dict[str, Any]
Reports = Collection[Ready]
"""What the members of an epoch reported when they were ready for it."""


def epoch_started(epoch: int, plan: ParallelPlan) -> Event:
    """The plan of an epoch is in force."""
    return {"event": "epoch_started", "epoch": epoch, "plan": plan.to_dict(), "digest": plan.digest}


def agreed(epoch: int, commit: Commit, outcome: Outcome) -> Event:
    """What counts as applied when an epoch was left."""
    return {
        "event": "agreed", "epoch": epoch, "iteration": commit.iteration, "agreed_epoch": outcome.epoch,
        "loss": outcome.means, "grad_norm": outcome.grad_norm, "skipped": outcome.skipped,
    }  # fmt: skip


def recovery(epoch: int, commit: Commit, ready: Reports, dead: Iterable[int], broken_at: float, now: float) -> Event:
    """Training goes on after a failure."""
    return {
        "event": "recovery", **_moved(epoch, commit, ready), "dead": sorted(dead), "broken_at": broken_at,
        "resumed_at": now,
    }  # fmt: skip


def reconfiguration(
    epoch: int, commit: Commit, ready: Reports, change: Change, groups_made_ahead: bool, now: float
) -> Event:
    """Training goes on after a change by choice."""
    left_at = now if change.first_reported_at is None else change.first_reported_at
    return {
        "event": "reconfiguration", **_moved(epoch, commit, ready), "number": change.number, "why": change.why,
        "left_at": left_at, "resumed_at": now, "stood_still_s": now - left_at,
        "groups_made_ahead": groups_made_ahead,
    }  # fmt: skip


def _moved(epoch: int, commit: Commit, ready: Reports) -> Event:
    return {
        "epoch": epoch, "from_epoch": epoch - 1, "to_epoch": epoch, "resumed_iteration": commit.iteration,
        "bytes_moved": sum(message.bytes_received for message in ready),
        "steps_redone": max(message.steps_redone for message in ready),
    }  # fmt: skip
