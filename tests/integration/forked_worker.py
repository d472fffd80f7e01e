# SPDX-License-Identifier: Apache-2.0
"""Starts workers by forking a process that has been warmed up, in place of executing Python anew."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

from megatron_resihp.control import linux
from megatron_resihp.control.node import bootstrap
from megatron_resihp.control.node.spawn import WorkerSpec

DEFAULT_AGAIN = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


def fork_worker(spec: WorkerSpec) -> int:
    """A copy of this process in the place of a worker's, which saves it the imports."""

    def work() -> NoReturn:
        # The file descriptors are opened anew, and these objects must not close them.
        for sock in spec.sockets:
            sock.detach()
        bootstrap.main(spec.command)

    return fork_process(spec.environment, spec.output, work, [sock.fileno() for sock in spec.sockets])


def fork_process(
    environment: Mapping[str, str], output: int, main: Callable[[], NoReturn], sockets: Collection[int] = ()
) -> int:
    """A copy of this process that runs `main`, as if it had been executed.

    Threads are not copied, and what they have locked stays locked in the copy: this process must have started none, or,
    where a worker is started anew, only the agent's own, whose locks no worker touches.

    Args:
        output: file descriptor for its standard output and error.
        sockets: that it keeps.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(environment, output, main, sockets)
    return pid


def fork_python(_path: str, arguments: Sequence[str], kept: Sequence[int]) -> int:
    """A copy of this process, too, for `python -c CODE ...`; stands for multiprocessing.util.spawnv_passfds.

    Args:
        kept: the file descriptors that the other process gets.
    """
    pid = os.fork()
    if pid == 0:
        try:
            # What is executed anew does not die with its parent, and neither do its own children.
            linux.die_with_parent = lambda: None
            ctypes.CDLL(None).prctl(linux.PR_SET_PDEATHSIG, 0, 0, 0, 0)
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, nothing, *kept}:
                # Not closed: objects that have a number here close it some day, and would close another file.
                if os.path.exists(f"/proc/self/fd/{number}"):
                    os.dup2(nothing, number)
            code = arguments.index("-c") + 1
            sys.argv = ["-c", *arguments[code + 1 :]]
            exec(arguments[code], {"__name__": "__main__"})
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def _become(
    environment: Mapping[str, str], output: int, main: Callable[[], NoReturn], sockets: Collection[int]
) -> NoReturn:
    try:
        os.setsid()
        _reset_signals()
        _close_sockets_but(sockets)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        _reopen_streams()
        os.environ.clear()
        os.environ.update(environment)
        # What the forked process has registered to run at its exit is not for us.
        atexit._clear()
        main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _close_sockets_but(kept: Collection[int]) -> None:
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
