# SPDX-License-Identifier: Apache-2.0
"""Starting a worker's process: by executing Python anew, or by forking this process where that has been warmed up.

May import: the standard library, `control.node.bootstrap` (inside the forked child).
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import stat
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

BOOTSTRAP = "megatron_resihp.control.node.bootstrap"

DEFAULT_AGAIN = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker's process is started with.

    Attributes:
        command: the script and its arguments.
        environment: all of it.
        output: file descriptor for its standard output and error.
        liveness, records: its ends; inherited under the same numbers, as is the file descriptor `absences`.
    """

    worker: int
    command: Sequence[str]
    environment: Mapping[str, str]
    output: int
    liveness: socket.socket
    records: socket.socket
    absences: int


Spawn = Callable[[WorkerSpec], int]
"""Starts a process in a session of its own and returns its pid. Called in the agent's main thread, as a worker dies
with the thread that started it; the workers that the job begins with are started before any other thread is."""


def exec_worker(spec: WorkerSpec) -> int:
    """A fresh interpreter."""
    for number in (spec.liveness.fileno(), spec.records.fileno(), spec.absences):
        os.set_inheritable(number, True)
    output = [(os.POSIX_SPAWN_DUP2, spec.output, 1), (os.POSIX_SPAWN_DUP2, spec.output, 2)]
    command = [sys.executable, "-m", BOOTSTRAP, *spec.command]
    # Python ignores some signals, and what is ignored stays so across exec.
    defaults = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD]
    return os.posix_spawn(
        sys.executable, command, spec.environment, file_actions=output, setsid=True, setsigdef=defaults
    )


def fork_worker(spec: WorkerSpec) -> int:
    """A copy of this process, which saves it the imports.

    Threads are not copied, and what they have locked stays locked in the copy: this process must have started none, or,
    where a worker is started anew, only the agent's own, whose locks no worker touches.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become_worker(spec)
    return pid


def _become_worker(spec: WorkerSpec) -> NoReturn:
    try:
        os.setsid()
        _reset_signals()
        _close_sockets_but(spec.liveness.fileno(), spec.records.fileno())
        os.dup2(spec.output, 1)
        os.dup2(spec.output, 2)
        os.close(spec.output)
        _reopen_streams()
        os.environ.clear()
        os.environ.update(spec.environment)
        # What the forked process has registered to run at its exit is not for us.
        atexit._clear()
        from megatron_resihp.control.node import bootstrap

        # The file descriptors are opened anew, and these objects must not close them.
        spec.liveness.detach()
        spec.records.detach()
        bootstrap.main(spec.command)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _close_sockets_but(*kept: int) -> None:
    """As exec would. All others are the agent's, and when a worker's connections are cut, its would be too."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if number not in kept and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)
        except OSError:  # what has listed them
            continue


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As in any Python: a write to a peer that has died is an error and not this process's end.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for number in DEFAULT_AGAIN:
        signal.signal(number, signal.SIG_DFL)


def _reopen_streams() -> None:
    """A test runner has put other objects in the place of these."""
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
