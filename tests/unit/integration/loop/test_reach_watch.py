# SPDX-License-Identifier: Apache-2.0
"""Whom a worker looks for where its wait for the others lasts long, and when it says that it can't reach them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megatron_resihp.integration.loop.reach_watch import LONG_S, LOOK_S, ReachWatch
from megatron_resihp.protocol.messages import CommunicationFailed, Message


class Control:
    """Answers what it is told to, one list of silent workers a look."""

    def __init__(self, *silent: Sequence[int] | OSError) -> None:
        self.worker = 1
        self.epoch = 4
        self.is_broken = False
        self.looks = 0
        self.known: frozenset[int] = frozenset()
        self.told: list[Any] = []
        self._silent = list(silent)
        self.members = (0, 1, 2, 3, 4)
        self.heard = self.doors = self

    def broken(self) -> bool:
        return self.is_broken

    def one_of_each_node(self, members: Sequence[int]) -> list[int]:
        assert members == self.members
        return [2, 4]

    def silent(self, workers: Sequence[int]) -> Sequence[int]:
        assert workers == [2, 4]
        self.looks += 1
        # Worker 4 is still starting at the first look.
        self.known = frozenset(workers if self.looks > 1 else workers[:1])
        answer = self._silent.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def tell(self, message: Message) -> None:
        self.told.append(message)


def watched(control: Any, waited: Callable[[float], float], looks: int) -> list[Any]:
    watch = ReachWatch(waited, control)
    for number in range(looks):
        watch.look(number * LOOK_S)
    told: list[Any] = control.told
    return told


LOST = CommunicationFailed(1, 4, "worker 4 can't be reached")


@pytest.mark.parametrize(
    ("silent", "told"),
    [(([4], [4]), []), (([4], [2, 4], [4]), [LOST]), (([4], [4], [], [4]), []), (([2], [4], [2]), [])],
    ids=["not long enough", "long enough", "it came back", "never the same"],
)
def test_who_is_silent_again_and_again_is_told(silent: Sequence[Sequence[int]], told: list[Any]) -> None:
    assert watched(Control(*silent), lambda now: LONG_S, len(silent)) == told


def test_without_a_long_wait_others_are_looked_for_until_it_is_known_who_can_be_reached() -> None:
    control = Control([2], [])
    assert watched(control, lambda now: LONG_S - 0.1, 5) == [] and control.looks == 2


def test_a_look_that_fails_counts_nothing_and_others_follow(capsys: pytest.CaptureFixture[str]) -> None:
    full = OSError(errno.EMFILE, "Too many open files")
    assert watched(Control([4], full, [4], full, [4]), lambda now: LONG_S, 5) == [LOST]
    assert capsys.readouterr().err.count("Too many open files") == 1, "it is said once"


def test_in_a_broken_epoch_nobody_is_looked_for() -> None:
    control = Control()
    control.is_broken = True
    assert watched(control, lambda now: LONG_S, 5) == [] and control.looks == 0
