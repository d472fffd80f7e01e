# SPDX-License-Identifier: Apache-2.0
"""A cable between two devices of a network namespace on which packets take a while. Kernels may have no netem."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

ALL_PROTOCOLS: Final = 3
OUTGOING: Final = 4
"""What the kernel calls a packet that was sent here, not received."""
LONGEST: Final = 65536
SIOCETHTOOL: Final = 0x8946
SET_TX_CHECKSUMS: Final = 0x17


def in_namespace(name: str) -> None:
    """Let this thread be in a network namespace."""
    with open(f"/run/netns/{name}") as file:
        os.setns(file.fileno(), os.CLONE_NEWNET)


def complete_checksums(namespace: str, device: str) -> None:
    """Have a device's packets carry checksums, which the kernel omits between its own devices."""

    def switch_off() -> None:
        in_namespace(namespace)
        wanted = array.array("I", [SET_TX_CHECKSUMS, 0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("16sP16x", device.encode(), wanted.buffer_info()[0])
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)

    _in_thread(switch_off)


class SlowCable:
    """Passes packets on between two devices of a namespace, after `delay_s`, until it is closed."""

    def __init__(self, namespace: str, one: str, other: str, delay_s: float) -> None:
        self._delay_s = delay_s
        self._ends: list[socket.socket] = []

        def plug_in() -> None:
            in_namespace(namespace)
            for device in (one, other):
                end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
                end.bind((device, ALL_PROTOCOLS))
                self._ends.append(end)

        _in_thread(plug_in)
        for source, target in (self._ends, self._ends[::-1]):
            way = SimpleQueue[tuple[float, bytes]]()
            for work in (self._take, self._deliver):
                end = source if work == self._take else target
                threading.Thread(target=work, args=(end, way), daemon=True).start()

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def _take(self, source: socket.socket, way: SimpleQueue[tuple[float, bytes]]) -> None:
        try:
            while True:
                packet, (_, _, kind, *_) = source.recvfrom(LONGEST)
                if kind != OUTGOING:
                    way.put((time.monotonic() + self._delay_s, packet))
        except OSError:
            pass  # It is closed.

    def _deliver(self, target: socket.socket, way: SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            due_at, packet = way.get()
            time.sleep(max(0.0, due_at - time.monotonic()))
            try:
                target.send(packet)
            except OSError:
                return


def _in_thread(work: Callable[[], None]) -> None:
    """A namespace is a thread's."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
