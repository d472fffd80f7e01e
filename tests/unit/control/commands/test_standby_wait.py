# SPDX-License-Identifier: Apache-2.0
"""A coordinator that waits for the loss of another, whose run directory can't be read for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_resihp.control.commands import standby
from megatron_resihp.control.commands.contact import Contact
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.gateway import Held
from megatron_resihp.control.transport.etcd.location import Location

PLACE = Location((Address("etcd", 2379),), "run")


class Gateway:
    """To an etcd that has nothing but a leader."""

    location = PLACE

    def __init__(self, leads: bool) -> None:
        self._leader = Held(PLACE.leader, b"", 1, 1) if leads else None

    def get(self, key: str) -> Held | None:
        return self._leader

    def all(self, first: str, end: str) -> Iterator[Held]:
        return iter(())


@pytest.fixture
def wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., standby._Wait]:
    """Of a standby whose file system fails."""

    def fail(path: Path) -> float:
        raise OSError(116, "Stale file handle")

    for look in ("age", "modified"):
        monkeypatch.setattr(standby, look, fail)

    def waits(leads: bool, apart: bool) -> standby._Wait:
        contact = Contact(Address("host", 1), "token", apart=apart, replaceable=apart)
        (tmp_path / standby.FILE_NAME).write_text(contact._text)
        return standby._Wait(Gateway(leads), tmp_path, JobSize(2, 1, apart=True), 60.0)  # type: ignore[arg-type]

    return waits


@pytest.mark.parametrize(("leads", "apart"), [(True, True), (True, False), (False, True)])
def test_goes_on_waiting(wait: Callable[..., standby._Wait], leads: bool, apart: bool) -> None:
    waiting = wait(leads, apart)
    for _ in range(3):
        assert waiting._look() is None
