"""Micro-batches for each replica: the smallest longest makespan. Imports numpy and numba."""

import numpy as np

from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.planner.search.groups import Nodes, degree_of, speed_of
from megatron_resihp.planner.search.layout import Layout, Scratch, assess
from megatron_resihp.planner.search.tables import Tables


@compiled
def share_by_power(tables: Tables, nodes: Nodes, layout: Layout, micro_batches: int) -> None:
    """A first share: in proportion to what each replica's groups would work through, at least one each."""
    replicas = len(layout.stages)
    power = np.zeros(replicas)
    for replica in range(replicas):
        for stage in range(layout.stages[replica]):
            group = layout.order[replica, stage]
            power[replica] += tables.rate[degree_of(nodes, group)] * speed_of(nodes, group)
    layout.micro_batches[:] = 1
    for _ in range(micro_batches - replicas):
        layout.micro_batches[np.argmin((layout.micro_batches + 1) / np.maximum(power, 1e-300))] += 1


@compiled
def level(tables: Tables, nodes: Nodes, layout: Layout, scratch: Scratch) -> float:
    """Move micro-batches from the slowest replica to the one that would then be fastest, while it pays.

    Returns the longest makespan.
    """
    while True:
        slowest, fastest = int(np.argmax(layout.seconds)), int(np.argmin(layout.seconds + layout.period))
        longest = layout.seconds[slowest]
        estimate = layout.seconds[fastest] + layout.period[fastest]
        if slowest == fastest or layout.micro_batches[slowest] == 1 or not estimate < longest:
            return longest
        _give(tables, nodes, layout, scratch, slowest, fastest, 1)
        if not max(layout.seconds[slowest], layout.seconds[fastest]) < longest:
            _give(tables, nodes, layout, scratch, fastest, slowest, 1)
            return longest


@compiled
def _give(
    tables: Tables, nodes: Nodes, layout: Layout, scratch: Scratch, giver: int, taker: int, count: int
) -> None:
    layout.micro_batches[giver] -= count
    layout.micro_batches[taker] += count
    assess(tables, nodes, layout, giver, scratch)
    assess(tables, nodes, layout, taker, scratch)
