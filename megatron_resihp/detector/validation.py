# SPDX-License-Identifier: Apache-2.0
"""Micro-benchmarks for cases that evidence alone cannot decide: which to run on which workers, and what they mean.

Pure; the benchmarks themselves run in `integration`, only on the suspects, at the next iteration boundary. ResiHP
(arXiv 2605.06374) and Greyhound validate every suspicion in this way; here only suspicions of several workers are.
Imports the standard library, numpy and `protocol`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from megatron_resihp.protocol.notices import MatrixProduct

LEAST_SHARE: Final = 0.5
"""Least share of the suspected slowdown (as log ratio) that a culprit shows in a micro-benchmark."""


@dataclass(frozen=True)
class Suspicion:
    """At least one of these workers is slow, and the evidence does not say which.

    Attributes:
        workers: the suspects' ids.
        slowdown: 1 − p of the slow worker.
        since: estimated first iteration.
        iteration: the iteration whose records decided.
        idle: whether the first worker was slow and has no work to judge it by; the other one is healthy.
    """

    workers: tuple[int, ...]
    slowdown: float
    since: int
    iteration: int
    idle: bool = False


def products(suspicions: Sequence[Suspicion], gemm_shapes: Sequence[tuple[int, int, int]]) -> tuple[MatrixProduct, ...]:
    """Benchmarks for all suspects together; nothing is sent, since no link decides who is slow.

    Args:
        suspicions: what to decide.
        gemm_shapes: (m, n, k) of the training's matrix products.
    """
    suspects = tuple(sorted({worker for each in suspicions for worker in each.workers}))
    return tuple(MatrixProduct(suspects, *shape) for shape in gemm_shapes) if suspects else ()


def culprits(
    suspicion: Suspicion,
    seconds: Mapping[int, Sequence[float]],
    healthy: Mapping[int, float] | None = None,
) -> dict[int, float]:
    """The suspects that are slow, with their speeds p.

    A worker's time is the median of its repeats. It is compared with its own healthy time if that is known, otherwise
    with the fastest suspect's, since not all suspects are slow. A suspect that shows less than half of the suspected
    slowdown is a victim. An idle worker that was known to be slow stays slow unless it was measured.

    Args:
        suspicion: what to decide.
        seconds: repeats of the same benchmark by worker id; suspects without an entry are not judged.
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
