"""The first code of every worker: ties its life to the agent's, enables the plugin, runs the script, says how it ended.

`python -m megatron_resihp.control.bootstrap SCRIPT ARGS...`, started by the agent. May import: the standard library and
this room's modules; torch only where something is told to the coordinator.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, Final

from megatron_resihp.control import environment, messages
from megatron_resihp.control.lifeline import Lifeline
from megatron_resihp.control.linux import die_with_parent

REPORT_TIMEOUT_S: Final = 10.0
LONGEST_ERROR: Final = 300


def main(command: Sequence[str]) -> int:
    """Run the script as Python would; returns the exit code of a run that ended well.

    A failed one does not return: hooks that wait for dead peers could keep the process, and with it its peers, waiting.
    """
    lifeline = _tie_to_agent()
    try:
        _run(command)
    except SystemExit as end:
        code, error = _read_exit(end)
    except BaseException as problem:
        code, error = _read_problem(problem)
    else:
        code, error = 0, None
    if code == 0:
        _tell(type="done")
        return 0
    if error is not None:
        lifeline.tell_failed()
        _tell(type="failed", error=error)
    _flush()
    os._exit(code)


def _tie_to_agent() -> Lifeline:
    die_with_parent()
    if os.getppid() != int(os.environ[environment.AGENT_PID]):
        os._exit(messages.FENCED_EXIT)
    _pass_on_to_forks()
    end = socket.socket(fileno=int(os.environ[environment.LIFELINE_FD]))
    end.set_inheritable(False)
    return Lifeline(end, float(os.environ[environment.HEARTBEAT_S]), lambda: os._exit(messages.FENCED_EXIT))


def _pass_on_to_forks() -> None:
    """Data loaders and checkpoint writers die with this process too, or they keep its sockets open.

    Not those that are forked by a passing thread: they would die with the thread.
    """
    forking: list[int] = []

    def before() -> None:
        forking[:] = [os.getpid()] if threading.current_thread() is threading.main_thread() else []

    def in_child() -> None:
        if forking:
            die_with_parent()
            if os.getppid() != forking[0]:
                os._exit(messages.FENCED_EXIT)

    os.register_at_fork(before=before, after_in_child=in_child)


def _run(command: Sequence[str]) -> None:
    script = command[0]
    sys.argv = list(command)
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    import megatron_resihp

    megatron_resihp.enable()
    runpy.run_path(script, run_name="__main__")


def _read_exit(end: SystemExit) -> tuple[int, str | None]:
    """Exit code and, where it is a failure, what to say of it."""
    if end.code is None or isinstance(end.code, int):
        code = (end.code or 0) & 0xFF
        return code, None if code in (0, messages.FENCED_EXIT) else f"exit code {code}"
    print(end.code, file=sys.stderr)
    return 1, _shorten(str(end.code))


def _read_problem(problem: BaseException) -> tuple[int, str | None]:
    from megatron_resihp.control.worker import JobEnded

    if isinstance(problem, JobEnded):
        print(f"resihp: the job has ended: {problem}", file=sys.stderr)
        return problem.code, None
    traceback.print_exception(problem)
    return 1, _shorten(f"{type(problem).__name__}: {problem}")


def _shorten(error: str) -> str:
    return (error.strip().splitlines() or [""])[0].rstrip(": ")[:LONGEST_ERROR]


def _tell(**message: Any) -> None:
    """Tell the coordinator before peers can notice that this process ends; where that fails, the agent will."""
    from megatron_resihp.control.address import parse_address
    from megatron_resihp.control.store import StoreError, connect

    message |= {"worker": int(os.environ[environment.WORKER]), "time": time.time()}
    try:
        store = connect(*parse_address(os.environ[environment.STORE]), REPORT_TIMEOUT_S)
        store.push(messages.INBOX, json.dumps(message))
    except StoreError as error:
        print(f"resihp: the coordinator could not be told: {error}", file=sys.stderr)


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
    sys.exit(main(sys.argv[1:]))
