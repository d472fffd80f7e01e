# SPDX-License-Identifier: Apache-2.0
"""Lets gloo's event loops end where an unread message keeps them awake. Imports the standard library only.

Each group of torch 2.15's gloo has a thread that asks epoll what to read. When the group is freed, this thread ends
once epoll has reported nothing for 10 ms. A message whose receive has been given up is never read. It stays in the
socket with everything behind it, including the end of the connection, and epoll reports it again and again. So the
thread never ends and takes a whole core, and freeing the group waits for it forever.

We tell epoll to report such connections only when something new happens. They must stay registered: gloo ends the
process if one of its sockets is not registered.
"""

import ctypes
import os
import platform
import select
from collections.abc import Iterator
from pathlib import Path

MODIFY = 3
"""EPOLL_CTL_MOD. Python's own `epoll.modify` would overwrite the pointer by which gloo finds the connection."""


class _Event(ctypes.Structure):
    """struct epoll_event, which Linux packs on x86-64 only."""

    if platform.machine() == "x86_64":
        _pack_ = 1
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def calm(listeners: set[str]) -> int:
    """Have epoll report connections to the loops that serve these listeners only when something changes.

    Args:
        listeners: identities (`gloo_sockets`) of listening sockets whose groups are being freed.

    Returns:
        the number of connections that are now watched in this way.
    """
    control = ctypes.CDLL(None, use_errno=True).epoll_ctl
    count = 0
    for name in os.listdir("/proc/self/fd"):
        watched = list(_watched(name))
        if listeners.isdisjoint(identity for identity, _, _ in watched):
            continue
        for identity, descriptor, event in watched:
            # Without EPOLLIN, epoll has reported it once and must not report it again.
            if identity.startswith("socket:") and identity not in listeners and event.events & select.EPOLLIN:
                event.events |= select.EPOLLET
                # Fails if gloo has just closed it.
                count += control(int(name), MODIFY, descriptor, ctypes.byref(event)) == 0
    return count


def _watched(name: str) -> Iterator[tuple[str, int, _Event]]:
    """The files that an epoll descriptor of this process watches: (identity, descriptor, event); else nothing."""
    try:
        if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
            return
        lines = Path(f"/proc/self/fdinfo/{name}").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # tfd: DESCRIPTOR events: HEX data: HEX pos:... ino:... sdev:...
        words = line.split()
        if words[:1] != ["tfd:"]:
            continue
        try:
            identity = os.readlink(f"/proc/self/fd/{words[1]}")
        except OSError:
            continue
        yield identity, int(words[1]), _Event(int(words[3], 16), int(words[5], 16))
