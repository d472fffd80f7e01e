# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel groups inside nodes. Imports numpy, numba and `planner`.

Members of a group wait for the slowest one, so groups are cut out of a node's workers sorted by speed. No other
grouping with the same sizes has a faster group at any rank by speed. (The i fastest groups of any grouping hold as many
workers as the first i groups cut from the sorted ones, and each of these workers is at least as fast as the i-th group.
So the last of the groups cut is at least as fast.) One number encodes a group: its node, its first place there and its
degree.
"""

from typing import NamedTuple

import numpy as np

from megatron_resihp.cost.job import Array
from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.search.tables import Index

NOBODY = -1


class Nodes(NamedTuple):
    """Live workers, node by node, the fastest first.

    Attributes:
        workers: worker ids, [nodes, workers per node]; NOBODY in empty places.
        speed: of these workers, [nodes, workers per node]; 0 in empty places.
        link_ends: both ends of each slow link, as indices into the flat `workers`, [slow links, 2].
        link_speed: of each slow link, [slow links].
    """

    workers: Index
    speed: Array
    link_ends: Index
    link_speed: Array


def nodes_of(health: Health, workers_per_node: int) -> Nodes:
    """Live workers by node, fastest first; at equal speed, workers with slow links come last, then ids decide."""
    count = len(health.speed)
    ids, speeds = np.fromiter(health.speed, np.int64, count), np.fromiter(health.speed.values(), np.float64, count)
    link = {pair: speed for pair, speed in health.link.items() if health.speed.keys() >= set(pair)}
    linked = np.isin(ids, list({worker for pair in link for worker in pair}))
    order = np.lexsort((ids, linked, -speeds, ids // workers_per_node))
    ids, speeds = ids[order], speeds[order]
    numbers, node, counts = np.unique(ids // workers_per_node, return_inverse=True, return_counts=True)
    place = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    workers = np.full((len(numbers), workers_per_node), NOBODY)
    by_node = np.zeros(workers.shape)
    workers[node, place], by_node[node, place] = ids, speeds
    # This order does not depend on worker ids, so that plans don't either.
    order = np.lexsort((numbers, *-by_node.T[::-1]))
    workers, by_node = workers[order], by_node[order]
    where = {worker: index for index, worker in enumerate(workers.ravel().tolist())} if link else {}
    ends = np.array([[where[worker] for worker in pair] for pair in link], np.int64).reshape(-1, 2)
    return Nodes(workers, by_node, ends, np.array(list(link.values()), np.float64))


def members_of(nodes: Nodes, group: int) -> tuple[int, ...]:
    """Worker ids of a group, the fastest first."""
    node, first, degree = node_of(nodes, group), first_of(nodes, group), degree_of(nodes, group)
    return tuple(nodes.workers[node, first : first + degree].tolist())


@compiled
def group_at(nodes: Nodes, node: int, first: int, degree: int) -> int:
    """The group of `degree` workers from the first place on."""
    most = nodes.speed.shape[1]
    return (node * most + first) * most + degree - 1


@compiled
def node_of(nodes: Nodes, group: int) -> int:
    return group // (nodes.speed.shape[1] * nodes.speed.shape[1])


@compiled
def first_of(nodes: Nodes, group: int) -> int:
    return group // nodes.speed.shape[1] % nodes.speed.shape[1]


@compiled
def degree_of(nodes: Nodes, group: int) -> int:
    return group % nodes.speed.shape[1] + 1


@compiled
def speed_of(nodes: Nodes, group: int) -> float:
    """Speed of a group's slowest member."""
    return nodes.speed[node_of(nodes, group), first_of(nodes, group) + degree_of(nodes, group) - 1]


@compiled
def link_between(nodes: Nodes, one: int, other: int) -> float:
    """Speed of the slowest link between members of two groups."""
    slowest = 1.0
    for number in range(len(nodes.link_speed)):
        first, second = nodes.link_ends[number]
        if (_holds(nodes, one, first) and _holds(nodes, other, second)) or (
            _holds(nodes, one, second) and _holds(nodes, other, first)
        ):
            slowest = min(slowest, nodes.link_speed[number])
    return slowest


@compiled
def _holds(nodes: Nodes, group: int, place: int) -> bool:
    """Whether a worker, by its index into the flat `workers`, is in a group."""
    first = group // nodes.speed.shape[1]
    return first <= place < first + degree_of(nodes, group)


@compiled
def form_groups(nodes: Nodes, rate: Array, price: float) -> tuple[Index, Index]:
    """The groups in each node with the largest Σ (rate · speed − price).

    The price is the cost of another stage in a pipeline. At price 0 groups are small, as small groups lose least to
    slow members and to communication; a higher price gives larger groups. Slow workers that are not worth the price are
    left out.

    Args:
        nodes: live workers.
        rate: of a healthy group of each degree, [degrees + 1]; 0 if the degree is not allowed.
        price: in units of rate.

    Returns:
        The groups that work, and the workers left out as groups of one.
    """
    count, most = nodes.speed.shape
    working, idle = np.empty(count * most, np.int64), np.empty(count * most, np.int64)
    value, size = np.empty(most + 1), np.empty(most + 1, np.int64)
    used, left = 0, 0
    for node in range(count):
        speed = nodes.speed[node]
        value[0] = 0.0
        end = 0
        for last in range(1, most + 1):
            value[last] = -np.inf
            if speed[last - 1] == 0:
                break
            for degree in range(1, min(last, len(rate) - 1) + 1):
                if rate[degree] > 0:
                    worth = value[last - degree] + rate[degree] * speed[last - 1] - price
                    if worth >= value[last]:
                        value[last], size[last] = worth, degree
            if value[last] > -np.inf and (end == 0 or value[last] > value[end]):
                end = last
        for place in range(end, most):
            if speed[place] > 0:
                idle[left] = group_at(nodes, node, place, 1)
                left += 1
        while end > 0:
            degree = size[end]
            end -= degree
            working[used] = group_at(nodes, node, end, degree)
            used += 1
    return working[:used], idle[:left]
