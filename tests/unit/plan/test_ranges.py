# SPDX-License-Identifier: Apache-2.0
"""Ranges of flattened parameters: every wanted element comes once, from somebody who holds it."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.plan.ranges import Range, RangeMove, plan_range_moves

SIZE = 24
NAMES = ("a", "b")


@st.composite
def cut(draw: st.DrawFn, workers: range) -> dict[int, list[Range]]:
    """Each parameter cut anywhere and dealt out to the workers in order, as buckets are."""
    found: dict[int, list[Range]] = {worker: [] for worker in workers}
    for name in NAMES:
        count = len(workers) - 1
        ends = [0, *sorted(draw(st.lists(st.integers(0, SIZE), min_size=count, max_size=count))), SIZE]
        for worker, (start, end) in zip(workers, pairwise(ends), strict=True):
            if start < end:
                found[worker].append(Range(name, start, end))
    return found


def elements(ranges: list[Range] | tuple[Range, ...]) -> list[tuple[str, int]]:
    return [(each.name, index) for each in ranges for index in range(each.start, each.end)]


@given(cut(range(4)), cut(range(1, 4)), st.sets(st.integers(0, 3)))
def test_all_that_is_held_arrives_once_and_the_rest_is_named(
    held: dict[int, list[Range]], wanted: dict[int, list[Range]], dead: set[int]
) -> None:
    holdings = {worker: ranges for worker, ranges in held.items() if worker not in dead}
    moves, missing = plan_range_moves(holdings, wanted)
    for move in moves:
        for piece in move.ranges:
            assert any(piece.common(own) == piece for own in holdings[move.source]), "nobody gives what it lacks"
            assert any(piece.common(own) == piece for own in wanted[move.target])
    for worker, ranges in wanted.items():
        got = [each for move in moves if move.target == worker for each in elements(move.ranges)]
        assert sorted(got) == sorted(set(elements(ranges)) - set(elements(missing)))
    there = {each for ranges in holdings.values() for each in elements(ranges)}
    assert set(elements(missing)) == {(name, index) for name in NAMES for index in range(SIZE)} - there


def test_who_has_it_keeps_it_and_others_share_the_sending() -> None:
    whole = [Range("a", 0, 4), Range("b", 0, 4)]
    moves, missing = plan_range_moves({0: whole, 1: whole, 2: []}, {1: whole[:1], 2: whole})
    assert moves == [RangeMove(0, 2, (whole[0],)), RangeMove(1, 1, (whole[0],)), RangeMove(1, 2, (whole[1],))]
    assert not missing
