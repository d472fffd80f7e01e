# SPDX-License-Identifier: Apache-2.0
"""`resihp coordinator --standby`: waits until a job's coordinator is lost, and then takes its seat.

It is lost once it holds the job's key in etcd no more. What it has decided is in the log there.
May import: the standard library and this package's modules. Where events go is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Final

from megatron_resihp.control.commands.contact import FILE_NAME, Contact, read_contact
from megatron_resihp.control.commands.launch.claim import TOUCH_S, age, modified
from megatron_resihp.control.commands.launch.launch_options import LaunchError, LaunchOptions
from megatron_resihp.control.commands.launch.run_directory import make_run_dir, unwritable
from megatron_resihp.control.commands.launch.seat import MakeEventSink, Seat, forget_result, make_sink
from megatron_resihp.control.coordination.actions import End
from megatron_resihp.control.coordination.decisions.reading import NotBegunError, UnusableError
from megatron_resihp.control.coordination.decisions.replay import DifferenceError
from megatron_resihp.control.coordination.decisions.succession import Succession, succession
from megatron_resihp.control.head.etcd_log import decisions_from
from megatron_resihp.control.head.headquarters import EventSink
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.terminal import say
from megatron_resihp.control.transport.access.encryption import PREFIX
from megatron_resihp.control.transport.access.secret import find_secret, given_certificates, published_secret
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.gateway import EtcdError, Gateway, LeaseLostError, UnreachableError
from megatron_resihp.control.transport.etcd.leadership import DeposedError, Leadership
from megatron_resihp.control.transport.etcd.presence import Gone, NodeLeases, lease_holders
from megatron_resihp.control.transport.leaders import LEADERLESS_S
from megatron_resihp.control.transport.sockets import StoreError, reserve

LOOK_S: Final = 0.5
"""How often it is looked for the leader's key."""
SILENT_S: Final = 2 * TOUCH_S
"""A coordinator that has not touched its file for so long doesn't live, or has lost the run directory."""


class _NotKnownError(Exception):
    """It can't be known yet whether processes of the job wait for another coordinator."""


_Found = tuple[Leadership, Succession, Gone]
"""What a coordinator leads with, what was decided before, and what tells which nodes were lost, too."""
AGAIN: Final = (DeposedError, UnreachableError, LeaseLostError, _NotKnownError)
"""Another standby was faster, or nothing can be decided by any coordinator: a later look may find otherwise."""


class JobIsOver(Exception):
    """There is no job to take over any more.

    Attributes:
        code: that the job has ended with.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def take_over(options: LaunchOptions, make_event_sink: MakeEventSink, stack: ExitStack) -> Seat:
    """Wait, and claim what the coordinator needs. `stack`: holds what is claimed.

    Raises:
        LaunchError: that can't be.
        JobIsOver: the job has ended meanwhile, and all its nodes know that.
    """
    assert options.control is not None and options.coordinator is not None
    try:
        encrypted = given_certificates() is not None  # not only when it takes over
    except StoreError as error:
        raise LaunchError(str(error)) from error
    run_dir, host = make_run_dir(options), options.coordinator.host
    try:
        listener = stack.enter_context(reserve(*options.coordinator))
        liveness, records = (stack.enter_context(reserve(host, 0)) for _ in range(2))
    except StoreError as error:
        raise LaunchError(f"{error}; check --listen") from error
    try:
        with closing(Gateway(options.control)) as gateway:
            wait = _Wait(gateway, run_dir, options.size, options.connect_timeout_s, encrypted)
            leadership, before, gone = wait.take_over()
        stack.enter_context(closing(leadership))
        address = Address(host, listener.getsockname()[1])
        contact = Contact(address, before.run, apart=True, replaceable=True, encrypted=encrypted)
        holds = contact.hold(run_dir)
        claim = stack.enter_context(contact.taken_over(run_dir, holds))
        own = stack.enter_context(published_secret(run_dir, holds, find_secret(run_dir)))
        leases = stack.enter_context(closing(NodeLeases(options.control, before.run, gone, LEADERLESS_S)))
    except OSError as error:
        raise unwritable(run_dir, error) from error
    except StoreError as error:
        raise LaunchError(str(error)) from error
    except EtcdError as error:
        raise LaunchError(f"{error}; check --control") from error
    sink = make_sink(make_event_sink, run_dir)
    return Seat(
        own, contact.store, run_dir, before.state.job.size, range(0), False, listener, liveness, records, sink,
        contact.token, leadership, before=before, holds=holds, claim=partial(_claim, run_dir, claim, sink),
        gone=leases.gone,
    )  # fmt: skip


def _claim(run_dir: Path, claim: Callable[[], None], sink: EventSink) -> None:
    """Have the run directory. Its job ends here, whatever a coordinator that was cut off from it has said."""
    try:
        claim()
        forget_result(run_dir)
    except OSError as error:
        raise StoreError(str(unwritable(run_dir, error))) from error
    sink.take_over()


class _Wait:
    """Until a coordinator is lost in whose place another is waited for.

    It is not if the log in etcd is that of an earlier job of which no process may live any more: then the coordinator
    of this one's job is still to come.

    Args:
        gateway: to where the job's decisions are kept.
        patience_s: how long no coordinator may lead.
        encrypted: whether this one has certificates.
    """

    def __init__(self, gateway: Gateway, run_dir: Path, size: JobSize, patience_s: float, encrypted: bool) -> None:
        self._gateway, self._control = gateway, gateway.location
        self._run_dir, self._size, self._patience_s = run_dir, size, patience_s
        self._encrypted = encrypted
        self._followed: str | None = None
        """The run whose coordinator has been seen to lead."""
        self._passed_over: tuple[str | None, str | None] | None = None
        """A run, and the last entry of the log, by which it is known that there is nothing to take over."""
        self._until = time.monotonic() + patience_s
        self._barred: tuple[str, float] | None = None
        """The run whose coordinator this one can't follow, and when its file had been touched as it was first seen."""
        self._said = ""

    def take_over(self) -> _Found:
        """Lead, once that one is lost, and know what was decided until then.

        Raises:
            EtcdError: etcd can't be used.
            LaunchError: what was decided can't be gone on with, or no coordinator has come.
            JobIsOver: the job has ended, and nobody waits to be told so.
        """
        self._gateway.check_version()
        while True:
            try:
                if (found := self._look()) is not None:
                    return found
            except AGAIN:
                pass
            time.sleep(LOOK_S)

    def _look(self) -> _Found | None:
        run = self._named()
        if self._gateway.get(self._control.leader) is not None:
            self._check_followable()
            self._followed = run or self._followed
            self._until = time.monotonic() + self._patience_s
            self._say(f"waits until the coordinator of {self._control} is lost")
            return None
        wanted = run or self._followed
        if wanted is not None and (wanted == self._followed or self._is_awaited(wanted)):
            read = (wanted, self._gateway.last(*self._control.entries))
            if read != self._passed_over:
                if (found := self._succeed(wanted)) is not None:
                    return found
                self._passed_over = read
        if time.monotonic() > self._until:
            mend = "check --control and --run-dir, or give a longer --connect-timeout"
            raise LaunchError(f"no coordinator of {self._control} has come within {self._patience_s:g} s; {mend}")
        self._say(f"no coordinator of {self._control} leads or is lost; waits for one, {self._patience_s:g} s at most")
        return None

    def _check_followable(self) -> None:
        """Raises LaunchError: this one can't take the place of the coordinator that leads.

        A job that was killed leaves its file behind, and its lease for a while. So the file has to be touched first.
        """
        try:
            contact = read_contact(self._run_dir)
            why = self._why_barred(contact)
            touched_at = modified(self._run_dir / FILE_NAME) if why else None
        except (StoreError, OSError):
            return  # a file system that is away comes back
        if touched_at is None:
            return
        if self._barred is None or self._barred[0] != contact.token:
            self._barred = contact.token, touched_at
        elif touched_at != self._barred[1]:
            raise LaunchError(why)

    def _why_barred(self, contact: Contact) -> str:
        """Why this one can't take the place of a coordinator; empty: it can."""
        job = f"the job in {self._run_dir}"
        if not contact.apart:
            mend = "launch node 0 without --control, and give that to a resihp coordinator"
            return f"no coordinator can follow that of {job}, which is in node 0's launch; {mend}"
        if contact.encrypted and not self._encrypted:
            return f"{job} encrypts its connections; give the standby certificates, too ({PREFIX}CACERT, _CERT, _KEY)"
        if self._encrypted and not contact.encrypted:
            return f"{job} does not encrypt its connections; start the standby without {PREFIX}CACERT, _CERT and _KEY"
        return ""

    def _say(self, what: str) -> None:
        if self._said != what:
            self._said = what
            say(f"resihp: {what}")

    def _named(self) -> str | None:
        """The run of the coordinator that has the run directory, or had it when it was lost."""
        try:
            return read_contact(self._run_dir).token
        except StoreError:
            return None

    def _is_awaited(self, run: str) -> bool | None:
        """Whether processes of this run may wait for another coordinator; None: that can't be known yet."""
        known, present = lease_holders(self._gateway, run)
        if present or known >= frozenset(range(self._size.nodes)):
            return bool(present)
        # Nodes that can't reach etcd hold no leases.
        try:
            silent_s = age(self._run_dir / FILE_NAME)
        except OSError:
            return None
        if silent_s is None or silent_s >= LEADERLESS_S:
            return False
        return True if silent_s > SILENT_S else None

    def _succeed(self, run: str) -> _Found | None:
        """Lead this run, and find out what was decided; None: another run is the last one.

        Raises:
            DeposedError: another has led meanwhile, and may have decided more.
            JobIsOver, _NotKnownError.
        """
        with ExitStack() as stack:
            leadership = stack.enter_context(closing(Leadership(self._control)))
            # To fold a long log may take longer than the lease.
            leadership.keep(lambda error: None)
            token = leadership.token
            # In that time most nodes may register again, and then it isn't seen any more that all were cut off.
            led_at, (known, present) = time.monotonic(), lease_holders(self._gateway, run)
            before = _decided(self._gateway, run, self._size)
            held = self._gateway.get(self._control.leader)
            if held is None or held.created != token:
                raise DeposedError(f"another has led {self._control} meanwhile")
            if before is None:
                return None
            if before.end is not None:
                self._check_waited_for(before.run, before.end)
            stack.pop_all()
            gone = Gone(before.awaited, time.monotonic())
            gone.among(known - present, led_at)
            return leadership, before, gone

    def _check_waited_for(self, run: str, end: End) -> None:
        """A coordinator may have been lost between its decision that the job ends and telling so.

        Raises:
            JobIsOver: nobody waits for that.
            _NotKnownError.
        """
        # A leader removes its file once all nodes know.
        awaited = self._named() == run and self._is_awaited(run)
        if awaited is None:
            raise _NotKnownError
        if not awaited:
            raise JobIsOver(end.code, f"the job has ended with exit code {end.code}: {end.reason}")


def _decided(gateway: Gateway, run: str, size: JobSize) -> Succession | None:
    """What the coordinators of this run have decided; None: the last run is another one.

    Raises:
        EtcdError: etcd doesn't tell it.
        LaunchError: that can't be gone on with.
    """
    try:
        decisions = decisions_from(gateway)
        if decisions.began.run != run:
            return None
        before = succession(decisions)
    except NotBegunError:
        return None
    except (UnusableError, DifferenceError) as error:
        raise LaunchError(f"{error}; the job can't be taken over") from error
    if decisions.problem:
        raise LaunchError(f"{decisions.problem}; the job can't be taken over")
    if decisions.began.size != size:
        raise LaunchError(f"the job has {decisions.began.size}; give the standby the same")
    return before
