# SPDX-License-Identifier: Apache-2.0
"""The book of the pages of Megatron's log that have come: each place in the run is written once. Pure.

A step counts for good once all workers have agreed on it, and a page is sent whole, once all that follows a step has
been logged. So a page that comes again, after a recovery, has nothing new in it: the first one counts. May import
`protocol`.
"""

from dataclasses import dataclass

from megatron_resihp.protocol.logs import BEFORE_ALL, LogPage, LogsWanted, Place


@dataclass
class LogPages:
    """The book of one job.

    Attributes:
        wanted: which logs are; None: no worker has said that any are.
        last: the place of the last page.
    """

    wanted: LogsWanted | None = None
    last: Place = BEFORE_ALL

    def open(self, wanted: LogsWanted) -> bool:
        """Whether this says for the first time which logs are wanted."""
        if self.wanted is not None:
            return False
        self.wanted = wanted
        return True

    def enter(self, page: LogPage) -> bool:
        """Whether a page is to be written."""
        if self.wanted is None or page.place <= self.last:
            return False
        self.last = page.place
        return True

    def begin_again(self) -> None:
        """Pages may have come and not been written, as the coordinator was lost: they come again, and only what writes
        them can know which are there."""
        self.last = BEFORE_ALL

    @property
    def reached(self) -> Place | None:
        """Up to where pages have come; None: none are wanted."""
        return None if self.wanted is None else self.last
