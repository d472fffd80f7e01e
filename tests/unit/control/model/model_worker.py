# SPDX-License-Identifier: Apache-2.0
"""What one worker does, as functions from a worker to a worker and what it says.

They follow `integration.loop` and `integration.step`, without torch's and Megatron's part. The worker's record is kept
by the project's own `Progress`, which also says who owes the committed step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model_values import FINAL, GONE, NO_EPOCH, Frozen, Mode, Published, Violation, Worker

from megatron_resihp.integration.progress import ContractBroken, Progress
from megatron_resihp.plan import Chunk, ParallelPlan, Shard, spelled_out
from megatron_resihp.protocol.messages import (
    CommunicationFailed,
    EmergencyCheckpointWritten,
    Message,
    ProcessExited,
    Ready,
    ScriptEnded,
    SurvivorReport,
    TrainingFinished,
)
from megatron_resihp.protocol.notices import (
    EpochIsBroken,
    JobEnds,
    Notice,
    PlanChange,
    WorkerDismissed,
    WorkersGivenUp,
    WorkersTakenIn,
)
from megatron_resihp.protocol.published import EmergencyCheckpointOrder, EpochPlan
from megatron_resihp.protocol.records import Commit, IterationPhase, Outcome

Said = tuple[Frozen[Any], ...]
Did = tuple[Worker, Said]


def counters_before(iteration: int) -> dict[str, Any]:
    """Megatron's counters at the start of an iteration."""
    return {"iteration": iteration - 1, "totals": {}, "predicted": {}}


def outcome_of(epoch: int, iteration: int) -> Outcome:
    """What the workers of an epoch agree on for an iteration."""
    return Outcome(epoch, float(iteration))


def at_start(worker: int, shards: tuple[Shard, ...]) -> Worker:
    """A worker that has heard Go for epoch 0."""
    return Worker(worker, Mode.TRAINING, iteration=1, counters=(1,), works=True, steps=(), shards=shards)


# ---- its record


def _progress(worker: Worker) -> Progress:
    counters = {iteration: counters_before(iteration) for iteration in worker.counters}
    return Progress(worker.iteration, worker.stage, dict(worker.outcomes), counters)


def _with(worker: Worker, progress: Progress, **changed: Any) -> Worker:
    return worker._replace(
        iteration=progress.iteration, stage=progress.stage, outcomes=tuple(sorted(progress.outcomes.items())),
        counters=tuple(sorted(progress.counters)), **changed,
    )  # fmt: skip


def _said(*messages: Message) -> Said:
    return tuple(map(Frozen, messages))


def _stepped(worker: Worker, outcome: Outcome) -> tuple[int, ...] | None:
    """Its steps with that of its iteration, which takes gradients of just the state before it.

    A standby that holds nothing steps nothing.
    """
    if worker.steps is None and not worker.works:
        return None
    if worker.steps is None or len(worker.steps) != worker.iteration - 1:
        raise Violation(f"worker {worker.id} takes step {worker.iteration} on top of {worker.steps}")
    return (*worker.steps, outcome.epoch)


# ---- in an epoch


def begin(worker: Worker, iterations: int) -> Did:
    """Between two steps: the next iteration, or the end of training, or of the epoch."""
    if worker.leaving and not worker.works:
        return report(worker)
    if worker.works and worker.cursor > iterations:
        return _finish(worker, iterations)
    progress = _progress(worker)
    progress.begin(worker.cursor, counters_before(worker.cursor) if worker.works else None)
    begun = _with(worker, progress, cursor=worker.cursor + 1)
    if begun.leaving:
        return report(begun)
    if begun.replay is None:
        return begun, ()
    progress.agreed(begun.replay)
    progress.stage = IterationPhase.STEPPED
    return _with(begun, progress, replay=None), ()


def reduce(worker: Worker) -> Did:
    """Its gradients are reduced, and it takes part in the agreement."""
    sent = (worker.epoch, worker.iteration, worker.change)
    return worker._replace(stage=IterationPhase.REDUCED, sent=sent), ()


def agree(worker: Worker, leaving: bool, interrupted: bool = False) -> Did:
    """All have brought their part.

    Args:
        leaving: all have heard of the same change.
        interrupted: an error strikes before it steps.
    """
    outcome = outcome_of(worker.epoch, worker.iteration)
    progress = _progress(worker)
    progress.agreed(outcome)
    if not worker.works:
        progress.counters[worker.iteration] = counters_before(worker.iteration)
    agreed = _with(worker, progress, leaving=leaving, change=0 if leaving else worker.change)
    if interrupted:
        return suspect(agreed)
    return agreed._replace(stage=IterationPhase.STEPPED, steps=_stepped(agreed, outcome)), ()


def _finish(worker: Worker, iterations: int) -> Did:
    if worker.steps is None or len(worker.steps) != iterations:
        raise Violation(f"worker {worker.id} has come to the end with the steps {worker.steps}")
    if worker.stage is IterationPhase.STEPPED:
        progress = _progress(worker)
        progress.begin(worker.iteration + 1, counters_before(worker.iteration + 1))
        worker = _with(worker, progress)
    sent = (worker.epoch, FINAL, 0)
    finished = worker._replace(mode=Mode.FINISHING, position=1, sent=sent)
    return finished, _said(TrainingFinished(worker.id, worker.iteration - 1))


def finish_script(worker: Worker) -> Did:
    """All have made the call after train(); its process ends, too."""
    return _at_rest(worker, Mode.DONE), _said(ScriptEnded(worker.id), ProcessExited(worker.id, 0, 0.0))


def die(worker: Worker) -> Did:
    """It is killed; its agent sees that after all that it has said."""
    return _at_rest(worker, Mode.DEAD), _said(ProcessExited(worker.id, -9, 0.0))


def cut(worker: Worker) -> Did:
    """Its node is lost, and nothing of it is heard any more; what it has said before still comes."""
    return _at_rest(worker, Mode.CUT), ()


def _at_rest(worker: Worker, mode: Mode) -> Worker:
    """What others may still know of it, or depend on."""
    steps, shards = (worker.steps, worker.shards) if mode is Mode.DONE else (None, ())
    return Worker(
        worker.id, mode, epoch=worker.epoch, cursor=worker.cursor, sent=worker.sent, steps=steps, shards=shards
    )  # fmt: skip


# ---- from one epoch to the next


def suspect(worker: Worker) -> Did:
    """An error of the communicator: ask the coordinator."""
    failed = CommunicationFailed(worker.id, worker.epoch, "connection reset")
    return worker._replace(mode=Mode.SUSPECTING), _said(failed)


def report(worker: Worker) -> Did:
    """The epoch is over for this worker: tell what it has."""
    record = _progress(worker).record(worker.works, worker.position)
    told = SurvivorReport(worker.id, worker.epoch, record, worker.shards)
    reported = worker._replace(mode=Mode.REPORTED, change=0, leaving=False, replay=None, moved=None)
    return reported, _said(told)


def hear(worker: Worker, notice: Notice, published: Published, own: tuple[Chunk, ...]) -> Did:
    """Take a notice in, and do what it asks for."""
    if worker.mode in GONE:
        return worker, ()
    match notice:
        case EpochIsBroken(epoch):
            return _hear_broken(worker, epoch, published, own)
        case WorkersGivenUp(workers) if worker.id in workers:
            return _at_rest(worker, Mode.OUT), ()
        case JobEnds() | WorkerDismissed(worker.id):
            return _at_rest(worker, Mode.OUT), ()
        case PlanChange(number, worker.epoch):
            return worker._replace(change=number), ()
        case WorkersTakenIn(epoch, workers) if worker.mode is Mode.JOINING and worker.id in workers:
            return enter(worker, epoch, published)
    return worker, ()


def _hear_broken(worker: Worker, epoch: int, published: Published, own: tuple[Chunk, ...]) -> Did:
    if epoch > worker.epoch:
        return worker._replace(broken=worker.broken | {epoch}), ()
    if epoch < worker.epoch or worker.mode in (Mode.REPORTED, Mode.SAVED):
        return worker, ()
    if worker.mode is Mode.READY and epoch in published.begun:
        # Go holds for all members or for none, so it is looked for once more.
        worker, _ = adopt(worker, published, own)
    return report(worker)


def enter(worker: Worker, epoch: int, published: Published) -> Did:
    """Read what was decided for an epoch, and take the committed step."""
    decision = published.decision(epoch)
    assert decision is not None
    if isinstance(decision, EpochPlan) and worker.id not in decision.plan.members:
        return _at_rest(worker, Mode.OUT), ()
    joins = worker.mode is Mode.JOINING
    assert decision.commit is not None
    worker = _stand_at(worker, decision.commit) if joins else _take_committed(worker, decision.commit)
    worker = worker._replace(epoch=epoch, broken=frozenset(each for each in worker.broken if each >= epoch))
    if isinstance(decision, EmergencyCheckpointOrder):
        if worker.id in decision.writers and len(worker.steps or ()) != decision.commit.iteration:
            raise Violation(f"worker {worker.id} saves {worker.steps} as iteration {decision.commit.iteration}")
        return worker._replace(mode=Mode.SAVED), () if joins else _said(EmergencyCheckpointWritten(worker.id))
    if epoch in worker.broken:
        return report(worker)
    return worker._replace(mode=Mode.BUILDING), ()


def _stand_at(worker: Worker, commit: Commit) -> Worker:
    return worker._replace(iteration=commit.iteration, stage=IterationPhase.STEPPED)


def _take_committed(worker: Worker, commit: Commit) -> Worker:
    progress = _progress(worker)
    try:
        owes = progress.owes(commit)
    except ContractBroken as error:
        raise Violation(f"worker {worker.id}: {error}") from None
    if not owes:
        return worker
    assert commit.outcome is not None
    progress.agreed(commit.outcome)
    progress.stage = IterationPhase.STEPPED
    worker = _with(worker, progress)
    # Who holds nothing steps nothing.
    return worker if worker.steps is None else worker._replace(steps=_stepped(worker, commit.outcome))


def shards_under(plan: ParallelPlan, worker: int, own: tuple[Chunk, ...]) -> tuple[Shard, ...]:
    """What a plan gives a worker to hold."""
    return spelled_out(plan, own).shards_of(worker)


def build(worker: Worker, moved: tuple[int, ...] | None, wanted: tuple[Shard, ...], own: Sequence[Chunk]) -> Did:
    """Groups and state are there: tell so, with digests of the state before and after.

    Args:
        moved: the steps that the new state has taken.
        wanted: what that is the state of.
    """
    digests = {f"{chunk.stage}/0": str(worker.steps) for chunk in own if _is_of(worker.shards, chunk)}
    digests |= {f"{chunk.stage}/0": str(moved) for chunk in own if _is_of(wanted, chunk)}
    ready = Ready(worker.id, worker.epoch, digests, (), 0, 0)
    return worker._replace(mode=Mode.READY, moved=moved), _said(ready)


def _is_of(shards: Sequence[Shard], chunk: Chunk) -> bool:
    return any((shard.first, shard.end) == (chunk.first, chunk.end) for shard in shards)


def adopt(worker: Worker, published: Published, own: tuple[Chunk, ...]) -> Did:
    """Go: what was built takes the place of what was held."""
    decision = published.decision(worker.epoch)
    assert isinstance(decision, EpochPlan) and decision.commit is not None
    commit, plan = decision.commit, decision.plan
    works = plan.replica_of(worker.id) is not None
    shards = shards_under(plan, worker.id, own)
    worker = worker._replace(
        mode=Mode.TRAINING, works=works, position=commit.position, leaving=False, moved=None,
        steps=worker.moved if shards else None, shards=shards,
        replay=commit.outcome if commit.replay and works else None,
    )  # fmt: skip
    if not works:
        return _stand_at(worker, commit)._replace(cursor=commit.iteration + 1), ()
    worker = worker._replace(cursor=commit.counters["iteration"] + 1)
    if commit.position:
        worker = worker._replace(mode=Mode.FINISHING, sent=(worker.epoch, FINAL, 0))
    return worker, ()


def joining(worker: int) -> Worker:
    """A worker that was started anew."""
    return Worker(worker, Mode.JOINING, epoch=NO_EPOCH)
