# SPDX-License-Identifier: Apache-2.0
"""How long a loop that looks again and again was held up: stopped, with its machine perhaps, or busy otherwise.

What it had not heard by then it could not have heard: no worker is late for that. Pure: the time is handed in.
"""


class Absence:
    """The absences of one loop.

    Args:
        usual_s: a longer time between two looks counts as absence.
    """

    def __init__(self, usual_s: float) -> None:
        self._usual_s = usual_s
        self._looked_at: float | None = None

    def before(self, now: float) -> float:
        """Seconds that the loop was away before this look, which is one; 0 where it was not.

        Args:
            now: of a monotonic clock.
        """
        passed = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        return passed if passed > self._usual_s else 0.0
