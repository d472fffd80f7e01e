# SPDX-License-Identifier: Apache-2.0
"""Other plans: which strategy planned, what would be faster, what was changed and whether that has paid.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_resihp.events.event import Event, event
from megatron_resihp.events.fields import Plan


@event("plan_failed", written_by="coordinator")
class PlanFailed(Event):
    """The first step under a chosen plan raised an error. The job recovers from this once: after a voluntary change
    with the previous plan, after a loss with complete uniform replicas. The plan is not chosen again."""

    failed: Annotated[int, "the worker that raised it"]
    error: Annotated[str, "the error"]
    digest: Annotated[str, "digest of the plan"]
    number: Annotated[int | None, "of the voluntary change; null: the plan came after a loss"] = None


@event("plan_change", written_by="coordinator")
class PlanChange(Event):
    """Another plan is to be taken voluntarily; workers leave the epoch after the same iteration. If a failure comes
    first, no `reconfiguration` follows."""

    number: Annotated[int, "of the change, from 1"]
    why: Annotated[str, "the reason, and who asked for it"]
    from_digest: Annotated[str, "digest of the plan in force"]
    to_digest: Annotated[str, "digest of the plan to come"]
    changes: Annotated[tuple[str, ...], "what changes, line by line"]


@event("change_refused", written_by="coordinator")
class ChangeRefused(Event):
    """A plan was asked for that can't be taken."""

    why: Annotated[str, "the reason, and who asked for it"]
    reason: Annotated[str, "why not"]


@event("change_measured", written_by="the policy, on node 0")
class ChangeMeasured(Event):
    """Whether a voluntary change has paid; told where no worker became slow, recovered or died in between."""

    number: Annotated[int, "of the change"]
    before_s: Annotated[float, "median seconds of an iteration before it"]
    after_s: Annotated[float, "the same of 16 iterations after it"]


@event("planned", written_by="coordinator")
class Planned(Event):
    """Who planned for survivors, where the job has a strategy of its own."""

    strategy: Annotated[str, "whose plan is taken"]
    instead_of: Annotated[str | None, "whose plan was wanted"] = None
    reason: Annotated[str | None, "why that was not taken"] = None
    overtaken: Annotated[bool | None, "whether it came too late; it is taken later, if it pays"] = None
    planning_s: Annotated[float | None, "seconds that planning took"] = None
    waited_s: Annotated[float | None, "how long training stood still for that"] = None
    made_ahead: Annotated[bool | None, "whether the plan was made before the loss, so training did not wait"] = None
    iteration_s: Annotated[float | None, "seconds of an iteration, by simulation"] = None
    bound_s: Annotated[float | None, "what no plan can beat"] = None
    moving_s: Annotated[float | None, "estimated seconds of the change"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended(Event):
    """A voluntary change of plan would pay off."""

    why: Annotated[str, "which workers and links are slow, and what is gained"]
    gain: Annotated[float, "share of an iteration that is saved"]
    lost_s: Annotated[float | None, "seconds lost so far by not having changed"] = None
    cost_s: Annotated[float | None, "seconds that the change costs"] = None
    iteration_s: Annotated[float | None, "seconds of an iteration afterwards, by simulation"] = None


@event("would_change", written_by="the policy, on node 0")
class WouldChange(Recommended):
    """A voluntary change of plan would pay off, and the job was started to observe only."""

    plan: Annotated[Plan | None, "the plan"] = None


@event("proposal", written_by="the policy, on node 0")
class Proposal(Recommended):
    """A voluntary change of plan would pay off; `resihp apply RUN_DIR PATH` makes it."""

    path: Annotated[str, "where the plan is"]


@event("no_plan", written_by="the policy, on node 0")
class NoPlan(Event):
    """The planner was asked for another plan and has none; training goes on with the one in force."""

    reason: Annotated[str, "why"]


@event("policy_failed", written_by="the policy, on node 0")
class PolicyFailed(Event):
    """The policy has given up: no more voluntary changes unless by hand. Training and the rest go on."""

    error: Annotated[str, "why"]
