# SPDX-License-Identifier: Apache-2.0
"""What node 0 leaves behind where the coordinator's thread fails; the coordinator itself is stood in for."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_resihp.control import exit_codes, keys
from megatron_resihp.control.coordination.requests import Requests
from megatron_resihp.control.head.headquarters import Headquarters, Job
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.node.mailbox import Ending
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.secret import fresh_secret
from megatron_resihp.control.transport.store import StoreError, reserve
from megatron_resihp.control.transport.store_client import connect
from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.event import Event
from megatron_resihp.protocol.published import END

HEARD_S = 30.0
SECRET = fresh_secret()


Events = queue.SimpleQueue[Any]


def headquarters(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> tuple[Headquarters, Address, Events, queue.SimpleQueue[Ending]]:
    """Of a job whose coordinator raises this."""

    def run() -> int:
        raise error

    monkeypatch.setattr(Headquarters, "_coordinator", lambda self, store, decisions: SimpleNamespace(run=run))
    beside: Any = SimpleNamespace(close=lambda timeout_s: None)
    listener, events, ends = reserve("127.0.0.1", 0), Events(), queue.SimpleQueue[Ending]()
    address = Address("127.0.0.1", listener.getsockname()[1])
    bus = EventBus()
    bus.subscribe(events.put, Event)
    job = Job(JobSize(1, 1), [], SimpleNamespace(), "token", SECRET, tmp_path)  # type: ignore[arg-type]
    return Headquarters(address, listener, bus, Requests(), job, None, beside, beside, ends.put), address, events, ends


def test_a_coordinator_that_fails_leaves_an_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    made, address, events, _ = headquarters(ZeroDivisionError("twice"), monkeypatch, tmp_path)
    event = events.get(timeout=HEARD_S)
    assert (event.name, event.exit_code) == ("run_finished", exit_codes.RETRY)
    assert event.reason == "the coordinator failed: ZeroDivisionError: twice"
    end = END.read(connect(address, SECRET, HEARD_S).get(keys.END, HEARD_S)).body
    assert (end.code, end.reason) == (exit_codes.RETRY, event.reason)
    made.close(Ending(1, event.reason, agreed=True), HEARD_S)
    assert events.empty()


def test_a_coordinator_that_is_cut_off_from_the_store_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    made, _, events, ends = headquarters(StoreError("the connection is lost"), monkeypatch, tmp_path)
    ending = ends.get(timeout=HEARD_S)
    assert (ending.code, ending.reason) == (exit_codes.RETRY, "the coordinator is cut off: the connection is lost")
    made.close(ending, HEARD_S)
    assert events.get(timeout=HEARD_S).name == "run_finished"


def test_a_coordinator_that_can_t_open_its_store_ends_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def open_store(self: Headquarters) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(Headquarters, "_open", open_store)
    made, _, _, ends = headquarters(ZeroDivisionError("not reached"), monkeypatch, tmp_path)
    ending = ends.get(timeout=HEARD_S)
    assert (ending.code, ending.agreed) == (exit_codes.RETRY, False)
    assert ending.reason == "the coordinator failed: OSError: [Errno 9] Bad file descriptor"
    made.close(ending, HEARD_S)
