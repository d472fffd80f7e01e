# SPDX-License-Identifier: Apache-2.0
"""Which single losses would end the job as it is placed, and what would change that.

State that is lost with a node or a worker is what ends a job: survivors that hold everything between them are enough
for a plan. Node 0, where the coordinator runs, ends it whatever it holds. Pure; imports `plan` and `planner`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.copies import lost_parts
from megatron_resihp.plan.slots import node_of
from megatron_resihp.planner import JobShape, initial_plan

MAPPING = "--use-tp-pp-dp-mapping"
OPTIMIZER = "--use-distributed-optimizer"


@dataclass(frozen=True)
class Exposure:
    """What ends the job with a single loss.

    Attributes:
        nodes: other than node 0.
        workers: alone.
        mend: what to do about it; None: nothing is wrong, or no single flag helps.
    """

    nodes: tuple[int, ...]
    workers: tuple[int, ...]
    mend: str | None = None


def exposure(shape: JobShape, workers: int, pipeline_last: bool, shared_optimizer: bool) -> Exposure:
    """The losses that would end a job under its first plan.

    Args:
        workers: at the start.
        pipeline_last: the order of ranks, see `initial_plan`.
        shared_optimizer: each replica has a part of the optimizer's state, and a copy of another replica's part.
    """
    found = _fatal(initial_plan(shape, workers, pipeline_last), shape, shared_optimizer)
    if not (found.nodes or found.workers):
        return found
    if workers == shape.replica_size:
        return Exposure(found.nodes, found.workers, "give it the workers of two replicas, or fewer stages")
    other = initial_plan(shape, workers, not pipeline_last)
    mapping = f"start it with {MAPPING}" if pipeline_last else f"start it without {MAPPING}"
    for plan, shared, mend in (
        (other, shared_optimizer, mapping),
        (initial_plan(shape, workers, pipeline_last), False, f"start it without {OPTIMIZER}"),
        (other, False, f"{mapping} and without {OPTIMIZER}"),
    ):
        better = _fatal(plan, shape, shared)
        if not (better.nodes or better.workers):
            return Exposure(found.nodes, found.workers, mend)
    return found


def _fatal(plan: ParallelPlan, shape: JobShape, shared_optimizer: bool) -> Exposure:
    of_node: dict[int, set[int]] = {}
    for worker in plan.members:
        of_node.setdefault(node_of(worker, len(plan.members), shape.workers_per_node), set()).add(worker)
    nodes = tuple(node for node, gone in sorted(of_node.items()) if node > 0 and _ends(plan, gone, shared_optimizer))
    # One of several holders of a shard has a copy elsewhere of its own part of the optimizer's state.
    holders = [plan.grid.holders_of(coordinate) for coordinate in plan.grid.coordinates()]
    workers = tuple(sorted(those[0] for those in holders if len(those) == 1))
    return Exposure(nodes, workers)


def _ends(plan: ParallelPlan, gone: Collection[int], shared_optimizer: bool) -> bool:
    if any(set(plan.grid.holders_of(coordinate)) <= set(gone) for coordinate in plan.grid.coordinates()):
        return True
    return shared_optimizer and bool(lost_parts(plan, set(plan.members) - set(gone)))


def in_words(nodes: int, found: Exposure) -> str:
    """One line for people. `nodes`: of the job."""
    others = [f"node {node}" for node in found.nodes]
    workers = [] if others or not found.workers else ["any worker"]
    if nodes > 1:
        fatal = ["node 0 (the coordinator's)", *(others or workers)]
        said = f"losing {_listing(fatal)} ends the job"
        rest = " with state that is nowhere else" if others else ""
        rest += "" if others or workers else "; any other one may be lost"
    else:
        said = "losing any worker ends the job" if workers else "any one worker may be lost"
        rest = ""
    return said + rest + (f"; to mend that, {found.mend}" if found.mend else "")


def _listing(names: list[str]) -> str:
    if len(names) > 4:
        names = [*names[:3], f"{len(names) - 3} others"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
