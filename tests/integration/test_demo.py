# SPDX-License-Identifier: Apache-2.0
"""The demo as a user runs it, and that it shows what the README says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from jobs import REPOSITORY

from megatron_resihp.report.run.run_summary import RunSummary

DEMO_S = 420.0
"""It takes less than three minutes on two cores that nobody else uses, and once per installation compiles a planner."""


@pytest.mark.nightly
@pytest.mark.timeout(DEMO_S + 60)
def test_the_demo_goes_through_everything_and_ends_as_it_began(tmp_path: Path) -> None:
    """That nothing was lost, repeated or different is what its exit code says."""
    subprocess.run(["bash", REPOSITORY / "scripts" / "demo.sh", tmp_path], check=True, timeout=DEMO_S)
    summary = RunSummary.from_json(json.loads((tmp_path / "summary.json").read_text()))
    assert [death.worker for death in summary.deaths] == [5, 2] and summary.came_back == (10, 13)
    assert [(found.workers, found.change) for found in summary.verdicts] == [((6,), "onset"), ((6,), "recovery")]
    first, slow, well, seven, six, *_, last = summary.plans
    assert slow.by_choice and slow.layers != first.layers and slow.micro_batches != first.micro_batches
    assert well.by_choice and well.like_the_first
    assert (seven.working, six.working) == (7, 6), "the peers of the dead go on working"
    assert last.like_the_first and last.working == 8
    assert (tmp_path / "run.png").exists()
