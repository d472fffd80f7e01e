# SPDX-License-Identifier: Apache-2.0
"""Measures this node. May import: the standard library and this package's modules."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from megatron_resihp.health.findings import Folder, Peer

GIB: Final = 1 << 30
SHARED_MEMORY: Final = Path("/dev/shm")
TRIED: Final = b"resihp health"
LOOK_S: Final = 0.05
TOLD: Final = 200
"""Characters of a process's last line that are shown."""


def loop(
    peers: int, devices: bool, limit_s: float, network: Mapping[str, str], command: tuple[str, ...] = ()
) -> tuple[Peer, ...]:
    """Start a process for each worker, and have them sum; those that do not end in time are killed.

    Args:
        devices: whether each has a device.
        network: variables that say which interface they use.
        command: what is run in the place of the package's own program; for tests.
    """
    with tempfile.TemporaryDirectory(prefix="resihp-health-") as scratch:
        outputs = [Path(scratch, str(number)) for number in range(peers)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for number, path in enumerate(outputs):
                arguments = [
                    "--number", str(number), "--peers", str(peers), "--meet", str(Path(scratch, "meet")),
                    "--limit-s", str(limit_s), *([] if devices else ["--without-device"]),
                ]  # fmt: skip
                with path.open("wb") as output:
                    processes.append(_started([*(command or _program()), *arguments], network, output))
            _await(processes, limit_s)
        finally:
            for process in processes:
                _kill(process)
        return tuple(_said(path, process.returncode) for path, process in zip(outputs, processes, strict=True))


def _program() -> tuple[str, ...]:
    return sys.executable, "-m", "megatron_resihp.health.peer"


def _started(command: list[str], network: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", **network}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
    )


def _await(processes: list[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Until all have ended, or the time is over."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        time.sleep(LOOK_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _said(path: Path, code: int) -> Peer:
    """The last of what a process has said about itself."""
    peer, last = Peer(), ""
    for line in path.read_text(errors="replace").splitlines():
        said = _object(line)
        if said is None:
            last = line.strip() or last
        else:
            peer = Peer(**said)
    if code not in (0, -signal.SIGKILL) and peer.error is None:
        return Peer(error=f"it ended with {code}: {last[:TOLD] or 'without a word'}")
    return peer


def _object(line: str) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def folder(path: Path) -> Folder:
    """Try to write there."""
    free = 0.0
    try:
        free = shutil.disk_usage(path).free / GIB
        with tempfile.NamedTemporaryFile(dir=path, prefix=".resihp-health-") as file:
            file.write(TRIED)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Folder(str(path), free, error.strerror or str(error))
    return Folder(str(path), free)


def clock_offset_s(path: Path) -> float | None:
    """Seconds that this node's clock is ahead of what the folder's file system gives a file as its time.

    A network file system has the server's time, which all nodes share. None: no file can be made.
    """
    try:
        before = time.time()
        with tempfile.NamedTemporaryFile(dir=path, prefix=".resihp-health-") as file:
            file.write(TRIED)
            file.flush()
            os.fsync(file.fileno())
            written = os.stat(file.name).st_mtime
        after = time.time()
    except OSError:
        return None
    # It was written at some time between.
    return max(before - written, 0.0) if before > written else min(after - written, 0.0)
