# SPDX-License-Identifier: Apache-2.0
"""Lines of the log of decisions: what arrived is in them as it came, and says what writing it anew would."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from protocol_examples import TOLD

from megatron_resihp.control.coordination.decisions.entries import ENTRIES, CoordinatorFailed, NotFound, Step, line_of
from megatron_resihp.control.coordination.decisions.entries import line_of_step as line
from megatron_resihp.protocol.logs import LogPage, LogsWanted, Place
from megatron_resihp.protocol.messages import MESSAGES, EventsReported, Message

FED = [message for message in TOLD if not isinstance(message, EventsReported | LogPage | LogsWanted)]
BARE = Step(7, 1795851526.906018, FED[0], "worker 1.5")
STEPS = (
    BARE, replace(BARE, letter=None), replace(BARE, letter='"'), replace(BARE, reached=5),
    replace(BARE, page=Place(0, 5)), replace(BARE, answers=(NotFound("none", ()),)),
    replace(BARE, actions=("Go",), digest="abc"), replace(BARE, error="ValueError: no"),
)  # fmt: skip


def said(message: Message) -> str:
    return MESSAGES.read(MESSAGES.write(message, "a worker", "an id")).said


@pytest.mark.parametrize("step", STEPS, ids=range(len(STEPS)))
def test_a_message_is_in_the_line_as_it_came(step: Step) -> None:
    for message in FED:
        fed = replace(step, fed=message)
        assert line(fed, said(message)) == line_of(fed)


def test_what_came_in_other_words_says_the_same() -> None:
    """Numbers and spaces may be written otherwise."""
    text = json.dumps(json.loads(MESSAGES.write(FED[0], "a worker", "an id")), separators=(", ", ": "))
    other = text.replace('"worker": 0', '"worker":  0').replace('"micro_batches": 4', '"micro_batches":4')
    came = MESSAGES.read(other).said
    assert came and came != said(FED[0])
    assert ENTRIES.read(line(BARE, came)).body == BARE


def test_what_is_no_message_is_written() -> None:
    failed = replace(BARE, fed=CoordinatorFailed("an error", False))
    assert line(failed, "") == line_of(failed)
