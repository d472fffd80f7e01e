"""The parallel plan of one epoch: replicas, stages, tensor-parallel members, micro-batches, standbys.

Imports only the standard library, so that planning answers on a laptop in a second.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class PlanError(ValueError):
    """A plan that breaks a rule; the message names the rule."""


class Coordinate(NamedTuple):
    """Which shard of the model a worker holds."""

    stage: int
    tp_rank: int


@dataclass(frozen=True)
class Replica:
    """One data-parallel copy of the model.

    Attributes:
        stages: worker ids of the tensor-parallel members of each pipeline stage, in tensor-parallel order.
        micro_batches: indices of the micro-batches of each global batch that this replica runs, in order.
    """

    stages: tuple[tuple[int, ...], ...]
    micro_batches: tuple[int, ...]

    def workers(self) -> Iterator[tuple[int, Coordinate]]:
        for stage, members in enumerate(self.stages):
            for tp_rank, worker in enumerate(members):
                yield worker, Coordinate(stage, tp_rank)


@dataclass(frozen=True)
class ParallelPlan:
    """Who does what in an epoch.

    Attributes:
        replicas: the working part; at this stage all replicas have the same stages and tensor-parallel degree.
        standbys: live workers without work, each with the shard that it holds and keeps current (None: it holds none).

    Raises:
        PlanError: on construction, if a worker appears twice, a micro-batch is missing or double, or replicas differ
            in shape.
    """

    replicas: tuple[Replica, ...]
    standbys: Mapping[int, Coordinate | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.replicas:
            raise PlanError("a plan needs at least one replica")
        shapes = {tuple(len(members) for members in replica.stages) for replica in self.replicas}
        if len(shapes) != 1 or len(set(next(iter(shapes)))) != 1:
            raise PlanError(f"replicas must have the same stages and tensor-parallel degree, got {sorted(shapes)}")
        seen: set[int] = set()
        for worker in [*self.working, *self.standbys]:
            if worker in seen:
                raise PlanError(f"worker {worker} appears twice")
            seen.add(worker)
        indices = sorted(index for replica in self.replicas for index in replica.micro_batches)
        if indices != list(range(len(indices))):
            raise PlanError(f"micro-batches must be 0..n-1, each in one replica, got {indices}")
        if any(not replica.micro_batches for replica in self.replicas):
            raise PlanError("every replica needs at least one micro-batch")

    @property
    def pipeline_parallel(self) -> int:
        return len(self.replicas[0].stages)

    @property
    def tensor_parallel(self) -> int:
        return len(self.replicas[0].stages[0])

    @property
    def working(self) -> tuple[int, ...]:
        """Worker ids that have work, replica by replica, stage by stage, in tensor-parallel order."""
        return tuple(worker for replica in self.replicas for worker, _ in replica.workers())

    @property
    def members(self) -> tuple[int, ...]:
        """All live workers of the epoch, sorted."""
        return tuple(sorted([*self.working, *self.standbys]))

    @property
    def micro_batch_count(self) -> int:
        return sum(len(replica.micro_batches) for replica in self.replicas)

    def coordinate_of(self, worker: int) -> Coordinate | None:
        """The shard that `worker` works on or keeps current."""
        for replica in self.replicas:
            for member, coordinate in replica.workers():
                if member == worker:
                    return coordinate
        return self.standbys.get(worker)

    def replica_of(self, worker: int) -> int | None:
        """Index of the replica that `worker` works in; None for a standby."""
        for index, replica in enumerate(self.replicas):
            if any(member == worker for member, _ in replica.workers()):
                return index
        return None

    def workers_at(self, coordinate: Coordinate) -> tuple[int, ...]:
        """The working holders of a shard, one per replica, in replica order."""
        return tuple(replica.stages[coordinate.stage][coordinate.tp_rank] for replica in self.replicas)

    def standbys_at(self, coordinate: Coordinate) -> tuple[int, ...]:
        """The standbys that keep a shard current, sorted."""
        return tuple(sorted(worker for worker, held in self.standbys.items() if held == coordinate))

    def holders_of(self, coordinate: Coordinate) -> tuple[int, ...]:
        return (*self.workers_at(coordinate), *self.standbys_at(coordinate))

    def coordinates(self) -> Iterator[Coordinate]:
        for stage in range(self.pipeline_parallel):
            for tp_rank in range(self.tensor_parallel):
                yield Coordinate(stage, tp_rank)

    def rank_order(self, pipeline_last: bool = True) -> tuple[int, ...]:
        """Worker ids in the order of torch ranks that makes Megatron's rank formula give this plan's coordinates.

        Args:
            pipeline_last: Megatron's default order 'tp-cp-ep-dp-pp'; False for `--use-tp-pp-dp-mapping`.
        """
        if pipeline_last:
            return tuple(
                worker
                for stage in range(self.pipeline_parallel)
                for replica in self.replicas
                for worker in replica.stages[stage]
            )
        return self.working

    def to_dict(self) -> dict[str, Any]:
        return {
            "replicas": [
                {"stages": [list(members) for members in replica.stages], "micro_batches": list(replica.micro_batches)}
                for replica in self.replicas
            ],
            "standbys": {str(worker): held and list(held) for worker, held in sorted(self.standbys.items())},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ParallelPlan":
        return cls(
            replicas=tuple(
                Replica(tuple(tuple(members) for members in item["stages"]), tuple(item["micro_batches"]))
                for item in data["replicas"]
            ),
            standbys={int(worker): held and Coordinate(*held) for worker, held in data["standbys"].items()},
        )

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ between any two plans."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
