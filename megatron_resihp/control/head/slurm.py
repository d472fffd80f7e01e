# SPDX-License-Identifier: Apache-2.0
"""Asks SLURM, where it has launched the job, which nodes are down. May import: the standard library and `protocol`.

A node's name is known only where its rank is SLURM's own, as scripts/slurm/job.sbatch has it. Nodes that joined later,
from another allocation, are not asked about.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from megatron_resihp.protocol.messages import NodesDown

ANSWER_S: Final = 5.0
"""For each of its commands; cut off from its controller they would try for minutes."""


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
        """Have it told which of these are down; none, if SLURM does not say so in time."""
        threading.Thread(target=self._answer, args=(nodes,), name="resihp-slurm", daemon=True).start()

    def _answer(self, nodes: Collection[int]) -> None:
        down: tuple[int, ...] = ()
        try:
            if self._list:
                down = self._down(nodes)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"resihp: SLURM does not say which nodes are down ({error})", flush=True)
        self._tell(NodesDown(down, time.time()))

    def _down(self, nodes: Collection[int]) -> tuple[int, ...]:
        names = _lines("scontrol", "show", "hostnames", self._list)
        asked = {names[node]: node for node in nodes if node < min(self._nodes, len(names))}
        if not asked:
            return ()
        states = _lines("sinfo", "--noheader", "--Node", "--nodes", ",".join(asked), "--format", "%N %T")
        found = {name for name, _, state in (line.partition(" ") for line in states) if state.startswith("down")}
        return tuple(sorted(node for name, node in asked.items() if name in found))


def _lines(*command: str) -> Sequence[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    return done.stdout.splitlines()
