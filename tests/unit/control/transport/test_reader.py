# SPDX-License-Identifier: Apache-2.0
"""A reader of notices whose next one is deleted just as it comes."""

from __future__ import annotations

import pytest

from megatron_resihp.control import keys
from megatron_resihp.control.transport.store.reader import GONE_S, NoticeReader
from megatron_resihp.protocol.notices import NOTICES, NoticesForgotten, WorkersGivenUp

READ_S = 60.0
GIVEN_UP = WorkersGivenUp((7,), "silent")
COORDINATOR = "the coordinator"


class Store:
    """Holds texts; `seen` are keys that were there when they were looked for. Counts the seconds of waiting in vain."""

    def __init__(self, texts: dict[str, str], seen: str, comes_after_s: float | None = None) -> None:
        self.texts, self.seen, self.comes_after_s = texts, seen, comes_after_s
        self.waited_s = 0.0

    def wait(self, key: str, timeout_s: float) -> bool:
        return key == self.seen or key in self.texts

    def check(self, key: str) -> bool:
        return key in self.texts

    def get(self, key: str, timeout_s: float) -> str:
        if key in self.texts:
            return self.texts[key]
        if self.comes_after_s is not None and self.waited_s + timeout_s >= self.comes_after_s:
            return NOTICES.write(GIVEN_UP, COORDINATOR)
        self.waited_s += timeout_s
        raise TimeoutError(key)


def test_a_notice_deleted_before_it_was_read_costs_a_second() -> None:
    texts = {
        keys.FORGOTTEN: "3",
        keys.notice_key(0): NOTICES.write(NoticesForgotten(3), COORDINATOR),
        keys.notice_key(3): NOTICES.write(GIVEN_UP, COORDINATOR),
    }
    store = Store(texts, seen=keys.notice_key(1))
    reader = NoticeReader(store, "worker 9", READ_S)
    reader._number = 1
    assert [reader.next(0.0) for _ in range(3)] == [None, None, GIVEN_UP]
    assert store.waited_s == GONE_S


def test_a_store_that_is_slow_is_waited_for_on() -> None:
    store = Store({}, seen=keys.notice_key(0), comes_after_s=30.0)
    assert NoticeReader(store, "worker 9", READ_S).next(0.0) == GIVEN_UP


def test_a_notice_that_never_comes_is_a_lost_coordinator() -> None:
    store = Store({}, seen=keys.notice_key(0))
    with pytest.raises(TimeoutError):
        NoticeReader(store, "worker 9", READ_S).next(0.0)
    assert store.waited_s == GONE_S + READ_S
