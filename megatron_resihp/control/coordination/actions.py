# SPDX-License-Identifier: Apache-2.0
"""What the coordinator decides: the actions that `membership` returns and `coordinator` carries out, as plain values.

What is published for all (`protocol.published`), and what of Megatron's log is to be written (`protocol.logs`), is an
action as it is. May import `coding`, `plan`, `protocol` and `events`.
"""

from dataclasses import dataclass
from enum import Enum

from megatron_resihp.coding import omitted_if
from megatron_resihp.events.event import Event
from megatron_resihp.protocol.answers import Answer
from megatron_resihp.protocol.logs import LogPage, LogsWanted
from megatron_resihp.protocol.notices import Notice
from megatron_resihp.protocol.published import EmergencyCheckpointOrder, EpochPlan, Go


class Phase(Enum):
    STARTING = "starting"
    """Workers set up. A death ends the job, because there is nothing to recover yet."""
    BUILDING = "building"
    """A plan is published, its members build groups, move state and report ready."""
    RUNNING = "running"
    REPORTING = "waiting for survivors' reports"
    """The epoch is broken, or left by choice; living members report their records."""
    SAVING = "saving"
    """No plan exists; survivors write what they hold."""
    ENDED = "ended"


@dataclass(frozen=True)
class Notify:
    """Tell every worker."""

    notice: Notice


@dataclass(frozen=True)
class Reply:
    """Answer a request. `key`: where it is looked for."""

    key: str
    answer: Answer


@dataclass(frozen=True)
class Reopen:
    """A node that was lost may come back, or one that was never there may join, with workers of these ids."""

    node: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class AskDown:
    """Ask the cluster's manager, if there is one, which of these nodes are down; `NodesDown` is its answer."""

    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Log:
    event: Event


@dataclass(frozen=True)
class End:
    """The job is over. `at_once`: workers are told by a signal, because nothing else reaches them."""

    code: int
    reason: str
    at_once: bool = False


Action = (
    EpochPlan | EmergencyCheckpointOrder | Go | Notify | Reply | Reopen | AskDown | Log | LogsWanted | LogPage | End
)


@dataclass(frozen=True)
class Limits:
    """Bounds of waiting, in seconds, and of trying.

    Attributes:
        report_s: living workers that do not report this long after an epoch broke are given up for dead.
        leave_s: workers that leave an epoch by choice wait this long for the others, which may still evaluate and save
            after the same step; then the epoch is broken after all.
        build_s: a new epoch whose members are not all ready this long after its plan was published is broken.
        save_s: how long survivors may write what they hold when no plan exists.
        recoveries_per_iteration: more recoveries than this without a step between them end the job.
        min_workers: fewer survivors than these end it.
        word_s: how long word of lost members is waited for, if too few are accounted for.
        drain_s: workers that were told to leave, and are still in the plan this long after, are given up for dead.
        replaceable: the loss of the coordinator need not end the job, as another may take its place.
    """

    report_s: float = 60.0
    leave_s: float = 600.0
    build_s: float = 600.0
    save_s: float = 600.0
    recoveries_per_iteration: int = 8
    min_workers: int = 1
    word_s: float = 20.0
    drain_s: float = 20.0
    replaceable: bool = omitted_if(False)
