# SPDX-License-Identifier: Apache-2.0
"""One process of `aborts.py`. Its argument is a JSON object: a case, and its rank. It writes what it found to a file.

Imports the plugin's executor, psutil, torch and the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist

from megatron_resihp.executor.groups.communicators import Communicators
from megatron_resihp.executor.nccl.aborts import backend_of, nccl_groups

PEER: Final = 2
TIMEOUT: Final = timedelta(seconds=30)
HANGS_AFTER_S: Final = 1.0
"""From the last collective's start to the abort: by then its kernel spins on the device."""
SIZE: Final = 1 << 20
ABORT_FIRST: Final = 1
"""torch's flag for `shrink_group`: abort what is under way."""


class Survivor:
    """A rank that survives, or the peer until it is lost."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._case = case
        self._rank: int = case["rank"]
        self._cuda = case["backend"] == "nccl"
        self._device = torch.device("cuda", 0) if self._cuda else torch.device("cpu")
        self._store = dist.FileStore(case["meeting"], -1)
        self._broken = threading.Event()
        self._communicators = Communicators(dist.PrefixStore("groups", self._store), self._rank, self._broken.is_set)
        self.found: dict[str, Any] = {"rank": self._rank}

    def run(self) -> None:
        self._warm_up()
        free = self._free_mib()
        groups = self._make_world()
        self._meet("warm")
        if self._rank == PEER:
            self._end()
        if self._case["how"] == "shrink":
            self._shrink(groups)
            return
        self._hang(groups)
        self._synchronize()
        self._communicators.connections.abort()
        self.found["device_usable"] = self._is_usable()
        del groups
        self._next_world()
        self._communicators.release()
        if self._case["peer"] == "stopped":
            self._end_stopped()
        self._meet("over", ranks=2)
        if self._cuda:
            torch.cuda.empty_cache()
            self._meet("freed", ranks=2)
            self.found["left_mib"] = free - self._free_mib()

    def _warm_up(self) -> None:
        """Allocate the device memory that a process takes once, so that it is not counted for a communicator."""
        if self._cuda:
            torch.cuda.set_device(0)
            ones = torch.ones(4096, 4096, device=self._device)
            (ones @ ones).sum().item()
            del ones
            torch.cuda.empty_cache()
        self._meet("context")

    def _make_world(self) -> list[Any]:
        start = time.monotonic()
        self._communicators.begin(0, "check")
        self._communicators.join_world(self._case["backend"], (0, 1, PEER), TIMEOUT)
        groups = [dist.group.WORLD, *(dist.new_group([0, 1, PEER]) for _ in range(3))]
        for group in groups:
            dist.all_reduce(torch.ones(SIZE, device=self._device), group=group)
        self._synchronize()
        self.found["groups_made_s"] = round(time.monotonic() - start, 2)
        return groups

    def _end(self) -> None:
        self._store.set("peer", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP if self._case["peer"] == "stopped" else signal.SIGKILL)

    def _end_stopped(self) -> None:
        """End the peer, as its node would: what it holds of the device they share is not missing."""
        peer = psutil.Process(int(self._store.get("peer")))
        peer.kill()
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while peer.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.05)

    def _hang(self, groups: list[Any]) -> None:
        """Run collectives without the peer, until another thread aborts them."""
        begun = threading.Event()
        thread = threading.Thread(target=self._abort_later, args=(begun,))
        thread.start()
        numbers = torch.ones(SIZE, device=self._device)
        product = torch.ones(2048, 2048, device=self._device)
        start = time.monotonic()
        try:
            if self._case["peer"] == "made":
                begun.set()
                late = dist.new_group([0, 1, PEER])
                dist.all_reduce(numbers, group=late)
            works = [dist.all_reduce(numbers, group=groups[number], async_op=True) for number in self._case["hung"]]
            begun.set()
            for work in works:
                work.wait()
            for _ in range(8):
                product = product @ product * 1e-4
            self._synchronize()
        except RuntimeError as error:
            self.found["woken_by"] = str(error).splitlines()[0][:160]
        self.found["woken_s"] = round(time.monotonic() - start - HANGS_AFTER_S, 2)
        thread.join()

    def _abort_later(self, begun: threading.Event) -> None:
        begun.wait()
        time.sleep(HANGS_AFTER_S)
        self._broken.set()
        start = time.monotonic()
        try:
            if self._case["how"] == "serial":
                for group in nccl_groups():
                    backend_of(group).abort()
            self._communicators.connections.abort_if_interrupted()
        except RuntimeError as error:
            self.found["error"] = str(error)[:300]
        self.found["abort_s"] = round(time.monotonic() - start, 2)

    def _shrink(self, groups: list[Any]) -> None:
        """Continue without the peer in torch's own way, for comparison."""
        start = time.monotonic()
        dist.all_reduce(torch.ones(SIZE, device=self._device), group=groups[0], async_op=True)
        smaller = dist.shrink_group([PEER], shrink_flags=ABORT_FIRST)
        self.found["abort_s"] = round(time.monotonic() - start, 2)
        self.found["next_world_sums"] = self._sums(smaller)
        self.found["device_usable"] = self._is_usable()

    def _next_world(self) -> None:
        self._communicators.destroy()
        self._broken.clear()
        start = time.monotonic()
        self._communicators.begin(1, "check")
        self._communicators.join_world(self._case["backend"], (0, 1), TIMEOUT)
        self.found["next_world_sums"] = self._sums(dist.group.WORLD)
        self.found["next_world_s"] = round(time.monotonic() - start, 2)
        self._communicators.connections.abort()
        self._communicators.destroy()

    def _sums(self, group: Any) -> bool:
        numbers = torch.full((SIZE,), float(self._rank + 1), device=self._device)
        dist.all_reduce(numbers, group=group)
        self._synchronize()
        return bool((numbers == 3.0).all())

    def _is_usable(self) -> bool:
        ones = torch.ones(512, 512, device=self._device)
        return float((ones @ ones).sum()) == 512.0**3

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _free_mib(self) -> int:
        return torch.cuda.mem_get_info()[0] >> 20 if self._cuda else 0

    def _meet(self, name: str, ranks: int = PEER + 1) -> None:
        self._store.set(f"{name}/{self._rank}", "here")
        self._store.wait([f"{name}/{rank}" for rank in range(ranks)], TIMEOUT)


def main(case: dict[str, Any], leave: Callable[[int], None] = os._exit) -> None:
    survivor = Survivor(case)
    code = 0
    try:
        survivor.run()
    except Exception as error:
        survivor.found["error"] = f"{type(error).__name__}: {error}"[:300]
        code = 1
    Path(case["result"]).write_text(json.dumps(survivor.found))
    # Threads that still wait for the lost peer would keep the process alive.
    leave(code)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
