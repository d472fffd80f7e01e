# SPDX-License-Identifier: Apache-2.0
"""Fault injections: failures and slowdowns on purpose.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from megatron_resihp.events.event import Event, event


@event("drill", written_by="the worker that is struck, or the coordinator")
class Drill(Event):
    """A failure was injected on purpose."""

    action: Annotated[str, "kill, stop or rebuild"]
    target: Annotated[int | str, "the worker or node"]
    iteration: Annotated[int | None, "iteration at which it struck"] = None
    point: Annotated[str | None, "point of the iteration at which it struck"] = None


@event("drill_set", written_by="coordinator")
class DrillSet(Event):
    """A fault injection has slowed a worker or a link, or ended that."""

    workers: Annotated[tuple[int, ...], "one worker, the two ends of a link, or none: all are at full speed again"]
    factor: Annotated[float, "speed or bandwidth relative to its own when healthy, in (0, 1]"]
    iteration: Annotated[int | None, "for when it was scheduled; null: asked for from outside"] = None
    speeds: Annotated[Mapping[str, float] | None, "workers that are slowed now, with their speeds"] = None
    links: Annotated[Mapping[str, float] | None, 'links that are slowed now, as "A-B", with their factors'] = None


@event("drill_refused", written_by="coordinator")
class DrillRefused(Event):
    """A scheduled slowdown could not be set when its iteration began."""

    workers: Annotated[tuple[int, ...], "the worker, or the two ends of a link"]
    reason: Annotated[str, "why"]
