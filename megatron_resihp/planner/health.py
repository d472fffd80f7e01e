# SPDX-License-Identifier: Apache-2.0
"""The health of devices and links, as planners receive it. Imports only the standard library."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product


class HealthError(ValueError):
    """An impossible health; the message names the worker or link."""


@dataclass(frozen=True)
class Health:
    """The speed of each live worker and each slow link.

    Attributes:
        speed: p of every live worker, in (0, 1], relative to the device's own healthy speed; other workers are dead.
        link: speed of each slow link, in (0, 1], by pair of workers, the smaller id first; other links are healthy.

    Raises:
        HealthError: on construction, for a speed outside of (0, 1] or a link between unknown workers.
    """

    speed: Mapping[int, float]
    link: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for worker, speed in self.speed.items():
            if not 0 < speed <= 1:
                raise HealthError(f"worker {worker} has speed {speed:g}; it must be above 0 and at most 1")
        for (first, second), speed in self.link.items():
            if not 0 < speed <= 1:
                raise HealthError(f"link {first}-{second} has speed {speed:g}; it must be above 0 and at most 1")
            if not first < second:
                raise HealthError(f"link {first}-{second} must name the smaller worker id first")

    @property
    def live(self) -> tuple[int, ...]:
        return tuple(sorted(self.speed))

    def rounded_down(self, steps: int) -> "Health":
        """The health with speeds rounded down to multiples of 1 / steps; a speed that would become 0 stays."""

        # Add a little, as 0.29 · 100 is just below 29.
        def rounded(speed: float) -> float:
            return int(speed * steps + 1e-9) / steps or speed

        return Health(
            {worker: rounded(speed) for worker, speed in self.speed.items()},
            {pair: rounded(speed) for pair, speed in self.link.items()},
        )

    def between(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> float:
        """Speed of the slowest link between two groups of workers."""
        if not self.link:
            return 1.0
        return min(self.link.get((min(pair), max(pair)), 1.0) for pair in product(senders, receivers))
