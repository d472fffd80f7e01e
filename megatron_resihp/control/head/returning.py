# SPDX-License-Identifier: Apache-2.0
"""How a node that was lost comes back, or one that was not there at the start joins: a file in the run directory, which
all nodes share, offers its workers' ids.

The agent of such a node is started with the same command as the others and has to know the ids before it connects to
anything: workers are started first. May import: the standard library and this package's modules.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
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
TAKEN_LOOK_S: Final = 1.0
"""How often the coordinator looks whether its offers are taken."""
CONNECTS_WITHIN_S: Final = 60.0
"""Whoever takes an offer starts its workers and connects, which takes seconds. Longer than a slow start, and so short
that the next launch, which waits for `--connect-timeout` (300 s), still gets the place: the file system may need
`SEEN_WITHIN_S` to show that it was taken, and again to show that it is free."""
_OURS: Final = secrets.token_hex(4)
"""With the process id it names this process: in containers many have one id."""


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


class Offers:
    """The coordinator's offers, and which were taken in vain: by a launcher that ended before its node was connected.

    For one thread. The coordinator hears of the loss of a node that was connected, and of no other.

    Args:
        connected: nodes that are.
    """

    def __init__(self, run_dir: Path, connected: Callable[[], Set[int]]) -> None:
        self._run_dir = run_dir
        self._connected = connected
        self._taken_s: dict[int, float] = {}
        """Node with an offer → for how long that is known to be taken."""
        self._looked_at = 0.0

    def offer(self, node: int, workers: Sequence[int]) -> None:
        """Let a node come, with workers of these ids; a node that can't be told stays away."""
        self._taken_s.pop(node, None)
        try:
            offer(self._run_dir, node, workers)
        except OSError as error:
            print(f"resihp: node {node} can't come, the run directory can't be written ({error})", flush=True)
        else:
            self._taken_s[node] = 0.0

    def look(self, now: float) -> list[int]:
        """Nodes whose offers were taken in vain; each is told once, and is to get another offer.

        Args:
            now: of a monotonic clock.
        """
        passed_s = now - self._looked_at
        if not self._taken_s or passed_s < TAKEN_LOOK_S:
            return []
        self._looked_at = now
        self._withdraw(self._connected() & self._taken_s.keys())
        try:
            names = os.listdir(self._run_dir / DIRECTORY)
        except OSError:
            return []  # a file system that is away comes back
        # No time in which this process was stopped counts: then nobody could connect.
        vain = [node for node in self._taken_s if self._is_vain(node, names, min(passed_s, 2 * TAKEN_LOOK_S))]
        for node in vain:
            del self._taken_s[node]
        return vain

    def _is_vain(self, node: int, names: Sequence[str], passed_s: float) -> bool:
        if _path(self._run_dir, node).name in names:
            self._taken_s[node] = 0.0
            return False
        self._taken_s[node] += passed_s
        given_back = not any(name.startswith(_taken_by(self._run_dir, node, "").name) for name in names)
        return given_back or self._taken_s[node] > CONNECTS_WITHIN_S

    def _withdraw(self, nodes: Set[int]) -> None:
        """These are there. One that was late may have got another offer meanwhile."""
        for node in nodes:
            del self._taken_s[node]
            with suppress(OSError):
                _path(self._run_dir, node).unlink(missing_ok=True)


def offer(run_dir: Path, node: int, workers: Sequence[int]) -> None:
    """Let a node come, with workers of these ids. Who has taken an earlier offer can't give that back any more.

    Raises:
        OSError: the run directory can't be written.
    """
    for taken in (run_dir / DIRECTORY).glob(_taken_by(run_dir, node, "*").name):
        taken.unlink(missing_ok=True)
    _write(_path(run_dir, node), json.dumps(list(workers)))


def take(run_dir: Path, node: int) -> tuple[int, ...] | None:
    """The ids of the workers with which this node is to come; None: it isn't. An offer is taken once.

    Raises:
        OSError: the run directory can't be written.
    """
    taken = _taken_here(run_dir, node)
    try:
        _path(run_dir, node).rename(taken)
        return tuple(json.loads(taken.read_text()))
    except FileNotFoundError:
        return None


def give_back(run_dir: Path, node: int) -> None:
    """This process has come to its end. If it has taken an offer, and was never connected, the coordinator makes
    another: of the workers some may have been heard of, so that the next ones need other ids."""
    with suppress(OSError):  # the coordinator does so some time later, too
        _taken_here(run_dir, node).unlink(missing_ok=True)


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
        joined = joined or any((run_dir / DIRECTORY).glob(_taken_by(run_dir, node, "*").name))
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


def _taken_here(run_dir: Path, node: int) -> Path:
    return _taken_by(run_dir, node, f"{os.getpid()}-{_OURS}")


def _taken_by(run_dir: Path, node: int, who: str) -> Path:
    return _path(run_dir, node).with_suffix(f".taken-by-{who}")
