# SPDX-License-Identifier: Apache-2.0
"""Nodes in etcd: each holds a key that goes with its lease, so that a coordinator that takes over knows which are gone.

Otherwise it would have to wait for all of them: one that was lost together with the coordinator before would be missed
only much later. A node that can't reach etcd is waited for. May import: the standard library, `terminal` and this
package's modules.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Set
from typing import Final

from megatron_resihp.control.terminal import warn
from megatron_resihp.control.transport.etcd.access import access_of
from megatron_resihp.control.transport.etcd.gateway import EtcdError, Gateway, LeaseLostError, Put
from megatron_resihp.control.transport.etcd.leadership import RENEWALS, RETRY_S
from megatron_resihp.control.transport.etcd.location import Location, parse_location

LOOK_S: Final = 0.5
SETTLE_S: Final = 1.5
"""After a takeover, how long a node whose lease has lapsed is waited for."""
RETURN_S: Final = 15.0
"""How long a node may take to hold a lease again once etcd is in its reach: a request that was under way asks three
members for two seconds each, and so may the one after it, which is answered that the lease has lapsed."""


class Presence:
    """This node's key, from `begin` until `close`."""

    def __init__(self, node: int, name: int) -> None:
        """`name`: what no other agent of this run has been called."""
        self._node, self._name = node, name
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, control: str, run: str) -> None:
        """Hold it, in a thread of its own.

        Args:
            control: where in etcd the coordinator keeps decisions. This node's environment says how it is let in there.
            run: the run's token.
        """
        try:
            gateway = Gateway(parse_location(control, access_of(os.environ)))
        except (EtcdError, ValueError) as error:
            self._tell(error)
            return
        self._thread = threading.Thread(target=self._hold, args=(gateway, run), name="resihp-etcd-node", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of it."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _hold(self, gateway: Gateway, run: str) -> None:
        lease, told, away = 0, False, False
        while not self._closing.wait(RETRY_S if away else gateway.location.lease_s / RENEWALS if lease else 0.0):
            try:
                if lease:
                    gateway.keep_alive(lease)
                else:
                    lease = self._register(gateway, run)
                away = False
            except LeaseLostError:
                lease = 0
            except EtcdError as error:
                away = True
                if not told:
                    self._tell(error)
                told = True
        try:
            if lease and not away:  # else nothing answers, for seconds
                gateway.revoke(lease)
        except EtcdError:
            pass  # It has lapsed, or soon will.
        gateway.close()

    def _register(self, gateway: Gateway, run: str) -> int:
        lease, value = gateway.grant(gateway.location.lease_s), str(self._node).encode()
        for key, bound in ((gateway.location.known(run), 0), (gateway.location.present(run), lease)):
            gateway.transact({}, Put(f"{key}{self._name}", value, bound), ())
        return lease

    def _tell(self, error: Exception) -> None:
        then = f"node {self._node} holds no lease there: if it is lost with the coordinator, the next one waits for it"
        warn(f"resihp: {error}; {then}")


def lease_holders(gateway: Gateway, run: str) -> tuple[frozenset[int], frozenset[int]]:
    """The nodes of a run that have held leases, and those that hold one now. `run`: the run's token."""
    location = gateway.location
    known, present = (
        frozenset(int(held.value) for held in gateway.all(first, f"{first[:-1]}0") if held.value.isdigit())
        for first in (location.known(run), location.present(run))
    )
    return known, present


class Gone:
    """Tells nodes that are gone from those that etcd has only been out of reach for.

    More than half of the nodes don't end together with the coordinator. So where so many have no lease, that says
    nothing of any of them, nor does what is seen in the seconds after that, while they register again one by one. They
    find the coordinator by the run directory, and it waits for each of them as where there are no leases.

    Args:
        awaited: nodes that are to come back.
        now: seconds; a coordinator takes over.
    """

    def __init__(self, awaited: Set[int], now: float) -> None:
        self._awaited = awaited
        self._settled_at = now + SETTLE_S

    def among(self, lapsed: Set[int], now: float) -> frozenset[int]:
        """Those that are gone. `lapsed`: nodes that have held a lease, and hold none now."""
        missing = frozenset(self._awaited & lapsed)
        if 2 * len(missing) > len(self._awaited):
            self._settled_at = max(self._settled_at, now + RETURN_S)
        return missing if now >= self._settled_at else frozenset()


class NodeLeases:
    """Which nodes are gone, for a coordinator that has just taken over. Looks in a thread of its own.

    Args:
        run: the run's token.
        telling: tells them from others.
        for_s: how long it is of interest.
    """

    def __init__(self, location: Location, run: str, telling: Gone, for_s: float) -> None:
        self._location, self._run, self._telling = location, run, telling
        self._gone = frozenset[int]()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(for_s,), name="resihp-etcd-nodes", daemon=True)
        self._thread.start()

    def gone(self) -> frozenset[int]:
        """Those of the awaited nodes that don't come back."""
        return self._gone

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _look(self, for_s: float) -> None:
        gateway, begun = Gateway(self._location), time.monotonic()
        while not self._closing.is_set() and time.monotonic() < begun + for_s:
            try:
                known, present = lease_holders(gateway, self._run)
                self._gone = self._telling.among(known - present, time.monotonic())
            except EtcdError:
                pass  # Who is not known to be gone is waited for.
            self._closing.wait(LOOK_S)
        gateway.close()
