# SPDX-License-Identifier: Apache-2.0
"""Whom a worker finds it can reach."""

from __future__ import annotations

import socket

import pytest

from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.worker import reach
from megatron_resihp.control.worker.own_address import own_address_towards
from megatron_resihp.control.worker.reach import Door, unreachable


def test_who_is_there_answers() -> None:
    door = Door(own_address_towards("127.0.0.1"))
    try:
        assert unreachable(dict.fromkeys(range(3 * reach.AT_ONCE), door.address)) == []
    finally:
        door.close()


def test_a_machine_without_the_process_answers_too() -> None:
    door = Door("127.0.0.1")
    door.close()
    assert unreachable({7: door.address}) == []


def test_who_does_not_answer() -> None:
    """A listener whose queue is full takes no more, as if what is sent to it were dropped."""
    with socket.create_server(("127.0.0.1", 0), backlog=1) as full:
        address = Address(*full.getsockname())
        waiting = [socket.socket() for _ in range(8)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        door = Door("127.0.0.1")
        assert unreachable({1: door.address, 4: address}, timeout_s=0.3) == [4]
        door.close()
        for each in waiting:
            each.close()


def test_no_way_at_all_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect_ex", lambda self, address: 113)
    assert unreachable({2: Address("127.0.0.1", 9)}, timeout_s=0.1) == [2]
