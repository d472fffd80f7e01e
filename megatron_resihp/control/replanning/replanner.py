# SPDX-License-Identifier: Apache-2.0
"""Beside the coordinator on node 0: has plans made, when workers died and when others would be faster.

A thread follows the run's events for the policy and may take its time; when it has nothing else to do, it has plans
made for losses that are likely. The coordinator asks in its own thread, if nobody has asked ahead, and waits no longer
than a bound. Each has a planner's process of its own. May import the standard library, `coding`, `plan`, `planner`,
`protocol` and this package's modules.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from megatron_resihp.coding import encode
from megatron_resihp.config import MEMORY_RESERVE, UNIFORM
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.replanning.change import arrival
from megatron_resihp.control.replanning.health import Speeds
from megatron_resihp.control.replanning.next_plan import Heard, StrategicPlan, Survivors
from megatron_resihp.control.replanning.planner_process import PlannerProcess
from megatron_resihp.control.replanning.policy import ACT, ASK, OBSERVE, Action, AskPlanner, Policy, Recommend, Settings
from megatron_resihp.control.replanning.precomputed import PrecomputedPlans
from megatron_resihp.control.replanning.trial import Outcome
from megatron_resihp.events import replanning as told
from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.detection import Verdict
from megatron_resihp.events.epochs import EpochBroken, EpochStarted, Reconfiguration, Recovery
from megatron_resihp.events.event import Event, stamped
from megatron_resihp.events.job import Job, Model
from megatron_resihp.events.training import Iteration
from megatron_resihp.events.workers import WorkerDead, WorkerWaiting
from megatron_resihp.plan import Chunk, ParallelPlan
from megatron_resihp.plan.places import links_of_places, names_of_places, place_of, renamed
from megatron_resihp.planner import JobShape, NoPlanError, initial_plan
from megatron_resihp.protocol.messages import PlanRequest
from megatron_resihp.protocol.planning import KnownJob, NoPlan, PlanFound, PlannerAnswer, PlannerRequest

FOLLOWED: Final[tuple[type[Event], ...]] = (
    Job, Model, EpochStarted, Recovery, EpochBroken, told.PlanChange, Reconfiguration, told.ChangeRefused, Verdict,
    Iteration, WorkerWaiting, WorkerDead, told.Planned, told.PlanFailed,
)  # fmt: skip
"""Events that planning needs."""
BY_CHOICE_S: Final = 600.0
FOR_LOOKING_ON: Final = "joint"
"""Whose plans are compared where the job has no strategy that reacts to slow workers."""
REHEARSED_SPEED: Final = 0.7
PROPOSALS: Final = "proposals"
COST_MODEL: Final = "cost_model.json"


@dataclass(frozen=True)
class Proposal:
    """A change that people are to decide on, as its file has it; see `policy.Recommend` for the numbers."""

    why: str
    gain: float
    lost_s: float
    cost_s: float
    iteration_s: float
    plan: ParallelPlan


class Replanner:
    """One per job.

    Args:
        run_dir: where proposals are written and the detector keeps what it learns.
        size: of the job.
        bus: where events come from and go to.
        order: takes requests for the coordinator.

    Attributes:
        next_plan: who plans when workers have died.
    """

    def __init__(self, run_dir: Path, size: JobSize, bus: EventBus, order: Callable[[PlanRequest], None]) -> None:
        self.next_plan = StrategicPlan(self._plan_for_survivors)
        self._run_dir = run_dir
        self._workers = size.workers
        self._sizes = size.places, size.workers_per_node
        self._bus = bus
        self._order = order
        self._speeds = Speeds()
        self._precomputed = PrecomputedPlans(*self._sizes)
        self._job: Job | None = None
        self._arguments: Mapping[str, Any] | None = None
        """Megatron's, that the model is made of."""
        self._plan: ParallelPlan | None = None
        self._joining: set[int] = set()
        self._dead: set[int] = set()
        self._policy: Policy | None = None
        self._to_plan: AskPlanner | None = None
        """What the policy wants to know, once it has heard all that there is."""
        self._to_take_in = False
        """Whether those that wait may have work in a plan that is made now."""
        self._proposals = 0
        self._in_recoveries, self._by_choice = PlannerProcess(), PlannerProcess(low_priority=True)
        self._news: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="resihp-policy", daemon=True)
        self._thread.start()
        bus.subscribe(self._note, *FOLLOWED)

    def _note(self, event: Event) -> None:
        """Called in any thread."""
        if isinstance(event, Verdict):
            self._speeds.note(event)
        self._news.put(event)

    def close(self, timeout_s: float) -> None:
        """End thread and processes."""
        self._news.put(None)
        self._in_recoveries.close()
        self._by_choice.close()
        self._thread.join(timeout_s)

    def _plan_for_survivors(
        self, strategy: str, survivors: Survivors, running: ParallelPlan, timeout_s: float
    ) -> Heard:
        alive = survivors.held.keys()
        job, speeds, links = KnownJob.of(survivors.job), self._speeds.of(alive), self._speeds.links(alive)
        request = self._request(strategy, job, survivors.own, running, speeds, links)
        known = self._precomputed.answer(request)
        began = time.monotonic()
        answer = self._in_recoveries.ask(request, timeout_s) if known is None else known
        waited_s = time.monotonic() - began
        return Heard(self._named(answer, alive), made_ahead=known is not None, waited_s=waited_s)

    def _plan_by_choice(
        self, strategy: str, plan: ParallelPlan, speeds: Mapping[int, float], links: Mapping[tuple[int, int], float]
    ) -> PlannerAnswer:
        request = self._request(strategy, *self._known(), plan, speeds, links)
        return self._named(self._by_choice.ask(request, BY_CHOICE_S), speeds)

    def _request(
        self, strategy: str, job: KnownJob, own: tuple[Chunk, ...], plan: ParallelPlan, speeds: Mapping[int, float],
        links: Mapping[tuple[int, int], float],
    ) -> PlannerRequest:  # fmt: skip
        """What to ask a planner. Those know places: that a worker was started anew is nothing to them.

        Args:
            speeds: of all live workers.
            links: slow ones.
        """
        places, workers_per_node = self._sizes
        return PlannerRequest(
            strategy, job, own, places, workers_per_node,
            plan=renamed(plan, lambda worker: place_of(worker, places)),
            speeds={place_of(worker, places): speed for worker, speed in speeds.items()},
            links=tuple((*ends, speed) for ends, speed in links_of_places(links, places).items()),
            cost_model=str(self._run_dir / COST_MODEL),
        )  # fmt: skip

    def _named(self, answer: PlannerAnswer, alive: Iterable[int]) -> PlannerAnswer:
        """The same answer about these workers instead of their places."""
        if isinstance(answer, NoPlan):
            return answer
        names = names_of_places(alive, self._sizes[0])
        return replace(answer, plan=renamed(answer.plan, lambda place: names.get(place, place)))

    @property
    def _strategy(self) -> str:
        """Who plans when workers die."""
        return (self._job.strategy if self._job is not None else None) or UNIFORM

    def _known(self) -> tuple[KnownJob, tuple[Chunk, ...]]:
        """What costs depend on, and the job's own split into layers."""
        job = self._job
        assert job is not None and job.chunks is not None, "somebody asks before there is a job"
        assert job.tensor_parallel is not None and job.micro_batches is not None
        arguments = None if self._arguments is None else dict(self._arguments)
        reserve = MEMORY_RESERVE if job.memory_reserve is None else job.memory_reserve
        known = KnownJob(job.tensor_parallel, job.micro_batches, arguments, job.emulated, job.device_memory, reserve)
        return known, tuple(Chunk(*chunk) for chunk in job.chunks)

    def _run(self) -> None:
        try:
            while (event := self._next_news()) is not None:
                self._follow(event)
                while self._news.empty() and self._have_planned_what_is_wanted():
                    pass
        except Exception as error:
            # Whatever it is, training goes on without changes by choice.
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
        while self._news.empty() and self._plan_ahead():
            pass
        return self._news.get()

    def _plan_ahead(self) -> bool:
        """Have a plan made for the next loss; False: there is none to ask about."""
        lost = self._precomputed.next_loss()
        if lost is None or self._plan is None:
            return False
        alive = [worker for worker in self._plan.members if worker not in lost]
        speeds, links = self._speeds.of(alive), self._speeds.links(alive)
        # The same question as in a recovery; its answer is about places, too.
        request = self._request(self._strategy, *self._known(), self._plan, speeds, links)
        answer = self._by_choice.ask(request, BY_CHOICE_S)
        if isinstance(answer, NoPlan) and answer.unanswered:
            self._precomputed.give_up()
        else:
            self._precomputed.keep(request, answer)
        return True

    def _follow(self, event: Event) -> None:
        self._precomputed.note(event, _written_at(self._run_dir / COST_MODEL))
        match event:
            case Job():
                self._job = event
                self._policy = Policy(_settings(event))
                if self._strategy != UNIFORM:
                    self._in_recoveries.start()
            case Model() if self._job is not None:
                self._arguments = event.arguments
                self._rehearse(self._job)
            case EpochStarted():
                self._plan = ParallelPlan.from_dict(event.plan)
                self._joining.difference_update(self._plan.members)
                self._to_take_in = True
            case WorkerWaiting():
                self._joining.add(event.waiting)
                self._to_take_in = True
            case WorkerDead():
                self._joining.discard(event.dead)
                self._dead.add(event.dead)
                self._to_take_in = True
            case Verdict():
                self._to_take_in = True
        if self._policy is not None:
            self._do(self._policy.note(event, time.monotonic()))

    def _rehearse(self, job: Job) -> None:
        """The first plan takes longer: machine code is loaded or, once per installation, made for most of a minute. No
        recovery shall wait for that, and no change that pays; plans that are made ahead may. So this job's own plans,
        for somebody slow and for a death, are practised while the workers build the model."""
        if self._strategy == UNIFORM:
            return
        known, own = self._known()
        shape = JobShape(known.tensor_parallel, job.pipeline_parallel or 1, known.micro_batches, self._sizes[1])
        try:
            plan = initial_plan(shape, self._workers, bool(job.pipeline_last))
        except NoPlanError:
            return  # the coordinator ends the job for that
        well = dict.fromkeys(plan.members, 1.0)
        slow, alive = {**well, plan.members[0]: REHEARSED_SPEED}, dict(list(well.items())[:-1])
        requests = [PlannerRequest(self._strategy, known, own, *self._sizes, plan, speeds) for speeds in (slow, alive)]
        self._in_recoveries.rehearse(*requests)
        if (job.act or OBSERVE) != OBSERVE:
            self._by_choice.rehearse(*requests)

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
        strategy = FOR_LOOKING_ON if self._strategy == UNIFORM else self._strategy
        answer = self._plan_by_choice(strategy, asked.plan, asked.speeds, asked.links)
        if isinstance(answer, NoPlan):
            self._tell(told.NoPlan(reason=answer.reason))
        # Verdicts come in groups: one that has come meanwhile makes this answer worthless.
        if self._hear_all():
            assert self._policy is not None
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
        """Ask for a plan that gives work to those that came; uniform plans the coordinator makes of them itself."""
        self._to_take_in = False
        if not self._joining or self._plan is None or self._strategy == UNIFORM:
            return
        if self._dead.intersection(self._plan.members):
            return  # the others recover, and what they will do next is not known
        standbys = {**self._plan.standbys, **dict.fromkeys(self._joining)}
        plan = replace(self._plan, standbys=standbys)
        speeds, links = self._speeds.of(plan.members), self._speeds.links(plan.members)
        answer = self._plan_by_choice(self._strategy, plan, speeds, links)
        # The workers of a node come one by one: of others, or of how fast one is, this answer knows nothing.
        if not self._hear_all() or self._to_take_in:
            return
        if isinstance(answer, PlanFound) and self._joining.intersection(answer.plan.working):
            why = arrival(sorted(self._joining), self._sizes[0])
            self._order(PlanRequest(answer.plan.to_dict(), why, patient=True))

    def _recommend(self, found: Recommend) -> None:
        numbers: dict[str, Any] = {
            "why": found.why, "gain": found.gain, "lost_s": found.lost_s, "cost_s": found.cost_s,
            "iteration_s": found.iteration_s,
        }  # fmt: skip
        if found.act == ACT:
            self._order(PlanRequest(found.plan.to_dict(), found.why))
        elif found.act == ASK:
            path = self._propose(Proposal(**numbers, plan=found.plan))
            self._tell(told.Proposal(**numbers, path=str(path)))
        else:
            self._tell(told.WouldChange(**numbers, plan=found.plan.to_dict()))

    def _propose(self, proposal: Proposal) -> Path:
        directory = self._run_dir / PROPOSALS
        directory.mkdir(exist_ok=True)
        self._proposals += 1
        path = directory / f"{self._proposals}.json"
        path.write_text(json.dumps(encode(proposal)) + "\n")
        return path

    def _tell(self, event: Event) -> None:
        self._bus.publish(stamped(event, time.time()))


def _settings(job: Job) -> Settings:
    """How the job wants changes made; what its workers have not said is as usual."""
    usual, between = Settings(), job.seconds_between_changes
    return Settings(
        job.act or usual.act, usual.seconds_between_changes if between is None else between,
        bool(job.begins_with_a_plan),
    )  # fmt: skip


def _written_at(path: Path) -> float | None:
    """When the file was changed last; None: there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
