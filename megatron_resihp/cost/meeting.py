# SPDX-License-Identifier: Apache-2.0
"""What a worker's ops take longer where its replica shares sequences or experts with others, chunk by chunk.

Imports numpy, `plan` and this package.
"""

from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from megatron_resihp.cost.exchange import nearest
from megatron_resihp.cost.job import Array, JobCost
from megatron_resihp.cost.memory import with_layers
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.parallel_plan import met_by, shared_with, sharing_of


@dataclass(frozen=True)
class Meeting:
    """The ops of a worker that meets others in every layer.

    Attributes:
        work: by what F, B and W of each of its chunks take longer than if all that share had as much to do, as a
            factor, [3, chunks].
        seconds: in which they send each other tokens, or keys and values, [3, chunks].
        links: over which that goes.
    """

    work: Array
    seconds: Array
    links: tuple[tuple[int, int], ...]


def meeting_of(plan: ParallelPlan, worker: int, cost: JobCost) -> Meeting | None:
    """What sharing adds to a working worker's ops; None: nothing, as it shares nothing.

    Args:
        cost: of the job where nobody shares.

    Raises:
        PlanError: the plan has other layers than the model.
    """
    number, place = plan.replica_of(worker), plan.coordinate_of(worker)
    assert number is not None and place is not None, "a standby runs no ops"
    if sharing_of(plan) == 1 and cost.training.expert_groups == 1:
        return None
    members = [plan.replicas[each].stages[place.stage] for each in met_by(plan, number)]
    chunks = [each for each in with_layers(plan.replicas[number], cost.model).chunks if each.stage == place.stage]
    context = len(shared_with(plan, number))
    shared, degree = cost.shared(context, plan.expert_parallel), len(members[0])

    def of_chunks(of_layers: Array) -> Array:
        return np.array([of_layers[:, chunk.first : chunk.end].sum(axis=1) for chunk in chunks]).T

    alone, together = of_chunks(cost.seconds(degree)), of_chunks(shared.seconds(degree))
    work = np.divide(context * together, alone, out=np.ones_like(alone), where=alone > 0)
    if not cost.training.splits_backward:
        work[OpKind.W] = work[OpKind.B]  # which has its time
    return Meeting(
        work=work,
        seconds=of_chunks(shared.exchange(degree, nearest(members, cost.workers_per_node))),
        links=tuple(pair for one, other in combinations(members, 2) for pair in product(one, other)),
    )
