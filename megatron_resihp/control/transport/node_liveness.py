# SPDX-License-Identifier: Apache-2.0
"""Liveness connections of nodes: the coordinator's agent notices that a node is gone, the others that it is.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass
from typing import Final

from megatron_resihp.control import keys
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.transport.absence import Absence
from megatron_resihp.control.transport.access.gate import Gate, enter_in_time
from megatron_resihp.control.transport.access.secret import Secret
from megatron_resihp.control.transport.access.secure import Session
from megatron_resihp.control.transport.address import Address, parse_address
from megatron_resihp.control.transport.liveness import Kind, LivenessConnection, Watcher
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.store import Store

PURPOSE: Final = "liveness"
LARGEST: Final = 64
"""Bytes of a message: beats are one."""
READING_S: Final = 0.1
"""How often the beats of nodes are read: those of a thousand nodes come at any time. At once where the time-out of
heartbeats is so short that this would matter."""
SIZE_KEY: Final = "launch/size"
"""The job's size as the coordinator's agent was told; the others check theirs against it."""
APART_KEY: Final = "launch/apart"
"""There if the coordinator runs on none of the job's nodes."""
CONTROL_KEY: Final = "launch/control"
"""Where in etcd decisions are kept; there if another coordinator may take the place of this one."""
ANSWER_S: Final = 30.0
"""How long the coordinator's agent may take from serving the store to publishing what the others need."""


@dataclass(frozen=True)
class NodeLoss:
    node: int
    cause: str


class NodeWatcher:
    """The coordinator's end: takes in the liveness connections of nodes, also of those that come later, or again.

    Args:
        listener: bound, not yet listening.
        size: of the job.
        timeout_s: of heartbeats.
        connect_by: when, in the time that `look` is given, the nodes that begin the job must have connected.
        returning: nodes that must come back by then from a coordinator that was lost; None: the job begins.
        gone: nodes that are known not to come back.
    """

    def __init__(
        self, listener: socket.socket, secret: Secret, size: JobSize, timeout_s: float, connect_by: float,
        returning: Collection[int] | None = None, gone: Callable[[], Set[int]] = frozenset,
    ) -> None:  # fmt: skip
        self._gate = Gate(listener, secret, PURPOSE, LARGEST, size.most_nodes)
        self._size = size
        self._others = set(range(size.most_nodes)) - size.head
        self._returning = set(returning or ())
        self._awaited = set(range(size.nodes) if returning is None else returning) - size.head
        self._connect_by, self._gone = connect_by, gone
        self._absence = Absence(timeout_s / 2)
        self._watcher = Watcher(timeout_s, period_s=READING_S if timeout_s > 10 * READING_S else 0.0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._gate, selectors.EVENT_READ)
        self._selector.register(self._watcher, selectors.EVENT_READ)

    @property
    def served(self) -> set[int]:
        """Nodes that are connected, or may still come back; other threads may ask."""
        return self._watcher.names | self._returning

    def fileno(self) -> int:
        return self._selector.fileno()

    def look(self, now: float) -> list[NodeLoss]:
        """Nodes that are gone, or did not come in time; each is told once."""
        for sock, session in self._gate.look(now):
            self._let_in(sock, session)
        losses = []
        for finding in self._watcher.look(now):
            if finding.kind is Kind.SILENT:
                # Should it live on, it must not go on: it hears the end of its liveness connection.
                self._watcher.cut(finding.name)
                losses.append(NodeLoss(finding.name, f"no heartbeat for {finding.silence_s:.1f} s"))
            elif finding.kind is Kind.LOST:
                losses.append(NodeLoss(finding.name, "connection lost"))
        if gone := self._returning & self._gone():
            losses += [NodeLoss(node, "lost together with the coordinator") for node in sorted(gone)]
            self._awaited -= gone
            self._returning -= gone
        self._connect_by += self._absence.before(now)
        if now > self._connect_by:
            late = "did not connect to the coordinator that has taken over" if self._returning else "did not connect"
            losses += [NodeLoss(node, late) for node in sorted(self._awaited)]
            self._awaited.clear()
            self._returning.clear()
        return losses

    def close(self) -> None:
        self._watcher.close()
        self._selector.close()
        self._gate.close()

    def _let_in(self, sock: socket.socket, session: Session) -> None:
        node, comes_back = _read_who(session.who, self._size)
        # Once it was given up for not coming back, another may have its rank.
        if node not in self._others or node in self._watcher.names or comes_back != (node in self._returning):
            sock.close()
            return
        self._awaited.discard(node)
        self._returning.discard(node)
        self._watcher.add(node, sock, session.feed)


def _who(node: int, size: JobSize, comes_back: bool) -> int:
    """How an agent introduces itself."""
    return node + size.most_nodes if comes_back else node


def _read_who(who: int, size: JobSize) -> tuple[int, bool]:
    """The node of an agent, and whether it comes back from a coordinator that was lost."""
    return (who - size.most_nodes, True) if who >= size.most_nodes else (who, False)


@dataclass(frozen=True)
class Meeting:
    """Where agents of other nodes connect: their liveness connections, and the streams of their workers' records."""

    liveness: Address
    records: Address


def publish(
    store: Store, size: JobSize, meeting: Meeting | None, term: int | None = None, began: bool = False,
    control: str | None = None,
) -> None:  # fmt: skip
    """The coordinator's part of `join`.

    Args:
        term: of this coordinator, if another may take its place.
        began: all nodes that begin the job have joined it, under a coordinator that was lost.
        control: where in etcd decisions are kept, if another may take its place.
    """
    if began:
        for node in range(size.nodes):
            store.set(_first_worker(size.slots_on(node)[0]), "1")
    if term is not None:
        store.set(keys.TERM, str(term))
    if control is not None:
        store.set(CONTROL_KEY, control)
    if size.apart:
        store.set(APART_KEY, "yes")  # before the size, for which the others wait
    store.set(SIZE_KEY, str(size))
    if meeting is not None:
        store.set(keys.RECORDS_ADDRESS, str(meeting.records))
        store.set(keys.LIVENESS_ADDRESS, str(meeting.liveness))


def records_address(store: Store) -> Address:
    """Where the coordinator takes records; to be asked for after `join`."""
    return parse_address(store.get(keys.RECORDS_ADDRESS, ANSWER_S))


@dataclass(frozen=True)
class Joining:
    """What another node joins with.

    Attributes:
        timeout_s: of heartbeats.
        period_s: between two of them.
        first_worker: of this node; another one when it comes back.
    """

    node: int
    size: JobSize
    timeout_s: float
    period_s: float
    first_worker: int
    secret: Secret


def join(store: Store, joining: Joining, on_lost: Callable[[], None]) -> LivenessConnection:
    """Check that this node belongs to the job, and open its liveness connection; StoreError says why not."""
    check_size(store, joining.node, joining.size)
    if store.add(_first_worker(joining.first_worker), 1) > 1:
        raise StoreError(joined_already(joining.node))
    return come_back(store, joining, on_lost, comes_back=False)


def come_back(
    store: Store, joining: Joining, on_lost: Callable[[], None], comes_back: bool = True
) -> LivenessConnection:  # fmt: skip
    """Open a liveness connection to a coordinator that has taken over; StoreError says why that can't be."""
    address = parse_address(store.get(keys.LIVENESS_ADDRESS, ANSWER_S))
    try:
        sock, session = _connect(address, joining, comes_back)
        return LivenessConnection(sock, joining.period_s, on_lost, session.seal)
    except OSError as error:
        what = error.strerror or error
        raise StoreError(f"no liveness connection to the coordinator at {address} ({what})") from error


def check_size(store: Store, node: int, size: JobSize) -> None:
    """Raises StoreError if the coordinator was told of a job of another size than this node."""
    told = store.get(SIZE_KEY, ANSWER_S)
    if told != str(size):
        raise StoreError(f"the coordinator was started with {told}; give node {node} the same")


def is_apart(store: Store) -> bool:
    """Whether the coordinator runs on none of the job's nodes; to be asked for after `check_size`."""
    return store.check(APART_KEY)


def is_led_on(store: Store) -> bool:
    """Whether another coordinator may take the place of this store's; to be asked for after `check_size`."""
    return store.check(keys.TERM)


def control_of(store: Store) -> str | None:
    """Where in etcd decisions are kept, if another coordinator may take the place of this store's."""
    return store.get(CONTROL_KEY, ANSWER_S) if store.check(CONTROL_KEY) else None


def has_joined(store: Store, node: int, size: JobSize) -> bool:
    """Whether a node of this rank has joined, of those that begin the job."""
    return node < size.nodes and store.check(_first_worker(size.slots_on(node)[0]))


def joined_already(node: int) -> str:
    """Why this node can't join: one of its rank has."""
    return f"node {node} has joined already and is still there; give each node a --node-rank of its own"


def _first_worker(worker: int) -> str:
    return f"launch/first_worker/{worker}"


def _connect(address: Address, joining: Joining, comes_back: bool) -> tuple[socket.socket, Session]:
    who = _who(joining.node, joining.size, comes_back)
    sock, session = enter_in_time(address, joining.secret, PURPOSE, LARGEST, joining.timeout_s, who)
    # Without it, beats to a machine that is gone are resent for a quarter of an hour.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(joining.timeout_s * 1000))
    return sock, session
