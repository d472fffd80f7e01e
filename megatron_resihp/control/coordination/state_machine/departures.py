# SPDX-License-Identifier: Apache-2.0
"""Nodes that were told to leave a job that goes on without them. Pure; imports this package's other pure modules."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from megatron_resihp.control.coordination.state_machine.joining import JoiningWorkers


@dataclass
class Departures:
    """The departures of one job.

    Attributes:
        joining: know which worker is on which node.
        agents: node that is to leave → the name by which its agent is told that it may.
        left: workers that have left with their nodes.
    """

    joining: JoiningWorkers
    agents: dict[int, int] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)

    def among(self, workers: Iterable[int]) -> frozenset[int]:
        """Which of these workers are to leave."""
        return frozenset(worker for worker in workers if self.joining.node_of(worker) in self.agents)

    def without_members(self, living: Collection[int]) -> list[int]:
        """Nodes that may leave, because no plan needs their workers."""
        needed = {self.joining.node_of(worker) for worker in living}
        return sorted(self.agents.keys() - needed)
