# SPDX-License-Identifier: Apache-2.0
"""Where a launcher sits: with the coordinator, whose ports and run directory it claims, or at a node that joins it.

May import: the standard library and `control`'s modules. Where events go is handed in.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from megatron_resihp.control import exit_codes, keys
from megatron_resihp.control.commands.contact import FILE_NAME, Contact, read_contact
from megatron_resihp.control.commands.launch.admission import admitted
from megatron_resihp.control.commands.launch.claim import ClaimedError, Hold, living_owner
from megatron_resihp.control.commands.launch.launch_options import LaunchError, LaunchOptions
from megatron_resihp.control.commands.launch.run_directory import make_run_dir, unwritable
from megatron_resihp.control.coordination.decisions.succession import Succession
from megatron_resihp.control.head import returning
from megatron_resihp.control.head.headquarters import EventSink
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.node.mailbox import Ending
from megatron_resihp.control.terminal import say
from megatron_resihp.control.transport.access.gate import RefusedSecretError
from megatron_resihp.control.transport.access.secret import (
    Secret,
    UnreadableError,
    find_secret,
    given_certificates,
    published_secret,
)
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.gateway import EtcdError
from megatron_resihp.control.transport.etcd.leadership import Leadership
from megatron_resihp.control.transport.leaders import RESULT
from megatron_resihp.control.transport.node_liveness import check_size, has_joined, is_apart, is_led_on
from megatron_resihp.control.transport.sockets import (
    ElsewhereError,
    StoreError,
    TakenError,
    reserve,
    wait_until_reachable,
)
from megatron_resihp.control.transport.store.client import connect
from megatron_resihp.control.transport.store.store import Store

LOCAL_HOST: Final = "127.0.0.1"
REASON: Final = "exit_reason"
"""The run directory's file that says why the job has ended; not there while it runs."""
LOOK_S: Final = 1.0
STILL_THERE_S: Final = 5.0
"""How long the coordinator may not answer a node that waits to join."""
NO_WORKER: Final = -1

MakeEventSink = Callable[[Path], EventSink]
"""Given the run directory. Called beside the coordinator only."""


@dataclass(frozen=True)
class Seat:
    """Where a launcher sits: the store's address and, beside the coordinator, what it is served with.

    Attributes:
        size: of the job, and whether the coordinator is apart from its nodes.
        numbers: ids of the workers that are started here.
        offered: the node joins a running job with these.
        liveness, records: where the other nodes' liveness connections and their workers' records arrive.
        token: see `contact`.
        leadership: in etcd; None: decisions are kept in the run directory only.
        led_on: another coordinator may take the place of one that is lost.
        before: what the one has decided whose place the coordinator takes here; None: the job begins.
        holds: whether the run directory is still this coordinator's, if one is here.
        claim: makes it so, where there was a coordinator before.
        gone: nodes that don't come back from the coordinator before.
    """

    secret: Secret
    address: Address
    run_dir: Path
    size: JobSize
    numbers: Sequence[int]
    offered: bool = False
    listener: socket.socket | None = None
    liveness: socket.socket | None = None
    records: socket.socket | None = None
    sink: EventSink | None = None
    token: str = ""
    leadership: Leadership | None = None
    led_on: bool = False
    before: Succession | None = None
    holds: Hold = field(default_factory=lambda: Hold(lambda: True))
    claim: Callable[[], None] = lambda: None
    gone: Callable[[], Set[int]] = frozenset

    @property
    def leads(self) -> bool:
        """Whether the coordinator runs here."""
        return self.listener is not None

    def ends_without_the_job(self, ending: Ending) -> bool:
        """Whether the job may go on with another coordinator in the place of this one, which ends so."""
        nothing_began = self.before is None and ending.code == exit_codes.REFUSED
        return self.leads and self.leadership is not None and self.size.apart and not (ending.agreed or nothing_began)

    @property
    def name(self) -> int:
        """What no other agent of this run has been called: the id of its first worker."""
        return self.numbers[0] if self.numbers else NO_WORKER


def take_seat(options: LaunchOptions, make_event_sink: MakeEventSink, stack: ExitStack) -> Seat:
    """Claim what the coordinator needs, or find out how to join it. `stack`: holds what is claimed.

    Raises:
        LaunchError: that can't be.
    """
    address = options.coordinator or Address(LOCAL_HOST, 0)
    try:
        listener = None if options.node > 0 else _listener(options, address, stack)
        if listener is None:
            return _join(options, address, stack)
        others = options.alone or options.size.most_nodes > 1
        liveness = stack.enter_context(reserve(address.host, 0)) if others else None
        records = stack.enter_context(reserve(address.host, 0)) if others else None
    except StoreError as error:
        # Of the same command started twice on one machine the port is told first, but is not what is wrong.
        run_dir = options.run_dir if isinstance(error, TakenError) else None
        owner = None if run_dir is None else living_owner(run_dir / FILE_NAME)
        mend = "check --listen" if options.alone else "check --coordinator, and node 0 or resihp coordinator there"
        raise LaunchError(_taken(options.run_dir, owner) if owner is not None else f"{error}; {mend}") from error
    return _lead(options, listener, liveness, records, make_event_sink, stack)


def _listener(options: LaunchOptions, address: Address, stack: ExitStack) -> socket.socket | None:
    """The port of the coordinator, which is to run here; None: it runs apart, and this node joins it as others do."""
    try:
        return stack.enter_context(reserve(*address))
    except ElsewhereError:
        if options.alone or options.run_dir is None:
            raise
        say(f"resihp: {address.host} is not an address of this machine, so node 0 joins resihp coordinator there")
    except TakenError:
        if options.alone or not _is_held_apart(options.run_dir, address):
            raise
    return None


def _is_held_apart(run_dir: Path | None, address: Address) -> bool:
    """Whether the port is that of the run directory's coordinator, which runs apart, on this machine."""
    if run_dir is None:
        return False
    try:
        contact = read_contact(run_dir)
    except StoreError:
        return False
    return contact.apart and contact.store.port == address.port


def forget_result(run_dir: Path) -> None:
    """The job of the run directory runs, and its earlier end is none. Raises OSError."""
    for name in (RESULT, REASON):
        (run_dir / name).unlink(missing_ok=True)


def _lead(
    options: LaunchOptions,
    listener: socket.socket,
    liveness: socket.socket | None,
    records: socket.socket | None,
    make_event_sink: MakeEventSink,
    stack: ExitStack,
) -> Seat:
    run_dir = make_run_dir(options)
    address = Address((options.coordinator or Address(LOCAL_HOST, 0)).host, listener.getsockname()[1])
    try:
        encrypted = given_certificates() is not None
        contact = Contact(address, apart=options.alone, replaceable=options.replaceable, encrypted=encrypted)
        # Before anything is written that a job which runs there would read, or has written.
        holds = contact.hold(run_dir)
        stack.enter_context(contact.published(run_dir, holds))
        leadership = None if options.control is None else stack.enter_context(closing(Leadership(options.control)))
        own = stack.enter_context(published_secret(run_dir, holds))
        returning.begin(run_dir, options.size)
        forget_result(run_dir)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    except ClaimedError as error:
        raise LaunchError(_taken(run_dir, error)) from error
    except StoreError as error:
        raise LaunchError(str(error)) from error
    except EtcdError as error:
        raise LaunchError(f"{error}; check --control, or end the job that has its name") from error
    sink, slots = make_sink(make_event_sink, run_dir), range(0) if options.alone else options.size.slots_on(0)
    return Seat(
        own, address, run_dir, options.size, slots, False, listener, liveness, records, sink, contact.token, leadership,
        holds=holds,
    )  # fmt: skip


def _join(options: LaunchOptions, address: Address, stack: ExitStack) -> Seat:
    run_dir = make_run_dir(options)
    address = _found(address, run_dir, options.connect_timeout_s)
    told = partial(_told, options=options)
    _, (apart, led_on, joined, run) = admitted(address, run_dir, options.connect_timeout_s, told)
    if options.control is not None and options.node == 0:
        raise LaunchError("the coordinator runs apart from the nodes; give --control to resihp coordinator")
    size = replace(options.size, apart=apart)
    if options.node in size.head:
        raise LaunchError(f"node 0 of the job at {address} runs there, with the coordinator; give another --node-rank")
    # However this launch ends. If the node was connected by then, the coordinator hears of that anyway.
    stack.callback(returning.give_back, run_dir, options.node)
    offered = _offered(options, run_dir, address, joined, run)
    numbers = offered or size.slots_on(options.node)
    return Seat(find_secret(run_dir), address, run_dir, size, numbers, offered is not None, led_on=led_on)


def _found(address: Address, run_dir: Path, timeout_s: float) -> Address:
    """Where the coordinator answers: at this address, or where another one serves that has taken over.

    Raises:
        StoreError: nothing answers in time.
    """
    until = time.monotonic() + timeout_s
    while True:
        for at in (address, _named(run_dir, address)):
            try:
                wait_until_reachable(at, min(LOOK_S, timeout_s))
                return at
            except StoreError:
                if time.monotonic() > until:
                    raise


def _named(run_dir: Path, address: Address) -> Address:
    """Where the run directory says that a coordinator is that runs apart; this address, if it doesn't say that."""
    try:
        contact = read_contact(run_dir)
    except StoreError:
        return address
    return contact.store if contact.apart else address


def _told(store: Store, options: LaunchOptions) -> tuple[bool, bool, bool, str]:
    """Whether the store's coordinator is apart, whether another may take its place, whether a node of this rank has
    begun its job, and the run's token; or StoreError."""
    check_size(store, options.node, options.size)
    joined = has_joined(store, options.node, options.size)
    return is_apart(store), is_led_on(store), joined, store.get(keys.RUN, options.connect_timeout_s)


def _offered(
    options: LaunchOptions, run_dir: Path, address: Address, joined: bool, run: str
) -> Sequence[int] | None:  # fmt: skip
    """The ids of the workers of a node that joins a running job, also again; None: it begins the job.

    Args:
        joined: one of its rank has begun the job. So this one takes its place, once that one is missed.
        run: the job's token.

    Raises:
        StoreError: the coordinator is gone, while this one waited to join.
    """
    size, node = options.size, options.node
    try:
        if node < size.nodes and not joined:
            return returning.take(run_dir, node)
        return returning.await_offer(
            run_dir, node, lambda: check_still_there(run_dir, _named(run_dir, address), run),
            options.connect_timeout_s, joined,
        )  # fmt: skip
    except returning.RefusedError as error:
        raise LaunchError(str(error)) from error
    except OSError as error:
        raise unwritable(run_dir, error) from error


def check_still_there(run_dir: Path, address: Address, run: str) -> None:
    """Raises StoreError unless the job with this token answers there: another one may have the port by now."""
    try:
        with closing(connect(address, find_secret(run_dir), STILL_THERE_S)) as store:
            if store.get(keys.RUN, STILL_THERE_S) == run:
                return
    except (RefusedSecretError, UnreadableError, TimeoutError):
        pass
    raise StoreError(f"the job at {address} that this node waited to join has ended")


def _taken(run_dir: Path | None, by: object) -> str:
    return f"a job runs in {run_dir} already, launched by {by}; give another --run-dir, or end that job first"


def make_sink(make_event_sink: MakeEventSink, run_dir: Path) -> EventSink:
    try:
        return make_event_sink(run_dir)
    except OSError as error:
        raise unwritable(run_dir, error) from error
