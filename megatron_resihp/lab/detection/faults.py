# SPDX-License-Identifier: Apache-2.0
"""Persistent slowdowns with known truth, drawn as in the published protocol. Imports numpy and `detector.verdict`.

Drawn faults are evenly slow. Others may be slow in another degree in each iteration, or in a part of each only.
"""

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
JITTER_ITERATIONS = 5.0
"""Correlation time of a fault's jitter."""
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
        jitter: relative standard deviation of its times from iteration to iteration, an AR(1) process. It is never
            faster than when it is healthy.
        share: share of each iteration's ops or transfers, in succession, in which it is slow.
    """

    kind: Kind
    workers: tuple[int, ...]
    speed: float
    onset: int
    jitter: float = 0.0
    share: float = 1.0

    @property
    def slowdown(self) -> float:
        """s = 1 − p, without floating-point error."""
        return round(1 - self.speed, 9)

    @property
    def mean_speed(self) -> float:
        """The speed that an iteration shows."""
        return 1 / (1 + self.share * (1 / self.speed - 1))


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
    faults: tuple[Fault, ...],
    kind: Kind,
    devices: NDArray[np.int64],
    iterations: int,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Factors on the durations of devices: array [iterations, devices]. Those slow in a part are in `burst_factors`.

    Args:
        kind: which faults count.
        devices: worker ids, shape [workers, 1], or the ends of links, shape [links, 2].
        rng: for jitter only.
    """
    factors = np.ones((iterations, len(devices)))
    for fault in (each for each in faults if each.share == 1):
        if fault.kind is kind:
            factors[fault.onset - 1 :, _hit(fault, devices)] *= _times(fault, iterations, rng)[:, None]
    return factors


def burst_factors(
    faults: tuple[Fault, ...], kind: Kind, devices: NDArray[np.int64], shape: tuple[int, int], rng: np.random.Generator
) -> NDArray[np.float32] | None:
    """Factors of faults that are slow in a part of each iteration, [iterations, devices, ops]; None without any.

    Args:
        shape: iterations and ops.
        kind, devices, rng: as in `fault_factors`.
    """
    iterations, ops = shape
    bursts = [each for each in faults if each.share < 1 and each.kind is kind]
    factors = np.ones((iterations, len(devices), ops), dtype=np.float32)
    for fault in bursts:
        length = max(1, round(fault.share * ops))
        times = _times(fault, iterations, rng)
        for iteration, time in enumerate(times, start=iterations - times.size):
            first = int(rng.integers(ops - length + 1))
            factors[iteration, _hit(fault, devices), first : first + length] *= time
    return factors if bursts else None


def _hit(fault: Fault, devices: NDArray[np.int64]) -> NDArray[np.bool_]:
    hit: NDArray[np.bool_] = (devices == np.array(fault.workers)).all(axis=1)
    return hit


def _times(fault: Fault, iterations: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Factors on a slow device's time, from the onset on."""
    count = iterations - fault.onset + 1
    if not fault.jitter:
        return np.full(count, 1 / fault.speed)
    swings = fault.jitter * rng.standard_normal(count)
    kept = np.exp(-1 / JITTER_ITERATIONS)
    for place in range(1, count):
        swings[place] = kept * swings[place - 1] + np.sqrt(1 - kept**2) * swings[place]
    return np.maximum((1 + swings) / fault.speed, 1.0)
