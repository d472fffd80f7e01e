# SPDX-License-Identifier: Apache-2.0
"""A launcher whose terminal is gone goes on, and its exit code is the job's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LAUNCHER = """
import sys
from megatron_resihp.control.terminal import say, warn
say("one"), warn("two"), say("three")
sys.exit(75)
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_nobody_reads_is_dropped(stream: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: writer}
    done = subprocess.run([sys.executable, "-c", LAUNCHER], text=True, timeout=60.0, **streams)
    os.close(writer)
    assert done.returncode == 75
    assert (done.stdout, done.stderr) == ((None, "two\n") if stream == "stdout" else ("one\nthree\n", None))
