# SPDX-License-Identifier: Apache-2.0
"""Starting points of the local search: groupings, numbers of replicas, ways to deal, orders of ops.

Imports numpy and this package.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from megatron_resihp.planner.search.construct import BY_POWER, WAYS, construct
from megatron_resihp.planner.search.groups import Nodes, form_groups
from megatron_resihp.planner.search.improve import score_of
from megatron_resihp.planner.search.layout import MISFIT, Layout, copy_layout, new_layout
from megatron_resihp.planner.search.tables import Index, Tables

PRICES: Final = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Prices of a group, in units of a healthy single worker (`form_groups`)."""
_GRID: Final = 1.7
"""Ratio between the numbers of replicas that the first look tries."""
_HOPELESS: Final = 1.5
"""Ratio to the best start's seconds; a grouping slower than that ends the first look."""
_LEFT: Final = 0.3
"""Share of a pipeline's bubbles that is expected to remain after tuning."""
_PROMISING: Final = 6
"""How many of the first starts are varied."""


class Start(NamedTuple):
    """A first layout.

    Attributes:
        score: as in `improve.score_of`.
        grouping: its index in the order of PRICES.
        layout: the groups in replicas.
        tables: for its order of ops.
    """

    score: float
    grouping: int
    layout: Layout
    tables: Tables

    def copied(self) -> "Start":
        """The start with a layout of its own."""
        replicas, most_stages = self.layout.order.shape
        layout = new_layout(replicas, most_stages, len(self.layout.idle))
        copy_layout(self.layout, layout)
        return self._replace(layout=layout)

    def promise(self) -> float:
        """Seconds that tuning can be expected to reach; it removes most of the pipelines' bubbles."""
        busy = float((self.layout.micro_batches * self.layout.period).max())
        return busy + _LEFT * (float(self.layout.seconds.max()) - busy)

    @property
    def fits(self) -> bool:
        return bool(self.layout.seconds.max() < MISFIT)

    @property
    def replicas(self) -> int:
        return len(self.layout.stages)


class Starts:
    """Makes starts, each once.

    Attributes:
        found: best start first; of equal starts the one made first. Starts that do not fit come last.
    """

    def __init__(self, nodes: Nodes, micro_batches: int, rate: Sequence[float]) -> None:
        self._nodes = nodes
        self._micro_batches = micro_batches
        formed = (form_groups(nodes, np.asarray(rate), price * rate[1]) for price in PRICES)
        self._groupings = list({working.tobytes(): (working, idle) for working, idle in formed}.values())
        self._made: set[tuple[int, int, int, bool]] = set()
        self.found: list[Start] = []

    def look_around(self, tables: Tables) -> None:
        """Try groupings from the fewest groups to the most, with widely spaced numbers of replicas.

        Once a grouping is much slower than the best so far, groupings with more groups are skipped: they lose more to
        bubbles than they win in efficiency.
        """
        for grouping in sorted(range(len(self._groupings)), key=lambda each: len(self._groupings[each][0])):
            # More groups than layers would have nothing to do.
            least = -(-len(self._groupings[grouping][0]) // tables.forward.shape[1])
            self._make(tables, grouping, _spread(least, self._most(grouping)), (BY_POWER,))
            own = min(start.score for start in self.found if start.grouping == grouping)
            if self.found[0].fits and own > _HOPELESS * self.found[0].score:
                break
        self.found.sort(key=lambda start: (start.score, start.grouping))

    def look_closer(self, orders: Sequence[Tables]) -> None:
        """Vary the best starts: every order of ops, every way to deal, and numbers of replicas in between."""
        promising = {(start.grouping, start.replicas): None for start in self.found}
        for grouping, replicas in list(promising)[:_PROMISING]:
            for tables in orders:
                self._make(tables, grouping, _near(replicas, self._most(grouping)), WAYS)

    def different(self, count: int) -> list[Start]:
        """The best starts with different scores, spread over the numbers of replicas: two of each per round."""
        seen: set[float] = set()
        rounds: dict[int, int] = {}
        ranked: list[tuple[int, int, Start]] = []
        for number, start in enumerate(self.found):
            if start.score not in seen:
                seen.add(start.score)
                turn = rounds[start.replicas] = rounds.get(start.replicas, -1) + 1
                ranked.append((turn // 2, number, start))
        return [start for _, _, start in sorted(ranked, key=lambda each: each[:2])[:count]]

    def promising(self, count: int) -> list[Start]:
        """The most promising starts for tuning, one for each number of replicas, with copied layouts."""
        best: dict[int, Start] = {}
        for start in sorted(self.found, key=Start.promise):
            best.setdefault(start.replicas, start)
        return [start.copied() for start in list(best.values())[:count]]

    def _most(self, grouping: int) -> int:
        return min(len(self._groupings[grouping][0]), self._micro_batches)

    def _make(self, tables: Tables, grouping: int, numbers: Iterable[int], ways: Sequence[int]) -> None:
        working, idle = self._groupings[grouping]
        for replicas in numbers:
            for way in ways:
                key = (grouping, replicas, way, tables.splits_backward)
                if key in self._made:
                    continue
                self._made.add(key)
                layout = construct(tables, self._nodes, working, idle, replicas, self._micro_batches, way)
                self.found.append(Start(score_of(layout), grouping, layout, tables))
        self.found.sort(key=lambda start: start.score)


def _spread(least: int, most: int) -> list[int]:
    """Numbers from the least to the most, in roughly equal ratios."""
    numbers = [min(least, most)]
    while numbers[-1] < most:
        numbers.append(min(max(numbers[-1] + 1, int(numbers[-1] * _GRID)), most))
    return numbers


def _near(number: int, most: int) -> Index:
    """Up to five numbers, within half the distance to the neighbours that the first look tried."""
    reach = max(1, int(number * (_GRID - 1) / 2))
    numbers = np.unique(np.linspace(number - reach, number + reach, 5).round().astype(np.int64))
    return numbers[(numbers >= 1) & (numbers <= most)]
