# SPDX-License-Identifier: Apache-2.0
"""Asks torch whether NCCL is in error, and the coordinator for a recovery where it is.

Where a peer dies its agent tells. But a link may fail between two that live, and a collective may never end; the thread
that waits for the device hears of neither. May import `control` and `executor`.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.control.worker.errors import JobEnded
from megatron_resihp.executor.nccl.aborts import group_error
from megatron_resihp.protocol.messages import CommunicationFailed

LOOK_S: Final = 1.0


def begin(control: WorkerControl, failed: Callable[[], None]) -> None:
    """Look again and again, in a thread. `failed`: called at each error, before the coordinator hears of it."""
    threading.Thread(target=_watch, args=(control, failed), name="resihp-nccl", daemon=True).start()


def _watch(control: WorkerControl, failed: Callable[[], None]) -> None:
    while True:
        time.sleep(LOOK_S)
        try:
            look(control, failed)
        except JobEnded:
            return  # the thread that listens to notices ends this worker


def look(control: WorkerControl, failed: Callable[[], None]) -> None:
    """Ask once. What has failed in an epoch that is broken anyway is no news."""
    epoch = control.epoch  # before the groups, which are gone before another epoch begins
    if control.heard.broken():
        return
    failure = group_error()
    if failure is not None:
        failed()
        control.tell(CommunicationFailed(control.worker, epoch, failure))
