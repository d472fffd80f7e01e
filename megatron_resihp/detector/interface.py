# SPDX-License-Identifier: Apache-2.0
"""The interface of all detectors in this project, including published ones that serve as baselines.

A detector is constructed for one epoch's layout and then sees each iteration once. All detectors of a comparison get
the same observations; their settings are fixed beforehand. Imports numpy.
"""

from typing import Protocol

import numpy as np

from megatron_resihp.detector.input.observations import IterationObservations
from megatron_resihp.detector.verdict import Verdict


class Detector(Protocol):
    """Judges one job, online."""

    def observe(self, observations: IterationObservations) -> list[Verdict]:
        """New verdicts after this iteration; iterations arrive in ascending order.

        A verdict with empty `workers` says that the job is slow but no worker was identified. If no worker is slow, it
        is a false alarm.
        """
        ...

    def speed(self, worker: int) -> float:
        """The worker's speed p, 1.0 unless it is known to be slow."""
        ...

    def link_speed(self, ends: tuple[int, int]) -> float:
        """The share of its bandwidth that a link has, 1.0 unless it is known to be slow."""
        ...


def iteration_seconds(observations: IterationObservations) -> float:
    """The job's iteration time: that of its slowest worker. NaN if no worker reported one."""
    known = observations.seconds[observations.reported & np.isfinite(observations.seconds)]
    return float(known.max()) if known.size else float("nan")
