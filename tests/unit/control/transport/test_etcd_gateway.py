# SPDX-License-Identifier: Apache-2.0
"""What a client of etcd does where etcd takes its token no more; etcd is stood in for."""

from __future__ import annotations

import base64
import json

import pytest

from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.access import Access
from megatron_resihp.control.transport.etcd.gateway import EtcdError, Gateway, UnreachableError
from megatron_resihp.control.transport.etcd.location import Location

PLACE = Location((Address("127.0.0.1", 1),), "run", Access(user="job", password="of two"))
HEADER = {"cluster_id": "1"}


class Guarded:
    """An etcd whose users change. A token of it is good as long as they don't."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.changes = self.logins = 0
        self.changing = False
        """Whether they change after each login."""
        monkeypatch.setattr(Gateway, "_ask_member", lambda gateway, *asked: self._answer(gateway._token, *asked))

    def _answer(self, token: str | None, member: Address, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if path.endswith("auth/authenticate"):
            self.logins += 1
            said = 200, {"header": HEADER, "token": str(self.changes)}
            self.changes += self.changing
        elif token == str(self.changes):
            held = {"key": base64.b64encode(b"a").decode(), "value": base64.b64encode(b"b").decode()}
            said = 200, {"header": HEADER, "kvs": [held]}
        else:
            problem = "etcdserver: revision of auth store is old"
            said = 400, {"error": problem, "message": problem, "code": 3}
        return said[0], json.dumps(said[1]).encode()


def test_it_logs_in_again_once_users_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded, gateway = Guarded(monkeypatch), Gateway(PLACE)
    for _ in range(2):
        guarded.changes += 1
        held = gateway.get("a")
        assert held is not None and held.value == b"b"
    assert guarded.logins == 2


def test_where_they_change_all_the_time_it_may_be_asked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded, gateway = Guarded(monkeypatch), Gateway(PLACE)
    guarded.changing = True
    with pytest.raises(UnreachableError, match="revision of auth store is old"):
        gateway.get("a")
    guarded.changing = False
    assert gateway.get("a") is not None


def test_who_has_no_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = Guarded(monkeypatch)
    with pytest.raises(EtcdError, match="revision of auth store is old") as refusal:
        Gateway(Location(PLACE.members, "run")).get("a")
    assert not isinstance(refusal.value, UnreachableError) and not guarded.logins
