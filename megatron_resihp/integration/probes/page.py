# SPDX-License-Identifier: Apache-2.0
"""Where the notes of the iteration under way go, and the clock that they are taken by. Imports the probes' modules."""

from megatron_resihp.integration.probes.probe_clock import Clock
from megatron_resihp.integration.probes.probe_sheet import Sheet


class Page:
    """What ops, transfers and spans of one iteration are noted on; all of them share it.

    Attributes:
        clock: gives the marks of this iteration.
        sheet: has the notes.
    """

    def __init__(self, worker: int, clock: Clock) -> None:
        self._worker = worker
        self.turn(clock)

    def turn(self, clock: Clock) -> Sheet | None:
        """Go on with empty notes and this clock; returns what was noted before."""
        noted = getattr(self, "sheet", None)
        self.clock = clock
        self.sheet = Sheet(clock, self._worker)
        return noted
