# SPDX-License-Identifier: Apache-2.0
"""Which nodes a coordinator that takes over counts as lost, by their leases in etcd."""

from __future__ import annotations

from megatron_resihp.control.transport.etcd.presence import RETURN_S, SETTLE_S, Gone

ALL = frozenset(range(4))


def test_a_node_that_ends_with_the_coordinator_is_gone_soon() -> None:
    gone = Gone(ALL, now=100.0)
    assert not gone.among({2}, 100.0), "it may be about to register again"
    assert gone.among({2}, 100.0 + SETTLE_S) == {2}
    assert not gone.among(set(), 103.0), "it was slow"


def test_half_of_the_nodes_may_end_with_the_coordinator() -> None:
    assert Gone({0, 1}, now=0.0).among({1}, SETTLE_S) == {1}


def test_nodes_that_are_not_awaited_do_not_count() -> None:
    gone = Gone({0, 1}, now=0.0)
    assert gone.among({1, 7, 8, 9}, SETTLE_S) == {1}


def test_where_most_nodes_are_cut_off_from_etcd_none_is_gone() -> None:
    gone = Gone(ALL, now=0.0)
    for lapsed in (ALL, {0, 1, 3}):
        assert not any(gone.among(lapsed, float(now)) for now in range(100))


def test_nodes_that_register_one_after_the_other_are_waited_for() -> None:
    """Etcd was out of the reach of all: the last ones have as long as such a node may need."""
    gone = Gone(ALL, now=0.0)
    assert not gone.among(ALL, 0.0)
    assert not gone.among({1, 2}, SETTLE_S)
    assert not gone.among({1}, RETURN_S - 0.5)
    assert gone.among({1}, RETURN_S) == {1}, "this one is not only slow"
