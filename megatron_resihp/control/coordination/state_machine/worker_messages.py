# SPDX-License-Identifier: Apache-2.0
"""What follows from each message of a worker.

May import `plan`, `planner`, `protocol` and pure modules of `control`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_resihp.control import exit_codes
from megatron_resihp.control.coordination.actions import Action, Log, Notify, Phase, Reopen
from megatron_resihp.control.coordination.digests import differing, name_of, shards_of_key
from megatron_resihp.control.coordination.epoch_events import job_described
from megatron_resihp.control.coordination.exposure import exposure, in_words
from megatron_resihp.control.coordination.state_machine.changes import ChangesByChoice
from megatron_resihp.control.coordination.state_machine.ends import Ends
from megatron_resihp.control.coordination.state_machine.epochs import Epochs
from megatron_resihp.control.coordination.state_machine.state import Job, State
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.replanning.recovery.inventory import shape_of
from megatron_resihp.events.job import Exposed, Model
from megatron_resihp.events.workers import WorkerFailed, WorkerWaiting
from megatron_resihp.plan import Chunk
from megatron_resihp.planner import JobShape, NoPlanError, initial_plan
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.logs import LogPage, LogsWanted
from megatron_resihp.protocol.messages import (
    CommunicationFailed,
    EmergencyCheckpointWritten,
    FirstStepFailed,
    GroupsPrepared,
    JobStarted,
    JoinRequest,
    ModelBuilt,
    NodeReport,
    Ready,
    ScriptEnded,
    ScriptFailed,
    StillSaving,
    SurvivorReport,
    TrainingFinished,
    WordOfWorker,
)
from megatron_resihp.protocol.notices import OthersFinish, WorkerDismissed
from megatron_resihp.protocol.published import EpochPlan
from megatron_resihp.protocol.records import IterationPhase, Record


class WorkerMessages:
    """Answers the messages of all workers of one job."""

    def __init__(self, state: State, ends: Ends, changes: ChangesByChoice, epochs: Epochs) -> None:
        self._state = state
        self._ends = ends
        self._changes = changes
        self._epochs = epochs

    def handle(self, message: WordOfWorker, now: float) -> list[Action]:
        """React to one message; arguments as of `Membership.handle`."""
        match message:
            case JobStarted():
                return self._on_job(message)
            case JoinRequest():
                return self._on_joining(message, now)
            case ModelBuilt():
                self._state.job.arguments = message.arguments
                return [Log(Model(arguments=message.arguments))]
            case Ready():
                return self._on_ready(message, now)
            case CommunicationFailed():
                return self._on_communication_failed(message, now)
            case FirstStepFailed():
                return self._on_first_step_failed(message, now)
            case SurvivorReport():
                return self._on_reports([message], now)
            case NodeReport():
                return self._on_reports(message.reports, now)
            case StillSaving():
                return self._on_still_saving(message)
            case GroupsPrepared():
                return self._on_prepared(message)
            case TrainingFinished():
                return self._on_trained(message)
            case LogsWanted():
                return [message] if self._state.job.pages.open(message) else []
            case LogPage():
                return [message] if self._may_log(message.worker) and self._state.job.pages.enter(message) else []
            case EmergencyCheckpointWritten(worker):
                return self._ends.saved_by([worker])
            case ScriptEnded(worker):
                return self.ended(worker, now, by_word=True)
            case ScriptFailed(worker, error, code):
                return self.failed(worker, error, code, now)

    # ---- start

    def _on_job(self, message: JobStarted) -> list[Action]:
        state, job, told = self._state, self._state.job, message.job
        state.slowness.emulated = told.emulated is not None
        state.slowness.on_devices = told.device_memory is not None
        shape, own = _sizes_in(told, job.size)
        if job.shape is not None:
            if (shape, own, told.batch_steps) != (job.shape, job.own, job.described.batch_steps):
                unlike = f"workers were started with different sizes: {job.shape} and {shape}"
                return self._ends.end(exit_codes.REFUSED, unlike)
            return []
        job.shape, job.own, job.description = shape, own, told
        try:
            first = initial_plan(shape, job.size.workers, told.pipeline_last)
        except NoPlanError as error:
            return self._ends.end(exit_codes.REFUSED, str(error))
        state.first = first
        state.adopt(first)
        return [Log(job_described(message.worker, told)), EpochPlan(0, first, None)]

    def _on_joining(self, message: JoinRequest, now: float) -> list[Action]:
        """A worker that was not there at the start is ready for a place in a plan; it holds nothing."""
        state, worker = self._state, message.worker
        if worker in state.dead or worker in state.living or worker in state.joining.waiting:
            return []
        known, told = state.job.description, message.job
        same_steps = known is not None and known.batch_steps == told.batch_steps
        if known is not None and same_steps and told.batch_steps:  # they may have grown since
            told = replace(told, micro_batches=known.micro_batches)
        if not same_steps or _sizes_in(told, state.job.size) != (state.job.shape, state.job.own):
            reason = "was started with other sizes than the job"
            dismissed = Notify(WorkerDismissed(worker, f"worker {worker} {reason}"))
            return [*self._epochs.die({worker: reason}, now, now), dismissed]
        slot = state.joining.ready(worker)
        return [Log(WorkerWaiting(waiting=worker, place=slot)), *self._changes.grow()]

    # ---- an epoch

    def _on_ready(self, message: Ready, now: float) -> list[Action]:
        state = self._state
        here = message.epoch == state.epoch and message.worker in state.living
        if not here or state.phase not in (Phase.STARTING, Phase.BUILDING):
            return []
        state.ready[message.worker] = message
        if state.plan is None or len(state.ready) < len(state.plan.members):  # members only are ready
            return self._ends.end_if_stranded()
        unlike = differing(ready.digests for ready in state.ready.values())
        if unlike:
            return self._state_differs(unlike, now)
        actions = self._epochs.go(state.plan, now)
        if state.epoch > 0:
            return actions
        return [*actions, _exposed(state), *_invitations(state.job.size)]

    def _state_differs(self, unlike: Sequence[str], now: float) -> list[Action]:
        """Workers that hold the same shards or slices reported other digests of them. `unlike`: keys of digests."""
        state = self._state
        cause = f"state differs between holders of {', '.join(name_of(key) for key in unlike)}"
        if state.phase is Phase.STARTING:
            return self._ends.end(exit_codes.FAILED, f"{cause} before the first iteration")
        if state.changes.under_way is not None:
            # A change by choice is no reason to end a job: what was held before it still is.
            return self._epochs.break_epoch(cause, now)
        # Members wait for Go; each still holds what it held when it reported.
        # A shard on which its holders don't agree counts as missing.
        _, shape = state.plan_and_shape
        missing = tuple(shard for key in unlike for shard in shards_of_key(key, state.job.own, shape.tensor_parallel))
        return [*self._epochs.broken(cause), *self._ends.save(cause, missing)]

    def _on_communication_failed(self, message: CommunicationFailed, now: float) -> list[Action]:
        state = self._state
        if message.epoch != state.epoch or message.worker not in state.living:
            return []
        plan = state.plan if state.job.trained and state.phase is Phase.RUNNING else None
        if plan is not None and message.worker not in plan.working:
            # The workers are leaving because they are done, perhaps with a long save: the standby waits for the end.
            return [Notify(OthersFinish())]
        cause = f"communication error on worker {message.worker}: {message.error}"
        return self._epochs.break_epoch(cause, now, probe=True)

    def _on_first_step_failed(self, message: FirstStepFailed, now: float) -> list[Action]:
        """An error of its own ends a worker, and the job; in a chosen plan's first step the plan may be the cause."""
        state = self._state
        if message.epoch != state.epoch or state.phase not in (Phase.BUILDING, Phase.RUNNING):
            return []
        worker, error = message.worker, message.error
        failed = state.first_steps.fail(worker, error)
        if worker in state.dead or failed is None:
            return []
        cause = f"the plan's first step failed on worker {worker}: {error}"
        return [Log(failed), *self._epochs.break_epoch(cause, now)]

    def _on_reports(self, reports: Iterable[SurvivorReport], now: float) -> list[Action]:
        """Reports that came as one message: all are entered before anything follows from them."""
        left: list[Action] = []
        entered = [self._enter(report, left, now) for report in reports]
        return left + self._epochs.decide(now) if any(entered) else []

    def _enter(self, report: SurvivorReport, left: list[Action], now: float) -> bool:
        """Take note of a report; returns whether there is any use in it.

        Args:
            left: takes what follows if the worker is the first that has left the epoch.
        """
        state, worker = self._state, report.worker
        if worker not in state.living or report.epoch != state.epoch or state.phase is Phase.SAVING:
            return False
        if state.phase is Phase.RUNNING:
            samples = _larger_batch(state.job, report.record)
            if samples is not None and state.changes.under_way is None:
                self._changes.begin_larger_batches(samples)
            if state.changes.under_way is not None:
                self._epochs.leave_by_choice(now)
        if state.phase is not Phase.REPORTING:
            left += self._epochs.break_epoch(f"worker {worker} left the epoch", now)
        state.reports.unreachable[worker] = report.unreachable
        state.reports.records[worker] = report.record
        state.reports.held[worker] = report.held
        state.reports.times[worker] = report.times
        return True

    def _on_still_saving(self, message: StillSaving) -> list[Action]:
        """Wait as long again for the reports that are missing. Nothing interrupts a worker that writes to a disk."""
        state = self._state
        by_choice = state.changes.under_way is not None
        if message.epoch == state.epoch and state.awaits_report(message.worker) and not by_choice:
            state.left_s = state.limits.report_s
        return []

    def _on_prepared(self, message: GroupsPrepared) -> list[Action]:
        """A worker has made the groups of a change ahead of it."""
        changes = self._state.changes
        if changes.under_way is not None and changes.under_way.number == message.number:
            changes.prepared.add(message.worker)
        return []

    def _on_trained(self, message: TrainingFinished) -> list[Action]:
        job = self._state.job
        job.progressed(message.iteration)
        job.trained = job.trained or message.worker in self._state.living
        return []

    def _may_log(self, worker: int) -> bool:
        """What a worker that was given up has logged is logged again by another."""
        return worker not in self._state.dead

    # ---- the end of a worker's script

    def ended(self, worker: int, now: float, by_word: bool) -> list[Action]:
        """A worker's script has ended well.

        Args:
            by_word: the worker says so; otherwise its agent has seen the process end.
        """
        state, ends = self._state, self._ends
        if worker in state.dead:
            return []
        if state.joining.has_never_run(worker, state.running):
            return self._epochs.die({worker: "ended before it was taken in"}, now, now)
        if by_word and ends.too_early():
            # If that is so, its agent sees its process end; a word alone ends nothing before its time.
            return []
        # The process ends after that word, and by then others may build an epoch without the worker.
        waited_for = worker not in state.done and state.phase is Phase.BUILDING
        state.finish(worker)
        state.reports.records.pop(worker, None)
        working = state.plan.working if state.plan else state.living
        if state.living.isdisjoint(working):
            return ends.all_have_ended()
        # No worker may wait for it any more: neither those that build an epoch with it nor those that reported.
        broken = self._epochs.break_epoch(f"worker {worker} finished", now) if waited_for else []
        return broken + self._epochs.decide(now) + ends.end_if_stranded()

    def failed(self, worker: int, error: str, code: int, now: float) -> list[Action]:
        """A worker's script has ended with an error."""
        state = self._state
        if worker in state.dead:
            return []
        if state.joining.has_never_run(worker, state.running):
            return self._epochs.die({worker: f"failed before it was taken in: {error}"}, now, now)
        refused = state.phase is Phase.STARTING and code == exit_codes.REFUSED
        ended = self._ends.end(exit_codes.REFUSED if refused else exit_codes.FAILED, f"worker {worker} failed: {error}")
        return [Log(WorkerFailed(failed=worker, error=error)), *ended]


def _larger_batch(job: Job, record: Record) -> int | None:
    """Samples of the next batch, if a worker that wasn't told to leave the epoch has left it since that is larger than
    those of the plan in force; None: that is not why."""
    counters = record.counters.get(record.iteration, {})
    consumed = counters.get("consumed_train_samples")
    expected = IterationPhase.COMPUTE if record.works else IterationPhase.STEPPED
    if job.description is None or not isinstance(consumed, int) or record.stage is not expected:
        return None
    if not record.works:  # it is between two iterations
        consumed += job.samples_after(consumed)
    samples = job.samples_after(consumed)
    return samples if samples > job.samples_of_plan else None


def _sizes_in(told: JobDescription, size: JobSize) -> tuple[JobShape, tuple[Chunk, ...]]:
    return shape_of(told, size.workers_per_node), told.chunks


def _exposed(state: State) -> Log:
    """Which losses would end the job, said while something can be done about it."""
    job, limits = state.job, state.limits
    assert job.shape is not None
    size, fewest = job.size, limits.min_workers
    shape = replace(job.shape, expert_copies=state.copies_kept)
    apart = size.apart and size.nodes > 1
    replaceable = apart and limits.replaceable
    order = job.described.pipeline_last
    found = exposure(shape, size.workers, order, fewest, apart=apart, replaceable=replaceable)
    if job.shape.expert_copies and not state.copies_kept:
        found = replace(found, mend=None)  # the flag is given, and a worker has said why it keeps none
    nodes = range(size.nodes) if found.too_few else (*size.head, *found.nodes)
    workers = range(size.workers) if found.too_few == "worker" else found.workers
    said = in_words(size.nodes, found, fewest)
    return Log(Exposed(nodes=tuple(nodes) if size.nodes > 1 else (), workers=tuple(workers), said=said))


def _invitations(size: JobSize) -> list[Action]:
    """To nodes that may join, once there is something to join."""
    return [Reopen(node, tuple(size.slots_on(node))) for node in range(size.nodes, size.most_nodes)]
