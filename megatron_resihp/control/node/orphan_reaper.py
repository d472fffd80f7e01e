# SPDX-License-Identifier: Apache-2.0
"""The orphan reaper: a process that outlives its agent for as long as it takes to kill what the workers have started.

The kernel ends workers with their agent, and what their main threads fork with them (`bootstrap`). What they start
otherwise, as Megatron's checkpoint writers are, would stay, and keep sockets and memory. An orphan reaper per node
instead of a flag per process: that flag would end such a process together with the thread that started it. May import:
the standard library and `control.linux`.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
from typing import Final, NoReturn

from megatron_resihp.control.linux import HANDLED, kill_group

MESSAGE: Final = struct.Struct("=q")
"""The leader of a process group to watch over; negative: the group has ended."""


class OrphanReaper:
    """The agent's end. Make it before any thread is started: it forks.

    Attributes:
        socket: to be closed in forked workers, or the orphan reaper would not notice the agent's end.
    """

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            _guard(theirs)
        theirs.close()

    def watch(self, leader: int) -> None:
        """Kill this process group if the agent dies."""
        self._send(leader)

    def forget(self, leader: int) -> None:
        """Forget this process group: it has ended, and its number may soon be another's."""
        self._send(-leader)

    def close(self) -> None:
        """The agent ends in order; whatever is left of its workers is killed."""
        self.socket.close()
        os.waitpid(self._pid, 0)

    def _send(self, message: int) -> None:
        try:
            self.socket.send(MESSAGE.pack(message))
        except OSError:
            pass  # The orphan reaper was killed, which is no reason to end the job.


def _guard(agent: socket.socket) -> NoReturn:
    try:
        _let_go_of_all_but(agent)
        groups: set[int] = set()
        while message := agent.recv(MESSAGE.size):
            (leader,) = MESSAGE.unpack(message)
            if leader > 0:
                groups.add(leader)
            else:
                groups.discard(-leader)
        for leader in groups:
            kill_group(leader)
    finally:
        os._exit(0)


def _let_go_of_all_but(agent: socket.socket) -> None:
    """Close all other files, so that this process holds none of the agent's ports, locks and outputs."""
    os.setsid()
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    os.closerange(3, agent.fileno())
    os.closerange(agent.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
