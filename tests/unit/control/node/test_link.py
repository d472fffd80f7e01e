# SPDX-License-Identifier: Apache-2.0
"""An agent's link to the coordinator, where it can't be made, or is lost as the job ends."""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from megatron_resihp.control import exit_codes, keys
from megatron_resihp.control.node import link as link_module
from megatron_resihp.control.node.link import Link
from megatron_resihp.control.node.mailbox import Ending
from megatron_resihp.control.transport.access.gate import RefusedSecretError
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.protocol.messages import SaveRequest
from megatron_resihp.protocol.notices import NOTICES, JobEnds

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


class Leaving(Failing):
    """Says that the job ends. Its coordinator leaves before this agent has read how.

    Args:
        lost: the thread that waits for the end finds that it is gone; else it looks for another coordinator.
    """

    def __init__(self, lost: bool) -> None:
        self._lost, self.may_go_on = lost, threading.Event()

    def wait(self, key: str, timeout_s: float) -> bool:
        if key == keys.notice_key(0):
            return True
        assert key == keys.END
        assert self.may_go_on.wait(WAIT_S)
        if self._lost:
            raise StoreError("the connection is lost")
        time.sleep(0.01)
        return False

    def get(self, key: str, timeout_s: float) -> str:
        return NOTICES.write(JobEnds(exit_codes.FINISHED, "finished"), "the coordinator")


@pytest.mark.parametrize("lost", [True, False])
def test_an_agent_that_knows_that_the_job_ends_looks_for_no_other_coordinator(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator does not wait for a node that it has given up. That one would look for two minutes, and fail."""
    monkeypatch.setattr(link_module, "END_COMES_S", WAIT_S if lost else 0.0)
    endings: queue.Queue[Ending] = queue.Queue()
    store: Any = Leaving(lost)
    link = Link(lambda: store, lambda *_: None, endings.put, lambda slowness: None)
    try:
        until = time.monotonic() + WAIT_S
        while link._over is None and time.monotonic() < until:
            time.sleep(0.001)
        store.may_go_on.set()
        ending = endings.get(timeout=WAIT_S / 2)
    finally:
        link.close(WAIT_S)
    assert (ending.code, ending.reason, ending.agreed) == (exit_codes.FINISHED, "finished", True)
