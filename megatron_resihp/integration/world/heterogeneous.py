# SPDX-License-Identifier: Apache-2.0
"""What a worker knows of a plan that Megatron's own groups can't run: its chunks, its slices and how they are shared.

May import `plan`, `pipeline`'s schedules and `executor`; no torch of its own. Chunks are counted through the replica,
as in the plan; a worker's own ones in the order of their layers.
"""

from dataclasses import dataclass
from functools import cached_property

from megatron_resihp.plan import Chunk, Coordinate, ParallelPlan, Replica, Shard
from megatron_resihp.plan.slices import (
    Slice,
    all_shards,
    contributors_of,
    cuts_of,
    holders_of,
    slices_of,
)


@dataclass(frozen=True)
class Heterogeneous:
    """A heterogeneous plan, seen by one worker.

    Attributes:
        plan: says which layers each stage runs.
        worker: whose view it is.
        tied_head: number of the head's layer if it shares the word embeddings.
    """

    plan: ParallelPlan
    worker: int
    tied_head: int | None

    @cached_property
    def replica(self) -> int | None:
        return self.plan.replica_of(self.worker)

    @cached_property
    def coordinate(self) -> Coordinate:
        coordinate = self.plan.coordinate_of(self.worker)
        assert coordinate is not None and self.replica is not None, "a standby has no place in a replica"
        return coordinate

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks of this worker's replica."""
        assert self.replica is not None
        return self.plan.replicas[self.replica].chunks

    @cached_property
    def own_chunks(self) -> tuple[int, ...]:
        """Numbers of the chunks that this worker holds."""
        return tuple(number for number, chunk in enumerate(self.chunks) if chunk.stage == self.coordinate.stage)

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """Worker ids of this worker's tensor-parallel group, in order."""
        assert self.replica is not None
        return self.plan.replicas[self.replica].stages[self.coordinate.stage]

    @cached_property
    def rank_order(self) -> tuple[int, ...]:
        """Worker ids in the order of torch ranks.

        Megatron's last rank prints and logs, so it is `reporter`; and torch sorts the members of a group by rank, so
        tensor-parallel peers follow each other.
        """
        last = self._head_members
        return (*(worker for worker in self.plan.working if worker not in last), *last)

    @cached_property
    def reporter(self) -> int:
        """Who has the losses and writes the events of each iteration."""
        return self._head_members[-1]

    @cached_property
    def _head_members(self) -> tuple[int, ...]:
        """Of the first replica that runs the head itself, of those with members in all stages if there is one: these
        can evaluate for all without helpers."""
        running = [replica for replica in self.plan.replicas if _runs_head(replica)]
        complete = [replica for replica in running if all(replica.stages)]
        replica = (complete or running)[0]
        return replica.stages[replica.stage_of_chunk[-1]]

    @cached_property
    def evaluating(self) -> Replica:
        """The replica of `reporter` as it evaluates for all: with a helper's members for each stage that has none."""
        number = self.plan.replica_of(self.reporter)
        assert number is not None
        replica = self.plan.replicas[number]
        of_chunk = [
            replica.stages[stage] or self._helpers(replica, chunk) for chunk, stage in enumerate(replica.stage_of_chunk)
        ]
        members = tuple(dict.fromkeys(of_chunk))
        chunks = tuple(
            chunk._replace(stage=members.index(own)) for own, chunk in zip(of_chunk, replica.chunks, strict=True)
        )
        return Replica(members, replica.micro_batches, chunks)

    def _helpers(self, replica: Replica, chunk: int) -> tuple[int, ...]:
        """Who does in training what a stage without members would do."""
        helper = next(
            self.plan.replicas[migration.replica]
            for migration in self.plan.migrations
            if migration.chunk == chunk and migration.micro_batch in replica.micro_batches
        )
        return helper.stages[helper.stage_of_chunk[chunk]]

    @property
    def evaluates(self) -> bool:
        """Whether this worker has part in evaluations."""
        return any(self.worker in members for members in self.evaluating.stages)

    @property
    def has_head(self) -> bool:
        return self.replica is not None and len(self.chunks) - 1 in self.own_chunks

    @cached_property
    def shards(self) -> dict[int, tuple[Shard, ...]]:
        return all_shards(self.plan)

    @cached_property
    def cuts(self) -> int:
        return cuts_of(shard for shards in self.shards.values() for shard in shards)

    @cached_property
    def slices(self) -> frozenset[Slice]:
        """What this worker works on or keeps current."""
        return slices_of(self.shards[self.worker], self.cuts, self.tied_head)

    @cached_property
    def holders(self) -> dict[Slice, tuple[int, ...]]:
        return holders_of(self.shards, self.cuts, self.tied_head)

    @cached_property
    def contributors(self) -> dict[Slice, tuple[int, ...]]:
        return contributors_of(self.plan, self.cuts, self.tied_head)

    @cached_property
    def contributed(self) -> frozenset[Slice]:
        """Slices whose gradients on this worker count."""
        return frozenset(piece for piece, workers in self.contributors.items() if self.worker in workers)

    @cached_property
    def counted(self) -> frozenset[Slice]:
        """Slices that this worker counts in the gradient's norm: each one is counted by exactly one worker."""
        return frozenset(piece for piece, workers in self.contributors.items() if self.worker == workers[0])


def _runs_head(replica: Replica) -> bool:
    """Whether any micro-batch goes through its head; another replica's may do all of its work."""
    if replica.schedule is None or not replica.schedule.orders:
        return bool(replica.stages[replica.stage_of_chunk[-1]])
    return any(op.chunk == len(replica.chunks) - 1 for order in replica.schedule.orders for op in order)
