# SPDX-License-Identifier: Apache-2.0
"""Splits layers over the stages of a pipeline: the smallest possible maximum of stage times, within memory.

Imports numpy and numba.
"""

import numpy as np

from megatron_resihp.cost.job import Array
from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.planner.search.tables import Index, Tables

PRECISION = 1e-5
"""Relative error that the found maximum may have."""


@compiled
def split_layers(
    tables: Tables, degree: Index, speed: Array, stages: int, micro_batches: int, copies: int, ends: Index
) -> int:
    """Fill `ends` with each stage's end in layers; returns how many layers found no place.

    For a given time limit, stages reach furthest if each takes as many layers as time and memory allow, first stage
    first. So the limit is found by bisection. A stage may stay without layers.

    Args:
        tables: what work costs.
        degree, speed: of each stage's group, [≥ stages]; a group with speed 0 gets no layers.
        stages, micro_batches, copies: how many there are.
        ends: output, [≥ stages].
    """
    layers = tables.forward.shape[1]
    power = 0.0
    for stage in range(stages):
        power += tables.rate[degree[stage]] * speed[stage]
    low = 1 / power
    placed = _fill(tables, degree, speed, stages, micro_batches, copies, np.inf, ends)
    if placed < layers:
        return layers - placed
    high = _longest(tables, degree, speed, stages, ends)
    guess = low * 1.1
    while high - low > PRECISION * high:
        limit = min(guess, (low + high) / 2)
        if _fill(tables, degree, speed, stages, micro_batches, copies, limit, ends) == layers:
            high = _longest(tables, degree, speed, stages, ends)
        else:
            low = limit
        guess = low * 1.25 if guess <= low else guess
    _fill(tables, degree, speed, stages, micro_batches, copies, high * (1 + PRECISION), ends)
    return 0


@compiled
def _fill(
    tables: Tables,
    degree: Index,
    speed: Array,
    stages: int,
    micro_batches: int,
    copies: int,
    limit: float,
    ends: Index,
) -> int:
    """How many layers can be placed so that no stage exceeds the limit; fills `ends`."""
    layers = tables.forward.shape[1]
    layer = 0
    for stage in range(stages):
        k = degree[stage]
        in_flight = most_in_flight(tables, stages, stage, micro_batches)
        time_left, state, kept, working = limit * speed[stage], 0.0, 0.0, 0.0
        while speed[stage] > 0 and layer < layers:
            time_left -= tables.whole[k, layer]
            state += tables.held[k, layer] + tables.shared[k, layer] / copies
            kept += tables.kept[k, layer] * in_flight
            working = max(working, tables.working[k, layer])
            if time_left < 0 or state + max(kept + working, tables.beside) > tables.memory:
                break
            layer += 1
        ends[stage] = layer
    return layer


@compiled
def _longest(tables: Tables, degree: Index, speed: Array, stages: int, ends: Index) -> float:
    longest = 0.0
    first = 0
    for stage in range(stages):
        k, total = degree[stage], 0.0
        for layer in range(first, ends[stage]):
            total += tables.whole[k, layer]
        if ends[stage] > first:
            longest = max(longest, total / speed[stage])
        first = ends[stage]
    return longest


@compiled
def most_in_flight(tables: Tables, stages: int, stage: int, micro_batches: int) -> int:
    """Micro-batches whose activations a stage holds at a time: those that are between F and B (and W)."""
    return min(stages if tables.splits_backward else stages - stage, micro_batches)
