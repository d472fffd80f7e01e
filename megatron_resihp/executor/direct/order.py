# SPDX-License-Identifier: Apache-2.0
"""The order in which each worker meets others in an iteration, computed from the plan; the same on every worker.

NCCL has no tags, and an operation may hold up all later ones of its communicator until its peer has come to it. So
there is one order of everything, of which each worker does its own part. What comes first in it can't wait for what
comes later. May import `plan`, messages and routes; no torch, since the coordinator checks plans with this.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from megatron_resihp.executor.messages import Message
from megatron_resihp.executor.routes import RouteError, Step
from megatron_resihp.plan import ParallelPlan, PlannedOp
from megatron_resihp.plan.slices import Slice, all_shards, contributors_of, cuts_of, holders_of

DURATIONS: Final[Mapping[str, int]] = {"F": 1, "B": 2, "W": 1}
"""Rough times of ops: receives are posted when they would end, so that they hold up little."""

Routes = Mapping[int, Sequence[Step]]
"""The steps of each worker."""

When = tuple[int, int]
"""When an op ends, and its stage's lowest worker: no two stages have the same."""


@dataclass(frozen=True)
class SliceSum:
    """Slices whose gradients the same workers sum: each contributor a part, which it then gives to all other holders.

    Attributes:
        holders: sorted.
        contributors: the holders whose gradients count, sorted; gradients are added in this order.
    """

    slices: tuple[Slice, ...]
    holders: tuple[int, ...]
    contributors: tuple[int, ...]

    def collecting(self, worker: int) -> tuple[int, ...]:
        """The other workers that a worker exchanges its gradients with."""
        return tuple(each for each in self.contributors if each != worker) if worker in self.contributors else ()

    def giving(self, worker: int) -> tuple[int, ...]:
        """The other workers that a worker gives sums to or gets sums from."""
        if worker in self.contributors:
            return tuple(each for each in self.holders if each != worker)
        return self.contributors if worker in self.holders else ()


class Meeting(NamedTuple):
    """What a worker does together with others.

    Attributes:
        what: an op, whose stage has collectives in it; the message that is an op's result; a round of a sum.
        peers: the others.
    """

    what: tuple[Literal["op", "result"], PlannedOp] | tuple[Literal["collect", "give"], int]
    peers: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.what))


def slice_sums(plan: ParallelPlan, tied_head: int | None) -> tuple[SliceSum, ...]:
    """All sums of gradients of an iteration, in their order.

    Args:
        plan: gives its layers.
        tied_head: number of the head's layer if it has the word embeddings, too.
    """
    shards = all_shards(plan)
    cuts = cuts_of(shard for own in shards.values() for shard in own)
    contributors = contributors_of(plan, cuts, tied_head)
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Slice]] = defaultdict(list)
    for piece, holders in sorted(holders_of(shards, cuts, tied_head).items()):
        alike[holders, tuple(sorted(contributors[piece]))].append(piece)
    return tuple(SliceSum(tuple(slices), *workers) for workers, slices in sorted(alike.items()))


def in_agreed_order(routes: Routes) -> dict[int, tuple[Step, ...]]:
    """The same steps, with receives posted in the one order, in which messages are sent as their ops end.

    Args:
        routes: of all workers.

    Raises:
        RouteError: ops wait for each other in a circle.
    """
    stages = _stages(routes)
    when = _when_ops_end(stages)
    ordered: dict[int, tuple[Step, ...]] = dict.fromkeys(routes, ())
    for members, steps in stages:
        ordered |= dict.fromkeys(members, _with_receives(steps, when))
    return ordered


Stages = Sequence[tuple[tuple[int, ...], Sequence[Step]]]
"""The workers of each stage that has any ops, and their steps."""


def _stages(routes: Routes) -> Stages:
    """Members of a stage run the same ops, and no other worker does."""
    members: dict[PlannedOp, list[int]] = defaultdict(list)
    for worker in sorted(routes):
        if routes[worker]:
            members[routes[worker][0].op].append(worker)
    return [(tuple(workers), routes[workers[0]]) for workers in members.values()]


def _with_receives(steps: Sequence[Step], when: Mapping[PlannedOp, When]) -> tuple[Step, ...]:
    waiting = sorted(
        (step.source for step in steps if isinstance(step.source, Message)),
        key=lambda message: when[message.op],
        reverse=True,
    )
    found = []
    for step in steps:
        receives = []
        while waiting and when[waiting[-1].op] < when[step.op]:
            receives.append(waiting.pop())
        found.append(replace(step, receives=tuple(receives)))
    return tuple(found)


def _when_ops_end(stages: Stages) -> dict[PlannedOp, When]:
    """When each op would end if each began as early as it can."""
    when: dict[PlannedOp, When] = {}
    waiting: dict[PlannedOp, list[int]] = defaultdict(list)
    at, free = [0] * len(stages), [0] * len(stages)
    able = list(range(len(stages)))
    while able:
        stage = able.pop()
        members, steps = stages[stage]
        while at[stage] < len(steps):
            step = steps[at[stage]]
            source = step.source.op if isinstance(step.source, Message) else None
            if source is not None and source not in when:
                waiting[source].append(stage)
                break
            begin = max(free[stage], when[source][0] if source is not None else 0)
            free[stage] = begin + DURATIONS[step.op.kind]
            when[step.op] = (free[stage], members[0])
            at[stage] += 1
            able += waiting.pop(step.op, [])
    for reached, (_, steps) in zip(at, stages, strict=True):
        if reached < len(steps):
            raise RouteError(f"op {steps[reached].op} waits for an op that waits for it: ops must not wait in a circle")
    return when


def meetings(routes: Routes, sums: Sequence[SliceSum], members: Sequence[int]) -> dict[int, tuple[Meeting, ...]]:
    """What each worker does together with others in an iteration, in its order.

    Args:
        routes: of all workers that have work, in the agreed order.
        members: all workers, standbys included.
    """
    peers = {
        worker: tuple(each for each in stage if each != worker) for stage, _ in _stages(routes) for worker in stage
    }
    return {
        worker: (*_of_ops(worker, routes.get(worker, ()), peers.get(worker, ())), *_of_sums(worker, sums))
        for worker in members
    }


def _of_ops(worker: int, steps: Sequence[Step], peers: tuple[int, ...]) -> Iterator[Meeting]:
    for step in steps:
        for message in step.receives:
            yield from _of_message(worker, message)
        if peers:
            yield Meeting(("op", step.op), peers)
        if isinstance(step.target, Message):
            yield from _of_message(worker, step.target)


def _of_message(worker: int, message: Message) -> Iterator[Meeting]:
    """Nothing where there are fewer tokens than members."""
    others = [piece.receiver for piece in message.pieces if piece.sender == worker]
    others += [piece.sender for piece in message.pieces if piece.receiver == worker]
    if others:
        yield Meeting(("result", message.op), tuple(others))


def _of_sums(worker: int, sums: Sequence[SliceSum]) -> Iterator[Meeting]:
    for number, each in enumerate(sums):
        if collecting := each.collecting(worker):
            yield Meeting(("collect", number), collecting)
        if giving := each.giving(worker):
            yield Meeting(("give", number), giving)
