# SPDX-License-Identifier: Apache-2.0
"""What evidence alone cannot decide: which micro-benchmarks on whom, and what their results mean.

Pure; the benchmarks themselves run in `integration`, on the suspects only, at the next iteration boundary. ResiHP
(arXiv 2605.06374) and Greyhound validate every suspicion so; here only those that name several workers. Imports the
standard library, numpy and `protocol`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from megatron_resihp.protocol.notices import MatrixProduct, Transfer

LEAST_SHARE: Final = 0.5
"""A culprit shows at least this share of the suspected slowdown (as log ratio) in a micro-benchmark."""


@dataclass(frozen=True)
class Suspicion:
    """One or several of these workers are slow, and the evidence does not say who.

    Attributes:
        workers: the suspects' ids.
        slowdown: 1 − p of whoever it is.
        since: estimated first iteration.
        iteration: iteration whose records decided.
        idle: the first was slow and has no work by which it could be judged; the other is well.
    """

    workers: tuple[int, ...]
    slowdown: float
    since: int
    iteration: int
    idle: bool = False


@dataclass(frozen=True)
class ValidationPlan:
    """What to run. All times are reported in seconds, one for each repeat."""

    gemms: tuple[MatrixProduct, ...]
    transfers: tuple[Transfer, ...]


def plan_validation(
    suspicions: Sequence[Suspicion],
    gemm_shapes: Sequence[tuple[int, int, int]],
    links: Sequence[tuple[int, int]],
    transfer_size: int,
) -> ValidationPlan:
    """Benchmarks for all suspects together.

    Args:
        suspicions: what is to be decided.
        gemm_shapes: (m, n, k) of the training's matrix products.
        links: pairs of workers that send each other data; those between a suspect with work and anybody are tried.
        transfer_size: bytes of a usual transfer.
    """
    suspects = tuple(sorted({worker for each in suspicions for worker in each.workers}))
    if not suspects:
        return ValidationPlan((), ())
    working = {worker for each in suspicions if not each.idle for worker in each.workers}
    tried = [pair for pair in links if not working.isdisjoint(pair)]
    return ValidationPlan(
        tuple(MatrixProduct(suspects, *shape) for shape in gemm_shapes),
        tuple(Transfer(first, second, transfer_size) for first, second in tried),
    )


def culprits(
    suspicion: Suspicion,
    seconds: Mapping[int, Sequence[float]],
    healthy: Mapping[int, float] | None = None,
) -> dict[int, float]:
    """Who of the suspects is slow, with its speed p.

    A worker's time is the median of its repeats. It is compared with its own healthy time where that is known, else
    with the fastest suspect's: not all of them are slow, or it would not be one of them. Who shows less than half of
    the suspected slowdown is a victim. Who was known to be slow, and is idle, stays so unless it was measured.

    Args:
        suspicion: what is to be decided.
        seconds: repeats of the same benchmark by worker id; suspects that are missing here are not judged.
        healthy: by worker id, seconds that the benchmark takes when the device is healthy.
    """
    measured = [worker for worker in suspicion.workers if len(seconds.get(worker, ()))]
    medians = {worker: float(np.median(seconds[worker])) for worker in measured}
    medians = {worker: time for worker, time in medians.items() if np.isfinite(time) and time > 0}
    if suspicion.idle and len(medians) < len(suspicion.workers):
        return {suspicion.workers[0]: 1.0 - suspicion.slowdown}
    if not medians:
        return {}
    fastest = min(medians.values())
    known = healthy or {}
    ratios = {worker: time / known.get(worker, fastest) for worker, time in medians.items()}
    needed = -LEAST_SHARE * np.log1p(-suspicion.slowdown)
    return {worker: min(1.0 / ratio, 1.0) for worker, ratio in ratios.items() if np.log(ratio) >= needed}
