"""Gloo groups of a plan that is to come, made while training goes on under the plan in force. May import torch.

To make one takes threads, sockets and a word in the store, and waits for nobody: its members connect when they first
use it. Which groups a plan needs is said by who builds them (`GroupNeeds`); groups that then turn out to be needed
beside these are made as ever. So a wrong guess costs time only, but all members of a group must guess alike.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch.distributed as dist

from megatron_resihp.executor import gloo_sockets
from megatron_resihp.executor.rendezvous import InterruptibleStore
from megatron_resihp.executor.side_group import SideGroup
from megatron_resihp.executor.waiting import Waiter

GLOO = "GLOO"
UNTIL_IT_IS_KNOWN = timedelta(minutes=30)
"""Timeout of a group until it is taken, when whoever wants it says how long its operations may wait."""

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class GroupNeeds:
    """The groups that one worker is in under a plan.

    Attributes:
        side_groups: name and workers of each.
        rank: this worker's rank in the plan's world.
        world_groups: ranks of gloo's groups in the plan's world, itself among them, in the order in which they will be
            made; ranks in ascending order.
    """

    side_groups: tuple[tuple[str, tuple[int, ...]], ...]
    rank: int = 0
    world_groups: tuple[Ranks, ...] = ()


class GroupsAhead:
    """Makes them and keeps them until they are taken.

    Args:
        store: of the epoch that is to come; no other epoch uses its keys.
        me: this worker's id.
    """

    def __init__(self, store: InterruptibleStore, me: int, waiter: Waiter) -> None:
        self.store = store
        self._me = me
        self._waiter = waiter
        self._side_groups: dict[str, SideGroup] = {}
        self._backends: dict[Ranks, deque[Any]] = {}

    def make(self, needs: GroupNeeds) -> None:
        """Make all that are needed; in a thread beside the one that trains.

        Raises:
            RendezvousBroken: the epoch in force is broken; what has been made until then is kept, to be freed in order.
        """
        for name, workers in needs.side_groups:
            self._side_groups[name] = SideGroup(self.store, name, workers, self._me, self._waiter)
        times: Counter[Ranks] = Counter()
        for ranks in needs.world_groups:
            times[ranks] += 1
            key = blake2b(repr((ranks, times[ranks])).encode(), digest_size=16).hexdigest()
            prefixed = dist.PrefixStore(f"world/{key}", self.store)
            backend = dist.ProcessGroupGloo(prefixed, ranks.index(needs.rank), len(ranks), UNTIL_IT_IS_KNOWN)
            self._backends.setdefault(ranks, deque()).append(backend)

    def sockets(self) -> set[str]:
        """The sockets at which members connect to this one, and their connections."""
        return gloo_sockets.at_ports(self.store.published)

    def take_side_group(self, name: str) -> SideGroup | None:
        """The side group of this name, once; None: there is none."""
        return self._side_groups.pop(name, None)

    def take_backend(self, ranks: Sequence[int]) -> Any:
        """What carries the next group of these ranks of the world; None: there is none left."""
        left = self._backends.get(tuple(sorted(ranks)))
        return left.popleft() if left else None

    def take_all(self) -> list[Any]:
        """All that nobody has taken."""
        left = [*self._side_groups.values(), *(each for backends in self._backends.values() for each in backends)]
        self._side_groups.clear()
        self._backends.clear()
        return left


def install_hand_over(take: Callable[[Sequence[int]], Any]) -> None:
    """Let torch ask for what carries a group of gloo's before it makes one.

    Args:
        take: ranks of the world → ProcessGroupGloo, or None.
    """
    dist.Backend._ensure_backend_registered(GLOO.lower())
    plugin = dist.Backend._plugins[GLOO]
    original = plugin.creator_fn

    def create(options: Any, backend_options: Any) -> Any:
        # torch says no ranks of the world itself.
        backend = take(options.global_ranks_in_group or range(options.group_size))
        if backend is None:
            return original(options, backend_options)
        backend._set_default_timeout(options.timeout)
        backend.options.global_ranks_in_group = options.global_ranks_in_group
        backend.options.group_name = options.group_id
        return backend

    dist.Backend._plugins[GLOO] = plugin._replace(creator_fn=create)
