# SPDX-License-Identifier: Apache-2.0
"""What training does not wait for is done in order, and no failure is lost."""

import gc
import threading
from collections.abc import Callable

import pytest

from megatron_resihp.control.worker.behind import Behind

WAIT_S = 30.0


def test_the_caller_goes_on_and_may_wait_later() -> None:
    behind, let_go, done = Behind("test"), threading.Event(), list[int]()

    def call(number: int) -> Callable[[], None]:
        def make() -> None:
            assert let_go.wait(WAIT_S)
            done.append(number)

        return make

    for number in range(3):
        behind.begin(call(number))
    assert done == []
    let_go.set()
    behind.settle()
    assert done == [0, 1, 2]


def test_there_is_nothing_to_wait_for_before_the_first_call() -> None:
    Behind("test").settle()


def test_after_a_failure_nothing_else_is_done_and_each_wait_tells_of_it() -> None:
    behind, done = Behind("test"), list[int]()

    def fail() -> None:
        raise RuntimeError("the first")

    behind.begin(fail)
    behind.begin(lambda: done.append(1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the first"):
            behind.settle()
    assert done == []


def test_its_thread_ends_with_it() -> None:
    behind, threads = Behind("test"), list[threading.Thread]()
    behind.begin(lambda: threads.append(threading.current_thread()))
    behind.settle()
    del behind
    gc.collect()
    threads[0].join(WAIT_S)
    assert not threads[0].is_alive()
