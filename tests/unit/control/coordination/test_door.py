# SPDX-License-Identifier: Apache-2.0
"""What gets through the control plane's door, and that nothing else reaches anybody."""

from __future__ import annotations

import json
import math
import queue
import re
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_examples import EVENT, JOB, PLAN, PUBLISHED, RECORD, TOLD
from protocol_instances import malformed

from megatron_resihp.control import keys
from megatron_resihp.control.coordination.coordinator import Coordinator
from megatron_resihp.control.coordination.door import Heard, Reported, read_message
from megatron_resihp.control.coordination.state_machine.membership import Membership
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.node import link
from megatron_resihp.control.node.mailbox import Ending, GivenUp
from megatron_resihp.control.transport.store.reader import MOST_TOLD, NO_MORE
from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.control.worker.errors import JobEnded
from megatron_resihp.events.codec import plain, read_event
from megatron_resihp.plan import Chunk, ParallelPlan
from megatron_resihp.protocol.messages import (
    MESSAGES,
    EventsReported,
    JobStarted,
    JoinRequest,
    Message,
    ModelBuilt,
    NodeLost,
    NodeReport,
    ProcessExited,
    ScriptFailed,
    SlowdownRequest,
    Survivor,
    WorkerRestarted,
)
from megatron_resihp.protocol.notices import (
    NOTICES,
    WorkersGivenUp,
)
from megatron_resihp.protocol.published import END, JobEnd
from megatron_resihp.protocol.version import MAJOR, MINOR, VERSION
from megatron_resihp.protocol.wire import MalformedError

SIZE = JobSize(2, 2)
HEARD_S = 30.0
STARTING = [message for message in TOLD[:7] if not isinstance(message, JoinRequest)]


def written(message: Message) -> str:
    return MESSAGES.write(message, "a process")


def of_json(kind: str, **body: Any) -> str:
    return json.dumps({"protocol": VERSION, "kind": kind, "sender": "worker 1", "id": None, "body": body})


BAD_TEXTS = (
    "", "no JSON", "\ufffd\ufffd", "null", "7", "[]", '"job"', "{}", '{"kind": []}', '{"kind": "handle"}',
    "[" * 100_000, "9" * 5000,
    of_json("ScriptEnded"), of_json("ScriptEnded", worker="1"), of_json("ScriptEnded", worker=True),
    of_json("ScriptEnded", worker=-1), of_json("ScriptEnded", worker=4711),
    of_json("ScriptEnded", worker=1).replace(f'"{VERSION}"', '"99.0"'),
    of_json("ProcessExited", worker=1, code=-9), of_json("ProcessExited", worker=1, code=-9, time=math.nan, cause=None),
    of_json("Ready", worker=1, epoch=0), written(NodeLost(2, "", 1.0)), written(WorkerRestarted(1, 4711, 1.0)),
    of_json("StopRequest", signal="TERM", time=1), of_json("SurvivorReport", worker=1, epoch=0, record={}, held=[]),
    written(NodeReport(0, RECORD, (Survivor(1, "1.1", (), {}), Survivor(4711, "4711.1", (), {})))),
    written(JobStarted(0, replace(JOB, chunks=(Chunk(0, 1, 3), Chunk(1, 3, 6))))),
    written(JobStarted(0, replace(JOB, context_parallel=2, expert_parallel=3, experts=12, seq_length=96))),
    written(JobStarted(0, replace(JOB, expert_parallel=2, experts=4, expert_members=JOB.tensor_parallel + 1))),
    written(ModelBuilt(0, {"num_layers": 10**6})),
    written(EventsReported(1, ({"event": "iteration", "time": 1, "epoch": 0, "worker": 1},))),
    written(EventsReported(1, ({"event": "run_finished", "time": 1, "epoch": 0, "worker": 1},))),
)  # fmt: skip


def read(text: str) -> Heard:
    return read_message(text, SIZE, Membership(SIZE).state.joining.may_exist).body


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"iteration": None}, "iteration lacks iteration"),
        ({"iteration": -1}, "'iteration' is -1"),
        ({"epoch": -2}, "'epoch' is -2"),
        ({"time": "nan"}, "'time' is 'nan'"),
        ({"worker": -1}, "'worker' is -1"),
        ({"event": "no_plan", "reason": "none"}, "no worker writes 'no_plan'"),
        ({"event": "drill", "action": "kill", "target": -1}, "'target' is -1"),
        ({"event": "validation", "number": 1, "seconds": 1.0, "gemm_seconds": ["inf"]}, "'gemm_seconds' is ['inf']"),
    ],
)
def test_an_event_that_no_worker_can_mean_goes_no_further(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(MalformedError, match=re.escape(f"EventsReported from a process: 'events.1': {problem}")):
        read(written(EventsReported(3, (EVENT, {**EVENT, **change}))))


def test_an_event_of_a_later_version_goes_through_as_it_came() -> None:
    event = {"event": "straggler", "time": 9.0, "epoch": 0, "worker": 3, "mood": "bad"}
    heard = read(written(EventsReported(3, (event,))))
    assert isinstance(heard, Reported) and [plain(each) for each in heard.events] == [event]


def test_each_message_that_somebody_sends_gets_through() -> None:
    for message in TOLD:
        if isinstance(message, EventsReported):
            assert read(written(message)) == Reported(message.worker, tuple(map(read_event, message.events)))
        else:
            assert read(written(message)) == message
    assert {type(message) for message in TOLD} == set(MESSAGES.classes)


def newer(text: str) -> str:
    """As a process of a later minor version writes it, which knows one more field."""
    letter = json.loads(text)
    body = {**letter["body"], "mood": "good"}
    return json.dumps({**letter, "protocol": f"{MAJOR}.{MINOR + 1}", "body": body})


def test_agents_and_workers_of_a_later_minor_version_are_served() -> None:
    for message in TOLD:
        assert read(newer(written(message))) == read(written(message))


def test_what_a_coordinator_of_a_later_minor_version_says_is_heard() -> None:
    store = Memory()
    store.set(keys.notice_key(0), newer(NOTICES.write(WorkersGivenUp((1,), "silent"), "the coordinator")))
    store.set(keys.END, newer(END.write(JobEnd(7, "enough", 1.0), "the coordinator")))
    given_up, heard = queue.SimpleQueue[GivenUp](), queue.SimpleQueue[Ending]()
    agent = link.Link(lambda: store, lambda *_: None, heard.put, lambda slowness: None, given_up.put)  # type: ignore[arg-type,return-value]
    assert given_up.get(timeout=HEARD_S).workers == {1} and heard.get(timeout=HEARD_S).code == 7
    agent.close(HEARD_S)


@pytest.mark.parametrize("text", BAD_TEXTS, ids=lambda text: text[:60])
def test_what_is_malformed_gets_no_further(text: str) -> None:
    for reader in (read, NOTICES.read, END.read):
        with pytest.raises(MalformedError):
            reader(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([*(kind.__name__ for kind in MESSAGES.classes), -1, 2**64, "0", "0/0", "COMPUTE", "answer/x"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["kind", "worker", "epoch", "held", "body"]) | st.text(max_size=4), inner),
    max_leaves=8,
)  # fmt: skip


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places_in(item, (*path, key))


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A real message in which something is replaced, left out or cut off."""
    message = json.loads(written(draw(st.sampled_from(TOLD))))
    for _ in range(draw(st.integers(1, 2))):
        *path, last = draw(st.sampled_from([path for path in places_in(message) if path] or [("kind",)]))
        holder = message
        for key in path:
            holder = holder[key]
        if draw(st.booleans()) and isinstance(holder, dict):
            holder.pop(last, None)
        else:
            holder[last] = draw(JSON)
    text = json.dumps(message)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 0 else text


@settings(max_examples=100)
@given(texts=st.lists(st.one_of(mutated(), JSON.map(json.dumps), st.text(max_size=20)), min_size=1, max_size=6))
def test_whatever_comes_in_the_state_machine_stands(texts: list[str]) -> None:
    """In a job that trains, that recovers and that starts."""
    for told in (0, 7, 9):
        membership = Membership(SIZE)
        for text in [*(written(message) for message in TOLD[:told] if not isinstance(message, JoinRequest)), *texts]:
            try:
                message = read_message(text, SIZE, membership.state.joining.may_exist).body
            except MalformedError:
                continue
            if not isinstance(message, EventsReported | SlowdownRequest):
                membership.handle(message, 1.0)
        membership.tick(1e9, 1e9)


class Memory:
    """A store in this process."""

    def __init__(self, *inbox: str) -> None:
        self.values: dict[str, str] = {}
        self.inbox = deque(inbox)

    def clone(self) -> Memory:
        return self

    def take(self, queue: str, timeout_s: float) -> list[str]:
        taken = list(self.inbox)
        self.inbox.clear()
        return taken

    def push(self, queue: str, value: str) -> None:
        self.inbox.append(value)

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def set_once(self, key: str, value: str) -> str:
        return self.values.setdefault(key, value)

    def check(self, key: str) -> bool:
        return key in self.values

    def wait(self, key: str, timeout_s: float) -> bool:
        if key not in self.values:
            threading.Event().wait(timeout_s if timeout_s < 5.0 else None)  # for what never comes
        return key in self.values

    def get(self, key: str, timeout_s: float) -> str:
        return self.values[key]


def test_a_job_trains_on_through_malformed_messages() -> None:
    """They are told of, up to a bound; what is well formed among them counts."""
    real = [written(message) for message in STARTING]
    end = written(ScriptFailed(1, "enough", 3))
    repeats = MOST_TOLD // len(BAD_TEXTS) + 1
    store = Memory(*(text for one in real for text in (*BAD_TEXTS, one)), *repeats * BAD_TEXTS, end)
    events: list[Any] = []
    assert Coordinator(store, events.append, SIZE, ["train.py"]).run() == 1
    names = [event.name for event in events]
    assert "epoch_started" in names and "go/0" in store.values
    assert names.count("message_dropped") == MOST_TOLD
    dropped = [event for event in events if event.name == "message_dropped"]
    assert dropped[0].reason == "a message from somebody: it is not JSON (JSONDecodeError)"
    assert dropped[-1].reason.endswith(NO_MORE)
    assert events[-1].reason == "worker 1 failed: enough"


def test_a_job_trains_on_through_every_kind_of_message_malformed_in_every_way() -> None:
    bad = [text for message in TOLD for text in malformed(MESSAGES, message, "worker 1")]
    iteration = written(EventsReported(3, (EVENT,)))
    store = Memory(*map(written, STARTING), *bad, iteration, written(ScriptFailed(1, "enough", 3)))
    events: list[Any] = []
    coordinator = Coordinator(store, events.append, SIZE, ["train.py"])
    assert coordinator.run() == 1
    after_go = [event.name for event in events][[event.name for event in events].index("epoch_started") :]
    assert coordinator._inbox.dropped == len(bad) > 200
    assert after_go == [
        "epoch_started", "exposed", *len(bad) * ["message_dropped"], "iteration", "worker_failed", "run_finished",
    ]  # fmt: skip
    dropped = [event.reason for event in events if event.name == "message_dropped"]
    assert dropped[0] == "JobStarted from worker 1: 'worker' is missing"


def test_an_agent_and_a_worker_hear_on_through_every_kind_of_notice_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And through ends of the job that are none."""
    monkeypatch.setattr(link, "SLICE_S", 0.01)
    bad = [text for kinds, notice in PUBLISHED for text in malformed(kinds, notice, "worker 1")]
    store = Memory()
    real = NOTICES.write(WorkersGivenUp((1,), "silent"), "the coordinator")
    store.values = {keys.notice_key(number): text for number, text in enumerate([*bad, real])}
    store.set(keys.END, next(malformed(END, JobEnd(0, "finished", 1.0), "worker 1")))
    given_up, heard = queue.SimpleQueue[GivenUp](), queue.SimpleQueue[Ending]()
    agent = link.Link(lambda: store, lambda *_: None, heard.put, lambda slowness: None, given_up.put)  # type: ignore[arg-type,return-value]
    assert given_up.get(timeout=HEARD_S).workers == {1}
    assert heard.empty()
    store.set(keys.END, END.write(JobEnd(7, "enough", 1.0), "the coordinator"))
    assert heard.get(timeout=HEARD_S).code == 7
    agent.close(HEARD_S)
    ended = threading.Event()
    control = WorkerControl(store, 1, ended.set)  # type: ignore[arg-type]
    assert ended.wait(HEARD_S)
    with pytest.raises(JobEnded, match="silent"):
        control.heard.check()
    assert (
        control.heard.stop_signal,
        control.heard.to_save,
        control.heard.change.of_epoch(control.epoch),
        control.heard.validation.of_epoch(control.epoch),
    ) == (None, 0, None, None)


def test_a_malformed_notice_makes_nobody_deaf(capsys: pytest.CaptureFixture[str]) -> None:
    """Not even where it stands in the way of the next one."""
    store = Memory()
    for number, text in enumerate(("no JSON", '{"kind": "broken"}', '{"kind": "_hear"}')):
        store.set(keys.notice_key(number), text)
    for message in (*STARTING, ProcessExited(2, -9, 10.0), ScriptFailed(1, "enough", 3)):
        store.push(keys.INBOX, written(message))
    Coordinator(store, lambda event: None, SIZE, ["train.py"]).run()
    heard = threading.Event()
    control = WorkerControl(store, 1, heard.set)  # type: ignore[arg-type]
    assert heard.wait(HEARD_S)
    assert control.heard.broken_at() is not None
    assert capsys.readouterr().err.count("worker 1 drops a malformed notice") == 3


def test_there_is_an_example_of_each_notice() -> None:
    assert {type(notice) for _, notice in PUBLISHED} == set(NOTICES.classes)


def test_plans_in_these_tests_are_plans() -> None:
    ParallelPlan.from_dict(PLAN)
