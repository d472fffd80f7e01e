# SPDX-License-Identifier: Apache-2.0
"""An agent's link to the coordinator. Its loop never waits on the network: threads do, each on its own connection.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final

from megatron_resihp.control import exit_codes, keys
from megatron_resihp.control.node.mailbox import BrokenEpoch, Drained, Ending, GivenUp, coordinator_lost
from megatron_resihp.control.slowness import Slowness
from megatron_resihp.control.transport.access.encryption import CertificateError
from megatron_resihp.control.transport.access.gate import OtherProtocolError, RefusedSecretError
from megatron_resihp.control.transport.liveness import LivenessConnection
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.client import StoreClient
from megatron_resihp.control.transport.store.lasting import LastingStore
from megatron_resihp.control.transport.store.reader import NoticeReader, Reader
from megatron_resihp.control.transport.store.store import Store
from megatron_resihp.protocol.messages import MESSAGES, Message
from megatron_resihp.protocol.notices import (
    DrainOrder,
    EpochIsBroken,
    JobEnds,
    NodeReleased,
    Notice,
    SlownessChanged,
    WorkersGivenUp,
)
from megatron_resihp.protocol.published import END

SLICE_S: Final = 1.0
"""Waiting for the end looks up this often whether it is still wanted."""

END_READ_S: Final = 10.0
NOTHING: Final = ""
"""A letter that only has the thread that posts look which coordinator leads."""
MOST_RETURNS: Final = 10
"""How often an agent tries to come back to a coordinator that has taken over, whose store answers."""
CUT_OFF: Final = coordinator_lost("it closed the liveness connection")
END_COMES_S: Final = 10.0
"""How long after word that the job ends its end comes. A coordinator does not wait for a node that it has given up."""
LEAVING_S: Final = 30.0
"""How long the workers of a node that leaves have to exit by themselves, once nothing needs them."""


class Link:
    """Posts to the coordinator and hears when the job is over.

    Args:
        connect: opens a connection to the store, waiting for it; StoreError if it does not come.
        introduce: run first on the connection that then waits for the end; StoreError refuses the link. The liveness
            connection that it returns is held as long as the link. It is given what is to be called once that is lost,
            and whether the agent comes back from a coordinator that was lost.
        on_end: told, in a thread of the link, how the workers are to end.
        on_slowness: told, in another, what fault injections have slowed, where agents have to do it.
        on_letter: told, in that one too, that an epoch is broken, which workers the coordinator has given up, and whose
            nodes are to leave.
        name: that no other agent of this run has, nor has had: the id of its first worker.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        introduce: Callable[[Store, Callable[[], None], bool], LivenessConnection | None],
        on_end: Callable[[Ending], None],
        on_slowness: Callable[[Slowness], None],
        on_letter: Callable[[GivenUp | Drained | BrokenEpoch], None] = lambda letter: None,
        name: int = 0,
    ) -> None:
        self.name = name
        self._connect = connect
        self._introduce = introduce
        self._on_end = on_end
        self._on_slowness = on_slowness
        self._on_letter = on_letter
        self._letterhead, self._posted = f"agent {name}.{secrets.token_hex(4)}", 0
        self._letters: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._sent: list[str] = []
        """Where another coordinator may come, which folds what it knows of once."""
        self._liveness: LivenessConnection | None = None
        self._cut_off = False
        self._closed = False
        self._term: int | None = None
        """Of the coordinator that this agent has introduced itself to."""
        self._failed = 0
        self._belongs = False
        self._over: Ending | None = None
        """How the job ends, once that was said."""
        self._has_end = threading.Event()
        self._introduced = threading.Event()
        self._threads = [
            threading.Thread(target=self._hear, name="resihp-end", daemon=True),
            threading.Thread(target=self._post, name="resihp-post", daemon=True),
            threading.Thread(target=self._listen, name="resihp-agent-notices", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_led(self) -> bool:
        """Whether the coordinator holds this agent for alive, as far as is known here."""
        return not self._cut_off

    def post(self, message: Message) -> None:
        """Send a message to the coordinator, soon and in order."""
        self._posted += 1
        self._letters.put(MESSAGES.write(message, f"agent {self.name}", f"{self._letterhead}.{self._posted}"))

    def close(self, timeout_s: float) -> None:
        """Send what is waiting and let go of the store."""
        self._closed = True
        self._introduced.set()
        self._has_end.set()
        self._letters.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if self._liveness is not None:
            self._liveness.close()

    def _post(self) -> None:
        try:
            store = self._connect()
            if isinstance(store, LastingStore):
                store.follow(self._send_again)
            # An agent that is refused says nothing: its workers' ids may be those of others.
            self._introduced.wait()
            while self._belongs and (letter := self._letters.get()) is not None:
                if isinstance(store, LastingStore) and self._term is not None:
                    store.leave(self._term)
                    self._sent.append(letter)
                if letter != NOTHING:
                    store.push(keys.INBOX, letter)
        except Exception as error:
            self._lost(error)

    def _send_again(self, successor: StoreClient) -> None:
        for letter in filter(None, self._sent):
            successor.push(keys.INBOX, letter)

    def _hear(self) -> None:
        try:
            if (store := self._join()) is not None:
                self._await_end(store)
        except Exception as error:
            self._lost(error)

    def _join(self) -> Store | None:
        """Connect and introduce this agent; None: it ends, as it is refused, or the coordinator is lost."""
        store: Store | None = None
        try:
            store = self._connect()
            self._term = store.term if isinstance(store, LastingStore) else None
            self._liveness = self._introduce(store, self._on_cut_off(store), False)
        except (StoreError, TimeoutError) as error:
            refused = isinstance(error, RefusedSecretError | OtherProtocolError | CertificateError)
            refused = refused or (store is not None and self._still_there(store))
            self._on_end(Ending(exit_codes.REFUSED, str(error)) if refused else coordinator_lost(error))
            return None
        self._belongs = True
        self._introduced.set()
        return store

    def _await_end(self, store: Store) -> None:
        ends, seen = Reader(END, f"agent {self.name}", "a malformed end of the job"), ""
        while not self._closed:
            if isinstance(store, LastingStore):
                self._come_back(store)
            if store.wait(keys.END, SLICE_S):
                text = store.get(keys.END, END_READ_S)
                end = None if text == seen else ends.read(text)
                if end is None:
                    # The coordinator puts its own in that place when the job is over.
                    seen = text
                    time.sleep(SLICE_S)
                    continue
                members = None if end.members is None else frozenset(end.members)
                self._has_end.set()
                self._on_end(Ending(end.code, end.reason, end.grace_s, True, members, end.terminate_s))
                return

    def _still_there(self, store: Store) -> bool:
        """Whether the coordinator is, so that an error which it has led to would come again."""
        try:
            store.check(keys.RUN)
        except StoreError:
            return False
        return not isinstance(store, LastingStore) or store.term == self._term

    def _on_cut_off(self, store: Store) -> Callable[[], None]:
        """What is done where the liveness connection is lost."""
        if isinstance(store, LastingStore) and store.term is not None:
            return self._mark_cut_off
        return lambda: self._on_end(CUT_OFF)

    def _mark_cut_off(self) -> None:
        self._cut_off = True

    def _come_back(self, store: LastingStore) -> None:
        """Find out whether another coordinator has taken over; who is cut off from one that still leads must end.

        Raises:
            StoreError: no coordinator is there, or this one has given the agent up.
        """
        was_cut_off = self._cut_off
        if was_cut_off:
            store.check(keys.RUN)  # which asks the one that leads now
            if not self._is_replaced(store):
                # One that is ending may have closed this connection a moment before its store.
                time.sleep(SLICE_S)
                store.check(keys.RUN)
        if not self._is_replaced(store):
            if was_cut_off:
                raise StoreError("it closed the liveness connection")
            return
        term = store.term
        if self._liveness is not None:
            self._liveness.close()
        self._cut_off = False
        try:
            # Not at a later one's, which would take the end of this connection for the node's.
            self._liveness = self._introduce(store.connected, self._mark_cut_off, True)
        except (StoreError, TimeoutError):
            # That one may be lost, too, by now.
            self._cut_off, self._failed = True, self._failed + 1
            if self._failed > MOST_RETURNS:
                raise
            time.sleep(SLICE_S)
            return
        self._term, self._failed = term, 0
        self._letters.put(NOTHING)

    def _is_replaced(self, store: LastingStore) -> bool:
        """Whether the store that was last asked is that of another coordinator than this agent's."""
        return store.term is not None and self._term is not None and store.term != self._term

    def _listen(self) -> None:
        try:
            store = self._connect()
            notices = NoticeReader(store, f"agent {self.name}", END_READ_S)
            if isinstance(store, LastingStore):
                store.follow(lambda successor: notices.begin_again())
            while not self._closed:
                notice = notices.next(SLICE_S)
                if notice is not None:
                    self._act_on(notice)
                if isinstance(notice, JobEnds):
                    self._over = Ending(notice.code, notice.reason, LEAVING_S, True)
                    if not self._has_end.wait(END_COMES_S):
                        self._on_end(self._over)
                    return
        except Exception as error:
            self._lost(error)

    def _act_on(self, notice: Notice) -> None:
        match notice:
            case SlownessChanged(by_agents=True):
                self._on_slowness(Slowness.of(notice))
            case EpochIsBroken(epoch):
                self._on_letter(BrokenEpoch(epoch))
            case WorkersGivenUp(workers, _, for_good):
                self._on_letter(GivenUp(frozenset(workers), for_good))
            case DrainOrder(workers):
                self._on_letter(Drained(frozenset(workers)))
            case NodeReleased(agent, workers) if agent == self.name:
                reason = "this node has left the job, which goes on"
                self._on_end(Ending(exit_codes.FINISHED, reason, LEAVING_S, members=frozenset(workers)))

    def _lost(self, error: Exception) -> None:
        """Whatever has ended a thread: this agent would not hear of the job's end, or not be heard, any more."""
        if self._closed:
            return
        expected = isinstance(error, StoreError | TimeoutError)
        self._on_end(self._over or coordinator_lost(error if expected else f"{type(error).__name__}: {error}"))
        if self._liveness is not None:
            # Should it be there after all, it gives this node's workers up, which then hear it and end.
            self._liveness.close()
        if not expected:
            traceback.print_exception(error)
