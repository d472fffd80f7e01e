# SPDX-License-Identifier: Apache-2.0
"""Processes of a job that lose their coordinator, and find another one by the run directory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served import HOST, Node, Served

from megatron_resihp.control import keys
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.node import link
from megatron_resihp.control.node.mailbox import Ending
from megatron_resihp.control.transport.access.secret import fresh_secret
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.leaders import FILE_NAME, LEADERLESS_S, RESULT, Leaders
from megatron_resihp.control.transport.liveness import LivenessConnection
from megatron_resihp.control.transport.node_liveness import Joining, NodeLoss, NodeWatcher, come_back
from megatron_resihp.control.transport.shipping import Relay, Uplink
from megatron_resihp.control.transport.sockets import StoreError, reserve
from megatron_resihp.control.transport.store import lasting
from megatron_resihp.control.transport.store import relay as store_relay
from megatron_resihp.control.transport.store.client import StoreClient, connect, open_connection
from megatron_resihp.control.transport.store.lasting import LastingStore
from megatron_resihp.control.transport.store.store import Store
from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.control.worker.errors import CoordinatorLost
from megatron_resihp.control.worker.heard import NO_EPOCH
from megatron_resihp.plan import Chunk
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.messages import MESSAGES, EventsReported, JoinRequest, TrainingFinished
from megatron_resihp.protocol.notices import NOTICES, SaveOrder, StopTraining

SECRET = fresh_secret()
WAIT_S = 30.0
JOB = JobDescription(1, 1, 4, (Chunk(0, 0, 3),), 8, False, True)


def eventually(test: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := test()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


class Leading:
    """The stores of coordinators that follow each other, as their run directory names them."""

    def __init__(self, run_dir: Path, relayed: bool) -> None:
        self.run_dir = run_dir
        self.served: list[Served] = []
        self._relayed = relayed
        self._node: Node | None = None
        self._making = threading.Lock()

    def lead(self, term: int, run: str = "run", named: bool = True) -> Served:
        served = Served(secret=SECRET)
        self.served.append(served)
        store = served.connect()
        store.set(keys.TERM, str(term))
        store.set(keys.RUN, run)
        if named:
            self.name(served)
        return served

    def name(self, served: Served) -> None:
        (self.run_dir / FILE_NAME).write_text(json.dumps({"store": str(served.address), "token": "run"}))

    def store(self, worker: int = 0) -> LastingStore:
        """A process's, by a connection of its own or by way of its agent."""
        at, leaders = self.served[0].address, Leaders(self.run_dir)
        if not self._relayed:
            return LastingStore(connect(at, SECRET, WAIT_S, leaders))
        with self._making:
            self._node = self._node or Node(at, SECRET, leaders)
            way = self._node.way(worker)
        return LastingStore(StoreClient(open_connection(way, WAIT_S)))

    def close(self) -> None:
        if self._node is not None:
            self._node.close()
        for served in self.served:
            served.close()


@pytest.fixture(params=[False, True], ids=["direct", "relayed"])
def leading(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Leading]:
    made = Leading(tmp_path, request.param)
    yield made
    made.close()


def told(served: Served) -> list[Any]:
    """What has come to a coordinator, by kind and id."""
    store = served.connect()
    return [MESSAGES.read(text).body for text in store.take(keys.INBOX, 0.0)]


class TestStore:
    def test_is_that_of_the_next_coordinator(self, leading: Leading) -> None:
        first = leading.lead(1)
        store, met = leading.store(), list[Address]()
        store.follow(lambda successor: met.append(successor.address))
        first.close()
        second = leading.lead(2)
        second.connect().set("a", "1")
        assert store.get("a", WAIT_S) == "1"
        assert (met, store.term, store.address) == ([second.address], 2, second.address)

    def test_is_not_waited_for_once_the_job_is_over(self, leading: Leading) -> None:
        """A node that was cut off meanwhile ends at once."""
        first = leading.lead(1)
        store = leading.store()
        first.close()
        (leading.run_dir / RESULT).write_text("0")
        (leading.run_dir / FILE_NAME).unlink()
        began_at = time.monotonic()
        with pytest.raises(StoreError, match="and the job has ended meanwhile"):
            store.get("a", WAIT_S)
        assert time.monotonic() < began_at + LEADERLESS_S / 4

    def test_is_waited_for_until_all_is_published(self, leading: Leading) -> None:
        first = leading.lead(1)
        store = leading.store()
        first.close()
        second = Served(secret=SECRET)
        leading.served.append(second)
        leading.name(second)

        def publish() -> None:
            late = second.connect()
            late.set("go", "1")
            late.set(keys.TERM, "2")
            late.set(keys.RUN, "run")

        timer = threading.Timer(0.5, publish)
        timer.start()
        assert store.check("go"), "nobody finds half of it"
        timer.join()

    def test_is_never_that_of_an_earlier_coordinator(self, leading: Leading, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lasting, "LEADERLESS_S", 1.0)
        leading.lead(2)
        store = leading.store()
        leading.served[0].close()
        leading.lead(1)
        with pytest.raises(StoreError, match="no other coordinator has come within 1 s"):
            store.check("a")

    def test_is_never_that_of_another_job(self, leading: Leading, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lasting, "LEADERLESS_S", 1.0)
        leading.lead(1)
        store = leading.store()
        leading.served[0].close()
        leading.lead(2, run="another")
        with pytest.raises(StoreError, match="no other coordinator has come within 1 s"):
            store.check("a")


@pytest.mark.parametrize("leading", [True], indirect=True, ids=["relayed"])
class TestNodeThatReachesBoth:
    """A coordinator may be cut off from etcd and from the run directory, and not from its nodes."""

    def test_leaves_the_one_that_leads_no_more(self, leading: Leading, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_relay, "ELSEWHERE_S", 0.1)
        leading.lead(1)
        store = leading.store()
        store.set("a", "first")
        leading.lead(2).connect().set("a", "second")
        eventually(lambda: store.get("a", WAIT_S) == "second")
        assert (store.term, store.address) == (2, leading.served[1].address)

    def test_stays_where_another_is_named_that_does_not_answer(
        self, leading: Leading, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store_relay, "ELSEWHERE_S", 0.1)
        leading.lead(1)
        store = leading.store()
        store.set("a", "first")
        second, looks = leading.lead(2), Leaders.address
        second.close()
        seen = list[Address | None]()
        monkeypatch.setattr(Leaders, "address", lambda self: seen.append(looks(self)) or seen[-1])
        eventually(lambda: len(seen) > 3 and seen[-1] == second.address)
        assert store.get("a", WAIT_S) == "first" and store.term == 1


class TestWorker:
    def test_tells_the_next_coordinator_what_may_be_lost(self, leading: Leading) -> None:
        """Also while it waits for news only."""
        first = leading.lead(1)
        control = WorkerControl(leading.store(5), 5, lambda: None, NO_EPOCH, Address(HOST, 1))
        control.channel.stand({keys.IDENTITY: "digest"})
        control.channel.put(f"{keys.SAVED}5", "yes")
        assert first.connect().get(f"{keys.SAVED}5", WAIT_S) == "yes"
        control.tell(JoinRequest(5, JOB))
        control.tell(EventsReported(5, ()))
        first.close()
        second = leading.lead(2)
        heard: list[Any] = []
        eventually(lambda: heard.extend(told(second)) or len(heard) >= 2)
        assert heard == [EventsReported(5, (), again=True), JoinRequest(5, JOB)]
        store = second.connect()
        assert (store.get(f"{keys.KNOCK_AT}5", WAIT_S), store.get(keys.IDENTITY, WAIT_S)) == (f"{HOST}:1", "digest")
        assert store.get(f"{keys.SAVED}5", WAIT_S) == "yes"

    def test_does_not_tell_again_what_was_decided_about(self, leading: Leading) -> None:
        first = leading.lead(1)
        control = WorkerControl(leading.store(), 0, lambda: None)
        control.tell(TrainingFinished(0, 1))
        control.channel.heard_of_all()
        control.tell(TrainingFinished(0, 2))
        first.close()
        second = leading.lead(2)
        assert eventually(lambda: told(second)) == [TrainingFinished(0, 2)]

    def test_hears_the_notices_from_the_first_one(self, leading: Leading) -> None:
        """What a stranger had written may have moved the numbers of those before."""
        first = leading.lead(1)
        first.connect().set(keys.notice_key(0), "of a stranger")
        first.connect().set(keys.notice_key(1), NOTICES.write(SaveOrder(1), "a test"))
        control = WorkerControl(leading.store(), 0, lambda: None)
        eventually(lambda: control.heard.to_save == 1)
        first.close()
        second = leading.lead(2, named=False)
        for number, notice in enumerate((SaveOrder(1), StopTraining(15))):
            second.connect().set(keys.notice_key(number), NOTICES.write(notice, "a test"))
        leading.name(second)
        eventually(lambda: control.heard.stop_signal == 15)

    def test_ends_where_none_comes(self, leading: Leading, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lasting, "LEADERLESS_S", 0.5)
        first = leading.lead(1)
        control = WorkerControl(leading.store(), 0, lambda: None)
        first.close()
        assert isinstance(control.heard.await_end(), CoordinatorLost)


class TestAgent:
    def test_finds_the_next_coordinator_where_the_last_one_cuts_it_off_before_it_closes_its_store(
        self, leading: Leading, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """That isn't to be given up."""
        first, introduced, ends = leading.lead(1), list[tuple[Callable[[], None], bool]](), list[Ending]()

        def introduce(store: Store, on_lost: Callable[[], None], comes_back: bool) -> None:
            introduced.append((on_lost, comes_back))

        def a_moment_later(seconds: float) -> None:
            if len(leading.served) == 1:
                first.close()
                leading.lead(2)

        monkeypatch.setattr(link, "time", SimpleNamespace(sleep=a_moment_later, monotonic=time.monotonic))
        agent = link.Link(leading.store, introduce, ends.append, lambda slowness: None)
        eventually(lambda: introduced)
        introduced[0][0]()
        eventually(lambda: len(introduced) == 2 or ends)
        assert introduced[1][1] and not ends
        agent.close(WAIT_S)

    def test_comes_back_once_to_each_coordinator(self, leading: Leading, monkeypatch: pytest.MonkeyPatch) -> None:
        """One that was lost meanwhile is not mistaken for the next, which takes the end of a liveness connection for
        the node's."""
        first, terms, ends, turns = leading.lead(1), list[str](), list[Ending](), list[str]()
        wait = LastingStore.wait

        def noted_wait(store: LastingStore, key: str, timeout_s: float) -> bool:
            turns.append(key)
            return wait(store, key, timeout_s)

        monkeypatch.setattr(LastingStore, "wait", noted_wait)

        def introduce(store: Store, on_lost: Callable[[], None], comes_back: bool) -> None:
            if comes_back and len(leading.served) == 2:
                second.close()
                leading.lead(3)
            terms.append(store.get(keys.TERM, WAIT_S))

        agent = link.Link(leading.store, introduce, ends.append, lambda slowness: None)
        eventually(lambda: terms)
        first.close()
        second = leading.lead(2)
        eventually(lambda: len(terms) == 2)
        until = len(turns) + 2
        eventually(lambda: len(turns) >= until)
        assert terms == ["1", "3"] and not ends
        agent.close(WAIT_S)


class TestNodes:
    SIZE = JobSize(nodes=3, workers_per_node=1, apart=True)

    def watcher(self) -> tuple[NodeWatcher, Served]:
        listener, served = reserve(HOST, 0), Served(secret=SECRET)
        served.connect().set(keys.LIVENESS_ADDRESS, f"{HOST}:{listener.getsockname()[1]}")
        return NodeWatcher(listener, SECRET, self.SIZE, 30.0, time.monotonic() + 3.0, returning={0, 1}), served

    def connected(self, watcher: NodeWatcher, served: Served, node: int, comes_back: bool) -> bool:
        """Whether an agent is let in."""
        lost = threading.Event()
        joining = Joining(node, self.SIZE, 30.0, 0.05, node, SECRET)
        made: list[LivenessConnection] = []

        def enter() -> None:
            made.append(come_back(served.connect(), joining, lost.set, comes_back))

        thread = threading.Thread(target=enter)
        thread.start()
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not lost.is_set():
            watcher.look(time.monotonic())
            time.sleep(0.01)
        thread.join()
        return not lost.is_set()

    def test_those_that_the_job_needs_come_back_once(self) -> None:
        watcher, served = self.watcher()
        assert self.connected(watcher, served, 1, comes_back=True)
        assert not self.connected(watcher, served, 1, comes_back=True)
        assert not self.connected(watcher, served, 2, comes_back=True), "of a node without workers in the job"
        late = eventually(lambda: watcher.look(time.monotonic()))
        assert late == [NodeLoss(0, "did not connect to the coordinator that has taken over")]
        assert not self.connected(watcher, served, 0, comes_back=True), "it was given up"
        assert self.connected(watcher, served, 0, comes_back=False), "another may come in its place"
        watcher.close()
        served.close()

    def test_no_other_takes_the_place_of_one_that_is_awaited(self) -> None:
        watcher, served = self.watcher()
        assert not self.connected(watcher, served, 1, comes_back=False)
        assert self.connected(watcher, served, 2, comes_back=False)
        watcher.close()
        served.close()


def test_records_go_to_the_next_coordinator() -> None:
    uplink = Uplink(SECRET, led_on=True)
    for number in range(2):
        listener, came = reserve(HOST, 0), list[bytes]()
        relay = Relay(SECRET, listener)
        uplink.connect(Address(HOST, listener.getsockname()[1]))

        def take(message: bytes, came: list[bytes] = came) -> bool:
            came.append(message)
            return True

        relay.start(take)
        for _ in range(20):
            assert uplink.deliver(b"%d" % number)
            if came:
                break
            time.sleep(0.1)
        assert came and set(came) == {b"%d" % number}
        relay.close(WAIT_S)
    uplink.close()
