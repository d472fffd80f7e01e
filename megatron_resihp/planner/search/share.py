# SPDX-License-Identifier: Apache-2.0
"""Shares of micro-batches for each replica that minimise the longest makespan. Imports numpy and numba."""

from typing import Final

import numpy as np

from megatron_resihp.cost.job import Array
from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.planner.search.groups import Nodes, degree_of, speed_of
from megatron_resihp.planner.search.layout import MISFIT, Layout, Scratch, assess, copy_result, same_result
from megatron_resihp.planner.search.tables import Index, Tables

_MOST_MOVES: Final = 16
"""Most micro-batches that move after the estimate."""
_MANY: Final = 8
"""Replicas; above this, a misfit ends the assessment, since enough other layouts fit or fewer replicas do."""


@compiled
def share_out(tables: Tables, nodes: Nodes, layout: Layout, micro_batches: int, scratch: Scratch) -> None:
    """Distribute micro-batches by power, then by the replicas' times with those shares, then one by one.

    There are at least as many micro-batches as replicas.
    """
    replicas = len(layout.stages)
    power = np.zeros(replicas)
    for replica in range(replicas):
        for stage in range(layout.stages[replica]):
            group = layout.order[replica, stage]
            power[replica] += tables.rate[degree_of(nodes, group)] * speed_of(nodes, group)
    power = np.maximum(power, 1e-300)
    layout.micro_batches[:] = _fill_up(np.zeros(replicas), 1 / power, micro_batches)
    if not assess_all(tables, nodes, layout, scratch):
        return
    offset = layout.seconds - layout.micro_batches * layout.period
    layout.micro_batches[:] = _fill_up(offset, layout.period, micro_batches)
    if assess_all(tables, nodes, layout, scratch):
        level(tables, nodes, layout, scratch)


@compiled
def _fill_up(offset: Array, period: Array, micro_batches: int) -> Index:
    """The shares, at least one each, that minimise the largest offset + share · period."""
    low, high = 0.0, (offset + micro_batches * period).max()
    for _ in range(40):
        limit = (low + high) / 2
        if np.maximum(np.floor((limit - offset) / period), 1.0).sum() > micro_batches:
            high = limit
        else:
            low = limit
    shares = np.maximum(np.floor((low - offset) / period), 1.0).astype(np.int64)
    for _ in range(micro_batches - shares.sum()):
        shares[np.argmin(offset + (shares + 1) * period)] += 1
    return shares


@compiled
def assess_all(tables: Tables, nodes: Nodes, layout: Layout, scratch: Scratch) -> bool:
    """Assess every replica, equal ones once; returns whether all fit. Of many replicas, a misfit ends the loop."""
    replicas = len(layout.stages)
    layout.seconds[:] = MISFIT
    fit = True
    for replica in range(replicas):
        known = False
        for other in range(replica - 1, -1, -1):
            if same_result(nodes, layout, replica, other):
                copy_result(layout, replica, other)
                known = True
                break
        if not known:
            assess(tables, nodes, layout, replica, scratch)
        if layout.seconds[replica] >= MISFIT:
            fit = False
            if replicas > _MANY:
                return False
    return fit


@compiled
def level(tables: Tables, nodes: Nodes, layout: Layout, scratch: Scratch) -> None:
    """Move micro-batches from the slowest replica to the one that would then be fastest, while that pays."""
    for _ in range(_MOST_MOVES):
        slowest, fastest = int(np.argmax(layout.seconds)), int(np.argmin(layout.seconds + layout.period))
        longest = layout.seconds[slowest]
        estimate = layout.seconds[fastest] + layout.period[fastest]
        if slowest == fastest or layout.micro_batches[slowest] == 1 or not estimate < longest:
            return
        if not _give(tables, nodes, layout, scratch, slowest, fastest, longest):
            return


@compiled
def _give(
    tables: Tables, nodes: Nodes, layout: Layout, scratch: Scratch, giver: int, taker: int, longest: float
) -> bool:
    """Move one micro-batch if both replicas then take less than `longest`; returns whether it moved."""
    ends = layout.ends[giver].copy(), layout.ends[taker].copy()
    seconds = layout.seconds[giver], layout.seconds[taker]
    period = layout.period[giver], layout.period[taker]
    layout.micro_batches[giver] -= 1
    layout.micro_batches[taker] += 1
    assess(tables, nodes, layout, taker, scratch)
    if layout.seconds[taker] < longest:
        assess(tables, nodes, layout, giver, scratch)
        if layout.seconds[giver] < longest:
            return True
    layout.micro_batches[giver] += 1
    layout.micro_batches[taker] -= 1
    layout.ends[giver], layout.ends[taker] = ends
    layout.seconds[giver], layout.seconds[taker] = seconds
    layout.period[giver], layout.period[taker] = period
    return False
