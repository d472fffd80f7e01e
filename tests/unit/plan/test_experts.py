# SPDX-License-Identifier: Apache-2.0
"""Experts that are dealt out in unequal numbers, and the slots that they have then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.plan.experts import dealt_experts, slots_of


def test_eight_on_three() -> None:
    assert dealt_experts(8, 3) == (range(0, 3), range(3, 6), range(6, 8))
    assert slots_of(8, 3) == (0, 1, 2, 3, 4, 5, 6, 7)
    assert slots_of(7, 3) == (0, 1, 2, 3, 4, 6, 7)


@given(st.integers(1, 40).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts))))
def test_each_expert_is_dealt_once_and_no_sharer_has_two_more_than_another(sizes: tuple[int, int]) -> None:
    experts, sharers = sizes
    dealt = dealt_experts(experts, sharers)
    assert [number for own in dealt for number in own] == list(range(experts)) and len(dealt) == sharers
    numbers = [len(own) for own in dealt]
    assert numbers == sorted(numbers, reverse=True) and numbers[0] - numbers[-1] <= 1


@given(st.integers(1, 40).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts))))
def test_slots_are_in_the_experts_order_and_on_their_own_workers(sizes: tuple[int, int]) -> None:
    experts, sharers = sizes
    slots, dealt = slots_of(experts, sharers), dealt_experts(experts, sharers)
    assert list(slots) == sorted(set(slots)) and len(slots) == experts
    each = len(dealt[0])
    assert [slot // each for slot in slots] == [sharer for sharer, own in enumerate(dealt) for _ in own]
    if experts % sharers == 0:
        assert slots == tuple(range(experts))


@pytest.mark.parametrize(("experts", "sharers"), [(3, 4), (4, 0), (0, 1)])
def test_a_sharer_without_experts(experts: int, sharers: int) -> None:
    with pytest.raises(ValueError, match=f"{sharers} can't share {experts} experts"):
        dealt_experts(experts, sharers)
