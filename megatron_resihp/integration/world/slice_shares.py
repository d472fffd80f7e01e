# SPDX-License-Identifier: Apache-2.0
"""Which slices a worker holds under a heterogeneous plan, and whose gradients of them count. May import `plan` only."""

from dataclasses import dataclass
from functools import cached_property

from megatron_resihp.plan import ParallelPlan, Shard
from megatron_resihp.plan.slices import Slice, all_shards, contributors_of, cuts_of, holders_of, slices_of


@dataclass(frozen=True)
class SliceShares:
    """A plan's slices, seen by one worker.

    Attributes:
        plan: says which layers each stage runs.
        worker: whose view it is.
        tied_head: number of the head's layer if it has the word embeddings, too.
    """

    plan: ParallelPlan
    worker: int
    tied_head: int | None

    @cached_property
    def shards(self) -> dict[int, tuple[Shard, ...]]:
        """What each worker holds."""
        return all_shards(self.plan)

    @cached_property
    def own(self) -> tuple[Shard, ...]:
        """What this worker holds, chunk by chunk."""
        return self.shards[self.worker]

    @cached_property
    def cuts(self) -> int:
        """Into how many cuts layers are thought."""
        return cuts_of(shard for shards in self.shards.values() for shard in shards)

    @cached_property
    def slices(self) -> frozenset[Slice]:
        """What this worker works on or keeps current."""
        return slices_of(self.own, self.cuts, self.tied_head)

    @cached_property
    def holders(self) -> dict[Slice, tuple[int, ...]]:
        """The workers that hold each slice."""
        return holders_of(self.shards, self.cuts, self.tied_head)

    @cached_property
    def contributors(self) -> dict[Slice, tuple[int, ...]]:
        """The workers whose gradients of each slice count."""
        return contributors_of(self.plan, self.cuts, self.tied_head)

    @cached_property
    def contributed(self) -> frozenset[Slice]:
        """Slices whose gradients on this worker count."""
        return frozenset(piece for piece, workers in self.contributors.items() if self.worker in workers)

    @cached_property
    def counted(self) -> frozenset[Slice]:
        """Slices that this worker counts in the gradient's norm: each one is counted by exactly one worker."""
        return frozenset(piece for piece, workers in self.contributors.items() if self.worker == workers[0])
