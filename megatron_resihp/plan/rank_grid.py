# SPDX-License-Identifier: Apache-2.0
"""The workers of a plan whose replicas have one shape, by coordinate and by torch rank.

May import this package's modules.
"""

from collections.abc import Iterator, Mapping, Sequence

from megatron_resihp.plan.errors import PlanError
from megatron_resihp.plan.replica import Coordinate, Kept, Replica


class RankGrid:
    """Replicas of one shape, and the standbys beside them.

    Args:
        context_parallel: how many consecutive replicas share each sequence.

    Attributes:
        pipeline_parallel: stages of each replica.

    Raises:
        PlanError: on construction, if replicas differ in shape.
    """

    def __init__(self, replicas: Sequence[Replica], standbys: Mapping[int, Kept], context_parallel: int = 1) -> None:
        shapes = {replica.shape for replica in replicas}
        if len(shapes) != 1:
            raise PlanError(f"replicas have different shapes: {sorted(shapes)}")
        [self._shape] = shapes
        self._replicas, self._standbys, self._context_parallel = replicas, standbys, context_parallel
        self.pipeline_parallel = len(self._shape)

    @property
    def tensor_parallel(self) -> int:
        """Members of each stage. Raises PlanError if stages differ."""
        if len(set(self._shape)) != 1:
            raise PlanError(f"stages have different tensor-parallel degrees: {self._shape}")
        return self._shape[0]

    def coordinates(self) -> Iterator[Coordinate]:
        """All coordinates. Raises PlanError if stages differ in tensor-parallel degree."""
        for stage in range(self.pipeline_parallel):
            for tp_rank in range(self.tensor_parallel):
                yield Coordinate(stage, tp_rank)

    def workers_at(self, coordinate: Coordinate) -> tuple[int, ...]:
        """The working holders of a shard, one per replica, in replica order."""
        return tuple(replica.stages[coordinate.stage][coordinate.tp_rank] for replica in self._replicas)

    def standbys_at(self, coordinate: Coordinate) -> tuple[int, ...]:
        """The standbys that keep a shard up to date, sorted."""
        return tuple(sorted(worker for worker, held in self._standbys.items() if held == coordinate))

    def holders_of(self, coordinate: Coordinate) -> tuple[int, ...]:
        """All workers that have a shard: working ones first."""
        return (*self.workers_at(coordinate), *self.standbys_at(coordinate))

    def rank_order(self, pipeline_last: bool = True) -> tuple[int, ...]:
        """Worker ids in the order of torch ranks for which Megatron's rank formula gives this plan's coordinates.

        Args:
            pipeline_last: Megatron's default order 'tp-cp-ep-dp-pp'; False for `--use-tp-pp-dp-mapping`.
        """
        places = [(stage, replica) for stage in range(self.pipeline_parallel) for replica in range(len(self._replicas))]
        # Those that share sequences come before stages in either order.
        order = places if pipeline_last else sorted(places, key=lambda at: (at[1] // self._context_parallel, at))
        return tuple(worker for stage, replica in order for worker in self._replicas[replica].stages[stage])
