# SPDX-License-Identifier: Apache-2.0
"""What processes tell each other arrives as it was sent, and nothing that is malformed gets in."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from protocol_examples import JOB
from protocol_instances import ALL, PLAN, instances_of, spoiled

from megatron_resihp.coding import decode
from megatron_resihp.coding.decoding import MOST_CHARACTERS, MOST_ITEMS
from megatron_resihp.plan import Shard
from megatron_resihp.protocol import version, wire
from megatron_resihp.protocol.messages import (
    MESSAGES,
    EventsReported,
    JobStarted,
    JoinRequest,
    ProcessExited,
    Ready,
    ScriptFailed,
    SurvivorReport,
    TrainingFinished,
)
from megatron_resihp.protocol.notices import NOTICES, PlanChange, StopTraining
from megatron_resihp.protocol.published import DECISIONS, EpochPlan
from megatron_resihp.protocol.records import IterationPhase, Outcome, Record
from megatron_resihp.protocol.wire import LARGEST, Kinds, MalformedError

EVERY_KIND = [(kinds, kind) for kinds in ALL for kind in kinds.classes]
SENDER = "worker 3"


def plain(body: Any, kinds: Kinds[Any] = MESSAGES) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kinds.write(body, SENDER))
    return found


def refused(value: Any, kinds: Kinds[Any] = MESSAGES) -> str:
    with pytest.raises(MalformedError) as error:
        kinds.read(value if isinstance(value, str) else json.dumps(value))
    return str(error.value)


@settings(max_examples=8, phases=(Phase.generate,))
@given(data=st.data())
def test_what_is_written_is_read(data: st.DataObject) -> None:
    for kinds, kind in EVERY_KIND:
        body = data.draw(instances_of(kind))
        letter = kinds.read(kinds.write(body, SENDER, "a.1"))
        assert (letter.sender, letter.id, letter.body) == (SENDER, "a.1", body)


@settings(max_examples=2, phases=(Phase.generate,))
@given(data=st.data())
def test_each_field_is_there_and_of_its_type_and_no_other(data: st.DataObject) -> None:
    for kinds, kind in EVERY_KIND:
        whole = plain(data.draw(instances_of(kind)), kinds)
        who = f"{kind.__name__} from {SENDER}"
        hints = get_type_hints(kind)
        for name in [each.name for each in dataclasses.fields(kind)]:
            without = {key: value for key, value in whole["body"].items() if key != name}
            assert refused({**whole, "body": without}, kinds) == f"{who}: '{name}' is missing"
            if hints[name] is not Any:
                wrong = 7 if hints[name] == dict[str, Any] else {"a": {"b": 1}}
                assert refused({**whole, "body": {**without, name: wrong}}, kinds).startswith(f"{who}: '{name}")
        surplus = {**whole["body"], "weather": "sunny"}
        assert refused({**whole, "body": surplus}, kinds) == f"{who}: 'weather' is unknown"


RECORD = Record(
    5, IterationPhase.COMPUTE, True, {4: Outcome(0, 1.5, ((8.0, 4.0),), ("lm loss",))}, {5: {"iteration": 4}}
)
REPORT = SurvivorReport(3, 0, RECORD, (Shard(0, 3, 0, 1),))


def changed(body: Any, path: str, value: Any, kinds: Kinds[Any] = MESSAGES) -> dict[str, Any]:
    found = plain(body, kinds)
    *way, last = path.split(".")
    holder = found["body"]
    for name in way:
        holder = holder[int(name) if isinstance(holder, list) else name]
    holder[int(last) if isinstance(holder, list) else last] = value
    return found


@pytest.mark.parametrize(
    ("body", "path", "value", "said"),
    [
        (REPORT, "record.iteration", -1, "'record.iteration' is -1, not at least 0"),
        (REPORT, "record.stage", "HALFWAY", "'record.stage' is 'HALFWAY', not one of COMPUTE, REDUCED"),
        (REPORT, "record.outcomes.4.losses.0", [8.0], "'record.outcomes.4.losses.0' has 1 items, not 2"),
        (REPORT, "record.outcomes.x", {}, "'record.outcomes.x' is 'x', not a whole number"),
        (REPORT, "record.counters.5", {"totals": 7}, "not counters"),
        (REPORT, "held.0", [0, 3, 1, 1], "'held.0' is [0, 3, 1, 1], not a shard"),
        (REPORT, "worker", True, "'worker' is True, not a whole number"),
        (REPORT, "worker", 2**70, "not a number that a job can have"),
        (REPORT, "worker", 3.0, "'worker' is 3.0, not a whole number"),
        (Ready(1, 0, {"0/0": "a"}, (9000,), 0, 0), "digests.0/x", "b", "not two to five numbers"),
        (Ready(1, 0, {"0/0": "a"}, (9000,), 0, 0), "ports.0", 70000, "'ports.0' is 70000, not from 1 to 65535"),
        (ProcessExited(1, -9, 1.0), "time", float("nan"), "'time' is nan, not a finite number"),
        (ScriptFailed(1, "no", 1), "error", "x" * (MOST_CHARACTERS + 1), "'error' has 1000001 characters, more than"),
        (EventsReported(1, ()), "events", [{}] * (MOST_ITEMS + 1), "'events' has 1000001 items, more than"),
    ],
)  # fmt: skip
def test_the_field_that_is_wrong_is_named(body: Any, path: str, value: Any, said: str) -> None:
    told = refused(changed(body, path, value))
    assert told.startswith(f"{type(body).__name__} from {SENDER}: ") and said in told
    assert len(told) < 400, "however large the value is"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a message from somebody: it is not JSON (JSONDecodeError)"),
        ("[" * 100_000, "a message from somebody: it is not JSON (RecursionError)"),
        ("9" * 5000, "a message from somebody: it is not JSON (ValueError)"),
        ("[]", "a message from somebody: it is not a JSON object"),
        ("{}", "a message from somebody: 'protocol' is missing"),
        ('{"protocol": "5.1", "sender": "worker 3"}', "a message from worker 3: 'kind' is missing"),
        ('{"protocol": "5.1", "sender": "worker 3", "kind": "Weather", "id": null, "body": {}}',
         "a message from worker 3: 'kind' is 'Weather', which is unknown"),
        ('{"protocol": 1, "sender": "worker 3"}', "a message from worker 3: 'protocol' is not a version"),
        (" " * (LARGEST + 1), "a message from somebody: it has 8388609 characters, more than 8388608"),
    ],
    ids=range(9),
)  # fmt: skip
def test_what_is_no_message_is_refused(text: str, said: str) -> None:
    assert refused(text) == said


def whole(value: Any, kinds: Kinds[Any] = MESSAGES) -> Any:
    """What is read of a text of which nothing is known, since it does not begin as others; or why it is refused."""
    return outcome(" " + json.dumps(value), kinds)


def outcome(text: str, kinds: Kinds[Any] = MESSAGES) -> Any:
    try:
        return kinds.read(text).body
    except MalformedError as error:
        return str(error)


OTHER = replace(REPORT, record=replace(RECORD, position=3), times={5: {"interval_s": 2.5}})


@pytest.mark.parametrize("body", [REPORT, OTHER, JobStarted(3, JOB), JoinRequest(3, JOB)])
def test_what_another_has_said_alike_is_read_once(body: Any) -> None:
    """Thousands of workers say the same of the job, and of the iteration that they are in."""
    first, again = (MESSAGES.read(json.dumps({**plain(body), "sender": f"worker {n}"})).body for n in range(2))
    assert first == again == body == whole(plain(body))
    if isinstance(body, SurvivorReport):
        assert first.record is again.record
    else:
        assert first.job is again.job


@pytest.mark.parametrize("body", [REPORT, JobStarted(3, JOB)])
def test_what_is_wrong_is_found_beside_what_is_known(body: Any) -> None:
    assert MESSAGES.read(json.dumps(plain(body))).body == body
    for path, _, other in spoiled(plain(body)["body"]):
        letter = {**plain(body), "body": other}
        assert outcome(json.dumps(letter)) == whole(letter), path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"record": {', '"record": {}, "record": {'),
        ('"held": ', '"record": {"iteration": 5, "stage": "COMPUTE"}, "held": '),
        ('"held": ', '"record": {}, "held": '),
        ('"epoch": 0', '"epoch": {"a": 0, "record": {"iteration": 5}}'),
        ('"iteration": 4}', '"iteration": 4, "record": {"5": {"iteration": 4}}}'),
        (', "record": {', ', "record": "{", "times": {'),
        (', "record": {', ', "record: {'),
        ('{"iteration": 4}}', '{"iteration": 4}'),
        ('"sender": "worker 3"', '"sender": "a\\", \\"record\\": {}"'),
    ],
    ids=range(9),
)  # fmt: skip
def test_parts_in_other_places_are_not_taken_for_those_that_are_known(old: str, new: str) -> None:
    """The second of two equal names counts, and a name means something in its place only."""
    text = json.dumps(plain(REPORT))
    assert MESSAGES.read(text).body == REPORT and old in text
    changed = text.replace(old, new, 1)
    assert outcome(changed) == outcome(" " + changed)


def test_what_no_rule_is_about_is_read_as_it_is() -> None:
    """Even if it looks like a part that is known."""
    letter = plain(REPORT)
    times = {"5": {"interval_s": 1.0, "record": letter["body"]["record"]}}
    letter["body"] = {"times": times, **{name: each for name, each in letter["body"].items() if name != "times"}}
    for _ in range(2):
        assert outcome(json.dumps(letter)) == replace(REPORT, times={5: times["5"]})


@settings(max_examples=8, phases=(Phase.generate,))
@given(data=st.data())
def test_the_text_of_a_body_says_what_the_body_does(data: st.DataObject) -> None:
    for kinds, kind in EVERY_KIND:
        body = data.draw(instances_of(kind))
        said = kinds.read(kinds.write(body, SENDER, "a.1")).said
        assert "\n" not in said and decode(kind, json.loads(said)) == body


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({**plain(REPORT), "protocol": f"{version.MAJOR}.{version.MINOR + 1}"}),
        json.dumps({**plain(ScriptFailed(1, "é", 1))}, ensure_ascii=False), json.dumps(plain(REPORT), indent=1),
        json.dumps(plain(REPORT)).replace('"body": {', '"body": {\n'), " " + json.dumps(plain(REPORT)),
        json.dumps(plain(REPORT))[:-1] + f', "protocol": "{version.MAJOR}.{version.MINOR + 1}", "mood": {{}}}}',
    ],
    ids=range(6),
)  # fmt: skip
def test_a_text_that_is_not_as_this_version_writes_it_is_not_taken_on(text: str) -> None:
    assert MESSAGES.read(text).said == ""


def test_a_plan_that_breaks_a_rule_is_refused() -> None:
    notice = plain(PlanChange(1, 0, PLAN), NOTICES)
    notice["body"]["plan"]["replicas"][0]["stages"] = [[0], [0]]
    assert "PlanChange from worker 3: 'plan' is not a plan that can be run: " in refused(notice, NOTICES)


def test_kinds_of_another_set_are_refused() -> None:
    assert "'kind' is 'StopTraining', which is unknown" in refused(NOTICES.write(StopTraining(15), "the coordinator"))


def test_another_major_version_is_refused() -> None:
    said = refused({**plain(TrainingFinished(3, 5)), "protocol": "99.0"})
    assert said.startswith("a message from worker 3: 'protocol' is 99.0, this process knows 5.")


def newer(letter: dict[str, Any]) -> dict[str, Any]:
    return {**letter, "protocol": f"{version.MAJOR}.{version.MINOR + 1}", "colour": "red"}


def test_fields_of_a_newer_minor_version_are_read_over() -> None:
    """Wherever they are."""
    letter = newer(changed(REPORT, "record.weather", "sunny"))
    letter["body"]["mood"] = {"good": True}
    assert MESSAGES.read(json.dumps(letter)).body == REPORT
    del letter["body"]["epoch"]
    assert refused(letter) == "SurvivorReport from worker 3: 'epoch' is missing"


def test_an_older_minor_version_may_lack_fields_that_have_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    letter = plain(EpochPlan(0, PLAN, None), DECISIONS)
    monkeypatch.setattr(wire, "MINOR", version.MINOR + 1)
    monkeypatch.setattr(wire, "VERSION", f"{version.MAJOR}.{version.MINOR + 1}")
    del letter["body"]["on_trial"]
    assert DECISIONS.read(json.dumps(letter)).body == EpochPlan(0, PLAN, None)
    del letter["body"]["plan"]
    assert refused(letter, DECISIONS) == "EpochPlan from worker 3: 'plan' is missing"


def test_what_is_optional_for_who_constructs_is_written() -> None:
    assert "unreachable" in plain(REPORT)["body"]
    with pytest.raises(TypeError):
        JobStarted(3)  # type: ignore[call-arg]
