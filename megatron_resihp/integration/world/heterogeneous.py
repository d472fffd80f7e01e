# SPDX-License-Identifier: Apache-2.0
"""What a worker is under a plan that Megatron's own groups can't run: its chunks, its peers, and what it evaluates.

May import `plan` and `pipeline`; no torch of its own. Chunks are counted through the replica, as in the plan; a
worker's own ones in the order of their layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from megatron_resihp.integration.world.slice_shares import SliceShares
from megatron_resihp.integration.world.view import View
from megatron_resihp.pipeline.orders import orders_of
from megatron_resihp.plan import Chunk, Coordinate, ParallelPlan, Replica


@dataclass(frozen=True)
class HeterogeneousView(View):
    """A heterogeneous plan, which says the layers of each stage, seen by one worker.

    Attributes:
        tied_head: number of the head's layer if it has the word embeddings, too.
    """

    tied_head: int | None

    @cached_property
    def shares(self) -> SliceShares:
        """The slices that it holds."""
        return SliceShares(self.plan, self.worker, self.tied_head)

    @cached_property
    def coordinate(self) -> Coordinate:
        """This worker's place in its replica."""
        coordinate = self.plan.coordinate_of(self.worker)
        assert coordinate is not None and self.works, "a standby has no place in a replica"
        return coordinate

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks of this worker's replica."""
        return self.plan.replicas[self.replica].chunks

    @cached_property
    def own_chunks(self) -> tuple[int, ...]:
        """Numbers of the chunks that this worker holds."""
        return tuple(number for number, chunk in enumerate(self.chunks) if chunk.stage == self.coordinate.stage)

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """Worker ids of this worker's tensor-parallel group, in order."""
        return self.plan.replicas[self.replica].stages[self.coordinate.stage]

    @cached_property
    def rank_order(self) -> tuple[int, ...]:
        """Worker ids in the order of torch ranks.

        Megatron's last rank prints and logs, so it is the one that reports; and torch sorts the members of a group by
        rank, so tensor-parallel peers follow each other.
        """
        last = self._head_members
        return (*(worker for worker in self.plan.working if worker not in last), *last)

    @cached_property
    def read_order(self) -> tuple[int, ...]:
        """In order of their first op, those of other replicas that were moved here included."""
        own = orders_of(self.plan.replicas[self.replica])[self.coordinate.stage]
        return tuple(dict.fromkeys(op.micro_batch for op in own if op.kind == "F"))

    def evaluation_order(self, count: int) -> Sequence[int]:
        own = [replica for replica in self.evaluation(count) if _is_in(replica, self.worker)]
        return own[0].micro_batches if own else ()

    @cached_property
    def numbering(self) -> tuple[int, ...]:
        """Ops name their micro-batch by its index."""
        return tuple(range(self.plan.micro_batch_count))

    @property
    def is_first_stage(self) -> bool:
        return self.works and 0 in self.own_chunks

    @property
    def is_last_stage(self) -> bool:
        return self.works and len(self.chunks) - 1 in self.own_chunks

    @property
    def reports(self) -> bool:
        return self.worker == self._head_members[-1]

    @cached_property
    def _head_members(self) -> tuple[int, ...]:
        """Of the first replica that evaluates."""
        return head_of(self._evaluating[0])

    @cached_property
    def _evaluating(self) -> tuple[Replica, ...]:
        """The replicas that evaluate: those that run the head themselves and have members in all stages. If there is
        none, one that runs the head, with helpers, does so for all."""
        running = [replica for replica in self.plan.replicas if _runs_head(replica)]
        complete = [replica for replica in running if all(replica.stages)]
        return tuple(with_helpers(self.plan, replica) for replica in complete or running[:1])

    def evaluation(self, count: int) -> tuple[Replica, ...]:
        """The replicas that evaluate `count` micro-batches, each with its own ones, as many as its speed asks for. The
        first one's last worker reports."""
        done, found = 0, []
        parts = list(accumulate(len(replica.micro_batches) for replica in self._evaluating))
        for replica, part in zip(self._evaluating, parts, strict=True):
            end = -(-count * part // parts[-1])  # rounded up, so the first one has some
            if done < end:
                found.append(replace(replica, micro_batches=tuple(range(done, end))))
            done = end
        return tuple(found)

    def evaluating_heads(self, count: int) -> tuple[int, ...]:
        """The workers that know losses of an evaluation of `count` micro-batches; sorted."""
        return tuple(sorted(worker for replica in self.evaluation(count) for worker in head_of(replica)))


def head_of(replica: Replica) -> tuple[int, ...]:
    """The members of the stage that has the head; a helper's do its work where there are none."""
    return replica.stages[replica.stage_of_chunk[-1]]


def _is_in(replica: Replica, worker: int) -> bool:
    return any(worker in members for members in replica.stages)


def with_helpers(plan: ParallelPlan, replica: Replica) -> Replica:
    """A replica with a helper's members for each stage that has none."""
    of_chunk = [
        replica.stages[stage] or _helpers(plan, replica, chunk) for chunk, stage in enumerate(replica.stage_of_chunk)
    ]
    members = tuple(dict.fromkeys(of_chunk))
    chunks = tuple(
        chunk._replace(stage=members.index(own)) for own, chunk in zip(of_chunk, replica.chunks, strict=True)
    )
    return Replica(members, replica.micro_batches, chunks)


def _helpers(plan: ParallelPlan, replica: Replica, chunk: int) -> tuple[int, ...]:
    """The workers that do in training what a stage without members would do."""
    helper = next(
        plan.replicas[migration.replica]
        for migration in plan.migrations
        if migration.chunk == chunk and migration.micro_batch in replica.micro_batches
    )
    return helper.stages[helper.stage_of_chunk[chunk]]


def _runs_head(replica: Replica) -> bool:
    """Whether any micro-batch goes through its head; another replica's may do all of its work."""
    if replica.schedule is None or not replica.schedule.orders:
        return bool(head_of(replica))
    return any(op.chunk == len(replica.chunks) - 1 for order in replica.schedule.orders for op in order)
