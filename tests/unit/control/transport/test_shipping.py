# SPDX-License-Identifier: Apache-2.0
"""Records on their way: in order, never waited for by who sends them, and counted where they are dropped."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.control.head.detection import Detection
from megatron_resihp.control.transport import shipping
from megatron_resihp.control.transport.access.secret import fresh_secret
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.frames import LENGTH, Frames
from megatron_resihp.control.transport.shipping import LARGEST, Inbox, Outbox, Relay, Uplink
from megatron_resihp.control.transport.sockets import reserve
from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.detection import Detection as DetectionEvent
from megatron_resihp.events.detection import DetectionFailed
from megatron_resihp.events.epochs import EpochStarted
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import CoordinatorReplaced, Job
from megatron_resihp.events.training import Iteration

SECRET = fresh_secret()
WAIT_S = 10.0


class Sink:
    """Takes messages as the coordinator does."""

    def __init__(self) -> None:
        self.messages: queue.Queue[bytes] = queue.Queue()

    def deliver(self, message: bytes) -> bool:
        self.messages.put(message)
        return True

    def take(self, count: int) -> list[bytes]:
        return [self.messages.get(timeout=WAIT_S) for _ in range(count)]


def encode(item: str, lost: int) -> bytes:
    return f"{item}/{lost}".encode()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 9), min_size=1))
def test_messages_survive_any_cut_of_the_stream(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(LENGTH.pack(len(message)) + message for message in messages)
    frames, found, position = Frames(LARGEST), [], 0
    while position < len(stream):
        size = cuts[position % len(cuts)]
        found += frames.feed(stream[position : position + size])
        position += size
    assert found == messages


def test_what_can_be_no_message_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        list(Frames(LARGEST).feed(LENGTH.pack(LARGEST + 1)))


def test_messages_of_all_workers_arrive_in_the_order_in_which_each_sent_them() -> None:
    relay, sink = Relay(SECRET), Sink()
    outboxes = []
    for _ in range(3):
        kept, given = socket.socketpair()
        relay.add(kept)
        outboxes.append(Outbox(given, encode))
    relay.start(sink.deliver)
    for number in range(10):
        for worker, outbox in enumerate(outboxes):
            outbox.offer(f"{worker}:{number}")
    arrived = [message.decode() for message in sink.take(30)]
    relay.close(WAIT_S)
    for worker in range(3):
        assert [m for m in arrived if m.startswith(f"{worker}:")] == [f"{worker}:{n}/0" for n in range(10)]


def test_closing_sends_what_waits() -> None:
    relay, sink = Relay(SECRET), Sink()
    kept, given = socket.socketpair()
    relay.add(kept)
    outbox = Outbox(given, encode)
    for number in range(20):
        outbox.offer(str(number))
    outbox.close(WAIT_S)
    relay.start(sink.deliver)
    assert len(sink.take(20)) == 20
    relay.close(WAIT_S)


def test_a_worker_whose_agent_does_not_read_drops_and_says_how_many(pair: Any) -> None:
    ours, theirs = pair
    big = "x" * 1_000_000  # more than the socket takes
    outbox = Outbox(ours, encode, limit=2)
    for _ in range(50):
        outbox.offer(big)
    relay, sink = Relay(SECRET), Sink()
    relay.add(theirs)
    relay.start(sink.deliver)
    lost = 0
    while lost == 0:
        outbox.offer("small")
        lost = int(sink.take(1)[0].rpartition(b"/")[2])
    assert lost >= 50 - 3 - 1  # one under way, two waiting
    relay.close(WAIT_S)


def test_a_worker_whose_agent_is_gone_goes_on(pair: Any) -> None:
    ours, theirs = pair
    outbox = Outbox(ours, encode, limit=2)
    theirs.close()
    for _ in range(100):
        outbox.offer("record")


def test_a_stream_that_is_no_stream_of_messages_is_left_and_the_others_go_on(pair: Any) -> None:
    ours, theirs = pair
    kept, given = socket.socketpair()
    relay, sink = Relay(SECRET), Sink()
    relay.add(theirs)
    relay.add(kept)
    relay.start(sink.deliver)
    ours.sendall(b"\xff" * 100)
    Outbox(given, encode).offer("good")
    assert sink.take(1) == [b"good/0"]
    relay.close(WAIT_S)
    assert ours.recv(1) == b""


def test_records_of_other_nodes_come_over_tcp() -> None:
    sink, uplink, far = Sink(), Uplink(SECRET), Relay(SECRET)
    listener = reserve("127.0.0.1", 0)
    near = Relay(SECRET, listener)
    near.start(sink.deliver)
    kept, given = socket.socketpair()
    far.add(kept)
    far.start(uplink.deliver)
    Outbox(given, encode).offer("far")
    uplink.connect(Address("127.0.0.1", listener.getsockname()[1]))
    assert sink.take(1) == [b"far/0"]
    far.close(WAIT_S)
    uplink.close()
    near.close(WAIT_S)


def test_a_lost_connection_to_the_coordinator_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "AGAIN_S", 0.01)
    uplink, listener = Uplink(SECRET), reserve("127.0.0.1", 0)
    address = Address("127.0.0.1", listener.getsockname()[1])
    uplink.connect(address)
    for number in range(2):
        sink = Sink()
        near = Relay(SECRET, reserve(*address) if number else listener)
        near.start(sink.deliver)
        messages = [f"{number}.{each}".encode() for each in range(3)]
        assert all(uplink.deliver(message) for message in messages)
        # The first one after the loss may have gone to nobody: the kernel takes it before it knows.
        assert sink.take(2)[-1] in messages
        near.close(WAIT_S)
    uplink.close()


def test_a_coordinator_that_takes_no_measurements_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shipping, "AGAIN_S", 0.01)
    with reserve("127.0.0.1", 0) as nobody:
        uplink = Uplink(SECRET, reconnect_s=0.03)
        uplink.connect(Address("127.0.0.1", nobody.getsockname()[1]))
        assert not uplink.deliver(b"record") and not uplink.deliver(b"record")
    [line] = capsys.readouterr().err.splitlines()
    assert "this node's measurements don't reach the coordinator any more" in line and "refused" in line


def test_a_lost_coordinator_ends_the_relay_and_not_the_worker(pair: Any) -> None:
    ours, theirs = pair
    relay, uplink = Relay(SECRET), Uplink(SECRET)
    relay.add(theirs)
    relay.start(uplink.deliver)
    outbox = Outbox(ours, encode)
    outbox.offer("record")
    uplink.close()
    relay.close(WAIT_S)
    for _ in range(100):
        outbox.offer("record")
    assert not uplink.deliver(b"late")


def test_a_full_inbox_is_waited_for_until_it_closes() -> None:
    inbox = Inbox(1)
    assert inbox.deliver(b"first")
    assert inbox.take(0.0) == b"first" and inbox.take(0.0) is None
    inbox.close()
    assert not inbox.deliver(b"late")


class FakeJudge:
    def __init__(self, fail: bool = False) -> None:
        self.fail = fail
        self.noted: list[str] = []

    def note(self, event: Event) -> list[Event]:
        self.noted.append(event.name)
        return []

    def take(self, message: bytes, now: float) -> list[Event]:
        if self.fail:
            raise RuntimeError("no judgement")
        return [DetectionFailed(part=message.decode(), error=" ".join(self.noted))]

    def look(self, now: float) -> list[Event]:
        return []

    def finish(self) -> list[Event]:
        return [DetectionEvent(iterations=1, records=1, faults={}, warm=True)]


def test_what_was_told_before_a_record_is_known_when_it_is_judged() -> None:
    written: list[Any] = []
    bus = EventBus()
    detection = Detection(FakeJudge, bus)
    bus.subscribe(written.append, DetectionFailed, DetectionEvent)
    plan: dict[str, Any] = {"replicas": [], "standbys": {}}
    for event in (Job(train_iters=9), Iteration(iteration=1), EpochStarted(plan=plan), CoordinatorReplaced(by="us")):
        bus.publish(event)
    detection.inbox.deliver(b"1")
    detection.close(WAIT_S)
    assert [type(event) for event in written] == [DetectionFailed, DetectionEvent]
    assert written[0].error == "job epoch_started coordinator_replaced" and written[0].part == "1"
    assert all(event.worker is None and event.time > 0 for event in written)


def test_a_judge_that_fails_is_told_of_once_and_records_are_taken_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    written: list[Any] = []
    bus = EventBus()
    bus.subscribe(written.append, Event)
    detection = Detection(lambda: FakeJudge(fail=True), bus)
    for _ in range(5000):
        assert detection.inbox.deliver(b"record")
    detection.close(WAIT_S)
    (failed,) = written
    assert isinstance(failed, DetectionFailed) and "no judgement" in failed.error
