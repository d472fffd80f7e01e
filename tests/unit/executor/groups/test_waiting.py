# SPDX-License-Identifier: Apache-2.0
"""Calls that may block in gloo: given up when the epoch breaks, counted until they come back."""

from __future__ import annotations

import threading
import time

import pytest

from megatron_resihp.executor.groups.waiting import WaitAbandoned, Waiter

LIMIT_S = 10.0


def asides() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "resihp-aside"]


def await_end(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_results_and_errors_come_through() -> None:
    waiter = Waiter(lambda: False)
    assert waiter.aside(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        waiter.aside(lambda: 1 / 0)
    assert waiter.left_behind == 0


def test_a_call_that_is_given_up_counts_until_it_comes_back() -> None:
    broken, gate = threading.Event(), threading.Event()
    waiter = Waiter(broken.is_set)
    before = asides()
    broken.set()
    with pytest.raises(WaitAbandoned):
        waiter.aside(lambda: gate.wait(LIMIT_S))
    left = [thread for thread in asides() if thread not in before]
    assert waiter.left_behind == len(left) == 1

    broken.clear()
    assert waiter.aside(lambda: 3) == 3, "a new epoch does not wait behind an old one's call"
    gate.set()
    await_end(left)
    assert waiter.left_behind == 0


def test_a_wait_for_a_collective_ends_with_the_epoch() -> None:
    class NeverDone:
        def is_completed(self) -> bool:
            return False

    def wait(work: object, timeout: object) -> bool:
        time.sleep(0.001)
        raise RuntimeError("Operation timed out!")

    waiter = Waiter(lambda: True)
    waiter._wait = wait
    with pytest.raises(WaitAbandoned):
        waiter._wait_in_slices(NeverDone())


def test_how_long_a_thread_has_been_waiting_is_known() -> None:
    waiter, began, gate = Waiter(lambda: False), threading.Event(), threading.Event()
    before = time.monotonic()
    assert waiter.longest_s(before) == 0

    def call() -> None:
        began.set()
        gate.wait(LIMIT_S)

    thread = threading.Thread(target=waiter.aside, args=(call,))
    thread.start()
    assert began.wait(LIMIT_S)
    assert 0 < waiter.longest_s(before + 100) <= 100
    gate.set()
    await_end([thread])
    assert waiter.longest_s(time.monotonic()) == 0


def test_a_wait_around_others_begins_anew_with_the_end_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has just got something has not been held up since the outer wait began."""
    waiter, now = Waiter(lambda: False), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with waiter.noted():
        now[0] = 50.0
        assert waiter.longest_s(50.0) == 50.0
        waiter.aside(lambda: 3)
        assert waiter.longest_s(60.0) == 10.0
    assert waiter.longest_s(60.0) == 0
