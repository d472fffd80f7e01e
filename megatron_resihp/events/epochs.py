# SPDX-License-Identifier: Apache-2.0
"""Epochs: which plan is in force, and how training went on under the next.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

from typing import Annotated, Final

from megatron_resihp.events.event import Event, event
from megatron_resihp.events.fields import Plan

PHASES: Final = ("notice", "abort", "agree", "rebuild", "migrate", "data", "ready", "first_step")
"""The parts of a recovery, in the order in which a worker goes through them."""


@event("epoch_started", written_by="coordinator")
class EpochStarted(Event):
    """An epoch's plan is in force."""

    plan: Annotated[
        Plan,
        '`{"replicas": [{"stages": [[worker ids of the TP members], ...], "micro_batches": [indices]}], '
        '"standbys": {worker id: [stage, tp_rank] or null}}`; `"context_parallel": n` where n consecutive replicas '
        'share each sequence; `"context_groups": [n, m, ...]` where the groups that do differ in size; '
        '`"expert_parallel": n` where n consecutive ones share experts; '
        '`"expert_members": n` where n consecutive members of a stage have the same of them; `"uneven_experts": n` '
        "where the n experts of a layer are dealt to those that share them in unequal numbers",
    ]
    digest: Annotated[str | None, "digest of the plan, the same on all members"] = None
    copies_experts: Annotated[bool | None, "members keep copies of experts that only one worker holds"] = None


@event("epoch_broken", written_by="coordinator")
class EpochBroken(Event):
    """An epoch was given up; its members stop and agree on the next."""

    cause: Annotated[str, "why"]
    broken_epoch: Annotated[int | None, "the epoch"] = None
    by: Annotated[int | str | None, "worker that asked for it; null: the coordinator"] = None


@event("phase", written_by="each worker")
class Phase(Event):
    """What one part of a recovery took on one worker."""

    phase: Annotated[str, ", ".join(PHASES)]
    seconds: Annotated[float, "its duration"]
    to_epoch: Annotated[int, "the epoch that the recovery led to"]
    peak_bytes: Annotated[int | None, "the most of the device's memory in use at a time; null: not counted"] = None


@event("recovery", written_by="coordinator")
class Recovery(Event):
    """Training goes on under a new plan."""

    from_epoch: Annotated[int, "the epoch that broke"]
    to_epoch: Annotated[int, "the epoch that goes on"]
    resumed_iteration: Annotated[int, "last applied step"]
    dead: Annotated[tuple[int, ...], "the workers that died; may repeat those of earlier recoveries"]
    bytes_moved: Annotated[int | None, "state that had to be sent between workers"] = None
    steps_redone: Annotated[int | None, "1 if the iteration that broke is computed again, else 0"] = None
    broken_at: Annotated[float | None, "when the epoch broke"] = None
    resumed_at: Annotated[float | None, "when all workers went on"] = None


@event("reconfiguration", written_by="coordinator")
class Reconfiguration(Event):
    """Training goes on under a plan that was taken by choice."""

    number: Annotated[int, "of the change"]
    why: Annotated[str, "the reason, and who asked for it"]
    from_epoch: Annotated[int, "the epoch that was left"]
    to_epoch: Annotated[int, "the epoch that goes on"]
    resumed_iteration: Annotated[int, "last applied step"]
    bytes_moved: Annotated[int | None, "state that had to be sent between workers"] = None
    steps_redone: Annotated[int | None, "0: nothing is computed again"] = None
    left_at: Annotated[float | None, "when the first worker stopped"] = None
    resumed_at: Annotated[float | None, "when all workers went on"] = None
    stood_still_s: Annotated[float, "seconds between both"]
    groups_made_ahead: Annotated[bool | None, "whether all workers had made their groups before"] = None


@event("first_step", written_by="each working worker, or one of them")
class FirstStep(Event):
    """The first iteration after a recovery is complete; `time` is its end. The last of a recovery counts."""

    to_epoch: Annotated[int, "the epoch that goes on"]
    iteration: Annotated[int, "the iteration"]
    seconds_since_death: Annotated[float | None, "from the first death to the end of the iteration"] = None
    redone_compute_s: Annotated[float | None, "time spent on work that had been done before"] = None
