# SPDX-License-Identifier: Apache-2.0
"""What writes pages somewhere, and what keeps its failures from everything else.

May import `protocol` and `events`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from megatron_resihp.events.job import LogFailed
from megatron_resihp.protocol.logs import LogPage

AGAIN_S: Final = 30.0
"""How long after a failure it is tried again."""
MOST_KEPT: Final = 2000
"""Pages that wait for that, two for each iteration; of more, the oldest are dropped."""


class MissingPackageError(Exception):
    """What writes is not installed."""


@dataclass(frozen=True)
class Term:
    """Of the coordinator that writes.

    Attributes:
        run: a token of the job's own, by which files of its coordinators are told from those of other jobs.
        began: Unix time at which the job did, if a coordinator before this one has been lost; None: there was none.
        is_over: whether another coordinator has taken over since, and writes.
    """

    run: str
    began: float | None = None
    is_over: Callable[[], bool] = lambda: False


class Writer(Protocol):
    """Writes pages. Any method may raise, and may take long."""

    def write(self, page: LogPage) -> None: ...

    def close(self) -> None:
        """Write what is still held back."""
        ...


class CarefulWriter:
    """A writer that may fail, on a full disk perhaps: told once, and tried again later with what has come since.

    Args:
        part: its name, for people.
        open_writer: opens it; called again after a failure.
        tell: takes events.
        clock: monotonic seconds.
        is_over: as of `Term`; from then on nothing is written.
    """

    def __init__(
        self,
        part: str,
        open_writer: Callable[[], Writer],
        tell: Callable[[LogFailed], None],
        clock: Callable[[], float] = time.monotonic,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.part = part
        self._open_writer = open_writer
        self._tell = tell
        self._clock = clock
        self._is_over = is_over
        self._writer: Writer | None = None
        self._kept: deque[LogPage] = deque(maxlen=MOST_KEPT)
        self._not_before = -float("inf")
        self._missing = False
        self._failing = False
        self._dropping = False

    def write(self, page: LogPage) -> None:
        if len(self._kept) == MOST_KEPT and not self._dropping:
            self._dropping = True
            self._tell(LogFailed(part=self.part, error=f"{MOST_KEPT} pages wait already, so the oldest are dropped"))
        self._kept.append(page)
        if not self._missing and self._clock() >= self._not_before:
            self._try()

    def close(self) -> None:
        if self._kept and not self._missing:
            self._try()
        if self._writer is not None:
            try:
                self._writer.close()
            except Exception as error:
                self._fail(error)

    def _try(self) -> None:
        try:
            while self._kept:
                if self._is_over():
                    self._kept.clear()  # workers have sent them to the other one, too
                    break
                self._writer = self._writer or self._open_writer()
                self._writer.write(self._kept[0])
                self._kept.popleft()
            self._failing = self._dropping = False
        except MissingPackageError as error:
            self._missing = True
            self._tell(LogFailed(part=self.part, error=str(error)))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._failing:
            self._tell(LogFailed(part=self.part, error=f"{type(error).__name__}: {error}"))
        self._failing, self._writer = True, None
        self._not_before = self._clock() + AGAIN_S
