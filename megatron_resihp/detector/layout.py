"""A plan → the Layout of its workers and links. Imports numpy and `plan`."""

from collections.abc import Mapping

import numpy as np

from megatron_resihp.detector.observations import Layout
from megatron_resihp.plan.parallel_plan import ParallelPlan


def layout_of(plan: ParallelPlan, epoch: int, node_of: Mapping[int, int], interleaved: bool = False) -> Layout:
    """Where each working worker of the plan stands; standbys are left out.

    Args:
        plan: the plan of the epoch.
        epoch: its number.
        node_of: index of the machine of each worker id.
        interleaved: whether workers hold several model chunks, so that the last stage sends to the first.
    """
    places = [
        (worker, number, coordinate.stage, coordinate.tp_rank, node_of[worker])
        for number, replica in enumerate(plan.replicas)
        for worker, coordinate in replica.workers()
    ]
    workers, replica, stage, tp_rank, node = np.array(places, dtype=np.int64).T
    links = []
    for each in plan.replicas:
        hops = list(zip(each.stages, each.stages[1:], strict=False))
        if interleaved and len(each.stages) > 2:
            hops.append((each.stages[-1], each.stages[0]))
        links += [lane for before, after in hops for lane in zip(before, after, strict=True)]
    return Layout(epoch, workers, replica, stage, tp_rank, node, np.array(links, dtype=np.int64).reshape(-1, 2))
