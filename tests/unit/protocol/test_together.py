# SPDX-License-Identifier: Apache-2.0
"""Reports of a node's survivors in one text: it says the same as their own, and of no worker anything else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_resihp.plan import Shard
from megatron_resihp.protocol import together as module
from megatron_resihp.protocol.messages import MESSAGES, NodeReport, ScriptEnded, SurvivorReport
from megatron_resihp.protocol.records import IterationPhase, Record
from megatron_resihp.protocol.together import LONGEST, MOST, Together, may_be_together
from megatron_resihp.protocol.wire import LARGEST

RECORD = Record(5, IterationPhase.COMPUTE, counters={n: {"iteration": n - 1} for n in (4, 5)})


def report(worker: int, record: Record = RECORD, epoch: int = 0) -> SurvivorReport:
    times = {n: {"started": 100.0 + worker} for n in (4, 5)}
    return SurvivorReport(worker, epoch, record, (Shard(0, 3, worker % 8, 8),), (9,) * (worker % 2), times)


def sent(message: SurvivorReport, id: str | None = "") -> bytes:
    return MESSAGES.write(message, f"worker {message.worker}", f"{message.worker}.1" if id == "" else id).encode()


def told(*texts: bytes) -> list[tuple[tuple[int, ...], object]]:
    """What each text that is sent in their place says."""
    return [(places, MESSAGES.read(text.decode()).body) for places, text in Together("node").told(texts)]


def test_reports_that_say_the_same_of_the_iteration_are_one_text() -> None:
    reports = [report(worker) for worker in range(8)]
    [(places, joined)] = told(*map(sent, reports))
    assert isinstance(joined, NodeReport) and list(joined.reports) == reports and places == tuple(range(8))
    assert [each.letter for each in joined.survivors] == [f"{worker}.1" for worker in range(8)]


@pytest.mark.parametrize(
    "other",
    [
        report(1, epoch=1), report(1, replace(RECORD, stage=IterationPhase.REDUCED)),
        report(1, replace(RECORD, counters={n: {"iteration": n - 1.0} for n in (4, 5)})),
    ],
    ids=["epoch", "stage", "type of a number"],
)  # fmt: skip
def test_reports_that_say_something_else_are_told_apart(other: SurvivorReport) -> None:
    texts = [sent(report(0)), sent(other), sent(report(2)), sent(replace(other, worker=3))]
    assert [places for places, _ in told(*texts)] == [(0, 2), (1, 3)]
    assert Together("node").told(texts[:2]) == [((0,), texts[0]), ((1,), texts[1])], "each as it came"


@pytest.mark.parametrize(
    "odd",
    [
        sent(report(1), None),
        sent(report(1), " ").replace(b'" "', b'""'),
        sent(report(1))[:-2],
        sent(report(1))[:-9] + b"\xff}}",
    ],
)
def test_a_text_that_is_no_report_goes_as_it_came(odd: bytes) -> None:
    """The coordinator tells what is wrong with it. A report without an id could not be known if it came again."""
    others = [sent(report(worker)) for worker in (0, 2)]
    result = Together("node").told([others[0], odd, others[1]])
    assert [places for places, _ in result] == [(0, 2), (1,)] and result[1][1] == odd


def test_texts_that_are_too_deep_to_be_joined_go_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_deep(value: object) -> str:
        raise RecursionError

    texts = [sent(report(worker)) for worker in range(2)]
    monkeypatch.setattr(module, "encode", too_deep)
    assert Together("node").told(texts) == [((0,), texts[0]), ((1,), texts[1])]


def test_each_text_has_an_id_of_its_own() -> None:
    """The same workers may report again: after a lost connection, or of a later epoch."""
    together, texts = Together("node"), [sent(report(worker)) for worker in range(2)]
    ids = [MESSAGES.read(text.decode()).id for _ in range(2) for _, text in together.told(texts)]
    assert len(set(ids)) == 2 and all(id is not None and id.startswith("node.") for id in ids)


def test_only_reports_wait_for_others() -> None:
    assert may_be_together(sent(report(0)))
    long = sent(replace(report(0), times={5: {"started": "x" * LONGEST}}))
    assert not may_be_together(long)
    assert not may_be_together(MESSAGES.write(ScriptEnded(0), "worker 0").encode())


def test_what_is_joined_is_no_more_than_the_store_takes() -> None:
    room = LONGEST - len(sent(replace(report(0), times={5: {"started": ""}}))) - 10
    texts = [sent(replace(report(n), times={5: {"started": "x" * room}})) for n in range(2 * MOST)]
    assert all(map(may_be_together, texts))
    joined = Together("node").told(texts)
    assert [len(places) for places, _ in joined] == [MOST, MOST]
    assert all(len(text) < LARGEST for _, text in joined)
