# SPDX-License-Identifier: Apache-2.0
"""What the store's storage says to whom, and when: no connections, no clock. More of it is in `test_questions.py`."""

from __future__ import annotations

from megatron_resihp.control.transport.store.storage import YES, Storage
from megatron_resihp.control.transport.store.wire import Op, Reply, Request, Said, read_values

LONG_S = 60.0
TAKE = Request(Op.TAKE, (b"queue",), LONG_S)


def pushing(value: bytes) -> Request:
    return Request(Op.PUSH, (b"queue", value))


def test_who_waits_for_a_queue_gets_all_that_was_pushed_at_once() -> None:
    storage = Storage()
    assert storage.ask("taker", TAKE, 0.0) == [] and storage.give_out() == []
    for number in range(3):
        assert storage.ask("worker", pushing(b"%d" % number), 0.0) == [("worker", YES)]
    [(taker, reply)] = storage.give_out()
    assert taker == "taker" and read_values(reply.value) == [b"0", b"1", b"2"]
    assert storage.give_out() == []


def test_each_value_has_one_taker_and_who_got_none_still_waits() -> None:
    storage = Storage()
    for taker in ("one", "another"):
        storage.ask(taker, TAKE, 0.0)
    for expected in ("one", "another"):
        storage.ask("worker", pushing(b"value"), 0.0)
        assert [who for who, _ in storage.give_out()] == [expected]
    storage.ask("one", TAKE, 0.0)
    storage.ask("worker", pushing(b"value"), 0.0)
    storage.forget("one")
    assert storage.give_out() == []
    [(_, reply)] = storage.ask("late", TAKE, 0.0)
    assert read_values(reply.value) == [b"value"], "who asks when it is there does not wait"


def test_a_sum_that_would_be_too_long_is_refused_and_changes_nothing() -> None:
    """Python writes no numbers of more than 4,300 digits."""
    storage = Storage()
    longest = b"9" * 4300
    storage.ask("worker", Request(Op.SET, (b"counter", longest)), 0.0)
    [(_, reply)] = storage.ask("worker", Request(Op.ADD, (b"counter", b"1")), 0.0)
    assert reply.said is Said.WRONG
    assert storage.ask("worker", Request(Op.GET, (b"counter",)), 0.0) == [("worker", Reply(Said.YES, longest))]


def test_values_that_are_set_together_wake_whoever_waits_for_one_of_them() -> None:
    storage = Storage()
    for key in (b"one", b"another"):
        storage.ask(key, Request(Op.GET, (key,), 10.0), 0.0)
    told = storage.ask("worker", Request(Op.SET, (b"another", b"1", b"third", b"2", b"one", b"3")), 0.0)
    assert dict(told) == {
        "worker": Reply(Said.YES), b"one": Reply(Said.YES, b"3"), b"another": Reply(Said.YES, b"1"),
    }  # fmt: skip
    assert storage.ask("late", Request(Op.GET, (b"third",)), 0.0) == [("late", Reply(Said.YES, b"2"))]
