# SPDX-License-Identifier: Apache-2.0
"""What the control plane asks of Linux beyond what Python's own modules offer.

May import: the standard library.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""A terminal or SLURM sends them to all processes of a job; the agent says what follows, and all others ignore them."""

PR_SET_PDEATHSIG: Final = 1
SYS_PIDFD_GETFD: Final = 438
"""The number of the system call, since Linux 5.6, on every architecture."""

MEMINFO: Final = Path("/proc/meminfo")
CONTROL_GROUP: Final = Path("/sys/fs/cgroup")
SHARED_MEMORY: Final = Path("/dev/shm")
SEMAPHORES: Final = "sem.mp-*"
"""Of Python's multiprocessing, where processes are not just forked."""
TORCH_SHARED_MEMORY: Final = re.compile(r"torch_(\d+)_.*")


class RunDelay:
    """For how long the thread that makes this has been ready to run without getting a core, in seconds.

    A reading takes 2 to 3 µs. Where the kernel doesn't count that, it is 0.
    """

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def __call__(self) -> float:
        return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9 if self._file >= 0 else 0.0


def available_memory() -> int:
    """Bytes of host memory that can be taken without swapping, within this control group's limit."""
    lines = MEMINFO.read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        most, used = ((CONTROL_GROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return free
    return free if most == "max" else min(free, max(int(most) - int(used) + _cached(), 0))


def _cached() -> int:
    """Bytes of files that the kernel keeps for this control group, and gives up when others want the memory."""
    try:
        words = (CONTROL_GROUP / "memory.stat").read_text().split()
    except OSError:
        return 0
    sizes = dict(zip(words[::2], words[1::2], strict=True))
    return int(sizes.get("inactive_file", 0)) + int(sizes.get("active_file", 0))


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    That thread may be gone already: compare os.getppid() with what is expected afterwards.
    """
    _libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def die(reason: str) -> NoReturn:
    """Kill this process, from any thread: its peers recover from a death, where an error would end the job."""
    print(f"resihp: {reason}; this worker dies", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def kill_group(leader: int) -> None:
    """SIGKILL for all that is left of the process group that `leader`, not yet waited for, started."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def cut_connections(pid: int, pidfd: int) -> int:
    """Shut down the TCP connections of another process, which may be stopped; returns how many.

    A process that is stopped keeps its connections open, and its peers wait. Where the kernel does not let us, nothing
    is done, and the peers have to notice by themselves.
    """
    return sum(_shut_down_if_tcp(pidfd, number) for number in _socket_numbers(pid))


def shared_memory_of_group(leader: int) -> list[Path]:
    """What is left in shared memory by the processes in the group of `leader`. Ask before all of them are dead.

    torch's files are named after a process. The semaphores between a trainer and what it has spawned are not, so they
    are looked for in the processes that still have them; no other has one of them.
    """
    found = []
    for path in SHARED_MEMORY.glob("torch_*"):
        match = TORCH_SHARED_MEMORY.fullmatch(path.name)
        if match and _is_in_group(int(match[1]), leader):
            found.append(path)
    if semaphores := {_inode_of(path): path for path in SHARED_MEMORY.glob(SEMAPHORES)}:
        members = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
        theirs = {number for pid in members if _is_in_group(pid, leader) for number in _semaphores_of(pid)}
        found += [semaphores[number] for number in sorted(theirs & semaphores.keys())]
    return found


def free_shared_memory(paths: Iterable[Path]) -> None:
    """Remove what is ours of that: another user may have something of such a name there."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def _inode_of(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:  # removed meanwhile
        return 0


def _semaphores_of(pid: int) -> Iterator[int]:
    """The inodes of those that a process has; in the one that has made it a semaphore has another name."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return
    for line in maps.splitlines():
        if f"{SHARED_MEMORY}/sem." in line:
            yield int(line.split()[4])


def _is_in_group(pid: int, leader: int) -> bool:
    try:
        return os.getpgid(pid) == leader
    except OSError:
        return False


def _socket_numbers(pid: int) -> list[int]:
    directory = Path(f"/proc/{pid}/fd")
    try:
        numbers = [int(entry.name) for entry in os.scandir(directory)]
    except OSError:
        return []
    return [number for number in numbers if _is_socket(directory / str(number))]


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def _shut_down_if_tcp(pidfd: int, number: int) -> bool:
    copied = _libc().syscall(SYS_PIDFD_GETFD, pidfd, number, 0)
    if copied < 0:
        return False
    with socket.socket(fileno=copied) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return False
        try:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False  # gloo aborts the process when it is continued and its listener is shut down
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
