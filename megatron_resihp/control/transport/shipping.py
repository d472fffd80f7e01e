# SPDX-License-Identifier: Apache-2.0
"""How records travel: worker → its node's agent → the coordinator, each over a stream of length-prefixed messages.

Nobody on the way is ever waited for by training: a worker queues a bounded number of messages and drops what does not
fit. Agents keep nothing; where the coordinator is slow they stop reading, so that all that is ever dropped is dropped,
and counted, by its worker. May import: the standard library and this package's modules.
"""

from __future__ import annotations

import math
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from megatron_resihp.control.transport.access.gate import Gate, enter
from megatron_resihp.control.transport.access.secret import Secret
from megatron_resihp.control.transport.access.secure import Session
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.frames import Frames, framed
from megatron_resihp.control.transport.sockets import StoreError

LARGEST: Final = 64 * 1024 * 1024
"""A longer message is no message: its sender has gone mad."""
READ_BYTES: Final = 1 << 18
WAITING: Final = 32
"""Messages that a worker keeps while its agent does not take them."""
PURPOSE: Final = "records"
SLICE_S: Final = 0.2
CONNECT_S: Final = 10.0
AGAIN_S: Final = 0.5
"""After a failure to connect, or a lost connection."""
RECONNECT_S: Final = 60.0
"""How long a node tries to reach a coordinator that no other can take the place of."""


class Outbox[T]:
    """A worker's end: sends in a thread of its own and never blocks the caller.

    Args:
        sock: to the agent; belongs to this object from now on.
        encode: makes a message of what was offered, in the outbox's thread. Its second argument is how many were
            dropped since the last one that was sent.
        limit: how many messages may wait.
    """

    def __init__(self, sock: socket.socket, encode: Callable[[T, int], bytes], limit: int = WAITING) -> None:
        self._socket = sock
        self._socket.setblocking(True)
        self._encode = encode
        self._limit = limit
        self._lost = 0
        self._waiting: queue.SimpleQueue[tuple[T, int] | None] = queue.SimpleQueue()
        self._works = True
        self._thread = threading.Thread(target=self._send, name="resihp-records", daemon=True)
        self._thread.start()

    def offer(self, item: T) -> None:
        """Send it soon, or drop and count it where too many wait."""
        if not self._works or self._waiting.qsize() >= self._limit:
            self._lost += 1
            return
        self._waiting.put((item, self._lost))
        self._lost = 0

    def close(self, timeout_s: float) -> None:
        """Send what waits, and end."""
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _send(self) -> None:
        try:
            while (offered := self._waiting.get()) is not None:
                message = self._encode(*offered)
                self._socket.sendall(framed(message))
        except OSError:
            pass  # the agent is gone, or has no use for records any more
        except Exception as error:
            print(f"resihp: records can't be sent any more ({error!r}); training goes on", file=sys.stderr, flush=True)
        self._works = False


def _refuse(message: bytes) -> bool:
    return False


class Relay:
    """An agent's end: hands on what its workers send, and on node 0 what other nodes' relays do.

    Args:
        secret: of the job.
        listener: where relays of other nodes connect; bound.
        nodes: how many may connect at once.
    """

    def __init__(self, secret: Secret, listener: socket.socket | None = None, nodes: int = 1) -> None:
        self._deliver: Callable[[bytes], bool] = _refuse
        self._selector = selectors.DefaultSelector()
        self._added: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resihp-relay", daemon=True)
        self._gate = None if listener is None else Gate(listener, secret, PURPOSE, LARGEST, nodes)
        if self._gate is not None:
            self._selector.register(self._gate, selectors.EVENT_READ)

    def add(self, sock: socket.socket) -> None:
        """A stream to read, soon; belongs to this object from now on. From any thread."""
        sock.setblocking(False)
        self._added.put(sock)

    def start(self, deliver: Callable[[bytes], bool]) -> None:
        """Begin, after all workers have been started.

        Args:
            deliver: takes a message; may block, and says whether it took it. After the first one that it did not take
                nothing is read any more.
        """
        self._deliver = deliver
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Hand on what has arrived, and end."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with self._selector:
            while True:
                while not self._added.empty():
                    self._selector.register(self._added.get(), selectors.EVENT_READ, Frames(LARGEST).feed)
                ready = self._selector.select(SLICE_S)
                self._let_in()
                if not ready and self._closing.is_set():
                    break
                if not all(self._look(key) for key, _ in ready):
                    break
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]

    def _look(self, key: selectors.SelectorKey) -> bool:
        """Whether to go on."""
        sock = key.fileobj
        if not isinstance(sock, socket.socket):
            return True
        try:
            data = sock.recv(READ_BYTES)
            messages = list(key.data(data))
        except BlockingIOError:
            return True
        except (OSError, ValueError):
            data, messages = b"", []
        if not data:
            self._selector.unregister(sock)
            sock.close()
        return all(self._deliver(message) for message in messages)

    def _let_in(self) -> None:
        """Also when nothing comes: who does not answer has to go."""
        for sock, session in [] if self._gate is None else self._gate.look(time.monotonic()):
            self._selector.register(sock, selectors.EVENT_READ, session.feed)


class Inbox:
    """Messages that wait for their reader, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._messages: queue.Queue[bytes] = queue.Queue(limit)
        self._closed = False

    def deliver(self, message: bytes) -> bool:
        """Wait for a place; False once it is closed."""
        while not self._closed:
            try:
                self._messages.put(message, timeout=SLICE_S)
                return True
            except queue.Full:
                continue
        return False

    def take(self, timeout_s: float) -> bytes | None:
        """The next message; None if none comes in time."""
        try:
            return self._messages.get(timeout=timeout_s) if timeout_s > 0 else self._messages.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Take no more messages."""
        self._closed = True


class Uplink:
    """Another node's way to the coordinator: connects when the address is known, and again where a connection is lost.

    Args:
        led_on: another coordinator may come, so that it never gives up.
        reconnect_s: after how long without a connection it does where none may come.
    """

    def __init__(self, secret: Secret, led_on: bool = False, reconnect_s: float = RECONNECT_S) -> None:
        self._secret = secret
        self._patience_s = math.inf if led_on else reconnect_s
        self._told: queue.SimpleQueue[Address | None] = queue.SimpleQueue()
        self._address: Address | None = None
        self._socket: socket.socket | None = None
        self._session: Session | None = None
        self._closed = False

    def connect(self, address: Address) -> None:
        """Where the coordinator's relay listens; told once of each."""
        self._told.put(address)
        self._hang_up()

    def deliver(self, message: bytes) -> bool:
        """Send a message, waiting as long as the coordinator takes; False once that has failed for good.

        One whose connection is lost may come twice.
        """
        if self._address is None and not self._closed:
            self._address = self._told.get()
        give_up_at = math.inf
        while not self._closed:
            problem = self._send(message)
            if problem is None:
                return True
            now = time.monotonic()
            give_up_at = min(give_up_at, now + self._patience_s)
            if now >= give_up_at and not self._closed:
                self._closed = True
                print(
                    f"resihp: this node's measurements don't reach the coordinator any more ({problem}); slow workers "
                    "of this node are not found",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            self._await_address()
        return False

    def _send(self, message: bytes) -> Exception | None:
        """Returns what has gone wrong."""
        try:
            if self._socket is None or self._session is None:
                assert self._address is not None
                self._socket, self._session = enter(self._address, self._secret, PURPOSE, 0, CONNECT_S)
                self._socket.settimeout(None)
            self._socket.sendall(self._session.seal(message))
            return None
        except (OSError, StoreError) as error:
            if self._socket is not None:
                self._socket.close()
            self._socket = self._session = None
            return error

    def _await_address(self) -> None:
        """Wait for a new one for a moment."""
        try:
            self._address = self._told.get(timeout=AGAIN_S) or self._address
        except queue.Empty:
            pass

    def close(self) -> None:
        """Make a thread that waits in `deliver` return."""
        self._closed = True
        self._told.put(None)
        self._hang_up()

    def _hang_up(self) -> None:
        sock = self._socket
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
