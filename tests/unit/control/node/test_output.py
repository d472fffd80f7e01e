# SPDX-License-Identifier: Apache-2.0
"""Where the workers' output goes."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

from megatron_resihp.control.node.output import Outputs
from megatron_resihp.control.streams import unfailing

WAIT_S = 10.0


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_of_a_worker_that_has_ended_no_file_stays_open(tmp_path: Path) -> None:
    """Else a worker that is started again and again takes the launcher all that it may open."""
    terminal = io.StringIO()
    outputs = Outputs("both", tmp_path, terminal)
    outputs.start()
    os.close(outputs.open(0))
    before = open_files()
    for worker in range(1, 4):
        end = outputs.open(worker)
        os.write(end, b"last words\n")
        os.close(end)
    deadline = time.monotonic() + WAIT_S
    while open_files() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_files() <= before
    outputs.close(WAIT_S)
    assert outputs.last_lines(3) == ["last words"] and "[w2] last words" in terminal.getvalue()


def test_a_character_that_the_terminal_lacks_silences_no_later_line(tmp_path: Path) -> None:
    """As where the locale is not UTF-8."""
    path = tmp_path / "terminal"
    with path.open("w", encoding="ascii", errors="strict") as terminal:
        outputs = Outputs("prefix", tmp_path, unfailing(terminal))
        outputs.start()
        end = outputs.open(0)
        for line in ("loss Σ 1.5\n", "loss 1.4\n"):
            os.write(end, line.encode())
        os.close(end)
        outputs.close(WAIT_S)
    assert path.read_text() == "[w0] loss \\u03a3 1.5\n[w0] loss 1.4\n"


def test_a_terminal_that_is_gone_keeps_no_worker_from_writing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as terminal:
        outputs = Outputs("both", tmp_path, unfailing(terminal))
        outputs.start()
        end = outputs.open(0)
        for line in (b"loss 1.5\n", b"loss 1.4\n"):
            os.write(end, line)
        os.close(end)
        outputs.close(WAIT_S)
    assert outputs.last_lines(0) == ["loss 1.5", "loss 1.4"]
    assert (tmp_path / "worker_0.log").read_text() == "loss 1.5\nloss 1.4\n"
