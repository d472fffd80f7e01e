# SPDX-License-Identifier: Apache-2.0
"""When decisions are written into their log."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_resihp.control.coordination.decisions import recorded
from megatron_resihp.control.coordination.decisions.recorded import Recorded
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.protocol.messages import ScriptEnded


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
