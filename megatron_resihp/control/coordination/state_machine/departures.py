# SPDX-License-Identifier: Apache-2.0
"""Nodes and workers that were told to leave a job that goes on without them.

Pure; imports this package's other pure modules.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from megatron_resihp.control.coordination.state_machine.joining import JoiningWorkers

TOGETHER_S: Final = 2.0
"""Nodes that a signal tells to leave within this time are told by the same hand."""


@dataclass
class Departures:
    """The departures of one job.

    Attributes:
        joining: know which worker is on which node.
        agents: node that is to leave → the name by which its agent is told that it may.
        workers: that are to leave without their nodes.
        left: workers that have left.
        left_s: worker that is to leave → seconds that it still has.
        told_at: node → when a signal told it to leave.
    """

    joining: JoiningWorkers
    agents: dict[int, int] = field(default_factory=dict)
    workers: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    left_s: dict[int, float] = field(default_factory=dict)
    told_at: dict[int, float] = field(default_factory=dict)

    def among(self, workers: Iterable[int]) -> frozenset[int]:
        """Which of these workers are to leave."""
        if not self.workers and not self.agents:
            return frozenset()
        return frozenset(w for w in workers if w in self.workers or self.joining.node_of(w) in self.agents)

    def without_members(self, living: Collection[int]) -> list[int]:
        """Nodes that may leave, because no plan needs their workers."""
        if not self.agents:
            return []
        needed = {self.joining.node_of(worker) for worker in living}
        return sorted(self.agents.keys() - needed)

    def due(self, workers: Iterable[int], seconds: float) -> None:
        """These workers are to leave within this time; an earlier deadline stays."""
        self.left_s |= {worker: min(seconds, self.left_s.get(worker, seconds)) for worker in workers}

    def late(self, passed_s: float, living: Collection[int]) -> list[int]:
        """The members that should have left by now.

        Args:
            passed_s: since the last call.
        """
        self.left_s = {worker: left - passed_s for worker, left in self.left_s.items() if worker in living}
        return sorted(worker for worker, left in self.left_s.items() if left <= 0)

    def told_together(self, node: int, now: float) -> set[int]:
        """A signal tells a node to leave; returns the nodes that one has told to within `TOGETHER_S`, this one too."""
        self.told_at[node] = now
        return {each for each, at in self.told_at.items() if now - at <= TOGETHER_S}


def named(nodes: Iterable[int], workers: Iterable[int]) -> str:
    """These, in words."""
    return ", ".join([*(f"node {node}" for node in sorted(nodes)), *(f"worker {worker}" for worker in sorted(workers))])
