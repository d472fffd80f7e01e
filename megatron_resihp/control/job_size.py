# SPDX-License-Identifier: Apache-2.0
"""How many nodes and workers a job begins with, how many it may have, and which node leads it. Pure; imports `coding`.

A slot is where a worker can be: those of the nodes that begin the job come first, then those of nodes that may join.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from megatron_resihp.coding import omitted_if

_NODES = re.compile(r"(-?\d+)(?::(-?\d+))?")


@dataclass(frozen=True)
class JobSize:
    """What all nodes of a job have to be told alike.

    Attributes:
        nodes: that begin the job, ranks 0 to nodes - 1.
        late_nodes: that may join it later, with the ranks above.
        workers_per_node: on each of them.
        apart: the coordinator runs on none of them.
    """

    nodes: int
    workers_per_node: int
    late_nodes: int = 0
    apart: bool = omitted_if(False)

    @property
    def most_nodes(self) -> int:
        return self.nodes + self.late_nodes

    @property
    def head(self) -> frozenset[int]:
        """The node that runs the coordinator, and so can't be lost or leave; empty: it is apart."""
        return frozenset() if self.apart else frozenset({0})

    @property
    def workers(self) -> int:
        """At the start."""
        return self.nodes * self.workers_per_node

    @cached_property
    def slots(self) -> int:
        return self.most_nodes * self.workers_per_node

    def slots_on(self, node: int) -> range:
        """A node's slots, which are also the ids of the workers that are started there first."""
        return range(node * self.workers_per_node, (node + 1) * self.workers_per_node)

    def __str__(self) -> str:
        """The size as command-line flags."""
        nodes = f"{self.nodes}:{self.most_nodes}" if self.late_nodes else f"{self.nodes}"
        return f"--nnodes {nodes} --nproc-per-node {self.workers_per_node}"


def parse_nodes(text: str) -> tuple[int, int]:
    """What --nnodes says, N or MIN:MAX: how many nodes begin the job, and how many more may join it.

    Raises:
        ValueError: it makes no sense; the message is "cause; mend".
    """
    found = _NODES.fullmatch(text)
    if found is None:
        raise ValueError(f"--nnodes {text} is not a number of nodes; give N, or MIN:MAX if nodes may join later")
    least = int(found[1])
    most = least if found[2] is None else int(found[2])
    if least < 1:
        raise ValueError(f"--nnodes {text} is not a job; give 1 or more nodes to begin with")
    if most < least:
        raise ValueError(f"--nnodes {text} begins with more nodes than there may be; give MIN:MAX, the smaller first")
    return least, most - least
