# SPDX-License-Identifier: Apache-2.0
"""What a launcher leaves in the run directory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_resihp.control import exit_codes
from megatron_resihp.control.commands.launch import launcher
from megatron_resihp.control.commands.launch.run_directory import JOB_ENDED, forget_job_end
from megatron_resihp.control.node.mailbox import Ending
from megatron_resihp.control.transport.leaders import RESULT


def test_the_exit_code_is_there_before_the_log_is_summarised(tmp_path: Path) -> None:
    """A cluster may kill this process meanwhile: a long log takes minutes."""
    found: list[str] = []
    sink = SimpleNamespace(finish=lambda: found.append((tmp_path / RESULT).read_text()))
    seat = SimpleNamespace(sink=sink, run_dir=tmp_path, holds=lambda: True)
    launcher._finish(seat, 0, Ending(69, "no plan", agreed=True))  # type: ignore[arg-type]
    assert found == ["69\n"]


@pytest.mark.parametrize("agreed", [True, False], ids=["the job has ended", "cut off from it"])
def test_a_node_notes_whether_the_job_has_ended_or_only_its_launcher(tmp_path: Path, agreed: bool) -> None:
    """Both end with 75. Its job script starts a launcher again only in the second case."""
    seat = SimpleNamespace(sink=None, run_dir=tmp_path)
    launcher._finish(seat, 2, Ending(exit_codes.RETRY, "", agreed=agreed))  # type: ignore[arg-type]
    note = tmp_path / JOB_ENDED / "node_2"
    assert note.exists() == agreed
    forget_job_end(tmp_path, 2)  # as the next launcher does first
    assert not note.exists()
