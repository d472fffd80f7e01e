# SPDX-License-Identifier: Apache-2.0
"""What the coordinator writes to the event log when a job begins, and when one epoch follows another.

Pure; imports `plan`, `protocol`, `events` and this package.
"""

from collections.abc import Collection, Iterable

from megatron_resihp.control.replanning.change import Change
from megatron_resihp.control.replanning.recovery.inventory import even_sharings_of, uneven_sharings_of
from megatron_resihp.events.epochs import EpochStarted, Reconfiguration, Recovery
from megatron_resihp.events.job import Job
from megatron_resihp.events.training import Agreed
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.messages import Ready
from megatron_resihp.protocol.records import Commit, Outcome

Reports = Collection[Ready]
"""What the members of an epoch reported when they were ready for it."""


def job_described(worker: int, job: JobDescription) -> Job:
    """A worker has said what is to be trained."""
    return Job(
        worker=worker,
        tensor_parallel=job.tensor_parallel,
        pipeline_parallel=job.pipeline_parallel,
        context_parallel=job.context_parallel,
        expert_parallel=job.expert_parallel,
        expert_members=job.expert_members,
        sharings=tuple((each.context, each.experts, each.members) for each in even_sharings_of(job)),
        uneven_sharings=tuple((each.experts, each.uneven) for each in uneven_sharings_of(job)),
        equal_rounds=bool(job.equal_rounds),
        micro_batches=job.micro_batches,
        batch_steps=job.batch_steps,
        chunks=job.chunks,
        micro_batch_group=job.micro_batch_group,
        seq_length=job.seq_length,
        sequence_parallel=job.sequence_parallel,
        pipeline_last=job.pipeline_last,
        spread_replicas=job.spread_replicas,
        train_iters=job.train_iters,
        ends_early=job.ends_early,
        eval_interval=job.eval_interval,
        save_interval=job.save_interval,
        non_persistent_save_interval=job.non_persistent_save_interval,
        tied=job.tied,
        micro_batch_size=job.micro_batch_size,
        global_batch_size=job.global_batch_size,
        emulated=job.emulated,
        gemm=job.gemm,
        false_alarms_per_job=job.false_alarms_per_job,
        distributed_optimizer=job.distributed_optimizer,
        strategy=job.strategy,
        plan_wait=job.plan_wait,
        act=job.act,
        begins_with_a_plan=job.begins_with_a_plan,
        seconds_between_changes=job.seconds_between_changes,
        device_memory=job.device_memory,
        memory_reserve=job.memory_reserve,
        carrier=job.carrier,
        host_memory=job.host_memory,
        cost_model=job.cost_model,
    )


def epoch_started(epoch: int, plan: ParallelPlan, copies_experts: bool) -> EpochStarted:
    """The plan of an epoch is in force. `copies_experts`: its members keep the copies of experts that it asks for."""
    return EpochStarted(epoch=epoch, plan=plan.to_dict(), digest=plan.digest, copies_experts=copies_experts)


def agreed(epoch: int, commit: Commit, outcome: Outcome) -> Agreed:
    """What counts as applied when an epoch was left."""
    return Agreed(
        epoch=epoch, iteration=commit.iteration, agreed_epoch=outcome.epoch, loss=outcome.means,
        grad_norm=outcome.grad_norm, skipped=outcome.skipped,
    )  # fmt: skip


def recovery(epoch: int, commit: Commit, ready: Reports, dead: Iterable[int], broken_at: float, now: float) -> Recovery:
    """Training goes on after a failure."""
    return Recovery(
        epoch=epoch, from_epoch=epoch - 1, to_epoch=epoch, resumed_iteration=commit.iteration,
        dead=tuple(sorted(dead)), bytes_moved=_bytes_moved(ready), steps_redone=_steps_redone(ready),
        broken_at=broken_at, resumed_at=now,
    )  # fmt: skip


def reconfiguration(
    epoch: int, commit: Commit, ready: Reports, change: Change, groups_made_ahead: bool, now: float
) -> Reconfiguration:
    """Training goes on after a change by choice."""
    left_at = now if change.first_reported_at is None else change.first_reported_at
    return Reconfiguration(
        epoch=epoch, number=change.number, why=change.why, from_epoch=epoch - 1, to_epoch=epoch,
        resumed_iteration=commit.iteration, bytes_moved=_bytes_moved(ready), steps_redone=_steps_redone(ready),
        left_at=left_at, resumed_at=now, stood_still_s=now - left_at, groups_made_ahead=groups_made_ahead,
    )  # fmt: skip


def _bytes_moved(ready: Reports) -> int:
    return sum(message.bytes_received for message in ready)


def _steps_redone(ready: Reports) -> int:
    return max(message.steps_redone for message in ready)
