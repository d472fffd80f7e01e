# SPDX-License-Identifier: Apache-2.0
"""All communicators of one epoch: torch's default world, the groups in it, and side groups that include standbys.

May import torch and `plan`. Worker ids become torch ranks here and nowhere else.
"""

import functools
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_resihp.executor.gloo import loops as gloo_loops
from megatron_resihp.executor.gloo import sockets as gloo_sockets
from megatron_resihp.executor.gloo.groups_ahead import GroupsAhead, install_hand_over
from megatron_resihp.executor.groups.rendezvous import InterruptibleStore
from megatron_resihp.executor.groups.side_group import SideGroup
from megatron_resihp.executor.groups.waiting import Waiter
from megatron_resihp.executor.nccl.aborts import ABORT_S, NcclAborts, backend_of, nccl_groups
from megatron_resihp.executor.nccl.meetings import NcclMeetings

FREEING_S = 0.3
"""A group that takes longer to be freed may wait for its event loop, which `gloo_loops` then lets end."""

LOST_S = 0.3
"""A group that is still not free after this time waits for an operation that gloo has lost, until its timeout."""

OUT_OF_MEMORY_WORDS = ("out of memory", "cuda failure 2 ", "failed to cuda calloc", "failed to cuda host alloc")
"""Words in errors of torch and NCCL that say that the device, or pinned memory, is full."""

COMMUNICATOR_WORDS = (
    "gloo", "nccl", "connection closed by peer", "connection reset by peer", "connection was likely closed",
    "broken pipe", "socket", "rendezvous", "processgroup", "tcpstore", "the epoch is broken", "the epoch was broken",
)  # fmt: skip


class Communicators:
    """Builds, aborts and destroys an epoch's communicators.

    Args:
        store: a raw c10d store for this object alone.
        me: this worker's id.
        interrupted: whether the epoch under construction is broken.
        abort_s: how long NCCL may take to abort an epoch.
        reopen: makes another such store if this one's connection is lost; None: the store can't be reopened.
    """

    def __init__(
        self, store: dist.Store, me: int, interrupted: Callable[[], bool], abort_s: float = ABORT_S,
        reopen: Callable[[], dist.Store] | None = None,
    ) -> None:  # fmt: skip
        self._inner = store
        self._reopen = reopen
        self._me = me
        self._interrupted = interrupted
        self._foreign = gloo_sockets.identities()
        self._peer_ports: set[int] | None = None
        self._side_groups: list[SideGroup] = []
        self._ahead: GroupsAhead | None = None
        self._kept_open: dict[str, socket.socket] = {}
        self._retired: list[Any] = []
        self._retired_listeners: set[str] = set()
        self._freeing: list[threading.Thread] = []
        self._nccl_aborts = NcclAborts(abort_s)
        self._waiter = Waiter(interrupted)
        self._waits_installed = False
        self._nccl_installed = False
        self._meetings = NcclMeetings(interrupted, self._abort_anew)
        self._hand_over_installed = False
        self._lock = threading.Lock()
        self._epoch_store: InterruptibleStore | None = None

    def groups_ahead(self, change: int, plan_digest: str) -> GroupsAhead:
        """An empty `GroupsAhead`, to make a plan's groups while another epoch's are in use. Called from any thread.

        Args:
            change: the number of the change. It is unique, so groups of two changes never meet.

        Raises:
            KeyError, AttributeError, TypeError: this torch makes its groups in another way.
        """
        self._install_hand_over()
        prefixed = dist.PrefixStore(f"resihp/groups-of-change/{change}/{plan_digest}", self._connected())
        store = InterruptibleStore(prefixed, self._interrupted)
        return GroupsAhead(store, self._me, self._waiter)

    def _connected(self) -> dist.Store:
        """The store, reopened if its connection was lost while it was not in use."""
        try:
            self._inner.check(["resihp"])
        except dist.DistError:
            if self._reopen is None:
                raise
            self._inner = self._reopen()
        return self._inner

    def _install_hand_over(self) -> None:
        if not self._hand_over_installed:
            install_hand_over(lambda group: None if self._ahead is None else self._ahead.take_backend(group))
            self._hand_over_installed = True

    def begin(self, epoch: int, plan_digest: str, ahead: GroupsAhead | None = None) -> None:
        """Start building an epoch. Members that hold another plan meet no peers: the digest is part of every key.

        Args:
            ahead: groups made in advance for this plan; either all its members have them, or none.
        """
        with self._lock:
            self._foreign = gloo_sockets.identities()
            if ahead is not None:
                # In this order: a member that has begun already may connect meanwhile.
                self._foreign -= ahead.sockets()
            self._peer_ports = None
        self._ahead = ahead
        if ahead is not None:
            self._epoch_store = ahead.store
            return
        prefixed = dist.PrefixStore(f"resihp/groups/{epoch}/{plan_digest}", self._connected())
        self._epoch_store = InterruptibleStore(prefixed, self._interrupted)

    def join_world(self, backend: str, order: Sequence[int], timeout: timedelta) -> None:
        """Make torch's default group; `order` gives the worker id of each rank."""
        assert self._epoch_store is not None
        if backend == "gloo" and not self._waits_installed:
            self._waiter.install()
            self._waits_installed = True
        if backend == "nccl":
            # NCCL takes its buffers from the device, not from torch's cached memory.
            torch.cuda.empty_cache()
        if backend == "nccl" and not self._nccl_installed:
            dist.barrier = _with_own_device(dist.barrier)
            self._meetings.install()
            self._nccl_installed = True
        dist.init_process_group(
            backend, store=self._epoch_store, rank=list(order).index(self._me), world_size=len(order), timeout=timeout
        )

    @property
    def waiter(self) -> Waiter | None:
        """Ends waits of groups for host tensors, where the world carries none; None: `join_world` covers all waits."""
        return None if self._waits_installed else self._waiter

    def longest_wait_s(self, now: float) -> float:
        """See Waiter.longest_s. Called from any thread."""
        return self._waiter.longest_s(now)

    def waiting(self) -> AbstractContextManager[None]:
        """Inside this context the thread waits for its peers, on the device."""
        return self._waiter.noted()

    def host_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A group of these ranks of the world for host tensors, which NCCL does not carry. All these ranks call it."""
        group: dist.ProcessGroup = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        return group

    def side_group(self, name: str, workers: Sequence[int]) -> SideGroup:
        assert self._epoch_store is not None
        group = None if self._ahead is None else self._ahead.take_side_group(name)
        if group is None:
            group = SideGroup(self._epoch_store, name, workers, self._me, self._waiter)
        self._side_groups.append(group)
        return group

    def ports(self) -> list[int]:
        """Ports at which this worker's gloo groups listen."""
        return gloo_sockets.listening_ports(self._foreign)

    def narrow(self, peer_ports: set[int]) -> None:
        """From now on only connections that have an end at one of these ports are cut on abort."""
        with self._lock:
            self._peer_ports = peer_ports

    def abort(self) -> None:
        """Make every blocked or later operation of the epoch fail. Called from any thread, any number of times.

        Raises:
            DeviceStuck: NCCL did not finish its aborts in time.
        """
        with self._lock:
            self._start_abort()
        self._end_abort()

    def abort_if_interrupted(self) -> None:
        """`abort` for another thread than the one that builds epochs, which may have begun the next epoch. It aborts
        only a broken epoch, because results of aborted NCCL collectives are noticed only there.
        """
        with self._lock:
            if not self._interrupted():
                return
            self._start_abort()
        self._end_abort()

    def _start_abort(self) -> None:
        self._nccl_aborts.start()
        self._kept_open |= gloo_sockets.end_receiving(self._foreign | self._kept_open.keys(), self._peer_ports)
        if self._epoch_store is not None:
            gloo_sockets.stand_in(self._epoch_store.take_sought(), self._foreign)

    def _end_abort(self) -> None:
        """Without the lock: NCCL may take seconds, in which another thread must be able to abort its communicator."""
        for error in self._nccl_aborts.wait():
            print(f"resihp: worker {self._me} could not abort {error}", file=sys.stderr, flush=True)

    def _abort_anew(self, group: Any) -> None:
        """Abort again: a communicator that was made while its group was being aborted was not aborted with it."""
        with self._lock:
            self._nccl_aborts.repeat(group)

    def failure(self) -> str | None:
        """The error that torch's watchdog has found in an NCCL group, such as a network error or a time-out; None: no
        error. The watchdog ends nothing by itself (`control.node.environment.NCCL`). Called from any thread.
        """
        errors = ((group.group_name, backend_of(group).get_error().name) for group in nccl_groups())
        return next((f"NCCL group {name}: {error}" for name, error in errors if error != "SUCCESS"), None)

    def destroy(self) -> None:
        """Forget all groups of the epoch; a world with a dead rank is useless. `release` frees them."""
        if self._epoch_store is not None:
            self._retired_listeners |= gloo_sockets.listeners(self._epoch_store.published, self._foreign)
        if self._ahead is not None:
            self._retired += self._ahead.take_all()
            self._ahead = None
        self._retired += [*dist.distributed_c10d._world.pg_map, *self._side_groups]
        self._side_groups.clear()
        self._nccl_aborts.forget()
        self._meetings.forget()
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch names groups by this count, which also counts an interrupted attempt to make a world. Members may have
        # come less far in it, and a member that has another name for a group waits in it alone.
        dist.distributed_c10d._world.group_count = 0
        self._epoch_store = None

    def discard(self, ahead: GroupsAhead) -> None:
        """Forget groups that no epoch will use; `release` frees them."""
        with suppress(OSError):  # too many open files may be why there is no use for them
            self._retired_listeners |= ahead.listeners()
        self._retired += ahead.take_all()

    def end_hand_over(self) -> None:
        """Stop offering prepared groups, now that all groups of the epoch's plan exist. A member that makes another
        group later must find none, because members come here at different times.
        """
        if self._ahead is None:
            return
        left, missed = self._ahead.wrong_guesses
        if left or (missed and self._waits_installed):  # where the world is gloo's, all of its groups are guessed
            print(f"resihp: worker {self._me} made {left} groups ahead that are not needed, and lacked {missed}",
                  file=sys.stderr, flush=True)  # fmt: skip
        self._retired += self._ahead.take_all()
        self._ahead = None

    @property
    def left_behind(self) -> int:
        """Groups of earlier epochs that are not free yet, and calls into them that have not come back."""
        calls = self._waiter.left_behind + self._meetings.left_behind
        return sum(thread.is_alive() for thread in self._freeing) + calls

    def release(self) -> None:
        """Free the groups of earlier epochs, all at once and after the step: each joins its threads."""
        with self._lock:
            for connection in self._kept_open.values():
                connection.close()
            self._kept_open.clear()
        holders = [[group] for group in self._retired]
        self._retired.clear()
        threads = [threading.Thread(target=holder.clear, name="resihp-freeing", daemon=True) for holder in holders]
        for thread in threads:
            thread.start()
        late = _still_alive(threads, FREEING_S)
        if late or self._freeing:
            gloo_loops.calm(self._retired_listeners)
        self._freeing = [*_still_alive(self._freeing, 0.0), *_still_alive(late, LOST_S)]
        if not self._freeing:
            self._retired_listeners.clear()


def _with_own_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap dist.barrier, which takes torch's rank as the device where it is a group's first operation. That is right
    when a job begins, but wrong for restarted workers: two of them would use one device.
    """

    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: list[int] | None = None, **options: Any) -> Any:
        if device_ids is None and dist.get_backend(group) == "nccl":
            device_ids = [torch.cuda.current_device()]
        return original(group, async_op, device_ids, **options)

    return barrier


def _still_alive(threads: Sequence[threading.Thread], seconds: float) -> list[threading.Thread]:
    """Wait for threads to end, for `seconds` in total; returns the threads that are still alive."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


def is_communicator_error(error: BaseException) -> bool:
    """Whether an exception came from a communicator, as opposed to the model, the data or the user's code.

    A device without memory for a communicator is no dead peer: another try would fail as well.
    """
    if is_out_of_memory(error):
        return False
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in COMMUNICATOR_WORDS)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the device or of the host ran out, in torch, in NCCL or in Python."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY_WORDS)
