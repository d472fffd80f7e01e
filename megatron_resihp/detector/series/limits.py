# SPDX-License-Identifier: Apache-2.0
"""Limits on the difference between healthy rows and earlier rows, from drift and noise. Imports numpy, this package.

Without drift, many reference rows tell the level best; with drift, the few nearest rows do.
"""

from typing import Final

import numpy as np

from megatron_resihp.detector.series.spread import REFERENCE, Array, Level, Noise, Rows, quantile

FARTHEST_DRIFT: Final = 0.02
"""Largest drift of the healthy level from the fastest level that lasted."""
DRIFT_ROWS: Final = 80
"""Rows within which it may drift that far."""
DRIFT_KNOWN: Final = 200.0
"""Healthy rows after which half of the drift allowance remains."""
REFERENCES: Final = np.array((16, 24, 48))
"""Numbers of reference rows to try, besides all that are known."""


def drift_and_noise(noise: Noise, level: Level, windows: Rows, known: int, probability: float) -> tuple[Array, Rows]:
    """The limit on D(n) for each n, and the number of reference rows that makes this limit least.

    Args:
        noise: of the series.
        level: its noise estimate.
        windows: the n: all of WINDOWS, or the first of them.
        known: how many reference rows there are.
        probability: of exceeding the limit by chance.
    """
    references = np.append(REFERENCES[known > REFERENCES], min(known, REFERENCE))[:, None]
    variance, freedom = noise.of_differences(level, windows, references)
    farthest = FARTHEST_DRIFT / (1.0 + noise.drift_seen / DRIFT_KNOWN)
    drift = farthest * np.minimum((references + windows) / (2 * DRIFT_ROWS), 1.0)
    limits = drift + quantile(probability, int(freedom)) * np.sqrt(variance)
    best = limits.argmin(axis=0)
    return limits[best, np.arange(windows.size)], references[best, 0]
