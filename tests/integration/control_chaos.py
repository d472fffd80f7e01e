# SPDX-License-Identifier: Apache-2.0
"""Random sequences of what may befall those that decide about a job, by seed, for test_control_chaos.py. Starts no
processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Final

ITERATIONS: Final = 60
NODES: Final = 3
"""With one worker each, all of them replicas."""
MEMBERS: Final = 3
"""Of etcd."""
LEASE_S: Final = 3
MOST_COORDINATORS_LOST: Final = 2
LONGEST_CUT_S: Final = 12.0


@dataclass(frozen=True)
class Blow:
    """Something that goes wrong.

    Attributes:
        iteration: by whose end it comes.
        delay_s: how long after that.
        what: "kill", "pause" or "cut".
        target: "coordinator" (the one that leads), "member" (of etcd), "node", "worker" or "link".
        number: of the member, node or worker, or of a link's node.
        lasts_s: after which a paused process continues, a killed member of etcd is started again, and a link that was
            cut carries packets again.
    """

    iteration: int
    delay_s: float
    what: str
    target: str
    number: int = 0
    lasts_s: float = 0.0
    other: int | None = None
    """Of a link: the other node, or None for the coordinators."""


def random_blows(seed: int) -> tuple[Blow, ...]:
    """Two to six, of which one at least is to a coordinator. One worker is left, and most of etcd in the end."""
    random = Random(seed)
    lost = random.sample(range(NODES), 2)
    blows = [_to_a_coordinator(random) for _ in range(random.randint(1, MOST_COORDINATORS_LOST))]
    blows += [_to_etcd(random) for _ in range(random.randint(1, 2))]
    how = random.random()
    if how < 0.35:
        blows.append(_at_some_time(random, "kill", "node", lost[0]))
    elif how < 0.9:
        blows.append(_to_a_link(random, lost[0], lost[1]))
    if random.random() < 0.6:
        blows.append(_at_some_time(random, "kill", "worker", lost[1]))
    return tuple(sorted(blows, key=lambda blow: (blow.iteration, blow.delay_s)))


def _to_a_coordinator(random: Random) -> Blow:
    if random.random() < 0.6:
        return _at_some_time(random, "kill", "coordinator")
    return _at_some_time(random, "pause", "coordinator", lasts_s=random.choice((0.5, 1.5 * LEASE_S, 4.0 * LEASE_S)))


def _to_etcd(random: Random) -> Blow:
    what = random.choice(("kill", "pause"))
    return _at_some_time(random, what, "member", random.randrange(MEMBERS), random.choice((1.0, 4.0, 8.0)))


def _to_a_link(random: Random, node: int, other: int) -> Blow:
    lasts_s = random.choice((0.5, 4.0, LONGEST_CUT_S))
    cut = _at_some_time(random, "cut", "link", node, lasts_s)
    return cut if random.random() < 0.5 else replace(cut, other=other)


def _at_some_time(random: Random, what: str, target: str, number: int = 0, lasts_s: float = 0.0) -> Blow:
    # Close to each other, too: the next one may come while a coordinator is missing.
    iteration = random.choice((5, 5, 6, 20, random.randrange(3, ITERATIONS - 10)))
    return Blow(iteration, random.choice((0.0, random.uniform(0.0, 2.0 * LEASE_S))), what, target, number, lasts_s)
