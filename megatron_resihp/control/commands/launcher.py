# SPDX-License-Identifier: Apache-2.0
"""`resihp launch`: checks what was asked for, puts one node's part of a job together, and takes it apart at the end.

May import: the standard library, this package's modules and, when the first record comes, `detector.service`. Where
events go is handed in.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from megatron_resihp.control import exit_codes
from megatron_resihp.control.commands import interface, open_files
from megatron_resihp.control.commands.admission import admitted
from megatron_resihp.control.commands.claim import ClaimedError, living_owner, touched
from megatron_resihp.control.commands.contact import FILE_NAME, Contact
from megatron_resihp.control.commands.launch_options import LaunchError, LaunchOptions, check, options_of
from megatron_resihp.control.commands.run_directory import make_run_dir, unwritable
from megatron_resihp.control.coordination.actions import Limits
from megatron_resihp.control.coordination.requests import Requests
from megatron_resihp.control.head import returning
from megatron_resihp.control.head.detection import Detection, Judge
from megatron_resihp.control.head.headquarters import EventSink, Headquarters, Job
from megatron_resihp.control.node.agent import Agent
from megatron_resihp.control.node.environment import JobEnvironment, warnings_of
from megatron_resihp.control.node.link import Link
from megatron_resihp.control.node.mailbox import Ending, Mailbox, coordinator_lost
from megatron_resihp.control.node.orphan_reaper import OrphanReaper
from megatron_resihp.control.node.output import Outputs
from megatron_resihp.control.node.processes import Processes
from megatron_resihp.control.node.slowdown_injector import SlowdownInjector
from megatron_resihp.control.node.spawn import Spawn, exec_worker
from megatron_resihp.control.node.starting import Starter, Worker
from megatron_resihp.control.replanning.replanner import Replanner
from megatron_resihp.control.terminal import say, warn
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.gateway import EtcdError
from megatron_resihp.control.transport.etcd.leadership import Leadership
from megatron_resihp.control.transport.lasting import LastingStore
from megatron_resihp.control.transport.liveness import LivenessConnection, Watcher
from megatron_resihp.control.transport.node_liveness import (
    Joining,
    Meeting,
    NodeWatcher,
    check_size,
    has_joined,
    join,
    records_address,
)
from megatron_resihp.control.transport.secret import Secret, find_secret, published_secret
from megatron_resihp.control.transport.shipping import Relay, Uplink
from megatron_resihp.control.transport.store import Store, StoreError, reserve, wait_until_reachable
from megatron_resihp.control.transport.store_client import connect
from megatron_resihp.control.worker.saved_state import last_save
from megatron_resihp.events.bus import EventBus
from megatron_resihp.protocol.notices import ValidationOrder

LOCAL_HOST: Final = "127.0.0.1"
RESULT: Final = "exit_code"
"""File of the run directory with the code that the job has ended with; not there while it runs."""
STILL_THERE_S: Final = 5.0
"""How long node 0 may not answer a node that waits to join."""
CLOSING_S: Final = 5.0
"""How long each part may take to end."""


class NoEvents:
    """An event sink that keeps nothing."""

    def follow(self, bus: EventBus) -> None:
        pass

    def finish(self) -> None:
        pass


MakeEventSink = Callable[[Path], EventSink]
"""Given the run directory. Called on node 0 only."""


def run(namespace: argparse.Namespace, make_event_sink: MakeEventSink, spawn: Spawn = exec_worker) -> int:
    """Do what the parsed arguments ask; returns the exit code."""
    try:
        return launch(options_of(namespace), spawn, make_event_sink)
    except LaunchError as error:
        return _refuse(str(error))


def launch(
    options: LaunchOptions, spawn: Spawn = exec_worker, make_event_sink: MakeEventSink = lambda run_dir: NoEvents()
) -> int:
    """Run this node's part of a job until it is over; returns the exit code. In the main thread only."""
    try:
        check(options)
        if problem := open_files.problem(options.size, options.node, open_files.allow_as_many_as_may_be()):
            raise LaunchError(problem)
        return _launch(options, spawn, make_event_sink)
    except LaunchError as error:
        return _refuse(str(error))


def _refuse(problem: str) -> int:
    warn(f"resihp: {problem}")
    return exit_codes.REFUSED


@dataclass(frozen=True)
class _Seat:
    """Where a node sits: the store's address and, on node 0, what it is served with.

    Attributes:
        numbers: ids of this node's workers.
        offered: the node joins a running job with these.
        liveness, records: where the other nodes' liveness connections and their workers' records arrive.
        token: see `contact`.
        leadership: in etcd; None: decisions are kept in the run directory only.
    """

    secret: Secret
    address: Address
    run_dir: Path
    numbers: Sequence[int]
    offered: bool = False
    listener: socket.socket | None = None
    liveness: socket.socket | None = None
    records: socket.socket | None = None
    sink: EventSink | None = None
    token: str = ""
    leadership: Leadership | None = None


def _launch(options: LaunchOptions, spawn: Spawn, make_event_sink: MakeEventSink) -> int:
    with ExitStack() as stack:
        seat = _take_seat(options, make_event_sink, stack)
        outputs = Outputs(options.logs, seat.run_dir / "logs", sys.stdout)
        mailbox = stack.enter_context(closing(Mailbox()))
        stack.enter_context(mailbox.signals())
        watcher = stack.enter_context(closing(Watcher(options.heartbeat_timeout_s, options.notice_timeout_s)))
        relay = Relay(seat.secret, seat.records)
        reaper = stack.enter_context(closing(OrphanReaper()))
        _announce(options, seat)
        try:
            environment = _environment(options, seat)
            starter = Starter(options.command, environment, outputs, spawn, watcher, relay, reaper)
            workers = starter.start_all(seat.numbers)
        except OSError as error:
            _give_back(options, seat)
            raise LaunchError(f"a worker cannot be started ({error}); mend that and try again") from error
        # From here on there are threads.
        outputs.start()
        if seat.token:
            stack.enter_context(touched(seat.run_dir / FILE_NAME))
        began_at = time.time()
        ending, failures = _serve(options, seat, starter, workers, watcher, mailbox, relay, reaper)
        outputs.close(CLOSING_S)
        if ending.code:
            # Workers that refuse the job's flags all say the same.
            for worker in failures[:1] if ending.code == exit_codes.REFUSED else failures:
                _show_failure(worker, outputs.last_lines(worker.number))
        _finish(seat, ending)
        # Node 0 knows of what it has agreed to.
        if ending.code == exit_codes.RETRY and not (options.node == 0 and ending.agreed):
            _tell_last_save(seat.run_dir, began_at)
        return ending.code


def _take_seat(options: LaunchOptions, make_event_sink: MakeEventSink, stack: ExitStack) -> _Seat:
    address = options.coordinator or Address(LOCAL_HOST, 0)
    try:
        if options.node > 0:
            run_dir = make_run_dir(options)
            wait_until_reachable(address, options.connect_timeout_s)
            _, joined = admitted(address, run_dir, options.connect_timeout_s, partial(_has_joined, options=options))
            offered = _offered(options, run_dir, address, joined)
            numbers = offered or options.size.slots_on(options.node)
            return _Seat(find_secret(run_dir), address, run_dir, numbers, offered is not None)
        listener = stack.enter_context(reserve(*address))
        others = options.size.most_nodes > 1
        liveness = stack.enter_context(reserve(address.host, 0)) if others else None
        records = stack.enter_context(reserve(address.host, 0)) if others else None
    except StoreError as error:
        # Of the same command started twice on one machine the port is told first, but is not what is wrong.
        owner = living_owner(options.run_dir / FILE_NAME) if options.node == 0 and options.run_dir else None
        raise LaunchError(
            _taken(options.run_dir, owner) if owner is not None else f"{error}; check --coordinator, and node 0"
        ) from error
    run_dir = make_run_dir(options)
    address = Address(address.host, listener.getsockname()[1])
    contact = Contact(address)
    try:
        # Before anything is written that a job which runs there would read, or has written.
        stack.enter_context(contact.published(run_dir))
        leadership = None if options.control is None else stack.enter_context(closing(Leadership(options.control)))
        own = stack.enter_context(published_secret(run_dir))
        returning.begin(run_dir, options.size)
        (run_dir / RESULT).unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    except ClaimedError as error:
        raise LaunchError(_taken(run_dir, error)) from error
    except StoreError as error:
        raise LaunchError(str(error)) from error
    except EtcdError as error:
        raise LaunchError(f"{error}; check --control, or end the job that has its name") from error
    sink, slots = _make_sink(make_event_sink, run_dir), options.size.slots_on(0)
    return _Seat(own, address, run_dir, slots, False, listener, liveness, records, sink, contact.token, leadership)


def _has_joined(store: Store, options: LaunchOptions) -> bool:
    """Whether a node of this rank has begun the job that the store is of; or StoreError."""
    check_size(store, options.node, options.size)
    return has_joined(store, options.node, options.size)


def _offered(options: LaunchOptions, run_dir: Path, address: Address, joined: bool) -> Sequence[int] | None:
    """The ids of the workers of a node that joins a running job, also again; None: it begins the job.

    Args:
        joined: one of its rank has begun the job. So this one takes its place, once that one is missed.

    Raises:
        StoreError: node 0 is gone, while this one waited to join.
    """
    size, node = options.size, options.node
    try:
        if node < size.nodes and not joined:
            return returning.take(run_dir, node)
        return returning.await_offer(
            run_dir, node, lambda: wait_until_reachable(address, STILL_THERE_S), options.connect_timeout_s, joined
        )
    except returning.RefusedError as error:
        raise LaunchError(str(error)) from error
    except OSError as error:
        raise unwritable(run_dir, error) from error


def _give_back(options: LaunchOptions, seat: _Seat) -> None:
    """A node that can't join after all may try again, with other ids: of these some worker may have been heard of."""
    if seat.offered:
        returning.offer(seat.run_dir, options.node, [number + options.size.slots for number in seat.numbers])


def _taken(run_dir: Path | None, by: object) -> str:
    return f"a job runs in {run_dir} already, launched by {by}; give another --run-dir, or end that job first"


def _make_sink(make_event_sink: MakeEventSink, run_dir: Path) -> EventSink:
    try:
        return make_event_sink(run_dir)
    except OSError as error:
        raise unwritable(run_dir, error) from error


def _environment(options: LaunchOptions, seat: _Seat) -> JobEnvironment:
    return JobEnvironment(
        node=options.node,
        size=options.size,
        store=seat.address,
        secret=seat.secret,
        run_dir=seat.run_dir,
        heartbeat_s=options.heartbeat_s,
        stand_in=options.stand_in,
        max_restarts=options.max_restarts,
        network=interface.variables(options.interface),
    )


def _serve(
    options: LaunchOptions,
    seat: _Seat,
    starter: Starter,
    workers: list[Worker],
    watcher: Watcher,
    mailbox: Mailbox,
    relay: Relay,
    reaper: OrphanReaper,
) -> tuple[Ending, list[Worker]]:
    """Watch over the workers until the job is over; returns how it ended, and the workers that failed."""
    nodes = None
    if seat.liveness is not None:
        connect_by = time.monotonic() + options.connect_timeout_s
        nodes = NodeWatcher(seat.liveness, seat.secret, options.size, options.heartbeat_timeout_s, connect_by)
    headquarters = _open_headquarters(options, seat, mailbox) if seat.listener is not None else None
    uplink = Uplink(seat.secret)
    relay.start(uplink.deliver if headquarters is None else headquarters.detection.inbox.deliver)
    injector = SlowdownInjector({worker.number: (worker.pid, worker.pidfd) for worker in workers})
    link = Link(
        lambda: LastingStore(connect(seat.address, seat.secret, options.connect_timeout_s)),
        lambda store: _introduce(options, seat, store, mailbox, uplink),
        mailbox.end,
        lambda slowness: injector.slow(slowness.speeds),
        mailbox.put,
        seat.numbers[0],
    )
    processes = Processes(workers, watcher, injector, reaper)
    agent = Agent(processes, watcher, mailbox, link, starter, options.max_restarts, nodes, seat.offered, options.node)
    ending = agent.run()
    injector.close()
    if nodes is not None:
        nodes.close()
    relay.close(CLOSING_S)
    uplink.close()
    link.close(CLOSING_S)
    if headquarters is not None:
        headquarters.close(ending, CLOSING_S)
    return ending, processes.failures()


def _open_headquarters(options: LaunchOptions, seat: _Seat, mailbox: Mailbox) -> Headquarters:
    assert seat.listener is not None and seat.sink is not None
    meeting = None
    if seat.liveness is not None and seat.records is not None:
        meeting = Meeting(*(Address(seat.address.host, s.getsockname()[1]) for s in (seat.liveness, seat.records)))
    bus, requests, size = EventBus(), Requests(), options.size
    # First of all, so that the log never has an answer before what it answers.
    seat.sink.follow(bus)
    detection = Detection(lambda: _make_judge(seat.run_dir, requests.validate), bus)
    replanner = Replanner(seat.run_dir, size, bus, requests.change_plan)
    limits = Limits(options.survivor_timeout_s, min_workers=options.min_workers, drain_s=options.drain_deadline_s)
    job = Job(size, list(options.command), limits, seat.token, seat.secret, seat.run_dir)
    return Headquarters(
        seat.address, seat.listener, bus, requests, job, meeting, detection, replanner, mailbox.end,
        seat.leadership,
    )  # fmt: skip


def _make_judge(run_dir: Path, order: Callable[[ValidationOrder], None]) -> Judge:
    from megatron_resihp.detector.service import DetectionService

    return DetectionService(run_dir, order)


def _introduce(
    options: LaunchOptions, seat: _Seat, store: Store, mailbox: Mailbox, uplink: Uplink
) -> LivenessConnection | None:
    if options.node == 0:
        return None
    joining = Joining(
        node=options.node,
        size=options.size,
        timeout_s=options.heartbeat_timeout_s,
        period_s=options.heartbeat_s,
        first_worker=seat.numbers[0],
        secret=seat.secret,
    )
    lost = coordinator_lost("node 0 closed the liveness connection")
    try:
        liveness = join(store, joining, lambda: mailbox.end(lost))
    except StoreError:
        _give_back(options, seat)
        raise
    uplink.connect(records_address(store))
    say(f"resihp: node {options.node} has joined the job")
    return liveness


def _announce(options: LaunchOptions, seat: _Seat) -> None:
    workers = f"{options.workers_per_node} worker{'s' if options.workers_per_node > 1 else ''}"
    node = f" on node {options.node} of {options.nodes}" if options.size.most_nodes > 1 else ""
    if seat.offered:
        node = f" on node {options.node}, to join the job that runs"
    elif options.late_nodes:
        node += f" ({options.late_nodes} more may join)"
    say(f"resihp: {workers}{node}, run directory {seat.run_dir}")
    network = interface.warnings_of(options.coordinator, options.size.most_nodes, options.interface)
    for warning in [*network, *([] if options.stand_in else warnings_of())]:
        warn(f"resihp: {warning}")


def _show_failure(worker: Worker, lines: list[str]) -> None:
    assert worker.code is not None
    how = f"exit code {worker.code}" if worker.code >= 0 else f"signal {-worker.code}"
    heading = f"resihp: worker {worker.number} ended with {how}; its last lines:"
    warn("\n".join([heading, *(f"  {line}" for line in lines)]))


def _finish(seat: _Seat, ending: Ending) -> None:
    if ending.code:
        warn(f"resihp: ended with exit code {ending.code}: {ending.reason}")
    elif not ending.agreed:
        say(f"resihp: {ending.reason}")
    if seat.sink is not None:
        seat.sink.finish()
        _tell_result(seat.run_dir, ending.code)


def _tell_last_save(run_dir: Path, since: float) -> None:
    """The coordinator is lost, and what it would say."""
    save = last_save(run_dir, since)
    if save is not None:
        warn(f"resihp: {save.told(run_dir)}")


def _tell_result(run_dir: Path, code: int) -> None:
    """The job's exit code, for scripts that can't tell node 0's launcher from others."""
    try:
        (run_dir / RESULT).write_text(f"{code}\n")
    except OSError as error:
        warn(f"resihp: {run_dir / RESULT} can't be written ({error.strerror})")
