# SPDX-License-Identifier: Apache-2.0
"""What the coordinator decides once, under keys that are not written again: plans, their start, and the job's end.

May import this package's other modules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from megatron_resihp.plan import ParallelPlan, Shard
from megatron_resihp.protocol.records import Commit
from megatron_resihp.protocol.values import Epoch, ExitCode, Natural, Port, Seconds, Worker
from megatron_resihp.protocol.wire import Kinds

Shards = tuple[Shard, ...]
"""What the coordinator computes has no bounds: no worker may refuse an order to save."""


@dataclass(frozen=True)
class EpochPlan:
    """A plan with the commit that it starts from, and what each member holds, current to that commit.

    Attributes:
        groups_of_change: number of the change for which all members have made this plan's groups ahead; None: not all.
        leaving: workers that were in the epoch before and leave the job in order.
        on_trial: whether another plan follows if the first step fails.
        copied: of whose experts members keep a copy, current to that commit, as what their owners hold.
    """

    epoch: Epoch
    plan: ParallelPlan
    commit: Commit | None
    held: dict[Worker, Shards] = field(default_factory=dict)
    groups_of_change: Natural | None = None
    leaving: tuple[Worker, ...] = ()
    on_trial: bool = False
    copied: dict[Worker, Shards] = field(default_factory=dict)


@dataclass(frozen=True)
class EmergencyCheckpointOrder:
    """No plan fits: holders of state write it down, and the job ends.

    Attributes:
        reason: why there is no plan.
        writers: what each of them writes.
        missing: shards that no survivor holds.
        entire: whether each of them writes all that it holds.
    """

    epoch: Epoch
    reason: str
    commit: Commit | None
    writers: dict[Worker, Shards]
    missing: Shards
    entire: bool = False

    def part_of(self, worker: int) -> Shards:
        """What a worker writes."""
        return self.writers.get(worker, ())


Decision = EpochPlan | EmergencyCheckpointOrder
DECISIONS = Kinds[Decision](get_args(Decision), "a plan")
"""One for each epoch."""


@dataclass(frozen=True)
class Go:
    """Every member is ready: training goes on. `ports`: where the members' gloo groups listen."""

    epoch: Epoch
    ports: tuple[Port, ...]


GO = Kinds[Go]([Go], "a go")
"""One for each epoch that begins."""


@dataclass(frozen=True)
class JobEnd:
    """The job is over, for agents.

    Attributes:
        grace_s: how long workers have to exit by themselves.
        members: those that have a part in the job's end, all others are ended at once; None: all have.
        terminate_s: from SIGTERM, which comes then, to SIGKILL; None: as usual.
    """

    code: ExitCode
    reason: str
    grace_s: Seconds
    members: tuple[Worker, ...] | None = None
    terminate_s: Seconds | None = None


END = Kinds[JobEnd]([JobEnd], "an end")
