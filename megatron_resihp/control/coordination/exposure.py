# SPDX-License-Identifier: Apache-2.0
"""Which single losses would end the job as it is placed, and what would change that.

State that is lost with a node or a worker is what ends a job: survivors that hold everything between them are enough
for a plan. Node 0 ends it whatever it holds if the coordinator runs there. So does any loss that leaves fewer workers
than the user pays for, or fewer replicas than must share sequences or experts. Pure; imports `plan` and `planner`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_resihp.planner import JobShape, initial_plan
from megatron_resihp.planner.spreading import fatal_nodes, last_holders

SPREAD = "--resihp-spread-replicas"
OPTIMIZER = "--use-distributed-optimizer"
COPIES = "--resihp-expert-copies"
BUT = "every shard has another holder, but:"
"""What is said in place of "any other may be lost" where lines follow that name losses without a plan."""


@dataclass(frozen=True)
class Exposure:
    """What ends the job with a single loss.

    Attributes:
        nodes: whose state is nowhere else; not the coordinator's.
        workers: alone, likewise.
        mend: what to do about it; None: nothing is wrong, or no single flag helps.
        idle: why a flag that is given does nothing; None: it does, or is not given.
        too_few: the losses, "worker" or "node", that leave fewer workers than there must be; None: none does.
        unshared: what too few replicas are left to share once any worker is lost; empty: there is nothing.
        apart: the coordinator runs on none of the nodes.
        replaceable: another coordinator may take its place.
    """

    nodes: tuple[int, ...]
    workers: tuple[int, ...]
    mend: str | None = None
    idle: str | None = None
    too_few: str | None = None
    unshared: str = ""
    apart: bool = False
    replaceable: bool = False


def exposure(
    shape: JobShape, workers: int, pipeline_last: bool, fewest: int = 0, *, apart: bool = False,
    replaceable: bool = False,
) -> Exposure:  # fmt: skip
    """The losses that would end a job under its first plan.

    Args:
        workers: at the start.
        pipeline_last: the order of ranks, see `initial_plan`.
        fewest: workers that there must be.
        apart: the coordinator runs on none of the nodes.
        replaceable: another coordinator may take its place.
    """
    nodes, alone = _fatal(shape, workers, pipeline_last, apart)
    losses = {"worker": 1, "node": shape.workers_per_node}
    too_few = next((name for name, lost in losses.items() if workers - lost < fewest), None) if fewest > 1 else None
    sharers = min(each.together for each in shape.sharings)
    unshared = shape.shared if sharers > 1 and (workers - 1) // shape.replica_size < sharers else ""
    mend = _mend(shape, workers, pipeline_last, apart) if nodes or alone or unshared else None
    return Exposure(nodes, alone, mend, _idle(shape, workers), too_few, unshared, apart, replaceable)


def _fatal(shape: JobShape, workers: int, pipeline_last: bool, apart: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nodes other than the coordinator's, and workers."""
    plan = initial_plan(shape, workers, pipeline_last)
    copies = shape.distributed_optimizer, shape.expert_copies
    nodes = fatal_nodes(plan, shape.node_of, *copies) - (set() if apart else {0})
    # One of several holders of a shard has a copy elsewhere of its own part of the optimizer's state.
    holders = [those for each in plan.grid.coordinates() for those in last_holders(plan, each, shape.node_of, *copies)]
    return tuple(sorted(nodes)), tuple(sorted(those[0] for those in holders if len(those) == 1))


def _mend(shape: JobShape, workers: int, pipeline_last: bool, apart: bool) -> str | None:
    if shape.shares_experts:
        with_copies = replace(shape, expert_copies=True)
        fatal, left = (any(_fatal(each, workers, pipeline_last, apart)) for each in (shape, with_copies))
        if fatal and not left:
            return f"start it with {COPIES} 1"
        return "give it more workers, or fewer of them that share experts"
    if all(each.context > 1 for each in shape.sharings):
        return "give it more workers, or fewer of them that share sequences"
    if workers == shape.replica_size:
        return "give it the workers of two replicas, or fewer stages"
    with_flag, without = f"start it with {SPREAD}", f"start it without {OPTIMIZER}"
    ways = (
        (replace(shape, spread_replicas=True), with_flag),
        (replace(shape, distributed_optimizer=False), without),
        (replace(shape, spread_replicas=True, distributed_optimizer=False), f"{with_flag} and without {OPTIMIZER}"),
    )
    shares = shape.own_sharing.context > 1  # replicas that share sequences are to stay together
    possible = [(other, mend) for other, mend in ways if not (shares and other.spread_replicas)]
    return next((mend for other, mend in possible if not any(_fatal(other, workers, pipeline_last, apart))), None)


def _idle(shape: JobShape, workers: int) -> str | None:
    if not shape.spread_replicas:
        return None
    if workers <= shape.workers_per_node:
        return f"{SPREAD} has no second node to use"
    return f"{SPREAD} has no second replica to use" if workers == shape.replica_size else None


def in_words(nodes: int, found: Exposure, fewest: int = 0, *, has_plans: bool = True) -> str:
    """One line for people.

    Args:
        nodes: of the job.
        fewest: as of `exposure`.
        has_plans: there is a plan after each other loss; otherwise lines that name the losses without one follow.
    """
    said = _losses(nodes, found, fewest, has_plans)
    more = [*([f"to avoid that, {found.mend}"] if found.mend else []), *filter(None, [found.idle])]
    return "; ".join([*more, said] if said.endswith(BUT) else [said, *more])


def _losses(nodes: int, found: Exposure, fewest: int, has_plans: bool) -> str:
    others = [f"node {node}" for node in found.nodes]
    workers = [] if others or not found.workers else ["any worker"]
    if found.too_few == "worker" or (found.too_few and nodes > 1 and not found.workers):
        return f"losing any {found.too_few} ends the job, which then has fewer workers than --min-workers {fewest}"
    if found.unshared:
        return f"losing any worker ends the job, which then has too few replicas to share {found.unshared}"
    if nodes == 1:
        survived = "any one worker may be lost" if has_plans else BUT
        return "losing any worker ends the job" if found.workers else survived
    coordinator = "the coordinator" if found.apart else "node 0 (the coordinator's)"
    lost = others or workers
    if found.replaceable:
        also = [f"losing {_listing(lost)} ends it"] if lost else []
        said = "; ".join([f"losing {coordinator} ends the job unless another takes its place", *also])
    else:
        said = f"losing {_listing([coordinator, *lost])} ends the job"
    if others:
        return f"{said} with state that is nowhere else"
    survived = f"any {'node' if found.apart else 'other one'} may be lost" if has_plans else BUT
    return said if workers else f"{said}; {survived}"


def _listing(names: list[str]) -> str:
    if len(names) > 4:
        names = [*names[:3], f"{len(names) - 3} others"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
