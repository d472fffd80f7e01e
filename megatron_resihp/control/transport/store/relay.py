# SPDX-License-Identifier: Apache-2.0
"""An agent's end of its workers' connections to the store: what they ask goes over one line of the node's to node 0.

A thread that never waits for a worker, or for node 0. Each worker has a hatch, through which it hands over connections
(`by_agent`). Such a connection belongs to one line: it ends with that, and its worker finds out whether there is
another, as whoever loses a connection of its own. May import `protocol` and
`control.transport`.
"""

from __future__ import annotations

import errno
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from megatron_resihp.control import keys
from megatron_resihp.control.transport.access.senders import speaks_for
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.frames import Frames, framed
from megatron_resihp.control.transport.sockets import end
from megatron_resihp.control.transport.store.by_agent import (
    LARGEST_LOCAL,
    ByAgent,
    reached,
    take_at_hatch,
    unreachable,
)
from megatron_resihp.control.transport.store.client import ATTEMPT_S, Direct, patience_s
from megatron_resihp.control.transport.store.line import Line
from megatron_resihp.control.transport.store.questions import Gathering
from megatron_resihp.control.transport.store.wire import (
    MalformedRequestError,
    Op,
    Reply,
    Request,
    Said,
    read_request,
    write_reply,
)
from megatron_resihp.protocol.together import Together

READ_BYTES: Final = 1 << 18
LOOK_S: Final = 1.0
ELSEWHERE_S: Final = 8.0
"""How often it is looked whether the run directory names another coordinator, though this one answers: it may have been
cut off from all but its nodes. With an attempt it is less than the time for which one that ends the job stays."""
MOST_CONNECTIONS: Final = 32
"""That a worker may have at once; it needs four, and some more while it finds another coordinator."""
LED_ATTEMPT_S: Final = 5.0
"""How long one way is tried where the store may be elsewhere by now. Then a file tells again where."""
NOT_ITS_OWN: Final = Reply(Said.WRONG, b"a worker speaks for itself only")
NOT_IN_TIME: Final = Reply(Said.NO)


class _Local:
    """A connection of a worker's, or of the agent's own.

    Attributes:
        worker: whose it is; None: the agent's.
        line: that it belongs to; None: it has not asked yet whether there is one.
        reach_by: until when the answer to that must come; None: it is not awaited.
    """

    def __init__(self, sock: socket.socket, worker: int | None) -> None:
        self.sock = sock
        self.worker = worker
        self.feed = Frames(LARGEST_LOCAL).feed
        self.unsent = bytearray()
        self.line: Line | None = None
        self.reach_by: float | None = None


class _Attempt:
    """To find the store, in a thread of its own: a file or a network may take long.

    Args:
        there: where there is a line already.
        done: called at the end.
        gathering: of the line.

    Attributes:
        line: that was opened; None: there is one, or `error` says why not.
    """

    def __init__(
        self, way: Direct, there: Address | None, within_s: float, done: Callable[[], None], gathering: Gathering
    ) -> None:
        self.line: Line | None = None
        self.error: Exception | None = None
        self.address: Address | None = None
        self._given_up = False
        self._way, self._there, self._within_s, self._done, self._gathering = way, there, within_s, done, gathering
        try:
            threading.Thread(target=self._run, name="resihp-store-way", daemon=True).start()
        except RuntimeError as error:  # this machine has no room for another thread
            self.error = error
            self._done()

    def _run(self) -> None:
        try:
            self.address = self._way.address()
            if self.address != self._there:
                self.line = Line(self.address, *self._way.open(self.address, self._within_s), self._gathering)
        except Exception as error:
            self.error = error
        if self._given_up:
            self.give_up()
        self._done()

    def give_up(self) -> None:
        """Nobody takes the line."""
        self._given_up = True
        if self.line is not None:
            self.line.close()


class StoreRelay:
    """Relays from `start` on.

    Args:
        way: to the store.
        together: joins reports of this node's workers.
        gather_s: how long the first of their reports waits for others.
    """

    def __init__(self, way: Direct, together: Together, gather_s: float = 0.0) -> None:
        self._way = way
        self._gathering = Gathering(together, gather_s)
        self._answer_s = patience_s(way)
        self._line: Line | None = None
        self._attempt: _Attempt | None = None
        self._look_elsewhere_at = time.monotonic() + ELSEWHERE_S
        self._hatches: dict[int, socket.socket] = {}
        self._locals: set[_Local] = set()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="resihp-store-relay", daemon=True)

    def start(self) -> None:
        """Begin, after all workers have been started."""
        self._thread.start()

    def add(self, worker: int, hatch: socket.socket) -> None:
        """A worker's hatch; belongs to this object from now on. From any thread."""
        self._order(lambda: self._open_hatch(worker, hatch))

    def cut(self, worker: int) -> None:
        """End a worker's connections: nothing that it asks is heard, once anything is that is asked after this call.
        From any thread."""
        self._order(lambda: self._cut(worker))

    def own_way(self) -> ByAgent:
        """The way of the agent's own threads."""

        def hand_over(given: socket.socket) -> None:
            if self._closing:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "it has ended")
            sock = given.dup()
            self._order(lambda: self._take_in(sock, None))

        return ByAgent(hand_over, self._way.leaders)

    def close(self, timeout_s: float) -> None:
        """End all connections."""
        self._closing = True
        self._wake()
        self._thread.join(timeout_s)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        self._wake()

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except OSError:
            # Full: it wakes up anyhow. Closed: it has ended.
            pass

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            for local in list(self._locals):
                self._drop(local)
            for worker in list(self._hatches):
                self._close_hatch(worker)
            while not self._orders.empty():
                self._orders.get()  # with connections that were handed over
            if self._attempt is not None:
                self._attempt.give_up()
            if self._line is not None:
                self._line.close()
            self._selector.close()
            self._waker.close()
            self._wakened.close()

    def _turn(self) -> None:
        ready = self._selector.select(self._until_next_s())
        if any(key.data is None for key, _ in ready):
            self._wakened.recv(READ_BYTES)  # before its reasons are looked at: later ones wake it again
        # First: whoever is cut off is not heard any more.
        while not self._orders.empty():
            self._orders.get()()
        for key, events in ready:
            self._look(key.data, events)
        self._expire(time.monotonic())

    def _until_next_s(self) -> float:
        until = [local.reach_by for local in self._locals if local.reach_by is not None]
        if self._line is not None and (deadline := self._line.next_deadline) is not None:
            until.append(deadline)
        return min(LOOK_S, *(max(each - time.monotonic(), 0.0) for each in until)) if until else LOOK_S

    def _look(self, source: object, events: int) -> None:
        if isinstance(source, _Local) and source in self._locals:
            self._serve(source)
        elif isinstance(source, Line) and source is self._line:
            self._hear(source, events)
        elif isinstance(source, int) and source in self._hatches:
            self._look_at_hatch(source)

    def _expire(self, now: float) -> None:
        line = self._line
        if line is not None:
            line.expire(now)
            if line.unanswered_since is not None and now - line.unanswered_since > self._answer_s:
                self._lose(line)
            else:
                self._watch(line)
        if self._way.leaders is not None and self._line is not None and now > self._look_elsewhere_at:
            self._find(LED_ATTEMPT_S)
        for local in [each for each in self._locals if each.reach_by is not None and each.reach_by <= now]:
            local.reach_by = None
            if self._line is not None:
                self._line.forget(local, now)
            self._answer(local, NOT_IN_TIME)

    # ---- workers

    def _open_hatch(self, worker: int, hatch: socket.socket) -> None:
        self._hatches[worker] = hatch
        self._gathering.workers = len(self._hatches)
        self._selector.register(hatch, selectors.EVENT_READ, worker)

    def _close_hatch(self, worker: int) -> None:
        hatch = self._hatches.pop(worker, None)
        self._gathering.workers = len(self._hatches)
        if hatch is not None:
            self._selector.unregister(hatch)
            hatch.close()

    def _look_at_hatch(self, worker: int) -> None:
        try:
            sock = take_at_hatch(self._hatches[worker])
        except BlockingIOError:
            return
        except OSError:
            self._close_hatch(worker)
            return
        if sock is not None:
            self._take_in(sock, worker)

    def _take_in(self, sock: socket.socket, worker: int | None) -> None:
        if worker is not None and sum(each.worker == worker for each in self._locals) >= MOST_CONNECTIONS:
            end(sock)
            return
        local = _Local(sock, worker)
        self._locals.add(local)
        self._selector.register(sock, selectors.EVENT_READ, local)

    def _cut(self, worker: int) -> None:
        self._close_hatch(worker)
        for local in [each for each in self._locals if each.worker == worker]:
            self._drop(local)

    def _serve(self, local: _Local) -> None:
        """Read from a worker, or send it the rest of an answer. The worker may have these ends, too, and have them
        block."""
        if local.unsent:
            self._send(local)
            return
        try:
            data = local.sock.recv(READ_BYTES, socket.MSG_DONTWAIT)
            for message in local.feed(data):
                self._take(local, read_request(message), time.monotonic())
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data = b""
        if not data:
            self._drop(local)

    def _take(self, local: _Local, request: Request, now: float) -> None:
        """Raises MalformedRequestError."""
        busy = local.unsent or local.reach_by is not None or (local.line is not None and local.line.asks(local))
        if busy or request.op in (Op.RELAY, Op.DROP) or (request.op is not Op.REACH and local.line is None):
            raise MalformedRequestError("a request that nobody may make here")
        if request.op is Op.REACH:
            local.reach_by = now + request.within_s
            self._reach(local, request.within_s, now)
        elif local.worker is not None and _is_told(request) and not speaks_for(local.worker, request.fields[1]):
            self._answer(local, NOT_ITS_OWN)
        elif local.line is not None:
            local.line.ask(local, request, now)
            self._watch(local.line)

    def _answer(self, local: _Local, reply: Reply) -> None:
        local.unsent += framed(write_reply(reply))
        self._send(local)

    def _send(self, local: _Local) -> None:
        try:
            del local.unsent[: local.sock.send(local.unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:
            # Reading will show that it is gone.
            local.unsent.clear()
        self._selector.modify(local.sock, selectors.EVENT_WRITE if local.unsent else selectors.EVENT_READ, local)

    def _drop(self, local: _Local) -> None:
        if self._line is not None:
            self._line.forget(local, time.monotonic())
        self._locals.discard(local)
        self._selector.unregister(local.sock)
        end(local.sock)

    # ---- node 0

    def _reach(self, local: _Local, within_s: float, now: float) -> None:
        """Find out whether the store can be reached, and where it is by now."""
        if self._line is not None and self._way.leaders is None:
            self._ask_whether_it_is_there(self._line, local, now)
        else:
            self._find(min(within_s, ATTEMPT_S if self._way.leaders is None else LED_ATTEMPT_S))

    def _find(self, within_s: float) -> None:
        """Open a line where the store is by now, unless there is one."""
        self._look_elsewhere_at = time.monotonic() + ELSEWHERE_S
        if self._attempt is None:
            there = None if self._line is None else self._line.address
            self._attempt = _Attempt(
                self._way, there, within_s, lambda: self._order(self._take_attempt), self._gathering
            )

    def _ask_whether_it_is_there(self, line: Line, local: _Local, now: float) -> None:
        line.ask(local, Request(Op.REACH), now)
        self._watch(line)

    def _take_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        if attempt.line is not None:
            if self._line is not None:
                self._lose(self._line)
            self._line = attempt.line
            self._selector.register(self._line, selectors.EVENT_READ, self._line)
        now = time.monotonic()
        for local in [each for each in self._locals if each.reach_by is not None]:
            if attempt.error is not None:
                self._tell_reached(local, unreachable(attempt.address, attempt.error))
            elif self._line is None:  # which was there when the attempt began
                self._tell_reached(local, NOT_IN_TIME)
            elif not self._line.asks(local):
                self._ask_whether_it_is_there(self._line, local, now)

    def _tell_reached(self, local: _Local, reply: Reply) -> None:
        if self._line is not None:
            self._line.forget(local, time.monotonic())
        local.reach_by = None
        self._answer(local, reply)

    def _hear(self, line: Line, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            line.send_rest()
        try:
            told = line.hear(time.monotonic())
        except (OSError, ValueError):
            self._lose(line)
            return
        for local, reply in told:
            assert isinstance(local, _Local)
            if local.reach_by is not None:
                local.reach_by, local.line = None, line
                reply = reached(line.address)
            self._answer(local, reply)
        self._watch(line)

    def _watch(self, line: Line) -> None:
        """Have the loop look at a line when there is something to do for it."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.has_unsent else 0)
        if self._selector.get_key(line).events != events:
            self._selector.modify(line, events, line)

    def _lose(self, line: Line) -> None:
        """End a line, and all connections that belong to it."""
        self._line = None
        for local in [each for each in self._locals if each.line is line or line.asks(each)]:
            self._drop(local)
        self._selector.unregister(line)
        line.close()


def _is_told(request: Request) -> bool:
    """Whether this is a message to the coordinator."""
    return request.op is Op.PUSH and request.fields[0] == keys.INBOX.encode()
