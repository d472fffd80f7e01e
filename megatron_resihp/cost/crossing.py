# SPDX-License-Identifier: Apache-2.0
"""How much a plan's nodes send each other in an iteration. Imports `plan` and this package.

What is counted are gradients that replicas sum and results that stages pass on. Not counted are tensor-parallel groups
across nodes, keys and values of sequences that replicas share, gradients for copies of experts that are held once, the
sum of embeddings that two stages share, and what is sent now and then.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from megatron_resihp.cost.memory import memory_of
from megatron_resihp.cost.model.layers import Model
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.copies import copies_at, instances_under, keeps_copies
from megatron_resihp.plan.parallel_plan import shared_with

NodeOf = Callable[[int], int]
"""Tells a worker's node."""


@dataclass(frozen=True)
class Crossing:
    """Bytes that the busiest node sends to others in an iteration.

    Attributes:
        gradients: parts of sums; with a distributed optimizer also parameters, and gradients for copies of its parts.
        results: of stages: activations forwards, and their gradients backwards.
    """

    gradients: int
    results: int


def crossing(plan: ParallelPlan, model: Model, training: Training, node_of: NodeOf) -> Crossing:
    """What crosses nodes under a plan whose replicas have one shape and name their layers.

    Raises:
        PlanError: the plan's layers differ from the model's, or members of a stage cannot share a layer.
    """
    gradients, results = _gradients(plan, model, training, node_of), _results(plan, model, training, node_of)
    nodes = {node_of(worker) for worker in plan.members}
    busiest = max(sorted(nodes), key=lambda node: gradients[node] + results[node])
    return Crossing(round(gradients[busiest]), round(results[busiest]))


def _gradients(plan: ParallelPlan, model: Model, training: Training, node_of: NodeOf) -> defaultdict[int, float]:
    """Bytes that each node sends. Rings go through each node once, whatever the order of ranks, as NCCL's do."""
    sent, used = defaultdict[int, float](float), memory_of(plan, model, training)
    instances = instances_under(plan, training.optimizer_instances)
    copies = training.distributed_optimizer and keeps_copies(plan, instances)
    for coordinate in plan.grid.coordinates():
        holders = plan.grid.workers_at(coordinate)
        nodes = {node_of(worker) for worker in holders}
        own, share = used[holders[0]], 1 / len(holders)
        second = own.weights if training.distributed_optimizer else own.gradients
        for node in nodes if len(nodes) > 1 else ():
            sent[node] += (own.gradients + second) * (1 - share)
        for owner, keeper in copies_at(plan, coordinate, node_of) if copies else ():
            if node_of(owner) != node_of(keeper):
                sent[node_of(owner)] += own.gradients * share
    return sent


def _results(plan: ParallelPlan, model: Model, training: Training, node_of: NodeOf) -> defaultdict[int, float]:
    sent = defaultdict[int, float](float)
    for number, replica in enumerate(plan.replicas):
        sharers = len(shared_with(plan, number))
        for before, after in pairwise(replica.stage_of_chunk):
            pairs = zip(replica.stages[before], replica.stages[after], strict=True)
            ends = [(node_of(one), node_of(other)) for one, other in pairs]
            parts = sharers * (len(ends) if training.sequence_parallel else 1)
            each = model.hidden_bytes * training.tokens / parts
            for one, other in ends:
                if one != other:
                    sent[one] += each * len(replica.micro_batches)
                    sent[other] += each * len(replica.micro_batches)
    return sent
