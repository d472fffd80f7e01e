# SPDX-License-Identifier: Apache-2.0
"""Cutting gloo's connections and no others, on real sockets of this process."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from megatron_resihp.executor.gloo import sockets as gloo_sockets

HOST = "127.0.0.1"


class Network:
    """Listeners and connections; `foreign` were there before."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.foreign = gloo_sockets.identities()

    def listen(self) -> socket.socket:
        return self._stack.enter_context(socket.create_server((HOST, 0)))

    def connect(self, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
        client = self._stack.enter_context(socket.create_connection(listener.getsockname()))
        server = self._stack.enter_context(listener.accept()[0])
        return client, server

    def end(self, *listeners: socket.socket) -> dict[str, socket.socket]:
        """End receiving on what is not foreign and has an end at one of these listeners."""
        kept = gloo_sockets.end_receiving(self.foreign, set(map(port, listeners)))
        for connection in kept.values():
            self._stack.enter_context(connection)
        return kept


@pytest.fixture
def network() -> Iterator[Network]:
    with ExitStack() as stack:
        yield Network(stack)


def port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def published(listener: socket.socket) -> bytes:
    """What gloo writes to the store."""
    address = b"\x02\x00" + port(listener).to_bytes(2, "big") + bytes(12)
    return b"".join(len(part).to_bytes(8, sys.byteorder) + part for part in (b"host", address))


def works(connection: tuple[socket.socket, socket.socket]) -> bool:
    """Whether a byte gets through in both directions."""
    for sender, receiver in (connection, connection[::-1]):
        receiver.settimeout(5.0)
        try:
            sender.sendall(b"x")
            if receiver.recv(1) != b"x":
                return False
        except OSError:
            return False
    return True


def has_ended(end: socket.socket) -> bool:
    """Whether this end receives nothing more."""
    end.settimeout(5.0)
    return end.recv(1) == b""


def test_only_connections_with_an_end_at_a_port(network: Network) -> None:
    gloo, other = network.listen(), network.listen()
    cut, left = network.connect(gloo), network.connect(other)
    # Both ends are in this process: each counts.
    assert len(network.end(gloo)) == 2
    assert has_ended(cut[0]) and has_ended(cut[1]) and works(left)


def test_sends_succeed_until_all_have_ended_theirs(network: Network) -> None:
    """Gloo closes its end when it notices; it forgets a send that fails before it has."""
    gloo = network.listen()
    client, server = network.connect(gloo)
    kept = network.end(gloo)
    client.close()
    for _ in range(3):
        server.sendall(b"x")
    for connection in kept.values():
        connection.close()
    with pytest.raises(OSError):
        for _ in range(100):
            server.sendall(b"x")


def test_what_is_kept_is_not_ended_again(network: Network) -> None:
    gloo = network.listen()
    network.connect(gloo)
    kept = network.end(gloo)
    assert not gloo_sockets.end_receiving(network.foreign | kept.keys(), {port(gloo)})


def test_sends_under_way_go_on(network: Network) -> None:
    """Gloo queues what it can't send at once, and forgets it when the connection ends."""
    gloo = network.listen()
    client, _ = network.connect(gloo)
    client.setblocking(False)
    network.end(gloo)
    assert os.get_blocking(client.fileno())


def test_listeners_by_what_they_have_published(network: Network) -> None:
    """Length and name of the host, length and socket address."""
    mine, other = network.listen(), network.listen()
    found = gloo_sockets.listeners([published(mine)], network.foreign)
    assert found == {id_ for id_, tcp in gloo_sockets.tcp_sockets() if tcp.getsockname() == mine.getsockname()}
    assert port(other) != port(mine)
    assert not gloo_sockets.listeners([published(mine)], gloo_sockets.identities())


def test_listeners_go_on_listening(network: Network) -> None:
    gloo = network.listen()
    network.connect(gloo)
    network.end(gloo)
    assert works(network.connect(gloo))


def test_what_was_there_before_is_left_alone(network: Network) -> None:
    """Groups of another epoch, whose listener may have the number of one that is gone."""
    gloo = network.listen()
    early = network.connect(gloo)
    foreign = gloo_sockets.identities()
    late = network.connect(gloo)
    assert len(gloo_sockets.end_receiving(foreign, {port(gloo)})) == 2
    assert works(early) and has_ended(late[0])


def test_one_end_is_enough(network: Network) -> None:
    """The listener is a peer's: of the connection only our end's far port is known."""
    gloo = network.listen()
    client, server = network.connect(gloo)
    own = {identity for identity, tcp in gloo_sockets.tcp_sockets() if tcp.getsockname() == client.getsockname()}
    assert gloo_sockets.end_receiving(gloo_sockets.identities() - own, {port(gloo)}).keys() == own
    assert has_ended(client)
    client.sendall(b"x")
    assert server.recv(1) == b"x"


def test_ports_by_what_groups_have_published(network: Network) -> None:
    """What is no address of gloo's, such as NCCL's id, counts for nothing."""
    gloo = network.listen()
    assert gloo_sockets.ports([published(gloo), bytes(range(1, 129)), b"", b"gpu3"]) == {port(gloo)}


def test_other_kinds_of_sockets_and_files(network: Network) -> None:
    """Pipes, UNIX sockets and UDP are none of gloo's."""
    with ExitStack() as stack:
        pair = [stack.enter_context(end) for end in socket.socketpair()]
        stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        stack.enter_context(open("/dev/null"))
        assert gloo_sockets.identities() == network.foreign
        assert not network.end()
        assert works((pair[0], pair[1]))


def test_sockets_without_a_peer_do_not_stop_the_rest(network: Network) -> None:
    """One that is not connected yet, and one whose peer is gone."""
    gloo = network.listen()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM):
        first, second = network.connect(gloo), network.connect(gloo)
        first[0].close()
        network.end(gloo)
        assert has_ended(second[0])


def test_one_that_has_connected_since_the_last_look_is_cut(network: Network) -> None:
    gloo = network.listen()
    with socket.socket() as client:
        gloo_sockets.identities()
        client.connect(gloo.getsockname())
        with gloo.accept()[0]:
            assert len(network.end(gloo)) == 2
            assert has_ended(client)


def test_another_that_has_the_number_of_a_closed_one_is_left_alone(network: Network) -> None:
    gloo, other = network.listen(), network.listen()
    client, _ = network.connect(gloo)
    gloo_sockets.identities()
    number = client.fileno()
    client.close()
    left = network.connect(other)
    assert left[0].fileno() == number
    network.end(gloo)
    assert works(left)


def test_nothing_is_left_open(network: Network) -> None:
    """Looking at a socket duplicates it; the duplicate would keep a closed connection alive."""
    client, server = network.connect(network.listen())
    for _ in range(3):
        gloo_sockets.identities()
    client.close()
    server.settimeout(5.0)
    assert server.recv(1) == b""
