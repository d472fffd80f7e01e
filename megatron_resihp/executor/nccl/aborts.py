# SPDX-License-Identifier: Apache-2.0
"""Aborts NCCL's communicators, all at once. May import torch.

`ncclCommAbort` raises its communicator's flag, which ends the kernels of that communicator, and then waits for the
device. A kernel of another communicator that spins for a dead peer holds up the device until its own flag is raised.
So aborts that are made one after the other wait for each other (pytorch#119797, nccl#1013); here each has a thread.
torch's `_abort_process_group` puts all aborts into one NCCL group call, but the older backend makes each abort on a new
thread, which that call does not cover.
"""

import threading
import time
from typing import Any, Final

import torch
import torch.distributed as dist

from megatron_resihp.executor.groups.errors import device_fault

ABORT_S: Final = 10.0
"""Seconds until the device counts as stuck: far longer than an abort takes, far shorter than peers wait."""


class DeviceLost(RuntimeError):
    """NCCL could not be aborted in time, or the device has faulted. This worker can't go on: it must die so that the
    others do."""


class NcclAborts:
    """The aborts of an epoch's groups. Each group is aborted once.

    Args:
        timeout_s: how long an abort may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads: dict[Any, threading.Thread] = {}
        self._errors: list[str] = []
        self._fault: str | None = None

    def start(self) -> None:
        """Start to abort every group that is not being aborted yet. Returns at once."""
        for group in nccl_groups():
            if group not in self._threads:
                thread = threading.Thread(target=self._abort, args=(group,), name="resihp-abort", daemon=True)
                self._threads[group] = thread
                thread.start()

    def wait(self) -> list[str]:
        """Wait until all aborts are over.

        Returns:
            the aborts that NCCL refused, one line for each group; each is returned once.

        Raises:
            DeviceLost: some aborts are not over in time, or the device has faulted.
        """
        deadline = time.monotonic() + self._timeout_s
        waited_for = list(self._threads.items())
        for _, thread in waited_for:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = sorted(group.group_name for group, thread in waited_for if thread.is_alive())
        if stuck:
            raise DeviceLost(f"NCCL groups {', '.join(stuck)} could not be aborted within {self._timeout_s:g} s")
        if self._fault is not None:
            raise DeviceLost(f"the device faulted, as an abort found ({self._fault})")
        errors, self._errors = self._errors, []
        return errors

    def repeat(self, group: Any) -> None:
        """Abort this group at the next `start`, even if it was aborted before."""
        self._threads.pop(group, None)

    def forget(self) -> None:
        """The epoch's groups are out of use."""
        self._threads.clear()

    def _abort(self, group: Any) -> None:
        try:
            backend_of(group).abort()
        except RuntimeError as error:
            self._errors.append(f"group {group.group_name}: {error}")
            if device_fault(error) is not None:
                self._fault = str(error).splitlines()[0]


def nccl_groups() -> list[Any]:
    """torch's NCCL groups, sorted by name. Safe to call while another thread makes groups."""
    groups = [group for group, (backend, _) in list(dist.distributed_c10d._world.pg_map.items()) if backend == "nccl"]
    return sorted(groups, key=lambda group: group.group_name)


def backend_of(group: Any) -> Any:
    """The backend of an NCCL group."""
    return group._get_backend(torch.device("cuda"))


def group_error() -> str | None:
    """The error that torch's watchdog has found in an NCCL group, such as a network error or a time-out; None: no
    error. The watchdog ends nothing by itself (`control.node.environment.NCCL`). Called from any thread.
    """
    errors = ((group.group_name, backend_of(group).get_error().name) for group in nccl_groups())
    return next((f"NCCL group {name}: {error}" for name, error in errors if error != "SUCCESS"), None)
