# SPDX-License-Identifier: Apache-2.0
"""Lazarus' placement of experts (arXiv 2407.04656, from general knowledge of the paper): which place has which experts.

A place is what fails as one. Popular experts get more replicas. Where experts are rare, the same places have them: then
few places must survive. The paper calls this maximum rank overlap. Imports the standard library.
"""

import heapq
from collections.abc import Sequence

Places = tuple[frozenset[int], ...]
"""The experts of each place."""


def replicas_of(loads: Sequence[float], places: int, slots: int, least: int) -> list[int]:
    """How many replicas each expert gets: the busiest replica has as little to do as can be.

    Args:
        loads: tokens of each expert, in any unit.
        places, slots: how many places there are, and how many experts each has room for.
        least: replicas of each expert, as far as there is room.

    Raises:
        ValueError: there is no room for one of each.
    """
    least = min(least, places * slots // len(loads), places)
    if not least:
        raise ValueError(f"{places} places of {slots} experts have no room for {len(loads)}")
    counts = [least] * len(loads)
    busiest = [(-load / least, expert) for expert, load in enumerate(loads)]
    heapq.heapify(busiest)
    for _ in range(places * slots - least * len(loads)):
        while busiest and counts[busiest[0][1]] == places:
            heapq.heappop(busiest)
        if busiest:
            expert = busiest[0][1]
            counts[expert] += 1
            heapq.heapreplace(busiest, (-loads[expert] / counts[expert], expert))
    return counts


def placed(counts: Sequence[int], places: int, slots: int) -> Places:
    """Places for so many replicas of each expert.

    Experts with as many replicas as there are places are everywhere. Of the others the rarest, as many as a place has
    room for, are together on as many places as the rarest of them has replicas; then the next ones. What is left of all
    is on the rest.
    """
    everywhere = {expert for expert, count in enumerate(counts) if count == places}
    rarest = sorted(set(range(len(counts))) - everywhere, key=lambda expert: (counts[expert], expert))
    left, room = list(counts), slots - len(everywhere)
    found: list[set[int]] = []
    for first in range(0, len(rarest), room or 1):
        together = rarest[first : first + room]
        for _ in range(min(counts[together[0]], places - len(found))):
            found.append(set(together))
            for expert in together:
                left[expert] -= 1
    found += [set() for _ in range(places - len(found))]
    for place in found:
        place |= everywhere
        others = sorted(set(range(len(counts))) - place, key=lambda expert: (-left[expert], expert))
        for expert in others[: slots - len(place)]:
            place.add(expert)
            left[expert] -= 1
    return tuple(map(frozenset, found))


def busiest_share(places: Places, loads: Sequence[float]) -> float:
    """Tokens of the place that gets most of them over the mean, if the replicas of an expert have equally many."""
    held = [sum(expert in place for place in places) for expert in range(len(loads))]
    each = [sum(loads[expert] / held[expert] for expert in place) for place in places]
    return max(each) * len(places) / sum(loads)
