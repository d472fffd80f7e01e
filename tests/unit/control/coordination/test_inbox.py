# SPDX-License-Identifier: Apache-2.0
"""Messages that come twice are heard once, alone or among others of their node."""

from __future__ import annotations

from collections import deque
from typing import Any

from test_coordinator import report

from megatron_resihp.control.coordination.decisions.recorded import Recorded
from megatron_resihp.control.coordination.inbox import Inbox
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.protocol.messages import MESSAGES, SurvivorReport
from megatron_resihp.protocol.together import Together


def sent(worker: int) -> bytes:
    return MESSAGES.write(report(worker), f"worker {worker}", f"{worker}.1").encode()


def joined(*workers: int) -> bytes:
    [(_, text)] = Together(f"node {workers}").told([sent(worker) for worker in workers])
    return text


class Texts:
    """A store with these in its inbox."""

    def __init__(self, *texts: bytes) -> None:
        self._texts = deque(texts)

    def take(self, queue: str, timeout_s: float) -> list[str]:
        return [self._texts.popleft().decode()] if self._texts else []


def heard(*texts: bytes, known: frozenset[str] = frozenset()) -> list[list[SurvivorReport]]:
    """The reports in each text, as far as they are heard."""
    state = Recorded(JobSize(4, 1)).state
    store: Any = Texts(*texts)
    inbox, found = Inbox(store, state, lambda dropped: None, known), []
    while (taken := inbox.take()) is not None:
        found.append([each for body in taken for each in getattr(body, "reports", [body])])
        assert not taken or not inbox.said or MESSAGES.read(texts[len(found) - 1].decode()).body == taken[0]
    return found  # type: ignore[return-value]


def test_a_report_that_has_come_alone_is_not_heard_again_with_others() -> None:
    assert heard(sent(1), joined(0, 1, 2)) == [[report(1)], [report(0), report(2)]]


def test_reports_that_have_come_together_are_not_heard_again() -> None:
    """The connection was lost before their workers knew, so that they have told it anew."""
    assert heard(joined(0, 1), joined(1, 0, 2), sent(0)) == [[report(0), report(1)], [report(2)], []]
    assert heard(joined(0, 1), joined(0, 1), joined(1, 0)) == [[report(0), report(1)], [], []]


def test_what_an_earlier_coordinator_has_heard_is_not_heard_again() -> None:
    assert heard(joined(0, 1, 2), known=frozenset({"0.1", "2.1"})) == [[report(1)]]
