# SPDX-License-Identifier: Apache-2.0
"""The logs of one job's decisions: always the file in the run directory and, where it is asked for, etcd.

May import: the standard library, `transport.etcd` and this package's modules.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_resihp.control.coordination.decisions.entries import Entry, line_of
from megatron_resihp.control.coordination.decisions.reading import Decisions, UnusableError
from megatron_resihp.control.head.decision_file import DecisionFile, read_decisions
from megatron_resihp.control.head.etcd_log import EtcdLog, read_etcd_decisions
from megatron_resihp.control.transport.etcd.access import access_of
from megatron_resihp.control.transport.etcd.leadership import Leadership
from megatron_resihp.control.transport.etcd.location import SCHEME, parse_location


class DecisionLogs:
    """Appends to all of them. One thread writes.

    Args:
        leadership: in etcd; None: the file is the only log.
        closing: once it is set, etcd is not waited for.
        run: the run's token.
        before: decisions in etcd that these come after; None: the job begins.
    """

    def __init__(
        self, run_dir: Path, leadership: Leadership | None, closing: threading.Event, run: str,
        before: Decisions | None = None,
    ) -> None:  # fmt: skip
        self._file = DecisionFile(run_dir)
        after, characters = (None, 0) if before is None else (before.last, before.characters)
        self._etcd = None if leadership is None else EtcdLog(leadership, closing, run, after, characters)
        self._before = before

    def write(self, lines: Sequence[str]) -> None:
        """Append lines: to etcd first, so that the file, which another coordinator may go on with, has no more.

        Raises:
            UnrecordedError: etcd can't take it.
        """
        if self._etcd is not None:
            self._etcd.write(lines)
        # Only now is it known that no other has gone on. The file may lack the last ones.
        before, self._before = self._before, None
        if before is None:
            self._file.write(lines)
        else:
            entries: list[Entry] = [before.start, *before.steps]
            self._file.take_over([*map(line_of, entries), *lines])

    def shorten(self, snapshot: Callable[[], str]) -> None:
        """Let a snapshot stand for all so far where that has become long. The file keeps all.

        Args:
            snapshot: makes its line.

        Raises:
            UnrecordedError: as of `write`.
        """
        if self._etcd is not None:
            self._etcd.shorten(snapshot)

    def close(self) -> None:
        self._file.close()
        if self._etcd is not None:
            self._etcd.close()


def decisions_at(place: str) -> Decisions:
    """The decisions of the last run in a run directory, or at etcd://HOST:PORT/RUN.

    Raises:
        UnusableError: there are none, or they can't be read.
    """
    if not place.startswith(SCHEME):
        return read_decisions(Path(place))
    try:
        location = parse_location(place, access_of(os.environ))
    except ValueError as error:
        raise UnusableError(str(error)) from None
    return read_etcd_decisions(location)
