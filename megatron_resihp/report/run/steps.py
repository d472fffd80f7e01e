# SPDX-License-Identifier: Apache-2.0
"""The applied iterations, with their epochs and speeds.

May import: the standard library and the classes of events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from megatron_resihp.events.event import Event
from megatron_resihp.events.training import Agreed, AgreedStep, Iteration

MEDIAN_OVER = 10
"""Number of iterations in the median for a throughput before or after a recovery."""
MEDIAN_LEAST = 3
"""The least number of iterations for a usual duration, because the first ones include start-up."""


@dataclass(frozen=True)
class Step:
    """One applied iteration."""

    iteration: int
    epoch: int
    """Epoch of the attempt that was agreed."""
    ended_at: float | None
    """End of the step; None if only the coordinator's record of the step exists."""
    loss: Mapping[str, float]
    grad_norm: float | None
    skipped: bool
    samples_per_second: float | None


def applied_attempts(events: Sequence[Event]) -> set[tuple[int, int]]:
    """(iteration, epoch) of every attempt that the workers agreed on; more than one for an iteration is a fault."""
    reported = {(event.iteration, agreed_epoch(event)) for event in events if isinstance(event, Iteration)}
    known = {iteration for iteration, _ in reported}
    for event in _agreed(events):
        if event.iteration not in known:
            reported.add((event.iteration, agreed_epoch(event)))
            known.add(event.iteration)
    return reported


def agreed_epoch(step: AgreedStep) -> int:
    """Epoch of the attempt that was agreed."""
    return step.epoch or 0 if step.agreed_epoch is None else step.agreed_epoch


def applied_steps(events: Sequence[Event], batch: int | None) -> list[Step]:
    """The applied iterations in ascending order, each once; `batch` is for events that lack their sample count."""
    first_of: dict[int, AgreedStep] = {}
    for event in [*(each for each in events if isinstance(each, Iteration)), *_agreed(events)]:
        first_of.setdefault(event.iteration, event)
    steps: list[Step] = []
    for _, first in sorted(first_of.items()):
        steps.append(_step(first, steps[-1] if steps else None, batch))
    return steps


def rates_around(steps: Sequence[Step], from_epoch: int, to_epoch: int) -> tuple[float | None, float | None]:
    """Samples per second before and after the recovery that led from one epoch to another."""
    by_epoch = _settled_rates(steps)
    earlier = [epoch for epoch in by_epoch if epoch <= from_epoch]
    before = by_epoch[max(earlier)] if earlier else []
    after = by_epoch.get(to_epoch, [])
    return _median(before[-MEDIAN_OVER:]), _median(after[:MEDIAN_OVER])


def usual_duration(steps: Sequence[Step]) -> float | None:
    """Median seconds of the latest iterations; None: fewer than MEDIAN_LEAST are known."""
    ends = [step.ended_at for step in steps[-MEDIAN_OVER - 1 :] if step.ended_at is not None]
    lasted = [after - before for before, after in pairwise(ends)]
    return median(lasted) if len(lasted) >= MEDIAN_LEAST else None


def settled_rate(steps: Sequence[Step], epoch: int) -> float | None:
    """Median samples per second of an epoch, without its first iteration; None: it has no other iteration."""
    return _median(_settled_rates(steps).get(epoch, []))


def _settled_rates(steps: Sequence[Step]) -> dict[int, list[float]]:
    """Rates of each epoch, without the first iteration after a recovery, whose time includes the recovery."""
    rates: dict[int, list[float]] = {}
    for step in steps:
        if step.epoch not in rates:
            rates[step.epoch] = []
            if len(rates) > 1:
                continue
        if step.samples_per_second is not None:
            rates[step.epoch].append(step.samples_per_second)
    return rates


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return median(values) if values else None


def _agreed(events: Iterable[Event]) -> Iterable[Agreed]:
    # The record of "nothing agreed yet" is about iteration 0, which is no step.
    return (event for event in events if isinstance(event, Agreed) and event.iteration > 0)


def _step(event: AgreedStep, previous: Step | None, batch: int | None) -> Step:
    ended_at, samples, duration = None, batch, None
    if isinstance(event, Iteration):
        ended_at = event.time
        samples = batch if event.samples is None else event.samples
        duration = _duration(event, previous) if event.duration_s is None else event.duration_s
    return Step(
        iteration=event.iteration,
        epoch=agreed_epoch(event),
        ended_at=ended_at,
        loss=event.loss or {},
        grad_norm=event.grad_norm,
        skipped=bool(event.skipped),
        samples_per_second=samples / duration if samples and duration and duration > 0 else None,
    )


def _duration(event: Iteration, previous: Step | None) -> float | None:
    """Seconds of an iteration. A new reporter has no previous iteration, but the log has its predecessor's."""
    if previous is None or previous.ended_at is None or previous.iteration != event.iteration - 1:
        return None
    return event.time - previous.ended_at
