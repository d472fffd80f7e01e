# SPDX-License-Identifier: Apache-2.0
"""Messages for the coordinator, as they are taken from the store, in which any process may write.

May import `events`, `protocol`, the store and this package's door.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from megatron_resihp.control import keys
from megatron_resihp.control.coordination.door import Heard, read_message
from megatron_resihp.control.coordination.state_machine.state import State
from megatron_resihp.control.transport.store.reader import MOST_TOLD, NO_MORE
from megatron_resihp.control.transport.store.store import Store
from megatron_resihp.events.job import MessageDropped
from megatron_resihp.protocol.messages import NodeReport
from megatron_resihp.protocol.wire import MalformedError, shown

RECENT: Final = 10_000
"""How many messages' ids are remembered."""


class Inbox:
    """The inbox of one job.

    Args:
        state: of the job, which says what can be meant.
        tell_dropped: takes an event for each of the first messages that are dropped.
        known: ids of messages that have come to a coordinator before, and were decided about.

    Attributes:
        dropped: how many messages were.
        letter, said: the id and the text of the last message that was taken; see `wire.Letter`.
    """

    def __init__(
        self,
        store: Store,
        state: State,
        tell_dropped: Callable[[MessageDropped], None],
        known: frozenset[str] = frozenset(),
    ) -> None:
        self._store = store
        self._state = state
        self._tell_dropped = tell_dropped
        self.dropped = 0
        self.letter: str | None = None
        self.said = ""
        self._known = known
        self._recent: OrderedDict[str, None] = OrderedDict()  # a dict would look for its first item from the start on
        self._taken: deque[str] = deque()

    def take(self, wait_s: float = 0.0) -> list[Heard] | None:
        """The next message, if any comes in time; an empty list if it was dropped; None: none has come."""
        if not self._taken:
            self._taken.extend(self._store.take(keys.INBOX, wait_s))
        if not self._taken:
            return None
        text = self._taken.popleft()
        try:
            letter = read_message(text, self._state.job.size, self._state.joining.may_exist)
        except MalformedError as error:
            self.dropped += 1
            if self.dropped <= MOST_TOLD:
                more = NO_MORE if self.dropped == MOST_TOLD else ""
                self._tell_dropped(MessageDropped(reason=f"{error}{more}", text=shown(text)))
            return []
        self.letter, self.said = letter.id, letter.said
        if not self._is_new(letter.id):
            return []
        return self._new_of(letter.body) if isinstance(letter.body, NodeReport) else [letter.body]

    def _new_of(self, report: NodeReport) -> list[Heard]:
        """A node's report without those that have come before, by another way."""
        new = tuple(each for each in report.survivors if self._is_new(each.letter))
        if len(new) == len(report.survivors):
            return [report]
        self.said = ""
        return [replace(report, survivors=new)] if new else []

    def _is_new(self, letter: str | None) -> bool:
        """Whether a message has not come before: a sender that loses the connection may send again what has arrived."""
        if letter is None:
            return True
        if letter in self._recent or letter in self._known:
            return False
        self._recent[letter] = None
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return True
