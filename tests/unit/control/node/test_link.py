# SPDX-License-Identifier: Apache-2.0
"""An agent's link to the coordinator, where it can't be made."""

from __future__ import annotations

import errno
import queue
import time
from collections.abc import Callable
from typing import Any

import pytest

from megatron_resihp.control import exit_codes, keys
from megatron_resihp.control.node.link import Link
from megatron_resihp.control.node.mailbox import Ending
from megatron_resihp.control.transport.gate import RefusedSecretError
from megatron_resihp.control.transport.store import StoreError
from megatron_resihp.protocol.messages import SaveRequest

WAIT_S = 10.0


class Answering:
    """A store that is there, or is not any more."""

    def __init__(self, lost: bool) -> None:
        self._lost = lost

    def check(self, key: str) -> bool:
        if self._lost:
            raise StoreError("the connection is lost")
        return True

    def wait(self, key: str, timeout_s: float) -> bool:
        raise StoreError("the connection is lost")


def ended(connect: Callable[[], Any]) -> Ending:
    endings: queue.Queue[Ending] = queue.Queue()

    def introduce(*_: Any) -> None:
        raise StoreError("node 1 has joined already")

    link = Link(connect, introduce, endings.put, lambda slowness: None)
    try:
        return endings.get(timeout=WAIT_S)
    finally:
        link.close(WAIT_S)


def test_a_node_that_the_job_refuses_would_be_refused_again() -> None:
    assert ended(lambda: Answering(lost=False)).code == exit_codes.REFUSED


def test_a_coordinator_that_is_lost_while_a_node_joins_is_lost() -> None:
    """A job script starts the job again for that, and not for what would be refused again."""
    assert ended(lambda: Answering(lost=True)).code == exit_codes.RETRY


@pytest.mark.parametrize(
    ("error", "code"),
    [(StoreError("nothing answers"), exit_codes.RETRY), (RefusedSecretError("another job"), exit_codes.REFUSED)],
)
def test_a_coordinator_that_does_not_let_a_node_in(error: StoreError, code: int) -> None:
    def connect() -> None:
        raise error

    assert ended(connect).code == code


class Failing:
    """A store whose client has a bug, or prints to a full disk, where this is done with it."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def check(self, key: str) -> bool:
        return True

    def wait(self, key: str, timeout_s: float) -> bool:
        self.do("hear the end" if key == keys.END else "listen to notices")
        time.sleep(0.01)
        return False

    def push(self, queue: str, value: str) -> None:
        self.do("post")

    def do(self, what: str) -> None:
        if what == self._doing:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("doing", ["introduce itself", "hear the end", "listen to notices", "post"])
def test_an_agent_that_fails_to_hear_or_to_be_heard_ends_as_if_the_coordinator_were_lost(doing: str) -> None:
    """Else it would never hear of the job's end, and its node would stay for good."""
    endings: queue.Queue[Ending] = queue.Queue()
    store: Any = Failing(doing)
    link = Link(lambda: store, lambda *_: store.do("introduce itself"), endings.put, lambda slowness: None)
    try:
        link.post(SaveRequest(0.0))
        ending = endings.get(timeout=WAIT_S)
    finally:
        link.close(WAIT_S)
    assert (ending.code, ending.agreed) == (exit_codes.RETRY, False)
    assert ending.reason == "the coordinator is lost: OSError: [Errno 28] No space left on device"
