# SPDX-License-Identifier: Apache-2.0
"""Which losses are likely, and what the planner has answered about them before they happen.

Pure: the caller asks the planner, and hands in the question and the answer. May import the standard library, `coding`,
`config`, `events`, `plan`, `planner`, `protocol` and this package's other pure modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from typing import Final

from megatron_resihp.coding import encode
from megatron_resihp.config import UNIFORM
from megatron_resihp.control.replanning.modes import optimizer_after
from megatron_resihp.control.replanning.recovery.inventory import Held, copied_experts, lacking
from megatron_resihp.events.detection import Verdict
from megatron_resihp.events.epochs import EpochBroken, EpochStarted
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import Job
from megatron_resihp.events.replanning import PlanChange
from megatron_resihp.events.training import ExpertLoads, Iteration
from megatron_resihp.plan import Chunk, ParallelPlan, spelled_out
from megatron_resihp.plan.copies import NodeOf
from megatron_resihp.plan.slots import node_of
from megatron_resihp.planner import NoPlanError
from megatron_resihp.protocol.planning import PlanFound, PlannerAnswer, PlannerRequest

MOST_SEARCHES: Final = 2048
"""For one plan and one state of health."""

Loss = frozenset[int]
"""Workers that die together."""


def likely_losses(
    plan: ParallelPlan, own: tuple[Chunk, ...], slots: int, workers_per_node: int, distributed: bool = False,
    copies_experts: bool = False,
) -> Iterator[Loss]:  # fmt: skip
    """Each working worker alone, then each node with all its workers; those only that leave all of the state.

    Args:
        plan: in force.
        own: the job's own split into layers.
        slots, workers_per_node: of the job.
        distributed: whether it has Megatron's distributed optimizer.
        copies_experts: whether members keep the copies of experts that the plan asks for.
    """

    def home(worker: int) -> int:
        return node_of(worker, slots, workers_per_node)

    full = spelled_out(plan, own)
    nodes: dict[int, set[int]] = {}
    for worker in full.members:
        nodes.setdefault(home(worker), set()).add(worker)
    singles = [frozenset({worker}) for worker in full.working]
    together = [frozenset(nodes[node]) for node in sorted(nodes)]
    held = {worker: full.shards_of(worker) for worker in full.members}
    copied = copied_experts(plan, own, full.members, home) if copies_experts else {}
    have_all = _have_all(plan, own[-1].end, home, distributed, copied)
    for lost in dict.fromkeys([*singles, *together]):
        left = {worker: shards for worker, shards in held.items() if worker not in lost}
        if left and lost.intersection(full.working) and have_all(left):
            yield lost


def _have_all(
    plan: ParallelPlan, layers: int, home: NodeOf, distributed: bool, copied: Held
) -> Callable[[Held], bool]:  # fmt: skip
    """Tells whether survivors of a plan have all of the state, as a recovery would.

    Args:
        layers: of the model.
        home: tells a worker's node.
        copied: by worker that keeps a copy of experts, what their owner holds.
    """
    optimizer = optimizer_after(plan, distributed)

    def have_all(left: Held) -> bool:
        try:
            optimizer.require_all(left, home)
        except NoPlanError:
            return False
        copies = (shard for keeper, shards in copied.items() if keeper in left for shard in shards)
        return not lacking(left, layers, distributed, copies)

    return have_all


class PrecomputedPlans:
    """One per job. One thread tells what happens, asks and keeps answers; any thread may look for one.

    Args:
        slots, workers_per_node: of the job.
    """

    def __init__(self, slots: int, workers_per_node: int) -> None:
        self._sizes = slots, workers_per_node
        self._own: tuple[Chunk, ...] | None = None
        """None: there is nothing to plan ahead."""
        self._distributed = False
        self._plan: ParallelPlan | None = None
        self._copies_experts = False
        self._epoch: int | None = None
        """The epoch of that plan; None once it is about to end."""
        self._given_up = False
        """Whether the planner failed to answer about that plan."""
        self._trains = False
        self._learned: float | None = None
        self._losses: Iterator[Loss] = iter(())
        self._answers: dict[str, PlanFound] = {}

    def note(self, event: Event, learned: float | None) -> None:
        """Something happened in the run.

        Args:
            event: of the run.
            learned: changes when the costs do that plans are compared by.
        """
        match event:
            case Job() if event.chunks is not None and (event.strategy or UNIFORM) != UNIFORM:
                self._own = tuple(Chunk(*chunk) for chunk in event.chunks)
                self._distributed = bool(event.distributed_optimizer)
            case EpochStarted():
                self._stop()
                self._epoch, self._plan = event.epoch, ParallelPlan.from_dict(event.plan)
                self._copies_experts = bool(event.copies_experts)
                self._answers = {}
                self._given_up = False
            case EpochBroken() | PlanChange():
                # What was answered is kept: the recovery that may follow asks about this plan.
                self._stop()
            case Verdict():
                self._answers = {}
                self._begin()
            case ExpertLoads():
                self._begin()
            case Iteration() if event.epoch == self._epoch and not (self._trains and learned == self._learned):
                self._trains, self._learned = True, learned
                self._begin()

    def next_loss(self) -> Loss | None:
        """The next one to ask about; None: all is said for now."""
        return next(self._losses, None)

    def keep(self, request: PlannerRequest, answer: PlannerAnswer) -> None:
        """Remember a plan. Having none is no answer: there may be one when it is needed."""
        if isinstance(answer, PlanFound):
            self._answers[_key(request)] = answer

    def answer(self, request: PlannerRequest) -> PlanFound | None:
        """What was answered to just this request; None: it was not asked."""
        return self._answers.get(_key(request))

    def give_up(self) -> None:
        """Ask no more about this plan: the planner may take as long for the next loss, or end again."""
        self._given_up = True
        self._losses = iter(())

    def _begin(self) -> None:
        if self._trains and not self._given_up and self._own is not None and self._plan is not None:
            state = self._distributed, self._copies_experts
            self._losses = islice(likely_losses(self._plan, self._own, *self._sizes, *state), MOST_SEARCHES)

    def _stop(self) -> None:
        self._epoch, self._trains, self._losses = None, False, iter(())


def _key(request: PlannerRequest) -> str:
    """A plan is as good whatever had been learned of costs when it was made."""
    asked = encode(replace(request, cost_model=None, job=replace(request.job, busiest_shares=())))
    return sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
