"""A plan → the Layout of its workers and links. Imports numpy and `plan`."""

from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np

from megatron_resihp.detector.observations import Layout
from megatron_resihp.plan.parallel_plan import ParallelPlan
from megatron_resihp.plan.replica import Replica


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
    links = [lane for each in plan.replicas for hop in _hops(each, interleaved) for lane in _lanes(each, hop)]
    return Layout(epoch, workers, replica, stage, tp_rank, node, np.array(links, dtype=np.int64).reshape(-1, 2))


def _hops(replica: Replica, interleaved: bool) -> Iterable[tuple[int, int]]:
    """Pairs of stages that send each other results, each pair once."""
    homes = [*replica.stage_of_chunk, *((0,) if interleaved and not replica.chunks else ())]
    found: dict[frozenset[int], tuple[int, int]] = {}
    for hop in pairwise(homes):
        if hop[0] != hop[1]:
            found.setdefault(frozenset(hop), hop)
    return found.values()


def _lanes(replica: Replica, hop: tuple[int, int]) -> list[tuple[int, int]]:
    """Who sends to whom: the members of the larger stage each to or from one of the smaller one."""
    before, after = (replica.stages[stage] for stage in hop)
    count = max(len(before), len(after))
    return [(before[n * len(before) // count], after[n * len(after) // count]) for n in range(count)]
