# SPDX-License-Identifier: Apache-2.0
"""All events that this version knows, by name, in the order of docs/events.md.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from megatron_resihp.events import detection, epochs, injections, job, replanning, training, workers
from megatron_resihp.events.event import Event

_ALL: Final[tuple[type[Event], ...]] = (
    job.RunStarted,
    job.Job,
    epochs.EpochStarted,
    training.Iteration,
    training.Agreed,
    training.Samples,
    workers.WorkerStarted,
    workers.WorkerDead,
    workers.WorkerFailed,
    replanning.PlanFailed,
    workers.WorkerRestarted,
    workers.WorkerWaiting,
    job.Exposed,
    workers.NodeLeft,
    workers.WorkersLeft,
    epochs.EpochBroken,
    epochs.Phase,
    epochs.Recovery,
    replanning.PlanChange,
    replanning.ChangeRefused,
    epochs.Reconfiguration,
    replanning.ChangeMeasured,
    job.Model,
    replanning.Planned,
    replanning.WouldChange,
    replanning.Proposal,
    replanning.NoPlan,
    replanning.PolicyFailed,
    epochs.FirstStep,
    injections.Drill,
    injections.DrillSet,
    injections.DrillRefused,
    training.ExpertLoads,
    training.Emulation,
    training.OptimizerCopy,
    workers.Resources,
    training.Digest,
    training.Checkpoint,
    training.EmergencyCheckpoint,
    job.BatchGrown,
    job.CoordinatorReplaced,
    job.Stall,
    detection.Verdict,
    detection.Suspicion,
    detection.Validation,
    detection.Notice,
    detection.DetectionResumed,
    detection.Detection,
    detection.DetectionFailed,
    workers.LinkFailed,
    job.MessageDropped,
    job.LogGap,
    job.LogFailed,
    job.RunFinished,
)
EVENTS: Final[Mapping[str, type[Event]]] = {each.name: each for each in _ALL}
