# SPDX-License-Identifier: Apache-2.0
"""What node 0 runs beside its own workers: the store, and the coordinator in a thread.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Set
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from megatron_resihp.control import exit_codes, keys
from megatron_resihp.control.coordination.actions import Limits
from megatron_resihp.control.coordination.coordinator import Coordinator
from megatron_resihp.control.coordination.decisions.recorded import UnrecordedError
from megatron_resihp.control.coordination.decisions.succession import Succession
from megatron_resihp.control.coordination.requests import Requests
from megatron_resihp.control.head.decision_logs import DecisionLogs
from megatron_resihp.control.head.detection import Detection
from megatron_resihp.control.head.logs.logbook import Logbook
from megatron_resihp.control.head.returning import Offers
from megatron_resihp.control.head.slurm import SlurmQuery
from megatron_resihp.control.head.stalls import FOLLOWED, StallWatch
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.node.mailbox import Ending, coordinator_lost
from megatron_resihp.control.replanning.by_choice.replanner import Replanner
from megatron_resihp.control.transport.access.secret import Secret
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.leadership import Leadership
from megatron_resihp.control.transport.node_liveness import Meeting, publish
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.client import CLONE_TIMEOUT_S, StoreClient, connect
from megatron_resihp.control.transport.store.server import StoreServer
from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.event import Event, stamped
from megatron_resihp.events.job import RunFinished, Stall
from megatron_resihp.protocol.messages import NodeLost
from megatron_resihp.protocol.published import END, JobEnd
from megatron_resihp.protocol.wire import COORDINATOR

FAILED_GRACE_S: Final = 5.0


class EventSink(Protocol):
    """Keeps or shows the run's events; `finish` is called once, when nothing more comes. `take_over` is called once
    another coordinator, which may live and has kept them in the same place, leads no more."""

    def follow(self, bus: EventBus) -> None: ...

    def take_over(self) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """What the coordinator is told at the start.

    Attributes:
        token: what this run alone has.
        secret: what its processes alone have.
        run_dir: shared by all nodes.
        before: what a coordinator has decided that was lost; None: the job begins.
        holds: whether the run directory is still this coordinator's.
        claim: makes it so, where there was a coordinator before; StoreError says why that can't be.
        is_followed: whether it is that of another coordinator which has taken over since then.
        connected: nodes that are connected, or may still come back; called in the coordinator's thread.
        is_logged: whether the log had an event when the coordinator before was lost.
    """

    size: JobSize
    command: list[str]
    limits: Limits
    token: str
    secret: Secret
    run_dir: Path
    before: Succession | None = None
    holds: Callable[[], bool] = lambda: True
    claim: Callable[[], None] = lambda: None
    is_followed: Callable[[], bool] = lambda: False
    connected: Callable[[], Set[int]] = frozenset
    is_logged: Callable[[Event], bool] = lambda event: False


class Headquarters:
    """Serves the store on `listener` and runs the coordinator until the job is over or `close` is called.

    Args:
        listener: bound to the port of `address`.
        bus: takes the run's events; closed at the end.
        requests: what others on node 0 want of the coordinator.
        meeting: where agents of other nodes connect; None where there are none.
        detection, replanner, logbook: ended at the end.
        on_end: told, in a thread of this object's, if the store can't be served, decisions can't be kept, or others
            can't be told that the coordinator has failed.
        leadership: in etcd, which keeps decisions, too; None: only the run directory does.
    """

    def __init__(
        self,
        address: Address,
        listener: socket.socket,
        bus: EventBus,
        requests: Requests,
        job: Job,
        meeting: Meeting | None,
        detection: Detection,
        replanner: Replanner,
        logbook: Logbook,
        on_end: Callable[[Ending], None],
        leadership: Leadership | None = None,
    ) -> None:
        self._address = address
        self._listener = listener
        self._bus = bus
        self._requests = requests
        self._job = job
        self._meeting = meeting
        self.detection = detection
        self._replanner = replanner
        self._logbook = logbook
        self._on_end = on_end
        self._leadership = leadership
        self._server: StoreServer | None = None
        self._connection: StoreClient | None = None
        self._stalls = StallWatch()
        for fact in () if job.before is None else job.before.facts:
            self._stalls.note(fact, time.monotonic())
        self._offers = Offers(job.run_dir, job.connected)
        bus.subscribe(lambda event: self._tell_stalls(self._stalls.note(event, time.monotonic())), *FOLLOWED)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resihp-coordinator", daemon=True)
        self._thread.start()

    def close(self, ending: Ending, timeout_s: float) -> None:
        """End the coordinator, which is told nothing more, and the store."""
        self._closing.set()
        if not ending.agreed:
            if self._connection is not None:
                self._connection.close()
            if self._job.holds():  # else another coordinator takes over, and knows the end
                self._bus.publish(RunFinished(time=time.time(), exit_code=ending.code, reason=ending.reason))
        self._replanner.close(timeout_s)
        self._thread.join(timeout_s)
        self.detection.close(timeout_s)
        self._logbook.close()
        self._bus.close()
        if self._server is not None:
            self._server.close()

    def _run(self) -> None:
        try:
            try:
                store = self._open()
            except StoreError as error:
                self._on_end(Ending(exit_codes.REFUSED, str(error)))
            else:
                self._lead(store)
        except BaseException as error:
            # Also where a handler has failed. Without a coordinator that is known to be lost, the job would hang.
            self._on_end(Ending(exit_codes.RETRY, _failed(error)))
            traceback.print_exc()

    def _lead(self, store: StoreClient) -> None:
        job = self._job
        try:
            if self._leadership is not None:
                self._leadership.keep(self._leave)
            before = None if job.before is None else job.before.decisions
            with closing(DecisionLogs(job.run_dir, self._leadership, self._closing, job.token, before)) as decisions:
                coordinator = self._coordinator(store, decisions)
                if job.before is not None:
                    # From here on the one before can decide nothing more. Only now may anybody find this one, and who
                    # comes back looks at nothing before the run's token is there.
                    coordinator.take_over()
                    job.claim()
                    store.set(keys.RUN, job.token)
                if self._leadership is not None:
                    self._leadership.keep(self._leave, job.is_followed)
                coordinator.run()
        except UnrecordedError as error:
            self._leave(error)
        except StoreError as error:
            if not self._closing.is_set():
                self._on_end(Ending(exit_codes.RETRY, f"the coordinator is cut off: {error}"))
        except Exception as error:
            self._end(store, _failed(error))
            traceback.print_exc()

    def _leave(self, why: Exception) -> None:
        """Decide nothing more. Workers find that the coordinator is gone, agree among themselves, save and end."""
        if not self._closing.is_set():
            self._on_end(coordinator_lost(why))
            assert self._server is not None
            self._server.close()

    def _end(self, store: StoreClient, reason: str) -> None:
        """In the place of a coordinator that has failed, again while survivors were to write what they hold."""
        code = exit_codes.RETRY
        self._bus.publish(RunFinished(time=time.time(), exit_code=code, reason=reason))
        try:
            store.set(keys.END, END.write(JobEnd(code, reason, FAILED_GRACE_S), COORDINATOR))
        except StoreError as error:
            self._on_end(Ending(code, f"{reason}; and {error}"))

    def _coordinator(self, store: StoreClient, decisions: DecisionLogs) -> Coordinator:
        job = self._job
        return Coordinator(
            store, self._bus.publish, job.size, job.command, job.limits,
            requests=self._requests, next_plan=self._replanner.next_plan,
            reopen=self._offers.offer, on_heard=self._look,
            write_log=self._logbook.take, ask_down=SlurmQuery(os.environ, job.size.nodes, self._requests.tell_down).ask,
            write_decision=decisions.write, shorten=decisions.shorten, run=job.token, before=job.before,
            on_told=self._stalls.told, is_logged=job.is_logged,
        )  # fmt: skip

    def _open(self) -> StoreClient:
        self._server = StoreServer(self._listener, self._job.secret, self._job.size.most_nodes)
        self._connection = connect(self._address, self._job.secret, CLONE_TIMEOUT_S)
        job, leadership = self._job, self._leadership
        term = leadership.token if leadership is not None and job.size.apart else None
        control = str(leadership.location) if leadership is not None and term is not None else None
        publish(self._connection, job.size, self._meeting, term, began=job.before is not None, control=control)
        if job.before is None:
            self._connection.set(keys.RUN, job.token)
        return self._connection

    def _look(self) -> None:
        """Only once all is heard: what has been said, and not heard yet, may be that an iteration is done, or that a
        node is lost which would then get two offers."""
        now = time.monotonic()
        self._tell_stalls(self._stalls.look(now))
        for node in self._offers.look(now):
            self._requests.tell_lost(NodeLost(node, "its launcher ended before it was connected", time.time()))

    def _tell_stalls(self, stalls: Iterable[Stall]) -> None:
        for stall in stalls:
            self._bus.publish(stamped(stall, time.time()))


def _failed(error: BaseException) -> str:
    return f"the coordinator failed: {type(error).__name__}: {error}"
