# SPDX-License-Identifier: Apache-2.0
"""For how long a thread had no core, as the kernel counts it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_resihp.control.linux import RunDelay

pytestmark = pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel doesn't count it")
BOUND_S = 20.0


def test_a_thread_that_shares_its_core_waits_for_it() -> None:
    """Whichever thread asks: it is about the one that has made it."""
    core = min(os.sched_getaffinity(0))
    busy = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", busy])
    delays: list[float] = []
    enough = threading.Event()

    def share() -> None:
        os.sched_setaffinity(0, {core})
        delay = RunDelay()
        before = delay()
        deadline = time.monotonic() + BOUND_S
        while delay() - before < 0.02 and time.monotonic() < deadline:
            pass
        delays.extend((before, delay()))
        enough.set()

    try:
        threading.Thread(target=share, daemon=True).start()
        assert enough.wait(2 * BOUND_S)
    finally:
        other.kill()
        other.wait()
    assert 0.02 <= delays[1] - delays[0] < 2 * BOUND_S
