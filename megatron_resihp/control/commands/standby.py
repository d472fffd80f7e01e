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

from megatron_resihp.control import exit_codes
from megatron_resihp.control.commands.claim import Hold
from megatron_resihp.control.commands.contact import Contact
from megatron_resihp.control.commands.launch_options import LaunchError, LaunchOptions
from megatron_resihp.control.commands.run_directory import make_run_dir, unwritable
from megatron_resihp.control.commands.seat import RESULT, MakeEventSink, Seat, make_sink
from megatron_resihp.control.coordination.actions import Phase
from megatron_resihp.control.coordination.decisions.reading import UnusableError
from megatron_resihp.control.coordination.decisions.replay import DifferenceError
from megatron_resihp.control.coordination.decisions.succession import TAKEN_OVER_IN, Succession, succession
from megatron_resihp.control.head.etcd_log import decisions_from
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.terminal import say
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.gateway import EtcdError, Gateway, LeaseLostError, UnreachableError
from megatron_resihp.control.transport.etcd.leadership import DeposedError, Leadership
from megatron_resihp.control.transport.etcd.location import Location
from megatron_resihp.control.transport.etcd.presence import NodeLeases
from megatron_resihp.control.transport.leaders import LEADERLESS_S
from megatron_resihp.control.transport.secret import find_secret, published_secret
from megatron_resihp.control.transport.store import StoreError, reserve

LOOK_S: Final = 0.5
"""How often it is looked for the leader's key."""
AGAIN: Final = (DeposedError, UnreachableError, LeaseLostError)
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
        JobIsOver: the job has ended meanwhile.
    """
    assert options.control is not None and options.coordinator is not None
    run_dir, host = make_run_dir(options), options.coordinator.host
    try:
        listener = stack.enter_context(reserve(*options.coordinator))
        liveness, records = (stack.enter_context(reserve(host, 0)) for _ in range(2))
    except StoreError as error:
        raise LaunchError(f"{error}; check --listen") from error
    try:
        leadership, before = _follow(options.control, options.size)
        stack.enter_context(closing(leadership))
        contact = Contact(Address(host, listener.getsockname()[1]), before.run, apart=True, replaceable=True)
        holds = Hold(partial(contact.holds, run_dir))
        claim = stack.enter_context(contact.taken_over(run_dir, holds))
        own = stack.enter_context(published_secret(run_dir, holds, find_secret(run_dir)))
        leases = stack.enter_context(closing(NodeLeases(options.control, before.run, LEADERLESS_S)))
    except OSError as error:
        raise unwritable(run_dir, error) from error
    except StoreError as error:
        raise LaunchError(str(error)) from error
    except EtcdError as error:
        raise LaunchError(f"{error}; check --control") from error
    sink = make_sink(make_event_sink, run_dir)
    return Seat(
        own, contact.store, run_dir, before.state.job.size, range(0), False, listener, liveness, records, sink,
        contact.token, leadership, before=before, holds=holds, claim=partial(_claim, run_dir, claim), gone=leases.gone,
    )  # fmt: skip


def _claim(run_dir: Path, claim: Callable[[], None]) -> None:
    """Have the run directory. Its job has not ended, whatever a coordinator that was cut off from it has said."""
    try:
        claim()
        (run_dir / RESULT).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(str(unwritable(run_dir, error))) from error


def _follow(control: Location, size: JobSize) -> tuple[Leadership, Succession]:
    """Lead, once no other does, and know what was decided until then.

    Raises:
        EtcdError: etcd can't be used.
        LaunchError, JobIsOver: as of `_decided`.
    """
    say(f"resihp: waits until the coordinator of {control} is lost")
    with closing(Gateway(control)) as gateway:
        gateway.check_version()
        while True:
            try:
                if gateway.get(control.leader) is None and (found := _succeed(gateway, size)) is not None:
                    return found
            except AGAIN:
                pass
            time.sleep(LOOK_S)


def _succeed(gateway: Gateway, size: JobSize) -> tuple[Leadership, Succession] | None:
    """Lead, and find out what was decided; None: another has led meanwhile, and may have decided more."""
    with ExitStack() as stack:
        leadership = stack.enter_context(closing(Leadership(gateway.location)))
        # To fold a long log may take longer than the lease.
        leadership.keep(lambda error: None)
        token = leadership.token
        before = _decided(gateway, size)
        held = gateway.get(gateway.location.leader)
        if held is None or held.created != token:
            return None
        stack.pop_all()
        return leadership, before


def _decided(gateway: Gateway, size: JobSize) -> Succession:
    """What the coordinator before has decided.

    Raises:
        EtcdError: etcd doesn't tell it.
        LaunchError: that can't be gone on with.
        JobIsOver: the job has ended, or can't be taken over any more.
    """
    try:
        decisions = decisions_from(gateway)
        before = succession(decisions)
    except (UnusableError, DifferenceError) as error:
        raise LaunchError(f"{error}; the job can't be taken over") from error
    if decisions.problem:
        raise LaunchError(f"{decisions.problem}; the job can't be taken over")
    if decisions.began.size != size:
        raise LaunchError(f"the job has {decisions.began.size}; give the standby the same")
    if before.end is not None:
        raise JobIsOver(before.end.code, f"the job has ended with exit code {before.end.code}: {before.end.reason}")
    if before.state.phase not in TAKEN_OVER_IN:
        was = "it had begun to train" if before.state.phase is Phase.STARTING else "survivors had saved what they hold"
        raise JobIsOver(exit_codes.RETRY, f"the coordinator was lost before {was}: there is nothing to take over")
    return before
