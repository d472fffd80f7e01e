# SPDX-License-Identifier: Apache-2.0
"""Who is alive, and what follows from each message: what workers and agents say, and waits that run out.

A pure state machine: data in (messages, the time), actions out. May import `plan`, `planner` and this package's other
pure modules.
"""

import signal
from dataclasses import asdict, dataclass

from megatron_resihp.control import exit_codes
from megatron_resihp.control.causes import ending
from megatron_resihp.control.coordination.actions import Action, Log, Notify, Phase, Reopen
from megatron_resihp.control.coordination.digests import differing, name_of, shards_of_key
from megatron_resihp.control.coordination.epoch_events import job_described
from megatron_resihp.control.coordination.epochs import Epochs
from megatron_resihp.control.coordination.exposure import exposure, in_words
from megatron_resihp.events import workers as events
from megatron_resihp.events.job import Exposed, Model
from megatron_resihp.events.workers import WorkerFailed, WorkerWaiting
from megatron_resihp.plan import Chunk
from megatron_resihp.planner import JobShape, NoPlanError, initial_plan
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.messages import (
    CommunicationFailed,
    ConnectionLost,
    EmergencyCheckpointWritten,
    FirstStepFailed,
    GroupsPrepared,
    HeartbeatsMissing,
    JobStarted,
    JoinRequest,
    LeaveRequest,
    ModelBuilt,
    NodeLost,
    PlanRequest,
    ProcessExited,
    Ready,
    SaveRequest,
    ScriptEnded,
    ScriptFailed,
    StopRequest,
    SurvivorReport,
    TrainingFinished,
    WordOfAgent,
    WordOfWorker,
    WorkerRestarted,
)
from megatron_resihp.protocol.notices import OthersFinish, SaveOrder, WorkerDismissed, WorkersGivenUp
from megatron_resihp.protocol.published import EpochPlan


@dataclass
class Membership(Epochs):
    """Feed it with `handle` and `tick`; carry out the actions that they return."""

    def handle(self, message: WordOfWorker | WordOfAgent | PlanRequest, now: float) -> list[Action]:
        """React to one message.

        Args:
            message: as `door` lets through.
            now: Unix time, for events; waits are bounded by what `tick` is told.
        """
        if self.phase is Phase.ENDED:
            return []
        if isinstance(message, WordOfWorker):
            return self._on_worker(message, now)
        return self._on_other(message, now)

    def _on_worker(self, message: WordOfWorker, now: float) -> list[Action]:
        match message:
            case JobStarted():
                return self._on_job(message)
            case JoinRequest():
                return self._on_joining(message, now)
            case ModelBuilt():
                return self._on_model(message)
            case Ready():
                return self._on_ready(message, now)
            case CommunicationFailed():
                return self._on_communication_failed(message, now)
            case FirstStepFailed():
                return self._on_first_step_failed(message, now)
            case SurvivorReport():
                return self._on_report(message, now)
            case GroupsPrepared():
                return self._on_prepared(message)
            case TrainingFinished():
                return self._on_trained(message)
            case EmergencyCheckpointWritten():
                return self._on_saved(message)
            case ScriptEnded(worker):
                return self._on_end(worker, now, by_word=True)
            case ScriptFailed(worker, error, code):
                return self._on_failed(worker, error, code, now)

    def _on_other(self, message: WordOfAgent | PlanRequest, now: float) -> list[Action]:
        match message:
            case PlanRequest():
                return self._ask_for(message)
            case ProcessExited():
                return self._on_exited(message, now)
            case HeartbeatsMissing(worker, silence_s, time):
                return self._die({worker: f"no heartbeat for {silence_s:.1f} s"}, time, now)
            case ConnectionLost(worker, time):
                return self._die({worker: "connection lost"}, time, now)
            case WorkerRestarted():
                return self._on_restarted(message)
            case NodeLost():
                return self._on_node_lost(message, now)
            case StopRequest(number):
                return self._stop(number, f"stopped by signal {number}")
            case LeaveRequest():
                return self._on_leave(message)
            case SaveRequest():
                return self._on_save()

    def tick(self, passed_s: float, now: float) -> list[Action]:
        """Give up on those that a bounded wait ran out for.

        Args:
            passed_s: since the last call, as far as messages of that time have been handled.
        """
        if self._left_s is None:
            return []
        self._left_s -= passed_s
        if self._left_s > 0:
            return []
        self._left_s = None
        if self.phase is Phase.REPORTING and self._change is not None:
            number, bound = self._change.number, self.limits.leave_s
            return self._break(f"not all have left for change {number} within {bound:g} s", now)
        if self.phase is Phase.REPORTING:
            late = self.living - set(self._records)
            cause = f"did not report within {self.limits.report_s:g} s"
            given_up = Notify(WorkersGivenUp(tuple(sorted(late)), cause))
            return [given_up, *self._die(dict.fromkeys(late, cause), now, now)]
        if self.phase is Phase.BUILDING:
            # Most of them wait for one that hangs. That one will not report either, and is given up then.
            names = ", ".join(str(worker) for worker in sorted(self.living - set(self._ready)))
            return self._break(f"not ready within {self.limits.build_s:g} s: {names}", now, probe=True)
        if self.phase is Phase.SALVAGING:
            return self._end_salvaged()
        return []

    # What workers say

    def _on_job(self, message: JobStarted) -> list[Action]:
        job = message.job
        shape, own = self._sizes_in(job)
        if self.shape is not None:
            if (shape, own) != (self.shape, self.own):
                unlike = f"workers were started with different sizes: {self.shape} and {shape}"
                return self._end(exit_codes.REFUSED, unlike)
            return []
        self.shape, self.own, self.job = shape, own, asdict(job)
        try:
            self.plan = self._first = initial_plan(shape, self.size.workers, job.pipeline_last)
        except NoPlanError as error:
            return self._end(exit_codes.REFUSED, str(error))
        return [
            Log(job_described(message.worker, job)),
            EpochPlan(0, self.plan, None),
        ]

    def _sizes_in(self, job: JobDescription) -> tuple[JobShape, tuple[Chunk, ...]]:
        shape = JobShape(job.tensor_parallel, job.pipeline_parallel, job.micro_batches, self.size.workers_per_node)
        return shape, job.chunks

    def _on_joining(self, message: JoinRequest, now: float) -> list[Action]:
        """A worker that was not there at the start is ready for a place in a plan; it holds nothing."""
        worker = message.worker
        if worker in self.dead or worker in self.living:
            return []
        if self._sizes_in(message.job) != (self.shape, self.own):
            reason = "was started with other sizes than the job"
            dismissed = Notify(WorkerDismissed(worker, f"worker {worker} {reason}"))
            return [*self._die({worker: reason}, now, now), dismissed]
        place = self.joining.heard_of(worker)
        self.joining.waiting.add(worker)
        return [Log(WorkerWaiting(waiting=worker, place=place)), *self._grow()]

    def _on_restarted(self, message: WorkerRestarted) -> list[Action]:
        worker, before = message.worker, message.instead_of
        self.joining.heard_of(worker)
        return [Log(events.WorkerRestarted(restarted=worker, instead_of=before))]

    def _on_model(self, message: ModelBuilt) -> list[Action]:
        self.job["arguments"] = message.arguments
        return [Log(Model(arguments=message.arguments))]

    def _on_ready(self, message: Ready, now: float) -> list[Action]:
        here = message.epoch == self.epoch and message.worker in self.living
        if not here or self.phase not in (Phase.STARTING, Phase.BUILDING):
            return []
        self._ready[message.worker] = message
        if self.plan is None or set(self.plan.members) - set(self._ready):
            return self._end_if_stranded()
        unlike = differing(ready.digests for ready in self._ready.values())
        if unlike:
            cause = f"state differs between holders of {', '.join(name_of(key) for key in unlike)}"
            if self.phase is Phase.STARTING:
                return self._end(exit_codes.FAILED, f"{cause} before the first iteration")
            if self._change is not None:
                # A change by choice is no reason to end a job: what was held before it still is.
                return self._break(cause, now)
            # Members wait for Go; what each of them held when it reported it still holds.
            # A shard that nobody vouches for counts as missing.
            assert self.shape is not None
            degree = self.shape.tensor_parallel
            missing = tuple(shard for key in unlike for shard in shards_of_key(key, self.own, degree))
            return [*self._broken(cause), *self._salvage(cause, now, missing)]
        actions = self._go(self.plan, now)
        return [*actions, self._exposed(), *self._invitations()] if self.epoch == 0 else actions

    def _exposed(self) -> Log:
        """What would end the job, said while something can be done about it."""
        assert self.shape is not None
        shared = bool(self.job.get("distributed_optimizer"))
        found = exposure(self.shape, self.size.workers, self.job["pipeline_last"], shared)
        nodes = (0, *found.nodes) if self.size.nodes > 1 else ()
        said = in_words(self.size.nodes, found)
        return Log(Exposed(nodes=nodes, workers=tuple(found.workers), said=said))

    def _invitations(self) -> list[Action]:
        """Nodes that may join, once there is something to join."""
        size = self.size
        return [Reopen(node, tuple(size.places_on(node))) for node in range(size.nodes, size.most_nodes)]

    def _on_communication_failed(self, message: CommunicationFailed, now: float) -> list[Action]:
        if message.epoch != self.epoch or message.worker not in self.living:
            return []
        plan = self.plan if self.trained and self.phase is Phase.RUNNING else None
        if plan is not None and message.worker not in plan.working:
            # The workers are leaving because they are done, perhaps with a long save: the standby waits for the end.
            return [Notify(OthersFinish())]
        return self._break(f"communication error on worker {message.worker}: {message.error}", now, probe=True)

    def _on_first_step_failed(self, message: FirstStepFailed, now: float) -> list[Action]:
        """An error of its own ends a worker, and the job; in a chosen plan's first step it may be the plan's."""
        if message.epoch != self.epoch or self.phase not in (Phase.BUILDING, Phase.RUNNING):
            return []
        worker, error = message.worker, message.error
        failed = self._first_steps.fail(worker, error)
        if worker in self.dead or failed is None:
            return []
        return [Log(failed), *self._break(f"the plan's first step failed on worker {worker}: {error}", now)]

    def _on_report(self, message: SurvivorReport, now: float) -> list[Action]:
        worker = message.worker
        if worker not in self.living or message.epoch != self.epoch or self.phase is Phase.SALVAGING:
            return []
        if self._change is not None and self.phase is Phase.RUNNING:
            self._leave_by_choice(now)
        reporting = self.phase is Phase.REPORTING
        broken = [] if reporting else self._break(f"worker {worker} left the epoch", now)
        self._unreachable[worker] = message.unreachable
        self._records[worker] = message.record
        self._held[worker] = message.held
        return broken + self._decide(now)

    def _on_prepared(self, message: GroupsPrepared) -> list[Action]:
        """A worker has made the groups of a change ahead of it."""
        if self._change is not None and self._change.number == message.number:
            self._prepared.add(message.worker)
        return []

    def _on_trained(self, message: TrainingFinished) -> list[Action]:
        self.progressed(message.iteration)
        self.trained = self.trained or message.worker in self.living
        return []

    def _on_saved(self, message: EmergencyCheckpointWritten) -> list[Action]:
        self._salvage_left.discard(message.worker)
        if self.phase is Phase.SALVAGING and not self._salvage_left:
            return self._end_salvaged()
        return []

    def _on_end(self, worker: int, now: float, by_word: bool) -> list[Action]:
        """A worker's script has ended well: it says so itself, or its agent has seen the process end."""
        if worker in self.dead:
            return []
        if self.joining.has_never_run(worker, self._running):
            return self._die({worker: "ended before it was taken in"}, now, now)
        too_early = self._too_early()
        if too_early and by_word:
            # If that is so, its agent sees its process end; a word alone ends nothing before its time.
            return []
        # Its exit comes after its word, and by then others may build an epoch without it.
        waited_for = worker not in self.done and self.phase is Phase.BUILDING
        self.done.add(worker)
        self._records.pop(worker, None)
        working = set(self.plan.working) if self.plan else self.living
        if self.done >= working - set(self.dead):
            if self.phase is Phase.STARTING and self.shape is not None:
                return self._end(exit_codes.FAILED, "the workers ended before the first iteration; see their logs")
            if too_early:
                return self._end(exit_codes.FAILED, f"the workers ended {too_early}; see their logs")
            if self.stop_signal:
                return self._end(exit_codes.stopped_by(self.stop_signal), self._stop_reason)
            return self._end(exit_codes.FINISHED, "finished")
        # Nobody may wait for it any more: neither those that build an epoch with it nor those that reported.
        broken = self._break(f"worker {worker} finished", now) if waited_for else []
        return broken + self._decide(now) + self._end_if_stranded()

    def _on_failed(self, worker: int, error: str, code: int, now: float) -> list[Action]:
        if worker in self.dead:
            return []
        if self.joining.has_never_run(worker, self._running):
            return self._die({worker: f"failed before it was taken in: {error}"}, now, now)
        refused = self.phase is Phase.STARTING and code == exit_codes.REFUSED
        return [
            Log(WorkerFailed(failed=worker, error=error)),
            *self._end(exit_codes.REFUSED if refused else exit_codes.FAILED, f"worker {worker} failed: {error}"),
        ]

    # What agents say

    def _on_exited(self, message: ProcessExited, now: float) -> list[Action]:
        worker, code = message.worker, message.code
        if code == 0:
            return self._on_end(worker, now, by_word=False)
        if worker in self.dead:
            return []
        if code == exit_codes.FENCED:
            return self._die({worker: "fenced itself"}, message.time, now)
        ended = ending(code, message.cause)
        if code > 0:
            return self._on_failed(worker, ended, code, now)
        return self._die({worker: ended}, message.time, now)

    def _on_node_lost(self, message: NodeLost, now: float) -> list[Action]:
        node, known = message.node, {*range(self.size.workers), *self.living, *self.joining.waiting}
        workers = sorted(worker for worker in known if self.joining.node_of(worker) == node)
        actions = self._die({w: f"node lost: {message.cause}" for w in workers}, message.time, now)
        return actions if self.phase is Phase.ENDED else [*actions, Reopen(node, self.joining.ids_for(node))]

    def _on_leave(self, message: LeaveRequest) -> list[Action]:
        """A node is to be taken away in order; others were told so, too, if the whole job is to end."""
        if self.stop_signal:
            return []
        node = message.node
        if self.phase is Phase.STARTING:
            return self._stop(signal.SIGTERM, f"node {node} left")
        self.departures.agents[node] = message.agent
        return self._depart()

    def _on_save(self) -> list[Action]:
        self._saves += 1
        return [Notify(SaveOrder(self._saves))]
