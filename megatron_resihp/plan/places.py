# SPDX-License-Identifier: Apache-2.0
"""Places: a worker that is started anew has an id of its own and the place of the one that died. Imports `plan` only.

A job of n places starts with workers 0, 1, … in the first of them, in all unless nodes may join later. The first worker
in place p is worker p, and the k-th restart is worker p + k·n, so that ids are never used twice and no two living
workers have one place. Whoever asks where a worker is, on which node for example, asks for its place; what knows places
only, as planners do, is given a plan in which workers are named after them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from megatron_resihp.plan.parallel_plan import ParallelPlan


def place_of(worker: int, places: int) -> int:
    """Its place among so many."""
    return worker % places


def node_of(worker: int, places: int, workers_per_node: int) -> int:
    """The node that its place is on."""
    return place_of(worker, places) // workers_per_node


def names_of_places(workers: Iterable[int], places: int) -> dict[int, int]:
    """Place → which of these living workers has it."""
    return {place_of(worker, places): worker for worker in workers}


def links_of_places(links: Mapping[tuple[int, int], float], places: int) -> dict[tuple[int, int], float]:
    """What is known of links between workers, said of their places, the smaller one first."""
    return {
        (min(ends), max(ends)): value
        for (one, other), value in links.items()
        for ends in [(place_of(one, places), place_of(other, places))]
    }


def renamed(plan: ParallelPlan, name: Callable[[int], int]) -> ParallelPlan:
    """The same plan with other worker ids.

    Raises:
        PlanError: two workers get the same id.
    """
    replicas = tuple(
        replace(each, stages=tuple(tuple(map(name, members)) for members in each.stages)) for each in plan.replicas
    )
    return replace(plan, replicas=replicas, standbys={name(worker): kept for worker, kept in plan.standbys.items()})
