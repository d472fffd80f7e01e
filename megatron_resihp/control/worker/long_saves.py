# SPDX-License-Identifier: Apache-2.0
"""Asks the survivors of a failure to wait for a worker that is writing a checkpoint, which nothing interrupts.

May import `protocol` and this package's other modules.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from megatron_resihp.control.worker.errors import JobEnded
from megatron_resihp.control.worker.heard import Heard
from megatron_resihp.protocol.messages import Message, StillSaving

LOOK_S: Final = 1.0
EACH_S: Final = 5.0
"""How often the coordinator is told."""


@contextmanager
def waited_for(heard: Heard, tell: Callable[[Message], None], worker: int, most_s: float) -> Iterator[None]:
    """Write a checkpoint, after which this worker reports if the epoch is broken by then.

    Args:
        tell: sends a message to the coordinator.
        worker: this worker's id.
        most_s: the longest that others are asked to wait, from when the epoch broke.
    """
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(heard, tell, worker, most_s, over), name="resihp-save", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()


def _watch(heard: Heard, tell: Callable[[Message], None], worker: int, most_s: float, over: threading.Event) -> None:
    pause, asked = LOOK_S, False
    while not over.wait(pause):
        broken_at = heard.broken_at()
        if broken_at is None:
            continue
        if time.time() - broken_at > most_s:
            return
        if not asked:
            print(f"resihp: worker {worker} is still writing a checkpoint; the others wait for it", file=sys.stderr)
        pause, asked = EACH_S, True
        try:
            tell(StillSaving(worker, heard.epoch))
        except JobEnded:
            return
