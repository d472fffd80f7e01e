"""What gets through the control plane's door, and that nothing else reaches anybody."""

from __future__ import annotations

import copy
import json
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resihp.control import messages
from megatron_resihp.control.coordinator import DROPPED_SHOWN, Coordinator
from megatron_resihp.control.door import TYPES, MalformedError, read_end, read_message, read_notice
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.membership import Membership
from megatron_resihp.control.worker import WorkerControl
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.protocol.coding import encode
from megatron_resihp.protocol.records import Outcome, Record, Stage

SIZE = JobSize(2, 2)
HEARD_S = 30.0
COUNTERS = {"iteration": 4, "consumed_train_samples": 16, "totals": {"lm loss": 1.0}}
OUTCOMES = {n: Outcome(0, 1.5, ((8.0, 4.0),), ("lm loss",)) for n in (4, 5)}
RECORD = Record(5, Stage.COMPUTE, True, OUTCOMES, {4: COUNTERS, 5: COUNTERS}, 0, ("lm loss",))
SIZES: dict[str, Any] = {
    "tensor_parallel": 1, "pipeline_parallel": 2, "micro_batches": 4, "chunks": [[0, 0, 3], [1, 3, 6]],
    "seq_length": 8, "sequence_parallel": False, "pipeline_last": True, "train_iters": 20, "strategy": "rectangular",
}  # fmt: skip
PLAN = {
    "version": 2, "replicas": [{"stages": [[0], [2]], "micro_batches": [0, 1]},
                               {"stages": [[1], [3]], "micro_batches": [2, 3]}], "standbys": {},
}  # fmt: skip
EVENT = {"event": "iteration", "time": 9.0, "epoch": 0, "worker": 3, "iteration": 4, "duration_s": 0.5}
MESSAGES: tuple[dict[str, Any], ...] = (
    {"type": "job", "worker": 0, **SIZES},
    {"type": "joining", "worker": 5, **SIZES},
    {"type": "model", "worker": 0,
     "arguments": {"num_layers": 6, "hidden_size": 64, "padded_vocab_size": 128, "num_attention_heads": 4}},
    *({"type": "ready", "worker": worker, "epoch": 0, "digests": {f"{worker // 2}/0": "a"}, "ports": [9000 + worker],
       "bytes_received": 0, "steps_redone": 0} for worker in range(4)),
    {"type": "suspect", "worker": 1, "epoch": 0, "error": "Connection closed by peer [127.0.0.1]:9000"},
    *({"type": "muster", "worker": worker, "epoch": 0, "record": json.loads(json.dumps(encode(RECORD))),
       "held": [[3 * (worker // 2), 3 * (worker // 2) + 3, 0, 1]]} for worker in range(4)),
    {"type": "plan_failed", "worker": 1, "epoch": 0, "error": "ValueError: shards (2) must be >= 4"},
    {"type": "prepared", "worker": 1, "number": 1},
    {"type": "trained", "worker": 1, "iteration": 3},
    {"type": "salvaged", "worker": 1},
    {"type": "done", "worker": 1, "time": 10.0},
    {"type": "failed", "worker": 1, "error": "ValueError: no", "code": 1},
    {"type": "event", "worker": 3, "event": EVENT},
    {"type": "events", "worker": 3, "events": [EVENT]},
    {"type": "apply", "plan": PLAN, "why": "by hand", "answer": "answer/1", "patient": True},
    {"type": "slowdown", "workers": [1], "factor": 0.5, "iteration": None, "answer": "answer/2"},
    {"type": "exited", "worker": 2, "code": -9, "time": 10.0},
    {"type": "silent", "worker": 2, "silence_s": 6.0, "time": 10.0},
    {"type": "lost", "worker": 2, "time": 10.0},
    {"type": "restarted", "worker": 6, "instead_of": 2, "time": 10.0},
    {"type": "node_lost", "node": 1, "cause": "connection lost", "time": 10.0},
    {"type": "stop", "signal": 15, "time": 10.0},
    {"type": "leave", "node": 1, "agent": 2, "time": 10.0}, {"type": "save", "time": 10.0},
)  # fmt: skip

BAD_TEXTS = (
    "", "no JSON", "\ufffd\ufffd", "null", "7", "[]", '"job"', "{}", '{"type": []}', '{"type": "handle"}',
    "[" * 100_000, "9" * 5000,
    '{"type": "done"}', '{"type": "done", "worker": "1"}', '{"type": "done", "worker": true}',
    '{"type": "done", "worker": -1}', '{"type": "done", "worker": 4711}', '{"type": "exited", "worker": 1, "code": -9}',
    '{"type": "exited", "worker": 1, "code": -9, "time": NaN}', '{"type": "ready", "worker": 1, "epoch": 0}',
    '{"type": "node_lost", "node": 2, "cause": "", "time": 1}', '{"type": "stop", "signal": "TERM", "time": 1}',
    '{"type": "muster", "worker": 1, "epoch": 0, "record": {}, "held": []}',
    '{"type": "event", "worker": 1, "event": {"event": "iteration", "time": 1, "epoch": 0, "worker": 1}}',
    '{"type": "event", "worker": 1, "event": {"event": "run_finished", "time": 1, "epoch": 0, "worker": 1}}',
)  # fmt: skip


def read(text: str) -> dict[str, Any]:
    return read_message(text, SIZE, Membership(SIZE).newcomers.may_exist)


def test_each_message_that_somebody_sends_gets_through() -> None:
    for message in MESSAGES:
        assert read(json.dumps(message)) == message
    handled = {name.removeprefix("_on_") for name in dir(Membership) if name.startswith("_on_")}
    assert handled <= TYPES
    assert {message["type"] for message in MESSAGES} == TYPES


@pytest.mark.parametrize("text", BAD_TEXTS, ids=lambda text: text[:60])
def test_what_is_malformed_gets_no_further(text: str) -> None:
    for reader in (read, read_notice, read_end):
        with pytest.raises(MalformedError):
            reader(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([*sorted(TYPES), -1, 2**64, "0", "0/0", "COMPUTE", "answer/x"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "worker", "epoch", "held", "event"]) | st.text(max_size=4), inner),
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
    message = copy.deepcopy(draw(st.sampled_from(MESSAGES)))
    for _ in range(draw(st.integers(1, 2))):
        *path, last = draw(st.sampled_from([path for path in places_in(message) if path] or [("type",)]))
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
        for text in [*(json.dumps(message) for message in MESSAGES[:told] if message["type"] != "joining"), *texts]:
            try:
                message = read_message(text, SIZE, membership.newcomers.may_exist)
            except MalformedError:
                continue
            if message["type"] not in ("event", "events", "slowdown"):
                membership.handle(message, 1.0)
        membership.tick(1e9, 1e9)


class Memory:
    """A store in this process."""

    def __init__(self, *inbox: str) -> None:
        self.values: dict[str, str] = {}
        self.inbox = deque(inbox)

    def clone(self) -> Memory:
        return self

    def pop(self, queue: str, timeout_s: float) -> str | None:
        return self.inbox.popleft() if self.inbox else None

    def push(self, queue: str, value: str) -> None:
        self.inbox.append(value)

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def set_once(self, key: str, value: str) -> str:
        return self.values.setdefault(key, value)

    def check(self, key: str) -> bool:
        return key in self.values

    def wait(self, key: str, timeout_s: float) -> bool:
        if key not in self.values and timeout_s > 5.0:
            threading.Event().wait()  # for what never comes
        return key in self.values

    def get(self, key: str, timeout_s: float) -> str:
        return self.values[key]


def test_a_job_trains_on_through_malformed_messages() -> None:
    """They are told of, up to a bound; what is well formed among them counts."""
    real = [json.dumps(message) for message in MESSAGES[:7] if message["type"] != "joining"]
    end = json.dumps({"type": "failed", "worker": 1, "error": "enough", "code": 3})
    store = Memory(*(text for one in real for text in (*BAD_TEXTS, one)), *BAD_TEXTS, end)
    events: list[dict[str, Any]] = []
    assert Coordinator(store, events.append, SIZE, ["train.py"]).run() == 1
    names = [event["event"] for event in events]
    assert "epoch_started" in names and "go/0" in store.values
    assert names.count("message_dropped") == DROPPED_SHOWN
    dropped = [event for event in events if event["event"] == "message_dropped"]
    assert dropped[0]["reason"] == "it is not JSON (JSONDecodeError)"
    assert dropped[-1]["reason"].endswith("further ones are dropped without a word")
    assert events[-1]["reason"] == "worker 1 failed: enough"


def test_a_malformed_notice_makes_nobody_deaf(capsys: pytest.CaptureFixture[str]) -> None:
    """Not even where it stands in the way of the next one."""
    store = Memory()
    for number, text in enumerate(("no JSON", '{"kind": "broken"}', '{"kind": "_hear"}')):
        store.set(messages.notice_key(number), text)
    for message in MESSAGES[:7]:
        if message["type"] != "joining":
            store.push(messages.INBOX, json.dumps(message))
    store.push(messages.INBOX, json.dumps({"type": "exited", "worker": 2, "code": -9, "time": 10.0}))
    store.push(messages.INBOX, json.dumps({"type": "failed", "worker": 1, "error": "enough", "code": 3}))
    Coordinator(store, lambda event: None, SIZE, ["train.py"]).run()
    heard = threading.Event()
    control = WorkerControl(store, 1, heard.set)  # type: ignore[arg-type]
    assert heard.wait(HEARD_S)
    assert control.broken_at() is not None
    assert capsys.readouterr().err.count("worker 1 drops a malformed notice") == 3


def test_plans_in_these_tests_are_plans() -> None:
    ParallelPlan.from_dict(PLAN)
