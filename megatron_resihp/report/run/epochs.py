# SPDX-License-Identifier: Apache-2.0
"""The plans that were in force one after the other, with their shapes and reasons.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_resihp.events.epochs import EpochStarted, Reconfiguration
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import Job
from megatron_resihp.events.replanning import PlanFailed
from megatron_resihp.report.run import shape
from megatron_resihp.report.run.recoveries import Recovery
from megatron_resihp.report.run.steps import Step, settled_rate
from megatron_resihp.report.words import listing

AT_THE_START = "the start"


@dataclass(frozen=True)
class PlanInForce:
    """One epoch's plan.

    Attributes:
        epoch: its number.
        after: last iteration applied before it.
        why: "the start", the workers that died, or the reason of a change by choice.
        by_choice: whether it was a change by choice.
        shape, layers, micro_batches: the plan in words; see `shape`.
        working, standbys: the numbers of such workers.
        like_the_first: whether it has the first plan's stages, layers and micro-batches, whichever workers do the work.
        stood_still_s: how long a change by choice held up training; None: it was no change by choice.
        bytes_moved: state that was sent for it.
        samples_per_second: median of its settled iterations; None: there are too few.
    """

    epoch: int
    after: int
    why: str
    by_choice: bool
    shape: str
    layers: str
    micro_batches: str
    working: int
    standbys: int
    like_the_first: bool
    stood_still_s: float | None = None
    bytes_moved: int | None = None
    samples_per_second: float | None = None


def find_plans(
    events: Sequence[Event], recoveries: Iterable[Recovery], steps: Sequence[Step]
) -> tuple[PlanInForce, ...]:
    """All plans of a run, in the order in which they were in force, without plans under which no worker trained."""
    job = next((event for event in events if isinstance(event, Job)), None)
    answers = {recovery.to_epoch: recovery for recovery in recoveries}
    failed = {event.epoch for event in events if isinstance(event, PlanFailed)}
    changes = {event.to_epoch: event for event in events if isinstance(event, Reconfiguration)}
    started = [(event.epoch or 0, event.plan) for event in events if isinstance(event, EpochStarted)]
    found: list[PlanInForce] = []
    for epoch, plan in started:
        if found and epoch not in answers and epoch not in changes:
            continue
        found.append(PlanInForce(
            epoch=epoch,
            **(_origin(answers.get(epoch), changes.get(epoch), failed) if found else _start(steps)),
            shape=shape.describe(plan),
            layers=shape.layers(plan, (job.chunks if job else None) or ()),
            micro_batches=shape.micro_batches(plan),
            working=len(shape.working(plan)),
            standbys=len(shape.standbys(plan)),
            like_the_first=shape.same_work(plan, started[0][1]),
            samples_per_second=settled_rate(steps, epoch),
        ))  # fmt: skip
    return tuple(found)


def _start(steps: Sequence[Step]) -> dict[str, Any]:
    return {"after": steps[0].iteration - 1 if steps else 0, "why": AT_THE_START, "by_choice": False}


def _origin(recovery: Recovery | None, change: Reconfiguration | None, failed: Container[int | None]) -> dict[str, Any]:
    """`failed`: epochs whose plan has failed in its first step."""
    if recovery is not None:
        dead = [death.worker for death in recovery.dead]
        nobody = "the plan before failed" if recovery.from_epoch in failed else "groups were rebuilt"
        why = f"worker{'s' if len(dead) > 1 else ''} {listing(dead)} died" if dead else nobody
        return {
            "after": recovery.resumed_iteration, "why": why, "by_choice": False, "bytes_moved": recovery.bytes_moved,
        }  # fmt: skip
    assert change is not None
    return {
        "after": change.resumed_iteration, "why": change.why, "by_choice": True,
        "stood_still_s": change.stood_still_s, "bytes_moved": change.bytes_moved,
    }  # fmt: skip
