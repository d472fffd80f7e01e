# SPDX-License-Identifier: Apache-2.0
"""Reads texts from the store, in which any process of the job may write, and says which of them are dropped.

May import `protocol`.
"""

import sys
from typing import Final

from megatron_resihp.protocol.wire import Kinds, MalformedError

MOST_TOLD: Final = 1000
"""How many dropped texts get a line each: a sender of more must not fill the log."""
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
