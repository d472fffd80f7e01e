# SPDX-License-Identifier: Apache-2.0
"""What the coordinator tells every worker and agent, in order.

`control.worker.client` and `control.node.link` hear them. May import this package's other modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, get_args

from megatron_resihp.plan import ParallelPlan
from megatron_resihp.protocol.values import Epoch, ExitCode, Finite, Natural, Positive, Signal, Worker
from megatron_resihp.protocol.wire import Kinds

GEMM_REPEATS: Final = 20


@dataclass(frozen=True)
class EpochIsBroken:
    """The epoch is over: abort its groups, and report.

    Attributes:
        probe: find out first which workers can be reached; not after a death, which must not wait for that.
    """

    epoch: Epoch
    cause: str
    probe: bool = False


@dataclass(frozen=True)
class StopTraining:
    """End in order after an iteration, as the signal asks."""

    signal: Signal


@dataclass(frozen=True)
class OthersFinish:
    """To workers that reported a failed collective: the others left because they are done. Wait for the end."""


@dataclass(frozen=True)
class JobEnds:
    """The job is over."""

    code: ExitCode
    reason: str


@dataclass(frozen=True)
class SlownessChanged:
    """All slowdowns that are injected now.

    Attributes:
        by_agents: agents carry them out, as workers can't.
        speeds: (worker, factor) each.
        links: (worker, worker, factor of its bandwidth) each.
    """

    by_agents: bool
    speeds: tuple[tuple[Worker, Finite], ...] = ()
    links: tuple[tuple[Worker, Worker, Finite], ...] = ()


@dataclass(frozen=True)
class MatrixProduct:
    """Each of `workers` multiplies an [m, k] by a [k, n] matrix in the training's dtype, so many times."""

    workers: tuple[Worker, ...]
    m: Positive
    n: Positive
    k: Positive
    repeats: Positive = GEMM_REPEATS


@dataclass(frozen=True)
class ValidationOrder:
    """Suspects are to measure, between two iterations of this epoch.

    Attributes:
        number: of validations, from 1.
    """

    number: Positive
    epoch: Epoch
    gemms: tuple[MatrixProduct, ...]


@dataclass(frozen=True)
class PlanChange:
    """All leave this epoch after the same step, for this plan.

    Attributes:
        number: of changes, from 1.
    """

    number: Positive
    epoch: Epoch
    plan: ParallelPlan


@dataclass(frozen=True)
class WorkersTakenIn:
    """Workers that waited for a place have one in the plan of this epoch."""

    epoch: Epoch
    workers: tuple[Worker, ...]


@dataclass(frozen=True)
class WorkersGivenUp:
    """Workers count as dead, whatever their processes do. `for_good`: none are started in their slots."""

    workers: tuple[Worker, ...]
    reason: str
    for_good: bool = False


@dataclass(frozen=True)
class WorkerDismissed:
    """A worker that waited for a place gets none."""

    worker: Worker
    reason: str


@dataclass(frozen=True)
class NodeReleased:
    """A node that was to leave may: no plan has work for its workers. `agent`: the name of its agent."""

    agent: Natural
    workers: tuple[Worker, ...]


@dataclass(frozen=True)
class DrainOrder:
    """The agents of these workers are to ask for their nodes to leave. A later agent of such a node has others."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True)
class SaveOrder:
    """A checkpoint is to be written after the next iteration; `number` counts such orders from 1."""

    number: Positive


@dataclass(frozen=True)
class NoticesForgotten:
    """Stands for notices that mean nothing any more; the next one has the number `next`."""

    next: Positive


Notice = (
    EpochIsBroken | StopTraining | OthersFinish | JobEnds | SlownessChanged | ValidationOrder | PlanChange
    | WorkersTakenIn | WorkersGivenUp | WorkerDismissed | NodeReleased | DrainOrder | SaveOrder | NoticesForgotten
)  # fmt: skip
NOTICES = Kinds[Notice](get_args(Notice), "a notice")
"""From the coordinator."""
ABOUT_AN_EPOCH: Final = (EpochIsBroken, OthersFinish, PlanChange, ValidationOrder, WorkersTakenIn)
"""Notices that nobody needs after it."""
LAST_HOLDS: Final = (SaveOrder, SlownessChanged)
"""Notices of which the last one says all."""
