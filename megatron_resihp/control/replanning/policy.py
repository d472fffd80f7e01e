# SPDX-License-Identifier: Apache-2.0
"""When to change a plan by choice: the run's events and planners' answers in, actions out. A pure state machine.

Slowness may pass, and a change costs a stand-still, so waiting and changing are weighed as in ski rental: a change is
made once the time that it would have saved so far is as much as it costs. No order of events can then cost more than
twice what knowing the future would have saved. Besides, what is left of the job has to be long enough to pay for it.

May import `events`, `plan`, `protocol` and this package's other pure modules.
"""

from dataclasses import dataclass
from typing import Final

from megatron_resihp.control.replanning.health import Speeds
from megatron_resihp.control.replanning.trial import Outcome, Trial
from megatron_resihp.events.detection import Verdict
from megatron_resihp.events.epochs import EpochStarted, Reconfiguration, Recovery
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import Job
from megatron_resihp.events.replanning import ChangeRefused, PlanChange, PlanFailed, Planned
from megatron_resihp.events.training import Iteration
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.protocol.planning import NoPlan, PlannerAnswer

OBSERVE, ASK, ACT = "observe", "ask", "act"
LEAST_GAIN: Final = 0.01
"""Smaller gains are within the error of the costs that plans are compared by."""
_OVERTAKEN: Final = "the plan that the recovery did not wait for"
WORSE: Final = 0.05
"""Iterations that are longer by this share after a change say that it has not paid."""


@dataclass(frozen=True)
class Settings:
    """How to act.

    Attributes:
        act: "observe": say what would be done; "ask": propose it to people; "act": do it.
        seconds_between_changes: least time from one change by choice to the next.
        begins_with_a_plan: whether to ask for a plan as the job begins, and to take it at once.
    """

    act: str = OBSERVE
    seconds_between_changes: float = 60.0
    begins_with_a_plan: bool = False


@dataclass(frozen=True)
class AskPlanner:
    """Find a plan for this one and the workers' speeds; the answer goes to `Policy.answered` with the same number."""

    number: int
    plan: ParallelPlan
    speeds: dict[int, float]
    links: dict[tuple[int, int], float]


@dataclass(frozen=True)
class Recommend:
    """A change that pays. What is done about it is up to the settings.

    Attributes:
        act: as in the settings.
        plan: to change to.
        why: who is slow, and what is gained.
        gain: share of an iteration that is saved.
        lost_s: what has been lost already.
        cost_s: what the change costs.
        iteration_s: of the new plan's pipelines, as planned.
    """

    act: str
    plan: ParallelPlan
    why: str
    gain: float
    lost_s: float
    cost_s: float
    iteration_s: float


Action = AskPlanner | Recommend | Outcome


@dataclass(frozen=True)
class _Candidate:
    plan: ParallelPlan
    gain: float
    moving_s: float
    iteration_s: float
    why: str | None = None
    """If not for speeds."""


class Policy:
    """One per job. Feed it with `note` and `answered`; times are of any one clock, in seconds.

    Args:
        settings: how to act.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._between_s = settings.seconds_between_changes
        self._speeds = Speeds()
        self._plan: ParallelPlan | None = None
        self._asked = 0
        self._candidate: _Candidate | None = None
        self._lost_s = 0.0
        self._since: int | None = None
        """First iteration that was slow, of what has not been counted as lost yet."""
        self._counted = 0
        """The last iteration whose loss is counted."""
        self._heard = False
        """Whether there was a verdict that no recommendation was made for yet."""
        self._changing = False
        self._recommended: tuple[str, ParallelPlan] | None = None
        """Why, and the plan: what was recommended last."""
        self._tried: tuple[int | None, ParallelPlan] | None = None
        """Number of the change to a plan that was recommended, and the plan."""
        self._failed: list[ParallelPlan] = []
        """Plans whose first step has failed."""
        self._trial = Trial()
        self._before: ParallelPlan | None = None
        """To go back to, where the change that was recommended doesn't pay."""
        self._said: str | None = None
        """Why a change was recommended that may turn out not to pay."""
        self._beginning = False
        """Whether the plan is awaited that the job is to begin with."""
        self._overtaken = False
        """Whether a recovery went on without the strategy's plan, because that took too long."""
        self._tried_late = False
        """Whether the last change was to such a plan, and has not been judged yet."""
        self._iteration = 0
        self._iteration_s: float | None = None
        self._train_iters: int | None = None
        self._stand_still_s: float | None = None
        self._changed_at: float | None = None

    def note(self, event: Event, now: float) -> list[Action]:
        """Something happened in the run."""
        outcome = self._trial.note(event)
        return [*self._react(event, now), *([] if outcome is None else self._judged(outcome, now))]

    def _react(self, event: Event, now: float) -> list[Action]:
        match event:
            case Job():
                self._train_iters = event.train_iters
            case EpochStarted():
                self._plan = ParallelPlan.from_dict(event.plan)
                self._drop()
                self._beginning = self._settings.begins_with_a_plan and event.epoch == 0
                return self._ask() if self._beginning else []
            case PlanChange():
                self._changing = True
                if self._recommended is not None and event.why == self._recommended[0]:
                    self._tried = event.number, self._recommended[1]
                self._before = self._plan if event.why == self._said else None
            case Planned():
                self._overtaken, self._tried_late = bool(event.overtaken), False
            case PlanFailed() if self._tried is not None and event.number == self._tried[0]:
                self._failed.append(self._tried[1])
            case Recovery():
                self._before = None
                if event.resumed_at is not None and event.broken_at is not None:
                    self._stand_still_s = event.resumed_at - event.broken_at
                # Uniform plans are not the best that survivors can do. Who only looks on need not know how much better.
                wanted = self._overtaken or self._settings.act != OBSERVE or self._somebody_is_slow()
                return self._ask() if wanted else []
            case Reconfiguration():
                self._overtaken, self._tried_late = False, self._overtaken
                self._stand_still_s, self._changed_at = event.stood_still_s, now
                # What was found for a verdict that came on the way was a change of the plan before.
                return self._ask() if self._heard else []
            case ChangeRefused():
                self._changed_at, self._heard = now, True
                return self._ask()
            case Verdict():
                self._speeds.note(event)
                self._heard, self._tried_late = True, False
                self._since = event.since if self._since is None else min(self._since, event.since)
                return self._ask()
            case Iteration():
                return self._iterated(event, now)
        return []

    def answered(self, number: int, answer: PlannerAnswer, now: float) -> list[Action]:
        """What the planner found."""
        if number != self._asked or isinstance(answer, NoPlan) or not answer.current_s:
            return []
        gain = 1.0 - answer.iteration_s / answer.current_s
        if answer.plan in self._failed:
            gain = 0.0
        if self._beginning and gain >= LEAST_GAIN:
            self._beginning = False
            why = f"the planner's own layout: {_shorter(gain)}"
            self._recommended = why, answer.plan
            return [Recommend(ACT, answer.plan, why, gain, 0.0, answer.moving_s, answer.iteration_s)]
        if gain < LEAST_GAIN:
            self._since, self._overtaken = None, False
            return []
        self._candidate = _Candidate(answer.plan, gain, answer.moving_s, answer.iteration_s)
        if self._since is not None and self._iteration_s is not None:
            uncounted = self._iteration - max(self._since - 1, self._counted)
            self._lost_s += max(uncounted, 0) * self._iteration_s * gain
            self._counted = self._iteration
        self._since = None
        return self._decide(now)

    def _judged(self, outcome: Outcome, now: float) -> list[Action]:
        """Planners may be wrong about what a plan is worth on these devices. Then the one before is the better one, and
        what they say is listened to less often."""
        before, self._before = self._before, None
        if before is None or outcome.after_s <= (1 + WORSE) * outcome.before_s:
            return [outcome]
        gain = 1.0 - outcome.before_s / outcome.after_s
        why = f"change {outcome.number} has not paid: iterations {outcome.before_s:.3g} s → {outcome.after_s:.3g} s"
        self._candidate = _Candidate(before, gain, self._stand_still_s or 0.0, outcome.before_s, why)
        return [outcome, *self._decide(now)]

    def _ask(self) -> list[Action]:
        if self._plan is None:
            return []
        self._asked += 1
        self._candidate = None
        members = self._plan.members
        return [AskPlanner(self._asked, self._plan, self._speeds.of(members), self._speeds.links(members))]

    def _somebody_is_slow(self) -> bool:
        members = () if self._plan is None else self._plan.members
        return min(self._speeds.of(members).values(), default=1.0) < 1.0 or bool(self._speeds.links(members))

    def _drop(self) -> None:
        """Another plan is in force: what was found for the one before is of no use, and nothing is lost by this one."""
        self._asked += 1
        self._candidate, self._lost_s, self._since = None, 0.0, None
        self._changing = False

    def _iterated(self, event: Iteration, now: float) -> list[Action]:
        self._iteration = event.iteration
        if event.duration_s:
            self._iteration_s = event.duration_s
            if self._candidate is not None:
                self._lost_s += self._iteration_s * self._candidate.gain
                self._counted = self._iteration
        return self._decide(now)

    def _decide(self, now: float) -> list[Action]:
        candidate, iteration_s = self._candidate, self._iteration_s
        if self._changing or candidate is None or iteration_s is None:
            return []
        if self._train_iters is None or self._plan is None:
            return []
        cost_s = candidate.moving_s if self._stand_still_s is None else self._stand_still_s
        to_save_s = (self._train_iters - self._iteration) * iteration_s * candidate.gain
        too_soon = self._changed_at is not None and now - self._changed_at < self._between_s
        if too_soon or self._lost_s < cost_s or to_save_s < cost_s:
            return []
        because = _OVERTAKEN if self._overtaken else self._speeds.in_words(self._plan.members)
        why = candidate.why or f"{because}: {_shorter(candidate.gain)}"
        # Whose plan is to be taken when workers die was said; it only comes late, and may have to go again.
        late = self._overtaken if candidate.why is None else self._tried_late
        act = ACT if late else self._settings.act
        if candidate.why is None:
            self._said = why
        else:
            self._said, self._between_s = None, 2 * self._between_s
        found = Recommend(act, candidate.plan, why, candidate.gain, self._lost_s, cost_s, candidate.iteration_s)
        self._candidate, self._heard, self._recommended = None, False, (why, candidate.plan)  # said once
        return [found]


def _shorter(gain: float) -> str:
    return f"iterations {100 * gain:.0f} % shorter"
