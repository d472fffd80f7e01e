# SPDX-License-Identifier: Apache-2.0
"""What the coordinator publishes in the store, and when that is deleted: node 0's memory has a bound.

When an epoch begins, nobody needs any more what was published before the last one began: members of this epoch have
read it, since they are ready, and whoever is no member was told so or has lost its liveness connection. Some notices
hold for good, such as who was given up. They stay for processes that come later.
May import `protocol` and the store.
"""

from collections import deque
from typing import Final

from megatron_resihp.control import keys
from megatron_resihp.control.transport.store.store import Store
from megatron_resihp.protocol.answers import ANSWERS, Answer
from megatron_resihp.protocol.notices import (
    ABOUT_AN_EPOCH,
    LAST_HOLDS,
    NOTICES,
    Notice,
    NoticesForgotten,
    PlanChange,
)
from megatron_resihp.protocol.published import DECISIONS, GO, Decision, Go
from megatron_resihp.protocol.wire import COORDINATOR

ANSWERS_KEPT: Final = 100
"""Who waits for an answer deletes it; a command that was interrupted does not."""


class ForeignWriterError(RuntimeError):
    """Another writer has written to this job's store."""


class Bulletin:
    """The coordinator's end of all that it publishes.

    Args:
        store: a connection that no other thread uses.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._notices = _Notices(store)
        self._answers: deque[str] = deque()
        self._recent: list[str] = []
        self._earlier: list[str] = []

    def notify(self, notice: Notice) -> None:
        """Tell every worker and agent."""
        self._notices.post(notice)
        if isinstance(notice, PlanChange):
            self._recent.append(keys.TORCH + keys.groups_of_change(notice.number))

    def decide(self, decision: Decision) -> None:
        """Publish what comes next, for all members of an epoch.

        Raises:
            ForeignWriterError: somebody else has.
        """
        key = keys.plan_key(decision.epoch)
        self._publish(key, DECISIONS.write(decision, COORDINATOR))
        self._recent.append(keys.TORCH + keys.groups_of_epoch(decision.epoch))
        if decision.epoch:  # workers that join start in the first plan
            self._recent.append(key)

    def go(self, go: Go) -> None:
        """Begin an epoch, and delete what nobody needs from then on; raises as `decide`."""
        key = keys.go_key(go.epoch)
        self._publish(key, GO.write(go, COORDINATOR))
        self._recent.append(key)
        for name in self._earlier:
            self._forget(name)
        self._earlier, self._recent = self._recent, []
        self._notices.forget()

    def answer(self, key: str, answer: Answer) -> None:
        """Answer a command, which reads that under this key."""
        if not key.startswith(keys.ANSWERS):
            return
        self._store.set(key, ANSWERS.write(answer, COORDINATOR))
        self._answers.append(key)
        if len(self._answers) > ANSWERS_KEPT:
            self._store.delete(self._answers.popleft())

    def _forget(self, name: str) -> None:
        if name.endswith("/"):
            self._store.delete_all(name)
        else:
            self._store.delete(name)

    def _publish(self, key: str, text: str) -> None:
        """Publish what binds all members. Where another writer's text is, members may have read it, and can't agree."""
        if self._store.set_once(key, text) != text:
            raise ForeignWriterError(f"{key!r} was in the store before the coordinator wrote it")


class _Notices:
    """The numbered notices.

    Each run of deleted ones has a `NoticesForgotten` in the first one's place, so readers from the first on find the
    next.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next = 0
        self._before = 0
        self._there: dict[int, type[Notice]] = {}
        """Those in the store."""

    def post(self, notice: Notice) -> None:
        """Publish a notice under the first free number: what a stranger wrote under others has been read already."""
        text = NOTICES.write(notice, COORDINATOR)
        while self._store.set_once(keys.notice_key(self._next), text) != text:
            self._there[self._next] = NoticesForgotten
            self._next += 1
        self._there[self._next] = type(notice)
        self._next += 1

    def forget(self) -> None:
        """Delete what means nothing any more, among the notices from before the last call."""
        before, self._before = self._before, self._next
        past = [number for number in sorted(self._there) if number < before and not self._holds(number)]
        if not past:
            return
        self._store.set(keys.FORGOTTEN, str(before))
        for number in past:
            del self._there[number]
        held = [*(number for number in sorted(self._there) if number < before), before]
        for first, following in zip([0, *(number + 1 for number in held)], held, strict=False):
            self._close_gap(first, following, past)

    def _holds(self, number: int) -> bool:
        kind = self._there[number]
        if kind in LAST_HOLDS:
            return not any(later > number and other is kind for later, other in self._there.items())
        return kind not in (*ABOUT_AN_EPOCH, NoticesForgotten)

    def _close_gap(self, first: int, following: int, past: list[int]) -> None:
        """From `first` on nothing is left up to `following`."""
        if first == following:
            return
        text = NOTICES.write(NoticesForgotten(following), COORDINATOR)
        self._store.set(keys.notice_key(first), text)
        self._there[first] = NoticesForgotten
        for number in past:
            if first < number < following:
                self._store.delete(keys.notice_key(number))
