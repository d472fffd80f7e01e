# SPDX-License-Identifier: Apache-2.0
"""The state of a run whose log has no end: it runs, is stalled, waits for a coordinator, or has ended without a word.

May import: the standard library, `control.transport.leaders`, `control.commands.contact`,
`control.commands.launch.claim`, `control.worker.saved_state` and this package's modules.
"""

from __future__ import annotations

import json
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Final

from megatron_resihp.control.commands import contact
from megatron_resihp.control.commands.launch.claim import Owner
from megatron_resihp.control.transport.leaders import LEADERLESS_S
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.worker.saved_state import LastSave, last_save
from megatron_resihp.report.run.run_summary import EmergencyCheckpoint, RunSummary, Standing

RUNNING: Final = "running"
STALLED: Final = "stalled"
ENDED: Final = "ended without a word"
LEADERLESS: Final = "waiting for a coordinator"
COORDINATOR_LOST: Final = "coordinator lost"
UNKNOWN: Final = "unknown"

STALLED_AFTER: Final = 3.0
"""Where the launcher does not answer, a run that finishes no iteration in so many usual iteration times is stalled."""
LEAST_S: Final = 5.0
"""The least time without a step that counts as a stall."""
CLOCKS_APART_S: Final = 60.0
"""The most by which nodes' clocks may differ."""


class Launcher(Enum):
    """The state of the launcher of a run's node 0, as far as this machine can tell."""

    ANSWERS = "answers"
    SILENT = "silent"
    """The process lives but does not answer: it is stopped, or its machine is overloaded."""
    GONE = "gone"
    AWAITED = "awaited"
    """It does not answer, and another coordinator may take its place."""
    UNKNOWN = "unknown"
    """The process was on another machine, which can't be reached from this one."""


def with_standing(summary: RunSummary, launcher: Launcher, now: float) -> RunSummary:
    """`summary` with the run's state at Unix time `now`, unless its log has an end."""
    if summary.exit_code is not None:
        return summary
    return replace(summary, standing=standing(summary, launcher, now))


def standing(summary: RunSummary, launcher: Launcher, now: float) -> Standing:
    """The state of a run whose log has no end."""
    last = summary.last_event_at if summary.last_step_at is None else summary.last_step_at
    silent_s = max(0.0, now - last) if last is not None else 0.0
    usual_s = summary.usual_iteration_s
    # The last iteration needs no coordinator until its end.
    if launcher is Launcher.AWAITED and silent_s <= LEADERLESS_S + (usual_s or 0.0):
        return Standing(LEADERLESS, silent_s)
    if launcher in (Launcher.GONE, Launcher.AWAITED):
        return Standing(ENDED, silent_s)
    if launcher is Launcher.ANSWERS:
        # It watches for stalls, and knows what else may take longer: an evaluation, a checkpoint.
        stalled = any(stall.iteration == summary.iterations and not stall.over for stall in summary.stalls)
        return Standing(STALLED if stalled else RUNNING, silent_s)
    on_time = usual_s is not None and silent_s <= max(STALLED_AFTER * usual_s, LEAST_S)
    if on_time:
        return Standing(RUNNING, silent_s)
    return Standing(UNKNOWN if launcher is Launcher.UNKNOWN else STALLED, silent_s)


def with_last_save(summary: RunSummary, run_dir: Path) -> RunSummary:
    """`summary` with the state that workers have saved if the coordinator is lost; no process could log that.

    Nodes that were only cut off save too; there the run goes on or has an end.
    """
    if summary.standing is None or summary.standing.state not in (ENDED, UNKNOWN, LEADERLESS):
        return summary
    save = last_save(run_dir, (summary.last_event_at or 0.0) - CLOCKS_APART_S)
    return summary if save is None else _ended_with(summary, summary.standing, save, run_dir)


def _ended_with(summary: RunSummary, standing: Standing, save: LastSave, run_dir: Path) -> RunSummary:
    written = EmergencyCheckpoint(save.iteration, str(run_dir / save.directory), save.complete, save.missing)
    reason = f"the coordinator was lost; {save.told(run_dir)}"
    lost = replace(standing, state=COORDINATOR_LOST)
    return replace(summary, standing=lost, reason=reason, salvages=(*summary.salvages, written))


def launcher_of(run_dir: Path) -> Launcher:
    """Look for the launcher of a run's node 0; may take as long as `contact.CONNECT_S`."""
    found = _look(run_dir)
    if found is not Launcher.ANSWERS and _replaceable(run_dir):
        return Launcher.AWAITED
    return found


def _replaceable(run_dir: Path) -> bool:
    try:
        return contact.read_contact(run_dir).replaceable
    except StoreError:
        return False


def _look(run_dir: Path) -> Launcher:
    try:
        owner = Owner.of(json.loads((run_dir / contact.FILE_NAME).read_text()))
    except FileNotFoundError:
        return Launcher.GONE
    except (OSError, ValueError, AttributeError):
        return Launcher.UNKNOWN
    here = owner is not None and owner.here
    if owner is not None and here and not owner.lives():
        return Launcher.GONE
    try:
        contact.reach(run_dir)
        return Launcher.ANSWERS
    except StoreError:
        return Launcher.SILENT if here else Launcher.UNKNOWN
