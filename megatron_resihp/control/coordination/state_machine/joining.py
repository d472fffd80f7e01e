# SPDX-License-Identifier: Apache-2.0
"""Workers that were not there at the start: which wait for a plan, and which ids are used up.

Pure; imports `plan` and this package's other pure modules. A joining worker holds nothing, and nothing depends on it
until a plan with it has been run.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from megatron_resihp.control.job_size import JobSize
from megatron_resihp.plan import ParallelPlan, Shard
from megatron_resihp.plan.slots import node_of, slot_of

STARTS_UNHEARD = 8
"""How many starts in a slot may have failed without a word; each has used up an id."""


@dataclass
class JoiningWorkers:
    """The joining workers of one job.

    Attributes:
        size: of the job.
        waiting: workers that are ready, and in no plan yet.
        nodes: that have joined the job, and have been neither lost nor released. Their workers may all be dead.
    """

    size: JobSize
    waiting: set[int] = field(default_factory=set)
    nodes: set[int] = field(init=False)
    _latest: dict[int, int] = field(default_factory=dict)
    """Slot → the last worker that was started there, where it is not the first."""

    def __post_init__(self) -> None:
        self.nodes = set(range(self.size.nodes))

    def ready(self, worker: int) -> int:
        """A worker waits for a plan with it; returns its slot."""
        self.waiting.add(worker)
        self.nodes.add(self.node_of(worker))
        return self.heard_of(worker)

    def heard_of(self, worker: int) -> int:
        """A worker has been started; returns its slot."""
        slot = slot_of(worker, self.size.slots)
        self._latest[slot] = max(worker, self._latest.get(slot, slot))
        return slot

    def may_exist(self, worker: int) -> bool:
        """Whether some process may have this id by now."""
        slots = self.size.slots
        if worker < slots:
            return True
        slot = slot_of(worker, slots)
        return worker <= self._latest.get(slot, slot) + STARTS_UNHEARD * slots

    def has_never_run(self, worker: int, running: ParallelPlan | None) -> bool:
        """Whether it was not there at the start and is in no plan that has been run: the job does without it.

        Args:
            running: the plan that was run last.
        """
        return worker >= self.size.workers and (running is None or worker not in running.members)

    def held(self, members: Collection[int] | None = None) -> dict[int, tuple[Shard, ...]]:
        """What waiting workers hold; if members are given, only those among them."""
        return dict.fromkeys(self.waiting if members is None else self.waiting.intersection(members), ())

    def taken_in(self, plan: ParallelPlan) -> list[int]:
        """The workers that no longer wait, because this plan has been published."""
        joined = sorted(self.waiting.intersection(plan.members))
        self.waiting.difference_update(joined)
        return joined

    def node_of(self, worker: int) -> int:
        return node_of(worker, self.size.slots, self.size.workers_per_node)

    def ids_for(self, node: int) -> tuple[int, ...]:
        """Of workers that are to be started on a node, so that no id is used twice: they are used up,
        since a worker may end before it has said anything."""
        workers = [self._latest.get(slot, slot) + self.size.slots for slot in self.size.slots_on(node)]
        for worker in workers:
            self.heard_of(worker)
        return tuple(workers)
