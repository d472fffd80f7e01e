# SPDX-License-Identifier: Apache-2.0
"""Seconds in which gradients are summed through host memory, under plans that Megatron's own groups can't run.

Imports `plan` and this package. Such plans sum gradients with gloo, where `--resihp-carrier` is `host`: after the last
op of an iteration, on all workers at the same time. With `--overlap-grad-reduce` some of them begin earlier. Here all
count as if they came after it, since how much is hidden is not modelled. Megatron's own sums count as part of no op.
"""

from dataclasses import dataclass

from megatron_resihp.cost.memory import memory_of
from megatron_resihp.cost.model.layers import Model
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import Chunk, ParallelPlan, shortened, spelled_out


@dataclass(frozen=True)
class HostSums:
    """How fast a job sums gradients through its hosts' memory.

    Attributes:
        own: the job's own split into layers; Megatron's own groups can run uniform plans that have it.
        bandwidth: bytes/s of a worker's gradients.
    """

    own: tuple[Chunk, ...]
    bandwidth: float

    def seconds(self, plan: ParallelPlan, model: Model, training: Training) -> float:
        """Of an iteration; workers wait for the one with most gradients.

        Raises:
            PlanError: the plan's layers differ from the model's.
        """
        alone = len(plan.replicas) == 1 and not any(plan.standbys.values())
        if alone or shortened(spelled_out(plan, self.own), self.own).not_uniform is None:
            return 0.0
        return max(use.gradients for use in memory_of(plan, model, training).values()) / self.bandwidth
