# SPDX-License-Identifier: Apache-2.0
"""Reads texts from the store, in which any process of the job may write, and says which of them are dropped.

`NoticeReader` reads the coordinator's notices, in their order. May import `protocol` and `store`.
"""

import sys
from typing import Final

from megatron_resihp.control import keys
from megatron_resihp.control.transport.store.store import Store
from megatron_resihp.protocol.notices import NOTICES, Notice, NoticesForgotten
from megatron_resihp.protocol.wire import Kinds, MalformedError

MOST_TOLD: Final = 1000
"""How many dropped texts get a line each: a sender of more must not fill the log."""
LOOK_BACK_S: Final = 10.0
"""After so long without a notice: whether the next one has come, and been deleted."""
GONE_S: Final = 1.0
"""A notice that was there, and does not come in this time, may have been deleted meanwhile."""
NO_MORE: Final = "; further ones are dropped without a word"


class Reader[T]:
    """Reads texts of some kinds, and drops malformed ones with a line on stderr each.

    Args:
        kinds: of texts.
        name: of this process, for that line.
        what: a text, in words.
    """

    def __init__(self, kinds: Kinds[T], name: str, what: str) -> None:
        self._kinds, self._name, self._what = kinds, name, what
        self._dropped = 0

    def read(self, text: str) -> T | None:
        """What a text holds; None: it is malformed."""
        try:
            return self._kinds.read(text).body
        except MalformedError as error:
            if self._dropped < MOST_TOLD:
                self._dropped += 1
                more = NO_MORE if self._dropped == MOST_TOLD else ""
                print(f"resihp: {self._name} drops {self._what}: {error}{more}", file=sys.stderr, flush=True)
            return None


class NoticeReader:
    """One process's place among the notices; what is malformed is dropped.

    Args:
        name: of this process.
        read_s: how long a notice that is there may take.
    """

    def __init__(self, store: Store, name: str, read_s: float) -> None:
        self._store = store
        self._reader = Reader(NOTICES, name, "a malformed notice")
        self._read_s = read_s
        self._number = 0
        self._silent_s = 0.0
        self._begun_again = False

    def begin_again(self) -> None:
        """Go back to the first notice, as another store holds them now: what has been heard is heard twice."""
        self._begun_again = True

    def next(self, wait_s: float) -> Notice | None:
        """The next notice, if it comes in time; None may also mean that one was dropped or is forgotten.

        Raises:
            StoreError, TimeoutError: the coordinator is lost.
        """
        if self._begun_again:
            self._number, self._begun_again = 0, False
        key = keys.notice_key(self._number)
        if not self._store.wait(key, wait_s):
            self._silent_s += wait_s
            if self._silent_s >= LOOK_BACK_S:
                self._look_back()
            return None
        self._silent_s = 0.0
        text = self._text(key)
        if text is None:
            return None
        if self._begun_again:
            return None
        notice = self._reader.read(text)
        self._number = notice.next if isinstance(notice, NoticesForgotten) else self._number + 1
        return None if isinstance(notice, NoticesForgotten) else notice

    def _text(self, key: str) -> str | None:
        """A notice that was there; None: it is forgotten, perhaps since then."""
        for within_s in (GONE_S, self._read_s):
            try:
                return self._store.get(key, within_s)
            except TimeoutError as error:
                late = error
                if self._look_back():
                    return None
        raise late

    def _look_back(self) -> bool:
        """Go back to the first notice if the next one is gone: what is left there may be heard twice."""
        self._silent_s = 0.0
        if not self._store.check(keys.FORGOTTEN):
            return False
        gone = int(self._store.get(keys.FORGOTTEN, self._read_s)) > self._number
        if gone:
            self._number = 0
        return gone
