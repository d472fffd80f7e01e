# SPDX-License-Identifier: Apache-2.0
"""A W&B run, by its own library, as Megatron would have it. May import `protocol` and this package."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from megatron_resihp.control.head.logs.writer import MissingPackageError, Term
from megatron_resihp.protocol.logs import CheckpointNote, LogPage, WandbWish

LOGIN_S: Final = 30
"""How long W&B may ask on a terminal for who it is for."""
TRACKER: Final = "latest_wandb_artifact_path.txt"
"""Where Megatron keeps, beside checkpoints, which project has them as artifacts."""


class WandbRun:
    """One run. Opened again with the same id, W&B goes on with it.

    Without a connection W&B makes a directory for each coordinator that writes, and `wandb sync --append` joins them.
    """

    def __init__(self, wish: WandbWish, term: Term) -> None:
        try:
            # An optional package: only where logs are wanted.
            import wandb
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"--wandb-project needs the package wandb where the coordinator runs ({error}); nothing is logged "
                "to W&B"
            ) from None
        os.makedirs(wish.directory, exist_ok=True)
        self._wandb: Any = wandb
        # What workers print is in their own logs.
        settings = wandb.Settings(console="off", login_timeout=LOGIN_S)
        self._run: Any = wandb.init(
            project=wish.project, name=wish.name, entity=wish.entity, dir=wish.directory, config=wish.config,
            id=wish.run, resume="allow", settings=settings,
        )  # fmt: skip
        self._first = 0 if term.began is None else self._first_missing(term.began)

    def write(self, page: LogPage) -> None:
        rows = [row for row in page.rows if row.step is None or row.step >= self._first]
        earlier = page.call == 0 and page.iteration < self._first
        if not rows and (page.rows or earlier):
            return  # a coordinator before this one has written the page
        if page.config:
            self._run.config.update(page.config, allow_val_change=True)
        for note in page.checkpoints:
            self._tell_of(note)
        for values, step in rows:
            self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()

    def _first_missing(self, began: float) -> int:
        """The first step that coordinators of the job which began at this time have not written. W&B keeps rows whole,
        and the last ones in memory, so it may be long before the last one that was logged."""
        if not self._run.offline:
            return int(self._run.starting_step)
        own = Path(self._run.dir).parent
        files = set(own.parent.glob(f"*-{self._run.id}/*.wandb")) - set(own.glob("*.wandb"))
        return 1 + max((step for file in files for step in _steps(file, began)), default=-1)

    def _tell_of(self, note: CheckpointNote) -> None:
        """Tell W&B of a checkpoint, which may be deleted by now, or unknown to it. Rows come after it."""
        try:
            (self._save if note.saved else self._use)(note)
        except Exception as error:
            does = "take" if note.saved else "know"
            print(f"resihp: W&B does not {does} {note.path}: {error}", file=sys.stderr, flush=True)

    def _save(self, note: CheckpointNote) -> None:
        """Log a checkpoint as an artifact, by reference."""
        directory, checkpoint = Path(note.directory), Path(note.path).resolve()
        artifact = self._wandb.Artifact(directory.stem, type="model", metadata={"iteration": note.iteration})
        artifact.add_reference(checkpoint.as_uri(), checksum=False)
        if note.tracker is not None:
            artifact.add_file(note.tracker)
        self._run.log_artifact(artifact, aliases=[checkpoint.stem])
        (directory / TRACKER).write_text(f"{self._run.entity}/{self._run.project}")

    def _use(self, note: CheckpointNote) -> None:
        """Say that the job goes on from a checkpoint."""
        directory = Path(note.directory)
        tracker = directory / TRACKER
        project = f"{tracker.read_text().strip()}/" if tracker.is_file() else ""
        self._run.use_artifact(f"{project}{directory.stem}:{Path(note.path).stem}")


def _steps(file: Path, began: float) -> Iterator[int]:
    """The steps of which a file of W&B's has rows, if it is of the time since a job began. Its end may be cut off."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store: Any = DataStore()
    try:
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = Record.FromString(data)
            if record.HasField("run") and record.run.start_time.ToSeconds() < int(began):
                return
            if record.HasField("history"):
                yield record.history.step.num
    except AssertionError:
        return  # as this reader says that a record is not whole
