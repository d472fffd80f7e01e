# SPDX-License-Identifier: Apache-2.0
"""When decisions are written into their log."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_resihp.control.coordination.decisions import recorded
from megatron_resihp.control.coordination.decisions.entries import ENTRIES, Snapshot
from megatron_resihp.control.coordination.decisions.recorded import Recorded
from megatron_resihp.control.coordination.decisions.replay import Replay
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.protocol.messages import ScriptEnded
from megatron_resihp.protocol.wire import LARGEST, MalformedError


def test_what_leads_to_no_action_is_written_before_it_is_too_much_to_be_read_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = list[Sequence[str]]()
    job = Recorded(JobSize(1000, 1), write=written.append)
    assert not job.handle(ScriptEnded(0), 1.0)
    assert len(written) == 1, "the line of the beginning"
    monkeypatch.setattr(recorded, "MOST_UNWRITTEN", 1000)
    for worker in range(1, 100):
        assert not job.handle(ScriptEnded(worker), 1.0)
    assert len(written) > 2 and all(sum(map(len, lines)) < 2000 for lines in written)


def test_a_snapshot_of_thousands_of_workers_can_be_read_back() -> None:
    """It is larger than any message. What it stands for is deleted."""
    job = Recorded(JobSize(1250, 8))
    job.state.lose({worker: f"worker {worker} did not report" * 50 for worker in range(9_999)})
    line = job.snapshot()
    assert len(line) > LARGEST
    snapshot = ENTRIES.read(line).body
    assert isinstance(snapshot, Snapshot)
    state = Replay(snapshot).membership.state
    assert state.dead == job.state.dead and state.living == {9_999}


def test_a_snapshot_that_could_not_be_read_back_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Recorded(JobSize(1, 1))
    monkeypatch.setattr(ENTRIES, "_largest", 1000)
    with pytest.raises(MalformedError, match="characters, more than 1000"):
        job.snapshot()
