# SPDX-License-Identifier: Apache-2.0
"""Units of judgement: a worker, or a tensor-parallel group whose members cannot be told apart.

Imports numpy and this package.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.input.observations import Layout
from megatron_resihp.detector.judging.common_mode import Places

Members = tuple[int, ...]
"""Worker ids of a unit, or of a link's ends."""


def tensor_groups(layout: Layout) -> NDArray[np.int64]:
    """[workers] number of each worker's tensor-parallel group: same replica and stage."""
    _, group = np.unique(np.stack([layout.replica, layout.stage]), axis=1, return_inverse=True)
    return group.reshape(-1)


def has_peers(layout: Layout) -> NDArray[np.bool_]:
    """[workers] whether the worker shares a tensor-parallel group with others."""
    group = tensor_groups(layout)
    return np.bincount(group)[group] > 1


def alike_links(layout: Layout) -> NDArray[np.int64]:
    """[links] group number: links between the same stages, either all on one node or all between nodes."""
    if not len(layout.links):
        return np.zeros(0, dtype=np.int64)
    order = np.argsort(layout.workers)
    ends = order[np.searchsorted(layout.workers[order], layout.links)]
    stages = np.sort(layout.stage[ends], axis=1)
    crossing = layout.node[ends[:, 0]] != layout.node[ends[:, 1]]
    _, group = np.unique(np.column_stack([stages, crossing]), axis=0, return_inverse=True)
    return group.reshape(-1)


class Units:
    """Workers, and groups of workers, by number.

    Attributes:
        members: the worker ids of each unit.
        stage: [units] the stage of its first member.
        places: where that member is.
    """

    def __init__(self, layout: Layout, untold: NDArray[np.bool_]) -> None:
        """`untold`: [workers] whose own compute cannot be told from that of its tensor-parallel group."""
        group = tensor_groups(layout)
        key = np.where(untold, group, group.size + np.arange(group.size))
        _, first, self._unit = np.unique(key, return_index=True, return_inverse=True)
        self.members = [tuple(map(int, layout.workers[self._unit == unit])) for unit in range(first.size)]
        self.stage: NDArray[np.int64] = layout.stage[first]
        self.places = Places(layout.node[first], self.stage, layout.replica[first])

    def __len__(self) -> int:
        return len(self.members)

    def average(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[units] mean of their workers' known values, [workers]; NaN where none is known."""
        known = np.isfinite(values)
        count = np.bincount(self._unit, known, len(self))
        total = np.bincount(self._unit, np.where(known, values, 0.0), len(self))
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    def slowest(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[units] highest of their workers' values, [workers]; NaN where one is NaN."""
        result = np.full(len(self), -np.inf)
        with np.errstate(invalid="ignore"):
            np.maximum.at(result, self._unit, values)
        return result

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """[workers] the value of each worker's unit."""
        return values[self._unit]
