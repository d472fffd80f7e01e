# SPDX-License-Identifier: Apache-2.0
"""Gloo groups of the next plan, made while training goes on under the plan in force. May import torch.

Making a group takes threads, sockets and a key in the store, and waits for no peer: members connect when they first use
the group. The caller says which groups a plan needs (`GroupNeeds`). Groups that turn out to be missing are made in the
usual way. So a wrong guess costs only time, but all members of a group must make the same guess.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_resihp.executor.gloo import sockets as gloo_sockets
from megatron_resihp.executor.groups.rendezvous import InterruptibleStore
from megatron_resihp.executor.groups.side_group import SideGroup
from megatron_resihp.executor.groups.waiting import Waiter

GLOO = "GLOO"

Ranks = tuple[int, ...]


class WorldGroup(NamedTuple):
    """A gloo group in torch's world: its ranks in ascending order, and the timeout of its operations."""

    ranks: Ranks
    timeout: timedelta


@dataclass(frozen=True)
class GroupNeeds:
    """The groups that one worker is in under a plan.

    Attributes:
        side_groups: name and workers of each.
        rank: this worker's rank in the plan's world.
        world_groups: the groups that include this rank, the world itself among them, in the order of their creation.
    """

    side_groups: tuple[tuple[str, tuple[int, ...]], ...]
    rank: int = 0
    world_groups: tuple[WorldGroup, ...] = ()


class GroupsAhead:
    """Makes the groups and keeps them until they are taken.

    Args:
        store: of the next epoch; no other epoch uses its keys.
        me: this worker's id.
    """

    def __init__(self, store: InterruptibleStore, me: int, waiter: Waiter) -> None:
        self.store = store
        self._me = me
        self._waiter = waiter
        self._side_groups: dict[str, SideGroup] = {}
        self._backends: dict[WorldGroup, deque[Any]] = {}
        self._missed: list[WorldGroup] = []

    def make(self, needs: GroupNeeds) -> None:
        """Make all needed groups; called in another thread than the training thread.

        Raises:
            RendezvousBroken: the epoch in force is broken; the groups made so far are kept, and `take_all` returns
                them.
        """
        with self.store.gathering():
            for name, workers in needs.side_groups:
                self._side_groups[name] = SideGroup(self.store, name, workers, self._me, self._waiter)
            times: Counter[WorldGroup] = Counter()
            for group in needs.world_groups:
                times[group] += 1
                key = blake2b(repr((group, times[group])).encode(), digest_size=16).hexdigest()
                prefixed = dist.PrefixStore(f"world/{key}", self.store)
                rank, size = group.ranks.index(needs.rank), len(group.ranks)
                # The timeout can't be changed later: receives keep the first one.
                backend = dist.ProcessGroupGloo(prefixed, rank, size, group.timeout)
                self._backends.setdefault(group, deque()).append(backend)

    def listeners(self) -> set[str]:
        """The sockets at which members connect to this one."""
        return gloo_sockets.listeners(self.store.published, set())

    def ports(self) -> set[int]:
        """Those at which members connect to this one."""
        return gloo_sockets.ports(self.store.published)

    def take_side_group(self, name: str) -> SideGroup | None:
        """The side group of this name, once; None: there is none."""
        return self._side_groups.pop(name, None)

    def take_backend(self, group: WorldGroup) -> Any:
        """The backend for the next group with these ranks and this timeout; None: none is left."""
        left = self._backends.get(group)
        if not left:
            self._missed.append(group)
            return None
        return left.popleft()

    @property
    def wrong_guesses(self) -> tuple[int, int]:
        """The number of groups not taken yet, and the number of requested groups that were missing."""
        return len(self._side_groups) + sum(map(len, self._backends.values())), len(self._missed)

    def take_all(self) -> list[Any]:
        """All groups that have not been taken."""
        left = [*self._side_groups.values(), *(each for backends in self._backends.values() for each in backends)]
        self._side_groups.clear()
        self._backends.clear()
        return left


def install_hand_over(take: Callable[[WorldGroup], Any]) -> None:
    """Let torch ask `take` for the backend of a gloo group before it makes one.

    Args:
        take: returns a ProcessGroupGloo or None.

    Raises:
        KeyError, AttributeError, TypeError: this torch makes its groups in another way.
    """
    dist.Backend._ensure_backend_registered(GLOO.lower())
    plugin = dist.Backend._plugins[GLOO]
    original = plugin.creator_fn
    if not plugin.extended_api or not hasattr(dist.ProcessGroupGloo, "options"):
        raise TypeError("torch does not tell who makes a group what group it is")

    def create(options: Any, backend_options: Any) -> Any:
        # torch gives no ranks for the world itself.
        ranks = tuple(sorted(options.global_ranks_in_group or range(options.group_size)))
        backend = take(WorldGroup(ranks, options.timeout))
        if backend is None:
            return original(options, backend_options)
        backend.options.global_ranks_in_group = options.global_ranks_in_group
        backend.options.group_name = options.group_id
        return backend

    dist.Backend._plugins[GLOO] = plugin._replace(creator_fn=create)
