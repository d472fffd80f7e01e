# SPDX-License-Identifier: Apache-2.0
"""Members of groups that are all in one process, where what one keeps open of a connection is the others' too."""

import threading

import torch.distributed as dist

from megatron_resihp.executor.groups.communicators import Communicators
from megatron_resihp.executor.groups.side_group import SideGroup


class Member:
    """One of two workers, in an epoch with a group of both."""

    def __init__(self, store: dist.Store, me: int) -> None:
        self.broken = threading.Event()
        self.communicators = Communicators(store, me, self.broken.is_set)
        self.communicators.begin(1, "plan")
        self.group: SideGroup | None = self.communicators.side_group("both", (0, 1))


def close_what_is_kept_open(*members: Member) -> None:
    """Called before any of them frees its groups: gloo ends the process if a socket that it closes has a duplicate."""
    for member in members:
        kept_open = member.communicators.connections._kept_open
        for connection in kept_open.values():
            connection.close()
        kept_open.clear()
