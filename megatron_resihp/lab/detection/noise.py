# SPDX-License-Identifier: Apache-2.0
"""How the times of healthy devices and links vary. Imports numpy.

All noise is a factor on a duration. Noise of single ops averages out over an iteration. What limits a detector is noise
that the ops of an iteration, the workers of a node or consecutive iterations share.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HEAVY_TAIL_FREEDOM = 3
"""Degrees of freedom of heavy-tailed noise: Student's t with a finite variance and an infinite kurtosis."""
SMALLEST_FACTOR = 0.5
"""Least factor on an op's duration, whatever the tail."""


@dataclass(frozen=True)
class Noise:
    """Relative standard deviations of a kind of noise.

    Attributes:
        name: of the row in tables.
        scored: whether the row counts in the benchmark's figures.
        op: of each op and each transfer separately.
        heavy_tailed: whether that noise is Student's t with 3 degrees of freedom instead of Gaussian.
        iteration: shared by all ops of a worker, or transfers of a link, in an iteration.
        node: shared by all workers of a node in an iteration, and by the links that begin at the node.
        drift: stationary AR(1) of each worker and link over iterations.
        drift_iterations: correlation time of the drift.
        stall_rate: stalls per worker or link and iteration.
        stall_iterations: how many iterations a stall lasts.
        stall_factors: smallest and largest factor on durations in a stall.
    """

    name: str
    scored: bool = True
    op: float = 0.01
    heavy_tailed: bool = False
    iteration: float = 0.0
    node: float = 0.0
    drift: float = 0.0
    drift_iterations: float = 100.0
    stall_rate: float = 0.0
    stall_iterations: int = 1
    stall_factors: tuple[float, float] = (1.5, 3.0)


STALL_RATE = 5e-4
"""Two or three stalls in a job of 16 workers and 300 iterations, forty in one of 256."""

NOISES = (
    Noise("op", op=0.03),
    Noise("op_heavy_tailed", op=0.03, heavy_tailed=True),
    Noise("iteration", iteration=0.02),
    Noise("node", node=0.02),
    Noise("drift", drift=0.005),
    Noise("stalls", stall_rate=STALL_RATE),
    Noise("iteration_3", scored=False, iteration=0.03),
    Noise("drift_1", scored=False, drift=0.01),
    Noise("drift_2", scored=False, drift=0.02),
    Noise("stalls_2", scored=False, stall_rate=STALL_RATE, stall_iterations=2),
    Noise("stalls_3", scored=False, stall_rate=STALL_RATE, stall_iterations=3),
)
"""The benchmark's rows: scored ones, then those that are only printed. All have at least 1 % noise per op."""


def op_factors(noise: Noise, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    """Separate factors for each op, with mean 1 and standard deviation `noise.op`."""
    standard = _student_t(shape, rng) if noise.heavy_tailed else rng.standard_normal(shape, dtype=np.float32)
    return np.maximum(1 + np.float32(noise.op) * standard, np.float32(SMALLEST_FACTOR))


def _student_t(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    """Student's t, scaled to a standard deviation of 1."""
    # χ² is twice a Gamma variable of shape ν / 2, t = z / √(χ² / ν), and its variance is ν / (ν − 2).
    gamma = rng.standard_gamma(HEAVY_TAIL_FREEDOM / 2, shape, dtype=np.float32)
    return rng.standard_normal(shape, dtype=np.float32) * np.sqrt(np.float32(HEAVY_TAIL_FREEDOM / 2 - 1) / gamma)


def shared_factors(
    noise: Noise, iterations: int, node: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.float64]:
    """Factors that all ops of a device share in an iteration: array [iterations, devices].

    Args:
        node: the node of each device, a worker or a link.
    """
    shape = (iterations, node.size)
    factors = 1 + noise.iteration * rng.standard_normal(shape) if noise.iteration else np.ones(shape)
    if noise.node:
        factors *= (1 + noise.node * rng.standard_normal((iterations, int(node.max(initial=0)) + 1)))[:, node]
    if noise.drift:
        factors *= 1 + drift(noise, iterations, node.size, rng)
    if noise.stall_rate:
        factors *= stalls(noise, iterations, node.size, rng)
    return np.maximum(factors, SMALLEST_FACTOR)


def drift(noise: Noise, iterations: int, devices: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """A stationary AR(1) process for each device: x' = ρ x + σ √(1 − ρ²) ε with ρ = exp(−1 / τ)."""
    rho = np.exp(-1 / noise.drift_iterations)
    values = noise.drift * rng.standard_normal((iterations, devices))
    values[1:] *= np.sqrt(1 - rho**2)
    for iteration in range(1, iterations):
        values[iteration] += rho * values[iteration - 1]
    return values


def stalls(noise: Noise, iterations: int, devices: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Factors of rare hiccups; overlapping ones do not add up."""
    factors = np.ones((iterations, devices))
    for start, device in np.argwhere(rng.random((iterations, devices)) < noise.stall_rate):
        hit = factors[start : start + noise.stall_iterations, device]
        np.maximum(hit, rng.uniform(*noise.stall_factors), out=hit)
    return factors
