# SPDX-License-Identifier: Apache-2.0
"""Whether a coordinator in whose place another has come can still decide: the project's own log, on a made-up etcd.

May import `control`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from megatron_resihp.control.coordination.decisions.recorded import UnrecordedError
from megatron_resihp.control.head.etcd_log import EtcdLog
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.gateway import Held, Outcome, Put
from megatron_resihp.control.transport.etcd.leadership import DeposedError
from megatron_resihp.control.transport.etcd.location import Location

PLACE = Location((Address("etcd", 2379),), "run")


def may_decide_when_deposed() -> bool:
    """Whether what it writes is taken once the next one has said that it has taken over."""
    etcd = _Etcd()
    deposed = _log(etcd, after=None)
    deposed.write(["the job begins"])
    etcd.held.pop(PLACE.leader)  # its lease has lapsed
    _log(etcd, after=1).write(["another has taken over"])
    try:
        deposed.write(["what it has decided since then"])
    except UnrecordedError:
        return False
    return True


def _log(etcd: _Etcd, after: int | None) -> EtcdLog:
    return EtcdLog(_Leader(etcd), threading.Event(), "token", after)  # type: ignore[arg-type]


class _Leader:
    """Has made the leader's key, and doesn't lead again."""

    def __init__(self, etcd: _Etcd) -> None:
        self.location, self._etcd = PLACE, etcd
        self.token = etcd.transact({PLACE.leader: 0}, Put(PLACE.leader, b"leads")).revision

    def gateway(self) -> _Etcd:
        return self._etcd

    def stand_again(self, gateway: object, token: int) -> None:
        raise DeposedError("another leads")


class _Etcd:
    """The part of etcd that the log asks for; what it would delete doesn't matter here."""

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self._revision = 0

    def last(self, first: str, end: str) -> str | None:
        return max((key for key in self.held if first <= key < end), default=None)

    def transact(
        self, created: dict[str, int], put: Put, otherwise: Sequence[str] = (), there: Sequence[str] = (), *_: Any
    ) -> Outcome:  # fmt: skip
        revisions = {key: self.held[key].created if key in self.held else 0 for key in (*created, *there)}
        if any(revisions[key] != wanted for key, wanted in created.items()) or not all(map(revisions.get, there)):
            return Outcome(False, self._revision, tuple(self.held[key] for key in otherwise if key in self.held))
        self._revision += 1
        self.held[put.key] = Held(put.key, put.value, self._revision, 0)
        return Outcome(True, self._revision)
