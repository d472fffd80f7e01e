# SPDX-License-Identifier: Apache-2.0
"""What node 0 leaves behind where the coordinator's thread fails; the coordinator itself is stood in for."""

from __future__ import annotations

import errno
import io
import queue
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_events import made_up

from megatron_resihp.control import exit_codes, keys
from megatron_resihp.control.coordination.decisions.recorded import UnrecordedError
from megatron_resihp.control.coordination.requests import Requests
from megatron_resihp.control.head.headquarters import Headquarters, Job
from megatron_resihp.control.head.stalls import StallWatch
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.node.mailbox import Ending
from megatron_resihp.control.transport.access.secret import fresh_secret
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.sockets import StoreError, reserve
from megatron_resihp.control.transport.store.client import StoreClient, connect
from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.event import Event
from megatron_resihp.protocol.published import END

HEARD_S = 30.0
SECRET = fresh_secret()


Events = queue.SimpleQueue[Any]


def raising(error: Exception) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


def headquarters(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, **of_job: Any
) -> tuple[Headquarters, Address, Events, queue.SimpleQueue[Ending]]:
    """Of a job whose coordinator raises this."""
    monkeypatch.setattr(
        Headquarters, "_coordinator", lambda self, store, decisions: SimpleNamespace(run=raising(error))
    )
    return begun(tmp_path, **of_job)


def begun(tmp_path: Any, **of_job: Any) -> tuple[Headquarters, Address, Events, queue.SimpleQueue[Ending]]:
    beside: Any = SimpleNamespace(close=lambda timeout_s=0.0: None)
    listener, events, ends = reserve("127.0.0.1", 0), Events(), queue.SimpleQueue[Ending]()
    address = Address("127.0.0.1", listener.getsockname()[1])
    bus = EventBus()
    bus.subscribe(events.put, Event)
    job = Job(JobSize(1, 1), [], SimpleNamespace(), "token", SECRET, tmp_path, **of_job)  # type: ignore[arg-type]
    made = Headquarters(address, listener, bus, Requests(), job, None, beside, beside, beside, ends.put)
    return made, address, events, ends


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


def test_one_that_takes_over_knows_when_the_job_evaluates_and_saves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Else all of that would be told as a stall."""
    heard: list[Event] = []

    class Watch(StallWatch):
        def note(self, event: Event, now: float) -> list[Any]:
            heard.append(event)
            return super().note(event, now)

    monkeypatch.setattr("megatron_resihp.control.head.headquarters.StallWatch", Watch)
    fact = made_up("job", eval_interval=100)
    lost = SimpleNamespace(take_over=raising(UnrecordedError("another has decided more")))
    monkeypatch.setattr(Headquarters, "_coordinator", lambda self, store, decisions: lost)
    made, _, _, ends = begun(tmp_path, before=SimpleNamespace(decisions=None, facts=(fact,)))
    assert heard == [fact]
    made.close(ends.get(timeout=HEARD_S), HEARD_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_coordinator_that_fails_and_can_not_say_so_leaves_an_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    made, address, _, _ = headquarters(ZeroDivisionError("twice"), monkeypatch, tmp_path)
    end = END.read(connect(address, SECRET, HEARD_S).get(keys.END, HEARD_S)).body
    assert end.reason == "the coordinator failed: ZeroDivisionError: twice"
    made.close(Ending(1, end.reason, agreed=True), HEARD_S)


@pytest.mark.parametrize("error", [ValueError("second"), SystemExit("second")])
def test_a_coordinator_that_fails_once_more_while_it_ends_the_job_ends_this_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, error: BaseException
) -> None:
    """Else nobody would know that there is none any more."""

    def fail(*_: Any) -> None:
        raise error

    def run() -> None:
        monkeypatch.setattr(StoreClient, "set", fail)
        raise ZeroDivisionError("first")

    monkeypatch.setattr(Headquarters, "_coordinator", lambda *_: SimpleNamespace(run=run))
    made, _, _, ends = begun(tmp_path)
    ending = ends.get(timeout=HEARD_S)
    assert (ending.code, ending.agreed) == (exit_codes.RETRY, False)
    assert ending.reason == f"the coordinator failed: {type(error).__name__}: second"
    made.close(ending, HEARD_S)


@pytest.mark.parametrize("another", [True, False])
def test_a_coordinator_that_takes_over_is_found_only_once_no_other_can_decide(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, another: bool
) -> None:
    """Else processes would follow it, and not the one that leads."""
    before, done, stores = SimpleNamespace(decisions=None, facts=()), list[str](), list[Any]()

    def take_over() -> None:
        done.append("take over")
        if another:
            raise UnrecordedError("another has decided more")

    def claim() -> None:
        done.append("claim")
        assert not stores[0].check(keys.RUN)

    def run() -> int:
        done.append("run")
        assert stores[0].get(keys.RUN, HEARD_S) == "token"
        return 0

    def coordinator(self: Headquarters, store: Any, decisions: object) -> Any:
        stores.append(store)
        return SimpleNamespace(take_over=take_over, run=run)

    monkeypatch.setattr(Headquarters, "_coordinator", coordinator)
    made, _, _, ends = begun(tmp_path, before=before, claim=claim)
    if another:
        ending = ends.get(timeout=HEARD_S)
        assert (ending.code, ending.reason) == (exit_codes.RETRY, "the coordinator is lost: another has decided more")
    made._thread.join(HEARD_S)
    made.close(Ending(exit_codes.FINISHED, "", agreed=True), HEARD_S)
    assert done == (["take over"] if another else ["take over", "claim", "run"]) and ends.empty()
