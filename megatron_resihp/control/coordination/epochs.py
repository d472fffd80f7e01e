# SPDX-License-Identifier: Apache-2.0
"""Which epoch holds, how it ends, and what comes after it: the coordinator's state, and the decisions that change it.

Pure: no sockets, no clock, no processes. May import `plan`, `planner` and this package's other pure modules.
"""

import signal
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_resihp.config import UNIFORM
from megatron_resihp.control import exit_codes
from megatron_resihp.control.coordination.actions import (
    Action,
    End,
    Limits,
    Log,
    Notify,
    Phase,
    Reply,
)
from megatron_resihp.control.coordination.departures import Departures
from megatron_resihp.control.coordination.epoch_events import agreed, epoch_started, reconfiguration, recovery
from megatron_resihp.control.coordination.first_step import FirstSteps
from megatron_resihp.control.coordination.joining import JoiningWorkers
from megatron_resihp.control.coordination.links import FailedLinks, Separated
from megatron_resihp.control.coordination.record import NoCommitError, resolve
from megatron_resihp.control.job_size import JobSize
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
from megatron_resihp.control.replanning.inventory import Held, require_all_parts, written_once
from megatron_resihp.control.replanning.modes import UNIFORM_MODE, mode_of
from megatron_resihp.control.replanning.next_plan import (
    NextPlan,
    Survivors,
    first_again,
    uniform_or_less,
    uniform_plan,
)
from megatron_resihp.events import replanning
from megatron_resihp.events.epochs import EpochBroken
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import RunFinished
from megatron_resihp.events.workers import LinkFailed, NodeLeft, WorkerDead
from megatron_resihp.plan import Chunk, ParallelPlan, PlanError, Shard, spelled_out
from megatron_resihp.plan.replica import shards_at
from megatron_resihp.planner import JobShape, NoPlanError
from megatron_resihp.protocol.answers import Accepted, Answer, Refused
from megatron_resihp.protocol.messages import PlanRequest, Ready
from megatron_resihp.protocol.notices import (
    EpochIsBroken,
    JobEnds,
    NodeReleased,
    PlanChange,
    StopTraining,
    WorkersGivenUp,
    WorkersTakenIn,
)
from megatron_resihp.protocol.published import EmergencyCheckpointOrder, EpochPlan, Go
from megatron_resihp.protocol.records import Commit, Record

WhoHolds = dict[int, tuple[Shard, ...]]


@dataclass
class Epochs:
    """The coordinator's state. What changes it returns the actions that follow.

    Attributes:
        size: nodes and workers, at the start and at most.
        next_plan: who plans when workers have died.
        shape, own: sizes of its work, and its own split into layers, once a worker has told them.
        job: all that workers have told of it.
        joining: workers that were not there at the start.
        reached: the last iteration that anybody has told to be done.
        departures: nodes that were told to leave.
    """

    size: JobSize
    limits: Limits = field(default_factory=Limits)
    next_plan: NextPlan = uniform_or_less

    phase: Phase = Phase.STARTING
    epoch: int = 0
    shape: JobShape | None = None
    own: tuple[Chunk, ...] = ()
    job: dict[str, Any] = field(default_factory=dict)
    plan: ParallelPlan | None = None
    commit: Commit | None = None
    dead: dict[int, str] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    joining: JoiningWorkers = field(init=False)
    departures: Departures = field(init=False)
    trained: bool = False
    reached: int = 0
    stop_signal: int | None = None
    _stop_reason: str = ""
    _saves: int = 0
    _ready: dict[int, Ready] = field(default_factory=dict)
    _records: dict[int, Record] = field(default_factory=dict)
    _held: dict[int, tuple[Shard, ...]] = field(default_factory=dict)
    _unreachable: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Whom survivors have not reached since the epoch broke."""
    _links: FailedLinks = field(init=False)
    _left_s: float | None = None
    """What is left of the bounded wait that is under way."""
    _first: ParallelPlan | None = None
    _running: ParallelPlan | None = None
    """The plan that was run last: what it gave them is what its members hold."""
    _change: Change | None = None
    _changes: int = 0
    _prepared: set[int] = field(default_factory=set)
    """Who has made the groups of the change that is under way."""
    _made_ahead: int | None = None
    """The change whose groups the plan that was published last is run in."""
    _waiting: list[PlanRequest] = field(default_factory=list)
    """Plans that are asked for as soon as training goes on."""
    _first_steps: FirstSteps = field(default_factory=FirstSteps)
    _recoveries_here: int = 0
    _broken_at: float = 0.0
    _to_save: str = ""
    """Why the job is to end once survivors have written what they hold; empty: it isn't."""
    _salvage_left: set[int] = field(default_factory=set)
    _salvage_reason: str = ""

    def __post_init__(self) -> None:
        self.joining = JoiningWorkers(self.size)
        self.departures = Departures(self.joining)
        self._links = FailedLinks(self.joining.node_of)

    @property
    def living(self) -> set[int]:
        """Members of the current epoch that are neither known to be dead nor finished."""
        members = set(self.plan.members) if self.plan else set(range(self.size.workers))
        return members - set(self.dead) - self.done

    @property
    def _optimizer_is_shared_out(self) -> bool:
        """Whether each replica has a part of the optimizer's state only, under the plan that was run last."""
        ran = self._running
        mode = UNIFORM_MODE if ran is None else mode_of(ran)
        return bool(self.job.get("distributed_optimizer")) and mode.shares_optimizer_out

    def _go(self, plan: ParallelPlan, now: float) -> list[Action]:
        ports = tuple(sorted({port for ready in self._ready.values() for port in ready.ports}))
        actions: list[Action] = [Go(self.epoch, ports), Log(epoch_started(self.epoch, plan))]
        if self._change is not None and self.commit is not None:
            ahead, ready = self._made_ahead is not None, self._ready.values()
            actions.append(Log(reconfiguration(self.epoch, self.commit, ready, self._change, ahead, now)))
        elif self.commit is not None:
            ready = self._ready.values()
            dead = self.dead.keys() - self.departures.left
            actions.append(Log(recovery(self.epoch, self.commit, ready, dead, self._broken_at, now)))
        self.phase, self._left_s, self._change, self._running = Phase.RUNNING, None, None, plan
        waiting, self._waiting = self._waiting, []
        actions += [action for request in waiting for action in self._ask_for(request)]
        return actions + self._depart() + self._grow()

    # Changes by choice

    def _ask_for(self, request: PlanRequest) -> list[Action]:
        """Somebody asks for a plan."""
        if request.patient and (self._change or self.phase in (Phase.REPORTING, Phase.BUILDING)):
            self._waiting.append(request)
            return []
        try:
            change = self._new_change(request)
        except ChangeRefused as error:
            refused = Log(replanning.ChangeRefused(why=request.why, reason=str(error)))
            return [refused, *_reply(request.answer, Refused(str(error)))]
        return self._begin(change, request.answer)

    def _begin(self, change: Change, answer: str | None = None) -> list[Action]:
        """Tell all workers of a change. `answer`: key under which whoever asked for it awaits an answer."""
        assert self.plan is not None
        lines = changes(self.plan, change.plan, self.own)
        self._change, self._changes, self._prepared = change, change.number, set()
        return [
            Log(replanning.PlanChange(
                number=change.number, why=change.why, from_digest=self.plan.digest, to_digest=change.plan.digest,
                changes=tuple(lines),
            )),
            Notify(PlanChange(change.number, self.epoch, change.plan)),
            *_reply(answer, Accepted(f"change {change.number} begins after an iteration", lines)),
        ]  # fmt: skip

    def _new_change(self, request: PlanRequest) -> Change:
        """Raises ChangeRefused."""
        self._check_that_changes_can_be()
        assert self.plan is not None and self.shape is not None
        asked, degree = plan_of(request.plan), self.shape.tensor_parallel
        plan = plan_to_change_to(asked, self.plan, self.own, degree, self.living | self.joining.waiting)
        if self._optimizer_is_shared_out:
            plan = mode_of(plan).without_parts_kept(plan)
        error = self._first_steps.failed.get(plan.work_digest)
        if error is not None and request.answer is None:  # people may know better
            raise ChangeRefused(f"this plan has failed in the first step: {error}")
        try:
            check_degrees(plan, self.job)
            mode_of(plan).check_ops(plan, self.own, self.job)
            check_memory(plan, self.plan, self.own, self.job)
        except PlanError as error:
            raise ChangeRefused(str(error)) from None
        return Change(self._changes + 1, plan, request.why)

    def _check_that_changes_can_be(self) -> None:
        """Raises ChangeRefused."""
        if self._change is not None:
            raise ChangeRefused(f"change {self._change.number} is under way")
        if self.trained or self.done or self.stop_signal:
            raise ChangeRefused("the job is about to end")
        if self.phase is not Phase.RUNNING:
            raise ChangeRefused(f"the job is not training now, it is {self.phase.value}")

    def _grow(self) -> list[Action]:
        """Give work to those that wait, where complete uniform replicas are planned and there can be more of them.

        Where a strategy plans, the replanner asks for a change: its search takes too long for this thread.
        """
        if not self.joining.waiting or self.job.get("strategy", UNIFORM) != UNIFORM:
            return []
        assert self.plan is not None
        full = spelled_out(self.plan, self.own)
        held = {worker: full.shards_of(worker) for worker in self.living} | self.joining.held()
        try:
            self._check_that_changes_can_be()
            survivors = self._survivors(held)
            assert self._first is not None
            plan = first_again(self._first, survivors) or uniform_plan(survivors)[0]
        except (ChangeRefused, NoPlanError):
            return []
        if plan.work_digest in self._first_steps.failed:
            return []
        taken = sorted(self.joining.waiting.intersection(plan.working))
        why = arrival(taken, self.size.places)
        try:
            check_memory(plan, self.plan, self.own, self.job)
        except PlanError as error:
            return [Log(replanning.ChangeRefused(why=why, reason=str(error)))]
        return self._begin(Change(self._changes + 1, plan, why)) if taken else []

    # Nodes that leave

    def _depart(self) -> list[Action]:
        """Plan around the nodes that are to leave, once training goes on; where no plan is left, all stop in order."""
        actions = self._let_go()
        leaving = self.departures.among(self.living)
        try:
            self._check_that_changes_can_be()
        except ChangeRefused:
            return actions
        if not leaving:
            return actions
        assert self.plan is not None
        full = spelled_out(self.plan, self.own)
        nodes = ", ".join(f"node {node}" for node in sorted(self.departures.agents))
        try:
            plan, told = self._plan_for({worker: full.shards_of(worker) for worker in self.living - leaving})
        except NoPlanError as error:
            reason = f"{nodes} is to leave, and there is no plan without its workers: {error}"
            return actions + self._stop(signal.SIGTERM, reason)
        why = f"{nodes} leaves"
        change = Change(self._changes + 1, plan, why, leaving=leaving)
        return [*actions, *map(Log, told), *self._begin(change)]

    def _let_go(self) -> list[Action]:
        """Nodes that are to leave, and have no members any more, may."""
        actions: list[Action] = []
        for node in self.departures.without_members(self.living):
            agent = self.departures.agents.pop(node)
            known = {*range(self.size.workers), *self.joining.waiting, *self._records} - self.dead.keys()
            workers = sorted(worker for worker in known if self.joining.node_of(worker) == node)
            self.dead.update(dict.fromkeys(workers, "left"))
            self.departures.left.update(workers)
            self.joining.waiting.difference_update(workers)
            actions.append(Log(NodeLeft(node=node, left=tuple(workers))))
            actions.append(Notify(NodeReleased(agent, tuple(workers))))
        return actions

    def _stop(self, number: int, reason: str) -> list[Action]:
        """Let all end in order after an iteration."""
        self.stop_signal, self._stop_reason = number, reason
        if self.phase is Phase.STARTING:
            return self._end(exit_codes.stopped_by(number), f"{reason} during start-up")
        return [Notify(StopTraining(number))]

    # Deaths, and what comes after an epoch

    def _die(self, causes: dict[int, str], died_at: float, now: float) -> list[Action]:
        fresh = {w: cause for w, cause in causes.items() if w not in self.dead and w not in self.done}
        members = self.living
        self.dead.update(fresh)
        self.joining.waiting -= fresh.keys()
        actions: list[Action] = [
            Log(WorkerDead(
                epoch=self.epoch, dead=worker, node=self.joining.node_of(worker), cause=cause, died_at=died_at,
                noticed_at=now,
            ))
            for worker, cause in fresh.items()
        ]  # fmt: skip
        for worker in fresh:
            self.joining.heard_of(worker)
            self._records.pop(worker, None)
        self._links.forget(fresh.keys() & members)
        if not fresh.keys() & members:
            return actions
        if self.phase is Phase.STARTING:
            names = ", ".join(f"worker {w} ({cause})" for w, cause in fresh.items())
            if self.shape is None:
                reason = f"{names} died during start-up, or of a job without --resihp"
                return actions + self._end(exit_codes.RETRY, reason)
            return actions + self._end(exit_codes.RETRY, f"{names} died during start-up, before the first iteration")
        if self.phase is Phase.SALVAGING:
            self._salvage_left -= set(fresh)
            return actions + ([] if self._salvage_left else self._end_salvaged())
        cause = "; ".join(f"worker {w}: {cause}" for w, cause in fresh.items())
        return actions + self._break(cause, now) + self._decide(now)

    def _leave_by_choice(self, now: float) -> None:
        """The first worker stops for a change; the others will after the same step."""
        assert self._change is not None
        self._change = replace(self._change, first_reported_at=now)
        self.phase, self._left_s = Phase.REPORTING, self.limits.leave_s
        self._records, self._held = {}, {}

    def _leave_out(self, separated: Separated, now: float) -> list[Action]:
        """Do without one side of a link that fails again and again while both live."""
        why, without = f"left out, because {separated.why}", sorted(separated.without)
        self._links.left_out.update(without)
        return [
            Log(LinkFailed(reason=separated.why, left_out=tuple(without))),
            Notify(WorkersGivenUp(tuple(without), why, for_good=True)),
            *self._die(dict.fromkeys(without, why), now, now),
        ]

    def _capacity_without(self, workers: frozenset[int]) -> int | None:
        """How many would have work without these; None: there is no plan."""
        held = {worker: self._held[worker] for worker in self._records.keys() - workers}
        try:
            if self._running is not None and self._optimizer_is_shared_out:
                require_all_parts(self._running, held)
            return len(uniform_or_less(self._survivors(held))[0].working)
        except NoPlanError:
            return None

    def _break(self, cause: str, now: float, probe: bool = False) -> list[Action]:
        """Args:
        probe: whether survivors are to find out whom they can reach; after a death they go on at once.
        """
        leaving = self.phase is Phase.REPORTING and self._change is not None
        if self.phase not in (Phase.RUNNING, Phase.BUILDING) and not leaving:
            return []
        if self.phase is Phase.RUNNING or self._change is not None:
            self._broken_at = now
        if not leaving:  # who has reported by choice won't report again
            self._records, self._held = {}, {}
        self._unreachable = {}
        self._change = None
        self.phase, self._left_s = Phase.REPORTING, self.limits.report_s
        return self._broken(cause, probe)

    def _broken(self, cause: str, probe: bool = False) -> list[Action]:
        return [
            Log(EpochBroken(epoch=self.epoch, broken_epoch=self.epoch, cause=cause)),
            Notify(EpochIsBroken(self.epoch, cause, probe)),
        ]

    def _decide(self, now: float) -> list[Action]:
        if self.phase is not Phase.REPORTING:
            return []
        if not self.living:
            return self._end(exit_codes.RETRY, "no worker survived")
        if self.living - set(self._records):
            return []
        assert self.shape is not None and self.plan is not None
        self._links.note(self.epoch, self._unreachable)
        separated = self._links.separated(self.living, self._capacity_without)
        if separated is not None and separated.without:
            return self._leave_out(separated, now)
        try:
            commit = resolve(self._records.values(), self.commit)
        except NoCommitError as error:
            return self._end(exit_codes.RETRY, str(error))
        same = self.commit is not None and self.commit.iteration == commit.iteration
        self._recoveries_here = (self._recoveries_here if same else 0) + (self._change is None)
        self.commit = commit
        step: list[Action] = []
        if commit.outcome is not None:
            step = [Log(agreed(self.epoch, commit, commit.outcome))]
        if self._to_save:
            return step + self._salvage(self._to_save, now)
        if separated is not None:
            return step + self._salvage(f"{separated.why}, and there is no plan without either", now)
        if self._recoveries_here > self.limits.recoveries_per_iteration:
            return step + self._salvage(f"{self._recoveries_here - 1} recoveries without a step after iteration "
                                        f"{commit.iteration}", now)  # fmt: skip
        # Who waits to be taken in holds nothing, and need not report.
        taken_in = self.joining.held(self._change.plan.members) if self._change is not None else {}
        held = {worker: self._held[worker] for worker in self._records} | taken_in
        try:
            plan, held, told = self._plan_after(held, now)
        except NoPlanError as error:
            degree = self.shape.tensor_parallel
            missing = tuple(shard for lost in error.missing for shard in shards_at(self.own, lost, degree))
            return step + self._salvage(str(error), now, missing)
        on_trial = self._first_steps.published(plan, self.plan, self._change, told)
        self.epoch += 1
        self.plan, self.phase, self._ready = plan, Phase.BUILDING, {}
        self._left_s = self.limits.build_s
        joined = self.joining.taken_in(plan)
        called = [Notify(WorkersTakenIn(self.epoch, tuple(joined)))] if joined else []
        self._made_ahead = self._groups_of_change(plan)
        # In the very plan that they are not in they read that this is why.
        leaving = tuple(sorted(self.departures.among(self._records.keys() - held.keys())))
        published = EpochPlan(self.epoch, plan, commit, held, self._made_ahead, leaving, on_trial)
        return [*map(Log, told), *step, published, *called, *self._let_go()]

    def _plan_after(self, held: WhoHolds, now: float) -> tuple[ParallelPlan, WhoHolds, list[Event]]:
        """The next plan, what its members hold, and what to write to the log. Who is to leave has no part in it, if
        there is such a plan and no change is under way that has.

        Raises:
            NoPlanError.
        """
        change, self._change = self._change, None
        leaving = self.departures.among(held) if change is None or change.leaving else frozenset()
        if leaving:
            staying = {worker: shards for worker, shards in held.items() if worker not in leaving}
            try:
                plan, told = self._next_plan(change, staying, now)
                return plan, staying, told
            except NoPlanError:
                pass  # all go on together, and stop in order once they do
        plan, told = self._next_plan(change, held, now)
        return plan, held, told

    def _groups_of_change(self, plan: ParallelPlan) -> int | None:
        """The change for which every member of this plan has made its groups already."""
        if self._change is None or self._change.plan != plan or not self._prepared.issuperset(plan.members):
            return None
        return self._change.number

    def _survivors(self, held: Held) -> Survivors:
        assert self.shape is not None and self.plan is not None
        failed = self._first_steps.failed
        return Survivors(self.shape, self.own, held, self.plan, self._running, self.job, self.size.places, failed)

    def _next_plan(self, change: Change | None, held: WhoHolds, now: float) -> tuple[ParallelPlan, list[Event]]:
        """What was asked for, if all that it was asked for are still there; and what to write to the log.

        Raises:
            NoPlanError.
        """
        if change is not None and set(change.plan.members) == held.keys():
            self._change = change
            return change.plan, []
        if change is not None:
            assert self.plan is not None
            self._broken_at = change.first_reported_at or now
            if set(self.plan.members) == held.keys():
                # Who was to be taken in has died: all others go on as before.
                return self.plan, []
        return self._plan_for(held)

    def _plan_for(self, held: WhoHolds) -> tuple[ParallelPlan, list[Event]]:
        """Raises NoPlanError."""
        if self._running is not None and self._optimizer_is_shared_out:
            require_all_parts(self._running, held)
        survivors = self._survivors(held)
        plan, told = self._first_steps.answer(survivors) or self.next_plan(survivors)
        return (mode_of(plan).without_parts_kept(plan) if self._optimizer_is_shared_out else plan), told

    def _salvage(self, reason: str, now: float, missing: tuple[Shard, ...] = ()) -> list[Action]:
        held = {worker: self._held[worker] for worker in self.living if self._held.get(worker)}
        # Of a distributed optimizer each has a part of its own.
        writers = held if self._optimizer_is_shared_out else written_once(held)
        self.epoch += 1
        self.phase, self._left_s = Phase.SALVAGING, self.limits.salvage_s
        self._salvage_left = set(writers)
        self._salvage_reason = self._to_save or f"no plan fits the survivors: {reason}"
        order = EmergencyCheckpointOrder(self.epoch, reason, self.commit, writers, missing)
        return [order] if writers else [order, *self._end_salvaged()]

    def _end_salvaged(self) -> list[Action]:
        return self._end(exit_codes.RETRY if self._to_save else exit_codes.NO_PLAN, self._salvage_reason)

    def progressed(self, iteration: int) -> None:
        """Somebody has told that this iteration is done."""
        self.reached = max(self.reached, iteration)

    def _too_early(self) -> str:
        """In words, how far the job has come, if it may not end in order yet; empty: it may, or nobody knows."""
        last = self.job.get("train_iters")
        reached = max(self.reached, 0 if self.commit is None else self.commit.iteration)
        if last is None or reached >= last or self.stop_signal or self.job.get("ends_early"):
            return ""
        return f"after iteration {reached} of {last}"

    def save_and_end(self, reason: str, now: float, unpublished: bool = False) -> list[Action]:
        """Have survivors write what they hold, since nothing better can be done, and end the job.

        Args:
            unpublished: nobody can know the plan of this epoch: members wait for one, or for an order in its place.
        """
        if self.phase is Phase.ENDED:
            return []
        if self.phase is Phase.STARTING or not self.living:
            return self._end(exit_codes.RETRY, reason)
        self._to_save, self._waiting = reason, []
        if self.phase is Phase.SALVAGING:
            return []
        if unpublished and self.phase is Phase.BUILDING:
            self.phase, self.epoch, self._left_s = Phase.REPORTING, self.epoch - 1, self.limits.report_s
        return self._break(reason, now) + self._decide(now)

    def _end_if_stranded(self) -> list[Action]:
        """Who is ready at the start waits for all; those that finished without having been ready never come."""
        if self.phase is not Phase.STARTING or not self._ready or self.living - set(self._ready):
            return []
        gone = ", ".join(f"worker {w}" for w in sorted(self.done - set(self._ready)))
        return self._end(exit_codes.FAILED, f"{gone} finished during start-up, and the others wait for them")

    def _end(self, code: int, reason: str) -> list[Action]:
        self.phase = Phase.ENDED
        return [
            Notify(JobEnds(code, reason)),
            Log(RunFinished(exit_code=code, reason=reason)),
            # Who has not told of a job hears no notice either.
            End(code, reason, at_once=self.shape is None and code != exit_codes.FINISHED),
        ]


def _reply(key: str | None, answer: Answer) -> list[Action]:
    return [] if key is None else [Reply(key, answer)]
