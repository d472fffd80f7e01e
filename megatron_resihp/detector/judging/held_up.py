# SPDX-License-Identifier: Apache-2.0
"""Decides which notices to report: once they have cost enough time, and again when that has grown.

Imports `events` and this package.
"""

from dataclasses import dataclass, field
from typing import Final

from megatron_resihp.detector.notices import Notice, What
from megatron_resihp.events import detection as told

TOLD_FROM_S: Final = 1.0
"""Seconds that a kind of notice must cost in total before it is reported."""
TOLD_AGAIN: Final = 10.0
"""Factor by which its cost must grow before it is reported again."""
WORSE: Final = 2.0
"""A notice this many times longer than all before it is reported by itself, from TOLD_FROM_S on."""


@dataclass
class _Kind:
    total_s: float = 0.0
    times: int = 0
    longest_s: float = 0.0
    told_from_s: float = TOLD_FROM_S
    workers: set[int] = field(default_factory=set)
    """Workers that were held up since the last report."""


class HeldUp:
    """Sums notices up by kind."""

    def __init__(self) -> None:
        self._kinds: dict[What, _Kind] = {}

    def add(self, notice: Notice) -> list[told.Notice]:
        """The event to write, if this notice makes one worthwhile."""
        kind = self._kinds.setdefault(notice.what, _Kind())
        worse = notice.seconds >= max(TOLD_FROM_S, WORSE * kind.longest_s)
        kind.total_s += notice.seconds
        kind.times += 1
        kind.longest_s = max(kind.longest_s, notice.seconds)
        kind.workers.update(notice.workers)
        if kind.total_s < kind.told_from_s and not worse:
            return []
        while kind.told_from_s <= kind.total_s:
            kind.told_from_s *= TOLD_AGAIN
        workers, kind.workers = sorted(kind.workers), set()
        return [told.Notice(
            what=notice.what, workers=tuple(workers), seconds=notice.seconds, iteration=notice.iteration,
            times=kind.times, total_s=kind.total_s, longest_s=kind.longest_s,
        )]  # fmt: skip

    def totals(self) -> dict[str, float]:
        """Seconds that each kind has cost in total."""
        return {what.value: kind.total_s for what, kind in self._kinds.items()}
