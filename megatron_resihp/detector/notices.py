# SPDX-License-Identifier: Apache-2.0
"""Time that no device is to blame for: reported as information, never as a verdict. Imports numpy."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.input.records import SpanKind
from megatron_resihp.detector.judging.units import tensor_groups

DISTURBING: Final = (SpanKind.GARBAGE_COLLECTION, SpanKind.EVALUATION, SpanKind.SAVE, SpanKind.VALIDATION)
"""Spans that may lie inside ops, or slow the device down for a while afterwards."""
DISTURBING_SHARE: Final = 0.01
"""Share of the worker's own compute in the iteration; a smaller disturbance changes no verdict."""
MOST_DISTURBED: Final = 4
"""Most successive iterations of a worker that are left out; a worker that is always disturbed is still judged."""
STALL_SHARE: Final = 0.25
"""Share of the iteration above which a wait for data is reported as a stall."""


class What(StrEnum):
    """What takes the time."""

    DATA = "data"
    WORK_OF_A_STAGE = "work_of_a_stage"


@dataclass(frozen=True)
class Notice:
    """Information about lost time that is not a device's fault, such as a data-loader stall.

    Attributes:
        what: the cause.
        workers: the workers affected.
        seconds: the longest of their times.
        iteration: when it happened.
    """

    what: What
    workers: tuple[int, ...]
    seconds: float
    iteration: int


def data_stall(observations: IterationObservations, layout: Layout) -> Notice | None:
    """The data-loader stall of this iteration, if there was one.

    One member of a tensor-parallel group reads for all of them. A member that waits longer than another waits for it.
    """
    waited = observations.spans[:, SpanKind.DATA]
    if not np.nan_to_num(waited).any():
        return None
    group = tensor_groups(layout)
    least = np.full(group.max() + 1, np.inf)
    np.minimum.at(least, group, np.nan_to_num(waited, nan=np.inf))
    seconds = np.where(np.isfinite(waited), least[group], 0.0)
    with np.errstate(invalid="ignore"):
        stalled = seconds > STALL_SHARE * np.nan_to_num(observations.seconds, nan=np.inf)
    if not stalled.any():
        return None
    workers = tuple(map(int, layout.workers[stalled]))
    return Notice(What.DATA, workers, float(seconds[stalled].max()), observations.iteration)


def work_of_a_stage(
    observations: IterationObservations, layout: Layout, added: NDArray[np.float64], least: float
) -> Notice | None:
    """The time that more work in some stages took in this iteration, if there was any.

    Args:
        observations: of the iteration.
        layout: of its epoch.
        added: [workers] log of the ratio of times.
        least: of it that matters.
    """
    more = added >= least
    if not more.any():
        return None
    seconds = np.nan_to_num(observations.compute).sum(axis=(1, 2, 3)) * -np.expm1(-added)
    return Notice(What.WORK_OF_A_STAGE, tuple(map(int, layout.workers[more])), float(seconds[more].max()),
                  observations.iteration)  # fmt: skip


class Disturbances:
    """Finds workers whose iteration tells nothing about their device, because something else ran beside the ops."""

    def __init__(self, workers: int) -> None:
        self._successive = np.zeros(workers, dtype=np.int64)

    def see(self, observations: IterationObservations) -> NDArray[np.bool_]:
        """[workers] whether to leave out the worker's measurements of this iteration."""
        beside = np.nan_to_num(observations.spans[:, DISTURBING]).sum(axis=1)
        if not beside.any():
            self._successive[:] = 0
            return np.zeros(beside.size, dtype=np.bool_)
        compute = np.nan_to_num(observations.compute).sum(axis=(1, 2, 3))
        disturbed = beside > DISTURBING_SHARE * compute
        self._successive = np.where(disturbed, self._successive + 1, 0)
        return disturbed & (self._successive <= MOST_DISTURBED)
