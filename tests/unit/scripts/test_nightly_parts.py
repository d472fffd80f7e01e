# SPDX-License-Identifier: Apache-2.0
"""How the tests of a night are cut into parts."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="session")
def parts(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("nightly_parts")


@given(lengths=st.lists(st.floats(0.1, 60.0), max_size=40), count=st.integers(1, 8))
def test_each_test_is_in_one_part_and_no_part_is_much_longer_than_its_share(
    parts: ModuleType, lengths: list[float], count: int
) -> None:
    ranges = parts.cut(lengths, count)
    assert len(ranges) == count and [place for each in ranges for place in each] == list(range(len(lengths)))
    longest = max(sum(lengths[place] for place in each) for each in ranges)
    assert longest <= sum(lengths) / count + max(lengths, default=0.0) + 1e-6


def test_the_longest_part_is_as_short_as_can_be(parts: ModuleType) -> None:
    assert parts.cut([5.0, 1.0, 1.0, 5.0], 2) == [range(0, 2), range(2, 4)]
    assert parts.cut([9.0, 1.0, 1.0, 1.0], 2) == [range(0, 1), range(1, 4)]


def test_who_was_never_timed_counts_as_those_like_it_or_as_the_average(parts: ModuleType) -> None:
    assert parts.lengths_of(["a", "b", "c"], {"a": 2.0, "b": 6.0}) == [2.0, 6.0, 4.0]
    known = {"x.py::a[1]": 1.0, "x.py::a": 2.0, "x.py": 6.0}
    assert parts.lengths_of(["x.py::a[1]", "x.py::a[2]", "x.py::b[1]", "y.py::a"], known) == [1.0, 2.0, 6.0, 3.0]


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0"])
def test_what_is_no_part(parts: ModuleType, text: str) -> None:
    with pytest.raises(pytest.UsageError, match="give I/N"):
        parts._part(text)
