"""How a node that was lost comes back: a file in the run directory, which all nodes share, offers its workers' new ids.

The agent of such a node is started with the same command as before and has to know the ids before it connects to
anything: workers are started first. May import: the standard library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

DIRECTORY: Final = "returning"


def offer(run_dir: Path, node: int, workers: Sequence[int]) -> None:
    """Let a node come back, with workers of these ids; who can't be told stays away."""
    path = _path(run_dir, node)
    unfinished = path.with_suffix(".unfinished")
    try:
        path.parent.mkdir(exist_ok=True)
        unfinished.write_text(json.dumps(list(workers)))
        unfinished.replace(path)
    except OSError as error:
        print(f"resihp: node {node} can't come back, the run directory can't be written ({error})", flush=True)


def take(run_dir: Path, node: int) -> tuple[int, ...] | None:
    """The ids of the workers with which this node is to come back; None: it isn't. An offer is taken once.

    Raises:
        OSError: the run directory can't be written.
    """
    path = _path(run_dir, node)
    taken = path.with_suffix(f".taken-by-{os.getpid()}")
    try:
        path.rename(taken)
    except FileNotFoundError:
        return None
    return tuple(json.loads(taken.read_text()))


def forget_offers(run_dir: Path) -> None:
    """Those of an earlier job in the same directory.

    Raises:
        OSError: the run directory can't be written.
    """
    for path in (run_dir / DIRECTORY).glob("*"):
        path.unlink()


def _path(run_dir: Path, node: int) -> Path:
    return run_dir / DIRECTORY / f"node_{node}.json"
