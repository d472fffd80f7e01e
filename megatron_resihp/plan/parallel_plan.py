# SPDX-License-Identifier: Apache-2.0
"""The parallel plan of one epoch: replicas, stages, members, layers, micro-batches, order of ops, standbys.

May import `coding` and this package's modules, so that planning takes about a second on a laptop.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

from megatron_resihp.coding import FILE, Form, decode, encode, omitted_if, set_form, shown, version_said
from megatron_resihp.coding.errors import MissingFieldError, WrongValueError
from megatron_resihp.plan.errors import PlanError
from megatron_resihp.plan.rank_grid import RankGrid
from megatron_resihp.plan.replica import Coordinate, Kept, Migration, Replica, Shard, WrittenKept, shards_at
from megatron_resihp.plan.rules import Sharing, check, groups_of

VERSION: Final = 2
"""Version of a plan's JSON. Plans of version 1 do not say it; they had no chunks, schedules, migrations or marks."""


@dataclass(frozen=True)
class _Written:
    """A plan's JSON without its version; it omits what the plan does not use."""

    replicas: tuple[Replica, ...]
    standbys: dict[int, WrittenKept]
    migrations: tuple[Migration, ...] = omitted_if(())
    uneven_shards: bool = omitted_if(False)
    context_parallel: int = omitted_if(1)
    expert_parallel: int = omitted_if(1)
    expert_members: int = omitted_if(0)
    uneven_experts: int = omitted_if(0)
    context_groups: tuple[int, ...] = omitted_if(())


@dataclass(frozen=True)
class ParallelPlan:
    """Which worker does which work in an epoch.

    Attributes:
        replicas: the working part. Replicas may differ in stages, layers and tensor-parallel degree.
        standbys: live workers without work, each with the state that it keeps up to date (None if it holds nothing).
        migrations: work that another replica does; every replica that takes part lists its ops explicitly.
        uneven_shards: whether some tensor-parallel members hold unequal shards (such as 3 of 4), which an executor must
            know. That depends on the model; `cost.memory.check_plan` checks it.
        context_parallel: how many consecutive replicas share each sequence. They run the same micro-batches, each its
            part of every sequence, and each has the whole model.
        expert_parallel: how many consecutive replicas share each layer's experts. They run in step, as many rounds as
            the one with most micro-batches needs (`rounds_of`), and each has a share of the experts and all the rest of
            the model.
        expert_members: how many members in a row of a stage have a cut each of the same experts of that share; 0: all
            members have. The job's own number.
        uneven_experts: how many experts each layer has, where those that share them have unequal numbers of them
            (`plan.experts`); 0: all have as many.
        context_groups: how many consecutive replicas share each sequence, group by group, where these numbers differ;
            `context_parallel` is the largest of them then.

    Equal plans have equal hashes; plans may be pickled and copied.

    Raises:
        PlanError: on construction; the message names the rule that is broken (`plan.rules`).
    """

    replicas: tuple[Replica, ...]
    standbys: Mapping[int, Kept] = field(default_factory=dict, hash=False)
    migrations: tuple[Migration, ...] = ()
    uneven_shards: bool = False
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_members: int = 0
    uneven_experts: int = 0
    context_groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check(self.replicas, self.standbys, self.migrations, self.sharing, self.context_groups)
        # A read-only copy: neither the plan nor the caller's own dict can change it.
        object.__setattr__(self, "standbys", MappingProxyType(dict(self.standbys)))

    def __reduce__(self) -> tuple[Any, ...]:
        # A proxy can be neither pickled nor copied.
        parts = self.replicas, dict(self.standbys), self.migrations, self.uneven_shards
        return ParallelPlan, (*parts, *self.sharing, self.context_groups)

    @property
    def sharing(self) -> Sharing:
        """How replicas share sequences and experts."""
        return Sharing(self.context_parallel, self.expert_parallel, self.expert_members, self.uneven_experts)

    @cached_property
    def sharing_sequences(self) -> tuple[range, ...]:
        """The replicas that share each sequence, group by group; without such, each replica."""
        return groups_of(len(self.replicas), self.context_groups or self.context_parallel)

    @cached_property
    def grid(self) -> RankGrid:
        """The plan's workers by coordinate. Raises PlanError if replicas differ in shape."""
        # Megatron's formula knows no unequal groups, and is told of replicas that share nothing.
        return RankGrid(self.replicas, self.standbys, 1 if self.context_groups else self.context_parallel)

    @cached_property
    def working(self) -> tuple[int, ...]:
        """Ids of workers with work, replica by replica, stage by stage, in tensor-parallel order."""
        return tuple(self._places)

    @cached_property
    def _places(self) -> dict[int, tuple[int, Coordinate]]:
        """Replica of each worker with work, and its place there."""
        return {
            worker: (index, coordinate)
            for index, replica in enumerate(self.replicas)
            for worker, coordinate in replica.workers()
        }

    @cached_property
    def members(self) -> tuple[int, ...]:
        """All live workers of the epoch, sorted."""
        return tuple(sorted([*self.working, *self.standbys]))

    @property
    def micro_batch_count(self) -> int:
        return sum(len(self.replicas[group.start].micro_batches) for group in self.sharing_sequences)

    @property
    def not_uniform(self) -> str | None:
        """Why the plan is not uniform; None if it is.

        A uniform plan has equal replicas, whose stages have equal tensor-parallel degree, and the job's own layers and
        order of ops. An executor that knows only Megatron's groups can run no other plan.
        """
        if len({degree for replica in self.replicas for degree in replica.shape}) != 1:
            return "stages differ in tensor-parallel degree"
        if len({replica.shape for replica in self.replicas}) != 1:
            return "replicas differ in their number of stages"
        if any(replica.chunks for replica in self.replicas):
            return "layers are split otherwise than by the job's own arguments"
        if any(replica.schedule for replica in self.replicas) or self.migrations:
            return "ops are ordered otherwise than by Megatron's own schedule"
        if any(isinstance(kept, tuple) and not isinstance(kept, Coordinate) for kept in self.standbys.values()):
            return "standbys keep shards of another layout"
        return "shards are uneven" if self.uneven_shards else None

    def coordinate_of(self, worker: int) -> Coordinate | None:
        """The shard that `worker` works on or keeps; None also for a standby with shards of another layout."""
        if worker in self._places:
            return self._places[worker][1]
        kept = self.standbys.get(worker)
        return kept if isinstance(kept, Coordinate) else None

    def replica_of(self, worker: int) -> int | None:
        """Index of the replica that `worker` works in; None for a standby."""
        return self._places[worker][0] if worker in self._places else None

    def shards_of(self, worker: int) -> tuple[Shard, ...]:
        """The shards that `worker` works on or keeps up to date, in terms of layers.

        Raises:
            PlanError: the plan doesn't say which layers its stages run.
        """
        index, coordinate = self._places.get(worker, (0, None))
        if coordinate is None:
            kept = self.standbys.get(worker)
            if not isinstance(kept, Coordinate):
                return kept or ()
            coordinate = kept
        replica = self.replicas[index]
        if not replica.chunks:
            raise PlanError("the plan doesn't say which layers its stages run")
        experts = index % self.expert_parallel, self.expert_parallel, self.expert_members, self.uneven_experts
        return shards_at(replica.chunks, coordinate, len(replica.stages[coordinate.stage]), experts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without what the plan does not use."""
        return {"version": VERSION, **encode(_written(self))}

    @classmethod
    def from_dict(cls, data: Any) -> "ParallelPlan":
        """Read what `to_dict` gives, of this version or the one before.

        Raises:
            PlanError: the data has another version, lacks a part, breaks a rule, or is no plan at all.
        """
        try:
            version = version_said(data)
            if version not in (None, 1, VERSION):
                raise PlanError(f"a plan of version {shown(version)}; this program knows versions 1 and {VERSION}")
            written = decode(_Written, data, FILE)
        except MissingFieldError as error:
            *holder, name = error.where
            raise PlanError(f"the plan lacks {name!r}{f' of {".".join(holder)}' if holder else ''}") from None
        except WrongValueError as error:
            raise PlanError(f"this is not a plan: {error}; give the JSON of a plan") from None
        sharing = written.context_parallel, written.expert_parallel, written.expert_members, written.uneven_experts
        parts = written.replicas, written.standbys, written.migrations, written.uneven_shards
        return cls(*parts, *sharing, written.context_groups)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ between any two plans, and not between versions of the JSON."""
        return hashlib.sha256(json.dumps(encode(_written(self)), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def work_digest(self) -> str:
        """Like `digest`, but only for the working part: it ignores standbys."""
        return replace(self, standbys={}).digest


def data_parallel_of(plan: ParallelPlan) -> int:
    """How many groups of replicas there are that share their sequences; without such groups, how many replicas."""
    return len(plan.sharing_sequences)


def group_number(plan: ParallelPlan, replica: int) -> int:
    """Which of the groups that share sequences a replica is in."""
    if not plan.context_groups:
        return replica // plan.context_parallel
    return next(number for number, group in enumerate(plan.sharing_sequences) if replica in group)


def shared_with(plan: ParallelPlan, replica: int) -> range:
    """The replicas that share sequences with one, itself included."""
    return plan.sharing_sequences[group_number(plan, replica)]


def sharing_of(plan: ParallelPlan) -> int:
    """How many consecutive replicas meet in every layer, since they share sequences or experts; in the largest group,
    if these differ."""
    return plan.sharing.together


def met_by(plan: ParallelPlan, replica: int) -> range:
    """The replicas that one meets in every layer, itself included."""
    if plan.expert_parallel <= plan.context_parallel:
        return shared_with(plan, replica)
    first = replica - replica % plan.expert_parallel
    return range(first, first + plan.expert_parallel)


def meeting_groups(plan: ParallelPlan) -> tuple[range, ...]:
    """The replicas that meet in every layer, since they share sequences or experts, group by group."""
    if plan.expert_parallel <= plan.context_parallel:
        return plan.sharing_sequences
    return groups_of(len(plan.replicas), plan.expert_parallel)


def rounds_of(plan: ParallelPlan, replica: int) -> int:
    """How many micro-batches a replica runs: as many as the one with most of those that share experts with it. What it
    runs beyond its own counts nothing."""
    first = replica - replica % plan.expert_parallel
    return max(len(each.micro_batches) for each in plan.replicas[first : first + plan.expert_parallel])


def _written(plan: ParallelPlan) -> _Written:
    standbys = dict(sorted(plan.standbys.items()))
    return _Written(plan.replicas, standbys, plan.migrations, plan.uneven_shards, *plan.sharing, plan.context_groups)


def _read(value: Any) -> ParallelPlan:
    try:
        return ParallelPlan.from_dict(value)
    except PlanError as error:
        raise WrongValueError(f"is not a plan that can be run: {error}") from None


set_form(ParallelPlan, Form(ParallelPlan.to_dict, _read))
