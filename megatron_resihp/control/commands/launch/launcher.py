# SPDX-License-Identifier: Apache-2.0
"""`resihp launch`: checks what was asked for, puts one node's part of a job together, and takes it apart at the end.

May import: the standard library, `control`'s modules and, when the first record comes, `detector.service`. Where
events go is handed in.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Final

from megatron_resihp.control import exit_codes
from megatron_resihp.control.commands.contact import FILE_NAME
from megatron_resihp.control.commands.launch import interface, open_files
from megatron_resihp.control.commands.launch.claim import touched
from megatron_resihp.control.commands.launch.launch_options import LaunchError, LaunchOptions, check, options_of
from megatron_resihp.control.commands.launch.run_directory import forget_job_end, note_job_end
from megatron_resihp.control.commands.launch.seat import REASON, MakeEventSink, Seat, take_seat
from megatron_resihp.control.commands.standby import JobIsOver, take_over
from megatron_resihp.control.coordination.actions import Limits
from megatron_resihp.control.coordination.decisions.succession import Succession, unlogged
from megatron_resihp.control.coordination.requests import Requests
from megatron_resihp.control.head.detection import Detection, Judge
from megatron_resihp.control.head.headquarters import EventSink, Headquarters, Job
from megatron_resihp.control.head.logs.logbook import Logbook
from megatron_resihp.control.head.logs.own_curves import HEALTHY
from megatron_resihp.control.head.logs.writer import Term
from megatron_resihp.control.node.agent import Agent
from megatron_resihp.control.node.environment import JobEnvironment, warnings_of
from megatron_resihp.control.node.link import Link
from megatron_resihp.control.node.mailbox import Ending, Mailbox, signals_while_waiting
from megatron_resihp.control.node.orphan_reaper import OrphanReaper
from megatron_resihp.control.node.output import Outputs
from megatron_resihp.control.node.processes import Processes
from megatron_resihp.control.node.slowdown_injector import SlowdownInjector
from megatron_resihp.control.node.spawn import Spawn, exec_worker
from megatron_resihp.control.node.starting import Starter, Worker
from megatron_resihp.control.replanning.by_choice.replanner import Replanner
from megatron_resihp.control.replanning.health import still_slow
from megatron_resihp.control.terminal import say, warn
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.presence import Presence
from megatron_resihp.control.transport.leaders import LEADERLESS_S, RESULT, Leaders
from megatron_resihp.control.transport.liveness import LivenessConnection, Watcher
from megatron_resihp.control.transport.node_liveness import (
    Joining,
    Meeting,
    NodeWatcher,
    come_back,
    control_of,
    join,
    records_address,
)
from megatron_resihp.control.transport.shipping import Relay, Uplink
from megatron_resihp.control.transport.store.client import Direct, StoreClient, open_connection
from megatron_resihp.control.transport.store.lasting import LastingStore
from megatron_resihp.control.transport.store.questions import gathering_s
from megatron_resihp.control.transport.store.relay import StoreRelay
from megatron_resihp.control.transport.store.store import Store
from megatron_resihp.control.worker.saved_state import last_save
from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.detection import Verdict
from megatron_resihp.events.log import FILE_NAME as EVENTS
from megatron_resihp.events.log import Logged, read_events, read_first_epoch, read_last_run
from megatron_resihp.events.training import Iteration
from megatron_resihp.protocol.notices import ValidationOrder
from megatron_resihp.protocol.together import Together

LOG_END: Final = 1 << 20
"""Bytes of the events that a coordinator which takes over reads: the log of a long run is large."""
CLOSING_S: Final = 5.0
"""How long each part may take to end."""
SWITCH_S: Final = 0.0005
"""How long a thread waits for one that computes. What a worker asks passes up to three threads of its launcher, each of
which would wait for 5 ms by default."""


class NoEvents:
    """An event sink that keeps nothing."""

    def follow(self, bus: EventBus) -> None:
        pass

    def take_over(self) -> None:
        pass

    def finish(self) -> None:
        pass


def run(namespace: argparse.Namespace, make_event_sink: MakeEventSink, spawn: Spawn = exec_worker) -> int:
    """Do what the parsed arguments ask; returns the exit code."""
    try:
        return launch(options_of(namespace), spawn, make_event_sink)
    except LaunchError as error:
        return refuse(str(error))


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
        return refuse(str(error))
    except JobIsOver as over:
        (warn if over.code else say)(f"resihp: {over}")
        return over.code


def refuse(problem: str) -> int:
    """Say why nothing is launched; returns the exit code."""
    warn(f"resihp: {problem}")
    return exit_codes.REFUSED


def _launch(options: LaunchOptions, spawn: Spawn, make_event_sink: MakeEventSink) -> int:
    with ExitStack() as stack:
        stack.enter_context(signals_while_waiting())
        take = take_over if options.standby else take_seat
        seat = take(options, make_event_sink, stack)
        forget_job_end(seat.run_dir, options.node)
        outputs = Outputs(options.logs, seat.run_dir / "logs", sys.stdout)
        mailbox = stack.enter_context(closing(Mailbox()))
        stack.enter_context(mailbox.signals())
        watcher = stack.enter_context(closing(Watcher(options.heartbeat_timeout_s, options.notice_timeout_s)))
        relay = Relay(seat.secret, seat.records, seat.size.most_nodes)
        # The coordinator's own store goes with it.
        leaders = Leaders(seat.run_dir) if seat.led_on and not seat.leads else None
        together = Together(f"node.{secrets.token_hex(8)}")
        store = StoreRelay(Direct(seat.address, seat.secret, leaders), together, gathering_s(seat.size.most_nodes))
        reaper = stack.enter_context(closing(OrphanReaper()))
        _announce(options, seat)
        try:
            environment = _environment(options, seat)
            starter = Starter(options.command, environment, outputs, spawn, watcher, relay, store, reaper)
            workers = starter.start_all(seat.numbers)
        except OSError as error:
            raise LaunchError(f"a worker cannot be started ({error}); fix that and try again") from error
        # From here on there are threads.
        sys.setswitchinterval(SWITCH_S)
        outputs.start()
        if seat.token:
            stack.enter_context(touched(seat.run_dir / FILE_NAME))
        began_at = time.time()
        ending, failures = _serve(options, seat, starter, workers, watcher, mailbox, relay, store, reaper)
        outputs.close(CLOSING_S)
        if ending.code:
            # Workers that refuse the job's flags all say the same.
            for worker in failures[:1] if ending.code == exit_codes.REFUSED else failures:
                _show_failure(worker, outputs.last_lines(worker.number))
        _finish(seat, options.node, ending)
        # The coordinator's terminal tells of what it has agreed to.
        if ending.code == exit_codes.RETRY and not (seat.leads and ending.agreed):
            _tell_last_save(seat.run_dir, began_at)
        return ending.code


def _environment(options: LaunchOptions, seat: Seat) -> JobEnvironment:
    return JobEnvironment(
        node=options.node,
        size=seat.size,
        store=seat.address,
        run_dir=seat.run_dir,
        heartbeat_s=options.heartbeat_s,
        stand_in=options.stand_in,
        max_restarts=options.max_restarts,
        led_on=seat.led_on,
        network=interface.variables(options.interface),
    )


def _serve(
    options: LaunchOptions,
    seat: Seat,
    starter: Starter,
    workers: list[Worker],
    watcher: Watcher,
    mailbox: Mailbox,
    relay: Relay,
    store: StoreRelay,
    reaper: OrphanReaper,
) -> tuple[Ending, list[Worker]]:
    """Watch over the workers until the job is over; returns how it ended, and the workers that failed."""
    nodes = None
    if seat.liveness is not None:
        before = seat.before
        within_s = options.connect_timeout_s if before is None else LEADERLESS_S
        nodes = NodeWatcher(
            seat.liveness, seat.secret, seat.size, options.heartbeat_timeout_s, time.monotonic() + within_s,
            None if before is None else before.awaited, seat.gone,
        )  # fmt: skip
    headquarters = _open_headquarters(options, seat, mailbox, nodes) if seat.leads else None
    uplink, presence = Uplink(seat.secret, seat.led_on), Presence(options.node, seat.name)
    store.start()
    relay.start(uplink.deliver if headquarters is None else headquarters.detection.inbox.deliver)
    injector = SlowdownInjector({worker.number: (worker.pid, worker.pidfd) for worker in workers})
    way, token = store.own_way(), seat.token if seat.leads else None
    link = Link(
        # A store's own coordinator knows its run; one that takes over tells it to others only later.
        lambda: LastingStore(StoreClient(open_connection(way, options.connect_timeout_s)), token),
        partial(_introduce, options, seat, uplink, starter, presence),
        mailbox.end,
        lambda slowness: injector.slow(slowness.speeds),
        mailbox.put,
        seat.name,
    )
    processes = Processes(workers, watcher, store, injector, reaper)
    agent = Agent(
        processes, watcher, mailbox, link, starter, options.max_restarts, nodes, seat.offered, options.node, seat.leads
    )
    ending = agent.run()
    if seat.ends_without_the_job(ending):
        seat.holds.leave()
    injector.close()
    if nodes is not None:
        nodes.close()
    relay.close(CLOSING_S)
    uplink.close()
    presence.close()
    link.close(CLOSING_S)
    store.close(CLOSING_S)
    if headquarters is not None:
        headquarters.close(ending, CLOSING_S)
    return ending, processes.failures()


def _open_headquarters(
    options: LaunchOptions, seat: Seat, mailbox: Mailbox, nodes: NodeWatcher | None
) -> Headquarters:  # fmt: skip
    assert seat.listener is not None and seat.sink is not None
    meeting = None
    if seat.liveness is not None and seat.records is not None:
        meeting = Meeting(*(Address(seat.address.host, s.getsockname()[1]) for s in (seat.liveness, seat.records)))
    bus, requests, size = EventBus(), Requests(), seat.size
    if seat.before is None:
        # First of all, so that the log never has an answer before what it answers.
        seat.sink.follow(bus)
    slow, healthy = list[Verdict](), list[Iteration]()
    if seat.before is not None:
        slow = still_slow(read_last_run(seat.run_dir / EVENTS, Verdict))
        healthy = read_first_epoch(seat.run_dir / EVENTS, HEALTHY)
    taken_over = seat.before is not None
    detection = Detection(lambda: _make_judge(seat.run_dir, requests.validate, slow, taken_over), bus)
    replanner = Replanner(seat.run_dir, size, bus, requests.change_plan)
    began = None if seat.before is None else seat.before.began_at
    logbook = Logbook(bus, Term(seat.token, began, seat.holds.is_followed), before=healthy)
    if seat.before is not None:
        catch_up(seat.before, slow, bus, seat.sink, seat.run_dir / EVENTS)
    # Read only once no other writes there.
    logged = Logged(lambda: read_events(seat.run_dir / EVENTS, LOG_END).events)
    limits = Limits(
        options.survivor_timeout_s, min_workers=options.min_workers, drain_s=options.drain_deadline_s,
        replaceable=options.replaceable,
    )  # fmt: skip
    job = Job(
        size, list(options.command), limits, seat.token, seat.secret, seat.run_dir, seat.before, seat.holds, seat.claim,
        seat.holds.is_followed, lambda: frozenset() if nodes is None else nodes.served, logged.has,
    )  # fmt: skip
    return Headquarters(
        seat.address, seat.listener, bus, requests, job, meeting, detection, replanner, logbook, mailbox.end,
        seat.leadership,
    )  # fmt: skip


def catch_up(before: Succession, slow: Sequence[Verdict], bus: EventBus, sink: EventSink, log: Path) -> None:
    """Tell of what the coordinator before knew, and the log of what it lacks.

    Args:
        slow: what the detector has said last of workers and links that are not healthy again.
    """
    unknown = unlogged(before.last, read_events(log, LOG_END).events)
    for fact in (*before.facts, *slow):
        if fact not in unknown:
            bus.publish(fact)
    sink.follow(bus)  # which has them
    for event in unknown:
        bus.publish(event)


def _make_judge(
    run_dir: Path, order: Callable[[ValidationOrder], None], slow: Sequence[Verdict], taken_over: bool
) -> Judge:  # fmt: skip
    from megatron_resihp.detector.service import DetectionService

    return DetectionService(run_dir, order, slow, taken_over)


def _introduce(
    options: LaunchOptions,
    seat: Seat,
    uplink: Uplink,
    starter: Starter,
    presence: Presence,
    store: Store,
    on_lost: Callable[[], None],
    comes_back: bool,
) -> LivenessConnection | None:
    if seat.leads:
        return None
    joining = Joining(
        node=options.node,
        size=seat.size,
        timeout_s=options.heartbeat_timeout_s,
        period_s=options.heartbeat_s,
        first_worker=seat.name,
        secret=seat.secret,
    )
    if comes_back:
        # Before there is a liveness connection, which an error would leave open with nobody to close it.
        records = records_address(store)
        liveness = come_back(store, joining, on_lost)
        uplink.connect(records)
        if isinstance(store, StoreClient):
            starter.store_is_at(store.address)
        say(f"resihp: node {options.node} has found another coordinator")
        return liveness
    liveness = join(store, joining, on_lost)
    uplink.connect(records_address(store))
    if isinstance(store, LastingStore) and (control := control_of(store)) is not None:
        presence.begin(control, store.run)
    say(f"resihp: node {options.node} has joined the job")
    return liveness


def _announce(options: LaunchOptions, seat: Seat) -> None:
    if seat.before is not None:
        say(f"resihp: takes over the job, which finds it at {seat.address}, run directory {seat.run_dir}")
        return
    workers = f"{options.workers_per_node} worker{'s' if options.workers_per_node > 1 else ''}"
    node = f" on node {options.node} of {options.nodes}" if options.size.most_nodes > 1 else ""
    if options.alone:
        node = f" on each of {options.nodes} nodes, which join with --coordinator {seat.address}"
    elif seat.offered:
        node = f" on node {options.node}, to join the job that runs"
    if options.late_nodes and not seat.offered:
        node += f" ({options.late_nodes} more may join)"
    say(f"resihp: {workers}{node}, run directory {seat.run_dir}")
    network = interface.warnings_of(options.coordinator, options.size.most_nodes, options.interface)
    for warning in [*network, *([] if options.stand_in or options.alone else warnings_of())]:
        warn(f"resihp: {warning}")


def _show_failure(worker: Worker, lines: list[str]) -> None:
    assert worker.code is not None
    how = f"exit code {worker.code}" if worker.code >= 0 else f"signal {-worker.code}"
    heading = f"resihp: worker {worker.number} ended with {how}; its last lines:"
    warn("\n".join([heading, *(f"  {line}" for line in lines)]))


def _finish(seat: Seat, node: int, ending: Ending) -> None:
    if ending.code:
        warn(f"resihp: ended with exit code {ending.code}: {ending.reason}")
    elif not ending.agreed:
        say(f"resihp: {ending.reason}")
    if seat.sink is not None:
        # First: to read a long log takes longer than a cluster may give.
        if seat.holds():
            _tell_result(seat.run_dir, ending)
        seat.sink.finish()
    elif ending.agreed:
        note_job_end(seat.run_dir, node, ending.code)


def _tell_last_save(run_dir: Path, since: float) -> None:
    """The coordinator is lost, and what it would say."""
    save = last_save(run_dir, since)
    if save is not None:
        warn(f"resihp: {save.told(run_dir)}")


def _tell_result(run_dir: Path, ending: Ending) -> None:
    """The job's exit code, and why, for scripts that can't tell node 0's launcher from others."""
    for name, text in ((REASON, ending.reason), (RESULT, ending.code)):  # the code last: scripts wait for it
        unfinished = run_dir / f".{name}.unfinished"
        try:
            unfinished.write_text(f"{text}\n")
            unfinished.replace(run_dir / name)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            warn(f"resihp: {run_dir / name} can't be written ({error.strerror})")
