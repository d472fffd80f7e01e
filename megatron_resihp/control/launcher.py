"""`resihp launch`: checks what was asked for, puts one node's part of a job together, and takes it apart at the end.

May import: the standard library, this room's modules and, when the first record comes, `detector.service`. Where events
go is handed in.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

from megatron_resihp.control import returning
from megatron_resihp.control.actions import Limits
from megatron_resihp.control.address import Address, parse_address
from megatron_resihp.control.agent import Agent
from megatron_resihp.control.contact import Contact
from megatron_resihp.control.detection import Detection, Judge
from megatron_resihp.control.environment import JobEnvironment
from megatron_resihp.control.guardian import Guardian
from megatron_resihp.control.headquarters import EventSink, Headquarters, Job, Log
from megatron_resihp.control.lifeline import Lifeline, Watcher
from megatron_resihp.control.link import Link
from megatron_resihp.control.mailbox import Ending, Mailbox
from megatron_resihp.control.nodes import Joining, Meeting, NodeWatcher, join, records_address
from megatron_resihp.control.output import MODES, Outputs
from megatron_resihp.control.shipping import Relay, Uplink
from megatron_resihp.control.slicing import Slicer
from megatron_resihp.control.spawn import Spawn, exec_worker
from megatron_resihp.control.starting import Starter, Worker
from megatron_resihp.control.store import Store, StoreError, connect, reserve, wait_until_reachable
from megatron_resihp.control.strategist import Strategist

LOCAL_HOST: Final = "127.0.0.1"
RUNS: Final = Path("resihp-runs")
LONGEST_PERIOD_S: Final = 1.0
"""Between two heartbeats."""
CLOSING_S: Final = 5.0
"""How long each part may take to end."""


class LaunchError(Exception):
    """The user has to mend something; the message is "cause; mend"."""


@dataclass(frozen=True)
class LaunchOptions:
    """What a job is launched with. Times are in seconds.

    Attributes:
        command: the script and its arguments.
        coordinator: where node 0 serves the store; None: on this machine only, at a free port.
        logs: one of output.MODES.
        heartbeat_timeout_s: workers and nodes that are silent for longer are given up for dead.
        muster_timeout_s: survivors that do not report for longer are given up for dead.
        connect_timeout_s: how long nodes wait for each other at the start.
        max_restarts: how often a worker that died is started anew, at most.
        stand_in: train on CPUs in place of GPUs.
    """

    command: tuple[str, ...]
    workers_per_node: int = 1
    nodes: int = 1
    node: int = 0
    coordinator: Address | None = None
    run_dir: Path | None = None
    logs: str = "file"
    heartbeat_timeout_s: float = 30.0
    muster_timeout_s: float = 60.0
    connect_timeout_s: float = 300.0
    max_restarts: int = 0
    stand_in: bool = False

    @property
    def heartbeat_s(self) -> float:
        return min(LONGEST_PERIOD_S, self.heartbeat_timeout_s / 5)


class NoEvents:
    """An event sink that keeps nothing."""

    def write(self, event: dict[str, Any]) -> None:
        pass

    def finish(self) -> None:
        pass


MakeEventSink = Callable[[Path], EventSink]
"""Given the run directory. Called on node 0 only."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp launch`."""
    add = parser.add_argument
    add("--nproc-per-node", type=int, default=1, metavar="N", help="workers on each node (default 1)")
    add("--nnodes", type=int, default=1, metavar="N", help="nodes of the job (default 1)")
    add("--node-rank", type=int, default=0, metavar="RANK", help="this node's rank, from 0 (default 0)")
    add("--coordinator", metavar="HOST:PORT", help="where node 0 serves the control plane; needed for several nodes")
    add("--run-dir", type=Path, metavar="DIR", help=f"logs and events go here (default {RUNS}/DATE-TIME)")
    add("--logs", choices=MODES, default="file", help="workers' output: RUN_DIR/logs/worker_N.log, or lines marked "
        "[wN] on standard output, or both (default file)")  # fmt: skip
    for name, default_s, meaning in (
        ("heartbeat", 30.0, "give up workers and nodes that are silent for longer"),
        ("muster", 60.0, "give up survivors of a failure that do not report for longer"),
        ("connect", 300.0, "how long nodes wait for each other at the start"),
    ):
        meaning += f" (default {default_s:g})"
        add(f"--{name}-timeout", type=float, default=default_s, metavar="SECONDS", help=meaning)
    add("--max-restarts", type=int, default=0, metavar="N", help="start each worker that died anew at most N times; "
        "the others train on meanwhile and then take it in (default 0)")  # fmt: skip
    add("--stand-in", action="store_true", help="train on CPUs, with a stand-in for CUDA")
    add("script", metavar="SCRIPT", help="training script; all that follows belongs to it")
    add("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(namespace: argparse.Namespace, make_event_sink: MakeEventSink, spawn: Spawn = exec_worker) -> int:
    """Do what the parsed arguments ask; returns the exit code."""
    try:
        coordinator = parse_address(namespace.coordinator) if namespace.coordinator else None
    except ValueError as error:
        return _refuse(f"--coordinator {error}; give node 0's host name or address and a free port")
    options = LaunchOptions(
        command=(namespace.script, *namespace.arguments),
        workers_per_node=namespace.nproc_per_node,
        nodes=namespace.nnodes,
        node=namespace.node_rank,
        coordinator=coordinator,
        run_dir=namespace.run_dir,
        logs=namespace.logs,
        heartbeat_timeout_s=namespace.heartbeat_timeout,
        muster_timeout_s=namespace.muster_timeout,
        connect_timeout_s=namespace.connect_timeout,
        max_restarts=namespace.max_restarts,
        stand_in=namespace.stand_in,
    )
    return launch(options, spawn, make_event_sink)


def launch(
    options: LaunchOptions, spawn: Spawn = exec_worker, make_event_sink: MakeEventSink = lambda run_dir: NoEvents()
) -> int:
    """Run this node's part of a job until it is over; returns the exit code. In the main thread only."""
    try:
        _check(options)
        return _launch(options, spawn, make_event_sink)
    except LaunchError as error:
        return _refuse(str(error))


def _refuse(problem: str) -> int:
    print(f"resihp: {problem}", file=sys.stderr)
    return 2


def _check(options: LaunchOptions) -> None:
    if options.workers_per_node < 1:
        raise LaunchError(f"--nproc-per-node {options.workers_per_node} starts no worker; give 1 or more")
    if options.nodes < 1:
        raise LaunchError(f"--nnodes {options.nodes} is no job; give 1 or more")
    if not 0 <= options.node < options.nodes:
        raise LaunchError(f"--node-rank {options.node} is out of range; give 0 to {options.nodes - 1}")
    if options.nodes > 1 and options.coordinator is None:
        raise LaunchError("several nodes need to find each other; give all of them the same --coordinator HOST:PORT")
    if options.max_restarts < 0:
        raise LaunchError(f"--max-restarts {options.max_restarts} is no number of restarts; give 0 or more")
    for name in ("heartbeat", "muster", "connect"):
        seconds = getattr(options, f"{name}_timeout_s")
        if not seconds > 0:
            raise LaunchError(f"--{name}-timeout {seconds:g} is no time to wait; give more than 0 seconds")
    if options.nodes > 1 and options.run_dir is None:
        raise LaunchError("several nodes need one run directory; give all of them the same --run-dir")
    script = Path(options.command[0])
    if not script.is_file():
        raise LaunchError(f"{script} {'is no file' if script.exists() else 'does not exist'}; give a Python script")


@dataclass(frozen=True)
class _Seat:
    """Where a node sits: the store's address and, on node 0, what it is served with.

    Attributes:
        numbers: ids of this node's workers.
        lifelines, records: where the other nodes' lifelines and their workers' records arrive.
        token: see `contact`.
    """

    address: Address
    run_dir: Path
    numbers: Sequence[int]
    listener: socket.socket | None = None
    lifelines: socket.socket | None = None
    records: socket.socket | None = None
    sink: EventSink | None = None
    token: str = ""


def _launch(options: LaunchOptions, spawn: Spawn, make_event_sink: MakeEventSink) -> int:
    with ExitStack() as stack:
        seat = _take_seat(options, make_event_sink, stack)
        outputs = Outputs(options.logs, seat.run_dir / "logs", sys.stdout)
        mailbox = stack.enter_context(closing(Mailbox()))
        stack.enter_context(mailbox.signals())
        watcher = stack.enter_context(closing(Watcher(options.heartbeat_timeout_s)))
        relay = Relay(seat.records)
        guardian = stack.enter_context(closing(Guardian()))
        _announce(options, seat)
        try:
            environment = _environment(options, seat)
            starter = Starter(options.command, environment, outputs, spawn, watcher, relay, guardian)
            workers = starter.start_all(seat.numbers)
        except OSError as error:
            raise LaunchError(f"a worker cannot be started ({error}); mend that and try again") from error
        # From here on there are threads.
        outputs.start()
        ending, failures = _serve(options, seat, starter, workers, watcher, mailbox, relay, guardian)
        outputs.close(CLOSING_S)
        if ending.code:
            for worker in failures:
                _show_failure(worker, outputs.last_lines(worker.number))
        _finish(seat, ending)
        return ending.code


def _take_seat(options: LaunchOptions, make_event_sink: MakeEventSink, stack: ExitStack) -> _Seat:
    address = options.coordinator or Address(LOCAL_HOST, 0)
    try:
        if options.node > 0:
            run_dir = _make_run_dir(options)
            wait_until_reachable(address, options.connect_timeout_s)
            return _Seat(address, run_dir, _numbers(options, run_dir))
        listener = stack.enter_context(reserve(*address))
        others = options.nodes > 1
        lifelines = stack.enter_context(reserve(address.host, 0)) if others else None
        records = stack.enter_context(reserve(address.host, 0)) if others else None
    except StoreError as error:
        raise LaunchError(f"{error}; check --coordinator, and node 0") from error
    run_dir = _make_run_dir(options)
    address = Address(address.host, listener.getsockname()[1])
    contact = Contact(address)
    sink = _make_sink(make_event_sink, run_dir)
    try:
        returning.forget_offers(run_dir)
        stack.enter_context(contact.published(run_dir))
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    numbers = range(options.workers_per_node)
    return _Seat(address, run_dir, numbers, listener, lifelines, records, sink, contact.token)


def _numbers(options: LaunchOptions, run_dir: Path) -> Sequence[int]:
    """The ids of another node's workers: new ones where it comes back after it was lost."""
    try:
        again = returning.take(run_dir, options.node)
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    first = options.node * options.workers_per_node
    return again or range(first, first + options.workers_per_node)


def _make_run_dir(options: LaunchOptions) -> Path:
    run_dir = options.run_dir or _unused(RUNS / time.strftime("%Y%m%d-%H%M%S"))
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=run_dir / "logs"):
            return run_dir
    except OSError as error:
        raise _unwritable(run_dir, error) from error


def _unused(path: Path) -> Path:
    candidates = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(candidate for candidate in chain([path], candidates) if not candidate.exists())


def _make_sink(make_event_sink: MakeEventSink, run_dir: Path) -> EventSink:
    try:
        return make_event_sink(run_dir)
    except OSError as error:
        raise _unwritable(run_dir, error) from error


def _unwritable(run_dir: Path, error: OSError) -> LaunchError:
    return LaunchError(f"the run directory {run_dir} cannot be written ({error.strerror}); give another --run-dir")


def _environment(options: LaunchOptions, seat: _Seat) -> JobEnvironment:
    return JobEnvironment(
        node=options.node,
        nodes=options.nodes,
        workers_per_node=options.workers_per_node,
        store=seat.address,
        run_dir=seat.run_dir,
        heartbeat_s=options.heartbeat_s,
        stand_in=options.stand_in,
        max_restarts=options.max_restarts,
    )


def _serve(
    options: LaunchOptions,
    seat: _Seat,
    starter: Starter,
    workers: list[Worker],
    watcher: Watcher,
    mailbox: Mailbox,
    relay: Relay,
    guardian: Guardian,
) -> tuple[Ending, list[Worker]]:
    """Watch over the workers until the job is over; returns how it ended, and who failed."""
    nodes = None
    if seat.lifelines is not None:
        connect_by = time.monotonic() + options.connect_timeout_s
        nodes = NodeWatcher(seat.lifelines, options.nodes, options.heartbeat_timeout_s, connect_by)
    headquarters = _open_headquarters(options, seat, mailbox) if seat.listener is not None else None
    uplink = Uplink()
    relay.start(uplink.deliver if headquarters is None else headquarters.detection.inbox.deliver)
    slicer = Slicer({worker.number: (worker.pid, worker.pidfd) for worker in workers})
    link = Link(
        lambda: connect(*seat.address, options.connect_timeout_s),
        lambda store: _introduce(options, seat, store, mailbox, uplink),
        mailbox.end,
        lambda slowness: slicer.slow(slowness.speeds),
    )
    agent = Agent(workers, watcher, mailbox, link, slicer, guardian, starter, options.max_restarts, nodes)
    ending = agent.run()
    slicer.close()
    if nodes is not None:
        nodes.close()
    relay.close(CLOSING_S)
    uplink.close()
    link.close(CLOSING_S)
    if headquarters is not None:
        headquarters.close(ending, CLOSING_S)
    return ending, agent.failures()


def _open_headquarters(options: LaunchOptions, seat: _Seat, mailbox: Mailbox) -> Headquarters:
    assert seat.listener is not None and seat.sink is not None
    meeting = None
    if seat.lifelines is not None and seat.records is not None:
        meeting = Meeting(*(Address(seat.address.host, s.getsockname()[1]) for s in (seat.lifelines, seat.records)))
    log = Log(seat.sink)

    def judged(event: dict[str, Any]) -> None:
        strategist.note(event)
        log.write(event)

    detection = Detection(lambda order: _make_judge(seat.run_dir, order), judged)
    workers = options.nodes * options.workers_per_node
    strategist = Strategist(seat.run_dir, workers, options.workers_per_node, log.write, detection.orders.put)
    limits = Limits(options.muster_timeout_s)
    job = Job(options.nodes, options.workers_per_node, list(options.command), limits, seat.token, seat.run_dir)
    return Headquarters(seat.address, seat.listener, log, job, meeting, detection, strategist, mailbox.end)


def _make_judge(run_dir: Path, order: Callable[[dict[str, Any]], None]) -> Judge:
    from megatron_resihp.detector.service import DetectionService

    return DetectionService(run_dir, order)


def _introduce(
    options: LaunchOptions, seat: _Seat, store: Store, mailbox: Mailbox, uplink: Uplink
) -> Lifeline | None:
    if options.node == 0:
        return None
    joining = Joining(
        node=options.node,
        nodes=options.nodes,
        workers_per_node=options.workers_per_node,
        timeout_s=options.heartbeat_timeout_s,
        period_s=options.heartbeat_s,
        first_worker=seat.numbers[0],
    )
    lost = Ending(1, "the coordinator is lost: node 0 closed the lifeline")
    lifeline = join(store, joining, lambda: mailbox.end(lost))
    uplink.connect(*records_address(store))
    print(f"resihp: node {options.node} has joined the job", flush=True)
    return lifeline


def _announce(options: LaunchOptions, seat: _Seat) -> None:
    workers = f"{options.workers_per_node} worker{'s' if options.workers_per_node > 1 else ''}"
    node = f" on node {options.node} of {options.nodes}" if options.nodes > 1 else ""
    print(f"resihp: {workers}{node}, run directory {seat.run_dir}", flush=True)


def _show_failure(worker: Worker, lines: list[str]) -> None:
    assert worker.code is not None
    how = f"exit code {worker.code}" if worker.code >= 0 else f"signal {-worker.code}"
    heading = f"resihp: worker {worker.number} ended with {how}; its last lines:"
    print("\n".join([heading, *(f"  {line}" for line in lines)]), file=sys.stderr, flush=True)


def _finish(seat: _Seat, ending: Ending) -> None:
    if ending.code:
        print(f"resihp: ended with exit code {ending.code}: {ending.reason}", file=sys.stderr, flush=True)
    if seat.sink is not None:
        seat.sink.finish()
