# SPDX-License-Identifier: Apache-2.0
"""The process that writes checkpoints beside training: Megatron's own, of whichever of its strategies.

It lives as long as its trainer. It is ended, in the midst of a file perhaps, where an epoch's end has made a save
worthless, and started anew. May import megatron and `control.linux`.
"""

import multiprocessing
import sys
import threading
import time
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from typing import Any, Final

from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy
from megatron.training import async_utils

from megatron_resihp.control import linux

HOW: Final = "forkserver"
"""As Megatron starts it. Such a process has none of this one's sockets."""
READY_S = 20.0
"""How long a new writer takes to import what it needs. A save that comes earlier holds training up until then."""
END_S: Final = 5.0
"""How long a killed writer may take to end: the kernel lets it finish what it has begun with a disk."""


class Writer:
    """One worker's writer. `args`: Megatron's; without `--async-save` there is none."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._processes: list[BaseProcess] = []
        self._started_at = 0.0

    @property
    def is_wanted(self) -> bool:
        """Whether the job saves beside training."""
        return bool(self._args.async_save and self._args.use_persistent_ckpt_worker)

    @property
    def is_ready(self) -> bool:
        """Whether a save holds training up no longer than it must."""
        return time.monotonic() - self._started_at >= READY_S

    @property
    def calls(self) -> int:
        """Number of saves that have been begun and are not whole on all workers."""
        queue = async_utils._async_calls_queue
        return 0 if queue is None else queue.get_num_unfinalized_calls()

    def start(self) -> None:
        """Start it; it gets ready by itself."""
        if not self.is_wanted:
            return
        before = multiprocessing.active_children()
        # By this number it chooses its device; a rank would be that of one epoch.
        async_utils.init_persistent_async_worker(self._args.local_rank, HOW)
        # The other child that there may be, a fork, keeps the writers' results.
        self._processes = [
            child for child in multiprocessing.active_children()
            if child not in before and not isinstance(child, ForkProcess)
        ]  # fmt: skip
        self._started_at = time.monotonic()
        if self._processes:
            watch = threading.Thread(target=self._watch, args=(self._processes,), name="resihp-writer", daemon=True)
            watch.start()

    def forget_calls(self) -> None:
        """Begin a new epoch: end a writer that has saves of an older one, and count saves from 0 as all workers do."""
        if self.calls:
            self.end()
            self._drop_results()
            self.start()
        elif async_utils._async_calls_queue is not None:
            async_utils._async_calls_queue.call_idx = -1

    def end(self) -> None:
        """End it, whatever it is doing."""
        processes, self._processes = self._processes, []
        for process in processes:
            # It may never have been used, and Megatron ends only writers that it has used.
            async_utils._async_calls_queue._get_async_caller().process = process
            async_utils.reset_persistent_async_worker(self._args.async_strategy)
            process.join(END_S)
            if process.is_alive():
                print(f"resihp: the checkpoint writer (process {process.pid}) cannot be killed", file=sys.stderr)

    def _drop_results(self) -> None:
        """What an ended writer has said of its files, or says yet, is for no one."""
        keeper = sys.modules[get_async_strategy(self._args.async_strategy)[1]["get_write_results_queue"].__module__]
        keeper._results_queue = keeper._results_queue._manager.Queue()  # type: ignore[attr-defined]

    def _watch(self, processes: list[BaseProcess]) -> None:
        """A save that waits for a dead writer would wait for ever."""
        connection.wait([process.sentinel for process in processes])
        if processes is self._processes:
            linux.die("its checkpoint writer has ended, killed perhaps for want of memory")
