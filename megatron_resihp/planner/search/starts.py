"""Where the local search starts: groupings, numbers of replicas and ways to deal. Imports numpy and this package."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from megatron_resihp.planner.search.construct import WAYS, construct
from megatron_resihp.planner.search.groups import Nodes, form_groups
from megatron_resihp.planner.search.improve import score_of
from megatron_resihp.planner.search.layout import Layout
from megatron_resihp.planner.search.tables import Tables

PRICES: Final = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Of a group, in healthy single workers (`form_groups`)."""


class Start(NamedTuple):
    """A first layout.

    Attributes:
        score: of `improve.score_of`.
        number: in order of making.
        layout: the groups in replicas.
    """

    score: float
    number: int
    layout: Layout


def starts(tables: Tables, nodes: Nodes, micro_batches: int) -> list[Start]:
    """Layouts that fit, the best first."""
    made = (
        construct(tables, nodes, working, idle, replicas, micro_batches, way)
        for working, idle in _groupings(tables, nodes)
        for replicas in range(1, min(len(working), micro_batches) + 1)
        for way in WAYS
    )
    scored = (Start(score_of(layout), number, layout) for number, layout in enumerate(made))
    return sorted((start for start in scored if np.isfinite(start.score)), key=lambda start: start[:2])


def _groupings(tables: Tables, nodes: Nodes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Groups that work and groups that don't, each grouping once."""
    seen: set[bytes] = set()
    for price in PRICES:
        working, idle = form_groups(nodes, tables.rate, price * float(tables.rate[1]))
        if working.tobytes() not in seen:
            seen.add(working.tobytes())
            yield working, idle
