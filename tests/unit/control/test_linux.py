# SPDX-License-Identifier: Apache-2.0
"""What the kernel tells: for how long a thread had no core, and what processes keep in shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_resihp.control import linux
from megatron_resihp.control.linux import (
    SHARED_MEMORY,
    RunDelay,
    available_memory,
    free_shared_memory,
    kill_group,
    shared_memory_of_group,
)

BOUND_S = 20.0


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel doesn't count it")
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


@pytest.mark.parametrize(
    ("limit", "used", "cached", "available"),
    [
        (None, None, 0, 4 << 20),
        ("max", "1000", 0, 4 << 20),
        (f"{8 << 20}", f"{7 << 20}", 0, 1 << 20),
        ("10", "11", 0, 0),
        (f"{8 << 20}", f"{7 << 20}", 1 << 20, 2 << 20),
    ],
    ids=["no control group", "no limit", "a limit", "over it", "files that the kernel keeps"],
)
def test_memory_that_can_be_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str | None,
    used: str | None,
    cached: int,
    available: int,
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       8192 kB\nMemFree:  1 kB\nMemAvailable:       4096 kB\n")
    if limit is not None and used is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {cached // 2}\nactive_file {cached // 2}\n")
    monkeypatch.setattr(linux, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(linux, "CONTROL_GROUP", tmp_path)
    assert available_memory() == available


SEMAPHORE = """
import multiprocessing, sys
queue = multiprocessing.get_context("spawn").SimpleQueue()
print(queue._rlock._semlock.name, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no shared memory")
def test_semaphores_of_a_group_are_found() -> None:
    """Two groups, each with its own; killed processes leave theirs behind."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SEMAPHORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        names = [process.stdout.readline().strip().removeprefix("/") for process in processes if process.stdout]
        found = [shared_memory_of_group(process.pid) for process in processes]
    finally:
        for process in processes:
            kill_group(process.pid)
            process.wait()
    for name, paths, others in zip(names, found, reversed(found), strict=True):
        own = SHARED_MEMORY / f"sem.{name}"
        assert own in paths and own not in others
        own.unlink()
    for path in {path for paths in found for path in paths}:
        path.unlink(missing_ok=True)


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    ours, not_ours, gone = tmp_path / "torch_1_1", tmp_path / "torch_1_2", tmp_path / "torch_1_3"
    ours.touch()
    not_ours.mkdir()
    free_shared_memory([not_ours, gone, ours])
    assert list(tmp_path.iterdir()) == [not_ours]
