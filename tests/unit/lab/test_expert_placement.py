# SPDX-License-Identifier: Apache-2.0
"""Lazarus' placement of experts: popular ones have more replicas, and few survivors have all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.lab.baselines.expert_placement import Places, busiest_share, placed, replicas_of


def survivals(places: Sequence[frozenset[int]], experts: int) -> list[int]:
    """Of all sets of so many survivors, in how many all experts are there."""
    sizes = range(1, len(places) + 1)
    return [sum(len(frozenset().union(*of)) == experts for of in combinations(places, size)) for size in sizes]


def every_placement(counts: Sequence[int], places: int, slots: int) -> list[Places]:
    """All ways to fill places with so many replicas of each expert."""
    contents = [frozenset(each) for each in combinations(range(len(counts)), slots)]
    found = product(contents, repeat=places)
    return [each for each in found if all(sum(e in of for of in each) == count for e, count in enumerate(counts))]


class TestReplicas:
    def test_popular_experts_have_more(self) -> None:
        assert replicas_of([6.0, 2.0, 1.0, 1.0], 5, 2, least=1) == [5, 3, 1, 1]

    def test_each_has_the_least_first(self) -> None:
        assert replicas_of([100.0, 1.0, 1.0, 1.0], 4, 2, least=2) == [2, 2, 2, 2]
        assert replicas_of([100.0, 1.0, 1.0, 1.0], 3, 2, least=2) == [3, 1, 1, 1]

    def test_no_room_for_one_of_each(self) -> None:
        with pytest.raises(ValueError, match="3 places of 2 experts have no room for 7"):
            replicas_of([1.0] * 7, 3, 2, least=1)

    @given(st.lists(st.floats(0.1, 10), min_size=2, max_size=12), st.integers(1, 8), st.integers(1, 12))
    def test_room_is_used_and_no_place_has_an_expert_twice(self, loads: list[float], places: int, slots: int) -> None:
        slots = min(slots, len(loads))
        if places * slots < len(loads):
            return
        counts = replicas_of(loads, places, slots, least=2)
        assert sum(counts) == places * slots and max(counts) <= places and min(counts) >= 1
        found = placed(counts, places, slots)
        assert [len(each) for each in found] == [slots] * places
        assert frozenset().union(*found) == frozenset(range(len(loads)))


class TestPlacement:
    def test_rare_experts_are_together(self) -> None:
        assert placed([1, 1, 3, 3], 4, 2) == (frozenset({0, 1}), *[frozenset({2, 3})] * 3)

    @pytest.mark.parametrize(
        ("counts", "places", "slots"),
        [([1, 1, 3, 3], 4, 2), ([2, 2, 2, 2], 4, 2), ([1, 2, 2, 3], 4, 2), ([2, 2, 4], 4, 2), ([3, 3, 3], 3, 3)],
    )
    def test_no_placement_survives_more(self, counts: list[int], places: int, slots: int) -> None:
        found = placed(counts, places, slots)
        assert [sum(expert in each for each in found) for expert in range(len(counts))] == counts
        others = [survivals(each, len(counts)) for each in every_placement(counts, places, slots)]
        best = [max(each) for each in zip(*others, strict=True)]
        assert survivals(found, len(counts)) == best

    def test_replicas_by_load_even_out_the_work(self) -> None:
        loads = [4.0, 1.0, 1.0, 2.0]
        by_load = placed(replicas_of(loads, 8, 2, least=1), 8, 2)
        alike = placed([4, 4, 4, 4], 8, 2)
        assert busiest_share(by_load, loads) < busiest_share(alike, loads)
        assert busiest_share(alike, [1.0] * 4) == pytest.approx(1.0)
