# SPDX-License-Identifier: Apache-2.0
"""Starting a worker's process. May import: the standard library."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

BOOTSTRAP = "megatron_resihp.control.node.bootstrap"


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker's process is started with.

    Attributes:
        command: the script and its arguments.
        environment: all of it.
        output: file descriptor for its standard output and error.
        sockets: its ends; inherited under the same numbers, as is the file descriptor `absences`.
    """

    worker: int
    command: Sequence[str]
    environment: Mapping[str, str]
    output: int
    sockets: Sequence[socket.socket]
    absences: int


Spawn = Callable[[WorkerSpec], int]
"""Starts a process in a session of its own and returns its pid. Called in the agent's main thread, as a worker dies
with the thread that started it; the workers that the job begins with are started before any other thread is."""


def exec_worker(spec: WorkerSpec) -> int:
    """A fresh interpreter."""
    for number in (*(sock.fileno() for sock in spec.sockets), spec.absences):
        os.set_inheritable(number, True)
    output = [(os.POSIX_SPAWN_DUP2, spec.output, 1), (os.POSIX_SPAWN_DUP2, spec.output, 2)]
    command = [sys.executable, "-m", BOOTSTRAP, *spec.command]
    # Python ignores some signals, and what is ignored stays so across exec.
    defaults = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD]
    return os.posix_spawn(
        sys.executable, command, spec.environment, file_actions=output, setsid=True, setsigdef=defaults
    )
