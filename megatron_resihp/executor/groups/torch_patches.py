# SPDX-License-Identifier: Apache-2.0
"""What has to be replaced in torch, each part once in a process and only when it is first needed. May import torch."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_resihp.executor.gloo.groups_ahead import install_hand_over
from megatron_resihp.executor.groups.waiting import Waiter
from megatron_resihp.executor.nccl.meetings import NcclMeetings


class TorchPatches:
    """The patches of one process.

    Attributes:
        waits: whether all waits of gloo's groups can be ended by `waiter`.
    """

    def __init__(self, waiter: Waiter, meetings: NcclMeetings) -> None:
        self._waiter = waiter
        self._meetings = meetings
        self.waits = False
        self._nccl = False
        self._hand_over = False

    def install_waits(self) -> None:
        """Bound the waits of a world that gloo carries."""
        if not self.waits:
            self._waiter.install()
            self.waits = True

    def install_nccl(self) -> None:
        """Bound the meetings of a world that NCCL carries, and have barriers use this process's device."""
        if not self._nccl:
            dist.barrier = _of_nccl(dist.barrier, self._waiter)
            self._meetings.install()
            self._nccl = True

    def install_hand_over(self, take: Callable[[Any], Any]) -> None:
        """Let torch's new groups have what was prepared for them. `take`: as of `gloo.groups_ahead`.

        Raises:
            KeyError, AttributeError, TypeError: this torch makes its groups in another way.
        """
        if not self._hand_over:
            install_hand_over(take)
            self._hand_over = True


def _of_nccl(original: Callable[..., Any], waiter: Waiter) -> Callable[..., Any]:
    """Wrap dist.barrier, which takes torch's rank as the device where it is a group's first operation. That is right
    when a job begins, but wrong for restarted workers: two of them would use one device.

    A barrier that was aborted while it was waited for returns as if all had come. Megatron would go on to name a
    checkpoint that a dead worker has not written, and delete the one before.
    """

    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: list[int] | None = None, **options: Any) -> Any:
        nccl = dist.get_backend(group) == "nccl"
        if device_ids is None and nccl:
            device_ids = [torch.cuda.current_device()]
        result = original(group, async_op, device_ids, **options)
        if nccl and not async_op:
            waiter.give_up_if_interrupted()
        return result

    return barrier
