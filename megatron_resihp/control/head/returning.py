# SPDX-License-Identifier: Apache-2.0
"""How a node that was lost comes back, or one that was not there at the start joins: a file in the run directory, which
all nodes share, offers its workers' ids.

The agent of such a node is started with the same command as the others and has to know the ids before it connects to
anything: workers are started first. May import: the standard library and this package's modules.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.transport.node_liveness import joined_already

DIRECTORY: Final = "returning"
SIZE: Final = "job_size"
"""The job's size as the coordinator was told."""
LOOK_S: Final = 0.5
SEEN_WITHIN_S: Final = 90.0
"""What was written there others see: a file system of several nodes may remember for a minute that it wasn't there."""


class RefusedError(Exception):
    """A node can't join; the message is "cause; mend"."""


def begin(run_dir: Path, size: JobSize) -> None:
    """Forget offers of an earlier job in the same directory, and say what size this one has.

    Raises:
        OSError: the run directory can't be written.
    """
    directory = run_dir / DIRECTORY
    directory.mkdir(exist_ok=True)
    for path in directory.glob("*"):
        path.unlink()
    _write(directory / SIZE, str(size))


def offer(run_dir: Path, node: int, workers: Sequence[int]) -> None:
    """Let a node come, with workers of these ids; a node that can't be told stays away."""
    try:
        _write(_path(run_dir, node), json.dumps(list(workers)))
    except OSError as error:
        print(f"resihp: node {node} can't come, the run directory can't be written ({error})", flush=True)


def take(run_dir: Path, node: int) -> tuple[int, ...] | None:
    """The ids of the workers with which this node is to come; None: it isn't. An offer is taken once.

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


def await_offer(
    run_dir: Path, node: int, check_coordinator: Callable[[], None], patience_s: float, joined: bool = False
) -> tuple[int, ...]:
    """The ids of the workers with which a node joins that was not there at the start, once the job trains, or that
    was there and is lost, once that has been noticed.

    Args:
        check_coordinator: raises an error when it is gone; nothing else bounds the wait of a node that has not joined.
        patience_s: how long a node that has joined already waits for its loss to be noticed.
        joined: one of its rank is known to have joined.

    Raises:
        RefusedError: the node has joined already and isn't lost, or doesn't share the coordinator's run directory.
        OSError: the run directory can't be written.
    """
    announced = False
    began_at = time.monotonic()
    while (workers := take(run_dir, node)) is None:
        joined = joined or any((run_dir / DIRECTORY).glob(f"{_path(run_dir, node).stem}.taken-by-*"))
        waited_s = time.monotonic() - began_at
        if joined and waited_s > patience_s:
            raise RefusedError(joined_already(node))
        if not announced:
            until = "the loss of the one before it is noticed" if joined else "the job trains, to join it then"
            print(f"resihp: node {node} waits until {until}", flush=True)
            announced = True
        check_coordinator()
        if waited_s > SEEN_WITHIN_S and not (run_dir / DIRECTORY / SIZE).exists():
            raise RefusedError(
                f"{run_dir} isn't the coordinator's run directory; give one that all nodes share as --run-dir"
            )
        time.sleep(LOOK_S)
    return workers


def _write(path: Path, text: str) -> None:
    """Write the file whole, or not at all."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def _path(run_dir: Path, node: int) -> Path:
    return run_dir / DIRECTORY / f"node_{node}.json"
