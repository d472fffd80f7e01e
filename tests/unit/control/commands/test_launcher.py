# SPDX-License-Identifier: Apache-2.0
"""What a launcher leaves in the run directory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from megatron_resihp.control.commands import launcher
from megatron_resihp.control.commands.seat import RESULT
from megatron_resihp.control.node.mailbox import Ending


def test_the_exit_code_is_there_before_the_log_is_summarised(tmp_path: Path) -> None:
    """A cluster may kill this process meanwhile: a long log takes minutes."""
    found: list[str] = []
    sink = SimpleNamespace(finish=lambda: found.append((tmp_path / RESULT).read_text()))
    seat = SimpleNamespace(sink=sink, run_dir=tmp_path, holds=lambda: True)
    launcher._finish(seat, Ending(69, "no plan", agreed=True))  # type: ignore[arg-type]
    assert found == ["69\n"]
