# SPDX-License-Identifier: Apache-2.0
"""The result of a simulation. May import: the standard library and `simulator`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_resihp.simulator.cluster import Outcome, capacity, capacity_asked
from megatron_resihp.simulator.scenario import Scenario


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    Attributes:
        scenario: the simulated scenario.
        outcomes: for each strategy, one outcome per trace.
        healthy_samples_per_s: of the layout at the start, with all workers well.
        second_step: whether `joint` took its second step.
    """

    scenario: Scenario
    outcomes: Mapping[str, Sequence[Outcome]]
    healthy_samples_per_s: float
    second_step: bool

    @property
    def capacity(self) -> float:
        """Σ p over live workers ÷ all workers, the mean over sessions."""
        traces = self.scenario.traces
        return statistics.fmean(capacity(trace, self.scenario.sizes.workers) for trace in traces)

    def share(self, name: str) -> float:
        """A strategy's throughput ÷ (capacity × throughput with all workers well), the capacity of the whole time."""
        traces = self.scenario.traces
        asked = statistics.fmean(capacity_asked(trace, self.scenario.sizes.workers) for trace in traces)
        return self.samples_per_s(name) / (asked * self.healthy_samples_per_s)

    def samples_per_s(self, name: str) -> float:
        return statistics.fmean(outcome.samples_per_s for outcome in self.outcomes[name])
