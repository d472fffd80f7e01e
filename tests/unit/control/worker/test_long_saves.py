# SPDX-License-Identifier: Apache-2.0
"""A worker that writes a checkpoint while the epoch breaks asks to be waited for, and no longer than it may."""

from __future__ import annotations

import queue
import threading

import pytest

from megatron_resihp.control.worker import long_saves
from megatron_resihp.control.worker.heard import Heard
from megatron_resihp.control.worker.long_saves import waited_for
from megatron_resihp.protocol.messages import Message, StillSaving
from megatron_resihp.protocol.notices import EpochIsBroken

BOUND_S = 30.0


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_saves, "LOOK_S", 0.01)
    monkeypatch.setattr(long_saves, "EACH_S", 0.01)


def watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "resihp-save"]


def test_it_asks_again_and_again_until_it_has_written(capsys: pytest.CaptureFixture[str]) -> None:
    told = queue.Queue[Message]()
    heard = Heard(2, lambda: None, 3)
    with waited_for(heard, told.put, 2, BOUND_S):
        assert told.empty()
        heard.hear(EpochIsBroken(3, "worker 0 died"))
        for _ in range(3):
            assert told.get(timeout=BOUND_S) == StillSaving(2, 3)
        (watch,) = watches()
    watch.join(BOUND_S)
    assert not watch.is_alive()
    assert capsys.readouterr().err == "resihp: worker 2 is still writing a checkpoint; the others wait for it\n"


def test_a_save_of_an_epoch_that_goes_on_asks_for_nothing() -> None:
    told = queue.Queue[Message]()
    heard = Heard(2, lambda: None, 3)
    heard.hear(EpochIsBroken(2, "worker 0 died"))
    with waited_for(heard, told.put, 2, BOUND_S):
        (watch,) = watches()
        watch.join(0.2)
        assert watch.is_alive()
    watch.join(BOUND_S)
    assert told.empty()


def test_others_wait_no_longer_than_they_may() -> None:
    told = queue.Queue[Message]()
    heard = Heard(2, lambda: None, 3)
    heard.hear(EpochIsBroken(3, "worker 0 died"))
    with waited_for(heard, told.put, 2, 0.0):
        for watch in watches():
            watch.join(BOUND_S)
            assert not watch.is_alive()
    assert told.empty()
