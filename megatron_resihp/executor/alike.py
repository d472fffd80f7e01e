# SPDX-License-Identifier: Apache-2.0
"""Which replicas of a plan have to be checked, so that all of them are. Imports `plan` and routes.

In large plans most replicas do the same with other micro-batches and other workers. What one of them does tells what
all of them do, unless it passes something on to another replica.
"""

from collections.abc import Hashable

from megatron_resihp.executor.routes import Orders
from megatron_resihp.plan import ParallelPlan


def unlike_replicas(plan: ParallelPlan, orders: Orders) -> list[int]:
    """The first of each kind of replicas that are alike, and all that run others' ops or have others run theirs.

    Replicas are alike if they run the same ops in the same order, on as many members, but for the names of
    micro-batches and workers. The stages' lowest workers come in the same order, too, as the one order of everything
    depends on that (`direct.order`).
    """
    owner = {index: number for number, replica in enumerate(plan.replicas) for index in replica.micro_batches}
    linked: set[int] = set()
    for number, own in enumerate(orders):
        others = {op.micro_batch for order in own for op in order} - {*plan.replicas[number].micro_batches}
        if others:
            linked |= {number, *(owner[index] for index in others if index in owner)}
    first: dict[Hashable, int] = {}
    for number in range(len(plan.replicas)):
        if number not in linked:
            first.setdefault(_kind(plan, orders, number), number)
    return sorted(linked.union(first.values()))


def _kind(plan: ParallelPlan, orders: Orders, number: int) -> Hashable:
    replica = plan.replicas[number]
    place = {index: place for place, index in enumerate(replica.micro_batches)}
    ops = tuple(tuple((op.kind, op.chunk, place[op.micro_batch]) for op in order) for order in orders[number])
    lowest = [min(members, default=-1) for members in replica.stages]
    by_lowest = tuple(sorted(range(len(lowest)), key=lowest.__getitem__))
    return replica.shape, replica.stage_of_chunk, len(place), by_lowest, ops
