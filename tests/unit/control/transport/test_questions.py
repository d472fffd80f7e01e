# SPDX-License-Identifier: Apache-2.0
"""Questions of many over one line: a network that delays, loses its connection and has another one, and the store's own
storage at its end.

Each question is answered once, or lost with its line. Nobody is told that nothing came while it had come in time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from megatron_resihp.control import keys
from megatron_resihp.control.transport.store.questions import GRID_S, IDLE_S, MOST_IDLE, Gathering, Questions, Told
from megatron_resihp.control.transport.store.storage import Storage
from megatron_resihp.control.transport.store.storage import Told as ToldThere
from megatron_resihp.control.transport.store.wire import (
    LONGEST_WAIT_S,
    MalformedRequestError,
    Op,
    Reply,
    Request,
    Said,
    read_number,
    read_relayed,
    read_values,
)
from megatron_resihp.protocol.messages import MESSAGES, NodeReport, SurvivorReport
from megatron_resihp.protocol.records import IterationPhase, Record
from megatron_resihp.protocol.together import Together

YES, NO = Reply(Said.YES), Reply(Said.NO)
LONG_S = 60.0
WAIT = Request(Op.WAIT, (b"key",), LONG_S)
SET = Request(Op.SET, (b"key", b"value"))


INBOX = keys.INBOX.encode()
RECORD = Record(5, IterationPhase.COMPUTE)


def reporting(worker: int) -> Request:
    """A survivor's report; every third says something else than the others."""
    record = replace(RECORD, position=worker % 3 // 2)
    text = MESSAGES.write(SurvivorReport(worker, 0, record, ()), f"worker {worker}", f"{worker}.1")
    return Request(Op.PUSH, (INBOX, text.encode()))


def letter_of(request: Request) -> str:
    return MESSAGES.read(request.fields[1].decode()).id or ""


def reports_in(storage: Storage) -> list[str]:
    """The ids of all reports that the coordinator finds."""
    [(_, reply)] = storage.ask("coordinator", Request(Op.TAKE, (INBOX,)), 0.0)
    letters = [MESSAGES.read(text.decode()) for text in read_values(reply.value)]
    ids = (
        [each.letter for each in letter.body.survivors] if isinstance(letter.body, NodeReport) else [letter.id or ""]
        for letter in letters
    )
    return [id for some in ids for id in some]


GATHERED = 4
"""Workers of the node."""


class Line:
    """What is on its way over one connection, in order, and the store's end of it."""

    def __init__(self, storage: Storage, gather_s: float = 0.0) -> None:
        self.questions = Questions(Gathering(Together("node"), gather_s, GATHERED))
        self.there: deque[Request] = deque()
        self.back: deque[tuple[int, Reply]] = deque()
        self.crossed: list[Request] = []
        self._storage = storage
        self._open: set[int] = set()

    def serve(self, now: float) -> Request | None:
        """Let the store take what comes first; returns what was asked."""
        request = self.there.popleft()
        number = read_number(request)
        if request.op is Op.DROP:
            self._storage.forget((self, number))
            return None
        inner = read_relayed(request)
        self.crossed.append(inner)
        self._open.add(number)
        answered(self._storage.ask((self, number), inner, now))
        answered(self._storage.give_out())
        return inner

    def hear(self, now: float) -> Told:
        """Take the first answer."""
        told, requests = self.questions.hear(*self.back.popleft(), now)
        self.there += requests
        return told

    def carry(self, now: float) -> Told:
        """All that is on its way arrives."""
        told: Told = []
        while self.there or self.back:
            while self.there:
                self.serve(now)
            told += self.hear(now) if self.back else []
        return told

    def close(self) -> None:
        for number in self._open:
            self._storage.forget((self, number))

    @property
    def waits(self) -> int:
        """Questions that the store has not answered."""
        return sum(self._storage.waits((self, number)) for number in self._open)


def answered(told: ToldThere) -> None:
    """Send the store's answers."""
    for asker, reply in told:
        line, number = cast(tuple[Line, int], asker)
        line.back.append((number, reply))


@dataclass(frozen=True)
class Asked:
    request: Request
    at: float


class Network(RuleBasedStateMachine):
    """Askers 0 to 3 ask about two keys and a queue."""

    gather_s = 0.0
    askers = st.integers(0, 3)
    keys = st.sampled_from([b"a", b"b"])

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.storage = Storage()
        self.line = Line(self.storage, self.gather_s)
        self.asked: dict[Hashable, Asked] = {}
        self.came: dict[bytes, float] = {}
        self.pushed: set[bytes] = set()
        self.reported: set[str] = set()
        self.taken: list[bytes] = []
        self.lost_takes = 0
        self.count = 0

    @rule(asker=askers, key=keys, op=st.sampled_from([Op.WAIT, Op.GET]), within_s=st.sampled_from([0.0, 0.1, 1.0, 7.0]))
    def look_for(self, asker: int, key: bytes, op: Op, within_s: float) -> None:
        self._ask(asker, Request(op, (key,), within_s))

    @rule(asker=askers, key=keys)
    def set(self, asker: int, key: bytes) -> None:
        self._ask(asker, Request(Op.SET, (key, b"value")))

    @rule(asker=askers)
    def push(self, asker: int) -> None:
        self.count += 1
        self._ask(asker, Request(Op.PUSH, (b"queue", b"%d" % self.count)))

    @rule(asker=askers)
    def report(self, asker: int) -> None:
        self.count += 1
        self._ask(asker, reporting(self.count))

    @rule(asker=askers, within_s=st.sampled_from([0.0, 1.0]))
    def take(self, asker: int, within_s: float) -> None:
        self._ask(asker, Request(Op.TAKE, (b"queue",), within_s))

    @rule(asker=askers)
    def leave(self, asker: int) -> None:
        if asker in self.asked:
            self._lose(asker)
            self.line.there += self.line.questions.forget(asker, self.now)

    @rule()
    def arrive_there(self) -> None:
        request = self.line.serve(self.now) if self.line.there else None
        if request is not None and request.op is Op.SET:
            self.came.setdefault(request.fields[0], self.now)

    @rule()
    def arrive_back(self) -> None:
        for asker, reply in self.line.hear(self.now) if self.line.back else []:
            self._check(self.asked.pop(asker), reply)

    @rule(passed_s=st.sampled_from([0.01, 0.3, 2.0, 20.0]))
    def time_passes(self, passed_s: float) -> None:
        self.now += passed_s
        answered(self.storage.expire(self.now))
        self.line.there += self.line.questions.expire(self.now)

    @rule()
    def line_is_lost(self) -> None:
        for asker in list(self.asked):
            self._lose(asker)
        self.line.close()
        self.line = Line(self.storage, self.gather_s)

    @invariant()
    def each_key_is_waited_for_once(self) -> None:
        takes = sum(asked.request.op is Op.TAKE for asked in self.asked.values())
        dropped = sum(request.op is Op.DROP for request in self.line.there)
        assert self.line.waits <= 4 + takes + dropped

    def teardown(self) -> None:
        for _ in range(10):
            while self.line.there or self.line.back:
                self.arrive_there()
                self.arrive_back()
            self.time_passes(2.0)
        assert not self.asked, "whatever has happened, all are answered at last"
        [(_, left)] = self.storage.ask("test", Request(Op.TAKE, (b"queue",)), self.now)
        found = self.taken + read_values(left.value)
        assert len(found) == len(set(found)), "each has one taker"
        assert self.lost_takes or self.pushed <= set(found), "what was pushed is there"
        reported = reports_in(self.storage)
        assert self.reported <= set(reported) and len(reported) == len(set(reported)), "each report is there once"

    def _ask(self, asker: int, request: Request) -> None:
        if asker not in self.asked:
            self.asked[asker] = Asked(request, self.now)
            self.line.there += self.line.questions.ask(asker, request, self.now)

    def _lose(self, asker: Hashable) -> None:
        self.lost_takes += self.asked.pop(asker).request.op is Op.TAKE

    def _check(self, asked: Asked, reply: Reply) -> None:
        request, until = asked.request, asked.at + asked.request.within_s
        if request.op in (Op.WAIT, Op.GET):
            came = self.came.get(request.fields[0], math.inf)
            # What comes at the very moment at which the time is over may be seen or not.
            assert reply.said is (Said.YES if came <= self.now else Said.NO) or came >= until
            assert reply.said is Said.NO or came <= self.now
            assert reply.said is Said.YES or self.now >= until
        elif request.op is Op.PUSH and request.fields[0] == INBOX:
            self.reported.add(letter_of(request))
        elif request.op is Op.PUSH:
            self.pushed.add(request.fields[1])
        elif request.op is Op.TAKE:
            self.taken += read_values(reply.value)


class NetworkOfManyNodes(Network):
    gather_s = 0.1


TestNetwork = Network.TestCase
TestNetworkOfManyNodes = NetworkOfManyNodes.TestCase
TestNetwork.settings = TestNetworkOfManyNodes.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)


@pytest.fixture
def storage() -> Storage:
    return Storage()


@pytest.fixture
def line(storage: Storage) -> Line:
    return Line(storage)


def ask(line: Line, asker: str, request: Request, now: float = 0.0) -> None:
    line.there += line.questions.ask(asker, request, now)


def test_reports_wait_for_the_first_and_go_together(line: Line, storage: Storage) -> None:
    for worker in (3, 4, 6, 7):
        ask(line, f"worker {worker}", reporting(worker))
    ask(line, "another", SET)
    assert dict(line.carry(0.0)) == dict.fromkeys(("worker 3", "worker 4", "worker 6", "worker 7", "another"), YES)
    assert [request.op for request in line.crossed] == [Op.PUSH, Op.SET, Op.PUSH], "nothing else waits"
    assert reports_in(storage) == ["3.1", "4.1", "6.1", "7.1"]
    ask(line, "worker 3", reporting(9))
    assert line.carry(0.0) == [("worker 3", YES)], "none is waited for by then"


def test_in_a_large_job_reports_go_together_once_all_workers_have_reported(storage: Storage) -> None:
    line = Line(storage, gather_s=0.1)
    for worker in (3, 4, 6):
        ask(line, f"worker {worker}", reporting(worker))
        assert not line.carry(0.0)
    ask(line, "another", SET)
    assert line.carry(0.0) == [("another", YES)], "nothing else waits"
    ask(line, "worker 7", reporting(7))
    assert len(line.carry(0.0)) == GATHERED and [request.op for request in line.crossed] == [Op.SET, Op.PUSH]


def test_in_a_large_job_a_report_waits_for_a_moment(storage: Storage) -> None:
    line = Line(storage, gather_s=0.1)
    ask(line, "worker 0", reporting(0), now=5.0)
    assert line.questions.next_deadline == 5.1
    line.there += line.questions.expire(5.05)
    assert not line.carry(5.05)
    line.there += line.questions.expire(5.1)
    assert line.carry(5.1) == [("worker 0", YES)] and line.questions.next_deadline is None
    ask(line, "worker 1", reporting(1), now=6.0)
    line.there += line.questions.forget("worker 1", 6.0)
    line.there += line.questions.expire(7.0)
    assert not line.there, "it is dead"


def test_reports_that_differ_go_at_the_same_time(line: Line, storage: Storage) -> None:
    for worker in (3, 4, 5, 7):
        ask(line, f"worker {worker}", reporting(worker))
    ask(line, "late", reporting(6))
    line.carry(0.0)
    assert len(line.crossed) == 3 and sorted(reports_in(storage)) == ["3.1", "4.1", "5.1", "6.1", "7.1"]


def test_reports_wait_for_those_that_were_told_together(line: Line, storage: Storage) -> None:
    for worker in (3, 4):
        ask(line, f"worker {worker}", reporting(worker))
    line.serve(0.0)
    line.hear(0.0)
    for worker in (6, 7):
        ask(line, f"worker {worker}", reporting(worker), 0.0)
    assert len(line.there) == 1, "that of worker 4"
    line.carry(0.0)
    assert len(line.crossed) == 3 and reports_in(storage) == ["3.1", "4.1", "6.1", "7.1"]


def test_a_report_of_one_that_is_gone_is_not_told_with_others(line: Line, storage: Storage) -> None:
    """It was given up meanwhile, or has lost its connection and will tell again."""
    for worker in (3, 4, 6):
        ask(line, f"worker {worker}", reporting(worker))
    line.there += line.questions.forget("worker 4", 0.0)
    assert not line.questions.asks("worker 4")
    assert dict(line.carry(0.0)) == {"worker 3": YES, "worker 6": YES}
    assert reports_in(storage) == ["3.1", "6.1"]


def test_who_has_reported_asks_nothing_before_that_is_told(line: Line) -> None:
    for worker in (3, 4):
        ask(line, f"worker {worker}", reporting(worker))
    with pytest.raises(MalformedRequestError):
        ask(line, "worker 4", SET)


def test_equal_waits_of_several_cross_once(line: Line) -> None:
    for asker in ("one", "another", "a third"):
        ask(line, asker, WAIT)
    line.carry(0.0)
    assert len(line.crossed) == 1
    ask(line, "writer", SET, 1.0)
    assert dict(line.carry(1.0)) == dict.fromkeys(("one", "another", "a third", "writer"), YES)


def test_who_looks_again_and_again_waits_over_there_once(line: Line) -> None:
    """As threads that listen for the next notice do: meanwhile the store is only asked whether it is there."""
    for second in range(10):
        ask(line, "one", Request(Op.WAIT, (b"key",), 0.9), float(second))
        line.carry(float(second))
        line.there += line.questions.expire(second + 0.95)
        assert line.carry(second + 0.95) == [("one", NO)]
    assert [request.op for request in line.crossed].count(Op.WAIT) == 1 and line.waits == 1


def test_nobody_is_told_that_nothing_came_by_a_store_that_is_stopped(line: Line) -> None:
    ask(line, "one", Request(Op.WAIT, (b"key",), 1.0))
    line.serve(0.0)
    line.there += line.questions.expire(1.1)
    assert line.questions.unanswered_since == 1.1, "that it owes an answer is known"
    ask(line, "writer", SET, 50.0)
    line.there.rotate(1)  # what another process has written before it stopped
    assert dict(line.carry(50.0))["one"] == YES


def test_a_wait_that_nobody_waits_for_ends(line: Line) -> None:
    ask(line, "one", WAIT)
    line.carry(0.0)
    line.there += line.questions.forget("one", 0.0)
    assert line.questions.next_deadline == pytest.approx(min(IDLE_S, LONG_S))
    line.there += line.questions.expire(IDLE_S)
    line.carry(IDLE_S)
    assert line.waits == 0


def test_few_waits_stay_open_that_nobody_waits_for(line: Line) -> None:
    for number in range(2 * MOST_IDLE):
        ask(line, "one", Request(Op.WAIT, (b"%d" % number,), LONG_S))
        line.there += line.questions.forget("one", 0.0)
    line.carry(0.0)
    assert line.waits == MOST_IDLE


def test_who_waits_when_the_store_ends_the_wait_of_all_waits_on(line: Line, storage: Storage) -> None:
    ask(line, "one", Request(Op.WAIT, (b"key",), LONG_S), 0.0)
    line.carry(0.0)
    line.there += line.questions.forget("one", 1.0)
    ask(line, "late", Request(Op.WAIT, (b"key",), LONG_S), 2.0)
    answered(storage.expire(LONGEST_WAIT_S + 1.0))
    assert line.carry(3.0) == [] and line.waits == 1
    ask(line, "writer", SET, 4.0)
    assert ("late", YES) in line.carry(4.0)


def test_a_question_that_takes_values_is_dropped_with_who_asked(line: Line, storage: Storage) -> None:
    ask(line, "one", Request(Op.TAKE, (b"queue",), LONG_S))
    line.carry(0.0)
    line.there += line.questions.forget("one", 0.0)
    ask(line, "writer", Request(Op.PUSH, (b"queue", b"value")))
    line.carry(0.0)
    [(_, left)] = storage.ask("test", Request(Op.TAKE, (b"queue",)), 0.0)
    assert read_values(left.value) == [b"value"]


def test_what_the_store_owes_for_longest_is_known(line: Line) -> None:
    ask(line, "waits", WAIT, 1.0)
    assert line.questions.unanswered_since is None, "that may take"
    ask(line, "one", SET, 2.0)
    ask(line, "another", SET, 3.0)
    assert line.questions.unanswered_since == 2.0
    line.there += line.questions.forget("one", 4.0)
    assert line.questions.unanswered_since == 2.0, "whoever asked"
    line.carry(5.0)
    assert line.questions.unanswered_since is None


def test_one_asks_one_question_at_a_time(line: Line) -> None:
    ask(line, "one", WAIT)
    with pytest.raises(MalformedRequestError):
        ask(line, "one", SET)


def test_whether_a_store_that_says_nothing_is_there_is_asked_once(line: Line) -> None:
    """However many look for it, and give up."""
    for number in range(5):
        ask(line, f"{number}", Request(Op.REACH))
    line.there += line.questions.forget("0", 1.0)
    assert [asker for asker, _ in line.carry(2.0)] == ["1", "2", "3", "4"] and len(line.crossed) == 1
    ask(line, "0", Request(Op.REACH))
    assert line.carry(3.0) == [("0", YES)] and len(line.crossed) == 2


def test_waits_end_together(line: Line) -> None:
    """Or a node of many would ask again and again whether the store is there."""
    for number in range(5):
        ask(line, f"{number}", Request(Op.WAIT, (b"key",), 1.0), number * GRID_S / 10 + GRID_S / 4)
    line.carry(0.5)
    line.there += line.questions.expire(1.0 + 1.5 * GRID_S)
    assert len(line.carry(1.2)) == 5
    assert [request.op for request in line.crossed] == [Op.WAIT, Op.REACH]
