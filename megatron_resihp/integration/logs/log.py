# SPDX-License-Identifier: Apache-2.0
"""Megatron's log on one worker: the last rank of the epoch in force notes it, and sends a page after each iteration.

A page is sent whole, at the start of the next iteration: before that no step that follows can be agreed on. If the
worker dies before, the coordinator has the others log the iteration again. May import megatron and this package.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

from megatron.core import timers
from megatron.training import global_vars

from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.integration.logs.stand_ins import Notes, TensorBoardStandIn, WandbStandIn, plain
from megatron_resihp.integration.world.view import View
from megatron_resihp.protocol.logs import CheckpointNote, LogPage, LogsWanted, Place, TensorBoardWish, WandbWish


class MegatronLog:
    """Notes what this worker logs, while it is the one that does.

    Args:
        wanted: the logs that the job's arguments ask for.
    """

    def __init__(self, control: WorkerControl, wanted: LogsWanted) -> None:
        self._control = control
        self.wanted = wanted
        self._notes: Notes | None = None

    @property
    def is_wanted(self) -> bool:
        return self.wanted.tensorboard is not None or self.wanted.wandb is not None

    def begin_epoch(self, view: View) -> None:
        """Give Megatron writers, or take them away; notes of an iteration that will be logged again are dropped."""
        logs = self.is_wanted and view.works and view.rank_order[-1] == view.worker
        self._notes = notes = Notes() if logs else None
        tensorboard = wandb = None
        if notes is not None:
            tensorboard = TensorBoardStandIn(notes) if self.wanted.tensorboard else None
            wandb = WandbStandIn(notes) if self.wanted.wandb else None
        global_vars._GLOBAL_TENSORBOARD_WRITER = tensorboard
        global_vars._GLOBAL_WANDB_WRITER = wandb
        # Megatron's timers look which kind of writer they are given.
        timers.SummaryWriter, timers.wandb = TensorBoardStandIn, wandb

    def send_page(self, place: Place) -> None:
        """Send what has been noted, though it be nothing: the coordinator has to know that all of it has come.

        Nothing is sent in a broken epoch: Megatron may have logged what an aborted collective has left. A page that is
        missing is logged again; but that of the job's last call stays missing if all that live have made it.

        Raises:
            JobEnded: the coordinator is gone.
        """
        notes = self._notes
        if notes is None or self._control.heard.broken():
            return
        page = LogPage(
            self._control.worker, place.call, place.iteration, time.time(), tuple(notes.scalars), tuple(notes.texts),
            tuple(notes.rows), notes.config, tuple(notes.checkpoints),
        )  # fmt: skip
        self._control.tell(page)
        vars(notes).update(vars(Notes()))

    def note_saved(self, checkpoint_path: str, tracker_filename: str, save_dir: str, iteration: int) -> None:
        """What Megatron would tell W&B of a checkpoint that was written."""
        if self._notes is not None and self.wanted.wandb:
            path, directory, tracker = map(os.path.abspath, (checkpoint_path, save_dir, tracker_filename))
            self._notes.checkpoints.append(CheckpointNote(True, path, directory, tracker, iteration))

    def note_loaded(self, checkpoint_path: str, load_dir: str) -> None:
        """What Megatron would tell W&B of the checkpoint that the job goes on from."""
        if self._notes is not None and self.wanted.wandb:
            path, directory = map(os.path.abspath, (checkpoint_path, load_dir))
            self._notes.checkpoints.append(CheckpointNote(False, path, directory, None, 0))


def logs_wanted(worker: int, args: Any) -> LogsWanted:
    """What Megatron's arguments ask for."""
    tensorboard = wandb = None
    if args.tensorboard_dir:
        tensorboard = TensorBoardWish(os.path.abspath(args.tensorboard_dir), args.tensorboard_queue_size)
    if args.wandb_project:
        directory = args.wandb_save_dir or os.path.join(args.save, "wandb")
        run = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        wandb = WandbWish(
            args.wandb_project, args.wandb_exp_name, args.wandb_entity or None, os.path.abspath(directory),
            plain(vars(args)), run,
        )  # fmt: skip
    return LogsWanted(worker, tensorboard, wandb)
