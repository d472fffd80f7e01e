# SPDX-License-Identifier: Apache-2.0
"""Who may go on after a partition: which members of the last epoch are accounted for.

Whoever has lost a node can't tell a broken network from a broken node. A member counts as accounted for if it is
reached, if its own agent has told of its end, or if the cluster's manager says that its node is down. Agents tell the
coordinator only, so of two sides that have lost each other at most one may go on. Pure; imports the standard library.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field


def may_go_on(accounted: int, members: int, *, has_coordinator: bool) -> bool:
    """Whether a side may go on that can account for so many of the last epoch's members."""
    return 2 * accounted > members or (has_coordinator and 2 * accounted == members)


@dataclass
class Accounts:
    """The members of the last epoch that are not accounted for, and what is waited for.

    Attributes:
        lost: workers whose nodes are lost.
        late: workers that were given up. Their agents are there, and will tell of their end.
        asked: nodes of which it was asked, since the epoch broke, whether they are down.
        unanswered: a question is.
        waiting: word of some is waited for.
        over: that has taken too long.
    """

    lost: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    unanswered: bool = False
    waiting: bool = False
    over: bool = False

    def begin(self) -> None:
        """An epoch has broken."""
        self.asked, self.unanswered, self.waiting, self.over = set(), False, False, False

    def settle(self) -> None:
        """Another epoch has begun, whose members are all there."""
        self.lost, self.late = set(), set()

    def lose(self, workers: Iterable[int]) -> None:
        """The node of these workers is lost, and no word of their end has come."""
        self.lost.update(workers)
        self.late -= self.lost

    def hear_of(self, workers: Iterable[int]) -> bool:
        """Word of the end of these has come; returns whether any was not accounted for."""
        told = set(workers) & (self.lost | self.late)
        self.lost, self.late = self.lost - told, self.late - told
        return bool(told)

    def missing(self, members: Iterable[int]) -> set[int]:
        """Which of these are not accounted for."""
        return set(members) & (self.lost | self.late)

    def short(self, members: Collection[int]) -> str:
        """In words, why the side of the coordinator may not go on; empty: it may."""
        missing = self.missing(members)
        if may_go_on(len(members) - len(missing), len(members), has_coordinator=True):
            return ""
        names = ", ".join(map(str, sorted(missing)))
        told = f"only {len(members) - len(missing)} of {len(members)} workers are accounted for"
        return f"{told}; lost without a word, and perhaps alive: {names}"

    def to_ask(self, members: Iterable[int], node_of: Callable[[int], int]) -> tuple[int, ...]:
        """Nodes of which it is to be asked now whether they are down."""
        nodes = {node_of(worker) for worker in self.lost.intersection(members)} - self.asked
        self.asked |= nodes
        self.unanswered = self.unanswered or bool(nodes)
        return tuple(sorted(nodes))

    def awaits_word(self, members: Iterable[int]) -> bool:
        """Whether word of some may still come in time."""
        return not self.over and (self.unanswered or bool(self.late.intersection(members)))
