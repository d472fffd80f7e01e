# SPDX-License-Identifier: Apache-2.0
"""User settings of the detector. Imports only the standard library."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Settings of the Monitor; the same for every kind of job and noise.

    Attributes:
        warm_up: iterations from which healthy levels, costs and noise are learned.
        skipped: first iterations of a job, or of an epoch, that are not representative (allocations, compilation).
        settling: iterations after `skipped` from which a new epoch's costs are learned.
        smallest_slowdown: smallest slowdown to report (as log of the ratio of times); devices drift by fractions of it.
        peer_slowdown: how much slower than its stage's other workers a worker must be in warm-up to be reported as slow
            from the start, when it has no healthy level of its own yet. For a link: than other links between the same
            stages.
        learn_every: iterations between updates of the cost model, which follows changes over about a hundred. Odd,
            since collectives are timed on one micro-batch in four, in turns.
    """

    warm_up: int = 50
    skipped: int = 2
    settling: int = 8
    smallest_slowdown: float = 0.03
    peer_slowdown: float = 0.10
    learn_every: int = 3
