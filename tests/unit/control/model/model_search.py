# SPDX-License-Identifier: Apache-2.0
"""Goes through the states of a job: all of them, the nearest first, or one course after another by chance.

May import the other files of the model.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final

from model_job import Job, ModelJob
from model_values import Scope, Violation

FAULTY: Final = 0.05
"""Share of faults in what happens by chance: a course of nothing else is short."""


@dataclass(frozen=True)
class Found:
    """What a search has met.

    Attributes:
        states: distinct ones of the job.
        transitions: between them.
        ends: states in which the job is over.
        coordinator_states: distinct ones of the coordinator.
        seconds: that it took.
        whole: nothing is left to be met.
    """

    states: int
    transitions: int
    ends: int
    coordinator_states: int
    seconds: float
    whole: bool

    def __str__(self) -> str:
        rest = "all" if self.whole else "the nearest"
        rate = self.states / max(self.seconds, 1e-9)
        return (
            f"{self.states} states ({rest}), {self.transitions} transitions, {self.ends} ends, "
            f"{self.coordinator_states} of the coordinator, {self.seconds:.1f} s, {rate:.0f}/s"
        )


def explore(scope: Scope, most: int) -> Found:
    """Meet every state, up to so many, those that take the fewest happenings first.

    If there are no more, every one of them has to lead to an end without another fault.

    Raises:
        Violation: with a shortest way to it.
    """
    start, job = time.monotonic(), ModelJob(scope)
    first = job.first()
    came_from: dict[Job, Job | None] = {first: None}
    waiting, ends = deque([first]), list[Job]()
    transitions = 0
    before = defaultdict[Job, list[Job]](list)
    while waiting and len(came_from) < most:
        state = waiting.popleft()
        try:
            deeds, faults = job.next(state)
        except Violation as error:
            raise Violation(f"{error}; after:\n{_way(job, came_from, state)}") from None
        if not deeds:
            ends.append(state)
        transitions += len(deeds) + len(faults)
        for _, after in deeds:
            before[after].append(state)
        for _, after in (*deeds, *faults):
            if after not in came_from:
                came_from[after] = state
                waiting.append(after)
    if not waiting and (stuck := came_from.keys() - _lead_to(ends, before)):
        nearest = next(state for state in came_from if state in stuck)
        raise Violation(f"the job can't end without another fault; after:\n{_way(job, came_from, nearest)}")
    seconds = time.monotonic() - start
    return Found(len(came_from), transitions, len(ends), job.coordinator_states, seconds, not waiting)


def _lead_to(ends: Iterable[Job], before: Mapping[Job, list[Job]]) -> set[Job]:
    """The states from which one of these can be reached."""
    found = set(ends)
    waiting = list(found)
    while waiting:
        for state in before.get(waiting.pop(), ()):
            if state not in found:
                found.add(state)
                waiting.append(state)
    return found


def _way(job: ModelJob, came_from: dict[Job, Job | None], state: Job) -> str:
    """What has happened on the way to a state, a line each."""
    lines = []
    before = came_from[state]
    while before is not None:
        lines.append(next(label for label, after in chain(*job.next(before)) if after == state))
        state, before = before, came_from[before]
    return "\n".join(reversed(lines))


def wander(scope: Scope, courses: int, seed: int, most: int = 2000) -> int:
    """Let chance decide what happens next, again and again from the start; returns how many steps that took.

    Raises:
        Violation: with all that has happened before.
    """
    chance, job, steps = random.Random(seed), ModelJob(scope), 0
    first = job.first()
    for _ in range(courses):
        state, labels = first, list[str]()
        try:
            while (found := job.next(state))[0]:
                deeds, faults = found
                label, state = chance.choice(faults if faults and chance.random() < FAULTY else deeds)
                labels.append(label)
                if len(labels) > most:
                    raise Violation("the job does not come to an end")
        except Violation as error:
            raise Violation(f"{error}; after:\n" + "\n".join(labels)) from None
        steps += len(labels)
    return steps
