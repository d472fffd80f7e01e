# SPDX-License-Identifier: Apache-2.0
"""How many files a launcher has open, connections among them, and how many it may have.

Node 0's serves the store, to which each node has one connection. Counted on jobs of 2, 4 and 8 workers, one of which
dies and comes back: 49, 66 and 102 at most, that is 31 and 8.8 for each worker. Another node of two adds 8, of which 6
are for all other nodes, and has 40 itself (`test_nodes`).
May import: the standard library, `control.job_size` and `control.transport`.
"""

from __future__ import annotations

import resource
from typing import Final

from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.transport.access.gate import most_unanswered

OF_ITS_OWN: Final = 64
"""Files that any launcher has open: libraries, logs, planners' processes, connections in the making."""
PER_OWN_WORKER: Final = 13
"""Process, liveness connection, measurements, output and log; hatch, and what is handed over there: 3 connections to
the store by the code, and one in the making."""
PER_NODE: Final = 5
"""Liveness connection, stream of measurements and connection to the store; more while it joins."""


def needed(size: JobSize, node: int) -> int:
    """How many files the launcher of a node has open at most, rounded up."""
    own = OF_ITS_OWN + PER_OWN_WORKER * size.workers_per_node
    return own if node > 0 else own + PER_NODE * size.most_nodes + _unanswered(size)


def _unanswered(size: JobSize) -> int:
    """Connections to node 0's three ports that have not proved to be of the job."""
    return 3 * most_unanswered(size.most_nodes)


def allow_as_many_as_may_be() -> int:
    """Raise the limit as far as the system lets us; returns how many files may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # some systems allow less than they say
        return soft
    return hard


def problem(size: JobSize, node: int, limit: int) -> str | None:
    """Why a launcher that may open so many files can't serve this job; None: it can."""
    most = needed(size, node)
    if limit == resource.RLIM_INFINITY or most <= limit:
        return None
    opener = "the coordinator" if size.apart else f"node {node}'s launcher"
    return (
        f"{opener} of a job with {size} opens up to {most} files, and may open {limit}; raise the hard limit to {most} "
        "(ulimit -Hn, LimitNOFILE=)"
    )
