"""Which layers each stage of a pipeline runs: the smallest possible maximum of stage times, under memory.

Imports numpy and numba.
"""

import numpy as np

from megatron_resihp.cost.job import Array
from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.planner.search.tables import Index, Tables

PRECISION = 1e-5
"""Share by which the found maximum may be above the smallest one."""


@compiled
def split_layers(
    tables: Tables, degree: Index, speed: Array, stages: int, micro_batches: int, copies: int, ends: Index
) -> bool:
    """Fill `ends` with each stage's end in layers; whether that was possible.

    For a given limit of time, stages that take as many layers as time and memory allow, first stage first, reach
    furthest; so the limit is found by bisection. A stage may be left without layers.

    Args:
        tables: what work costs.
        degree, speed: of each stage's group, [≥ stages].
        stages, micro_batches, copies: how many there are; 1F1B holds min(stages − stage, micro_batches) activations.
        ends: filled, [≥ stages].
    """
    layers = tables.forward.shape[1]
    power = 0.0
    for stage in range(stages):
        power += tables.rate[degree[stage]] * speed[stage]
    low = 1 / power
    if _fill(tables, degree, speed, stages, micro_batches, copies, np.inf, ends) < layers:
        return False
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
    return True


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
    """Layers that can be placed with no stage longer than the limit."""
    layers = tables.forward.shape[1]
    layer = 0
    for stage in range(stages):
        k = degree[stage]
        in_flight = min(stages - stage, micro_batches)
        time_left, memory, working = limit * speed[stage], 0.0, 0.0
        while layer < layers:
            time_left -= tables.forward[k, layer] + tables.backward[k, layer]
            memory += tables.held[k, layer] + tables.shared[k, layer] / copies + tables.kept[k, layer] * in_flight
            working = max(working, tables.working[k, layer])
            if time_left < 0 or memory + working > tables.memory:
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
            total += tables.forward[k, layer] + tables.backward[k, layer]
        longest = max(longest, total / speed[stage])
        first = ends[stage]
    return longest


@compiled
def fits(
    tables: Tables, degree: Index, stages: int, micro_batches: int, copies: int, ends: Index, stage: int
) -> bool:
    """Whether a stage's layers fit its memory."""
    k = degree[stage]
    in_flight = min(stages - stage, micro_batches)
    memory, working = 0.0, 0.0
    for layer in range(ends[stage - 1] if stage else 0, ends[stage]):
        memory += tables.held[k, layer] + tables.shared[k, layer] / copies + tables.kept[k, layer] * in_flight
        working = max(working, tables.working[k, layer])
    return memory + working <= tables.memory
