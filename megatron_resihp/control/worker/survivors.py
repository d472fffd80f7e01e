# SPDX-License-Identifier: Apache-2.0
"""What workers that have lost the coordinator agree on, to save one state between them. Pure.

Each tells in a file of the run directory how far it got and what it holds. The first one that decides binds all: it
takes the last iteration that counts from the records, as the coordinator would. May import `plan` and this package's
`record` and `inventory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product

from megatron_resihp.control.coordination.record import NoCommitError, resolve
from megatron_resihp.control.replanning.recovery.inventory import each_writes_all, written_once
from megatron_resihp.plan import Coordinate, Shard
from megatron_resihp.protocol.records import Commit, IterationPhase, Record, Times


@dataclass(frozen=True)
class Standing:
    """How far one survivor has got, and what it holds.

    Attributes:
        held: complete and current to its record.
        in_parts: it holds parts of the optimizer's state that others don't.
        times: at the start of the iterations that its record has counters of.
    """

    record: Record
    held: tuple[Shard, ...]
    in_parts: bool = False
    times: Times = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What is saved, and by which workers.

    Attributes:
        commit: what all that save have to be at.
        told: the workers whose reports it was made from.
        writers: what of it each of them writes.
        directory: below the run directory.
        entire: whether each of them writes all that it holds.
    """

    commit: Commit
    told: tuple[int, ...]
    writers: dict[int, tuple[Shard, ...]]
    directory: str
    entire: bool = False


def decide(told: Mapping[int, Standing], directory: str) -> Decision:
    """Where several hold the same, the lowest worker id writes.

    Raises:
        NoCommitError: no worker knows the counters, or what was agreed on.
    """
    commit = resolve((one.record for one in told.values()), times=[one.times for one in told.values()])
    if commit.replay and commit.outcome is None:
        raise NoCommitError(f"no survivor knows what was agreed on for iteration {commit.iteration}")
    held = {worker: one.held for worker, one in told.items() if one.held and can_be_at(one.record, commit)}
    in_parts = any(standing.in_parts for standing in told.values())
    writers = held if in_parts else written_once(held)
    return Decision(commit, tuple(sorted(told)), writers, directory, each_writes_all(writers, held))


def can_be_at(record: Record, commit: Commit) -> bool:
    """Whether a worker with this record has the state of the committed iteration, or has it after the recorded step."""
    if record.iteration == commit.iteration:
        return record.stage is not IterationPhase.COMPUTE
    return record.iteration == commit.iteration + 1 and record.applied == commit.iteration


def part_of(worker: int, own: Standing, decision: Decision) -> tuple[Shard, ...] | None:
    """What a worker writes of what was decided on; None: it can't, its state is that of another iteration.

    A worker that came too late for the decision writes all it has: the same state twice does no harm.
    """
    if not can_be_at(own.record, decision.commit):
        return None
    return decision.writers.get(worker, ()) if worker in decision.told else own.held


def awaited(members: Iterable[int], head: frozenset[int], me: int) -> frozenset[int]:
    """The workers that may still report. `head`: those on the coordinator's node, which has died with its workers
    unless this worker is there."""
    rest = frozenset(members) | {me}
    return rest if me in head else rest - head


def missing(saved: Iterable[Coordinate], stages: int, tensor_parallel: int) -> list[Coordinate]:
    """The shards of the job's own layout that have not been saved."""
    everything = (Coordinate(stage, rank) for stage, rank in product(range(stages), range(tensor_parallel)))
    return sorted(set(everything) - set(saved))
