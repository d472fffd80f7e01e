"""What the coordinator decides: the actions that `membership` returns and `coordinator` carries out, as plain values.

May import `plan` and `control.record`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron_resihp.plan import ParallelPlan, Shard
from megatron_resihp.protocol.answers import Answer
from megatron_resihp.protocol.records import Commit


class Phase(Enum):
    STARTING = "starting"
    """Workers set up; a death now ends the job, there is nothing to recover yet."""
    BUILDING = "building"
    """A plan is published, its members build groups, move state and report ready."""
    RUNNING = "running"
    MUSTERING = "mustering"
    """The epoch is broken, or left by choice; living members report their records."""
    SALVAGING = "salvaging"
    """No plan exists; survivors write what they hold."""
    ENDED = "ended"


@dataclass(frozen=True)
class PublishPlan:
    """A plan with the commit that it starts from, and what each member holds, current to that commit.

    Attributes:
        groups_of_change: number of the change for which all members have made this plan's groups ahead; None: not all.
        leaving: who was in the epoch before and leaves the job in order.
        on_trial: whether another plan follows if the first step fails; see `control.first_step`.
    """

    epoch: int
    plan: ParallelPlan
    commit: Commit | None
    held: dict[int, tuple[Shard, ...]]
    groups_of_change: int | None = None
    leaving: tuple[int, ...] = ()
    on_trial: bool = False


@dataclass(frozen=True)
class OrderSalvage:
    """No plan fits: holders of state write it down (`writers`: worker → its part) and the job ends."""

    epoch: int
    reason: str
    commit: Commit | None
    writers: dict[int, tuple[Shard, ...]]
    missing: tuple[Shard, ...]


@dataclass(frozen=True)
class Go:
    """Every member is ready: training goes on. `ports`: where the members' gloo groups listen."""

    epoch: int
    ports: tuple[int, ...]


@dataclass(frozen=True)
class Notify:
    """Tell every worker."""

    notice: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """Tell who waits for an answer. `key`: where it is looked for."""

    key: str
    answer: Answer


@dataclass(frozen=True)
class Reopen:
    """A node that was lost may come back, or one that was never there may join, with workers of these ids."""

    node: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Log:
    event: dict[str, Any]


@dataclass(frozen=True)
class End:
    """The job is over. `at_once`: workers are told by a signal, as nothing else reaches them."""

    code: int
    reason: str
    at_once: bool = False


Action = PublishPlan | OrderSalvage | Go | Notify | Reply | Reopen | Log | End


@dataclass(frozen=True)
class Limits:
    """Bounds of waiting, in seconds, and of trying.

    Attributes:
        muster_s: living workers that do not report this long after an epoch broke are given up for dead.
        leave_s: workers that leave an epoch by choice wait this long for the others, which may still evaluate and save
            after the same step; then the epoch is broken after all.
        build_s: a new epoch whose members are not all ready this long after its plan was published is broken.
        salvage_s: how long survivors may write what they hold when no plan exists.
        recoveries_per_iteration: more recoveries than this without a step between them end the job.
    """

    muster_s: float = 60.0
    leave_s: float = 600.0
    build_s: float = 600.0
    salvage_s: float = 600.0
    recoveries_per_iteration: int = 8
