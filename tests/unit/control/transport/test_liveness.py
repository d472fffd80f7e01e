# SPDX-License-Identifier: Apache-2.0
"""Liveness connections: beats, silence, death at either end."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.control.transport.absence import Absence
from megatron_resihp.control.transport.liveness import FAILED, Finding, Heartbeats, Kind, LivenessConnection, Watcher

WAIT_S = 5.0


def test_nobody_is_silent_before_the_first_beat() -> None:
    beats = Heartbeats(timeout_s=10)
    assert beats.silent(1000) == {}
    beats.beat(3, 1001)
    assert beats.silent(1002) == {}


def test_silence_is_told_once_with_its_length() -> None:
    beats = Heartbeats(timeout_s=10)
    beats.beat(3, 0)
    beats.beat(4, 0)
    for now in (4, 8):
        beats.beat(4, now)
        assert beats.silent(now) == {}
    assert beats.silent(12) == {3: 12}
    assert beats.silent(13) == {}


def test_who_is_forgotten_is_not_silent() -> None:
    beats = Heartbeats(timeout_s=10)
    beats.beat(3, 0)
    beats.forget(3)
    beats.forget(4)
    assert beats.silent(4) == beats.silent(8) == beats.silent(12) == {}


def test_a_watcher_that_was_away_blames_nobody() -> None:
    beats = Heartbeats(timeout_s=10)
    beats.beat(3, 0)
    assert beats.silent(1) == {}
    assert beats.silent(3601) == {}, "the watcher slept for an hour"
    for now in (3604, 3608):
        assert beats.silent(now) == {}
    assert beats.silent(3612) == {3: 12}


@given(
    # What happens after so many seconds, to which peer; a watcher that looks after more than 5 s was away.
    st.lists(st.tuples(st.sampled_from(("beat", "forget", "look")), st.integers(0, 4), st.integers(0, 6)), max_size=60)
)
def test_who_is_silent_is_found_as_if_all_were_looked_at(happened: list[tuple[str, int, int]]) -> None:
    beats, absence, heard, now = Heartbeats(timeout_s=10), Absence(5.0), dict[int, float](), 0.0
    for what, name, passed in happened:
        now += passed
        if what == "beat":
            beats.beat(name, now)
            heard[name] = now
        elif what == "forget":
            beats.forget(name)
            heard.pop(name, None)
        else:
            away = absence.before(now)
            heard = {each: min(at + away, now) for each, at in heard.items()}
            silent = {each: now - at for each, at in heard.items() if now - at > 10}
            heard = {each: at for each, at in heard.items() if each not in silent}
            assert beats.silent(now) == silent
            assert set(beats.names) == set(heard)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    watcher = Watcher(timeout_s=10)
    yield watcher
    watcher.close()


def look(watcher: Watcher, now: float = 0.0) -> list[Finding]:
    """As an agent's loop does: wait for something to read, then look."""
    readable, _, _ = select.select([watcher], [], [], WAIT_S)
    assert readable, "nothing came"
    return watcher.look(now)


def test_beats_go_out_at_once_and_each_period(ends: tuple[socket.socket, socket.socket]) -> None:
    liveness = LivenessConnection(ends[0], 0.01, on_lost=lambda: None)
    ends[1].settimeout(WAIT_S)
    assert [ends[1].recv(1) for _ in range(5)] == [b"."] * 5
    liveness.close()


def test_the_holder_hears_the_end(ends: tuple[socket.socket, socket.socket]) -> None:
    lost = threading.Event()
    LivenessConnection(ends[0], 60.0, on_lost=lost.set)
    ends[1].close()
    assert lost.wait(WAIT_S)


def test_a_holder_that_leaves_in_order_hears_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    lost = threading.Event()
    LivenessConnection(ends[0], 60.0, on_lost=lost.set).close()
    assert not lost.is_set()


def test_a_watcher_that_does_not_read_does_not_block_the_holder(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    liveness = LivenessConnection(ends[0], 60.0, on_lost=lambda: None)
    for _ in range(10_000):
        liveness.last_word(FAILED)
    liveness.close()


def test_a_death_is_told(watcher: Watcher, ends: tuple[socket.socket, socket.socket]) -> None:
    watcher.add(3, ends[0])
    ends[1].close()
    started = time.monotonic()
    assert look(watcher) == [Finding(Kind.LOST, 3)]
    assert time.monotonic() - started < 0.5
    assert watcher.names == set()


def test_silence_and_last_words_are_told(watcher: Watcher, ends: tuple[socket.socket, socket.socket]) -> None:
    watcher.add(3, ends[0])
    ends[1].send(b"..")
    assert look(watcher, 0) == []
    assert watcher.look(4) == watcher.look(8) == []
    assert watcher.look(11) == [Finding(Kind.SILENT, 3, 11)]
    ends[1].send(b".!")
    assert look(watcher, 12) == [Finding(Kind.FAILED, 3)]


def test_who_shows_no_life_after_a_notice_is_told(ends: tuple[socket.socket, socket.socket]) -> None:
    watcher = Watcher(timeout_s=100, notice_s=10)
    watcher.add(3, ends[0])
    watcher.expect(6, 0)
    assert watcher.look(4) == watcher.look(8) == watcher.look(12) == [], "it has never shown any"
    ends[1].send(b".")
    look(watcher, 13)
    watcher.expect(7, 17)
    assert watcher.look(17) == watcher.look(21) == watcher.look(25) == []
    assert watcher.look(28) == [Finding(Kind.DEAF, 3, 11, epoch=7)]
    assert watcher.look(32) == [], "told once"
    assert watcher.names == {3}, "the coordinator decides what follows"
    watcher.expect(8, 32)
    watcher.look(36)
    ends[1].send(b".")
    assert look(watcher, 40) == watcher.look(44) == watcher.look(48) == [], "it beats"
    watcher.close()


def test_a_watcher_that_was_away_takes_nobody_for_deaf(ends: tuple[socket.socket, socket.socket]) -> None:
    watcher = Watcher(timeout_s=100, notice_s=10)
    watcher.add(3, ends[0])
    ends[1].send(b".")
    look(watcher, 0)
    watcher.expect(7, 1)
    assert watcher.look(13) == watcher.look(17) == watcher.look(21) == []
    assert watcher.look(24) == [Finding(Kind.DEAF, 3, 11, epoch=7)]
    watcher.close()


def test_beats_that_wait_to_be_read_count(watcher: Watcher, ends: tuple[socket.socket, socket.socket]) -> None:
    watcher.add(3, ends[0])
    ends[1].send(b".")
    look(watcher, 0)
    ends[1].send(b".")
    assert look(watcher, 100) == []


def test_beats_that_are_read_now_and_then_wake_nobody_and_a_death_does(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    watcher = Watcher(timeout_s=10, period_s=3)
    watcher.add(3, ends[0])
    watcher.look(0)
    ends[1].send(b".!")
    assert select.select([watcher], [], [], 0.0) == ([], [], [])
    assert watcher.look(2) == []
    assert watcher.look(3) == [Finding(Kind.FAILED, 3)]
    assert watcher.look(8) == watcher.look(12) == []
    assert watcher.look(14) == [Finding(Kind.SILENT, 3, 11)], "it was heard at 3"
    ends[1].send(b".")
    ends[1].close()
    assert look(watcher, 15) == [], "what it has sent before comes first"
    assert look(watcher, 15) == [Finding(Kind.LOST, 3)]
    watcher.close()


def test_who_is_cut_hears_it(watcher: Watcher, ends: tuple[socket.socket, socket.socket]) -> None:
    lost = threading.Event()
    LivenessConnection(ends[1], 60.0, on_lost=lost.set)
    watcher.add(3, ends[0])
    watcher.cut(3)
    watcher.cut(3)
    assert lost.wait(WAIT_S)
