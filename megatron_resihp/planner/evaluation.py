# SPDX-License-Identifier: Apache-2.0
"""Simulates how fast a plan is with a given health, and how near that is to the bound.

Imports numpy, `plan`, `pipeline`, `cost` and this package.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.cost.bounds import IterationBound, iteration_bound
from megatron_resihp.cost.exchange import nearest
from megatron_resihp.cost.job import Array, JobCost
from megatron_resihp.cost.memory import with_layers
from megatron_resihp.pipeline.joint import JointProgram, JointTimeline, joint_makespans, simulate_joint
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.pipeline.planned import joint_program_of, program_of
from megatron_resihp.pipeline.simulate import Timeline, makespans, simulate
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.plan.microbatches import filled_up
from megatron_resihp.plan.parallel_plan import meeting_groups, met_by, shared_with
from megatron_resihp.planner.health import Health

F, B, W = OpKind
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Evaluation:
    """Simulated times of a plan.

    Attributes:
        replica_s: makespan of each replica's micro-batches, or of each group's, in seconds.
        sums_s: seconds in which all workers sum gradients afterwards, where that doesn't overlap.
        bound: least time that any plan needs with this health.
        samples: number of samples in a global batch.
    """

    replica_s: tuple[float, ...]
    sums_s: float
    bound: IterationBound
    samples: int

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration, without sums of gradients that overlap, and without the optimizer."""
        return max(self.replica_s) + self.sums_s

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.iteration_s

    @property
    def share_of_bound(self) -> float:
        """Bound over iteration time: 1 means that no plan is faster."""
        return self.bound.seconds / self.iteration_s


def evaluate(plan: ParallelPlan, health: Health, cost: JobCost) -> Evaluation:
    """Simulate every replica of a plan, or every group of those that share sequences or experts.

    Raises:
        PlanError: the plan has other layers than the model.
        KeyError: a working worker is dead.
    """
    together = migrating(plan)
    replica_s = [0.0 if number in together else run.timeline().makespan for number, run in _runs(plan, health, cost)]
    if together:
        finish = iter(joint_timeline(plan, health, cost).finish.tolist())
        for number in together:
            replica_s[number] = max(next(finish) for _ in plan.replicas[number].micro_batches)
    return Evaluation(
        replica_s=tuple(replica_s),
        sums_s=cost.sums(plan),
        bound=iteration_bound(cost, health.speed),
        samples=cost.micro_batches * cost.training.micro_batch_size,
    )


def iteration_times(plan: ParallelPlan, health: Health, cost: JobCost, squares: Array) -> Array:
    """Seconds of each iteration when micro-batches hold documents of different lengths, [iterations].

    Args:
        plan, health, cost: as in `evaluate`, which gives the seconds for typical micro-batches.
        squares: Σ l² of each micro-batch of the global batch, tokens², [iterations, micro-batches].

    Raises:
        PlanError, KeyError: as in `evaluate`.
    """
    more = squares - cost.typical_squares
    together = migrating(plan)
    seconds = [run.makespans(more) for number, run in _runs(plan, health, cost) if number not in together]
    if together:
        seconds.append(_joint_makespans(plan, health, cost, more))
    slowest: Array = np.max(seconds, axis=0) + cost.sums(plan)
    return slowest


@dataclass(frozen=True)
class GroupRun:
    """Replicas that share sequences or experts, or one that shares nothing: all run the same ops at the same time, as
    many as the one with most micro-batches has.

    They meet in every layer, so that an op takes what the slowest of those that run it together takes, and the time in
    which they send each other tokens, or keys and values.

    Attributes:
        replicas: of the group, with layers.
        slowest: of each worker of the first replica, the speed of the slowest one in its place.
        health, cost: of the workers and of the job under this sharing.
    """

    replicas: tuple[Replica, ...]
    slowest: Health
    health: Health
    cost: JobCost

    def seconds(self) -> Array:
        """Of each op, as `stage_seconds`."""
        first, cost = self.replicas[0], self.cost
        seconds = stage_seconds(first, self.slowest, cost)
        if len(self.replicas) > 1 or cost.training.expert_groups > 1:
            for number, chunk in enumerate(first.chunks):
                members = [replica.stages[chunk.stage] for replica in self.replicas]
                between = cost.exchange(len(members[0]), nearest(members, cost.workers_per_node))
                exchanged = between[:, chunk.first : chunk.end].sum(axis=1) / _slowest_link(members, self.health)
                seconds[F, number] += exchanged[F]
                seconds[B, number] += exchanged[B]
        return seconds

    def transfers(self) -> Array:
        """Of each pair of chunks, as `transfer_seconds`."""
        return np.maximum.reduce([transfer_seconds(each, self.health, self.cost) for each in self.replicas])

    def timeline(self) -> Timeline:
        """When each op runs."""
        return simulate(program_of(self._longest), self.seconds()[..., np.newaxis], self.transfers())

    def makespans(self, more: Array) -> Array:
        """Seconds, [iterations]; `more`: tokens² of micro-batches above the typical, [iterations, micro-batches]."""
        per_square = _chunk_seconds(self.replicas[0], self.slowest, self.cost.seconds_per_square)[..., np.newaxis]
        rounds = len(self._longest.micro_batches)
        run = [filled_up(replica.micro_batches, rounds) for replica in self.replicas]
        own = np.max([more[:, list(each)] for each in run], axis=0)
        durations = self.seconds()[..., np.newaxis] + per_square * own[:, np.newaxis, np.newaxis]
        return makespans(program_of(self._longest), durations, self.transfers())

    @property
    def _longest(self) -> Replica:
        """The replica with most micro-batches, in whose rounds all are run."""
        return max(self.replicas, key=lambda replica: len(replica.micro_batches))


def run_of(plan: ParallelPlan, number: int, health: Health, cost: JobCost) -> GroupRun:
    """The run of a replica with all that it shares sequences or experts with."""
    group = tuple(with_layers(plan.replicas[each], cost.model) for each in met_by(plan, number))
    cost = cost.shared(len(shared_with(plan, number)), plan.expert_parallel)
    if len(group) == 1:
        return GroupRun(group, health, health, cost)
    rows = zip(*([worker for worker, _ in replica.workers()] for replica in group), strict=True)
    slowest = {row[0]: min(health.speed[worker] for worker in row) for row in rows}
    return GroupRun(group, Health(slowest), health, cost)


def _runs(plan: ParallelPlan, health: Health, cost: JobCost) -> Iterator[tuple[int, GroupRun]]:
    """Each group of replicas, by the number of its first one."""
    for group in meeting_groups(plan):
        yield group.start, run_of(plan, group.start, health, cost)


def _slowest_link(members: Sequence[tuple[int, ...]], health: Health) -> float:
    pairs = combinations(members, 2) if health.link else ()
    return min((health.between(*pair) for pair in pairs), default=1.0)


def _joint_makespans(plan: ParallelPlan, health: Health, cost: JobCost, more: Array) -> Array:
    """Seconds of the replicas that take part in migrations, [iterations]; `more` covers the whole global batch."""
    replicas, program, runner = _joint_program(plan, cost)
    typical = _by_op(program, runner, [stage_seconds(replica, health, cost) for replica in replicas])
    slopes = [_chunk_seconds(replica, health, cost.seconds_per_square) for replica in replicas]
    own = more[:, [index for replica in replicas for index in replica.micro_batches]]
    durations = typical + _by_op(program, runner, slopes) * own[:, np.newaxis, np.newaxis]
    return joint_makespans(program, durations, _joint_transfers(replicas, program, runner, health, cost))


def timeline_of(replica: Replica, health: Health, cost: JobCost) -> Timeline:
    """When each op of a replica that shares nothing runs."""
    return GroupRun((with_layers(replica, cost.model),), health, health, cost).timeline()


def migrating(plan: ParallelPlan) -> tuple[int, ...]:
    """The replicas that take part in migrations; none of them can be simulated alone."""
    owner = {index: number for number, replica in enumerate(plan.replicas) for index in replica.micro_batches}
    return tuple(sorted({number for moved in plan.migrations for number in (owner[moved.micro_batch], moved.replica)}))


def joint_timeline(plan: ParallelPlan, health: Health, cost: JobCost) -> JointTimeline:
    """When each op of the replicas that take part in migrations runs; see `pipeline.planned.joint_program_of`."""
    replicas, program, runner = _joint_program(plan, cost)
    durations = _by_op(program, runner, [stage_seconds(replica, health, cost) for replica in replicas])
    return simulate_joint(program, durations, _joint_transfers(replicas, program, runner, health, cost))


def _joint_program(plan: ParallelPlan, cost: JobCost) -> tuple[list[Replica], JointProgram, Integers]:
    """The replicas that take part in migrations, their program, and which replica runs each row of its `flat`."""
    replicas = [with_layers(plan.replicas[number], cost.model) for number in migrating(plan)]
    program = joint_program_of(replicas)
    number_of_stage = np.repeat(np.arange(len(replicas)), [len(replica.stages) for replica in replicas])
    return replicas, program, number_of_stage[program.device]


def _by_op(program: JointProgram, runner: Integers, by_chunk: Sequence[Array]) -> Array:
    """Gather a value for each op from its runner's [3, chunks], as an array of the program's shape."""
    kind, chunk, micro_batch = program.flat.T
    found = np.zeros(program.shape)
    for number, own in enumerate(by_chunk):
        rows = runner == number
        found[kind[rows], chunk[rows], micro_batch[rows]] = own[kind[rows], chunk[rows]]
    return found


def _joint_transfers(
    replicas: Sequence[Replica], program: JointProgram, runner: Integers, health: Health, cost: JobCost
) -> Array:
    """Seconds of each transfer, [2, chunks − 1, micro-batches]."""
    _, chunk_of_op, micro_batch_of_op = program.flat.T
    executor = np.zeros((program.stages, program.micro_batches), np.int64)
    executor[chunk_of_op, micro_batch_of_op] = runner
    seconds = np.zeros((len(executor) - 1, executor.shape[1]))
    for chunk in range(len(seconds)):
        pairs, which = np.unique(executor[chunk : chunk + 2], axis=1, return_inverse=True)
        each = [
            _transfer(_members(replicas[sender], chunk), _members(replicas[receiver], chunk + 1), health, cost)
            for sender, receiver in pairs.T
        ]
        seconds[chunk] = np.array(each)[which.ravel()]
    return np.broadcast_to(seconds, (2, *seconds.shape))


def _members(replica: Replica, chunk: int) -> tuple[int, ...]:
    """Workers that run a chunk; empty if the replica has no such chunk."""
    return replica.stages[replica.chunks[chunk].stage] if chunk < len(replica.chunks) else ()


def _transfer(sender: tuple[int, ...], receiver: tuple[int, ...], health: Health, cost: JobCost) -> float:
    """Seconds of one transfer; 0 if either side is empty, so that nothing is sent."""
    if not (sender and receiver):
        return 0.0
    return cost.transfer(len(sender), len(receiver)) / health.between(sender, receiver)


def stage_seconds(replica: Replica, health: Health, cost: JobCost) -> Array:
    """Seconds of each op of one micro-batch, [3 (F, B, W), chunks]; B is the whole backward unless it is split.

    A stage is as fast as its slowest member. A stage without members, whose work is migrated, takes 0 seconds.
    """
    return _chunk_seconds(replica, health, cost.seconds)


def _chunk_seconds(replica: Replica, health: Health, layer_seconds: Callable[[int], Array]) -> Array:
    """`stage_seconds` from a function that gives [3, layers] for groups of a degree."""
    seconds = np.zeros((len(OpKind), len(replica.chunks)))
    for number, chunk in enumerate(replica.chunks):
        members = replica.stages[chunk.stage]
        if not members:
            continue
        speed = min(health.speed[worker] for worker in members)
        seconds[:, number] = layer_seconds(len(members))[:, chunk.first : chunk.end].sum(axis=1) / speed
    if not (replica.schedule and replica.schedule.splits_backward):
        seconds[B] += seconds[W]
        seconds[W] = 0.0
    return seconds


def transfer_seconds(replica: Replica, health: Health, cost: JobCost) -> Array:
    """Seconds of each transfer, [2, chunks − 1, 1]."""
    groups = [replica.stages[chunk.stage] for chunk in replica.chunks]
    seconds = [_transfer(sender, receiver, health, cost) for sender, receiver in pairwise(groups)]
    return np.broadcast_to(np.array(seconds)[:, np.newaxis], (2, len(seconds), 1))
