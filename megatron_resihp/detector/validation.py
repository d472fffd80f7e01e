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
DEVICES_DIFFER: Final = 0.05
"""Log ratio of the times of two healthy devices that must not name anyone. A suspicion below twice this is too small to
be told from such a difference, so it takes twice this to name anyone."""


@dataclass(frozen=True)
class Suspicion:
    """At least one of these workers is slow, and the evidence does not say which.

    Attributes:
        workers: the suspects' ids.
        slowdown: 1 − p of the slow worker.
        since: estimated first iteration.
        iteration: the iteration whose records decided.
        reference: a healthy worker of the same stage that measures beside them; None if there is none.
        idle: whether the worker was slow and has no work to judge it by. Any healthy worker is its reference.
    """

    workers: tuple[int, ...]
    slowdown: float
    since: int
    iteration: int
    reference: int | None = None
    idle: bool = False

    @property
    def measured(self) -> tuple[int, ...]:
        """The workers that measure."""
        return self.workers if self.reference is None else (*self.workers, self.reference)


def products(suspicions: Sequence[Suspicion], gemm_shapes: Sequence[tuple[int, int, int]]) -> tuple[MatrixProduct, ...]:
    """Benchmarks for all suspects together; nothing is sent, since no link decides who is slow.

    Args:
        suspicions: what to decide.
        gemm_shapes: (m, n, k) of the training's matrix products.
    """
    measured = tuple(sorted({worker for each in suspicions for worker in each.measured}))
    return tuple(MatrixProduct(measured, *shape) for shape in gemm_shapes) if measured else ()


def culprits(suspicion: Suspicion, seconds: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """The suspects that are slow, with their speeds p.

    A worker's time is the median of its repeats. It is compared with the fastest suspect's, as rarely all are slow, and
    with the reference's, since the fastest of several healthy devices is fast by chance. A suspect that shows less than
    half of the suspected slowdown is a victim. If all look alike, all of them are slow or none is. Then the reference
    decides, but only about all of them: two healthy devices are not equally fast. An idle worker is compared with
    whoever measured beside it. If it was not measured, it stays slow.

    Args:
        suspicion: what to decide.
        seconds: repeats of the same benchmark by worker id; suspects without an entry are not judged.
    """
    repeats = {worker: seconds[worker] for worker in suspicion.measured if len(seconds.get(worker, ()))}
    medians = {worker: float(np.median(each)) for worker, each in repeats.items()}
    medians = {worker: time for worker, time in medians.items() if np.isfinite(time) and time > 0}
    if suspicion.idle and len(medians) < len(suspicion.measured):
        return {suspicion.workers[0]: 1.0 - suspicion.slowdown}
    suspects = {worker: time for worker, time in medians.items() if worker in suspicion.workers}
    if not suspects:
        return {}
    suspected = -float(np.log1p(-suspicion.slowdown))
    if suspicion.idle:
        return _slower(suspects, min(medians.values()), LEAST_SHARE * suspected)
    reference = medians.get(suspicion.reference) if suspicion.reference is not None else None
    needed = LEAST_SHARE * suspected if suspected >= 2 * DEVICES_DIFFER else 2 * DEVICES_DIFFER
    found = _slower(suspects, min(suspects.values()), needed)
    if reference is None:
        return found
    slow = _slower(suspects, reference, needed)
    if found:
        return {worker: speed for worker, speed in found.items() if worker in slow}
    return slow if len(slow) == len(suspicion.workers) else {}


def _slower(seconds: Mapping[int, float], usual: float, needed: float) -> dict[int, float]:
    return {worker: min(usual / time, 1.0) for worker, time in seconds.items() if np.log(time / usual) >= needed}
