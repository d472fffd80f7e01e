# SPDX-License-Identifier: Apache-2.0
"""What survivors have saved in a run directory, as a later start can find it, and the flags that go on from it.

Megatron's tracker file names an iteration once all of its files are there. After the loss of node 0 no process is left
to write an event, so the worker that saved leaves a note of it beside. May import: the standard library, `coding`
and `noticeboard`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_resihp.coding import FILE, WrongValueError, decode, encode
from megatron_resihp.control.worker.noticeboard import Noticeboard

DIRECTORY: Final = "emergency_checkpoint"
"""In the run directory."""
TRACKER: Final = "latest_checkpointed_iteration.txt"
"""Megatron's."""
NON_PERSISTENT: Final = "non_persistent"
"""Megatron's, below a directory of checkpoints: those that it removes again. It loads the newest of both kinds."""
RESULT: Final = "result"
"""Kind of the note that says what has been saved."""
BOARDS: Final = "survivors-*"
JOINED: Final = "joined"
"""Below DIRECTORY: checkpoints that `resihp emergency` has made."""
SOURCE: Final = "resihp_source.json"
"""In each of these: whose state it is."""


@dataclass(frozen=True)
class Source:
    """Where a saved state is from.

    Attributes:
        saved_at: Unix time at which survivors had written it.
        run: what tells the run from others in the same run directory; empty: not known.
        epoch: in which it was written.
    """

    saved_at: float
    run: str = ""
    epoch: int = 0


@dataclass(frozen=True)
class LastSave:
    """What survivors of the loss of node 0 have saved.

    Attributes:
        directory: below the run directory.
        missing: (stage, TP rank) pairs that no file holds.
        saved_at: Unix time.
        by_parameter: whether `resihp emergency` has to make a checkpoint of it first.
        gaps: what else no file holds, in words.
    """

    iteration: int
    directory: str
    missing: tuple[tuple[int, int], ...]
    saved_at: float
    by_parameter: bool = False
    gaps: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether a later start can load it, or what is made of it."""
        return not (self.missing or self.gaps)

    def pin(self, board: Noticeboard) -> None:
        """Leave the note on the survivors' board, which is in the run directory."""
        board.pin(RESULT, encode(self))

    def told(self, run_dir: Path) -> str:
        """What was saved, in one line, with how to go on."""
        if self.complete:
            how = (
                f"make a checkpoint of it with resihp emergency {run_dir}"
                if self.by_parameter
                else f"go on from it with {' '.join(flags(run_dir / self.directory))}"
            )
            return f"the state after iteration {self.iteration} is saved, all of it; {how}"
        shards = ", ".join([*(f"stage {stage} TP rank {tp_rank}" for stage, tp_rank in self.missing), *self.gaps])
        return (
            f"survivors saved what they hold of the state after iteration {self.iteration}, which is not enough to "
            f"resume; missing: {shards}; go on from the last checkpoint"
        )


def flags(directory: Path) -> list[str]:
    """Flags with which a later start goes on from there, even after its own `--load`. Megatron finds the format."""
    return ["--load", str(directory), *([] if directory.name == JOINED else ["--no-load-rng"])]


def command_for(path: str) -> str:
    """The command that makes sure that Megatron can load what this path is of; empty: it is elsewhere."""
    parts = Path(path).parts
    return f"resihp emergency {Path(*parts[: parts.index(DIRECTORY)])}" if DIRECTORY in parts else ""


def files_of_parameters(run_dir: Path) -> list[Path]:
    """What survivors have saved by parameter: Megatron can't load it, `resihp emergency` makes a checkpoint of it.

    What a worker has saved of another iteration than the others is not among it.
    """
    saved = run_dir / DIRECTORY
    found = [*saved.glob("iter_*/worker_*.pt"), *saved.glob("*/iter_*/worker_*.pt")]
    return sorted(path for path in found if not path.parent.parent.name.startswith("worker_"))


def last_save(run_dir: Path, since: float) -> LastSave | None:
    """What was saved from this Unix time on: of several, one that a start can load, and then the newest."""
    found: list[LastSave] = []
    for path in (run_dir / DIRECTORY).glob(f"{BOARDS}/{RESULT}_*.json"):
        try:
            found.append(decode(LastSave, json.loads(path.read_text()), FILE))
        except (OSError, ValueError, WrongValueError):
            continue  # of another version, or damaged
    since_then = [save for save in found if save.saved_at >= since]
    return max(since_then, key=lambda save: (save.complete, save.iteration, save.saved_at), default=None)


def latest_in(directory: Path) -> int | None:
    """The iteration of the complete state in a directory, which may hold ordinary checkpoints; None: there is none."""
    try:
        return int((directory / TRACKER).read_text())
    except (OSError, ValueError):
        return None


def iteration_name(iteration: int) -> str:
    """Megatron's name of the folder of an iteration's checkpoint."""
    return f"iter_{iteration:07d}"


def source_of(directory: Path, iteration: int) -> Source:
    """Where a complete state is from. Only what `resihp emergency` makes says so; else its files' time is known."""
    path = directory / iteration_name(iteration) / SOURCE
    try:
        found: Source = decode(Source, json.loads(path.read_text()), FILE)
    except (OSError, ValueError, WrongValueError):
        return Source(modified_at(directory / TRACKER))
    return found


def modified_at(path: Path) -> float:
    """Unix time of a file's last change; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def states(run_dir: Path) -> list[tuple[Path, int]]:
    """The directories of the complete states that survivors have saved there, and their iterations."""
    saved = run_dir / DIRECTORY
    places = [saved, *sorted(saved.glob("*/"))]
    return [(place, iteration) for place in places if (iteration := latest_in(place)) is not None]


def newest_state(run_dir: Path) -> tuple[Path, int] | None:
    """That of the last iteration. Where several runs have saved that, it is the one that was saved last."""
    return max(states(run_dir), key=lambda each: (each[1], source_of(*each).saved_at), default=None)
