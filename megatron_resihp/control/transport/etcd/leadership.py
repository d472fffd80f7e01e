# SPDX-License-Identifier: Apache-2.0
"""One leader at a time: it holds a key that goes with its lease, and writes only while the key is the one it made.

The key's create revision is the fencing token. Each write is a transaction that compares it, so that what a leader
writes after another one has come is refused, however late it arrives. May import: the standard library, `terminal` and
this package's modules.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from megatron_resihp.control.terminal import say, warn
from megatron_resihp.control.transport.etcd.gateway import (
    EtcdError,
    Gateway,
    Held,
    LeaseLostError,
    Put,
    UnreachableError,
)
from megatron_resihp.control.transport.etcd.location import Location

RENEWALS: Final = 3
"""In the time of a lease."""
SLACK_S: Final = 2.0
"""etcd looks for leases that have lapsed twice a second, and then agrees on their end."""
RETRY_S: Final = 0.5
SHOWN: Final = 100
"""Characters of another leader's name."""


class DeposedError(EtcdError):
    """Another leads."""


class Leadership:
    """Leads a run, from its making on. A leader that was killed is waited for, for as long as a lease lasts.

    `keep` keeps the lease alive. Should it lapse nevertheless, as when etcd was out of reach, this one leads again
    unless another has begun to.

    Raises:
        DeposedError: another leads.
        EtcdError: etcd doesn't answer, refuses, or is too old.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self._name = f"process {os.getpid()} on {socket.gethostname()}"
        self._value = json.dumps({"leader": self._name, "nonce": secrets.token_hex(8)}).encode()
        self._lock = threading.Lock()
        self._lease = 0
        self._token = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._on_deposed: Callable[[EtcdError], None] = lambda error: None
        self._is_followed: Callable[[], bool] = lambda: False
        self._deposed: EtcdError | None = None
        self._telling = threading.Lock()
        self._gateway = Gateway(location)
        try:
            self._gateway.check_version()
            self._follow()
        finally:
            # Workers are forked from here.
            self._gateway.close()

    @property
    def token(self) -> int:
        """With which this one leads, or last has."""
        return self._token

    def gateway(self) -> Gateway:
        """A way to this etcd, for another thread."""
        return self._gateway.twin()

    def stand_again(self, gateway: Gateway, token: int) -> None:
        """Lead again, as this token is no longer that of the leader.

        Args:
            gateway: of the thread that calls.

        Raises:
            DeposedError: another leads.
            EtcdError: it can't be found out.
        """
        with self._lock:
            if token == self._token:
                self._check_not_followed("its lease has lapsed")
                self._stand(gateway)

    def keep(
        self, on_deposed: Callable[[EtcdError], None], is_followed: Callable[[], bool] = lambda: False
    ) -> None:  # fmt: skip
        """Keep the lease alive until `close`, in a thread of its own. May be called again, with another to be told.

        Args:
            on_deposed: told, in that thread, that this one leads no more, and why; at once, if that is known already.
            is_followed: whether another leads, by what can be known without etcd.
        """
        with self._telling:
            self._on_deposed, self._is_followed, deposed = on_deposed, is_followed, self._deposed
        if deposed is not None:
            on_deposed(deposed)
        elif self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="resihp-etcd-lease", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Let another lead."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self._gateway.revoke(self._lease)
        except EtcdError:
            pass  # It has lapsed, or soon will.
        self._gateway.close()

    def _follow(self) -> None:
        until = time.monotonic() + self.location.lease_s + SLACK_S
        while True:
            try:
                self._stand(self._gateway)
                return
            except DeposedError:
                if time.monotonic() > until:
                    raise
            time.sleep(RETRY_S)

    def _keep(self) -> None:
        since: float | None = None
        while not self._closing.wait(RETRY_S if since is not None else self.location.lease_s / RENEWALS):
            try:
                self._renew(since is not None)
            except (UnreachableError, LeaseLostError) as error:
                if since is None:
                    since = time.monotonic()
                    warn(f"resihp: {error}; training goes on until there is something to decide")
            except EtcdError as error:
                with self._telling:
                    self._deposed, on_deposed = error, self._on_deposed
                on_deposed(error)
                return
            else:
                if since is not None:
                    say(f"resihp: etcd answers again, after {time.monotonic() - since:.0f} s")
                since = None

    def _renew(self, was_away: bool) -> None:
        if was_away:
            self._check_not_followed("etcd has been out of reach")
        token = self._token
        try:
            self._gateway.keep_alive(self._lease)
        except LeaseLostError:
            self.stand_again(self._gateway, token)

    def _check_not_followed(self, why: str) -> None:
        """Others may have to do with this one, which can't know from etcd that another leads."""
        if self._is_followed():
            raise DeposedError(f"another has taken over {self.location}: {why}")

    def _stand(self, gateway: Gateway) -> None:
        lease, key = gateway.grant(self.location.lease_s), self.location.leader
        outcome = gateway.transact({key: 0}, Put(key, self._value, lease), [key])
        if outcome.succeeded:
            self._lease, self._token = lease, outcome.revision
            return
        [held] = outcome.found
        if held.value != self._value:
            gateway.revoke(lease)
            raise DeposedError(f"{self.location} is led by {_name_in(held)}")
        # It was made for this one, and the answer was lost.
        self._lease, self._token = held.lease, held.created


def _name_in(held: Held) -> str:
    """Who wrote this, in words that harm no terminal."""
    try:
        name = str(json.loads(held.value)["leader"])
    except (LookupError, TypeError, ValueError):
        name = "somebody else"
    return "".join(c for c in name[:SHOWN] if c.isprintable())
