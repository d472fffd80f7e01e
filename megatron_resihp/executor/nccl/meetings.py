# SPDX-License-Identifier: Apache-2.0
"""Makes NCCL's communicators in calls that can be abandoned. May import torch and this package.

torch makes a communicator in the first operation of a group, or of a pair for P2P, and NCCL then waits for all members.
If a peer dies before it joins, nothing ends that call: torch's abort knows a communicator only once it is made.
Non-blocking communicators don't help: torch holds their lock while it waits for them, up to a healthy one's timeout,
and its abort needs the same lock.

So before that operation we run one on a single number of our own, on a thread that is left behind when the epoch
breaks. If that thread ever returns, it aborts the communicator that it has made. It has not touched training's state.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist

from megatron_resihp.executor.groups.waiting import SLICE, WaitAbandoned
from megatron_resihp.executor.nccl.aborts import backend_of

COLLECTIVES: Final = (
    "broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "all_gather_single", "_allgather_base",
    "allgather_coalesced", "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "gather", "gather_single",
    "gather_into_tensor", "scatter", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "all_to_all_single", "alltoall_base",
    "alltoall", "barrier",
)  # fmt: skip
"""Methods of torch's groups that use the group's communicator."""
PEER_TO_PEER: Final = ("send", "recv")
"""Methods that use a communicator of two ranks, but in a batch the group's."""
ROOM: Final = 1 << 30
"""Bytes to have free on the device before a communicator is made: more than one takes."""


class NcclMeetings:
    """The first meetings of an epoch's groups.

    Args:
        interrupted: whether the epoch is broken.
        late: called with a group whose epoch broke during its meeting: its communicator may be newer than its abort.
    """

    def __init__(self, interrupted: Callable[[], bool], late: Callable[[Any], None]) -> None:
        self._interrupted = interrupted
        self._late = late
        self._met: set[tuple[str, int | None]] = set()
        self._batched: set[str] = set()
        self._kept: list[Any] = []
        self._left: list[_Meeting] = []

    @property
    def left_behind(self) -> int:
        """Meetings that were given up and are not over."""
        self._left = [meeting for meeting in self._left if not meeting.over.is_set()]
        return len(self._left)

    def install(self, kind: type = dist.ProcessGroup) -> None:
        """Let all operations of the process's groups go through this object."""
        for name in (*COLLECTIVES, "_start_coalescing"):
            if hasattr(kind, name):  # torch has newer names beside the older ones
                setattr(kind, name, self._meeting_all(getattr(kind, name), batch=name == "_start_coalescing"))
        for name in PEER_TO_PEER:
            setattr(kind, name, self._meeting_one(getattr(kind, name)))
        kind._end_coalescing = self._ending_batch(kind._end_coalescing)  # type: ignore[attr-defined]

    def forget(self) -> None:
        """The epoch's groups are out of use; those of the next one have the same names."""
        self._met.clear()
        self._batched.clear()
        self._kept.clear()

    def meet(self, group: Any, peer: int | None = None) -> None:
        """Make the communicator that the next operation uses, once.

        Args:
            peer: for an operation of two ranks, the peer's rank in the group.

        Raises:
            WaitAbandoned: the epoch broke. Other errors are the operation's own.
        """
        key = (group.group_name, peer)
        if key in self._met:
            return
        if _is_of_nccl(group) and group.size() > 1:
            self._meet(group, peer)
        self._met.add(key)

    def _meet(self, group: Any, peer: int | None) -> None:
        backend, rank = backend_of(group), group.rank()
        device = torch.cuda.current_device()

        def greet() -> None:
            torch.cuda.set_device(device)
            _make_room()
            with _own_number(device) as number:
                if peer is None:
                    work = backend.allreduce([number])
                elif rank < peer:
                    work = backend.send([number], peer, 0)
                else:
                    work = backend.recv([number], peer, 0)
            self._kept.append((work, number))

        meeting = _Meeting(greet, backend.abort)
        try:
            meeting.take_place(self._interrupted)
        except WaitAbandoned:
            self._left.append(meeting)
            self._late(group)
            raise

    def _meeting_all(self, original: Callable[..., Any], batch: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def operation(group: Any, *positional: Any, **options: Any) -> Any:
            self.meet(group)
            if batch:
                self._batched.add(group.group_name)
            return original(group, *positional, **options)

        return operation

    def _meeting_one(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def operation(group: Any, tensors: Any, peer: int, *positional: Any, **options: Any) -> Any:
            if group.group_name not in self._batched:
                self.meet(group, peer)
            return original(group, tensors, peer, *positional, **options)

        return operation

    def _ending_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def end(group: Any, *positional: Any, **options: Any) -> Any:
            self._batched.discard(group.group_name)
            return original(group, *positional, **options)

        return end


class _Meeting:
    """A call on a thread of its own.

    Args:
        call: may hang.
        undo: made on that thread if the call comes back after it was given up.

    Attributes:
        over: set once the thread has nothing left to do.
    """

    def __init__(self, call: Callable[[], None], undo: Callable[[], None]) -> None:
        self._call, self._undo = call, undo
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._given_up = False
        self._ended = threading.Event()
        self.over = threading.Event()

    def take_place(self, interrupted: Callable[[], bool]) -> None:
        """Make the call.

        Raises:
            WaitAbandoned: `interrupted` is true before or after the call's return. Other errors are the call's own.
        """
        threading.Thread(target=self._run, name="resihp-meeting", daemon=True).start()
        while not self._ended.wait(SLICE.total_seconds()) and not interrupted():
            pass
        with self._lock:
            self._given_up = not self._ended.is_set()
        if self._error is not None:
            raise self._error
        if self._given_up or interrupted():
            raise WaitAbandoned("the epoch was broken while NCCL made a communicator")

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self._error = error
        with self._lock:
            self._ended.set()
        if self._given_up:
            try:
                self._undo()
            except RuntimeError:
                pass  # there is nothing to abort, or it has been aborted
        self.over.set()


def _make_room() -> None:
    """NCCL takes its buffers from the device, not from torch's cached memory. Giving that back waits for the device, so
    only where it must be."""
    free, _ = torch.cuda.mem_get_info()
    if free < ROOM:
        torch.cuda.empty_cache()


@contextmanager
def _own_number(device: int) -> Iterator[torch.Tensor]:
    """A number on the device, on a stream that no training kernel waits for."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield torch.zeros(1, device=torch.device("cuda", device))


def _is_of_nccl(group: Any) -> bool:
    return bool(dist.distributed_c10d._world.pg_map.get(group, (None,))[0] == "nccl")
