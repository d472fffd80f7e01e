# SPDX-License-Identifier: Apache-2.0
"""The first code of every worker: ties its life to the agent's, enables the plugin, runs the script, says how it ended.

`python -m megatron_resihp.control.node.bootstrap SCRIPT ARGS...`, or `-m MODULE ARGS...`, started by the agent. May
import: the standard library and this package's modules; torch and `executor` once the plugin is enabled.
"""

from __future__ import annotations

import atexit
import os
import re
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from megatron_resihp.control import exit_codes, keys, linux
from megatron_resihp.control.node import environment
from megatron_resihp.control.streams import let_no_full_disk_end_this
from megatron_resihp.control.transport.liveness import ENDED, FAILED, LivenessConnection
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.client import StoreClient, open_connection
from megatron_resihp.control.worker.errors import JobEnded
from megatron_resihp.protocol.messages import MESSAGES, Message, ScriptEnded, ScriptFailed

REPORT_TIMEOUT_S: Final = 60.0
"""How long to wait for the store: a script may fail before the agent serves it."""
MEET_S: Final = 300.0
"""How long to wait for the store where groups meet there."""
LONGEST_ERROR: Final = 300
DEVICE_FAILURES: Final = frozenset({46, 214, 220, 226, 999})
"""Codes of CUDA errors that come from a device which fails, not from the program: unavailable, uncorrectable ECC or
NVLink error, contained hardware error, and unknown, as where a device has fallen off the bus."""

KILLED_LOADER: Final = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([\w ]+)")
"""The error that torch raises in the trainer, or its cause."""


@dataclass(frozen=True)
class _End:
    """How the script ended. `error`: what is wrong; None where nothing is, or the coordinator ended it."""

    code: int
    error: str | None = None


def main(command: Sequence[str]) -> NoReturn:
    """Run the script as Python would, and end the process."""
    let_no_full_disk_end_this()
    leave_to_agent(signal.SIGUSR1, signal.SIGUSR2)
    liveness = _tie_to_agent()
    try:
        _run(command)
        end = _End(0)
    except SystemExit as problem:
        end = _read_exit(problem)
    except BaseException as problem:
        end = _read_problem(problem)
        if getattr(problem, "error_code", None) in DEVICE_FAILURES:
            linux.die("the device has failed")
        if killed := _killed_loader(problem):
            linux.die(killed)
    if end.error is not None:
        # No exit hooks: some wait for peers, which wait for this process.
        liveness.last_word(FAILED)
        _tell(ScriptFailed(_worker(), end.error, end.code))
    elif end.code == 0:
        _tell(ScriptEnded(_worker()))
        _run_exit_hooks()
    else:
        liveness.last_word(ENDED)
    _flush()
    # Threads that sit in C++ code, as those that listen to the store do, abort the process when the interpreter is
    # taken down under them.
    os._exit(end.code)


def leave_to_agent(*signals: signal.Signals) -> None:
    """SLURM sends signals to every process of a job; the agent says what follows. A script may handle them."""
    for number in signals:
        signal.signal(number, signal.SIG_IGN)


def _tie_to_agent() -> LivenessConnection:
    linux.die_with_parent()
    if os.getppid() != int(os.environ[environment.AGENT_PID]):
        os._exit(exit_codes.FENCED)
    _pass_on_to_forks()
    end = socket.socket(fileno=int(os.environ[environment.LIVENESS_FD]))
    end.set_inheritable(False)
    for name in (environment.RECORDS_FD, environment.STORE_FD, environment.ABSENCES_FD):
        os.set_inheritable(int(os.environ[name]), False)
    return LivenessConnection(end, float(os.environ[environment.HEARTBEAT_S]), lambda: os._exit(exit_codes.FENCED))


def _pass_on_to_forks() -> None:
    """Data loaders and checkpoint writers die with this process too, or they keep its sockets open.

    Not those that are forked by a passing thread: they would die with the thread.
    """
    forking: list[int] = []

    def before() -> None:
        forking[:] = [os.getpid()] if threading.current_thread() is threading.main_thread() else []

    def in_child() -> None:
        if forking:
            linux.die_with_parent()
            if os.getppid() != forking[0]:
                os._exit(exit_codes.FENCED)

    os.register_at_fork(before=before, after_in_child=in_child)


def _run(command: Sequence[str]) -> None:
    is_module = command[0] == "-m"
    script, *arguments = command[is_module:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.realpath(script)))
    import megatron_resihp

    megatron_resihp.enable()
    _meet_in_job()
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def _meet_in_job() -> None:
    """Groups that torch makes by itself, as in a job without --resihp, meet where the plugin's do."""
    from megatron_resihp.executor.groups.control_store import meet_in

    meet_in(lambda: open_connection(environment.way_to_store(), MEET_S))


def _read_exit(problem: SystemExit) -> _End:
    if problem.code is not None and not isinstance(problem.code, int):
        print(problem.code, file=sys.stderr)
        return _End(1, _shorten(str(problem.code)))
    code = (problem.code or 0) & 0xFF
    told_to = code == exit_codes.FENCED or isinstance(problem.__context__, JobEnded)
    # What refuses an argument says why in the exit's cause, and has said it to the user.
    why = f"exit code {code}" if problem.__cause__ is None else _shorten(str(problem.__cause__))
    return _End(code, None if code == 0 or told_to else why)


def _read_problem(problem: BaseException) -> _End:
    if isinstance(problem, JobEnded):
        print(f"resihp: the job has ended: {problem}", file=sys.stderr)
        return _End(problem.code)
    traceback.print_exception(problem)
    return _End(1, _shorten(f"{type(problem).__name__}: {problem}"))


def _killed_loader(problem: BaseException | None) -> str | None:
    """Which of this worker's data loaders was killed, by the out-of-memory killer perhaps; None: none was.

    The program has done nothing wrong: it is as if the worker itself had been killed.
    """
    while problem is not None:
        if isinstance(problem, RuntimeError) and (found := KILLED_LOADER.search(str(problem))):
            return f"a data loader (process {found[1]}) was killed by a signal ({found[2]})"
        problem = problem.__cause__ or problem.__context__
    return None


def _shorten(error: str) -> str:
    return (error.strip().splitlines() or [""])[0].rstrip(": ")[:LONGEST_ERROR]


def _worker() -> int:
    return int(os.environ[environment.WORKER])


def _tell(message: Message) -> None:
    """Tell the coordinator before peers can notice that this process ends; where that fails, the agent will."""
    try:
        store = StoreClient(open_connection(environment.way_to_store(), REPORT_TIMEOUT_S))
        store.push(keys.INBOX, MESSAGES.write(message, f"worker {_worker()}"))
    except StoreError as error:
        print(f"resihp: the coordinator could not be told: {error}", file=sys.stderr)


def _run_exit_hooks() -> None:
    """What Python does at the end of a script."""
    threading._shutdown()  # type: ignore[attr-defined]  # Joins what is no daemon.
    atexit._run_exitfuncs()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # What -m has put there: the directory that we were started in.
        del sys.path[0]
    main(sys.argv[1:])
