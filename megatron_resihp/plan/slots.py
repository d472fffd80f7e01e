# SPDX-License-Identifier: Apache-2.0
"""Slots: a restarted worker gets a new id and takes the slot of the worker that died. Imports `plan` only.

A job of n slots starts with workers 0, 1, … in the first slots, or in all of them unless nodes may join later. The
first worker in place p is worker p, and its k-th restart is worker p + k·n. So ids are never used twice, and no two
living workers share a slot. Code that needs a worker's location, such as its node, uses the worker's slot. Code that
knows only slots, such as planners, gets a plan in which each worker has the number of its slot.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from megatron_resihp.plan.parallel_plan import ParallelPlan


def slot_of(worker: int, slots: int) -> int:
    """The worker's slot, in a job with this number of slots."""
    return worker % slots


def node_of(worker: int, slots: int, workers_per_node: int) -> int:
    """The node of the worker's slot."""
    return slot_of(worker, slots) // workers_per_node


def workers_in_slots(workers: Iterable[int], slots: int) -> dict[int, int]:
    """Slot → the living worker in it."""
    return {slot_of(worker, slots): worker for worker in workers}


def links_of_slots(links: Mapping[tuple[int, int], float], slots: int) -> dict[tuple[int, int], float]:
    """Values of links between workers, keyed by their slots instead, the smaller slot first."""
    return {
        (min(ends), max(ends)): value
        for (one, other), value in links.items()
        for ends in [(slot_of(one, slots), slot_of(other, slots))]
    }


def renamed(plan: ParallelPlan, name: Callable[[int], int]) -> ParallelPlan:
    """The same plan with other worker ids.

    Raises:
        PlanError: two workers get the same id.
    """
    if all(name(worker) == worker for worker in plan.members):
        return plan
    replicas = tuple(
        replace(each, stages=tuple(tuple(map(name, members)) for members in each.stages)) for each in plan.replicas
    )
    return replace(plan, replicas=replicas, standbys={name(worker): kept for worker, kept in plan.standbys.items()})
