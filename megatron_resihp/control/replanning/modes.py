# SPDX-License-Identifier: Apache-2.0
"""What the coordinator has to mind in either mode of running a plan; `integration.modes` has the modes themselves.

Pure. May import `plan` and `executor`'s check of ops.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from megatron_resihp.executor.route_check import check_plan
from megatron_resihp.executor.routes import RouteError
from megatron_resihp.plan import Chunk, Kept, ParallelPlan, PlanError, Shard, shortened, spelled_out
from megatron_resihp.plan.spelling import coordinate_at

Holders = Mapping[int, tuple[Shard, ...]]


class PlanMode(ABC):
    """The rules of a mode.

    Attributes:
        shares_optimizer_out: whether a distributed optimizer's state is in parts, of which each replica has one.
    """

    shares_optimizer_out: bool

    @abstractmethod
    def check_ops(self, plan: ParallelPlan, own: tuple[Chunk, ...], job: Mapping[str, Any]) -> None:
        """Called before a plan is published: what its workers send and receive must match, so that nobody waits
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
    def without_parts_kept(self, plan: ParallelPlan) -> ParallelPlan:
        """A plan that is run after one in which a distributed optimizer was shared out."""


class _Uniform(PlanMode):
    """Megatron's own groups and schedules run it; a standby keeps a shard of the job's own layout or nothing."""

    shares_optimizer_out = True

    def check_ops(self, plan: ParallelPlan, own: tuple[Chunk, ...], job: Mapping[str, Any]) -> None:
        """There is nothing to check."""

    def standbys(self, held: Holders, own: tuple[Chunk, ...], degree: int) -> dict[int, Kept]:
        return {worker: coordinate_at(own, shards, degree) for worker, shards in held.items()}

    def without_parts_kept(self, plan: ParallelPlan) -> ParallelPlan:
        return plan


class _Heterogeneous(PlanMode):
    """A standby goes on with the objects that it has, of whatever layout."""

    shares_optimizer_out = False

    def check_ops(self, plan: ParallelPlan, own: tuple[Chunk, ...], job: Mapping[str, Any]) -> None:
        """Where members of a stage share the tokens between layers, Megatron wants as many for each of them."""
        tokens = job["seq_length"]
        for degree in degrees_of(plan) if job["sequence_parallel"] else ():
            if tokens % degree:
                raise PlanError(f"{degree} TP members can't share the {tokens} tokens of a sequence evenly")
        try:
            check_plan(spelled_out(plan, own), job["sequence_parallel"], tokens)
        except RouteError as error:
            raise PlanError(f"the plan's ops don't fit together: {error}") from None

    def standbys(self, held: Holders, own: tuple[Chunk, ...], degree: int) -> dict[int, Kept]:
        return {worker: shards or None for worker, shards in held.items()}

    def without_parts_kept(self, plan: ParallelPlan) -> ParallelPlan:
        """The objects of standbys have a part of the state only."""
        return replace(plan, standbys=dict.fromkeys(plan.standbys))


UNIFORM_MODE: Final = _Uniform()
HETEROGENEOUS_MODE: Final = _Heterogeneous()


def mode_of(plan: ParallelPlan) -> PlanMode:
    """The mode in which a plan is run."""
    return UNIFORM_MODE if plan.not_uniform is None else HETEROGENEOUS_MODE


def in_short(working: ParallelPlan, own: tuple[Chunk, ...], degree: int) -> tuple[ParallelPlan, PlanMode]:
    """A plan without standbys in short, where it says no more than the job's own arguments, and the mode to run it in.

    Args:
        own, degree: the job's own split, and its tensor-parallel degree.
    """
    short = shortened(working, own)
    if short.not_uniform is None and short.tensor_parallel == degree:
        return short, UNIFORM_MODE
    return working, HETEROGENEOUS_MODE


def degrees_of(plan: ParallelPlan) -> list[int]:
    """The tensor-parallel degrees of its stages."""
    return sorted({degree for replica in plan.replicas for degree in replica.shape} - {0})
