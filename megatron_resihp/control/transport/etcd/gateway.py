# SPDX-License-Identifier: Apache-2.0
"""Asks etcd, by the HTTP gateway that its members serve: JSON with keys and values in base64, and numbers as text.

A request goes to one member after the other until one answers. So it may be carried out twice, if an answer was lost:
what is asked for must bear that. May import: the standard library, `address`, `access` and `location`.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final, Self

from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.location import Location

ANSWER_S: Final = 2.0
"""For each step of a request to one member. A request to a member that is stopped must not cost the lease."""
OLDEST: Final = (3, 4)
AGREED_S: Final = 10.0
"""How long members may take to agree on their cluster's version."""
AGREED_LOOK_S: Final = 0.1
PAGE: Final = 32
"""Keys that are read at once."""
_AWAY: Final = (408, 429)
"""Besides 5xx: a member that has no majority, no room or no time. Another member may, or this one later."""
_NOT_FOUND: Final = 5
"""gRPC's code; of what is asked here, only leases are looked for."""
_UNAUTHENTICATED: Final = 16
"""gRPC's code, for a token that etcd doesn't know any more."""
_OUTDATED: Final = "revision of auth store is old"
"""What etcd says of a signed token once its users or roles have changed."""
LOGINS: Final = 3
"""How often a request is made for which etcd takes no token: users may change several times in a row."""


class EtcdError(Exception):
    """etcd doesn't do what it was asked; the text is for people."""


class UnreachableError(EtcdError):
    """No member has answered; one may later. What was asked for may have been done."""


class LeaseLostError(EtcdError):
    """The lease has lapsed."""


class _TokenLostError(EtcdError):
    """etcd takes a token for some minutes, and forgets it if it was started anew. One that it has signed it takes until
    somebody changes its users or roles."""


@dataclass(frozen=True)
class Held:
    """What a key holds.

    Attributes:
        created: etcd's revision when the key was made.
        lease: with which the key goes; 0: it stays.
    """

    key: str
    value: bytes
    created: int
    lease: int


@dataclass(frozen=True)
class Put:
    """A value for a key, which goes with its lease; 0: it stays."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True)
class Outcome:
    """Of a transaction.

    Attributes:
        revision: of etcd, after it.
        found: where it was not carried out, the keys that it was to tell of then and that are there.
    """

    succeeded: bool
    revision: int
    found: tuple[Held, ...] = ()


class Gateway:
    """Asks the members of one cluster. One thread uses it.

    Raises:
        EtcdError: what it is to be let in with can't be read.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        try:
            self._tls = location.access.context()
        except ValueError as error:
            raise EtcdError(str(error)) from None
        self._token: str | None = None
        self._cluster: str | None = None
        self._members = list(location.members)
        self._connection: HTTPConnection | None = None

    def twin(self) -> Self:
        """Another one, for another thread, that takes answers of this one's cluster only."""
        twin = type(self)(self.location)
        twin._cluster = self._cluster
        twin._members = list(self._members)
        return twin

    def close(self) -> None:
        """Let go of the connection; the next request makes another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def check_version(self) -> None:
        """Raises EtcdError unless this is an etcd that can be asked.

        Members of a new cluster call it 3.0 until they have agreed on its version, so that is waited for.
        """
        until = time.monotonic() + AGREED_S
        server, cluster = self._versions()
        while cluster < OLDEST <= server and time.monotonic() < until:
            time.sleep(AGREED_LOOK_S)
            server, cluster = self._versions()
        if cluster < OLDEST:
            found, oldest = (".".join(map(str, version)) for version in (cluster, OLDEST))
            raise EtcdError(f"etcd at {self._members[0]} is {found}, and {oldest} is needed")

    def _versions(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of the member that answers, and of its cluster."""
        said = self._ask("GET", "/version", None)
        server = re.match(r"(\d+)\.(\d+)\.", str(said.get("etcdserver", "")))
        if server is None:
            raise EtcdError(f"what answers at {self._members[0]} is not etcd")
        # A cluster that has just begun doesn't know its own.
        cluster = re.match(r"(\d+)\.(\d+)\.", str(said.get("etcdcluster", ""))) or server
        return (int(server[1]), int(server[2])), (int(cluster[1]), int(cluster[2]))

    def grant(self, seconds: int) -> int:
        """A lease of this many seconds."""
        return int(self._post("lease/grant", {"TTL": str(seconds)})["ID"])

    def keep_alive(self, lease: int) -> None:
        """Let a lease begin anew.

        Raises:
            LeaseLostError: it has lapsed.
        """
        if not int(self._post("lease/keepalive", {"ID": str(lease)}).get("TTL", 0)):
            raise LeaseLostError("the lease has lapsed")

    def revoke(self, lease: int) -> None:
        """End a lease, and with it its keys."""
        self._post("lease/revoke", {"ID": str(lease)})

    def transact(
        self, created: dict[str, int], put: Put, otherwise: Sequence[str], there: Sequence[str] = (),
        deleted: Sequence[tuple[str, str]] = (),
    ) -> Outcome:  # fmt: skip
        """Put a value if all is as it was; else tell of other keys.

        Args:
            created: keys that were created at these revisions; 0: there is no such key.
            otherwise: keys to tell of.
            there: keys that have to be there.
            deleted: from which key on, and before which one, keys go together with that; the key that is put is none.
        """
        compared = [
            {"key": _coded(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}
            for key, revision in created.items()
        ]
        compared += [
            {"key": _coded(key), "target": "CREATE", "result": "GREATER", "create_revision": "0"} for key in there
        ]
        plain = {"key": _coded(put.key), "value": base64.b64encode(put.value).decode(), "lease": str(put.lease)}
        said = self._post("kv/txn", {
            "compare": compared,
            "success": [*({"request_delete_range": _span(*keys)} for keys in deleted), {"request_put": plain}],
            "failure": [{"request_range": {"key": _coded(key)}} for key in otherwise],
        })  # fmt: skip
        answers = (answer.get("response_range", {}) for answer in said.get("responses", ()))
        found = tuple(_held(plain) for answer in answers for plain in answer.get("kvs", ()))
        return Outcome(said.get("succeeded", False), int(said["header"]["revision"]), found)

    def compact(self, revision: int) -> None:
        """Let etcd forget what keys held before this revision."""
        self._post("kv/compaction", {"revision": str(revision)})

    def get(self, key: str) -> Held | None:
        """What a key holds; None: there is no such key."""
        return next(map(_held, self._range({"key": _coded(key)})), None)

    def last(self, first: str, end: str) -> str | None:
        """The greatest key from `first` on and before `end`; None: there is none."""
        wanted = {"limit": "1", "sort_order": "DESCEND", "sort_target": "KEY", "keys_only": True}
        return next((_held(plain).key for plain in self._range({**_span(first, end), **wanted})), None)

    def all(self, first: str, end: str) -> Iterator[Held]:
        """What all keys from `first` on and before `end` hold, by key."""
        while page := [_held(plain) for plain in self._range({**_span(first, end), "limit": str(PAGE)})]:
            yield from page
            first = f"{page[-1].key}\0"

    def _range(self, wanted: dict[str, Any]) -> list[dict[str, Any]]:
        return list(self._post("kv/range", wanted).get("kvs", ()))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        user = self.location.access.user
        for _ in range(LOGINS):
            if user is not None and self._token is None:
                self._log_in()
            try:
                return self._post_once(path, body)
            except _TokenLostError as error:
                if user is None:
                    raise
                self._token, lost = None, error
        raise UnreachableError(str(lost)) from lost

    def _log_in(self) -> None:
        access = self.location.access
        said = self._post_once("auth/authenticate", {"name": access.user, "password": access.password})
        self._token = str(said.get("token", ""))

    def _post_once(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        said = self._ask("POST", f"/v3/{path}", json.dumps(body).encode())
        # What etcd streams is in another object.
        answer = said.get("result", said)
        cluster = answer.get("header", {}).get("cluster_id")
        if cluster is None:
            raise EtcdError(f"what answers at {self._members[0]} is not etcd")
        if self._cluster not in (None, cluster):
            raise EtcdError(f"{self.location.cluster} are members of several clusters, and one is needed")
        self._cluster = cluster
        return answer  # type: ignore[no-any-return]

    def _ask(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        """The first answer of a member, which is asked first the next time."""
        problems = []
        for member in tuple(self._members):
            try:
                status, text = self._ask_member(member, method, path, body)
                said = json.loads(text)
                if not isinstance(said, dict):
                    raise ValueError
            except (OSError, HTTPException) as error:  # before the next: a certificate's error is of both kinds
                problem = str(error) or type(error).__name__
            except ValueError:
                problem = "what answers is not etcd"
            else:
                if status == 200 and "error" not in said:
                    return said
                problem = _problem(said)
                if not (status == 200 or status in _AWAY or status >= 500):
                    raise _refusal(said, f"etcd at {member} refuses: {problem}")
            problems.append(f"{member}: {problem}")
            self.close()
            self._members.append(self._members.pop(0))
        raise UnreachableError(f"etcd doesn't answer ({'; '.join(problems)})")

    def _ask_member(self, member: Address, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        kept = self._connection
        try:
            return self._exchange(kept or self._connect(member), method, path, body)
        except (ConnectionError, HTTPException):
            # It has closed a connection that was idle, or was started anew.
            self.close()
            if kept is None:
                raise
        return self._exchange(self._connect(member), method, path, body)

    def _connect(self, member: Address) -> HTTPConnection:
        if self._tls is None:
            self._connection = HTTPConnection(member.host, member.port, timeout=ANSWER_S)
        else:
            self._connection = HTTPSConnection(member.host, member.port, timeout=ANSWER_S, context=self._tls)
        return self._connection

    def _exchange(self, connection: HTTPConnection, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._token is not None:
            headers["Authorization"] = self._token
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()


def _refusal(said: dict[str, Any], problem: str) -> EtcdError:
    if _OUTDATED in problem:
        return _TokenLostError(problem)
    kind = {_NOT_FOUND: LeaseLostError, _UNAUTHENTICATED: _TokenLostError}.get(said.get("code", 0), EtcdError)
    return kind(problem)


def _problem(said: dict[str, Any]) -> str:
    """What a member says is wrong; in a stream it is an object."""
    problem = said.get("error")
    text = problem.get("message") if isinstance(problem, dict) else problem
    return str(text or said.get("message") or "it says nothing")


def _span(first: str, end: str) -> dict[str, str]:
    return {"key": _coded(first), "range_end": _coded(end)}


def _coded(key: str) -> str:
    return base64.b64encode(key.encode()).decode()


def _held(plain: dict[str, Any]) -> Held:
    return Held(
        base64.b64decode(plain["key"]).decode(errors="replace"),
        base64.b64decode(plain.get("value", "")),
        int(plain.get("create_revision", 0)),
        int(plain.get("lease", 0)),
    )
