# SPDX-License-Identifier: Apache-2.0
"""Asks SLURM, where it has launched the job, which nodes are down. May import: the standard library and `protocol`.

A node's name is known only where its rank is SLURM's own, as scripts/slurm/job.sbatch has it. Nodes that joined later,
from another allocation, are not asked about.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from megatron_resihp.protocol.messages import NodesDown

ANSWER_S: Final = 5.0
"""For each of its commands; cut off from its controller they would try for minutes."""
LISTEN_S: Final = 10.0
"""It may hear of a node a moment later than node 0 does. So long it is asked again; `SlurmdTimeout` is far longer."""
LOOK_S: Final = 1.0
_DOWN: Final = re.compile("(down|drained|fail)[^a-z]?")
"""What SLURM calls a node of a running job that is lost, with a mark behind it, such as * where it doesn't answer. One
that an administrator drains, or expects to fail, is `draining` or `failing` as long as it lives. As in job.sbatch."""


def asks(environment: Mapping[str, str], nodes: int) -> bool:
    """Whether SLURM has launched a task on each of so many nodes, this one the first of them."""
    return environment.get("SLURM_NODEID") == "0" and environment.get("SLURM_STEP_NUM_NODES") == str(nodes)


class SlurmQuery:
    """Questions about one job's nodes, each answered in a thread of its own.

    Args:
        environment: of this node's launcher.
        nodes: that have begun the job.
        tell: takes each answer.
    """

    def __init__(self, environment: Mapping[str, str], nodes: int, tell: Callable[[NodesDown], None]) -> None:
        self._list = environment["SLURM_STEP_NODELIST"] if asks(environment, nodes) else ""
        self._nodes = nodes
        self._tell = tell

    def ask(self, nodes: Collection[int]) -> None:
        """Have it told which of these are down: none, if SLURM does not say so in time."""
        threading.Thread(target=self._answer, args=(nodes,), name="resihp-slurm", daemon=True).start()

    def _answer(self, nodes: Collection[int]) -> None:
        down: tuple[int, ...] = ()
        try:
            down = _listen(self._named(nodes)) if self._list else ()
        except (OSError, subprocess.SubprocessError) as error:
            print(f"resihp: SLURM does not say which nodes are down ({error})", flush=True)
        self._tell(NodesDown(down, time.time()))

    def _named(self, nodes: Collection[int]) -> dict[str, int]:
        """The names of those of these nodes that have begun the job."""
        names = _lines("scontrol", "show", "hostnames", self._list)
        return {names[node]: node for node in nodes if node < min(self._nodes, len(names))}


def is_down(state: str) -> bool:
    """Whether a node of a running job is lost, by what SLURM calls its state."""
    return _DOWN.fullmatch(state) is not None


def _listen(nodes: Mapping[str, int]) -> tuple[int, ...]:
    """Which of these are down, once all are, or after a while."""
    until = time.monotonic() + LISTEN_S
    while nodes:
        states = _lines("sinfo", "--all", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format", "%N %T")
        down = {name for name, _, state in (line.partition(" ") for line in states) if is_down(state)}
        if down >= nodes.keys() or time.monotonic() > until:
            return tuple(sorted(node for name, node in nodes.items() if name in down))
        time.sleep(LOOK_S)
    return ()


def _lines(*command: str) -> Sequence[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    return done.stdout.splitlines()
