# SPDX-License-Identifier: Apache-2.0
"""When to change a plan by choice: the run's events and planners' answers in, actions out. A pure state machine.

Slowness may pass, and a change costs a stand-still, so waiting and changing are weighed as in ski rental: a change is
made once the time that it would have saved so far is as much as it costs. No order of events can then cost more than
twice what knowing the future would have saved. Where slowness comes and goes that is dearer than to do nothing, so
changes in vain are remembered (`patience`). Besides, what is left of the job has to be long enough to pay for it.

May import `config`, `events`, `plan`, `protocol` and `control.replanning`'s other pure modules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from megatron_resihp.config import ACT, OBSERVE, UNIFORM
from megatron_resihp.control.replanning.by_choice.offers import Candidate, Offer, Recommended
from megatron_resihp.control.replanning.by_choice.patience import Cause, Patience, Shift, alike
from megatron_resihp.control.replanning.by_choice.progress import Lost, Pause, Training
from megatron_resihp.control.replanning.by_choice.trial import Outcome, Trial
from megatron_resihp.control.replanning.health import Speeds
from megatron_resihp.events.detection import Verdict
from megatron_resihp.events.epochs import EpochStarted, Reconfiguration, Recovery
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import Job
from megatron_resihp.events.replanning import ChangeRefused, PlanChange, PlanFailed, Planned
from megatron_resihp.events.training import Iteration
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.protocol.planning import NoPlan, PlannerAnswer

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

    @classmethod
    def of(cls, job: Job) -> Self:
        """How the job wants changes made; what its workers have not said is as usual."""
        between = cls.seconds_between_changes if job.seconds_between_changes is None else job.seconds_between_changes
        return cls(job.act or cls.act, between, bool(job.begins_with_a_plan))


@dataclass(frozen=True)
class AskPlanner:
    """Find a better plan for this one's members; the answer goes to `Policy.answered` with the same number."""

    number: int
    plan: ParallelPlan


@dataclass(frozen=True)
class Recommend:
    """A change that pays. What is done about it is up to the settings.

    Attributes:
        act: as in the settings.
        plan: to change to.
        why: which workers and links are slow, and what is gained.
        gain: share of an iteration that is saved.
        lost_s: what has been lost already.
        cost_s: what the change costs.
        iteration_s: of the new plan, as planned.
    """

    act: str
    plan: ParallelPlan
    why: str
    gain: float
    lost_s: float
    cost_s: float
    iteration_s: float


Action = AskPlanner | Recommend | Outcome


class Policy:
    """One per job. Feed it with `note` and `answered`; times are of any one clock, in seconds.

    Args:
        settings: how to act.
        speeds: of workers and links; the caller keeps them up to date with the verdicts.
    """

    def __init__(self, settings: Settings, speeds: Speeds) -> None:
        self._settings = settings
        self._speeds = speeds
        self._plan: ParallelPlan | None = None
        self._settled: Mapping[Cause, float] = {}
        """The speeds that it was made for."""
        self._asked = 0
        self._asked_with: Mapping[Cause, float] = {}
        """The speeds at the last question to the planner."""
        self._searching = False
        """Whether that is still to be answered."""
        self._candidate: Candidate | None = None
        self._heard = False
        """Whether there was a verdict that no recommendation was made for yet."""
        self._changing = False
        self._beginning = False
        """Whether the plan is awaited that the job is to begin with."""
        self._overtaken = False
        """Whether a recovery went on without the strategy's plan, because that took too long."""
        self._tried_late = False
        """Whether the last change was to such a plan, and has not been judged yet."""
        self._training = Training()
        self._lost = Lost()
        self._recommended = Recommended()
        self._trial = Trial()
        self._patience = Patience()
        self._pause = Pause()

    def note(self, event: Event, now: float) -> list[Action]:
        """Something happened in the run."""
        outcome = self._trial.note(event)
        return [*self._react(event, now), *([] if outcome is None else self._judged(outcome, now))]

    def _react(self, event: Event, now: float) -> list[Action]:
        match event:
            case Job():
                self._training.train_iters = event.train_iters
            case EpochStarted():
                self._plan = ParallelPlan.from_dict(event.plan)
                self._settled = self._slow()
                self._patience.keep(self._plan.members)
                self._drop()
                # A resumed job may change to larger batches before its first iteration.
                self._beginning = self._settings.begins_with_a_plan and (event.epoch == 0 or self._beginning)
                return self._ask() if self._beginning else []
            case PlanChange():
                self._changing = True
                self._recommended.begun(event, self._plan)
            case Planned() if event.instead_of != UNIFORM:
                # Where uniform plans don't exist either, a second event says so, and nothing of the strategy.
                self._overtaken, self._tried_late = bool(event.overtaken), False
            case PlanFailed():
                self._recommended.first_step_failed(event.number)
            case Recovery():
                self._recommended.before = self._recommended.under_way = None
                self._patience.forget_changes()
                if event.resumed_at is not None and event.broken_at is not None:
                    self._training.stand_still_s = event.resumed_at - event.broken_at
                # Uniform plans are not the best that survivors can do. A policy that only observes need not know how
                # much better others are.
                wanted = self._overtaken or self._settings.act != OBSERVE or bool(self._slow())
                return self._ask() if wanted else []
            case Reconfiguration():
                self._overtaken, self._tried_late = False, self._overtaken
                self._training.stand_still_s, self._training.changed_at = event.stood_still_s, now
                self._changed(event.stood_still_s, now)
                # What was found for a verdict that came on the way was a change of the plan before.
                return self._ask() if self._heard else []
            case ChangeRefused():
                return self._refused(event.why, now)
            case Verdict():
                self._recommended.refused.clear()
                self._heard, self._tried_late, self._beginning = True, False, False
                self._lost.slow_since(event.since)
                self._hear(event)
                # Where verdicts come faster than answers, none would ever be listened to.
                return [] if self._searching and alike(self._asked_with, self._slow()) else self._ask()
            case Iteration():
                return self._iterated(event, now)
        return []

    def answered(self, number: int, answer: PlannerAnswer, now: float) -> list[Action]:
        """What the planner found."""
        if number != self._asked:
            return []
        self._searching = False
        actions = self._weigh(answer, now)
        if actions or self._pause.until is not None or self._slow() == self._asked_with:
            return actions
        return self._ask()  # with what was heard meanwhile

    def _weigh(self, answer: PlannerAnswer, now: float) -> list[Action]:
        beginning, self._beginning = self._beginning, False
        if isinstance(answer, NoPlan) and answer.unanswered:
            if not beginning:
                self._pause.begin(now)
            return []
        self._pause = Pause()
        if isinstance(answer, NoPlan):
            # Where the strategy has none, none is late: what is found later is a change by choice.
            self._overtaken = False
            self._none_is_better()
            return []
        if not answer.current_s:
            self._candidate = None
            return []
        gain = 1.0 - answer.iteration_s / answer.current_s
        candidate = Candidate(
            answer.plan, gain, answer.moving_s, answer.sending_s, answer.iteration_s, self._asked_with
        )
        if answer.plan in (*self._recommended.failed, *self._recommended.refused):
            gain = 0.0
        if beginning and gain >= LEAST_GAIN:
            why = f"the planner's own layout: {_shorter(gain)}"
            self._recommended.last = Offer(why, candidate)
            return [Recommend(ACT, answer.plan, why, gain, 0.0, answer.moving_s, answer.iteration_s)]
        if gain < LEAST_GAIN:
            self._none_is_better()
            self._overtaken = False
            return []
        self._candidate = candidate
        self._lost.count_until_now(self._training, gain)
        return self._decide(now)

    def _judged(self, outcome: Outcome, now: float) -> list[Action]:
        """Planners may be wrong about what a plan is worth on these devices. Then the one before is the better one, and
        what they say is listened to less often."""
        before, self._recommended.before = self._recommended.before, None
        if before is None or outcome.after_s <= (1 + WORSE) * outcome.before_s:
            return [outcome]
        gain = 1.0 - outcome.before_s / outcome.after_s
        why = f"change {outcome.number} has not paid: iterations {outcome.before_s:.3g} s → {outcome.after_s:.3g} s"
        # What has moved moves back.
        self._candidate = Candidate(before, gain, 0.0, 0.0, outcome.before_s, self._slow(), why)
        return [outcome, *self._decide(now)]

    def _ask(self) -> list[Action]:
        if self._plan is None:
            return []
        self._asked += 1
        self._pause.until = None
        self._searching, self._asked_with = True, self._slow()
        if self._candidate is not None and not alike(self._candidate.speeds, self._asked_with):
            self._candidate = None
        return [AskPlanner(self._asked, self._plan)]

    def _slow(self) -> Mapping[Cause, float]:
        return self._speeds.slow(() if self._plan is None else self._plan.members)

    def _refused(self, why: str, now: float) -> list[Action]:
        offer = self._recommended.refuse(why)
        if offer is None:
            return []
        self._training.changed_at, self._heard = now, True
        self._patience.misled(offer.candidate.cost_s(self._training.stand_still_s), now)
        return self._ask()

    def _hear(self, verdict: Verdict) -> None:
        cause = tuple(sorted(verdict.workers))
        self._patience.heard(cause, verdict.since, slow=verdict.change != "recovery")
        if verdict.change == "onset":
            self._patience.relapsed(cause, verdict.relapses or 0)

    def _none_is_better(self) -> None:
        """The plan in force is as good as any for the speeds that were asked with."""
        self._candidate, self._settled = None, self._asked_with
        self._lost.none_is_better()

    def _changed(self, stood_still_s: float, now: float) -> None:
        """A change was made, for what was recommended or otherwise."""
        offer, self._recommended.under_way = self._recommended.under_way, None
        if offer is None or offer.shift is None:
            self._patience.forget_changes()
            return
        self._settled, self._lost.saved_s = offer.candidate.speeds, offer.saves_s
        self._patience.changed(offer.shift, offer.saves_s, stood_still_s, self._training.iteration, now)

    def _drop(self) -> None:
        """Another plan is in force: what was found for the one before is of no use, and nothing is lost by this one."""
        self._asked += 1
        self._pause.until = None
        self._candidate, self._changing, self._searching = None, False, False
        self._recommended.refused.clear()
        self._lost.forget()

    def _iterated(self, event: Iteration, now: float) -> list[Action]:
        self._training.iteration = event.iteration
        if event.duration_s:
            trained_s = self._training.took(event.duration_s)
            if self._candidate is not None:
                self._lost.count_one(event.iteration, trained_s, self._candidate.gain)
            else:
                self._lost.pass_one(trained_s)
        return self._ask() if self._pause.is_over(now) else self._decide(now)

    def _decide(self, now: float) -> list[Action]:
        candidate, training, lost_s = self._candidate, self._training, self._lost.seconds
        if self._changing or candidate is None or training.iteration_s is None:
            return []
        if training.train_iters is None or self._plan is None:
            return []
        cost_s = candidate.cost_s(training.stand_still_s)
        to_save_s = (training.train_iters - training.iteration) * training.iteration_s * candidate.gain
        too_soon = (
            training.changed_at is not None and now - training.changed_at < self._settings.seconds_between_changes
        )
        shift = None if candidate.why is not None else Shift.between(self._settled, candidate.speeds)
        to_lose_s = cost_s if shift is None else self._patience.to_lose_s(shift, cost_s, now)
        if too_soon or lost_s < to_lose_s or to_save_s < cost_s:
            return []
        because = _OVERTAKEN if self._overtaken else self._speeds.in_words(self._plan.members)
        why = candidate.why or f"{because}: {_shorter(candidate.gain)}"
        # The user has chosen the strategy that plans when workers die. Its plan only comes late, and may go again.
        late = self._overtaken if candidate.why is None else self._tried_late
        act = ACT if late else self._settings.act
        if candidate.why is None:
            self._recommended.said = why
        else:
            self._recommended.said = None
            self._patience.misled(3 * cost_s, now)  # there and back, and what was lost in between
        found = Recommend(act, candidate.plan, why, candidate.gain, lost_s, cost_s, candidate.iteration_s)
        self._candidate, self._heard = None, self._slow() != candidate.speeds  # said once
        self._recommended.last = Offer(why, candidate, shift, training.iteration_s * candidate.gain)
        return [found]


def _shorter(gain: float) -> str:
    return f"iterations {100 * gain:.0f} % shorter"
