"""Cutting gloo's connections and no others, on real sockets of this process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from megatron_resihp.executor import gloo_sockets

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


@pytest.fixture
def network() -> Iterator[Network]:
    with ExitStack() as stack:
        yield Network(stack)


def port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


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


def test_only_connections_with_an_end_at_a_port(network: Network) -> None:
    gloo, other = network.listen(), network.listen()
    cut, left = network.connect(gloo), network.connect(other)
    # Both ends are in this process: each counts.
    assert gloo_sockets.shut_down(network.foreign, {port(gloo)}) == 2
    assert not works(cut) and works(left)


def test_listeners_go_on_listening(network: Network) -> None:
    gloo = network.listen()
    network.connect(gloo)
    gloo_sockets.shut_down(network.foreign, {port(gloo)})
    assert works(network.connect(gloo))


def test_what_was_there_before_is_left_alone(network: Network) -> None:
    """The store and the lifeline, even where no ports are known yet."""
    store = network.listen()
    to_store = network.connect(store)
    foreign = gloo_sockets.identities()
    to_peer = network.connect(network.listen())
    assert gloo_sockets.shut_down(foreign, None) == 2
    assert works(to_store) and not works(to_peer)


def test_one_end_is_enough(network: Network) -> None:
    """The listener is a peer's: of the connection only our end's far port is known."""
    gloo = network.listen()
    client, server = network.connect(gloo)
    own = {identity for identity, tcp in gloo_sockets.tcp_sockets() if tcp.getsockname() == client.getsockname()}
    assert gloo_sockets.shut_down(gloo_sockets.identities() - own, {port(gloo)}) == 1
    assert not works((client, server))


def test_ports_that_were_opened_since(network: Network) -> None:
    early = network.listen()
    foreign = gloo_sockets.identities()
    late = [network.listen(), network.listen()]
    network.connect(early)
    network.connect(late[0])
    assert sorted(gloo_sockets.listening_ports(foreign)) == sorted(port(listener) for listener in late)


def test_other_kinds_of_sockets_and_files(network: Network) -> None:
    """Pipes, UNIX sockets and UDP are none of gloo's."""
    with ExitStack() as stack:
        pair = [stack.enter_context(end) for end in socket.socketpair()]
        stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        stack.enter_context(open("/dev/null"))
        assert gloo_sockets.identities() == network.foreign
        assert gloo_sockets.shut_down(network.foreign, None) == 0
        assert works((pair[0], pair[1]))


def test_sockets_without_a_peer_do_not_stop_the_rest(network: Network) -> None:
    """One that is not connected yet, and one whose peer is gone."""
    gloo = network.listen()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM):
        first, second = network.connect(gloo), network.connect(gloo)
        first[0].close()
        gloo_sockets.shut_down(network.foreign, {port(gloo)})
        assert not works(second)


def test_nothing_is_left_open(network: Network) -> None:
    """Looking at a socket duplicates it; the duplicate would keep a closed connection alive."""
    client, server = network.connect(network.listen())
    for _ in range(3):
        gloo_sockets.identities()
        gloo_sockets.listening_ports(set())
    client.close()
    server.settimeout(5.0)
    assert server.recv(1) == b""
