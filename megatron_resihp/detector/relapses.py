# SPDX-License-Identifier: Apache-2.0
"""Workers that look well without work and are slow with it, such as devices that throttle under load.

A benchmark between two iterations can't show that, so it is believed less and less often. Pure; imports this package.
"""

from typing import Final

from megatron_resihp.detector.input.observations import Layout

PROVEN: Final = 200
"""Iterations with work after which a worker is as well as it looked."""


class Relapses:
    """What became of the workers that looked well without work."""

    def __init__(self) -> None:
        self._believed: dict[int, int] = {}
        """Iterations for which each has had work since it looked well."""
        self._times: dict[int, int] = {}

    def believe(self, worker: int) -> None:
        """A worker without work looks well."""
        self._believed[worker] = 0

    def worked(self, layout: Layout) -> None:
        """An iteration is over, in which the workers of a layout had work."""
        for worker in [each for each in self._believed if (layout.workers == each).any()]:
            self._believed[worker] += 1
            if self._believed[worker] > PROVEN:
                del self._believed[worker]
                self._times.pop(worker, None)

    def found_slow(self, worker: int) -> bool:
        """A worker with work became slow. Whether that shows that it only looked well."""
        if self._believed.pop(worker, None) is None:
            return False
        self._times[worker] = self.times(worker) + 1
        return True

    def times(self, worker: int) -> int:
        """How often in succession a worker has only looked well."""
        return self._times.get(worker, 0)
