# SPDX-License-Identifier: Apache-2.0
"""How far apart healthy rows and those before them may be, by drift and noise together. Imports numpy, this package.

Many rows before those under test tell the level best if it does not drift, and few next to them if it does.
"""

from typing import Final

import numpy as np

from megatron_resihp.detector.series.spread import REFERENCE, Array, Level, Noise, Rows, quantile

FARTHEST_DRIFT: Final = 0.02
"""How far the healthy level may drift from the fastest that lasted."""
DRIFT_ROWS: Final = 80
"""In so many rows it may go that far."""
DRIFT_KNOWN: Final = 200.0
"""After so many healthy rows half of that is left to what they have not shown."""
REFERENCES: Final = np.array((16, 24, 48))
"""Rows that those under test may be compared with, if not with all that are known."""


def drift_and_noise(noise: Noise, level: Level, windows: Rows, known: int, probability: float) -> tuple[Array, Rows]:
    """What D(n) has to exceed for each n, and with how many rows it is compared: those for which this is least.

    Args:
        noise: of the series.
        level: that tells of the noise.
        windows: the n, all of WINDOWS or the first of them.
        known: how many rows there are to be compared with.
        probability: of exceeding it by chance.
    """
    references = np.append(REFERENCES[known > REFERENCES], min(known, REFERENCE))[:, None]
    variance, freedom = noise.of_differences(level, windows, references)
    farthest = FARTHEST_DRIFT / (1.0 + noise.drift_seen / DRIFT_KNOWN)
    drift = farthest * np.minimum((references + windows) / (2 * DRIFT_ROWS), 1.0)
    limits = drift + quantile(probability, int(freedom)) * np.sqrt(variance)
    best = limits.argmin(axis=0)
    return limits[best, np.arange(windows.size)], references[best, 0]
