# SPDX-License-Identifier: Apache-2.0
"""A worker's side of the control plane: what it tells the coordinator, and waits for.

May import `plan`, `protocol`, `events` and this package's other modules.
"""

import time
from collections.abc import Callable
from typing import Final

from megatron_resihp.control import exit_codes, keys
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.store.store import Store
from megatron_resihp.control.worker.behind import Behind
from megatron_resihp.control.worker.channel import Channel
from megatron_resihp.control.worker.doors import Doors
from megatron_resihp.control.worker.errors import EpochBroken, JobEnded, UnreachableError
from megatron_resihp.control.worker.heard import Heard, Listener
from megatron_resihp.events.codec import plain
from megatron_resihp.events.event import Event
from megatron_resihp.plan import ParallelPlan, Shard
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.messages import (
    CommunicationFailed,
    EventsReported,
    FirstStepFailed,
    JoinRequest,
    Message,
    Ready,
    SurvivorReport,
)
from megatron_resihp.protocol.published import DECISIONS, GO, Decision, EpochPlan
from megatron_resihp.protocol.records import Record, Times

SLICE_S: Final = 0.1
"""Bounded waits look up this often whether what they wait for can still come."""


class WorkerControl:
    """Connects one worker to the coordinator.

    Args:
        store: a connection of its own; the listening thread clones another.
        worker: this worker's id.
        on_broken, epoch: as of `Heard`.
        door: at which others find out whether they can reach this worker; None: there is none.
        node_of: tells a worker's node.

    Attributes:
        heard: what the coordinator has said.
        channel: how to talk to it.
        doors: which other workers can be reached.
        members: of the plan of this worker's epoch.
        peer_ports: at which the members' gloo groups listen.
    """

    def __init__(
        self, store: Store, worker: int, on_broken: Callable[[], None], epoch: int = 0, door: Address | None = None,
        node_of: Callable[[int], int] = lambda worker: worker,
    ) -> None:  # fmt: skip
        self.worker = worker
        self.members: tuple[int, ...] = ()
        self.peer_ports: set[int] = set()
        self.heard = Heard(worker, on_broken, epoch)
        self.channel = Channel(store, worker, self.heard.lose)
        if door is not None:
            store.set(f"{keys.KNOCK_AT}{worker}", str(door))
            self.channel.stand({f"{keys.KNOCK_AT}{worker}": str(door)})
        self.doors = Doors(self.channel, worker, node_of)
        self._unreachable: list[int] = []
        self._telling = Behind("resihp-telling")
        self._listener = Listener(store.clone(), worker, self.heard, self.channel.leave)

    @property
    def epoch(self) -> int:
        return self.heard.epoch

    def tell(self, message: Message) -> None:
        """Send a message to the coordinator, after all events.

        Raises:
            JobEnded: it is gone.
        """
        self.settle_events()
        self.channel.tell(message)

    def event(self, *events: Event) -> None:
        """Write events to the run's log, all at once."""
        self.tell(self._reported(*events))

    def event_behind(self, *events: Event) -> None:
        """Have events written while training goes on."""
        message = self._reported(*events)
        self._telling.begin(lambda: self.channel.tell(message))

    def settle_events(self) -> None:
        """Wait until all events have been received.

        Raises:
            JobEnded: the coordinator is gone.
        """
        self._telling.settle()

    def _reported(self, *events: Event) -> EventsReported:
        now = time.time()
        return EventsReported(self.worker, tuple(plain(event, now, self.epoch, self.worker) for event in events))

    # ---- errors

    def suspect(self, error: BaseException, timeout_s: float) -> None:
        """Report a communication error and wait until the control plane has marked the epoch as broken.

        The agent, which lives as long as this worker, ends the wait if it loses the coordinator; one that is stopped
        with node 0 goes on some time.

        Raises:
            JobEnded: as of `Heard.await_answer`.
        """
        self._report(CommunicationFailed(self.worker, self.epoch, _first_line(error)), timeout_s)

    def blame_plan(self, error: BaseException, timeout_s: float) -> None:
        """Report that the first step under a plan on trial has failed, and wait as in `suspect`; raises the same."""
        name = type(error).__name__
        said = _first_line(error)
        told = said if said == name else f"{name}: {said}"
        self._report(FirstStepFailed(self.worker, self.epoch, told), timeout_s)

    def _report(self, failure: CommunicationFailed | FirstStepFailed, timeout_s: float) -> None:
        if not self.heard.broken():
            self.tell(failure)
        self.heard.await_answer(timeout_s)

    # ---- plans

    def first_plan(self) -> ParallelPlan:
        """Wait for the plan of epoch 0."""
        decision = DECISIONS.read(self._await(keys.plan_key(0), self.heard.check)).body
        assert isinstance(decision, EpochPlan), "nothing is held yet that could be saved"
        self.members = decision.plan.members
        return decision.plan

    def join(self, job: JobDescription) -> Decision:
        """Ask for a place in a plan, for a worker that was started anew, and wait for one.

        Args:
            job: what this worker's arguments say of the job; the worker is dismissed if that is another job.

        Raises:
            JobEnded: there is no place any more.
        """
        self.tell(JoinRequest(self.worker, job))
        return self._enter(self.heard.await_call())

    def report(self, record: Record, held: tuple[Shard, ...], times: Times | None = None) -> Decision:
        """Report how far this worker got in the epoch and what it holds, and wait for what comes next.

        Args:
            times: at the start of the iterations that its record has counters of, if it knows them.

        Raises:
            JobEnded: nothing comes next, or this worker was given up for dead.
        """
        self.heard.stay()
        self._unreachable = self.doors.cut_off(self.members) if self.epoch in self.heard.to_probe else []
        self.tell(SurvivorReport(self.worker, self.epoch, record, held, tuple(self._unreachable), times or {}))
        return self._enter(self.epoch + 1)

    def _enter(self, epoch: int) -> Decision:
        decision = DECISIONS.read(self._await(keys.plan_key(epoch), self.heard.check_job)).body
        if isinstance(decision, EpochPlan):
            if self.worker in decision.leaving:
                raise JobEnded(0, "it was told to leave")
            if self.worker not in decision.plan.members:
                raise JobEnded(exit_codes.FENCED, "this worker was declared dead and is fenced")
            self.members = decision.plan.members
        self.heard.epoch = epoch
        self.channel.heard_of_all()
        return decision

    def check_reach(self, plan: ParallelPlan) -> None:
        """Look once more for workers that could not be reached: building groups with them would take minutes to fail.

        Raises:
            UnreachableError: one of them still can't be reached.
        """
        silent = self.doors.cut_off(worker for worker in self._unreachable if worker in plan.members)
        if silent:
            raise UnreachableError(f"rendezvous: worker {silent[0]} can't be reached")

    def ready(
        self, digests: dict[str, str], bytes_received: int, steps_redone: int, ports: list[int],
        keeps_copies: bool = True,
    ) -> None:  # fmt: skip
        """Report that this worker is ready for the epoch and wait until all are; then `peer_ports` is known.

        Args:
            digests: of the state that this worker holds, which others that report the same key must agree on; see
                `control.coordination.digests` for keys.
            bytes_received: of state, from other holders.
            steps_redone: iterations that are computed again.
            ports: at which this worker's gloo groups listen.
            keeps_copies: of experts, if the plan asks for any.

        Raises:
            EpochBroken, JobEnded: a worker died or state differed meanwhile.
        """
        self.tell(Ready(self.worker, self.epoch, digests, tuple(ports), bytes_received, steps_redone, keeps_copies))
        self.peer_ports = set(GO.read(self._await_go()).body.ports)
        self.channel.heard_of_all()

    def _await_go(self) -> str:
        """Wait for Go, which holds for all members or for none: others may have given up what they held before."""
        key = keys.go_key(self.epoch)
        try:
            return self._await(key, self.heard.check)
        except EpochBroken:
            # The coordinator says neither go after this nor that the epoch was broken before it.
            go = self.channel.published(key)
            if go is None:
                raise
            return go

    def _await(self, key: str, check: Callable[[], None]) -> str:
        while True:
            check()
            text = self.channel.published(key, SLICE_S)
            if text is not None:
                return text


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
