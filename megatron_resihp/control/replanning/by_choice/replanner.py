# SPDX-License-Identifier: Apache-2.0
"""Beside the coordinator on node 0: has plans made, when workers died and when others would be faster.

A thread follows the run's events for the policy and may take its time; when it has nothing else to do, it has plans
made for losses that are likely. The coordinator asks in its own thread, if no plan was made ahead, and waits no longer
than a bound. Each has a planner's process of its own. May import the standard library, `coding`, `plan`, `planner`,
`protocol` and `control.replanning`'s modules.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from megatron_resihp.config import ACT, ASK, JOINT, UNIFORM
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.replanning.by_choice.policy import Action, AskPlanner, Policy, Recommend, Settings
from megatron_resihp.control.replanning.by_choice.proposals import Proposal, Proposals
from megatron_resihp.control.replanning.by_choice.trial import Outcome
from megatron_resihp.control.replanning.change import arrival
from megatron_resihp.control.replanning.health import Speeds
from megatron_resihp.control.replanning.job_facts import JobFacts
from megatron_resihp.control.replanning.processes.planners import Planners
from megatron_resihp.control.replanning.recovery.next_plan import StrategicPlan
from megatron_resihp.control.terminal import warn
from megatron_resihp.events import replanning as told
from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.detection import Verdict
from megatron_resihp.events.epochs import EpochBroken, EpochStarted, Reconfiguration, Recovery
from megatron_resihp.events.event import Event, stamped
from megatron_resihp.events.job import BatchGrown, Job, Model
from megatron_resihp.events.training import ExpertLoads, Iteration
from megatron_resihp.events.workers import NodeLeft, WorkerDead, WorkersLeft, WorkerWaiting
from megatron_resihp.protocol.messages import PlanRequest
from megatron_resihp.protocol.planning import NoPlan

FOLLOWED: Final[tuple[type[Event], ...]] = (
    Job, BatchGrown, Model, EpochStarted, Recovery, EpochBroken, told.PlanChange, Reconfiguration, told.ChangeRefused,
    Verdict, Iteration, WorkerWaiting, WorkerDead, WorkersLeft, NodeLeft, told.Planned, told.PlanFailed, ExpertLoads,
)  # fmt: skip
"""Events that planning needs."""
FOR_LOOKING_ON: Final = JOINT
"""The strategy whose plans are compared where the job has none that reacts to slow workers."""
COST_MODEL: Final = "cost_model.json"


class Replanner:
    """One per job.

    Args:
        run_dir: where proposals are written and the detector keeps what it learns.
        size: of the job.
        bus: where events come from and go to.
        order: takes requests for the coordinator.

    Attributes:
        next_plan: plans when workers have died.
    """

    def __init__(self, run_dir: Path, size: JobSize, bus: EventBus, order: Callable[[PlanRequest], None]) -> None:
        self._speeds = Speeds()
        self._planners = Planners(run_dir / COST_MODEL, size, self._speeds)
        self.next_plan = StrategicPlan(self._planners.for_survivors)
        self._slots = size.slots
        self._bus = bus
        self._order = order
        self._facts = JobFacts()
        self._proposals = Proposals(run_dir)
        self._policy: Policy | None = None
        self._to_plan: AskPlanner | None = None
        """What the policy asks for, once it has heard all that there is."""
        self._to_take_in = False
        """Whether joining workers may have work in a plan that is made now."""
        self._failed = False
        self._closing = False
        self._news: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="resihp-policy", daemon=True)
        self._thread.start()
        bus.subscribe(self._note, *FOLLOWED)

    def _note(self, event: Event) -> None:
        """Called in any thread."""
        if isinstance(event, Verdict):
            self._speeds.note(event)
        if not self._failed:
            self._news.put(event)

    def close(self, timeout_s: float) -> None:
        """End thread and processes."""
        self._closing = True
        self._news.put(None)
        self._planners.close()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (event := self._next_news()) is not None:
                self._follow(event)
                while self._news.empty() and self._have_planned_what_is_wanted():
                    pass
        except Exception as error:
            # Whatever it is, training goes on without changes by choice.
            self._failed = True
            traceback.print_exc()
            self._tell(told.PolicyFailed(error=f"{type(error).__name__}: {error}"))

    def _have_planned_what_is_wanted(self) -> bool:
        """False: nothing is."""
        if self._to_take_in:
            self._take_in()
        elif self._to_plan is not None:
            self._have_planned(self._to_plan)
        else:
            return False
        return True

    def _next_news(self) -> Event | None:
        """Waits for it; meanwhile losses are planned for, one by one, so that news waits for one search at most."""
        while self._news.empty() and (answer := self._planners.plan_ahead(self._facts)) is not None:
            if isinstance(answer, NoPlan) and answer.unanswered and not self._closing:
                self._tell(told.NoPlan(reason=f"none is made ahead of losses until the next epoch: {answer.reason}"))
        return self._news.get()

    def _follow(self, event: Event) -> None:
        self._planners.note(event)
        self._facts.note(event)
        match event:
            case Job():
                self._policy = Policy(Settings.of(event), self._speeds)
                if self._facts.strategy != UNIFORM:
                    self._planners.start()
            case Model():
                self._planners.rehearse(self._facts)
            case EpochStarted() | WorkerWaiting() | WorkerDead() | WorkersLeft() | NodeLeft() | Verdict():
                self._to_take_in = True
        if self._policy is not None:
            self._do(self._policy.note(event, time.monotonic()))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Outcome):
                self._tell(told.ChangeMeasured(number=action.number, before_s=action.before_s, after_s=action.after_s))
            elif isinstance(action, Recommend):
                self._recommend(action)
            else:
                self._to_plan = action

    def _have_planned(self, asked: AskPlanner) -> None:
        self._to_plan = None
        strategy = FOR_LOOKING_ON if self._facts.strategy == UNIFORM else self._facts.strategy
        answer = self._planners.by_choice(strategy, self._facts, asked.plan)
        # Verdicts come in groups: those that have come meanwhile may make this answer worthless.
        if self._hear_all():
            assert self._policy is not None
            if isinstance(answer, NoPlan):
                self._tell(told.NoPlan(reason=answer.reason))
            self._do(self._policy.answered(asked.number, answer, time.monotonic()))

    def _hear_all(self) -> bool:
        """Follow all news that there is; False: it ends here."""
        while not self._news.empty():
            event = self._news.get()
            if event is None:
                self._news.put(None)
                return False
            self._follow(event)
        return True

    def _take_in(self) -> None:
        """Ask for a plan that gives work to joining workers; where no strategy plans, or has a plan, the coordinator
        makes one.
        """
        self._to_take_in = False
        facts = self._facts
        if not facts.joining or facts.plan is None or facts.strategy == UNIFORM:
            return
        if facts.dead.intersection(facts.plan.members):
            return  # the others recover, and what they will do next is not known
        plan = replace(facts.plan, standbys={**facts.plan.standbys, **dict.fromkeys(facts.joining)})
        answer = self._planners.by_choice(facts.strategy, facts, plan)
        # The workers of a node come one by one: of the next ones, or of how fast one is, this answer knows nothing.
        if not self._hear_all() or self._to_take_in:
            return
        why = arrival(sorted(facts.joining), self._slots)
        if isinstance(answer, NoPlan):
            self._tell(told.NoPlan(reason=answer.reason))
            self._order(PlanRequest(None, why, patient=True))
        elif facts.joining.intersection(answer.plan.working):
            self._order(PlanRequest(answer.plan.to_dict(), why, patient=True))

    def _recommend(self, found: Recommend) -> None:
        numbers: dict[str, Any] = {
            "why": found.why, "gain": found.gain, "lost_s": found.lost_s, "cost_s": found.cost_s,
            "iteration_s": found.iteration_s,
        }  # fmt: skip
        if found.act == ACT:
            self._order(PlanRequest(found.plan.to_dict(), found.why))
        elif found.act == ASK and (path := self._written(Proposal(**numbers, plan=found.plan))) is not None:
            self._tell(told.Proposal(**numbers, path=str(path)))
        else:
            self._tell(told.WouldChange(**numbers, plan=found.plan.to_dict()))

    def _written(self, proposal: Proposal) -> Path | None:
        """Where it was written; None: a full disk, perhaps, keeps nobody from making later plans."""
        try:
            return self._proposals.write(proposal)
        except OSError as error:
            warn(f"resihp: a proposal can't be written: {error}")
            return None

    def _tell(self, event: Event) -> None:
        self._bus.publish(stamped(event, time.time()))
