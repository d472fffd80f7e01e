# SPDX-License-Identifier: Apache-2.0
"""Where the workers' output goes."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

from megatron_resihp.control.node.output import Outputs

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
