# SPDX-License-Identifier: Apache-2.0
"""Plans that were chosen and under which no step has been taken yet: what follows where the first step fails.

A planner may choose what Megatron, the device's memory or this package can't run on every worker. Such an error is
answered once, by a plan that is known to run: after a change by choice the plan before, after a loss uniform plans. An
error that strikes there again is none of the plan's. Pure; may import `plan` and this package's other modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_resihp.control.replanning.change import Change, with_standbys
from megatron_resihp.control.replanning.recovery.inventory import Survivors, lacking
from megatron_resihp.control.replanning.recovery.next_plan import uniform_or_less, was_chosen
from megatron_resihp.events.event import Event
from megatron_resihp.events.replanning import PlanFailed
from megatron_resihp.plan import ParallelPlan, spelled_out
from megatron_resihp.plan.spelling import trimmed


@dataclass(frozen=True)
class OnTrial:
    """A plan in force under which no step has been taken, as far as the coordinator knows.

    Attributes:
        plan: of the epoch.
        before: the plan to go back to; None: there is none, as the plan came after a loss.
        number: of the change by choice that it came with.
    """

    plan: ParallelPlan
    before: ParallelPlan | None = None
    number: int | None = None


@dataclass
class FirstSteps:
    """The first steps of one job's plans.

    Attributes:
        on_trial: the plan of this epoch, if its first step may be answered for.
        failed: the error of each plan that has failed, by `ParallelPlan.work_digest`.
    """

    on_trial: OnTrial | None = None
    failed: dict[str, str] = field(default_factory=dict)
    _unanswered: OnTrial | None = None

    def published(self, plan: ParallelPlan, before: ParallelPlan, change: Change | None, told: Sequence[Event]) -> bool:
        """A plan follows another; returns whether its first step may be answered for.

        Args:
            change: that it comes with; None: a loss.
            told: what the log says of how the plan was found.
        """
        if change is not None:
            self.on_trial = OnTrial(plan, before, change.number)
        else:
            self.on_trial = OnTrial(plan) if was_chosen(told) else None
        return self.on_trial is not None

    def fail(self, worker: int, error: str) -> PlanFailed | None:
        """A worker says that the first step has failed; what to write to the log. None: the plan is not on trial."""
        trial, self.on_trial = self.on_trial, None
        if trial is None:
            return None
        self.failed[trial.plan.work_digest] = error
        self._unanswered = trial
        return PlanFailed(failed=worker, error=error, digest=trial.plan.digest, number=trial.number)

    def answer(self, survivors: Survivors) -> tuple[ParallelPlan, list[Event]] | None:
        """What follows a plan that has failed, once; None: none has.

        Raises:
            NoPlanError: nothing that is known to run.
        """
        trial, self._unanswered = self._unanswered, None
        if trial is None:
            return None
        before, held, own = trial.before, survivors.held, survivors.own
        lost = lacking(held, own[-1].end, copied=survivors.copied)
        if before is not None and before.micro_batch_count != survivors.shape.micro_batches:
            before = None  # batches have grown since
        if before is None or not held.keys() >= set(before.working) or lost:
            return uniform_or_less(survivors)
        working = trimmed(spelled_out(replace(before, standbys={}), own))
        return with_standbys(working, held, own, survivors.shape.tensor_parallel), []
