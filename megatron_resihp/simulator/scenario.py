# SPDX-License-Identifier: Apache-2.0
"""A scenario: a job, the events of its workers, and the delays of changes.

Imports numpy, `cost` and this package's modules.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from megatron_resihp.cost.job import UNTIL_NEXT_EVENT_S
from megatron_resihp.simulator.cluster import Clock, Delays, Judge
from megatron_resihp.simulator.sizes import Sizes
from megatron_resihp.simulator.traces import Trace


class ScenarioError(ValueError):
    """An impossible scenario; the message is one line and names the place."""


@dataclass(frozen=True)
class Scenario:
    """The input of a simulation.

    Attributes:
        name: of the scenario.
        sizes: of the job.
        traces: the events, one trace for each random order.
        delays: of changes.
        squares: Σ l² of each micro-batch, tokens², in each of several iterations; if empty, each sample is one
            document.
        until_next_event_s: the time until the next event that strategies expect.
        strategies: the strategies to compare; if empty, all.
    """

    name: str
    sizes: Sizes
    traces: tuple[Trace, ...]
    delays: Delays = field(default_factory=Delays)
    squares: tuple[tuple[float, ...], ...] = ()
    until_next_event_s: float = UNTIL_NEXT_EVENT_S
    strategies: tuple[str, ...] = ()

    def judge(self, clock: Clock = lambda: 0.0) -> Judge:
        typical = float(np.mean(self.squares)) if self.squares else None
        cost = replace(self.sizes.cost(), squares=typical, until_next_event_s=self.until_next_event_s)
        return Judge(cost, self.squares, clock)
