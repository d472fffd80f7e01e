# SPDX-License-Identifier: Apache-2.0
"""Persistent slowdowns with known truth, drawn as in the published protocol. Imports numpy and `detector.verdict`."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.input.observations import Layout
from megatron_resihp.detector.verdict import Kind

SLOWDOWNS = (0.05, 0.075, 0.10, 0.15, 0.20, 0.25, 0.30, 0.40, 0.50, 0.60, 0.70)
"""Slowdowns s = 1 − p from which faults are drawn."""
CONCURRENT_SHARE = 1 / 3
"""Share of the faulty jobs with several culprits."""
MOST_CULPRITS = 3
QUIET_ITERATIONS = 50
"""Number of first and of last iterations in which no fault begins."""


@dataclass(frozen=True)
class Fault:
    """A device that runs at `speed` from iteration `onset` to the end of the job.

    Attributes:
        kind: which is slow: a worker's compute, or a link's bandwidth.
        workers: the worker's id, or the link's two ends.
        speed: p in (0, 1), relative to its own healthy speed.
        onset: the first slow iteration, from 1.
    """

    kind: Kind
    workers: tuple[int, ...]
    speed: float
    onset: int

    @property
    def slowdown(self) -> float:
        """s = 1 − p, without floating-point error."""
        return round(1 - self.speed, 9)


def draw_faults(layout: Layout, slowdown: float, iterations: int, rng: np.random.Generator) -> tuple[Fault, ...]:
    """One to three faults of a job, the first with the given slowdown.

    In half of the jobs with several culprits, all faults begin at once.
    """
    count = int(rng.integers(2, MOST_CULPRITS + 1)) if rng.random() < CONCURRENT_SHARE else 1
    together = rng.random() < 0.5
    onset = _draw_onset(iterations, rng)
    faults: dict[tuple[Kind, tuple[int, ...]], Fault] = {}
    while len(faults) < count:
        kind = Kind.LINK if layout.links.size and rng.random() < 0.5 else Kind.COMPUTE
        candidates = layout.links if kind is Kind.LINK else layout.workers[:, None]
        workers = tuple(map(int, candidates[rng.integers(len(candidates))]))
        speed = 1 - (slowdown if not faults else float(rng.choice(SLOWDOWNS)))
        faults.setdefault((kind, workers), Fault(kind, workers, speed, onset))
        onset = onset if together else _draw_onset(iterations, rng)
    return tuple(faults.values())


def _draw_onset(iterations: int, rng: np.random.Generator) -> int:
    return int(rng.integers(QUIET_ITERATIONS + 1, iterations - QUIET_ITERATIONS + 1))


def fault_factors(
    faults: tuple[Fault, ...], kind: Kind, devices: NDArray[np.int64], iterations: int
) -> NDArray[np.float64]:
    """Factors on the durations of devices: array [iterations, devices].

    Args:
        kind: which faults count.
        devices: worker ids, shape [workers, 1], or the ends of links, shape [links, 2].
    """
    factors = np.ones((iterations, len(devices)))
    for fault in faults:
        if fault.kind is kind:
            hit = (devices == np.array(fault.workers)).all(axis=1)
            factors[fault.onset - 1 :, hit] /= fault.speed
    return factors
