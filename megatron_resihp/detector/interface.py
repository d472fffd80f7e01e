# SPDX-License-Identifier: Apache-2.0
"""What every detector of this project offers, the published ones written here as baselines included.

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
        """What is new after this iteration; iterations come in growing order.

        A verdict whose `workers` is empty says that the job is slow and that nobody was found to blame: a false alarm
        where nobody is slow.
        """
        ...

    def speed(self, worker: int) -> float:
        """The worker's speed p as now known, 1.0 unless it is known to be slow."""
        ...

    def link_speed(self, ends: tuple[int, int]) -> float:
        """The share of its bandwidth that a link has, 1.0 unless it is known to be slow."""
        ...


def iteration_seconds(observations: IterationObservations) -> float:
    """The job's iteration time: that of its slowest worker. NaN if no worker reported one."""
    known = observations.seconds[observations.reported & np.isfinite(observations.seconds)]
    return float(known.max()) if known.size else float("nan")
