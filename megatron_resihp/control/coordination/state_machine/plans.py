# SPDX-License-Identifier: Apache-2.0
"""Which plan comes next, given what survivors hold. May import `plan`, `planner` and pure modules of `control`."""

from collections.abc import Container, Set

from megatron_resihp.control.coordination.state_machine.state import HeldShards, State
from megatron_resihp.control.replanning.modes import OptimizerState, optimizer_after
from megatron_resihp.control.replanning.recovery.inventory import Held, Survivors, copied_experts
from megatron_resihp.control.replanning.recovery.next_plan import (
    NextPlan,
    first_again,
    uniform_or_less,
    uniform_plan,
)
from megatron_resihp.events.event import Event
from megatron_resihp.plan import ParallelPlan, Shard, spelled_out
from megatron_resihp.planner import NoPlanError


class Plans:
    """Plans for the members that are left, or that there are again.

    Args:
        next_plan: plans when workers have died.
    """

    def __init__(self, state: State, next_plan: NextPlan) -> None:
        self._state = state
        self._next_plan = next_plan

    @property
    def optimizer(self) -> OptimizerState:
        """Where the optimizer's state is, under the plan that was run last."""
        return optimizer_after(self._state.running, self._state.job.distributed_optimizer)

    def held_by(self, workers: Set[int]) -> HeldShards:
        """What the plan in force gives these workers to hold."""
        plan, _ = self._state.plan_and_shape
        full = spelled_out(plan, self._state.job.own)
        return {worker: full.shards_of(worker) for worker in workers}

    def survivors(self, held: Held) -> Survivors:
        state, job = self._state, self._state.job
        plan, shape = state.plan_and_shape
        failed = state.first_steps.failed
        return Survivors(
            shape, job.own, held, plan, state.running, job.described, job.arguments, job.size.slots, failed,
            self.copied(held),
        )  # fmt: skip

    def copied(self, living: Container[int]) -> tuple[Shard, ...]:
        """What the owners hold of whose experts these workers keep a copy."""
        return tuple(shard for shards in self.copied_by(living).values() for shard in shards)

    def copied_by(self, living: Container[int]) -> HeldShards:
        """The same by worker."""
        state = self._state
        if state.running is None or not state.copies_kept:
            return {}
        return dict(copied_experts(state.running, state.job.own, living, state.joining.node_of))

    def plan_for(self, held: Held) -> tuple[ParallelPlan, list[Event]]:
        """The plan for the holders of this state, and what to write to the log.

        Raises:
            NoPlanError.
        """
        self._require_enough(held)
        survivors = self.survivors(held)
        plan, told = self._state.first_steps.answer(survivors) or self._next_plan(survivors)
        return self.optimizer.without_parts_kept(plan), told

    def _require_enough(self, held: Held) -> None:
        """Raises NoPlanError unless these are as many workers as the user wants, and hold all of the optimizer."""
        fewest = self._state.limits.min_workers
        if len(held) < fewest:
            raise NoPlanError(f"{len(held)} are left, fewer than --min-workers {fewest}")
        self.optimizer.require_all(held, self._state.joining.node_of)

    def more_replicas(self, joining: set[int]) -> ParallelPlan:
        """The uniform plan for all members and these joining workers.

        Raises:
            NoPlanError.
        """
        first = self._state.first
        assert first is not None
        survivors = self.survivors(self.held_by(self._state.living) | self._state.joining.held(joining))
        return first_again(first, survivors) or uniform_plan(survivors)[0]

    def capacity_without(self, workers: frozenset[int]) -> int | None:
        """How many of those that have reported would have work without these; None: there is no plan."""
        reports = self._state.reports
        held = {worker: reports.held[worker] for worker in reports.records.keys() - workers}
        try:
            self._require_enough(held)
            return len(uniform_or_less(self.survivors(held))[0].working)
        except NoPlanError:
            return None
