# SPDX-License-Identifier: Apache-2.0
"""Traces of a cluster's events: deaths, slowdowns, recoveries and rejoins of workers, with their times.

The caller passes the random generator from which a trace is drawn, so a seed gives the same trace everywhere. Imports
numpy and the standard library.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import batched, groupby
from math import gamma
from typing import Final

import numpy as np

HOUR: Final = 3600.0
COMPUTE_SLOW_S: Final = 10 * 60.0
LINK_SLOW_S: Final = 24 * 60.0
LARGE_JOB_SLOW_S: Final = 72 * 60.0
"""Mean durations of slow computation, of slow communication, and of both in jobs of more than 512 GPUs (Greyhound,
USENIX ATC 2025, section 3)."""
SLOW_SPEEDS: Final = (0.3, 0.9)
"""Range from which the speeds of slow workers and links are drawn uniformly; the paper gives only examples."""

Gaps = Callable[[np.random.Generator], float]
"""Draws the seconds from one event to the next."""


class What(StrEnum):
    """Kinds of events."""

    DEATH = "death"
    REJOIN = "rejoin"
    SPEED = "speed"
    LINK = "link"


@dataclass(frozen=True)
class Event:
    """An event of workers, or of a link.

    Attributes:
        at_s: seconds from the start of the session.
        what: kind of event.
        workers: the workers concerned; for a link its two ends, the smaller id first.
        speed: of the workers or the link from now on, in (0, 1].

    Raises:
        ValueError: on construction, for an impossible event.
    """

    at_s: float
    what: What
    workers: tuple[int, ...]
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not self.at_s >= 0:
            raise ValueError(f"an event at {self.at_s:g} s is before the start")
        if not 0 < self.speed <= 1:
            raise ValueError(f"workers {self.workers} get speed {self.speed:g}; it must be above 0 and at most 1")
        if self.what is What.LINK and (len(self.workers) != 2 or self.workers[0] >= self.workers[1]):
            raise ValueError(f"link {self.workers} must have two ends, the smaller worker id first")


@dataclass(frozen=True)
class Trace:
    """The events of a session.

    Attributes:
        duration_s: length of the session.
        events: in order of time; `trace` leaves out events after the end.
    """

    duration_s: float
    events: tuple[Event, ...]

    @property
    def moments(self) -> list[tuple[float, tuple[Event, ...]]]:
        """Simultaneous events, grouped."""
        return [(at, tuple(events)) for at, events in groupby(self.events, lambda event: event.at_s)]


def trace(duration_s: float, *parts: Iterable[Event]) -> Trace:
    """The events of all parts, in order, up to the end of the session."""
    events = sorted((event for part in parts for event in part), key=lambda e: (e.at_s, e.what, e.workers, e.speed))
    return Trace(duration_s, tuple(event for event in events if event.at_s < duration_s))


# ---- when


def every(seconds: float) -> Gaps:
    """Fixed intervals."""
    return lambda rng: seconds


def poisson(mean_s: float) -> Gaps:
    """Independent events."""
    return lambda rng: float(rng.exponential(mean_s))


def weibull(mean_s: float, shape: float) -> Gaps:
    """Weibull gaps. With a shape below 1, failures come in bursts, as in large systems.

    Source: Schroeder and Gibson, A large-scale study of failures in high-performance computing systems, DSN 2006:
    shapes of 0.7 to 0.8.
    """
    scale = mean_s / gamma(1 + 1 / shape)
    return lambda rng: float(scale * rng.weibull(shape))


def moments(gaps: Gaps, duration_s: float, rng: np.random.Generator) -> list[float]:
    """Times of events in a session; the first event comes after a gap."""
    found: list[float] = []
    now = gaps(rng)
    while now < duration_s:
        found.append(now)
        now += gaps(rng)
    return found


# ---- which workers, and what happens


def removals(times: Sequence[float], workers: int, rng: np.random.Generator) -> list[Event]:
    """Workers die for good, one after another in random order; at most all of them."""
    order = rng.permutation(workers)
    return [Event(at, What.DEATH, (int(worker),)) for at, worker in zip(times, order, strict=False)]


def outages(
    times: Sequence[float], units: Sequence[tuple[int, ...]], back_after: Gaps, rng: np.random.Generator
) -> list[Event]:
    """Units die and rejoin later. A unit is a worker, or all workers of a node, which die at once."""
    events: list[Event] = []
    for start, end, unit in _spells(times, units, back_after, rng):
        events += [Event(start, What.DEATH, unit), Event(end, What.REJOIN, unit)]
    return events


def slow_downs(
    times: Sequence[float],
    units: Sequence[tuple[int, ...]],
    lasting: Gaps,
    rng: np.random.Generator,
    what: What = What.SPEED,
    speeds: tuple[float, float] = SLOW_SPEEDS,
) -> list[Event]:
    """Workers, or links, slow down, each to its own speed, and recover later."""
    events: list[Event] = []
    for start, end, unit in _spells(times, units, lasting, rng):
        events += [Event(start, what, unit, float(rng.uniform(*speeds))), Event(end, what, unit)]
    return events


def single(workers: int) -> list[tuple[int, ...]]:
    """Each worker by itself."""
    return [(worker,) for worker in range(workers)]


def nodes(workers: int, workers_per_node: int) -> list[tuple[int, ...]]:
    """The workers of each node."""
    return [tuple(node) for node in batched(range(workers), workers_per_node)]


def _spells(
    times: Sequence[float], units: Sequence[tuple[int, ...]], lasting: Gaps, rng: np.random.Generator
) -> Iterator[tuple[float, float, tuple[int, ...]]]:
    """Start, end and unit of each spell; a unit in a spell is not drawn again before the spell ends."""
    back: dict[int, float] = {}
    for at in times:
        free = [number for number in range(len(units)) if back.get(number, 0.0) <= at]
        if free:
            chosen = free[int(rng.integers(len(free)))]
            back[chosen] = at + lasting(rng)
            yield at, back[chosen], units[chosen]
