"""Workers that are started anew, as the coordinator knows them: who waits for a plan, and which ids are used up.

Pure; imports `plan`. A newcomer holds nothing, and nothing depends on it until a plan with it has been run.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from megatron_resihp.plan import ParallelPlan, Shard
from megatron_resihp.plan.places import node_of, place_of


@dataclass
class Newcomers:
    """Of a job that began with a worker in each of its places.

    Attributes:
        places: how many.
        workers_per_node: how many of them are on a node.
        waiting: who is ready, and in no plan yet.
    """

    places: int
    workers_per_node: int
    waiting: set[int] = field(default_factory=set)
    _latest: dict[int, int] = field(default_factory=dict)
    """Place → the last worker that was started there, where it is not the first."""

    def heard_of(self, worker: int) -> int:
        """It has been started; returns its place."""
        place = place_of(worker, self.places)
        self._latest[place] = max(worker, self._latest.get(place, place))
        return place

    def has_never_run(self, worker: int, running: ParallelPlan | None) -> bool:
        """Whether it was started anew and is in no plan that has been run: the job does without it.

        Args:
            running: the plan that was run last.
        """
        return worker >= self.places and (running is None or worker not in running.members)

    def held(self, members: Collection[int] | None = None) -> dict[int, tuple[Shard, ...]]:
        """What those that wait hold, of these members only if any are given."""
        return dict.fromkeys(self.waiting if members is None else self.waiting.intersection(members), ())

    def taken_in(self, plan: ParallelPlan) -> list[int]:
        """Who waits no more, because this plan has been published."""
        joined = sorted(self.waiting.intersection(plan.members))
        self.waiting.difference_update(joined)
        return joined

    def node_of(self, worker: int) -> int:
        return node_of(worker, self.places, self.workers_per_node)

    def ids_for(self, node: int) -> tuple[int, ...]:
        """Of workers that are to be started on a node, so that no id is used twice."""
        places = [place for place in range(self.places) if self.node_of(place) == node]
        return tuple(self._latest.get(place, place) + self.places for place in places)
