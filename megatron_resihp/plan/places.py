# SPDX-License-Identifier: Apache-2.0
"""Places: a restarted worker gets a new id and takes the place of the worker that died. Imports `plan` only.

A job of n places starts with workers 0, 1, … in the first places, or in all of them unless nodes may join later. The
first worker in place p is worker p, and its k-th restart is worker p + k·n. So ids are never used twice, and no two
living workers share a place. Code that needs a worker's location, such as its node, uses the worker's place. Code that
knows only places, such as planners, gets a plan in which each worker has the number of its place.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from megatron_resihp.plan.parallel_plan import ParallelPlan


def place_of(worker: int, places: int) -> int:
    """The worker's place, in a job with this number of places."""
    return worker % places


def node_of(worker: int, places: int, workers_per_node: int) -> int:
    """The node of the worker's place."""
    return place_of(worker, places) // workers_per_node


def names_of_places(workers: Iterable[int], places: int) -> dict[int, int]:
    """Place → the living worker in it."""
    return {place_of(worker, places): worker for worker in workers}


def links_of_places(links: Mapping[tuple[int, int], float], places: int) -> dict[tuple[int, int], float]:
    """Values of links between workers, keyed by their places instead, the smaller place first."""
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
