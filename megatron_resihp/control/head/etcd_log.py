# SPDX-License-Identifier: Apache-2.0
"""The log of decisions in etcd: a key for each entry, made once, by the leader only.

An entry is what the coordinator has decided at once, which may be many lines (`entries.line_of`), compressed. One that
is too large for a transaction is written in pieces first; its key then holds their number and a digest of all. The
first entry of a run is made together with the end of all that earlier runs have left, which nobody can go on with. In
the same way a snapshot ends what it stands for, so that a run of weeks takes no more than one of days.
May import: the standard library, `transport.etcd` and this package's modules.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import inf
from typing import Final

from megatron_resihp.control.coordination.decisions.entries import LARGEST
from megatron_resihp.control.coordination.decisions.reading import Decisions, Read, UnusableError, decisions_in
from megatron_resihp.control.coordination.decisions.recorded import UnrecordedError
from megatron_resihp.control.terminal import warn
from megatron_resihp.control.transport.etcd.gateway import (
    EtcdError,
    Gateway,
    Held,
    LeaseLostError,
    Put,
    UnreachableError,
)
from megatron_resihp.control.transport.etcd.leadership import Leadership
from megatron_resihp.control.transport.etcd.location import Location
from megatron_resihp.protocol.wire import MalformedError

PATIENCE_S: Final = 60.0
"""How long a decision waits for etcd."""
RETRY_S: Final = 0.5
PIECE_BYTES: Final = 512 * 1024
"""etcd takes 1.5 MiB in a request."""
MOST_PIECES: Final = 1024
LONG: Final = 1 << 25
"""Characters of decisions since the last snapshot, a tenth of which or so is kept after compression. Another is made
then, or once they are `TIMES` as many as that one's."""
TIMES: Final = 4
AGAIN_S: Final = 60.0
"""How long a snapshot waits that etcd has not taken; decisions come first."""
_IN_PIECES: Final = re.compile(rb"pieces (\d{1,5}) ([0-9a-f]{64})")
"""What the key of an entry in pieces holds. What zlib compresses begins otherwise."""


Spans = Sequence[tuple[str, str]]
"""From which key on, and before which one."""


class EtcdLog:
    """Appends to the log. One thread writes.

    Args:
        closing: once it is set, nothing is waited for.
        run: the run's token.
        after: number of the entry after which this job goes on; nothing is written if another has come behind that one,
            or if that one is gone. None: the job begins, in the place of whatever is there.
        characters: of decisions that are there since the last snapshot.
    """

    def __init__(
        self, leadership: Leadership, closing: threading.Event, run: str, after: int | None = None, characters: int = 0
    ) -> None:  # fmt: skip
        self._leadership = leadership
        self._closing = closing
        self._run = run
        self._location = leadership.location
        self._gateway = leadership.gateway()
        self._begins = after is None
        self._number = None if after is None else after + 1
        self._characters, self._snapshot_of = characters, 0
        self._unfinished: bytes | None = None
        self._next_try = 0.0
        self._cut_at: list[int] = []
        """Revisions of the snapshots that history may be cut at."""

    def write(self, lines: Sequence[str]) -> None:
        """Append an entry; when it returns, most members have it on disk.

        Raises:
            UnrecordedError: it may not be there, and no later one will be.
        """
        text = "\n".join(lines)
        data = zlib.compress(text.encode())
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._finish_snapshot()
                self._append(data)
                self._characters += len(text)
                return
            except (UnreachableError, LeaseLostError) as error:
                if time.monotonic() > until:
                    raise UnrecordedError(f"nothing could be decided for {PATIENCE_S:.0f} s: {error}") from error
            except EtcdError as error:
                raise UnrecordedError(str(error)) from error
            if self._closing.wait(RETRY_S):
                raise UnrecordedError("the job is over")

    def shorten(self, snapshot: Callable[[], str]) -> None:
        """Let a snapshot take the place of all entries, if they are many. Where etcd is away, a later call does.

        Args:
            snapshot: makes its line.

        Raises:
            UnrecordedError: no later decision will be taken.
        """
        if self._characters < max(LONG, TIMES * self._snapshot_of) or time.monotonic() < self._next_try:
            return
        self._next_try = time.monotonic() + AGAIN_S
        try:
            if self._unfinished is None:
                text = snapshot()
                self._snapshot_of, self._unfinished = len(text), zlib.compress(text.encode())
            self._finish_snapshot()
            self._compact()
        except MalformedError as error:
            self._next_try = inf  # the next one would be no better
            warn(f"resihp: the decisions in {self._location} can't be shortened: {error}")
        except (UnreachableError, LeaseLostError):
            pass  # A later call tries again.
        except EtcdError as error:
            raise UnrecordedError(str(error)) from error

    def close(self) -> None:
        self._gateway.close()

    def _finish_snapshot(self) -> None:
        """Append a snapshot that was begun: it may be there, though no answer has come."""
        if self._unfinished is None:
            return
        self._cut_at.append(self._append(self._unfinished, shortens=True))
        self._unfinished, self._characters = None, 0

    def _compact(self) -> None:
        """Let etcd forget what it was before the last snapshot but one. Whoever looks after etcd may do without that:
        this job may not be let, or all may be forgotten already."""
        *_, before, last = (0, *self._cut_at)
        self._cut_at = [last]
        if before:
            with suppress(EtcdError):
                self._gateway.compact(before)

    def _append(self, data: bytes, shortens: bool = False) -> int:
        """Returns etcd's revision; 0: it was made earlier."""
        if self._number is None:
            last = self._gateway.last(*self._location.entries)
            self._number = (0 if last is None else self._location.number_of(last) or 0) + 1
        deleted: Spans = self._location.log_before(self._number) if shortens else ()
        if self._begins:
            deleted = self._location.before(self._number, self._run)
        *pieces, entry = _puts(self._location, self._number, data)
        made_at = 0
        for put in (*pieces, entry):
            made_at = self._make(put, entry, self._number, deleted if put is entry else ())
            if not made_at:
                break
        self._number += 1
        self._begins = False
        return made_at

    def _make(self, put: Put, entry: Put, number: int, deleted: Spans) -> int:
        """Put a part of an entry that is not there yet, as the leader; returns etcd's revision; 0: it was there."""
        location = self._location
        last = () if self._begins else (location.entry(number - 1),)
        while True:
            token = self._leadership.token
            outcome = self._gateway.transact(
                {location.leader: token, entry.key: 0}, put, (entry.key, *last), last, deleted
            )  # fmt: skip
            if outcome.succeeded:
                return outcome.revision
            found = {held.key: held.value for held in outcome.found}
            if found.get(entry.key) == entry.value:
                return 0  # It was made, and the answer was lost.
            # Those of a job that has begun meanwhile may be gone, too.
            if entry.key in found or not found.keys() >= set(last):
                raise EtcdError(f"{location} has decisions of another job since this one has led it")
            self._leadership.stand_again(self._gateway, token)


def _puts(location: Location, number: int, data: bytes) -> list[Put]:
    """What makes an entry; the last one is the entry itself."""
    if len(data) <= PIECE_BYTES:
        return [Put(location.entry(number), data)]
    pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
    if len(pieces) > MOST_PIECES:
        raise EtcdError(f"a decision takes {len(data)} bytes, which are too many for etcd")
    held = f"pieces {len(pieces)} {hashlib.sha256(data).hexdigest()}".encode()
    made = [Put(location.piece(number, index), piece) for index, piece in enumerate(pieces)]
    return [*made, Put(location.entry(number), held)]


def read_etcd_decisions(location: Location) -> Decisions:
    """The decisions of the last run in etcd, as far as they can be read.

    Raises:
        UnusableError: there are none, they are of another version, or etcd doesn't tell them.
    """
    gateway = Gateway(location)
    try:
        gateway.check_version()
        return decisions_from(gateway)
    except EtcdError as error:
        raise UnusableError(str(error)) from error
    finally:
        gateway.close()


def decisions_from(gateway: Gateway) -> Decisions:
    """The decisions of the last run in etcd, as far as they can be read.

    Raises:
        UnusableError: there are none, or they are of another version.
        EtcdError: etcd doesn't tell them.
    """
    return decisions_in(list(_read_all(gateway)), str(gateway.location), "entry")


def _read_all(gateway: Gateway) -> Iterator[Read]:
    location = gateway.location
    for held in gateway.all(*location.entries):
        number = location.number_of(held.key)
        if number is not None:
            try:
                yield from (Read(number, line) for line in _text(gateway, number, held).split("\n"))
            except _DamagedError as error:
                yield Read(number, "", str(error))


class _DamagedError(Exception):
    """An entry can't be read; the text says why."""


def _text(gateway: Gateway, number: int, held: Held) -> str:
    data = held.value
    if in_pieces := _IN_PIECES.fullmatch(data):
        data = b"".join(_piece(gateway, number, index) for index in range(min(int(in_pieces[1]), MOST_PIECES)))
        if hashlib.sha256(data).hexdigest() != in_pieces[2].decode():
            raise _DamagedError("its pieces are not those that were written")
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(data, LARGEST)
    except zlib.error as error:
        raise _DamagedError(str(error)) from error
    if not reader.eof:
        raise _DamagedError("it is cut off, or too large")
    return text.decode(errors="replace")


def _piece(gateway: Gateway, number: int, index: int) -> bytes:
    held = gateway.get(gateway.location.piece(number, index))
    if held is None:
        raise _DamagedError(f"its piece {index} is missing")
    return held.value
