# SPDX-License-Identifier: Apache-2.0
"""A job without the plugin, as torchrun would start it, but forked: for what is compared with stock Megatron.

Imports torch only where it is launched.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from forked_worker import fork_process

from megatron_resihp.control import linux

HOST = "127.0.0.1"


def launch_plain(command: Sequence[str], workers: int, run_dir: Path) -> int:
    """Run a script in this many processes until all have ended; one that fails ends the others.

    Returns:
        0, or the code of the first that failed.
    """
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    listener = socket.create_server((HOST, 0))
    running = {}
    for rank in range(workers):
        output = os.open(run_dir / "logs" / f"worker_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        environment = _environment(rank, workers, listener.getsockname()[1], run_dir)
        running[fork_process(environment, output, lambda: _run_script(command))] = rank
        os.close(output)
    (run_dir / "pids").write_text("".join(f"{rank} {pid}\n" for pid, rank in running.items()))
    # Only now: its thread would not live in a fork.
    store = _serve(listener, workers)
    code = _wait(running, run_dir)
    del store
    return code


def _environment(rank: int, workers: int, port: int, run_dir: Path) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    # The store is the launcher's.
    meeting = {"MASTER_ADDR": HOST, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    words = {**numbers, **meeting, "RUN_DIR": run_dir}
    return {**os.environ, **{name: str(value) for name, value in words.items()}}


def _serve(listener: socket.socket, workers: int) -> object:
    from torch.distributed import TCPStore

    port = listener.getsockname()[1]
    return TCPStore(
        HOST, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )


def _wait(running: dict[int, int], run_dir: Path) -> int:
    first = 0
    while running:
        pid, status = os.wait()
        rank, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        _end_what_is_left_of(pid)
        with (run_dir / "exits").open("a") as exits:
            exits.write(f"{rank} {code}\n")
        if code and not first:
            first = code
            for other in running:
                os.kill(other, signal.SIGKILL)
    return first


def _end_what_is_left_of(worker: int) -> None:
    """A worker leaves processes of multiprocessing that wait for each other: those that keep queues for its saves."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)


def _run_script(command: Sequence[str]) -> NoReturn:
    """Run the script as Python would, and end the process, at the latest with the launcher."""
    code: object = 0
    linux.die_with_parent()
    try:
        sys.argv = list(command)
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code or 0) & 0xFF)  # type: ignore[call-overload]
