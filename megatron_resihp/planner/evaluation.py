"""How fast a plan is with a given health, by simulation, and how near that is to the bound.

Imports numpy, `plan`, `pipeline`, `cost` and this room.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_resihp.cost.bounds import IterationBound, iteration_bound
from megatron_resihp.cost.job import Array, JobCost
from megatron_resihp.cost.memory import with_layers
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.pipeline.planned import program_of
from megatron_resihp.pipeline.simulate import Timeline, simulate
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.planner.health import Health

F, B, W = OpKind


@dataclass(frozen=True)
class Evaluation:
    """What a plan gives.

    Attributes:
        replica_s: makespan of each replica's micro-batches, in seconds.
        bound: what no plan can beat with this health.
        samples: in a global batch.
    """

    replica_s: tuple[float, ...]
    bound: IterationBound
    samples: int

    @property
    def iteration_s(self) -> float:
        """Without gradient reduction and optimizer."""
        return max(self.replica_s)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.iteration_s

    @property
    def share_of_bound(self) -> float:
        """Bound over iteration time: 1 is as fast as can be."""
        return self.bound.seconds / self.iteration_s


def evaluate(plan: ParallelPlan, health: Health, cost: JobCost) -> Evaluation:
    """Simulate every replica of a plan.

    Raises:
        PlanError: the plan has other layers than the model.
        KeyError: a working worker is dead.
        ProgramError: the plan has migrations.
    """
    return Evaluation(
        replica_s=tuple(timeline_of(replica, health, cost).makespan for replica in plan.replicas),
        bound=iteration_bound(cost, health.speed),
        samples=cost.micro_batches * cost.training.micro_batch_size,
    )


def timeline_of(replica: Replica, health: Health, cost: JobCost) -> Timeline:
    """When each op of a replica runs."""
    replica = with_layers(replica, cost.model)
    seconds = stage_seconds(replica, health, cost)[..., np.newaxis]
    return simulate(program_of(replica), seconds, transfer_seconds(replica, health, cost))


def stage_seconds(replica: Replica, health: Health, cost: JobCost) -> Array:
    """Of each op of one micro-batch, [3 (F, B, W), chunks]; B is the whole backward where it isn't split.

    A stage is as fast as its slowest member.
    """
    seconds = np.zeros((len(OpKind), len(replica.chunks)))
    for number, chunk in enumerate(replica.chunks):
        members = replica.stages[chunk.stage]
        speed = min(health.speed[worker] for worker in members)
        seconds[:, number] = cost.seconds(len(members))[:, chunk.first : chunk.end].sum(axis=1) / speed
    if not (replica.schedule and replica.schedule.splits_backward):
        seconds[B] += seconds[W]
        seconds[W] = 0.0
    return seconds


def transfer_seconds(replica: Replica, health: Health, cost: JobCost) -> Array:
    """Seconds of each transfer, [2, chunks − 1, 1]."""
    groups = [replica.stages[chunk.stage] for chunk in replica.chunks]
    seconds = [
        cost.transfer(len(sender), len(receiver)) / health.between(sender, receiver)
        for sender, receiver in pairwise(groups)
    ]
    return np.broadcast_to(np.array(seconds)[:, np.newaxis], (2, len(seconds), 1))
