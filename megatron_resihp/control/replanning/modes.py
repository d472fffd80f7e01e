# SPDX-License-Identifier: Apache-2.0
"""What the coordinator has to mind in either mode of running a plan; `integration.modes` has the modes themselves.

Pure. May import `plan`, `planner.job_shape`, `executor`'s check of ops and `inventory`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from megatron_resihp.config import DEVICE
from megatron_resihp.control.replanning.recovery.inventory import Held, keeps_ratio, require_all_parts, written_once
from megatron_resihp.executor.direct.order_check import check_order_of_plan
from megatron_resihp.executor.route_check import check_plan
from megatron_resihp.executor.routes import RouteError
from megatron_resihp.plan import Chunk, Kept, ParallelPlan, PlanError, Shard, shortened, spelled_out
from megatron_resihp.plan.copies import NodeOf
from megatron_resihp.plan.parallel_plan import rounds_of
from megatron_resihp.plan.spelling import coordinate_at
from megatron_resihp.planner.job_shape import can_share_sequence
from megatron_resihp.protocol.job import JobDescription

Holders = Mapping[int, tuple[Shard, ...]]


class PlanMode(ABC):
    """The rules of a mode."""

    @abstractmethod
    def check_ops(self, plan: ParallelPlan, own: tuple[Chunk, ...], job: JobDescription) -> None:
        """Called before a plan is published: what its workers send and receive must match, so that none waits
        forever.

        Args:
            own: the job's own split into layers.
            job: what workers have told of it.

        Raises:
            PlanError: it doesn't.
        """

    @abstractmethod
    def standbys(self, held: Holders, own: tuple[Chunk, ...], degree: int) -> dict[int, Kept]:
        """What these workers, which have no work, can keep of what they hold.

        Args:
            own, degree: the job's own split, and its tensor-parallel degree.
        """

    @abstractmethod
    def optimizer_after(self, ran: ParallelPlan | None, distributed: bool) -> "OptimizerState":
        """Where the optimizer's state is once a plan of this mode has been run.

        Args:
            ran: the plan; None: none has been run yet.
            distributed: whether the job has Megatron's distributed optimizer.
        """

    @abstractmethod
    def without_parts_kept(self, plan: ParallelPlan) -> ParallelPlan:
        """`plan`, run after one whose members hold parts of a distributed optimizer's state."""


class _Uniform(PlanMode):
    """Megatron's own groups and schedules run it; a standby keeps a shard of the job's own layout or nothing."""

    def check_ops(self, plan: ParallelPlan, own: tuple[Chunk, ...], job: JobDescription) -> None:
        """Megatron cuts a sequence in two parts for each worker that shares it, and for the members of its stage."""
        degree, tokens = plan.context_parallel, job.seq_length
        members = job.tensor_parallel if job.sequence_parallel else 1
        if plan.context_groups and job.experts:
            raise PlanError("sequences must be shared in groups of one size in a job with --num-experts")
        if degree > job.context_parallel:
            raise PlanError(f"sequences can be shared by {job.context_parallel} replicas at most, not {degree}")
        if job.keeps_context and (degree != job.context_parallel or plan.context_groups):
            found = " or ".join(map(str, dict.fromkeys(plan.context_groups or (degree,))))
            needed = f"{job.context_parallel} replicas must share each sequence, not {found}"
            raise PlanError(f"{needed}: {job.keeps_context}")
        for each in set(plan.context_groups) or {degree}:
            if not can_share_sequence(each, tokens, members):
                raise PlanError(f"{each} replicas can't share the {tokens} tokens of a sequence evenly")
        _check_experts(plan, job)

    def standbys(self, held: Holders, own: tuple[Chunk, ...], degree: int) -> dict[int, Kept]:
        return {worker: coordinate_at(own, shards, degree) for worker, shards in held.items()}

    def optimizer_after(self, ran: ParallelPlan | None, distributed: bool) -> "OptimizerState":
        return OptimizerInParts(ran) if distributed else WholeOptimizer()

    def without_parts_kept(self, plan: ParallelPlan) -> ParallelPlan:
        return plan


def _check_experts(plan: ParallelPlan, job: JobDescription) -> None:
    """Raises PlanError if replicas can't share experts as a uniform plan says."""
    sharing = plan.expert_parallel
    if sharing > job.expert_parallel:
        raise PlanError(f"experts can be shared by {job.expert_parallel} replicas at most, not {sharing}")
    if keeps_ratio(job) and sharing * job.context_parallel != job.expert_parallel * plan.context_parallel:
        said = f"{sharing} replicas can't share experts where {plan.context_parallel} share sequences"
        raise PlanError(f"{said}: with --use-tp-pp-dp-mapping, both become fewer in the same ratio")
    if job.keeps_experts and sharing != job.expert_parallel:
        raise PlanError(f"{job.expert_parallel} replicas must share experts, not {sharing}: {job.keeps_experts}")
    if job.powers_of_two and sharing.bit_count() > 1:
        raise PlanError(f"a power of two of replicas must share experts, not {sharing}: {job.powers_of_two}")
    if job.equal_rounds and any(len(each.micro_batches) < rounds_of(plan, n) for n, each in enumerate(plan.replicas)):
        said = "replicas that share experts must have equal numbers of micro-batches"
        raise PlanError(f"{said}: {job.equal_rounds}")
    if job.keeps_experts and not _meet_as_at_the_start(plan):
        raise PlanError(f"other micro-batches would meet in the experts: {job.keeps_experts}")
    groups = job.tensor_parallel // (job.expert_members or job.tensor_parallel)
    if job.experts % (sharing * groups) and not plan.uneven_experts:
        said = f"{sharing} replicas can't share the {job.experts} experts of a layer evenly"
        raise PlanError(said if job.even_experts else f'{said}; unless the plan says "uneven_experts": {job.experts}')
    if plan.uneven_experts not in (0, job.experts):
        raise PlanError(f"each layer has {job.experts} experts, not {plan.uneven_experts}")
    if plan.uneven_experts and job.even_experts:
        raise PlanError(f"experts can't be dealt in unequal numbers: {job.even_experts}")
    if plan.expert_members != job.expert_members:
        said = f"expert_members is {job.expert_members} in this job, not {plan.expert_members}"
        raise PlanError(f"{said}: how members of a stage share experts stays the same")


def _meet_as_at_the_start(plan: ParallelPlan) -> bool:
    """Whether the micro-batches that replicas which share experts run at a time are those that Megatron's own dealing
    gives them, whatever the number of replicas: as many in a row, from a multiple of that on."""
    hands = [plan.replicas[group.start].micro_batches for group in plan.sharing_sequences]
    count = plan.sharing.in_step
    return all(
        each == tuple(range(each[0], each[0] + count)) and each[0] % count == 0
        for first in range(0, len(hands), count)
        for each in zip(*hands[first : first + count], strict=True)
    )


class _Heterogeneous(PlanMode):
    """A standby goes on with the objects that it has, of whatever layout."""

    def check_ops(self, plan: ParallelPlan, own: tuple[Chunk, ...], job: JobDescription) -> None:
        """Where members of a stage share the tokens between layers, Megatron wants as many for each of them."""
        if job.context_parallel > 1:
            raise PlanError(f"a job with context parallelism runs uniform plans only: {plan.not_uniform}")
        if job.expert_parallel > 1 or job.expert_members:
            raise PlanError(f"a job with expert parallelism runs uniform plans only: {plan.not_uniform}")
        if plan.expert_parallel > 1:
            raise PlanError("the job has no --expert-model-parallel-size, so its replicas can't share experts")
        if plan.context_parallel > 1:
            raise PlanError("the job has no --context-parallel-size, so its replicas can't share sequences")
        tokens = job.seq_length
        if job.keeps_degree and degrees_of(plan) != [job.tensor_parallel]:
            members = f"the job's own number of TP members, {job.tensor_parallel}"
            raise PlanError(f"each stage needs {members}: {job.keeps_degree}")
        for degree in degrees_of(plan) if job.sequence_parallel else ():
            if tokens % degree:
                raise PlanError(f"{degree} TP members can't share the {tokens} tokens of a sequence evenly")
        try:
            written = spelled_out(plan, own)
            check_plan(written, job.sequence_parallel, tokens)
            if job.carrier == DEVICE:
                check_order_of_plan(written, job.sequence_parallel, tokens)
        except RouteError as error:
            raise PlanError(f"the plan's ops don't fit together: {error}") from None

    def standbys(self, held: Holders, own: tuple[Chunk, ...], degree: int) -> dict[int, Kept]:
        return {worker: shards or None for worker, shards in held.items()}

    def optimizer_after(self, ran: ParallelPlan | None, distributed: bool) -> "OptimizerState":
        return WholeOptimizer()

    def without_parts_kept(self, plan: ParallelPlan) -> ParallelPlan:
        """The objects of standbys have a part of the state only."""
        return replace(plan, standbys=dict.fromkeys(plan.standbys))


class OptimizerState(ABC):
    """Where the optimizer's state is, and so what can be made of what survivors hold."""

    @abstractmethod
    def require_all(self, survivors: Iterable[int], node_of: NodeOf) -> None:
        """Raises NoPlanError if a part of the state died with its copy."""

    @abstractmethod
    def without_parts_kept(self, plan: ParallelPlan) -> ParallelPlan:
        """`plan`, whose standbys keep nothing that it can't use."""

    @abstractmethod
    def writers(self, held: Held) -> dict[int, tuple[Shard, ...]]:
        """Which worker writes which shards into an emergency checkpoint."""


class WholeOptimizer(OptimizerState):
    """Every holder of a shard has all of the optimizer's state of that shard."""

    def require_all(self, survivors: Iterable[int], node_of: NodeOf) -> None:
        """A holder of each shard is enough."""

    def without_parts_kept(self, plan: ParallelPlan) -> ParallelPlan:
        return plan

    def writers(self, held: Held) -> dict[int, tuple[Shard, ...]]:
        return written_once(held)


class OptimizerInParts(OptimizerState):
    """Each replica has its own part of a distributed optimizer's state. `ran`: the plan that was run last."""

    def __init__(self, ran: ParallelPlan | None) -> None:
        self._ran = ran

    def require_all(self, survivors: Iterable[int], node_of: NodeOf) -> None:
        if self._ran is not None:
            require_all_parts(self._ran, survivors, node_of)

    def without_parts_kept(self, plan: ParallelPlan) -> ParallelPlan:
        return mode_of(plan).without_parts_kept(plan)

    def writers(self, held: Held) -> dict[int, tuple[Shard, ...]]:
        return dict(held)


UNIFORM_MODE: Final = _Uniform()
HETEROGENEOUS_MODE: Final = _Heterogeneous()


def mode_of(plan: ParallelPlan) -> PlanMode:
    """The mode in which a plan is run."""
    return UNIFORM_MODE if plan.not_uniform is None else HETEROGENEOUS_MODE


def optimizer_after(ran: ParallelPlan | None, distributed: bool) -> OptimizerState:
    """As `PlanMode.optimizer_after` of the plan's mode; a job begins with a uniform plan."""
    mode = UNIFORM_MODE if ran is None else mode_of(ran)
    return mode.optimizer_after(ran, distributed)


def in_short(working: ParallelPlan, own: tuple[Chunk, ...], degree: int) -> tuple[ParallelPlan, PlanMode]:
    """A plan without standbys in short, where it says no more than the job's own arguments, and the mode to run it in.

    Args:
        own, degree: the job's own split, and its tensor-parallel degree.
    """
    short = shortened(working, own)
    if short.not_uniform is None and short.grid.tensor_parallel == degree:
        return short, UNIFORM_MODE
    return working, HETEROGENEOUS_MODE


def degrees_of(plan: ParallelPlan) -> list[int]:
    """The tensor-parallel degrees of its stages."""
    return sorted({degree for replica in plan.replicas for degree in replica.shape} - {0})
