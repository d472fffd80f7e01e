# SPDX-License-Identifier: Apache-2.0
"""Whether what crosses under a heterogeneous plan goes between devices, or through the host: all workers agree.

A worker on which the way between devices has failed, though all of its peers lived, says no from then on. So the epoch
that follows the error goes through the host. May import torch, `executor` and this package.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_resihp.executor.direct.peers import Parts, Peers, Pending
from megatron_resihp.executor.groups.errors import is_out_of_memory
from megatron_resihp.executor.groups.side_group import SideGroup


class DirectWayFailed(dist.DistError):
    """Something has failed on the way between devices; its cause says what."""


class DirectTrials:
    """What this worker has seen of the way between devices."""

    def __init__(self) -> None:
        self._struck: frozenset[int] | None = None
        self._is_off = False

    def strike(self, members: Iterable[int]) -> None:
        """An operation has failed. `members`: of the epoch."""
        self._struck = frozenset(members)

    def is_usable(self, members: Iterable[int]) -> bool:
        """Whether nothing is known against it. `members`: of the epoch that begins."""
        struck, self._struck = self._struck, None
        # With fewer workers left, the error was the end of one of them.
        self._is_off |= struck is not None and struck.issubset(members)
        return not self._is_off


def agreed_to_use(wanted: bool, everybody: SideGroup) -> bool:
    """Whether all members want it; all of them call this together."""
    against = torch.tensor([0.0 if wanted else 1.0])
    everybody.sum(against)
    return not against.item()


def can_carry(backend: str) -> bool:
    """Whether a job's backend carries tensors of this worker's device; the stand-in's are in host memory."""
    return backend == "nccl" or not torch.empty(0, device="cuda").is_cuda


class WatchedPeers:
    """Peers whose errors are noted, and so is memory that runs out for them: the host's way takes less of the device.

    Args:
        failed: called at each error.
    """

    def __init__(self, peers: Peers, failed: Callable[[], None]) -> None:
        self._peers, self._failed = peers, failed

    def connect(self) -> None:
        self._watch(self._peers.connect)

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.taking_memory(lambda: self._peers.room(shape, dtype))

    def exchange(self, sends: Parts, receives: Parts) -> Pending:
        return _Watched(self._watch(lambda: self._peers.exchange(sends, receives)), self._watch)

    def taking_memory(self, call: Callable[[], Any]) -> Any:
        """Make a call that takes memory of the device for what is exchanged.

        Raises:
            DirectWayFailed: there is too little. Other errors are the call's own.
        """
        try:
            return call()
        except Exception as error:
            if is_out_of_memory(error):
                self._fail(error)
            raise

    def _watch(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        self._failed()
        raise DirectWayFailed(f"a tensor could not cross between devices ({type(error).__name__})") from error


class _Watched:
    def __init__(self, pending: Pending, watch: Callable[[Callable[[], Any]], Any]) -> None:
        self._pending, self._watch = pending, watch

    def wait(self) -> None:
        self._watch(self._pending.wait)
