# SPDX-License-Identifier: Apache-2.0
"""Whether two runs have counted the same zeros, where zeros are chance. Pure; imports `compare` only.

In 16 bits, terms of an element of a gradient cancel exactly now and then: in a few of tens of thousands of elements.
Which ones follows from the order of additions. So the count of an iteration is a Poisson variable, and two runs that
train the same have counts k1 and k2 of the same mean. Given n = k1 + k2, k1 is binomial (n, 1/2). By Hoeffding's
inequality, |k1 - k2| reaches c * sqrt(n) with a probability of at most 2 * exp(-c^2 / 2), however small n is. Zeros
that are no chance, such as those of words that no sample has, are in both counts and make the bound only wider.

One step with 2 k zeros in the place of k is found from k = 3 c^2 on, which is 94. The sums over all steps are compared
in the same way, so that what is wrong in each step is found with fewer zeros: from 8 in each of 12 steps on.

The mean is the same only where an element is a sum of as many terms. Workers that share experts multiply the tokens of
all of them at once. So the more workers share, the fewer terms there are, and the more zeros: of one small model, stock
Megatron counts 80, 200 and 700 where 1, 2 and 4 share. Fewer survivors may share. So what stock runs with and without
sharing differ by is allowed, too.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Final

from recipe_runs.compare import Difference, Logged, distance

COUNTS: Final = ("num-zeros", "num-zeros vs samples")
"""The same numbers, at iterations and at samples."""
COMPARED: Final = 225 * (12 + 1)
"""Most that is compared in a file of 225 recipes: twelve iterations and their sum in each."""
FALSE_ALARM: Final = 1e-3
"""The probability that chance makes a single recipe of the file unequal."""
WIDTH: Final = math.sqrt(2 * math.log(2 * COMPARED / FALSE_ALARM))
"""The c above."""


def by_chance(one: float, other: float) -> float:
    """The most that two counts of the same mean differ by."""
    return WIDTH * math.sqrt(one + other)


def compare_counts(
    tag: str, stock: Logged, run: Logged, others: Sequence[Logged]
) -> Iterable[tuple[Difference, float]]:
    """The step that is nearest to its bound or furthest beyond it, and the sum of all steps; each with the bound,
    relative as the difference is.

    Args:
        others: of other stock runs. The most that one of them differs from `stock` by is allowed besides.
    """
    steps = sorted({step for name, step in stock.keys() | run.keys() if name == tag})
    key = {step: (tag, step) for step in steps}
    single = [
        _bounded(tag, step, *(logged.get(key[step], frozenset()) for logged in (stock, run, *others))) for step in steps
    ]
    yield max(single, key=lambda found: found[0].relative - found[1])
    sums = [
        frozenset([sum(fmean(logged[key[step]]) for step in steps if key[step] in logged)])
        for logged in (stock, run, *others)
    ]
    yield _bounded(f"{tag}, all steps", steps[-1], *sums)


def _bounded(
    tag: str, step: int, stock: frozenset[float], run: frozenset[float], *others: frozenset[float]
) -> tuple[Difference, float]:
    found = Difference.between(tag, step, stock, run)
    if not math.isfinite(found.relative):
        return found, 1.0
    allowed = by_chance(max(stock), max(run)) + max((distance(stock, each) for each in others if each), default=0.0)
    return found, allowed / max(max(stock), max(run), 1.0)
