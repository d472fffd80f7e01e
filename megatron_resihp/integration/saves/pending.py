# SPDX-License-Identifier: Apache-2.0
"""Saves that have been begun and are not whole yet: what becomes of them when an epoch ends.

All or nothing: a save that is under way when an epoch breaks is dropped whole, since a dead worker's files are missing,
and another one follows the next step. Before a change by choice it is finished. May import megatron, `control`,
`events` and this package's `writer`.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.training.checkpointing import (
    _NON_PERSISTENT_CKPT_SUBDIR,
    finalize_deletion_processes,
    get_checkpoint_name,
)

from megatron_resihp.control.worker.saved_state import latest_in
from megatron_resihp.events.training import Checkpoint
from megatron_resihp.integration.saves.writer import Writer


class Saves:
    """One worker's saves.

    Attributes:
        writer: the process that writes them.
        under_way: those that are not whole yet, oldest first, as they will be told of.
        lost: whether one was dropped or put off, and none has been made since.
        incomplete: those that were dropped, whose files are still there.
        repeated: the iteration after which all do again what some have done; its checkpoint may be there.
    """

    def __init__(self, args: Any) -> None:
        self.writer = Writer(args)
        self.under_way: list[Checkpoint] = []
        self.lost = False
        self.incomplete: list[Checkpoint] = []
        self.repeated: int | None = None
        self._begun: dict[str, int] = {}
        self._whole: dict[str, int] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether a save is to make up for one that was dropped or put off."""
        return self.lost and self.writer.is_ready

    def begun(self, path: str, iteration: int) -> None:
        """This worker begins a save. If the tracker in `path` comes to name it, it has ended.

        Where the tracker names it already, as in a job that was taken back to an earlier iteration, that says nothing.
        """
        if not _names(path, iteration):
            self._begun[path] = iteration

    def made(self, path: str, iteration: int) -> None:
        """This worker has seen a save end: all have written their parts, and the tracker in `path` names it."""
        self._whole[path] = iteration

    def is_known(self, path: str, iteration: int) -> bool:
        """Whether this worker has seen it end."""
        return self._whole.get(path) == iteration

    def is_there(self, path: str, iteration: int) -> bool:
        """Whether this checkpoint is whole already; all working workers ask together.

        It would be overwritten, and be incomplete meanwhile though it is the one that a later job loads. In the epoch
        of the save all have seen it end, or none has. After a recovery some may have. Or only the tracker says so: a
        worker died before the last one had seen it written.
        """
        own = self.is_known(path, iteration)
        if iteration != self.repeated:
            return own
        own = own or (self._begun.get(path) == iteration and _names(path, iteration))
        seen = torch.tensor([own], dtype=torch.int, device="cuda")
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return bool(seen.item())

    def take_whole(self) -> list[Checkpoint]:
        """Those that have become whole since this was last asked."""
        count = len(self.under_way) - self.writer.calls
        whole, self.under_way = self.under_way[:count], self.under_way[count:]
        for save in whole:
            self.made(save.path, save.iteration)
        return whole

    def drop(self) -> None:
        """Give up what is under way: its epoch has ended."""
        # What has left the writer's queue was written by all, and some may have seen it end.
        popped = len(self.under_way) - self.writer.calls
        for save in self.under_way[:popped]:
            if _names(save.path, save.iteration):
                self.made(save.path, save.iteration)
        self.incomplete += self.under_way[popped:]
        self.lost = self.lost or bool(self.under_way)
        self.under_way = []
        self.writer.forget_calls()
        finalize_deletion_processes()

    def forget_dropped(self, remove: bool) -> None:
        """Called once no worker writes to dropped saves any more. `remove`: whether this worker removes their files."""
        for save in self.incomplete if remove else ():
            print(f"resihp: drops the save of iteration {save.iteration}, which was under way", flush=True)
            shutil.rmtree(get_checkpoint_name(save.path, save.iteration, return_base_dir=True), ignore_errors=True)
        self.incomplete = []


def _names(path: str, iteration: int) -> bool:
    """Whether the tracker names this checkpoint. Megatron writes it after all else."""
    return latest_in(Path(path)) == iteration


def directory_of_saves(args: Any, non_persistent: bool) -> str:
    """Where Megatron keeps checkpoints of a kind."""
    if not non_persistent:
        return str(args.save)
    return str(args.non_persistent_global_ckpt_dir or os.path.join(args.save, _NON_PERSISTENT_CKPT_SUBDIR))
