# SPDX-License-Identifier: Apache-2.0
"""How far an iteration got on this worker, with what is needed to repeat it. May import torch and `protocol`."""

from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_resihp.protocol.records import IterationPhase, Outcome, Record

LOSS_SLOTS = 4
"""How many named losses the agreement carries."""


class ContractBroken(RuntimeError):
    """A record contradicts what was agreed; going on could train another model, so the job ends."""


@dataclass
class Progress:
    """This worker's record (DESIGN contract 3) with what is needed to repeat an iteration; keeps two iterations."""

    iteration: int = 0
    stage: IterationPhase = IterationPhase.COMPUTE
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    counters: dict[int, dict[str, Any]] = field(default_factory=dict)

    def begin(self, iteration: int, counters: dict[str, Any] | None) -> None:
        self.iteration, self.stage = iteration, IterationPhase.COMPUTE
        if counters is not None:
            self.counters[iteration] = counters
        for table in (self.outcomes, self.counters):
            for old in [n for n in table if n < iteration - 1 or n > iteration]:
                del table[old]

    def agreed(self, outcome: Outcome) -> None:
        self.outcomes[self.iteration] = outcome
        self.stage = IterationPhase.AGREED

    def record(self, in_loop: bool, position: int, loss_names: tuple[str, ...]) -> Record:
        """What the coordinator gets; loss totals become numbers, which waits for the device once."""
        counters = {n: _plain(counters) for n, counters in self.counters.items()}
        return Record(self.iteration, self.stage, in_loop, dict(self.outcomes), counters, position, loss_names)


def _plain(counters: dict[str, Any]) -> dict[str, Any]:
    totals = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in counters["totals"].items()}
    return {**counters, "totals": totals}
