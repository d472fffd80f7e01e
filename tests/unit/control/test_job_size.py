# SPDX-License-Identifier: Apache-2.0
"""What --nnodes says, and what follows from it."""

from __future__ import annotations

import pytest

from megatron_resihp.control.job_size import JobSize, parse_nodes


@pytest.mark.parametrize(("text", "nodes"), [("1", (1, 0)), ("4", (4, 0)), ("2:2", (2, 0)), ("1:3", (1, 2))])
def test_how_many_nodes_begin_and_how_many_may_join(text: str, nodes: tuple[int, int]) -> None:
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "0", "-1", "0:2", "2:1", "two", "1:", ":2", "1:2:3", "1.5"])
def test_what_is_no_number_of_nodes(text: str) -> None:
    with pytest.raises(ValueError, match="; give "):
        parse_nodes(text)


def test_places_of_late_nodes_follow_those_of_the_start() -> None:
    size = JobSize(2, 4, late_nodes=1)
    assert (size.workers, size.slots, size.most_nodes) == (8, 12, 3)
    assert list(size.slots_on(2)) == [8, 9, 10, 11]


def test_it_is_said_as_it_was_given() -> None:
    assert str(JobSize(2, 4, late_nodes=1)) == "--nnodes 2:3 --nproc-per-node 4"
    assert str(JobSize(2, 4)) == "--nnodes 2 --nproc-per-node 4"
