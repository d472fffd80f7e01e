# SPDX-License-Identifier: Apache-2.0
"""The parts of a plan: coordinates, shards, migrations and replicas. May import `coding`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from megatron_resihp.coding import FILE, Form, decode, encode, omitted_if
from megatron_resihp.plan.layers import Chunk
from megatron_resihp.plan.schedule import Schedule


class Coordinate(NamedTuple):
    """The shard of the model that a worker holds, in the layout of the plan's first replica."""

    stage: int
    tp_rank: int


class Shard(NamedTuple):
    """A worker's share of some layers, in any layout.

    Attributes:
        first, end: layers first, …, end − 1.
        tp_rank, tp_degree: which tensor-parallel share of each layer, and how many there are.
        expert_rank, expert_degree: which share of each layer's experts, and how many there are. What is no expert's is
            in all of them.
        expert_members: how many members in a row of its stage have a cut each of the same experts; the next ones have
            others of its share. 0: all members have.
        uneven_experts: how many experts each layer has, where shares are unequal (`plan.experts`); 0: they are equal.
    """

    first: int
    end: int
    tp_rank: int
    tp_degree: int
    expert_rank: int = 0
    expert_degree: int = 1
    expert_members: int = 0
    uneven_experts: int = 0


class ExpertPart(NamedTuple):
    """What a shard has of each layer's experts.

    Attributes:
        rank, degree: which share, and how many there are.
        cut, cuts: which part of each of its experts, and of how many.
    """

    rank: int
    degree: int
    cut: int
    cuts: int


def experts_of(shard: Shard) -> ExpertPart:
    """A shard's part of the experts, however the members of its stage share them."""
    members = shard.expert_members or shard.tp_degree
    groups = shard.tp_degree // members
    rank = shard.expert_rank * groups + shard.tp_rank // members
    return ExpertPart(rank, shard.expert_degree * groups, shard.tp_rank % members, members)


def shards_at(
    chunks: Sequence[Chunk], coordinate: Coordinate, degree: int, experts: tuple[int, ...] = (0, 1)
) -> tuple[Shard, ...]:
    """The shards at a coordinate: its share, of `degree`, of each chunk of its stage that has layers.

    Args:
        experts: the last attributes of a `Shard`, from `expert_rank` on.
    """
    return tuple(
        Shard(chunk.first, chunk.end, coordinate.tp_rank, degree, *experts)
        for chunk in chunks
        if chunk.stage == coordinate.stage and chunk.end > chunk.first
    )


class Migration(NamedTuple):
    """A stage's work for one micro-batch that is done in another replica (ResiHP, arXiv 2605.06374, Algorithm 1).

    Attributes:
        micro_batch: index in the global batch.
        chunk: index of the chunk, the same in both replicas; all its ops for this micro-batch move.
        replica: index of the replica that runs it instead of the micro-batch's own replica.
    """

    micro_batch: int
    chunk: int
    replica: int


def _plain_kept(kept: "Kept") -> list[Any] | None:
    if kept is None:
        return None
    return list(kept) if isinstance(kept, Coordinate) else [encode(shard) for shard in kept]


def _kept_of(value: Any) -> "Kept":
    rows = isinstance(value, list) and value and isinstance(value[0], list)
    kept: Kept = None if value is None else decode(tuple[Shard, ...] if rows else Coordinate, value, FILE)
    return kept


Kept = Coordinate | tuple[Shard, ...] | None
"""What a standby holds and keeps current."""
WrittenKept = Annotated[Kept, Form(_plain_kept, _kept_of)]
"""In JSON, a coordinate is one row, and shards are several rows."""


@dataclass(frozen=True)
class Replica:
    """One data-parallel copy of the model.

    Attributes:
        stages: worker ids of the tensor-parallel members of each pipeline stage, in tensor-parallel order. A stage may
            lack members if all its work is migrated.
        micro_batches: indices of the micro-batches of each global batch that this replica runs, in order.
        chunks: which layers the stages run; empty for the job's own split, one chunk for each stage.
        schedule: the order of ops; None for the job's own.
    """

    stages: tuple[tuple[int, ...], ...]
    micro_batches: tuple[int, ...]
    chunks: tuple[Chunk, ...] = omitted_if(())
    schedule: Schedule | None = omitted_if(None)

    def workers(self) -> Iterator[tuple[int, Coordinate]]:
        for stage, members in enumerate(self.stages):
            for tp_rank, worker in enumerate(members):
                yield worker, Coordinate(stage, tp_rank)

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor-parallel degree of each stage."""
        return tuple(map(len, self.stages))

    @property
    def stage_of_chunk(self) -> tuple[int, ...]:
        """For each chunk, the stage that holds it."""
        return tuple(chunk.stage for chunk in self.chunks) or tuple(range(len(self.stages)))
