# SPDX-License-Identifier: Apache-2.0
"""Changes of plan by choice: asked for, to take workers in, or to let nodes leave.

May import `plan`, `planner`, `protocol` and pure modules of `control`.
"""

import signal
from collections.abc import Iterable
from dataclasses import replace

from megatron_resihp.control.coordination.actions import Action, Log, Notify, Phase, Reply
from megatron_resihp.control.coordination.state_machine.departures import named
from megatron_resihp.control.coordination.state_machine.ends import Ends
from megatron_resihp.control.coordination.state_machine.plans import Plans
from megatron_resihp.control.coordination.state_machine.state import State
from megatron_resihp.control.replanning.change import (
    Change,
    ChangeRefused,
    arrival,
    changes,
    check_degrees,
    check_memory,
    plan_of,
    plan_to_change_to,
)
from megatron_resihp.control.replanning.modes import mode_of
from megatron_resihp.events import replanning
from megatron_resihp.events.workers import NodeLeft, WorkersLeft
from megatron_resihp.plan import ParallelPlan, PlanError
from megatron_resihp.planner import NoPlanError
from megatron_resihp.protocol.answers import Accepted, Answer, Refused
from megatron_resihp.protocol.messages import PlanRequest
from megatron_resihp.protocol.notices import NodeReleased, PlanChange, WorkersGivenUp


class ChangesByChoice:
    """The changes by choice of one job; one at a time."""

    def __init__(self, state: State, plans: Plans, ends: Ends) -> None:
        self._state = state
        self._plans = plans
        self._ends = ends

    def after_go(self) -> list[Action]:
        """What has waited until training goes on."""
        waiting, self._state.changes.waiting = self._state.changes.waiting, []
        actions = [action for request in waiting for action in self.ask_for(request)]
        return actions + self.depart() + self.grow()

    # ---- asked for

    def ask_for(self, request: PlanRequest) -> list[Action]:
        """A user or the replanner asks for a plan."""
        changes, phase = self._state.changes, self._state.phase
        if request.patient and (changes.under_way or phase in (Phase.REPORTING, Phase.BUILDING)):
            changes.waiting.append(request)
            return []
        try:
            change = self._asked_change(request)
        except ChangeRefused as error:
            refused = Log(replanning.ChangeRefused(why=request.why, reason=str(error)))
            return [refused, *reply(request.answer, Refused(str(error)))]
        return self._begin(change, request.answer)

    def _asked_change(self, request: PlanRequest) -> Change:
        """Raises ChangeRefused."""
        self._check_that_changes_can_be()
        state, job = self._state, self._state.job
        plan, shape = state.plan_and_shape
        workers = state.living | state.joining.waiting
        if request.plan is None and request.answer is None:
            asked = self._uniform_with_joining()
        else:
            asked = plan_to_change_to(plan_of(request.plan), plan, job.own, shape.tensor_parallel, workers)
        asked = self._plans.optimizer.without_parts_kept(asked)
        error = state.first_steps.failed.get(asked.work_digest)
        if error is not None and request.answer is None:  # a user may know better
            raise ChangeRefused(f"this plan has failed in the first step: {error}")
        new = set(asked.members) - state.living
        if apart := state.reports.links.kept_apart(new, asked.members):
            raise ChangeRefused(apart)
        try:
            check_degrees(asked, job.known)
            mode_of(asked).check_ops(asked, job.own, job.described)
            check_memory(asked, plan, job.own, job.known)
        except PlanError as error:
            raise ChangeRefused(str(error)) from None
        return self._next_change(asked, request.why)

    def _uniform_with_joining(self) -> ParallelPlan:
        """Raises ChangeRefused: there is none that has work for them."""
        waiting = self._state.joining.waiting - self._kept_out()[0].keys()
        try:
            plan = self._plans.more_replicas(waiting)
        except NoPlanError as error:
            raise ChangeRefused(str(error)) from None
        if not waiting.intersection(plan.working):
            raise ChangeRefused("uniform plans have no work for them")
        return plan

    def _next_change(self, plan: ParallelPlan, why: str, leaving: frozenset[int] = frozenset()) -> Change:
        return Change(self._state.changes.last + 1, plan, why, leaving=leaving)

    def _begin(self, change: Change, answer: str | None = None) -> list[Action]:
        """Tell all workers of a change. `answer`: key under which the requester awaits an answer."""
        plan, _ = self._state.plan_and_shape
        lines = changes(plan, change.plan, self._state.job.own)
        known = self._state.changes
        known.under_way, known.last, known.prepared = change, change.number, set()
        return [
            Log(replanning.PlanChange(
                number=change.number, why=change.why, from_digest=plan.digest, to_digest=change.plan.digest,
                changes=tuple(lines),
            )),
            Notify(PlanChange(change.number, self._state.epoch, change.plan)),
            *reply(answer, Accepted(f"change {change.number} begins after an iteration", lines)),
        ]  # fmt: skip

    def begin_larger_batches(self, samples: int) -> None:
        """Members leave the epoch together by themselves: the next batch is larger than those of its plan."""
        plan, _ = self._state.plan_and_shape
        change = self._next_change(plan, f"global batches of {samples} samples")
        known = self._state.changes
        known.under_way, known.last, known.prepared = replace(change, larger=True), change.number, set()

    def _check_that_changes_can_be(self) -> None:
        """Raises ChangeRefused."""
        state = self._state
        if state.changes.under_way is not None:
            raise ChangeRefused(f"change {state.changes.under_way.number} is under way")
        if state.job.trained or state.done or state.ending.stop_signal:
            raise ChangeRefused("the job is about to end")
        if state.phase is not Phase.RUNNING:
            raise ChangeRefused(f"the job is not training now, it is {state.phase.value}")

    # ---- workers that join

    def grow(self) -> list[Action]:
        """Give work to joining workers, where complete uniform replicas are planned and there can be more of them.

        Where a strategy plans, the replanner asks for a change: its search takes too long for this thread.
        """
        state, job = self._state, self._state.job
        if not state.joining.waiting or not job.plans_uniformly:
            return []
        try:
            self._check_that_changes_can_be()
        except ChangeRefused:
            return []
        kept_out, told = self._kept_out()
        try:
            plan = self._plans.more_replicas(state.joining.waiting - kept_out.keys())
        except NoPlanError:
            return told
        if plan.work_digest in state.first_steps.failed:
            return told
        taken = sorted(state.joining.waiting.intersection(plan.working))
        why = arrival(taken, job.size.slots)
        try:
            check_memory(plan, state.plan_and_shape[0], job.own, job.known)
        except PlanError as error:
            return [*told, Log(replanning.ChangeRefused(why=why, reason=str(error)))]
        return told + (self._begin(self._next_change(plan, why)) if taken else [])

    def _kept_out(self) -> tuple[dict[int, str], list[Action]]:
        """Joining workers that a bad link keeps out, each with why; and what the log is told."""
        state, found = self._state, dict[int, str]()
        others = set(state.living)
        for worker in sorted(state.joining.waiting):
            if apart := state.reports.links.kept_apart([worker], others):
                found[worker] = apart
            else:
                others.add(worker)
        if not found:
            return {}, []
        why = arrival(sorted(found), state.job.size.slots)
        return found, [Log(replanning.ChangeRefused(why=why, reason=min(found.values())))]

    # ---- nodes and workers that leave

    def depart(self) -> list[Action]:
        """Plan around what is to leave, once training goes on; where no plan is left, all stop in order."""
        state, actions = self._state, self.let_go()
        leaving = state.departures.among(state.living)
        try:
            self._check_that_changes_can_be()
        except ChangeRefused:
            return actions
        if not leaving:
            return actions
        who = named(state.departures.agents, state.departures.workers)
        try:
            plan, told = self._plans.plan_for(self._plans.held_by(state.living - leaving))
        except NoPlanError as error:
            reason = f"told to leave: {who}; there is no plan for the others: {error}"
            return actions + self._ends.stop(signal.SIGTERM, reason)
        change = self._next_change(plan, f"{who} leaves", leaving)
        return [*actions, *map(Log, told), *self._begin(change)]

    def let_go(self) -> list[Action]:
        """Release what is to leave and is in no plan any more."""
        state, actions = self._state, list[Action]()
        for node in state.departures.without_members(state.living):
            agent = state.departures.agents.pop(node)
            state.joining.nodes.discard(node)
            known = {*range(state.job.size.workers), *state.joining.waiting, *state.reports.records}
            here = {worker for worker in known - state.dead.keys() if state.joining.node_of(worker) == node}
            workers = self._have_left(here)
            actions.append(Log(NodeLeft(node=node, left=workers)))
            actions.append(Notify(NodeReleased(agent, workers)))
        alone = state.departures.workers - state.living
        state.departures.workers -= alone
        waiting = tuple(sorted(alone & state.joining.waiting))
        if left := self._have_left(alone - state.dead.keys()):
            actions.append(Log(WorkersLeft(left=left)))
        if waiting:  # members read in the plan that leaves them out that they are to end
            actions.append(Notify(WorkersGivenUp(waiting, "told to leave", for_good=True)))
        return actions

    def _have_left(self, workers: Iterable[int]) -> tuple[int, ...]:
        state, left = self._state, tuple(sorted(workers))
        state.lose(dict.fromkeys(left, "left"))
        state.departures.left.update(left)
        state.joining.waiting.difference_update(left)
        return left


def reply(key: str | None, answer: Answer) -> list[Action]:
    """To who waits for it. `key`: where it is looked for; None: no one waits."""
    return [] if key is None else [Reply(key, answer)]
