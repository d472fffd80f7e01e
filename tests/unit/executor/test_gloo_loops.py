# SPDX-License-Identifier: Apache-2.0
"""Which connections a loop hears of less often, on real epolls of this process."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from megatron_resihp.executor.gloo import loops as gloo_loops
from megatron_resihp.executor.gloo import sockets as gloo_sockets


class Loop:
    """An epoll that watches a listener and one connection, on which a byte has come that nobody reads."""

    def __init__(self, stack: ExitStack, events: int = select.EPOLLIN) -> None:
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.peer = stack.enter_context(socket.create_connection(self.listener.getsockname()))
        self.connection = stack.enter_context(self.listener.accept()[0])
        self.epoll = stack.enter_context(select.epoll())
        self.epoll.register(self.listener, select.EPOLLIN)
        self.epoll.register(self.connection, events)
        self.peer.sendall(b"x")
        select.select([self.connection], [], [], 5.0)

    @property
    def identity(self) -> str:
        """The listener's."""
        return next(
            identity
            for identity, tcp in gloo_sockets.tcp_sockets()
            if os.path.sameopenfile(tcp.fileno(), self.listener.fileno())
        )

    def reported(self) -> list[int]:
        return [descriptor for descriptor, _ in self.epoll.poll(0)]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_it_falls_silent_until_something_changes(stack: ExitStack) -> None:
    loop = Loop(stack)
    connection = loop.connection.fileno()
    assert loop.reported() == loop.reported() == [connection]
    assert gloo_loops.calm({loop.identity}) == 1
    assert loop.reported() == [connection]  # by the same descriptor: gloo's pointer is kept
    assert loop.reported() == []
    loop.peer.close()
    assert [descriptor for descriptor, _ in loop.epoll.poll(5.0)] == [connection]
    loop.epoll.unregister(connection)  # it was still registered


def test_listeners_are_heard_as_before(stack: ExitStack) -> None:
    loop = Loop(stack)
    gloo_loops.calm({loop.identity})
    loop.reported()
    stack.enter_context(socket.create_connection(loop.listener.getsockname()))
    assert loop.reported() == loop.reported() == [loop.listener.fileno()]


def test_other_loops_are_left_alone(stack: ExitStack) -> None:
    ours, other = Loop(stack), Loop(stack)
    gloo_loops.calm({ours.identity})
    assert other.reported() == other.reported() == [other.connection.fileno()]


def test_what_was_reported_for_the_last_time_stays_silent(stack: ExitStack) -> None:
    """Gloo has forgotten who asked for it."""
    loop = Loop(stack, select.EPOLLIN | select.EPOLLONESHOT)
    loop.reported()
    assert gloo_loops.calm({loop.identity}) == 0
    assert loop.reported() == []
