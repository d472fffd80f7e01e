# SPDX-License-Identifier: Apache-2.0
"""A coordinator that waits for the loss of another: what it sees of the run directory and of nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_resihp.control.commands import standby
from megatron_resihp.control.commands.contact import Contact
from megatron_resihp.control.commands.launch.launch_options import LaunchError
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.gateway import Held
from megatron_resihp.control.transport.etcd.location import Location
from megatron_resihp.control.transport.etcd.presence import RETURN_S

PLACE = Location((Address("etcd", 2379),), "run")


class Gateway:
    """To an etcd that has a leader, perhaps, and these nodes, of which some hold leases."""

    location = PLACE

    def __init__(self, leads: bool, nodes: Collection[int] = ()) -> None:
        self.leader = Held(PLACE.leader, b"", 1, 1) if leads else None
        self.present: Collection[int] = ()
        self._nodes = nodes

    def get(self, key: str) -> Held | None:
        return self.leader

    def last(self, first: str, end: str) -> str | None:
        return None

    def all(self, first: str, end: str) -> Iterator[Held]:
        nodes = self._nodes if first == PLACE.known("token") else self.present
        return (Held(f"{first}{node}", str(node).encode(), 1, 0) for node in nodes)


@pytest.fixture
def wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., standby._Wait]:
    """Of a standby whose file system fails."""

    def fail(path: Path) -> float:
        raise OSError(116, "Stale file handle")

    for look in ("age", "modified"):
        monkeypatch.setattr(standby, look, fail)

    def waits(leads: bool, apart: bool) -> standby._Wait:
        return waiting_for(tmp_path, Contact(Address("host", 1), "token", apart=apart, replaceable=apart), leads)

    return waits


def waiting_for(run_dir: Path, contact: Contact, leads: bool, encrypted: bool = False) -> standby._Wait:
    (run_dir / standby.FILE_NAME).write_text(contact._text)
    return standby._Wait(Gateway(leads), run_dir, JobSize(2, 1, apart=True), 60.0, encrypted)  # type: ignore[arg-type]


@pytest.mark.parametrize(("leads", "apart"), [(True, True), (True, False), (False, True)])
def test_goes_on_waiting(wait: Callable[..., standby._Wait], leads: bool, apart: bool) -> None:
    waiting = wait(leads, apart)
    for _ in range(3):
        assert waiting._look() is None


@pytest.mark.parametrize(
    ("job", "own", "why"),
    [
        (True, False, "encrypts its connections; give the standby certificates"),
        (False, True, "does not encrypt its connections; start the standby without"),
        (True, True, ""),
    ],
)
def test_a_standby_needs_certificates_where_the_job_has_them(tmp_path: Path, job: bool, own: bool, why: str) -> None:
    """Not where a job that was killed had left its file: nobody touches that any more."""
    waiting = waiting_for(tmp_path, Contact(Address("host", 1), "token", True, True, encrypted=job), True, own)
    for _ in range(3):
        assert waiting._look() is None
    touch(tmp_path / standby.FILE_NAME)
    if not why:
        assert waiting._look() is None
        return
    with pytest.raises(LaunchError, match=why):
        waiting._look()


def touch(path: Path) -> None:
    """As a coordinator that lives does, some seconds later."""
    later = path.stat().st_mtime + 5.0
    os.utime(path, (later, later))


class Leader:
    """Leads the run, in the place of one that is lost."""

    token = 2

    def __init__(self, gateway: Gateway) -> None:
        gateway.leader = Held(PLACE.leader, b"", self.token, 1)

    def keep(self, on_deposed: Callable[[Exception], None]) -> None:
        pass


def test_nodes_that_register_while_it_reads_what_was_decided_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Etcd was out of the reach of all, and the last ones take longer."""
    gateway = Gateway(leads=True, nodes=range(4))
    (tmp_path / standby.FILE_NAME).write_text(Contact(Address("host", 1), "token", apart=True)._text)

    def decided(*_: Any) -> Any:
        gateway.present = (0, 2, 3)
        return SimpleNamespace(end=None, awaited=frozenset(range(4)))

    monkeypatch.setattr(standby, "Leadership", lambda place: Leader(gateway))
    monkeypatch.setattr(standby, "_decided", decided)
    waiting = standby._Wait(gateway, tmp_path, JobSize(4, 1, apart=True), 60.0, False)  # type: ignore[arg-type]
    assert waiting._look() is None, "another leads"
    gateway.leader = None
    begun = time.monotonic()
    found = waiting._look()
    assert found is not None
    gone = found[-1]
    assert not gone.among({1}, begun + RETURN_S - 1.0)
    assert gone.among({1}, time.monotonic() + RETURN_S) == {1}
