# SPDX-License-Identifier: Apache-2.0
"""All communicators of one epoch: torch's default world, the groups in it, and side groups that include standbys.

May import torch, `plan` and the names of the store's keys. Worker ids become torch ranks here and nowhere else.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_resihp.control import keys
from megatron_resihp.executor.direct.peers import NAME, GlooPeers, NcclPeers, Peers
from megatron_resihp.executor.gloo.groups_ahead import GroupsAhead
from megatron_resihp.executor.groups.connections import Connections
from megatron_resihp.executor.groups.rendezvous import InterruptibleStore
from megatron_resihp.executor.groups.retired import RetiredGroups
from megatron_resihp.executor.groups.side_group import SideGroup
from megatron_resihp.executor.groups.torch_patches import TorchPatches
from megatron_resihp.executor.groups.waiting import Waiter
from megatron_resihp.executor.nccl.aborts import ABORT_S
from megatron_resihp.executor.nccl.meetings import NcclMeetings


class Communicators:
    """Builds, aborts and destroys an epoch's communicators.

    Args:
        store: a raw c10d store for this object alone.
        me: this worker's id.
        interrupted: whether the epoch under construction is broken.
        abort_s: how long NCCL may take to abort an epoch.
        reopen: makes another such store if this one's connection is lost; None: the store can't be reopened.

    Attributes:
        connections: of the epoch's groups.
        waiter: notes and ends waits for peers.
    """

    def __init__(
        self, store: dist.Store, me: int, interrupted: Callable[[], bool], abort_s: float = ABORT_S,
        reopen: Callable[[], dist.Store] | None = None,
    ) -> None:  # fmt: skip
        self.connections = Connections(me, interrupted, abort_s)
        self.waiter = Waiter(interrupted)
        self._inner = store
        self._reopen = reopen
        self._me = me
        self._interrupted = interrupted
        self._side_groups: list[SideGroup] = []
        self._ahead: GroupsAhead | None = None
        self._retired = RetiredGroups()
        self._meetings = NcclMeetings(interrupted, self.connections.abort_anew)
        self._patches = TorchPatches(self.waiter, self._meetings)

    def groups_ahead(self, change: int, plan_digest: str) -> GroupsAhead:
        """An empty `GroupsAhead`, to make a plan's groups while another epoch's are in use. Called from any thread.

        Args:
            change: the number of the change. It is unique, so groups of two changes never meet.

        Raises:
            KeyError, AttributeError, TypeError: this torch makes its groups in another way.
        """
        self._patches.install_hand_over(lambda group: None if self._ahead is None else self._ahead.take_backend(group))
        prefix = f"{keys.groups_of_change(change)}{plan_digest}"
        store = InterruptibleStore(self._connected(), self._interrupted, prefix)
        return GroupsAhead(store, self._me, self.waiter)

    def _connected(self) -> dist.Store:
        """The store, reopened if its connection was lost while it was not in use."""
        try:
            self._inner.check(["resihp"])
        except dist.DistError:
            if self._reopen is None:
                raise
            self._inner = self._reopen()
        return self._inner

    def begin(self, epoch: int, plan_digest: str, ahead: GroupsAhead | None = None) -> None:
        """Start building an epoch. Members that hold another plan meet no peers: the digest is part of every key.

        Args:
            ahead: groups made in advance for this plan; either all its members have them, or none.
        """
        self.connections.begin(ahead)
        self._ahead = ahead
        if ahead is not None:
            self.connections.store = ahead.store
            return
        prefix = f"{keys.groups_of_epoch(epoch)}{plan_digest}"
        self.connections.store = InterruptibleStore(self._connected(), self._interrupted, prefix)

    def join_world(self, backend: str, order: Sequence[int], timeout: timedelta) -> None:
        """Make torch's default group; `order` gives the worker id of each rank."""
        assert self.connections.store is not None
        if backend == "gloo":
            self._patches.install_waits()
        if backend == "nccl":
            # NCCL takes its buffers from the device, not from torch's cached memory.
            torch.cuda.empty_cache()
            self._patches.install_nccl()
        dist.init_process_group(
            backend,
            store=self.connections.store,
            rank=list(order).index(self._me),
            world_size=len(order),
            timeout=timeout,
        )

    def meeting_at_once(self) -> AbstractContextManager[None]:
        """Peers hear of all groups of the world that are made meanwhile by one message, where these are gloo's."""
        assert self.connections.store is not None
        return self.connections.store.gathering() if self._patches.waits else nullcontext()

    @property
    def host_waiter(self) -> Waiter | None:
        """Ends waits of groups for host tensors, where the world carries none; None: `join_world` covers all waits."""
        return None if self._patches.waits else self.waiter

    def host_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A group of these ranks of the world for host tensors, which NCCL does not carry. All these ranks call it."""
        group: dist.ProcessGroup = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        return group

    def side_group(self, name: str, workers: Sequence[int]) -> SideGroup:
        assert self.connections.store is not None
        group = None if self._ahead is None else self._ahead.take_side_group(name)
        if group is None:
            group = SideGroup(self.connections.store, name, workers, self._me, self.waiter)
        self._side_groups.append(group)
        return group

    def peer_group(self, workers: Sequence[int], timeout: timedelta) -> Peers:
        """A group of workers, standbys included, for tensors of their devices. `timeout`: of each operation."""
        assert self.connections.store is not None
        if torch.empty(0, device="cuda").is_cuda:
            torch.cuda.empty_cache()
            self._patches.install_nccl()
            return NcclPeers(self.connections.store, workers, self._me, timeout)
        group = GlooPeers(self.connections.store, NAME, workers, self._me, self.waiter, timeout)
        self._side_groups.append(group)
        return group

    def destroy(self) -> None:
        """Forget all groups of the epoch; a world with a dead rank is useless. `release` frees them."""
        if self.connections.store is not None:
            self._retired.add((), self.connections.listeners(self.connections.store.published))
        if self._ahead is not None:
            self._retired.add(self._ahead.take_all())
            self._ahead = None
        self._retired.add([*dist.distributed_c10d._world.pg_map, *self._side_groups])
        self._side_groups.clear()
        self.connections.forget_aborts()
        self._meetings.forget()
        if dist.is_initialized():
            dist.destroy_process_group()
        # A standby has no world, but may have had a group of devices.
        dist.distributed_c10d._world.pg_map.clear()
        # torch names groups by this count, which also counts an interrupted attempt to make a world. Members may have
        # come less far in it, and a member that has another name for a group waits in it alone.
        dist.distributed_c10d._world.group_count = 0
        self.connections.store = None

    def await_all_idle(self, epoch: int, workers: int, timeout_s: float) -> None:
        """Before an epoch is left by choice: wait until no worker has anything under way for another one.

        NCCL's kernels end when the proxy thread has their last buffers, and an abort ends that thread with them unsent,
        for which a peer would wait in vain.

        Args:
            workers: how many come here.
            timeout_s: how long to wait for them. Then, and as soon as the epoch is broken, this returns too; a store
                that is lost is first reopened.
        """
        with self.waiter.noted():
            torch.cuda.synchronize()
            # The epoch's store may not have been used for days. Without it the change is at risk, and no state is.
            with suppress(RuntimeError):  # of the store: lost, late, or of a broken epoch
                store = InterruptibleStore(
                    self._connected(), self._interrupted, f"{keys.groups_of_epoch(epoch)}leaving"
                )
                if store.add("idle", 1) == workers:
                    store.set("all idle", b"1")
                store.set_timeout(timedelta(seconds=timeout_s))
                store.get("all idle")  # relays ask for many workers at once, which they don't in `wait`

    def discard(self, ahead: GroupsAhead) -> None:
        """Forget groups that no epoch will use; `release` frees them."""
        with suppress(OSError):  # too many open files may be why there is no use for them
            self._retired.add((), ahead.listeners())
        self._retired.add(ahead.take_all())

    def end_hand_over(self) -> None:
        """Stop offering prepared groups, now that all groups of the epoch's plan exist. A member that makes another
        group later must find none, because members come here at different times.
        """
        if self._ahead is None:
            return
        left, missed = self._ahead.wrong_guesses
        if left or (missed and self._patches.waits):  # where the world is gloo's, all of its groups are guessed
            print(f"resihp: worker {self._me} made {left} groups ahead that are not needed, and lacked {missed}",
                  file=sys.stderr, flush=True)  # fmt: skip
        self._retired.add(self._ahead.take_all())
        self._ahead = None

    @property
    def left_behind(self) -> int:
        """Groups of earlier epochs that are not free yet, and calls into them that have not come back."""
        return self._retired.left + self.waiter.left_behind + self._meetings.left_behind

    def release(self) -> None:
        """Free the groups of earlier epochs, all at once and after the step: each joins its threads."""
        self.connections.close_aborted()
        self._retired.free()
