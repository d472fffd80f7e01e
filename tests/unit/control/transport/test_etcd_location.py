# SPDX-License-Identifier: Apache-2.0
"""Where in etcd a job keeps its decisions, as people write it."""

from __future__ import annotations

import re

import pytest

from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.location import Location, parse_location


@pytest.mark.parametrize(
    "text", ["etcd://a:2379/run", "etcd://a:2379,b:1,[::1]:2379/job-7.x_1", "etcd://a:2379/run?lease=5"]
)
def test_is_written_as_it_was_read(text: str) -> None:
    assert str(parse_location(text)) == text


def test_has_members_and_a_name() -> None:
    assert parse_location("etcd://a:1,[::1]:2/7") == Location((Address("a", 1), Address("::1", 2)), "7")
    assert parse_location("etcd://a:1/7?lease=3") == Location((Address("a", 1),), "7", lease_s=3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("host:2379", "'host:2379' is not etcd://HOST:PORT,HOST:PORT/RUN"),
        ("etcd://host:2379", "is not etcd://"),
        ("etcd:///run", "is not etcd://"),
        ("etcd://host/run", "'host' is not host:port"),
        ("etcd://host:2379,/run", "'' is not host:port"),
        ("etcd://::1:2379/run", "write an IPv6 host in brackets"),
        ("etcd://host:2379/", "names no run"),
        ("etcd://host:2379/a/log", "names no run"),
        ("etcd://host:2379/-a", "names no run"),
        ("etcd://host:2379/" + 201 * "a", "names no run"),
        ("etcd://host:2379,host:2379/run", "names a member twice"),
        ("etcd://host:2379/run?lease=1", "a lease that is not 2 to 300 whole seconds"),
        ("etcd://host:2379/run?lease=1.5", "a lease that is not 2 to 300 whole seconds"),
        ("etcd://host:2379/run?lease=", "a lease that is not 2 to 300 whole seconds"),
        ("etcd://host:2379/run?least=5", "names no run"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_location(text)


def test_what_earlier_runs_have_left_is_all_but_this_one_s() -> None:
    """Nodes of this run may hold keys before its first entry is there."""
    place, other = parse_location("etcd://a:1/run"), parse_location("etcd://a:1/run-2")
    spans = place.before(7, "abc")

    def is_deleted(key: str) -> bool:
        return any(first <= key < end for first, end in spans)

    runs = ("0", "ab", "abc-", "abc0", "abcd", "b", "zz")
    left = [place.entry(1), place.entry(6), place.piece(6, 9), *(f"{place.known(run)}3" for run in runs)]
    kept = [place.leader, place.entry(7), place.piece(7, 0), f"{place.present('ab')}3"]
    kept += [f"{place.known('abc')}{name}" for name in ("-1", "0", "15")]
    assert all(map(is_deleted, left)) and not any(map(is_deleted, kept))
    assert not any(is_deleted(key) for key in (other.entry(1), f"{other.known('ab')}3"))


def test_keys_are_in_the_order_of_entries_and_of_one_run_only() -> None:
    """Of runs whose names begin alike, too."""
    run, other = parse_location("etcd://a:1/run"), parse_location("etcd://a:1/run-2")
    numbers = [1, 2, 10, 999_999_999]
    keys = [run.entry(number) for number in numbers]
    first, end = run.entries
    assert keys == sorted(keys) and first < keys[0] and keys[-1] < end
    assert [run.number_of(key) for key in keys] == numbers
    for key in (run.leader, run.piece(1, 0), other.entry(1), f"{first}1", f"{first}00000000x"):
        assert run.number_of(key) is None
        assert not first <= key < end or key.startswith(first)
