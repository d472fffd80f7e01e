# SPDX-License-Identifier: Apache-2.0
"""Plans that would be better than the one in force, and what became of those that were recommended.

Pure; may import `events`, `plan` and `control.replanning`'s other pure modules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_resihp.control.replanning.by_choice.patience import Cause, Shift
from megatron_resihp.events.replanning import PlanChange
from megatron_resihp.plan import ParallelPlan


@dataclass(frozen=True)
class Candidate:
    plan: ParallelPlan
    gain: float
    moving_s: float
    sending_s: float
    iteration_s: float
    speeds: Mapping[Cause, float]
    """That it is for; who is not here is healthy."""
    why: str | None = None
    """If not for speeds."""

    def cost_s(self, stand_still_s: float | None) -> float:
        """How long a change to this plan will hold up training.

        The last stand-still tells what new groups take in this job, which the planner only guesses. Whether as much
        state moves now, it does not tell. What is weighed with too much only comes later, and the stand-still that
        follows is a better measure; what is weighed with too little makes a change that does not pay.

        Args:
            stand_still_s: of the last recovery or change; None: there was none.
        """
        return self.moving_s if stand_still_s is None else max(stand_still_s, self.sending_s)


@dataclass(frozen=True)
class Offer:
    """What was recommended.

    Attributes:
        why: as told.
        candidate: the plan.
        shift: of speeds, that it is for; None: it is not for speeds.
        saves_s: in each iteration, by estimate.
    """

    why: str
    candidate: Candidate
    shift: Shift | None = None
    saves_s: float = 0.0


@dataclass
class Recommended:
    """What was recommended, and what became of it.

    Attributes:
        last: the last offer.
        under_way: the one that a change is being made for.
        tried: number of the change to a plan that was recommended, and the plan.
        failed: plans whose first step has failed.
        refused: plans that can't be taken, as long as the plan in force and the speeds are the same.
        before: the plan to go back to, where the change that was recommended doesn't pay.
        said: why a change was recommended that may turn out not to pay.
    """

    last: Offer | None = None
    under_way: Offer | None = None
    tried: tuple[int | None, ParallelPlan] | None = None
    failed: list[ParallelPlan] = field(default_factory=list)
    refused: list[ParallelPlan] = field(default_factory=list)
    before: ParallelPlan | None = None
    said: str | None = None

    def begun(self, change: PlanChange, plan: ParallelPlan | None) -> None:
        """A change begins. `plan`: in force."""
        self.under_way = self.last if self.last is not None and change.why == self.last.why else None
        if self.under_way is not None:
            self.tried = change.number, self.under_way.candidate.plan
        self.before = plan if change.why == self.said else None

    def refuse(self, why: str) -> Offer | None:
        """A change is refused. None: that is not what was recommended, but asked for by others."""
        if self.last is None or why != self.last.why:
            return None
        self.refused.append(self.last.candidate.plan)
        return self.last

    def first_step_failed(self, number: int | None) -> None:
        """The first step under the plan of a change has failed."""
        if self.tried is not None and number == self.tried[0]:
            self.failed.append(self.tried[1])
