# SPDX-License-Identifier: Apache-2.0
"""Starts launchers in forked processes and watches them from outside, for test_launcher.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

# As the launcher does where it imports torch itself.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch.distributed  # noqa: F401  # Once, before anything is forked.
from forked_worker import fork_worker

import megatron_resihp
from megatron_resihp.cli import RunReport
from megatron_resihp.control import streams
from megatron_resihp.control.commands.launch import launcher
from megatron_resihp.control.commands.launch.launch_options import LaunchOptions
from megatron_resihp.control.coordination import coordinator
from megatron_resihp.control.node import agent
from megatron_resihp.control.transport.access.secret import find_secret
from megatron_resihp.control.transport.address import parse_address
from megatron_resihp.control.transport.store.client import StoreClient, connect
from megatron_resihp.events.epochs import EpochStarted
from megatron_resihp.events.event import Event

WAIT_S = 20.0
TINY_WORKER = Path(__file__).with_name("tiny_worker.py")


def eventually(what: str, test: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """Wait until `test` gives something true, and return that."""
    deadline = time.monotonic() + timeout_s
    while not (found := test()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.002)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs, or could if it were continued; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class ToldJudge:
    """In the detector's place: says what it was told to, once, when it looks again after training has begun."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = list(events)
        self._begun = False

    def note(self, event: Event) -> list[Event]:
        self._begun = self._begun or isinstance(event, EpochStarted)
        return []

    def take(self, message: bytes, now: float) -> list[Event]:
        return []

    def look(self, now: float) -> list[Event]:
        told, self._events = (self._events, []) if self._begun else ([], self._events)
        return [replace(event, epoch=0) for event in told]

    def finish(self) -> list[Event]:
        return []


class Launched:
    """A launcher in a process of its own, whose workers are forked in place of executed.

    Megatron is out of it: the plugin's enable() does nothing in the workers.

    Args:
        network: name of the network namespace that it runs in; None: the test's own.
        judged: what the detector says once training has begun; empty: it is the real one.
        grace_s: how long workers get to exit by themselves at the end.
        output: what it prints to; None: a file.
    """

    def __init__(
        self, run_dir: Path, script: Path = TINY_WORKER, arguments: tuple[str, ...] = (), network: str | None = None,
        judged: Sequence[Event] = (), grace_s: float = coordinator.GRACE_S, output: int | None = None,
        **options: Any,
    ):  # fmt: skip
        self.network = network
        self.judged = judged
        self.grace_s = grace_s
        self.printed_to = output
        self.run_dir = run_dir
        name = "coordinator" if options.get("alone") else f"node{options.get('node', 0)}"
        self.output_path = run_dir.with_name(f"{run_dir.name}-{name}.out")
        self.options = LaunchOptions(
            command=(str(script), *arguments), run_dir=run_dir, **{"workers_per_node": 3, **options}
        )
        self.code: int | None = None
        with warnings.catch_warnings():
            # The test runner's timer is a thread.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            self._become_launcher()

    def _become_launcher(self) -> NoReturn:
        code = 99
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.network is not None:
                os.setns(os.open(f"/run/netns/{self.network}", os.O_RDONLY), os.CLONE_NEWNET)
            output = self.printed_to
            if output is None:
                output = os.open(self.output_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            streams.let_no_output_end_this()
            megatron_resihp.enable = lambda: None
            agent.TERMINATE_S = 0.5  # type: ignore[misc]  # Some of these workers outlive SIGTERM on purpose.
            coordinator.GRACE_S = self.grace_s  # type: ignore[misc]
            agent.RESTART_AFTER_S = 0.1  # type: ignore[misc]
            if self.judged:
                launcher._make_judge = lambda *_: ToldJudge(self.judged)
            code = launcher.launch(self.options, fork_worker, RunReport)
            # Nothing but the main thread may be left.
            eventually("threads end", lambda: len(os.listdir("/proc/self/task")) == 1, WAIT_S / 2)
            assert not children(os.getpid()), "children are left"
        except BaseException:
            traceback.print_exc()
            code = 99
        finally:
            os._exit(code)

    def ask(self, what: str) -> None:
        """Leave a wish for the tiny workers."""
        (self.run_dir / what).touch()

    def children_of(self, worker: int) -> list[int]:
        """Processes that a worker with the wish `breed` has started."""
        line = next(line for line in self.log(worker).splitlines() if line.startswith("children "))
        return [int(pid) for pid in line.split()[1:]]

    def output(self) -> str:
        return self.output_path.read_text() if self.output_path.exists() else ""

    def log(self, worker: int) -> str:
        path = self.run_dir / "logs" / f"worker_{worker}.log"
        return path.read_text() if path.exists() else ""

    def store(self) -> StoreClient:
        """A connection to the store of this job."""
        line = next(line for line in self.log(0).splitlines() if line.startswith("store "))
        return connect(parse_address(line.split()[1]), find_secret(self.run_dir), WAIT_S)

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if name in (None, event["event"])]

    def await_event(self, name: str, within_s: float = WAIT_S, **fields: Any) -> dict[str, Any]:
        def find() -> dict[str, Any] | None:
            return next((e for e in self.events(name) if fields.items() <= e.items()), None)

        try:
            return eventually(f"event {name} {fields}", find, within_s)  # type: ignore[no-any-return]
        except AssertionError as error:
            logs = "".join(f"--- worker {w}\n{self.log(w)}" for w in range(6))
            raise AssertionError(f"{error}\n{self.output()}{logs}\n{self.events()}") from None

    def worker_pid(self, worker: int) -> int:
        """The process of a worker that has begun its first epoch."""
        line = eventually(
            f"worker {worker} begins", lambda: next((x for x in self.log(worker).splitlines() if " pid " in x), None)
        )
        return int(line.rpartition(" ")[2])

    def process_of(self, worker: int) -> int:
        """The process of a worker that has started."""
        line = eventually(
            f"worker {worker} starts",
            lambda: next((x for x in self.log(worker).splitlines() if x.startswith("process ")), None),
        )
        return int(line.split()[1])

    def end(self, timeout_s: float = WAIT_S) -> int:
        """Wait for the launcher's end; returns its exit code."""

        def gone() -> bool:
            if self.code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.code = os.waitstatus_to_exitcode(status) if pid else None
            return self.code is not None

        eventually(f"the launcher ends; so far it said: {self.output()}", gone, timeout_s)
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.end()
