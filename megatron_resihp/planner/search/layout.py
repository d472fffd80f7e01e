# SPDX-License-Identifier: Apache-2.0
"""Replicas in the form that the search uses, and how long each takes. Imports numpy and numba."""

from typing import Final, NamedTuple

import numpy as np

from megatron_resihp.cost.job import Array
from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.planner.search.groups import Nodes, degree_of, link_between, speed_of
from megatron_resihp.planner.search.makespan import pipeline_makespan
from megatron_resihp.planner.search.stages import most_in_flight, split_layers
from megatron_resihp.planner.search.tables import Index, Tables

MISFIT: Final = 1e9
"""Seconds that stand for a layer without a place, far more than real ones, so that the search finds what fits."""


_SHIFTED: Final = 150
"""Most ops of a replica (stages × waves) for which single layers shift: it matters most with few of either."""
_FEW: Final = 32
"""Most workers for which layers shift further and stages may stay empty, which takes twice the time."""
_REACH: Final = 3
"""Most stages that a layer then shifts over."""
_EMPTIED: Final = 100
"""Most ops of a replica for which the weakest stage is then tried without layers."""


class Layout(NamedTuple):
    """Groups in replicas.

    Attributes:
        order: groups of each replica's stages, [replicas, most stages].
        stages: number of stages of each replica, [replicas].
        ends: where each stage's layers end, [replicas, most stages].
        micro_batches: of each replica, [replicas].
        seconds: makespan of each replica, or MISFIT for each layer without a place, [replicas].
        period: seconds that another micro-batch would take, [replicas].
        idle: groups without work, [workers]; only the first `idle_count[0]` are valid.
        idle_count: [1].
    """

    order: Index
    stages: Index
    ends: Index
    micro_batches: Index
    seconds: Array
    period: Array
    idle: Index
    idle_count: Index


class Scratch(NamedTuple):
    """Buffers for computation, [most stages] each."""

    degree: Index
    speed: Array
    forward: Array
    backward: Array
    weight: Array
    transfer: Array
    free: Array
    done: Array
    ends: Index


@compiled
def new_layout(replicas: int, most_stages: int, workers: int) -> Layout:
    """A layout without any group."""
    return Layout(
        np.zeros((replicas, most_stages), np.int64),
        np.zeros(replicas, np.int64),
        np.zeros((replicas, most_stages), np.int64),
        np.zeros(replicas, np.int64),
        np.full(replicas, np.inf),
        np.full(replicas, np.inf),
        np.zeros(workers, np.int64),
        np.zeros(1, np.int64),
    )


@compiled
def new_scratch(most_stages: int) -> Scratch:
    index, rows = np.zeros((2, most_stages), np.int64), np.zeros((7, most_stages))
    return Scratch(index[0], rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], rows[6], index[1])


@compiled
def copy_layout(source: Layout, target: Layout) -> None:
    """Copy a layout to another of the same sizes."""
    for replica in range(len(source.stages)):
        # One by one: rows are short, and views of them take longer than their elements.
        for stage in range(source.stages[replica]):
            target.order[replica, stage] = source.order[replica, stage]
            target.ends[replica, stage] = source.ends[replica, stage]
        target.stages[replica] = source.stages[replica]
        target.micro_batches[replica] = source.micro_batches[replica]
        target.seconds[replica] = source.seconds[replica]
        target.period[replica] = source.period[replica]
    for place in range(source.idle_count[0]):
        target.idle[place] = source.idle[place]
    target.idle_count[0] = source.idle_count[0]


@compiled
def same_result(nodes: Nodes, layout: Layout, one: int, other: int) -> bool:
    """Whether two replicas take equally long: same degrees, speeds and links in the same order."""
    if layout.stages[one] != layout.stages[other] or layout.micro_batches[one] != layout.micro_batches[other]:
        return False
    for stage in range(layout.stages[one]):
        mine, theirs = layout.order[one, stage], layout.order[other, stage]
        if degree_of(nodes, mine) != degree_of(nodes, theirs) or speed_of(nodes, mine) != speed_of(nodes, theirs):
            return False
        if stage > 0 and len(nodes.link_speed):
            before, there = layout.order[one, stage - 1], layout.order[other, stage - 1]
            if link_between(nodes, before, mine) != link_between(nodes, there, theirs):
                return False
    return True


@compiled
def copy_result(layout: Layout, one: int, other: int) -> None:
    """Give a replica the ends, seconds and period of another."""
    layout.ends[one, : layout.stages[one]] = layout.ends[other, : layout.stages[one]]
    layout.seconds[one], layout.period[one] = layout.seconds[other], layout.period[other]


@compiled
def stand_by(layout: Layout, group: int) -> None:
    """Add a group to the idle ones."""
    layout.idle[layout.idle_count[0]] = group
    layout.idle_count[0] += 1


@compiled
def take_idle(layout: Layout, place: int) -> int:
    """Take a group out of the idle ones."""
    group = layout.idle[place]
    layout.idle_count[0] -= 1
    layout.idle[place] = layout.idle[layout.idle_count[0]]
    return group


@compiled
def insert(layout: Layout, replica: int, stage: int, group: int) -> None:
    """Add a group before a stage of a replica that has room for it."""
    for place in range(layout.stages[replica], stage, -1):
        layout.order[replica, place] = layout.order[replica, place - 1]
    layout.order[replica, stage] = group
    layout.stages[replica] += 1


@compiled
def remove(layout: Layout, replica: int, stage: int) -> int:
    """Take the group of a stage out of a replica."""
    group = layout.order[replica, stage]
    layout.stages[replica] -= 1
    for place in range(stage, layout.stages[replica]):
        layout.order[replica, place] = layout.order[replica, place + 1]
    return group


@compiled
def assess(tables: Tables, nodes: Nodes, layout: Layout, replica: int, scratch: Scratch) -> None:
    """Split a replica's layers over its stages and run its micro-batches; fills ends, seconds and period."""
    stages, micro_batches = layout.stages[replica], layout.micro_batches[replica]
    layout.period[replica] = 0.0
    layout.seconds[replica] = MISFIT * tables.forward.shape[1]
    if stages == 0:
        return
    for stage in range(stages):
        group = layout.order[replica, stage]
        scratch.degree[stage], scratch.speed[stage] = degree_of(nodes, group), speed_of(nodes, group)
    ends = layout.ends[replica]
    copies = len(layout.stages)
    misfits = split_layers(tables, scratch.degree, scratch.speed, stages, micro_batches, copies, ends)
    if misfits:
        layout.seconds[replica] = MISFIT * misfits
    else:
        _note_transfers(tables, nodes, layout, replica, scratch)
        time_of(tables, layout, replica, scratch)
        if stages * (stages + micro_batches) <= _SHIFTED:
            few = nodes.speed.size <= _FEW
            _shift_layers(tables, layout, replica, scratch, _REACH if few else 1)
            if few and stages > 2 and stages * (stages + micro_batches) <= _EMPTIED:
                _try_without_weakest(tables, layout, replica, scratch)


@compiled
def _note_transfers(tables: Tables, nodes: Nodes, layout: Layout, replica: int, scratch: Scratch) -> None:
    """Fill in the seconds from each stage to the next one."""
    for stage in range(layout.stages[replica] - 1):
        this, following = layout.order[replica, stage], layout.order[replica, stage + 1]
        seconds = tables.transfer[scratch.degree[stage], scratch.degree[stage + 1]]
        scratch.transfer[stage] = seconds / link_between(nodes, this, following)


@compiled
def _shift_layers(tables: Tables, layout: Layout, replica: int, scratch: Scratch, most: int) -> None:
    """Shift single layers by up to `most` stages, forward or back, while that makes the replica faster."""
    stages = layout.stages[replica]
    improved = True
    while improved:
        improved = False
        for stage in range(stages - 1):
            for reach in range(1, min(most, stages - 1 - stage) + 1):
                for step in (-1, 1):
                    improved = _shift_layer(tables, layout, replica, scratch, stage, stage + reach, step) or improved


@compiled
def _shift_layer(
    tables: Tables, layout: Layout, replica: int, scratch: Scratch, stage: int, other: int, step: int
) -> bool:
    """Move a layer between two stages, shifting all between by one, if that makes the replica faster."""
    ends, seconds, period = layout.ends[replica], layout.seconds[replica], layout.period[replica]
    giver = other if step == 1 else stage
    if ends[giver] == (ends[giver - 1] if giver else 0):
        return False
    ends[stage:other] += step
    time_of(tables, layout, replica, scratch)
    if layout.seconds[replica] < seconds:
        fits = True
        for changed in range(stage, other + 1):
            fits = fits and (changed == giver or _has_room(tables, layout, replica, changed, scratch))
        if fits:
            return True
    ends[stage:other] -= step
    layout.seconds[replica], layout.period[replica] = seconds, period
    return False


@compiled
def _try_without_weakest(tables: Tables, layout: Layout, replica: int, scratch: Scratch) -> None:
    """Leave the weakest stage without layers, if that pays; stages before it can then run further ahead."""
    stages, ends = layout.stages[replica], layout.ends[replica]
    weakest = 0
    for stage in range(stages):
        power = tables.rate[scratch.degree[stage]] * scratch.speed[stage]
        if power < tables.rate[scratch.degree[weakest]] * scratch.speed[weakest]:
            weakest = stage
    if ends[weakest] == (ends[weakest - 1] if weakest else 0):
        return
    scratch.ends[:stages] = ends[:stages]
    seconds, period, speed = layout.seconds[replica], layout.period[replica], scratch.speed[weakest]
    scratch.speed[weakest] = 0.0
    micro_batches, copies = layout.micro_batches[replica], len(layout.stages)
    misfits = split_layers(tables, scratch.degree, scratch.speed, stages, micro_batches, copies, ends)
    scratch.speed[weakest] = speed
    if not misfits:
        time_of(tables, layout, replica, scratch)
        _shift_layers(tables, layout, replica, scratch, _REACH)
    if misfits or layout.seconds[replica] >= seconds:
        ends[:stages] = scratch.ends[:stages]
        layout.seconds[replica], layout.period[replica] = seconds, period


@compiled
def _has_room(tables: Tables, layout: Layout, replica: int, stage: int, scratch: Scratch) -> bool:
    """Whether a stage's layers fit in memory."""
    k, ends, copies = scratch.degree[stage], layout.ends[replica], len(layout.stages)
    in_flight = most_in_flight(tables, layout.stages[replica], stage, layout.micro_batches[replica])
    state, kept, working = 0.0, 0.0, 0.0
    for layer in range(ends[stage - 1] if stage else 0, ends[stage]):
        state += tables.held[k, layer] + tables.shared[k, layer] / copies
        kept += tables.kept[k, layer] * in_flight
        working = max(working, tables.working[k, layer])
    return state + max(kept + working, tables.beside) <= tables.memory


@compiled
def time_of(tables: Tables, layout: Layout, replica: int, scratch: Scratch) -> None:
    """Compute a replica's seconds and period with its present layers; `scratch` holds its stages' data."""
    stages, ends = layout.stages[replica], layout.ends[replica]
    first = 0
    for stage in range(stages):
        k, forward, backward, weight = scratch.degree[stage], 0.0, 0.0, 0.0
        for layer in range(first, ends[stage]):
            forward += tables.forward[k, layer]
            backward += tables.backward[k, layer]
            weight += tables.weight[k, layer]
        scratch.forward[stage] = forward / scratch.speed[stage]
        scratch.backward[stage] = backward / scratch.speed[stage]
        scratch.weight[stage] = weight / scratch.speed[stage]
        first = ends[stage]
    layout.period[replica] = _period(stages, scratch)
    layout.seconds[replica] = pipeline_makespan(
        scratch.forward,
        scratch.backward,
        scratch.weight,
        scratch.transfer,
        stages,
        layout.micro_batches[replica],
        scratch.free,
        scratch.done,
    )


@compiled
def _period(stages: int, scratch: Scratch) -> float:
    """Period of the steady state: the busiest stage, or a stage's round trip to the end divided by its F ahead."""
    period, way = 0.0, 0.0
    for stage in range(stages - 1, -1, -1):
        if stage + 1 < stages:
            way += 2 * scratch.transfer[stage]
        own = scratch.forward[stage] + scratch.backward[stage]
        way += own
        period = max(period, own + scratch.weight[stage], way / (stages - stage))
    return period
